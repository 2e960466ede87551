"""How long a fit will take, roughly: the time of one product here, times how many there are."""

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from dustmap.config import Config
from dustmap.gp import RegularGrid, torus_for
from dustmap.gp.features import BeamTable, interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.linalg import AbstractOperator
from dustmap.runs.memory._allotment import allotted
from dustmap.runs.models import dtype_of, kernel_of, start_of
from dustmap.sky.observations import HealpixBeams

#: Products of the features with one field, in learning and solving together, for each sample.
#: Measured on simulated skies, where it varied by a factor of two.
PRODUCTS = {"lognormal": 250, "gaussian": 120}
#: Length scales of padding on each side of the torus.
PADDING = 4.0
#: Rays that are timed.
TRIAL_ROWS = 2000
#: Rows of the matrix that is factored for a trial: on a GPU fewer would be over before they begin.
TRIAL_SIZE = {"cpu": 400, "cuda": 3000}
_CPU = torch.device("cpu")
#: Steps of learning by a dense factorisation, and its operations for n rows: n³ each.
DENSE_STEPS = 60


def estimated_seconds(config: Config, rays: LineIntegrals, grid: RegularGrid) -> float:
    """Of learning, solving and drawing on this machine; good to a factor of three or so."""
    if config.fit.engine == "global":
        return _global_seconds(config, rays, grid)
    n, device = len(rays), rays.device
    learning = dense_seconds(min(n, config.fit.learn_rows), device)
    if config.fit.engine == "exact":
        return learning + _per_operation(device) * n**3
    return learning + _per_operation(device) * n * grid.size


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
    product = 2 * _row_seconds(config, rays, grid)
    return config.fit.samples * PRODUCTS[config.density] * (fft + product)


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
    """Of a second time, after what comes with the first; a GPU is waited for."""
    ends = [0.0, 0.0]
    for i in range(2):
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends[i] = time.perf_counter()
    return ends[1] - ends[0]


def rounded(seconds: float) -> float:
    """To one figure, which is what the estimate is worth."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(seconds))
    return round(seconds / unit) * unit
