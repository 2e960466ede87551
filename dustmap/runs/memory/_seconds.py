"""How long a fit will take, roughly: the time of one product here, times how many there are."""

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from dustmap.config import Config
from dustmap.gp import RegularGrid, torus_for
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.runs.models import dtype_of, kernel_of, start_of

#: Products of the features with one field, in learning and solving together, for each sample.
#: Measured on simulated skies, where it varied by a factor of two.
PRODUCTS = {"lognormal": 250, "gaussian": 120}
#: Length scales of padding on each side of the torus.
PADDING = 4.0
#: Rays that are timed.
TRIAL_ROWS = 2000
#: Steps of learning by a dense factorisation, and its operations for n rows: n³ each.
DENSE_STEPS = 60


def estimated_seconds(config: Config, rays: LineIntegrals, grid: RegularGrid) -> float:
    """Of learning, solving and drawing on this machine; good to a factor of three or so."""
    if config.fit.engine == "global":
        return _global_seconds(config, rays, grid)
    n = len(rays)
    if config.fit.engine == "exact":
        return dense_seconds(min(n, config.fit.learn_rows)) + _per_operation() * n**3
    return dense_seconds(min(n, config.fit.learn_rows)) + _per_operation() * n * grid.size


def dense_seconds(rows: int) -> float:
    """Of learning by the dense evidence of that many rows."""
    return _per_operation() * DENSE_STEPS * rows**3


def _per_operation() -> float:
    """Seconds of one of the n³ operations of a dense factorisation."""
    size = 400
    matrix = torch.eye(size, dtype=torch.float64) * 2.0
    return _seconds(lambda: torch.linalg.cholesky(matrix)) * 3.0 / size**3


def _global_seconds(config: Config, rays: LineIntegrals, grid: RegularGrid) -> float:
    torus = torus_for(kernel_of(config.model, start_of(config.model)), grid, PADDING)
    field = torch.zeros(torus, dtype=dtype_of(config.compute))
    fft = _seconds(lambda: torch.fft.irfftn(torch.fft.rfftn(field), s=field.shape))
    chosen = np.random.default_rng(0).permutation(len(rays))[:TRIAL_ROWS]
    trial = rays[torch.from_numpy(np.sort(chosen))]
    rows = interpolation(trial, grid=grid, memory=2**30, dtype=field.dtype)
    nodes = torch.zeros((1, grid.size), dtype=field.dtype)
    product = _seconds(lambda: rows.matmul(nodes)) * 2 * len(rays) / len(trial)
    return config.fit.samples * PRODUCTS[config.density] * (fft + product)


def _seconds(work: Callable[[], object]) -> float:
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounded(seconds: float) -> float:
    """To one figure, which is what the estimate is worth."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(seconds))
    return round(seconds / unit) * unit
