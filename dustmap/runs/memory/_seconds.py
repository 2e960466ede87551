"""How long a fit will take, roughly: the time of one product here, times how many there are."""

import functools
import itertools
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from dustmap.config import Config
from dustmap.gp import RegularGrid, torus_for
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import BeamTable, interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.linalg import AbstractOperator
from dustmap.runs.memory._allotment import KRIGING, LINEAR, allotted
from dustmap.runs.models import dtype_of, kernel_of, start_of
from dustmap.sky.observations import HealpixBeams

#: Products of the features with one field: of the mode, of learning, and for each sample.
#: Measured on simulated skies of 500 to 8,000 stars at 10 and 20 pc; later rounds of distances
#: start where the first ended and add few.
PRODUCTS = {"lognormal": (900, 6000, 81), "gaussian": (0, 8000, 38)}
#: Rows of kriging weights, beside those that interpolate: nodes across a ray.
ROW_NODES = {"lognormal": 1.0, "gaussian": (KRIGING / LINEAR) ** 2}
#: Of a product, what is neither transform nor rows: the steps of the solver around it.
STEP_SECONDS = 4.5e-4
#: Of a run, what is neither learning nor solving: imports, the catalog, maps and pictures.
OVERHEAD = 5.0
#: Length scales of padding on each side of the torus.
PADDING = 4.0
#: Times that each is taken.
TRIALS = 3
#: Rays that are timed.
TRIAL_ROWS = 2000
#: Rows of the matrix that is factored for a trial: on a GPU fewer would be over before they begin.
TRIAL_SIZE = {"cpu": 400, "cuda": 3000}
_CPU = torch.device("cpu")
#: Steps of learning by a dense factorisation, and its operations for n rows: n³ each.
DENSE_STEPS = 60
#: Covariances of all rows in learning, gradients included, and the rays of a trial.
DENSE_COVARIANCES, TRIAL_RAYS = 36, 200


def estimated_seconds(config: Config, rays: LineIntegrals, grid: RegularGrid) -> float:
    """Of learning, solving and drawing on this machine; good to a factor of two where it was
    measured, on skies of some thousand stars."""
    if config.fit.engine == "global":
        return _global_seconds(config, rays, grid)
    n, device = len(rays), rays.device
    rows, pair = min(n, config.fit.learn_rows), _pair_seconds(config, rays)
    learning = dense_seconds(rows, device) + DENSE_COVARIANCES * pair * rows**2
    if config.fit.engine == "exact":
        return learning + pair * n**2 + _per_operation(device) * n**3
    return learning + _per_operation(device) * n * grid.size


def _pair_seconds(config: Config, rays: LineIntegrals) -> float:
    """Of the covariance of two rays."""
    count = min(len(rays), TRIAL_RAYS)
    kernel, trial = kernel_of(config.model, start_of(config.model)).to(rays.device), rays[:count]
    work = functools.partial(ClosedForm().between, kernel, trial, trial)
    with torch.no_grad():
        return _seconds(work, rays.device) / count**2


def dense_seconds(rows: int, device: torch.device = _CPU) -> float:
    """Of learning by the dense evidence of that many rows."""
    return _per_operation(device) * DENSE_STEPS * rows**3


def _per_operation(device: torch.device) -> float:
    """Seconds of one of the n³ operations of a dense factorisation."""
    size = TRIAL_SIZE[device.type]
    matrix = torch.eye(size, dtype=torch.float64, device=device) * 2.0
    return _seconds(lambda: torch.linalg.cholesky(matrix), device) * 3.0 / size**3


def _global_seconds(config: Config, rays: LineIntegrals, grid: RegularGrid) -> float:
    torus = torus_for(kernel_of(config.model, start_of(config.model)), grid, PADDING)
    field = torch.zeros(torus, dtype=dtype_of(config.compute), device=rays.device)
    fft = _seconds(lambda: torch.fft.irfftn(torch.fft.rfftn(field), s=field.shape), rays.device)
    product = 2 * ROW_NODES[config.density] * _row_seconds(config, rays, grid)
    return expected_products(config) * (fft + product + STEP_SECONDS)


def expected_products(config: Config) -> int:
    """Products of the features with one field, in a whole fit of the global engine."""
    mode, learning, sample = PRODUCTS[config.density]
    return mode + bool(config.model.learn) * learning + sample * config.fit.samples


def _row_seconds(config: Config, rays: LineIntegrals, grid: RegularGrid) -> float:
    """Of a product of all rows with one field, from those of TRIAL_ROWS rays."""
    chosen = np.random.default_rng(0).permutation(len(rays))[:TRIAL_ROWS]
    trial = rays[torch.from_numpy(np.sort(chosen)).to(rays.device)]
    share, dtype, memory = len(rays) / len(trial), dtype_of(config.compute), 2**30
    if config.fit.beams and config.density == "lognormal":
        memory = allotted(config, rays).rows
        table = BeamTable.of(grid, HealpixBeams(config.fit.beams), rays, dtype, memory)
        if table.knots > 0:
            # The sums along the beams are the same however many rays there are.
            return share * _product_seconds(table.rows(trial)) + _product_seconds(table.expansion())
    return share * _product_seconds(interpolation(trial, grid=grid, memory=memory, dtype=dtype))


def _product_seconds(rows: AbstractOperator) -> float:
    x = torch.zeros((1, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    return _seconds(lambda: rows.matmul(x), rows.device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The least of some times, which others on the machine disturb, after what comes with the
    first; a GPU is waited for."""
    ends = []
    for _ in range(TRIALS + 1):
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())
    return min(later - sooner for sooner, later in itertools.pairwise(ends))


def rounded(seconds: float) -> float:
    """To one figure, which is what the estimate is worth."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(seconds))
    return round(seconds / unit) * unit
