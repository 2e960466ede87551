"""The density of a fit as a field: its maps and figures, and its scores beside the true one."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.config import ComputeConfig, Config, DataConfig
from dustmap.engines import MIB
from dustmap.errors import UserError
from dustmap.gp import NestedGrids, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.inference import LogNormalPosterior, PathwisePosterior, scores
from dustmap.linalg import AbstractWorld, AdaptiveBatch, Progress, in_one_part
from dustmap.runs import reports
from dustmap.runs._machine import ALONE
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._grids import finer_of, nodes_of
from dustmap.runs.stars._model import draw_seed
from dustmap.sky import DustMap, Provenance, StarTable, figures, maps
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity, write_map
from dustmap.sky.maps._field import plane_points
from dustmap.sky.maps._quantities import DATA_DOMINATED
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from dustmap.sky.view import MOST_BYTES, SAMPLES, page_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

#: Nodes that are compared with the truth at most, drawn at random beyond.
MOST_NODES = 500_000
#: Nodes, drawn at random, whose coverage is reported.
_PLACES = 2_000
#: Rows of a table of the reach of a catalog.
_ROWS = 6
#: Planes of the picture of many, at most.
_SLICES = 9
#: Sine of the least angle between a sight line and a face of the box that the Sun is on.
_GRAZING = 0.0175
#: Quantities of the posterior that are compared with the truth.
_COMPARED = ("mean", "std", "p16", "p84")
#: Draws a figure; gives None where the run has nothing to show in it.
Draw: TypeAlias = "Callable[[Material], Figure | None]"
#: Voxels of a map that is made for pictures alone.
_DRAWN = 2**22
#: What helps where even thin slabs are too large.
_ADVICE = "set a smaller --memory, export.samples or fewer export.quantities"


def field_of(
    config: Config, fit: StarFit, grid: RegularGrid, system: ExtinctionSystem, device: torch.device
) -> AbstractDensityField:
    """The density of a fit, by what its posterior is; grid: the run's own, whose nodes span the
    box."""
    posterior, prior_std = fit.posterior, fit.hyperparameters.std
    if isinstance(posterior, LogNormalPosterior):
        nodes, seed = nodes_of(config.grid), draw_seed(config)
        if isinstance(nodes, NestedGrids):
            return maps.NestedField(posterior, nodes, system, prior_std, seed, grid)
        return maps.NodeField(posterior, nodes, system, prior_std, seed, shown=grid)
    # Every posterior but this one draws anew for each set of places.
    stored, covered = 0, None
    if isinstance(posterior, PathwisePosterior):
        stored = config.fit.samples
        if posterior.explained is not None:
            covered = maps.sure_coverage(posterior.explained, len(posterior.deviations))
    nodes = nodes_of(config.grid)
    own = None if fit.at_nodes is None else maps.OwnNodes(nodes, fit.at_nodes, covered)
    return maps.PosteriorField(
        posterior,
        system,
        grid.lower,
        grid.upper,
        prior_std,
        stored_samples=stored,
        own=own,
        device=device,
        seed=draw_seed(config),
    )


def truth_of(data: DataConfig, system: ExtinctionSystem) -> DustMap | None:
    """The density that the stars were simulated from, where one is named; of their system."""
    truth = DustMap.open(data.truth) if data.truth else None
    if truth is not None and truth.system != system:
        raise UserError(
            f"{data.truth}: this truth is in {truth.system} and the stars are in {system}; set "
            "data.system to the truth's, or leave data.truth out"
        )
    return truth


def reach_of(data: DataConfig, stars: StarTable) -> maps.SurveyReach | None:
    """The dust through which the stars of a catalog are seen; None without a magnitude limit."""
    if data.magnitude_limit == 0.0:
        return None
    dimming = conversion(stars.system, system_named(data.magnitude_band))
    return maps.SurveyReach.of(stars, data.magnitude_limit, dimming)


def coverage_sections(
    field: AbstractDensityField, grid: RegularGrid, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Say for the report how much of the box the data know, and what a magnitude limit hides."""
    count = min(_PLACES, grid.size)
    some = np.random.default_rng(0).choice(grid.size, count, replace=False, shuffle=False)
    index = np.stack(np.unravel_index(some, grid.shape), axis=-1)
    places = PointValues(torch.from_numpy(grid.lower + grid.spacing * index).to(device))
    covered = field.evaluate(places, MapRequest((Quantity.COVERAGE,)))["coverage"]
    share = float((covered > DATA_DOMINATED).mean())
    log.info(
        "coverage: the data, and not the prior, say what %.3g %% of the box holds", 100 * share
    )
    section = {"part_of_the_box_known_by_data": share, "median": float(np.median(covered))}
    return {"coverage": section, **_hidden_section(field, grid)}


def _hidden_section(field: AbstractDensityField, grid: RegularGrid) -> dict[str, dict[str, Any]]:
    """Count nodes and directions that a magnitude limit hides, beside the reach of the catalog at
    some distances; nothing of other fields."""
    if not isinstance(field, maps.LimitedField):
        return {}
    hidden, reach = field.hidden_nodes(grid), field.reach
    if hidden > 0:
        log.warning(
            "the magnitude limit hides dust at %d of %d nodes: their coverage is 0",
            hidden,
            grid.size,
        )
    some = np.unique(np.linspace(0, len(reach.distance) - 1, _ROWS).astype(np.int64))
    rows = zip(reach.distance[some].tolist(), reach.extinction[some].tolist(), strict=True)
    section = {
        "nodes_hidden": hidden,
        "part_of_the_nodes_hidden": hidden / grid.size,
        "part_of_the_sky_hidden": float(np.isfinite(field.horizon.distance).mean()),
        "reach": [{"distance_pc": d, "extinction_mag": a} for d, a in rows],
    }
    return {"magnitude_limit": section}


def request_of(config: Config, stored: int) -> MapRequest:
    """Return the request of [export], with no more samples than are stored."""
    samples = min(config.export.samples, stored)
    names = (*config.export.quantities, *(("samples",) if samples else ()))
    return MapRequest.named(names, samples)


def export_run(
    directory: RunDirectory,
    config: Config,
    field: AbstractDensityField,
    grid: RegularGrid,
    provenance: Provenance,
    progress: Progress,
    world: AbstractWorld,
) -> dict[str, Any]:
    """Write map.*, each by all ranks together; return the names of what was written."""
    request = request_of(config, field.n_samples)
    if request.samples < config.export.samples:
        words = "samples in the map: all %d of the posterior (export.samples asks for %d)"
        log.info(words, request.samples, config.export.samples)
    outputs: dict[str, Any] = {}
    for name in config.export.formats:
        path = directory.path / f"map.{name}"
        outputs[name] = path.name
        # The first rank looks for all: others may not see at once what it has written.
        if world.texts("there" if path.exists() else "")[0]:
            log.info("%s was written before the run was interrupted", path.name)
            continue
        watched = reports.WatchedField(field, f"writing map.{name}", progress)
        slabs = maps.Slabs.of_field(watched, grid, request, finer_of(config.grid))
        write_in_slabs(path, slabs, provenance, False, config.compute, name, world)
    outputs["samples_in_the_map"] = request.samples
    return outputs


def write_in_slabs(
    path: Path,
    slabs: maps.Slabs,
    provenance: Provenance,
    overwrite: bool,
    compute: ComputeConfig,
    form: str,
    world: AbstractWorld = ALONE,
) -> None:
    """Write a map in slabs that the memory holds; anew in smaller ones where it runs out.

    Parameters
    ----------
    path, form : the file, and "zarr" or "fits"
    slabs, provenance : what is written
    overwrite : replace a map that is there
    compute : memory that slabs may take
    world : ranks that write together, and begin anew together
    """
    mebibytes = max(1, maps.slab_memory(compute.memory_bytes) // MIB)
    sizes = AdaptiveBatch(f"MiB of slabs of {path.name}", mebibytes, _ADVICE)
    sizes.attempt(
        lambda size: write_map(path, slabs, provenance, overwrite, size * MIB, world, form)
    )


def drawn_map(
    directory: RunDirectory, config: Config, field: AbstractDensityField, grid: RegularGrid
) -> DustMap:
    """Return a map with mean and standard deviation on one grid: one that was written, or one in
    memory."""
    wanted = (Quantity.MEAN, Quantity.STD)
    if config.export.formats:
        written = DustMap.open(directory.path / f"map.{config.export.formats[0]}")
        if set(wanted) <= set(written.available):
            return written.on_one_grid()
    finer = (finer.spacing for finer in finer_of(config.grid))
    grid = maps.finest_grid(grid, finer, _DRAWN)
    return DustMap.from_field(field, grid, MapRequest(wanted))


def truth_scores(
    field: AbstractDensityField, grid: RegularGrid, truth: DustMap, seed: int, progress: Progress
) -> dict[str, Any]:
    """Scores of the true density at the nodes inside the truth's box, in all and by distance.

    coverage68 counts nodes between the 16th and the 84th percentile of the posterior.
    """
    watched = reports.WatchedField(field, "nodes compared with the truth", progress)
    nodes = _at_nodes(watched, grid, truth, seed)
    true, mean, std = nodes["true"], nodes["mean"], nodes["std"]
    if len(true) == 0:
        raise UserError("data.truth: its box has no node of the run's grid inside")
    inside = (nodes["p16"] <= true) & (true <= nodes["p84"])
    nodewise = scores(*(torch.from_numpy(v) for v in (true, mean, std**2)))
    return reports.labelled(nodewise, reports.NOISE_FREE) | {
        "coverage68": float(inside.mean()),
        "correlation": reports.correlation(mean, true),
        "by_distance": reports.by_distance(nodes["distance"], true, mean, std, inside),
    }


def _at_nodes(
    field: AbstractDensityField, grid: RegularGrid, truth: DustMap, seed: int
) -> dict[str, NDArray[np.float64]]:
    """Truth and posterior (K,) at nodes inside the truth's box, slab by slab."""
    share, generator = MOST_NODES / grid.size, np.random.default_rng(seed)
    slabs = []
    for slab in field.planes(grid, MapRequest.named(_COMPARED)):
        points = plane_points(grid, slab.start, slab.stop).numpy()
        with maps.muted_reports():  # the truth may be smaller than the box
            true = truth.mean_at(points)
        chosen = np.isfinite(true)
        if share < 1.0:
            chosen &= generator.random(len(true)) < share
        columns = {"true": true, "distance": np.linalg.norm(points, axis=1)}
        columns |= {name: slab.arrays[name].reshape(-1) for name in _COMPARED}
        slabs.append({name: values[chosen].astype(float) for name, values in columns.items()})
    return {name: np.concatenate([slab[name] for slab in slabs]) for name in slabs[0]}


@final
@dataclass(frozen=True, eq=False)
class Material:
    """Material of figures. density: map of the fit; posterior: the same with all that it says of
    places between voxels, on `device`; held_out: None where no stars were; made: of the run."""

    config: Config
    fit: StarFit
    density: DustMap
    posterior: AbstractDensityField
    device: torch.device
    truth: DustMap | None
    stars: StarTable
    held_out: reports.Predictions | None
    made: Provenance


def draw_figures(
    material: Material, directory: RunDirectory, progress: Progress
) -> tuple[reports.Picture, ...]:
    """Draw those of export.figures that this run has, and write the page of the map."""
    pictures, names = [], material.config.export.figures
    kinds = ("png", "pdf") if material.config.export.pdf else ("png",)
    for i, name in enumerate(names):
        progress("drawing figures", i, len(names))
        path, (caption, draw) = f"plots/{name}.png", _FIGURES[name]
        files = [directory.path / f"plots/{name}.{kind}" for kind in kinds]
        # Pictures are written whole: one that is there was drawn before the run was interrupted.
        missing = [file for file in files if not file.exists()]
        if missing:
            figure = draw(material)
            if figure is None:
                continue
            for file in missing:
                figures.save_figure(figure, file, history=material.made.history())
        pictures.append(reports.Picture(path, caption))
    if names:
        progress("drawing figures", len(names), len(names))
        with in_one_part(progress, "page of the map"):
            _write_page(material, directory.path / reports.VIEW)
    return tuple(pictures)


def _write_page(material: Material, path: Path) -> None:
    """Write the page that turns and cuts the map, unless it is there."""
    if not path.exists():
        title = f"Dust density from {', '.join(Path(name).name for name in material.made.catalog)}"
        words = {"title": title, "history": material.made.history()}
        page_of(material.density, (), np.empty((0, 3)), SAMPLES, MOST_BYTES, words).save(path)


def _slice(material: Material) -> "Figure":
    level = material.config.grid.center[2]
    return figures.slice_figure(material.density, figures.Axis.Z, level, material.truth)


def _slices(material: Material) -> "Figure":
    """Draw planes of nodes from the bottom to the top of the box, all equally far apart."""
    grid = material.density.grid
    planes = _even(grid.shape[2])
    levels = (grid.lower[2] + planes * grid.spacing[2]).tolist()
    return figures.slices_figure(material.density, figures.Axis.Z, levels)


def _even(nodes: int) -> NDArray[np.int64]:
    """Choose at most `_SLICES` nodes of an axis, equally far apart and from its ends.

    Examples
    --------
    >>> _even(16)
    array([ 0,  2,  4,  6,  8, 10, 12, 14])
    >>> _even(21)
    array([ 1,  4,  7, 10, 13, 16, 19])
    """
    step = -(-nodes // _SLICES)
    return np.arange((nodes - 1) % step // 2, nodes, step)


def _projection(material: Material) -> "Figure":
    return figures.projection_figure(material.density, figures.Axis.Z, material.truth)


def _shell(material: Material) -> "Figure | None":
    """Draw halfway to the nearest face: a sphere that the map holds whole; none without the Sun."""
    grid = material.density.grid
    radius = 0.5 * min(*(-low for low in grid.lower), *grid.upper)
    if radius <= 0:
        return None
    posterior, device = material.posterior, material.device
    return figures.shell_figure(material.density, radius, None, material.truth, posterior, device)


def _line(material: Material) -> "Figure | None":
    """Draw the sight line towards the most stars of the map; none if the Sun is not in it.

    Where it is on a face, stars behind that do not count, nor those within a degree of it.
    """
    grid, stars = material.density.grid, material.stars
    if not grid.contains(torch.zeros(1, 3, dtype=torch.float64)).item():
        return None
    places = stars.positions()
    ahead = places / stars.distance[:, None]
    away = np.array(grid.lower) == 0.0, np.array(grid.upper) == 0.0
    seen = ~((away[0] & (ahead < _GRAZING)) | (away[1] & (ahead > -_GRAZING))).any(1)
    seen &= grid.contains(torch.from_numpy(places)).numpy()
    if not seen.any():
        return None
    l, b = figures.busiest_direction(stars[seen])
    profile = figures.profile_of_map(material.density, l, b, material.truth)
    return figures.line_of_sight_figure(profile, of_no_group(material.stars, material.fit))


def of_no_group(stars: StarTable, fit: StarFit) -> StarTable:
    """The stars with extinctions y' = (y − z_g) / s_g as those of the map are, by the zero points
    and scales that the fit has of their groups; errors e / s_g."""
    posterior = fit.posterior
    if stars.groups is None or not isinstance(posterior, PathwisePosterior | LogNormalPosterior):
        return stars
    points, scales = posterior.zero_points(), posterior.scales()
    if points is None:
        return stars
    known = (stars.groups >= 0) & (stars.groups < len(points.mean))
    group = np.where(known, stars.groups, 0)
    zero = np.where(known, points.mean.cpu().numpy()[group], 0.0)
    gain = 1.0 if scales is None else np.where(known, 1.0 + scales.mean.cpu().numpy()[group], 1.0)
    y, error = (stars.extinction - zero) / gain, stars.extinction_error / gain
    return replace(stars, extinction=y, extinction_error=error)


def _of_held_out(material: Material, name: str) -> "Figure | None":
    """Draw held-out stars beside what is predicted of them, noise included."""
    if material.held_out is None:
        return None
    compared = reports.comparison_of(material.stars, material.held_out)
    return figures.held_out_figure(name, compared)


#: The caption of a figure, and how it is drawn, by its name in export.figures.
_FIGURES: Mapping[str, tuple[str, Draw]] = {
    "slice": ("Dust density and its uncertainty in the middle of the box", _slice),
    "above": ("Extinction through the whole height of the map, from above", _projection),
    "slices": ("Dust density on planes from the bottom to the top of the box", _slices),
    "shell": ("Dust density on a sphere around the Sun", _shell),
    "line": ("Density and extinction towards the most stars", _line),
    **{
        name: (f"Held-out stars: {what}", partial(_of_held_out, name=name))
        for name, what in (
            ("extinctions", "measured and predicted extinctions"),
            ("residuals", "standardised residuals of measurements on the sky"),
            ("calibration", "calibration of predicted measurements"),
        )
    },
}
