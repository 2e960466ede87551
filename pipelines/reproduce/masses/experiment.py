"""Masses of dense clouds in maps beside the true ones, against resolution, stars and noise.

Maps of the same clouds differ: those of Zucker et al. (2021, ApJ 919, 35, table 3) have 1.0 to 1.7
times the mass in two dimensions that they have in a map of three, 3 and 14 times at its far end,
and two to seven times the column. Here the truth is known: balls of dust of normal profile, 1, 3
and 10 mag thick, in turbulence and bubbles that no prior of ours has drawn, 80 to 180 pc from the
Sun. One thing is changed at a time of a run that leaves all keys but box and spacing as they come.

Of every cloud, map over truth:

    mass     the dust within 2.5 σ of its centre
    tube     that within 2.5 σ of its line of sight, from 50 pc in front of it to 50 pc behind: what
             distances smear along the line of sight is still there
    column   the extinction through its middle, 3 σ in front of it to 3 σ behind
"""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.runs import Stage, StarMap, execute_run, open_star_map, prepare
from dustmap.sky.maps import MapRequest, Quantity
from dustmap.sky.simulation import (
    AbstractDust,
    Measurements,
    Population,
    SimulatedSky,
    SkyModel,
    StructuredDust,
    simulate,
)
from dustmap.sky.simulation._sky import sky_table
from dustmap.tables import write_table
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._figures import COLOURS, label, panels

_log = logging.getLogger(__name__)

Array = NDArray[np.float64]

#: Radii σ in pc and extinctions through the middle in mag, each with each; distances in pc.
RADII, DEPTHS, DISTANCES = (4.0, 8.0), (1.0, 3.0, 10.0), (80.0, 180.0)
#: Within so many σ is a cloud's mass, and its column; pc of the tube on both sides.
WITHIN, THROUGH, SIDE = 2.5, 3.0, 50.0
#: Clouds of each kind, degrees between two of them at least, and pc from the faces.
_EACH, _APART, _FACE = 3, 20.0, 75.0
#: Steps of sums in σ, those across the tube and along it in pc.
_STEP, _ALONG = 0.25, 2.0
_BASE = "as it comes"
#: Mass that maps of complete catalogs are to have of the true one, median of the clouds, and the
#: part of masses that two standard deviations of the samples are to hold.
LEAST, HELD = 0.9, 0.9


@final
@dataclass(frozen=True)
class Case:
    """What of a map and its stars is not as in the others.

    spacing of nodes in pc; error of extinctions in mag; parallax: times the errors of Gaia's;
    stars; limit: faintest magnitude, of which the run knows or not.
    """

    name: str = _BASE
    spacing: float = 10.0
    error: float = 0.05
    parallax: float = 1.0
    stars: int = 8000
    limit: float = 60.0
    knows: bool = False


CASES = (
    Case(),
    Case("nodes 20 pc apart", spacing=20.0),
    Case("nodes 5 pc apart", spacing=5.0),
    Case("errors of 0.02 mag", error=0.02),
    Case("errors of 0.2 mag", error=0.2),
    Case("parallaxes ten times as uncertain", parallax=10.0),
    Case("parallaxes 30 times as uncertain", parallax=30.0),
    Case("2000 stars", stars=2000),
    Case("32000 stars", stars=32_000),
    Case("seen to 15 mag", limit=15.0),
    Case("seen to 15 mag and says so", limit=15.0, knows=True),
)


@final
@dataclass(frozen=True)
class Size:
    """Box in pc, spacing of the truth, samples, cases; stars are divided by `fewer`."""

    box: tuple[float, float, float] = (400.0, 400.0, 240.0)
    fine: float = 2.5
    samples: int = 16
    cases: tuple[Case, ...] = CASES
    fewer: int = 1
    seed: int = 0


QUICK = Size((400.0, 400.0, 240.0), 10.0, 4, (Case(spacing=40.0), CASES[1]), 20)


@final
@dataclass(frozen=True, eq=False)
class Clouds:
    """Balls of dust: centres (K, 3) and σ (K,) in pc, depth (K,) in mag."""

    centres: Array
    radii: Array
    depths: Array

    @staticmethod
    def draw(size: Size) -> "Clouds":
        """Place them in directions far from one another."""
        rng = np.random.default_rng((size.seed, 11))
        radii, depths = np.meshgrid(RADII, DEPTHS)
        count = _EACH * radii.size
        half = 0.5 * np.array(size.box) - _FACE
        centres: list[Array] = []
        while len(centres) < count:
            place = rng.uniform(-half, half)
            distance = np.linalg.norm(place)
            towards = [place @ other / distance / np.linalg.norm(other) for other in centres]
            if DISTANCES[0] <= distance <= DISTANCES[1] and max(towards, default=-1.0) < np.cos(
                np.radians(_APART)
            ):
                centres.append(place)
        return Clouds(
            np.array(centres), np.tile(radii.ravel(), _EACH), np.tile(depths.ravel(), _EACH)
        )

    def density(self, points: Array) -> Array:
        """Return the density (...) in mag/pc at points (..., 3)."""
        total = np.zeros(points.shape[:-1])
        for centre, radius, depth in zip(self.centres, self.radii, self.depths, strict=True):
            square = ((points - centre) ** 2).sum(-1) / radius**2
            total += depth / (radius * np.sqrt(2.0 * np.pi)) * np.exp(-0.5 * square)
        return total


@final
@dataclass(frozen=True, eq=False)
class _Dust(AbstractDust):
    """Turbulence, disc and bubbles, with clouds in them."""

    clouds: Clouds
    medium: StructuredDust = field(default_factory=StructuredDust)

    def density(self, grid: RegularGrid, seed: int) -> Array:
        points = grid.points().numpy().reshape(*grid.shape, 3)
        return self.medium.density(grid, seed) + self.clouds.density(points)


def ball(centre: Array, radius: float) -> Array:
    """Return places (P, 3) within WITHIN σ of the centre, each for as much of the volume."""
    ticks = np.arange(-WITHIN, WITHIN + 1e-9, _STEP) * radius
    offsets = np.stack(np.meshgrid(ticks, ticks, ticks, indexing="ij"), -1).reshape(-1, 3)
    return np.asarray(centre + offsets[np.linalg.norm(offsets, axis=1) <= WITHIN * radius])


def tube(centre: Array, radius: float) -> Array:
    """Return the like within WITHIN σ of the line of sight, SIDE in front of it and behind."""
    ahead = centre / np.linalg.norm(centre)
    across = np.linalg.svd(ahead[None])[2][1:]
    ticks = np.arange(-WITHIN, WITHIN + 1e-9, _STEP) * radius
    plane = np.stack(np.meshgrid(ticks, ticks, indexing="ij"), -1).reshape(-1, 2)
    plane = plane[np.linalg.norm(plane, axis=1) <= WITHIN * radius] @ across
    along = np.arange(-SIDE, SIDE + 1e-9, _ALONG)[:, None] * ahead
    return np.asarray((centre + plane[:, None] + along).reshape(-1, 3))


def line(centre: Array, radius: float) -> Array:
    """Return the like on the line of sight, THROUGH σ in front of the centre and behind."""
    ticks = np.arange(-THROUGH, THROUGH + 1e-9, _STEP) * radius
    return np.asarray(centre + ticks[:, None] * centre / np.linalg.norm(centre))


_REGIONS = {"mass": ball, "tube": tube, "column": line}


def run(request: Request) -> Outcome:
    """Map the clouds in every case."""
    size = QUICK if request.quick else Size()
    names = tuple(case.name for case in size.cases)
    wanted = request.wanted(names)
    rows = [row for row in request.earlier if row["case"] not in wanted]
    clouds = Clouds.draw(size)
    for case in size.cases:
        if case.name in wanted:
            rows += _rows(size, case, clouds)
    rows.sort(key=lambda row: names.index(str(row["case"])))
    return Outcome(_settings(size), rows, goals(rows), draw(rows))


def _rows(size: Size, case: Case, clouds: Clouds) -> list[Row]:
    """Return a line for each cloud."""
    model = SkyModel(
        size.box,
        size.fine,
        dust=_Dust(clouds),
        population=Population(limit=case.limit),
        measurements=Measurements(error=case.error, parallax_scale=case.parallax),
    )
    sky = simulate(model, case.stars // size.fewer, size.seed)
    with tempfile.TemporaryDirectory() as name:
        found = _scores(_mapped(size, case, sky, Path(name)), sky, clouds)
    kinds = zip(clouds.radii, clouds.depths, np.linalg.norm(clouds.centres, axis=1), strict=True)
    rows: list[Row] = []
    for k, (radius, depth, distance) in enumerate(kinds):
        own = {key: float(values[k]) for key, values in found.items()}
        place = {"radius": float(radius), "depth": float(depth), "distance": float(distance)}
        rows.append({"case": case.name, **place, **own})
    _log.info("%s: %s", case.name, {key: float(np.median(v)) for key, v in found.items()})
    return rows


def _mapped(size: Size, case: Case, sky: SimulatedSky, folder: Path) -> StarMap:
    """Map the sky with all else as it comes."""
    write_table(folder / "sky.fits", sky_table(sky), False)
    limit = {"magnitude_limit": case.limit, "magnitude_column": "g_mag"} if case.knows else {}
    keys = {
        "data": {"catalog": str(folder / "sky.fits"), "system": "A_V", **limit},
        "grid": {"size": list(size.box), "spacing": case.spacing},
        "fit": {"samples": size.samples},
        "export": {"formats": [], "figures": [], "samples": 0},
        "compute": {"threads": torch.get_num_threads()},
    }
    config = configuration.from_mapping(keys)
    execute_run(prepare(config), folder / "run", config, False, Stage.EVALUATE)
    return open_star_map(folder / "run")


def _scores(finished: StarMap, sky: SimulatedSky, clouds: Clouds) -> Mapping[str, Array]:
    """Return mass, tube and column of every cloud over the true ones, the standard deviation of
    that mass over the samples, and how many of these the true one is off."""
    density = finished.field()
    request = MapRequest((Quantity.MEAN, Quantity.SAMPLES), finished.run.config.fit.samples)
    found = {name: np.empty(len(clouds.radii)) for name in (*_REGIONS, "std", "off")}
    for k, (centre, radius) in enumerate(zip(clouds.centres, clouds.radii, strict=True)):
        for name, region in _REGIONS.items():
            places = region(centre, float(radius))
            true = float(sky.truth.mean_at(places).mean())
            answers = density.evaluate(PointValues(torch.from_numpy(places)), request)
            found[name][k] = float(answers["mean"].mean()) / true
            if name == "mass":
                each = np.asarray(answers["samples"]).mean(-1) / true
                found["std"][k] = float(each.std(ddof=1))
                found["off"][k] = (found[name][k] - 1.0) / found["std"][k]
    return found


def _settings(size: Size) -> Row:
    return {
        "box_pc": list(size.box),
        "spacing_of_the_truth_pc": size.fine,
        "samples": size.samples,
        "clouds": _EACH * len(RADII) * len(DEPTHS),
        "radii_pc": list(RADII),
        "depths_mag": list(DEPTHS),
        "distances_pc": list(DISTANCES),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Masses of complete catalogs, and the truth within two standard deviations of the samples."""
    own = [row for row in rows if row["case"] == _BASE]
    made = []
    for radius in RADII:
        ratios = [number(row, "mass") for row in own if row["radius"] == radius]
        name = f"{_BASE}: mass of clouds of σ = {radius:g} pc over the true one"
        made.append(Goal.at_least(name, LEAST, float(np.median(ratios)) if ratios else None))
    held = [abs(number(row, "off")) <= 2.0 for row in own]
    name = f"{_BASE}: part of the masses within two standard deviations"
    made.append(Goal.at_least(name, HELD, float(np.mean(held)) if held else None))
    return made


def draw(rows: Sequence[Row]) -> Figure:
    """Masses and columns over the true ones by case, median and range of the clouds of a radius."""
    names = list(dict.fromkeys(str(row["case"]) for row in rows))
    figure, axes = panels(1, 2, width=5.0, height=0.8 + 0.35 * len(names))
    for axis, key in zip(axes, ("mass", "column"), strict=True):
        for shift, colour, radius in zip((-0.15, 0.15), COLOURS, RADII, strict=False):
            for place, name in enumerate(names):
                kind = name, radius
                ratios = [number(row, key) for row in rows if (row["case"], row["radius"]) == kind]
                low, middle, high = np.quantile(ratios, [0.0, 0.5, 1.0])
                axis.plot([low, high], [place + shift] * 2, color=colour, linewidth=1)
                text = f"σ = {radius:g} pc" if place == 0 else None
                axis.plot(middle, place + shift, "o", color=colour, markersize=4, label=text)
        axis.axvline(1.0, color="0.5", linewidth=1)
        axis.set_yticks(range(len(names)), names if key == "mass" else [""] * len(names))
        axis.invert_yaxis()
        axis.set_xlim(left=0.0)
        label(axis, f"{key} of clouds, median and range", "map / truth", "")
    axes[1].legend(fontsize=7, frameon=False, loc="lower right")
    return figure
