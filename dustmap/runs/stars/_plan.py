"""The plan of a run on stars: its memory, and with which settings it would fit."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap import engines
from dustmap.config import Config, GridConfig
from dustmap.engines import Component, During
from dustmap.errors import UserError
from dustmap.gp import (
    RegularGrid,
    own_batch,
)
from dustmap.gp.functionals import LineIntegrals, own_rays, world_of
from dustmap.runs._interface import Plan
from dustmap.runs._machine import dtype_of
from dustmap.runs.stars import _kernel
from dustmap.runs.stars._engines import engine_of, problem_of
from dustmap.runs.stars._export import request_of
from dustmap.runs.stars._grids import around_of, grid_of, nodes_of
from dustmap.runs.stars._model import (
    is_lognormal,
    start_kernel,
)
from dustmap.sky import Observations, StarTable, cartesian, catalogs, maps
from dustmap.sky.stars import WEIGHT_SCORES, combined
from dustmap.sky.view import MOST_VOXELS

#: Copies of the rays that a fit has: of all stars, and of those that are fitted.
_COPIES = 2
#: Bytes of the pictures while they are drawn, at the resolution that they have.
_PICTURES = 75 * engines.MIB
#: Arrays of a slab beside those that it is asked for: compressing, and turning bytes around.
_IN_FLIGHT = 2
#: Coarser grids that are tried when a plan does not fit.
_TRIALS = 30

#: Stars of which it is worth while to take the means.
_MANY = 100_000


def plan_stars(
    config: Config,
    counts: Mapping[str, Any],
    stars: StarTable,
    observed: Observations,
    train: torch.Tensor,
) -> Plan:
    """Plan the run on stars `train`, which have been read; nothing else has been allocated.

    The plan is that of this rank. All ranks have to ask, for what would fit has to fit all of them.
    """
    data = observed.planned(train)
    world = world_of(data.functional)
    if config.engine != "lognormal":
        data = own_batch(data)

    def memory_of(changed: Config, share: float = 1.0) -> engines.MemoryPlan:
        """share: of the stars, where there are fewer."""
        every = star_components(stars, observed, config.data.weights_distances)
        own = (replace(part, bytes=math.ceil(share * part.bytes)) for part in every)
        some = data if share == 1.0 else data[torch.arange(math.ceil(share * len(data)))]
        fit = engine_of(changed).plan(problem_of(changed, some))
        rest, chunks = _finish_components(changed)
        parts = (*own, *_choice_components(changed, len(some)), *fit.components, *rest)
        return engines.MemoryPlan(parts, {**chunks, **fit.chunks})

    def fits_all(memory: engines.MemoryPlan) -> bool:
        too_much = memory.peak > config.compute.memory_bytes
        return int(world.total(torch.tensor(int(too_much)))) == 0

    def fits(changed: Config) -> bool:
        return fits_all(memory_of(changed))

    memory, remedies = memory_of(config), list[str]()
    if not fits_all(memory):
        samples, spacing = _most_samples(config, fits), _finest(config, fits)
        remedies += [f"fit.samples <= {samples}"] if samples else []
        remedies += [f"grid.spacing >= {spacing:g}"] if spacing else []
        alone = world.size == 1 and _combines(config, len(stars))
        if alone and fits_all(memory_of(config, _cells(config, stars))):
            remedies += ["data.combine = 1"]
    return Plan(counts, memory, config.compute.memory_bytes, tuple(remedies))


def _combines(config: Config, number: int) -> bool:
    """Tell whether to look at what means of so many stars would take."""
    data = config.data
    return number >= _MANY and not (data.combine or data.magnitude_limit or data.tile)


def spacing_at(config: GridConfig, stars: StarTable) -> NDArray[np.float64]:
    """Spacing (N,) of the finest nodes around stars, of the coarsest outside of all."""
    places = cartesian(stars.l, stars.b, stars.distances.rough)
    (_, coarsest), *finer = config.fitted
    spacings, center = np.full(len(places), coarsest), np.asarray(config.center)
    for size, spacing in finer:
        spacings[(np.abs(places - center) <= 0.5 * np.asarray(size)).all(1)] = spacing
    return spacings


def _cells(config: Config, stars: StarTable) -> float:
    """Return how many cells there are for each star (data.combine = 1)."""
    return len(combined(stars, spacing_at(config.grid, stars))) / len(stars)


def _choice_components(config: Config, n: int) -> tuple[Component, ...]:
    """Count what the choice of a kernel holds, where it is left to the data."""
    if not _kernel.is_open(config):
        return ()
    grids = (_kernel.compared_on(config, box).grid for box in _kernel.boxes_to_compare(config))
    nodes = max(map(grid_of, grids), key=lambda grid: grid.size)
    stars, names = _kernel.compared_stars(n), _kernel.candidates(config)
    return (engines.ray_choice_component(stars, nodes, len(names)),)


def kernel_in_words(config: Config, n: int) -> str:
    """The kernel of a configuration with n stars."""
    if not _kernel.is_open(config):
        return config.model.kernel_name
    names, stars = ", ".join(_kernel.candidates(config)), _kernel.compared_stars(n)
    return f"auto: {names} by patches of {stars:,} stars"


def _most_samples(config: Config, fits: Callable[[Config], bool]) -> int | None:
    """Find the most samples that fit; None where no number does or the engine has none."""

    def fails(samples: int) -> bool:
        return not fits(replace(config, fit=replace(config.fit, samples=samples)))

    least = 4 if is_lognormal(config) else 2
    if config.fit.engine != "global" or fails(least):
        return None
    return least + bisect_left(range(least + 1, config.fit.samples), True, key=fails)


def _finest(config: Config, fits: Callable[[Config], bool]) -> float | None:
    """Find the finest coarser spacing that divides all sides of the box as printed, and fits; none
    of levels or grids around that are known, which go with one spacing."""
    if config.grid.levels or around_of(config.grid):
        return None
    cells = math.gcd(*(round(side / config.grid.spacing) for side in config.grid.size))

    def spacing(parts: int) -> float:
        return config.grid.spacing * cells / parts

    def fails(parts: int) -> bool:
        return not fits(replace(config, grid=replace(config.grid, spacing=spacing(parts))))

    finest = bisect_left(range(1, cells), True, key=fails)
    printed = (
        n
        for n in range(finest, 0, -1)
        if math.isclose(float(f"{spacing(n):g}"), spacing(n), rel_tol=1e-9)
    )
    return next((spacing(n) for n in itertools.islice(printed, _TRIALS) if not fails(n)), None)


def refuse_nodes(config: Config) -> None:
    """Refuse a grid of which the memory holds not even one field, before it computes anything."""
    allowed, needed = config.compute.memory_bytes, _field_bytes(config)
    if needed <= allowed:
        return
    finest = _finest(config, may_fit)
    remedy = "a smaller grid.size" if finest is None else f"grid.spacing = {finest:g} or more"
    raise UserError(
        f"grid.spacing = {config.grid.spacing:g} pc: one number at each node of the box takes "
        f"{engines.shown(needed)} and compute.memory allows {engines.shown(allowed)}; take "
        f"{remedy}"
    )


def may_fit(config: Config) -> bool:
    """Tell whether samples and spectra fit, however few the stars, of a torus that has a plan."""
    allowed = config.compute.memory_bytes
    if _field_bytes(config) > allowed:
        return False
    kernel, itemsize = start_kernel(config), dtype_of(config.compute).itemsize
    grid, samples = nodes_of(config.grid), config.fit.samples
    sizes = engines.GriddedSizes.of(kernel, grid, 0, samples, itemsize)
    return 2 * (engines.drawing_bytes(sizes) + engines.SPECTRA * sizes.torus) <= allowed


def _field_bytes(config: Config) -> int:
    return nodes_of(config.grid).size * dtype_of(config.compute).itemsize


def star_components(
    stars: StarTable, observed: Observations, weighted: bool = False
) -> tuple[Component, ...]:
    """Count the catalog and what it says of the density: known, as they have been read; weighted:
    and once more with distances behind a magnitude limit, and their weights before and after."""
    held = _bytes(stars) + sum(column.nbytes for column in stars.distances.columns().values())
    held += _COPIES * _bytes(own_rays(observed.batch.functional)) + 6 * 8 * len(observed)
    outside = None if observed.beyond is None else observed.beyond.spread
    weighted = weighted and observed.spread is not None
    for spread in (observed.spread, outside):
        if spread is not None:
            held += (1 + weighted) * (_bytes(spread.rays) + spread.variance.nbytes)
    if weighted:
        held += 2 * 4 * len(WEIGHT_SCORES) * len(observed)
    what = f"catalog of {len(stars):,} rows, rays and errors of {len(observed):,} stars"
    return (Component("stars", held, During.WHOLE, what),)


def _bytes(record: StarTable | LineIntegrals) -> int:
    """Count the arrays that a dataclass holds."""
    values = (getattr(record, field.name) for field in fields(record))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray | torch.Tensor))


def export_components(
    grid: RegularGrid, request: maps.MapRequest, samples: int, memory: int
) -> tuple[tuple[Component, ...], int]:
    """Count what writing a map of `grid` from `samples` fields takes, and the planes of a slab.

    memory: bytes that slabs may take.
    """
    plane = maps.bytes_per_plane(grid, request, _IN_FLIGHT)
    depth = max(1, min(grid.shape[2], memory // plane))
    widened = 2 * 4 * samples * grid.shape[0] * grid.shape[1]
    what = f"{depth} of {grid.shape[2]} planes of {request.values_per_place} numbers, and two more"
    return (
        Component("slabs", depth * plane, During.EXPORT, what),
        Component("planes", widened, During.EXPORT, f"{samples} samples between two planes"),
    ), depth


def _finish_components(config: Config) -> tuple[tuple[Component, ...], dict[str, str]]:
    """Count the map that [export] asks for and the figures; with the sizes of their chunks."""
    grid, export = grid_of(config.grid), config.export
    samples = config.fit.samples if config.fit.engine == "global" else 0
    parts: tuple[Component, ...] = ()
    chunks = {"rows of a catalog read at once": f"{catalogs.ROWS:,}"}
    if export.formats and (export.quantities or min(export.samples, samples) > 0):
        memory = maps.slab_memory(config.compute.memory_bytes)
        parts, depth = export_components(grid, request_of(config, samples), samples, memory)
        chunks["planes of the map written at once"] = f"{depth} of {grid.shape[2]}"
    if export.figures:
        what = f"{len(export.figures)} pictures, a page, one after the other, and cubes of the map"
        # Mean and std; of a page the values of a cube, their logarithms and codes.
        cubes = max(2 * 4 * grid.size, 24 * min(grid.size, MOST_VOXELS))
        parts += (Component("figures", _PICTURES + cubes, During.FIGURES, what),)
    return parts, chunks
