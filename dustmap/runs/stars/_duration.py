"""How long a run on stars takes on this machine, by the time of a product here."""

import functools
import math
from dataclasses import replace

import numpy as np
import torch

from dustmap import engines, inference
from dustmap.config import Config
from dustmap.gp import (
    Batch,
    NestedGrids,
    RegularGrid,
    covariances,
    features,
    own_batch,
    tori_for,
    torus_for,
    zero_covariance,
)
from dustmap.gp.functionals import LineIntegrals, own_rays
from dustmap.linalg import AbstractOperator, SparseOperator
from dustmap.runs import _machine
from dustmap.runs._machine import Products, dtype_of, rounded
from dustmap.runs.stars import _kernel, _model
from dustmap.runs.stars._engines import engine_of, problem_of
from dustmap.runs.stars._grids import grid_of, nodes_of
from dustmap.runs.stars._model import (
    PADDING,
    held,
    is_lognormal,
    start_kernel,
)
from dustmap.sky import Observations
from dustmap.sky.observations import HealpixBeams

#: Products of the prior with one field: of the mode, of learning, and for each sample; measured on
#: skies of 500 to 8,000 stars at 10 and 20 pc, log-normal ones of 1,000 to 11,000: samples take 110
#: where densities vary little, and 520 where they vary by factors of ten.
PRODUCTS = {"lognormal": (400, 2_600, 200), "gaussian": (0, 8000, 38)}
#: Products of rows to one of the prior in log-normal fits, and all that they do over both.
_ROWS_TO_ONE, _ALL_OVER_PRODUCTS = 4.0, 2.2
#: Stars from which on steps of solves on their side grow as a power of their number, of fits that
#: learn nothing and of others: of 180,000 and 72,000 stars. Largest rank of the preconditioner of
#: such solves, with two products to one of the prior.
_FEW_STARS, _GROWTH, _RANK = 4_000, (0.25, 0.5), 256
#: (y/σ)² in the median of these stars, from which on steps grow no more, and the least that counts:
#: 5,000 and 72,000 stars with 0.87 took 0.18 and 0.13 of the seconds of stars with this.
_TYPICAL_SQUARE, _LEAST_SQUARE = 18.0, 0.3
#: What another fit, with other noise, adds to one.
_ROUND_SHARE = {"lognormal": 0.25, "gaussian": 0.7}
#: Covariances of few stars as matrices: of a solve, and of learning (134 with 2,000 at 20 pc), and
#: of so few that they are kept (22 with 1,000); and operations of one, for each pair of nodes, and
#: of a star and a node.
COVARIANCES, _KEPT_COVARIANCES, _LOOKED_UP = (5, 60), (2, 20), (200, 2000)
#: Fits of a Gaussian density with scales of groups, which are linearised about the one before.
SCALED_FITS = 2
#: Rows of kriging weights, beside those that interpolate: nodes across a ray.
ROW_NODES = 4.0
#: Seconds of a step of a solver around its transforms and rows.
STEP_SECONDS = 4.5e-4
#: Seconds of a run that is neither learning nor solving: imports, the catalog, maps and pictures;
#: those of a fit to all stars, of those of the fit that it starts from.
_OVERHEAD, _REFIT_SHARE = 5.0, 0.26
#: Rays that are timed.
TRIAL_ROWS = 2000
#: Stars whose rows of inducing points are timed.
TRIAL_STARS = 16
#: Covariances of all rows in learning, gradients included, and the rays of a trial.
DENSE_COVARIANCES, TRIAL_RAYS = 36, 200
#: What threads are timed by: vectors, rows, rays among them, points of the torus, and rows of the
#: matrix that other engines factor.
VECTORS, ROWS, DISTINCT, TORUS_POINTS, DENSE_ROWS = 8, 4000, 100, 2**19, 600


def choice_seconds(config: Config, rays: LineIntegrals) -> float:
    """Estimate the choice of a kernel, where it is left to the data."""
    if not _kernel.is_open(config):
        return 0.0
    n = _kernel.compared_stars(len(rays))
    made = engines.covariances_of_choice(len(_kernel.candidates(config)))
    (*_, widest) = _kernel.boxes_to_compare(config)
    once = _field_seconds(_kernel.compared_on(config, widest), rays[:n])
    return made * (n * once + 10 * n**3 * _machine.seconds_per_operation(rays.device))


def _field_seconds(config: Config, rays: LineIntegrals) -> float:
    """Time the covariance of a ray with all others, by the nodes of a grid."""
    grid = grid_of(config.grid)
    torus = torus_for(start_kernel(config), grid, 2.0)
    rows = features.interpolation(rays, grid=grid, dtype=torch.float64)
    prior = zero_covariance(grid, (torus,), torch.float64, rays.device)
    return _product_seconds(prior, VECTORS) + 2 * _product_seconds(rows, VECTORS)


def seconds_of_run(config: Config, data: Observations, train: torch.Tensor, refits: bool) -> float:
    """Estimate the whole run, roughly; refits: to all stars."""
    batch = data.planned(train)
    fit = _fit_seconds(config, batch)
    if config.fit.distance_rounds > 0 and not data.exact:
        fit *= 1.0 + _ROUND_SHARE[config.density]
    total = _OVERHEAD + choice_seconds(config, own_rays(batch.functional)) + fit
    if refits and config.engine == "lognormal":
        total += _REFIT_SHARE * fit
    elif refits:
        every = torch.arange(len(data.batch), device=train.device)
        total += _fit_seconds(_model.held(config), data.planned(every))
    return rounded(total)


def _fit_seconds(config: Config, data: Batch) -> float:
    seconds = estimated_seconds(config, own_rays(data.functional)) + inducing_seconds(config, data)
    is_sampled = config.fit.engine == "global" and is_lognormal(config)
    return seconds * (_weakness(data) if is_sampled else 1.0)


def _weakness(data: Batch) -> float:
    """Return the share of the steps of solves that data which say little need: condition numbers
    grow with the square of signals over errors, steps as their root."""
    if data.noise_variance is None or len(data) == 0:
        return 1.0
    square = float((data.y.square() / data.noise_variance).median())
    return min(1.0, math.sqrt(max(square, _LEAST_SQUARE) / _TYPICAL_SQUARE))


def estimated_seconds(config: Config, rays: LineIntegrals) -> float:
    """Estimate learning, solving and drawing on this machine, by the time of one product here;
    good to a factor of two where it was measured, on skies of some thousand stars."""
    if config.fit.engine == "global":
        return _global_seconds(config, rays)
    n, plain, device = len(rays), engines.rays_to_mean(rays), rays.device
    operation = _machine.seconds_per_operation(device)
    rows = min(n, config.fit.learn_rows) if _learns(config) else 0
    pairs = DENSE_COVARIANCES * rows**2
    learning = _machine.dense_seconds(rows, device) + pairs * _pair_seconds(config, plain)
    if config.fit.engine == "exact":
        seen = rays if n <= engines.WEIGHTED_ROWS else plain
        return learning + _pair_seconds(config, seen) * n**2 + operation * n**3
    return learning + operation * n * grid_of(config.grid).size


def inducing_seconds(config: Config, data: Batch) -> float:
    """Time the rows of "hip", which are made once or in every pass over the stars, and its steps.

    Of some stars, whose rows stand for those of a minibatch; 0 for other engines.
    """
    engine, own = engine_of(config), own_batch(data)
    if not isinstance(engine, engines.InducingEngine):
        return 0.0
    model, plan = engine.prepared(problem_of(config, own))
    n, some, device = len(own), own[:TRIAL_STARS], own.y.device
    with torch.no_grad():
        of_some, of_one = (
            _machine.measured_seconds(functools.partial(model.features.rows, part), device)
            for part in (some.functional, some.functional[:1])
        )
        rows, size = model.features.rows(some.functional), min(n, config.fit.batch)
    repeated = torch.arange(size, device=device) % len(some)
    take = functools.partial(
        inference.natural_step,
        model,
        model.family.prior(model.features.dtype, device),
        rows[repeated],
        some[repeated],
        n / size,
        replace(inference.SVISettings(batch_size=size).lengths(0), covariance=0.0),
    )
    step = _machine.measured_seconds(take, device)
    is_stored = plan.bytes_rows <= plan.max_memory // 2
    passes = 1 if is_stored else config.fit.epochs + 3
    once = n * max(0.0, of_some - of_one) / max(1, len(some) - 1)
    return passes * once + max(1, config.fit.epochs) * math.ceil(n / size) * step


def _pair_seconds(config: Config, rays: LineIntegrals) -> float:
    """Time the covariance of two rays, by fewer of those that have more segments."""
    trial = rays[: max(2, TRIAL_RAYS // rays.weights.shape[1])]
    kernel = start_kernel(config).to(rays.device)
    work = functools.partial(covariances.ClosedForm().between, kernel, trial, trial)
    with torch.no_grad():
        return _machine.measured_seconds(work, rays.device) / len(trial) ** 2


def _global_seconds(config: Config, rays: LineIntegrals) -> float:
    nodes = nodes_of(config.grid).size
    if takes_matrices(config, len(rays), nodes):
        once = nodes * (_LOOKED_UP[0] * nodes + _LOOKED_UP[1] * len(rays))
        count = expected_covariances(config, len(rays))
        return count * once * _machine.seconds_per_operation(rays.device)
    if is_lognormal(config):
        steps: float = max(1.0, len(rays) / _FEW_STARS) ** _GROWTH[_learns(config)]
        return expected_products(config) * steps * _several_seconds(config, rays)
    dtype = dtype_of(config.compute)
    transforms = sum(_fft_seconds(torus, dtype, rays.device) for torus in _tori(config))
    product = 2 * ROW_NODES * _row_seconds(config, rays, 1)
    return expected_products(config) * (transforms + product + STEP_SECONDS)


def _several_seconds(config: Config, rays: LineIntegrals) -> float:
    """Time a product of the prior and those of rows that come with it, of several at once, as most
    of a log-normal fit are, and the rest of what it does for them."""
    n, device = len(rays), rays.device
    of_rows = _ROWS_TO_ONE * _row_seconds(config, rays, VECTORS)
    of_solver = 2.0 * n * min(_RANK, n // 8) * _machine.seconds_per_operation(device)
    return _ALL_OVER_PRODUCTS * (_prior_seconds(config, device) + of_rows + of_solver)


def _prior_seconds(config: Config, device: torch.device) -> float:
    """Time the product of the prior's covariance with a field, of several at once."""
    nodes, dtype = nodes_of(config.grid), dtype_of(config.compute)
    return _product_seconds(zero_covariance(nodes, _tori(config), dtype, device), VECTORS)


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


def expected_covariances(config: Config, n: int) -> int:
    """Count the covariances that a fit of n stars by matrices makes."""
    solve, learning = _KEPT_COVARIANCES if n <= features.MOST_KEPT else COVARIANCES
    once = solve + _learns(config) * learning
    return SCALED_FITS * once if config.model.group_scale > 0 else once


def _learns(config: Config) -> bool:
    """Whether steps of learning are taken: more is learned than every fit solves for."""
    return config.model.learn != held(config).model.learn


def _row_seconds(config: Config, rays: LineIntegrals, vectors: int) -> float:
    """Time a product of all rows with one of several fields, by those of TRIAL_ROWS rays and of
    one: laying out the fields takes as long for few rays as for many."""
    chosen = np.random.default_rng(0).permutation(len(rays))[:TRIAL_ROWS]
    trial = rays[torch.from_numpy(np.sort(chosen)).to(rays.device)]
    share, dtype, memory = len(rays) / len(trial), dtype_of(config.compute), 2**30
    if config.fit.beams and config.engine == "lognormal":
        memory = config.compute.memory_bytes // 2
        beams, nodes = HealpixBeams(config.fit.beams), nodes_of(config.grid)
        table = features.BeamTable.of(nodes, beams, rays, dtype, memory)
        if table.knots > 0:
            # The sums along the beams are the same however many rays there are.
            own, shared = table.rows(trial), table.expansion()
            return share * _product_seconds(own, vectors) + _product_seconds(shared, vectors)
    made = functools.partial(features.interpolation, memory=memory, dtype=dtype)
    of_all, of_one = (
        _product_seconds(made(some, nodes_of(config.grid)), vectors) for some in (trial, trial[:1])
    )
    return of_one + share * max(0.0, of_all - of_one)


def _product_seconds(rows: AbstractOperator, vectors: int) -> float:
    """Time the product of an operator with one of so many vectors at once."""
    x = torch.zeros((vectors, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    return _machine.measured_seconds(lambda: rows.matmul(x), rows.device) / vectors


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
