"""The plan of a run on stars: its memory, with which settings it would fit, and its time."""

import functools
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
    NestedGrids,
    RegularGrid,
    covariances,
    features,
    own_batch,
    tori_for,
    torus_for,
)
from dustmap.gp.functionals import LineIntegrals, own_rays, world_of
from dustmap.linalg import AbstractOperator, SparseOperator
from dustmap.runs import _machine
from dustmap.runs._interface import Plan
from dustmap.runs._machine import Products, dtype_of, rounded
from dustmap.runs.stars import _kernel, _model
from dustmap.runs.stars._engines import engine_of, problem_of
from dustmap.runs.stars._export import request_of
from dustmap.runs.stars._model import (
    PADDING,
    grid_of,
    held,
    is_lognormal,
    nodes_of,
    start_kernel,
)
from dustmap.sky import Observations, StarTable, cartesian, catalogs, maps
from dustmap.sky.observations import HealpixBeams
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

#: Products of the features with one field: of the mode, of learning, and for each sample; measured
#: on simulated skies of 500 to 8,000 stars at 10 and 20 pc; log-normal learning at 20 pc.
PRODUCTS = {"lognormal": (900, 5_000, 81), "gaussian": (0, 8000, 38)}
#: What a fit with refreshed noise takes of the first one.
_ROUND_SHARE = 0.7
#: Covariances of few stars as matrices: of a solve, and of learning (26 with 1,000 stars at 20 pc,
#: 134 with 2,000); and operations of one, for each pair of nodes, and of a star and a node.
COVARIANCES, _LOOKED_UP = (5, 60), (200, 2000)
#: Fits of a Gaussian density with scales of groups, which are linearised about the one before.
SCALED_FITS = 2
#: Rows of kriging weights, beside those that interpolate: nodes across a ray.
ROW_NODES = {"lognormal": 1.0, "gaussian": 4.0}
#: Seconds of a step of a solver around its transforms and rows.
STEP_SECONDS = 4.5e-4
#: Seconds of a run that is neither learning nor solving: imports, the catalog, maps and pictures;
#: those of a fit to all stars, of those of the fit that it starts from.
_OVERHEAD, _REFIT_SHARE = 5.0, 0.26
#: Stars of which it is worth while to take the means.
_MANY = 100_000
#: Rays that are timed.
TRIAL_ROWS = 2000
#: Covariances of all rows in learning, gradients included, and the rays of a trial.
DENSE_COVARIANCES, TRIAL_RAYS = 36, 200
#: What threads are timed by: vectors, rows, rays among them, points of the torus, and rows of the
#: matrix that other engines factor.
VECTORS, ROWS, DISTINCT, TORUS_POINTS, DENSE_ROWS = 8, 4000, 100, 2**19, 600


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
    data = observed.batch[train]
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
    """Spacing (N,) of the finest nodes around stars, of the coarsest outside of the box."""
    places = cartesian(stars.l, stars.b, stars.distances.rough)
    spacings = np.full(len(places), config.boxes[0][1])
    center = np.asarray(config.center)
    for size, spacing in config.boxes[1:]:
        spacings[(np.abs(places - center) <= 0.5 * np.asarray(size)).all(1)] = spacing
    return spacings


def _cells(config: Config, stars: StarTable) -> float:
    """Return how many cells there are for each star (data.combine = 1)."""
    return len(combined(stars, spacing_at(config.grid, stars))) / len(stars)


def _choice_components(config: Config, n: int) -> tuple[Component, ...]:
    """Count what the choice of a kernel holds, where it is left to the data."""
    if not _kernel.is_open(config):
        return ()
    nodes = grid_of(_kernel.compared_on(config).grid)
    stars, names = _kernel.compared_stars(n), _kernel.candidates(config)
    return (engines.ray_choice_component(stars, nodes, len(names)),)


def kernel_in_words(config: Config, n: int) -> str:
    """The kernel of a configuration with n stars."""
    if not _kernel.is_open(config):
        return config.model.kernel_name
    names, stars = ", ".join(_kernel.candidates(config)), _kernel.compared_stars(n)
    return f"auto: {names} by patches of {stars:,} stars"


def choice_seconds(config: Config, rays: LineIntegrals) -> float:
    """Estimate the choice of a kernel, where it is left to the data."""
    if not _kernel.is_open(config):
        return 0.0
    n = _kernel.compared_stars(len(rays))
    made = engines.covariances_of_choice(len(_kernel.candidates(config)))
    once = _field_seconds(_kernel.compared_on(config), rays[:n])
    return made * (n * once + 10 * n**3 * _machine.seconds_per_operation(rays.device))


def _field_seconds(config: Config, rays: LineIntegrals) -> float:
    """Time the covariance of a ray with all others, by the nodes of a grid."""
    grid = grid_of(config.grid)
    fft = _fft_seconds(torus_for(start_kernel(config), grid, 2.0), torch.float64, rays.device)
    rows = features.interpolation(rays, grid=grid, dtype=torch.float64)
    return fft + 2 * _product_seconds(rows)


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
    for levels, which are the user's."""
    if config.grid.levels:
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


def seconds_of_run(config: Config, data: Observations, train: torch.Tensor, refits: bool) -> float:
    """Estimate the whole run, roughly; refits: to all stars."""
    seen = own_rays(data.batch.functional[train])
    fit = estimated_seconds(config, seen)
    if config.fit.distance_rounds > 0 and not data.exact:
        fit *= 1.0 + _ROUND_SHARE
    total = _OVERHEAD + choice_seconds(config, seen) + fit
    if refits and config.engine == "lognormal":
        total += _REFIT_SHARE * fit
    elif refits:
        total += estimated_seconds(_model.held(config), own_rays(data.batch.functional))
    return rounded(total)


def estimated_seconds(config: Config, rays: LineIntegrals) -> float:
    """Estimate learning, solving and drawing on this machine, by the time of one product here;
    good to a factor of two where it was measured, on skies of some thousand stars."""
    if config.fit.engine == "global":
        return _global_seconds(config, rays)
    n, device = len(rays), rays.device
    rows, pair = min(n, config.fit.learn_rows), _pair_seconds(config, rays)
    learning = _machine.dense_seconds(rows, device) + DENSE_COVARIANCES * pair * rows**2
    operation = _machine.seconds_per_operation(device)
    if config.fit.engine == "exact":
        return learning + pair * n**2 + operation * n**3
    return learning + operation * n * grid_of(config.grid).size


def _pair_seconds(config: Config, rays: LineIntegrals) -> float:
    """Time the covariance of two rays."""
    kernel, trial = start_kernel(config).to(rays.device), rays[:TRIAL_RAYS]
    work = functools.partial(covariances.ClosedForm().between, kernel, trial, trial)
    with torch.no_grad():
        return _machine.measured_seconds(work, rays.device) / len(trial) ** 2


def _global_seconds(config: Config, rays: LineIntegrals) -> float:
    nodes = nodes_of(config.grid).size
    if takes_matrices(config, len(rays), nodes):
        once = nodes * (_LOOKED_UP[0] * nodes + _LOOKED_UP[1] * len(rays))
        return expected_covariances(config) * once * _machine.seconds_per_operation(rays.device)
    dtype = dtype_of(config.compute)
    fft = sum(_fft_seconds(torus, dtype, rays.device) for torus in _tori(config))
    product = 2 * ROW_NODES[config.density] * _row_seconds(config, rays)
    return expected_products(config) * (fft + product + STEP_SECONDS)


def _fft_seconds(torus: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
    """Time a transform of a field there and back."""
    field = torch.zeros(torus, dtype=dtype, device=device)
    return _machine.measured_seconds(functools.partial(_there_and_back, field), device)


def _tori(config: Config) -> tuple[tuple[int, ...], ...]:
    """Points of the torus of every grid."""
    return tori_for(start_kernel(config), nodes_of(config.grid), PADDING)


def expected_products(config: Config) -> int:
    """Count the products of the features with one field, in a whole fit of the global engine."""
    mode, learning, sample = PRODUCTS[config.density]
    once = mode + _learns(config) * learning + sample * config.fit.samples
    repeated = config.model.group_scale > 0 and config.density == "gaussian"
    return SCALED_FITS * once if repeated else once


def takes_matrices(config: Config, n: int, nodes: int) -> bool:
    """Whether the global engine solves for so many stars by their covariance."""
    fits = features.suits_dense(n, nodes, config.compute.memory_bytes // 2)
    return config.density == "gaussian" and fits


def expected_covariances(config: Config) -> int:
    """Count the covariances that a fit by matrices makes."""
    once = COVARIANCES[0] + _learns(config) * COVARIANCES[1]
    return SCALED_FITS * once if config.model.group_scale > 0 else once


def _learns(config: Config) -> bool:
    """Whether steps of learning are taken: more is learned than every fit solves for."""
    return config.model.learn != held(config).model.learn


def _row_seconds(config: Config, rays: LineIntegrals) -> float:
    """Time a product of all rows with one field, by those of TRIAL_ROWS rays."""
    chosen = np.random.default_rng(0).permutation(len(rays))[:TRIAL_ROWS]
    trial = rays[torch.from_numpy(np.sort(chosen)).to(rays.device)]
    share, dtype, memory = len(rays) / len(trial), dtype_of(config.compute), 2**30
    if config.fit.beams and config.engine == "lognormal":
        memory = config.compute.memory_bytes // 2
        beams, nodes = HealpixBeams(config.fit.beams), nodes_of(config.grid)
        table = features.BeamTable.of(nodes, beams, rays, dtype, memory)
        if table.knots > 0:
            # The sums along the beams are the same however many rays there are.
            return share * _product_seconds(table.rows(trial)) + _product_seconds(table.expansion())
    return share * _product_seconds(
        features.interpolation(trial, nodes_of(config.grid), memory=memory, dtype=dtype)
    )


def _product_seconds(rows: AbstractOperator) -> float:
    x = torch.zeros((1, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    return _machine.measured_seconds(lambda: rows.matmul(x), rows.device)


@torch.no_grad()
def products(config: Config, rays: LineIntegrals) -> Products:
    """Make products of a step of the fit, and count them: of rows with 8 vectors and back, of some
    rays over and over, and transforms of these vectors on a part of the torus."""
    if config.fit.engine != "global":
        return ((_machine.dense_trial(DENSE_ROWS), 1.0),)
    dtype, nodes = dtype_of(config.compute), nodes_of(config.grid)
    rows = _repeated(rays, nodes, dtype)
    x, y = (torch.ones(VECTORS, size, dtype=dtype) for size in (nodes.size, rows.shape[0]))
    torus = max(_tori(config), key=math.prod)
    planes = max(1, min(torus[0], TORUS_POINTS * torus[0] // math.prod(torus)))
    slab = torch.zeros((planes, *torus[1:]), dtype=dtype)
    share = len(rays) / rows.shape[0]
    return (
        (functools.partial(rows.matmul, x), share),
        (functools.partial(rows.rmatmul, y), share),
        (functools.partial(_there_and_back, slab), VECTORS * torus[0] / planes),
    )


def _there_and_back(x: torch.Tensor) -> torch.Tensor:
    """Transform x, and back."""
    back: torch.Tensor = torch.fft.irfftn(torch.fft.rfftn(x), s=x.shape)
    return back


def _repeated(
    rays: LineIntegrals, nodes: RegularGrid | NestedGrids, dtype: torch.dtype
) -> SparseOperator:
    """Return rows of a few rays so many times that there are as many as of all, or `ROWS`."""
    few = rays[torch.linspace(0, len(rays) - 1, min(DISTINCT, len(rays))).long()]
    rows = features.interpolation(few, nodes, dtype=dtype)
    assert isinstance(rows, SparseOperator)
    matrix, times = rows.matrix, max(1, min(len(rays), ROWS) // len(few))
    entries = matrix.crow_indices().diff().repeat(times)
    starts = torch.nn.functional.pad(entries.cumsum(0, dtype=torch.int32), (1, 0))
    cols, values = matrix.col_indices().repeat(times), matrix.values().repeat(times)
    return SparseOperator.from_csr(starts, cols, values, (times * len(few), nodes.size))
