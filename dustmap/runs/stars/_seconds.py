"""How long a fit will take, roughly: the time of one product here, times how many there are."""

import functools

import numpy as np
import torch

from dustmap.config import Config
from dustmap.gp import RegularGrid, torus_for
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import BeamTable, interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import StationaryKernel
from dustmap.linalg import AbstractOperator
from dustmap.runs._machine import (
    dense_seconds,
    dtype_of,
    measured_seconds,
    seconds_per_operation,
)
from dustmap.runs.stars._model import density_of, kernel_of
from dustmap.sky.observations import HealpixBeams

#: Products of the features with one field: of the mode, of learning, and for each sample.
#: Measured on simulated skies of 500 to 8,000 stars at 10 and 20 pc; later rounds of distances
#: start where the first ended and add few.
PRODUCTS = {"lognormal": (900, 6000, 81), "gaussian": (0, 8000, 38)}
#: Rows of kriging weights, beside those that interpolate: nodes across a ray.
ROW_NODES = {"lognormal": 1.0, "gaussian": 4.0}
#: Of a product, what is neither transform nor rows: the steps of the solver around it.
STEP_SECONDS = 4.5e-4
#: Of a run, what is neither learning nor solving: imports, the catalog, maps and pictures.
OVERHEAD = 5.0
#: Length scales of padding on each side of the torus.
PADDING = 4.0
#: Rays that are timed.
TRIAL_ROWS = 2000
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
        return learning + pair * n**2 + seconds_per_operation(device) * n**3
    return learning + seconds_per_operation(device) * n * grid.size


def _kernel(config: Config) -> StationaryKernel:
    """Where learning starts."""
    return kernel_of(config.model, density_of(config).start(config.model))


def _pair_seconds(config: Config, rays: LineIntegrals) -> float:
    """Of the covariance of two rays."""
    count = min(len(rays), TRIAL_RAYS)
    kernel, trial = _kernel(config).to(rays.device), rays[:count]
    work = functools.partial(ClosedForm().between, kernel, trial, trial)
    with torch.no_grad():
        return measured_seconds(work, rays.device) / count**2


def _global_seconds(config: Config, rays: LineIntegrals, grid: RegularGrid) -> float:
    torus = torus_for(_kernel(config), grid, PADDING)
    field = torch.zeros(torus, dtype=dtype_of(config.compute), device=rays.device)
    fft = measured_seconds(
        lambda: torch.fft.irfftn(torch.fft.rfftn(field), s=field.shape), rays.device
    )
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
    if config.fit.beams and config.engine == "lognormal":
        memory = config.compute.memory_bytes // 2
        table = BeamTable.of(grid, HealpixBeams(config.fit.beams), rays, dtype, memory)
        if table.knots > 0:
            # The sums along the beams are the same however many rays there are.
            return share * _product_seconds(table.rows(trial)) + _product_seconds(table.expansion())
    return share * _product_seconds(interpolation(trial, grid=grid, memory=memory, dtype=dtype))


def _product_seconds(rows: AbstractOperator) -> float:
    x = torch.zeros((1, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    return measured_seconds(lambda: rows.matmul(x), rows.device)
