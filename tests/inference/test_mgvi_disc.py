"""Densities of a disc: its scales come back with their errors."""

import math

import torch
from torch import Tensor

from dustmap.gp import Batch, DiscMean, GridPrior, LogDiscMean, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    LogNormalModel,
    MGVISettings,
    MGVIStatus,
    fit_mgvi,
    typical_log_density,
)
from dustmap.linalg import AbstractOperator

GRID = RegularGrid.from_bounds((-300.0, -300.0, -200.0), (300.0, 300.0, 200.0), (13, 13, 17))
#: Of the simulated disc.
HEIGHT, DENSITY = 60.0, 0.004


def model_of(mean: LogDiscMean) -> LogNormalModel:
    def rows(functional: AbstractFunctional) -> AbstractOperator:
        return interpolation(functional, GRID, dtype=torch.float64)

    prior = GridPrior.padded(Matern32(60.0, 0.25, dim=3), GRID, padding=2.0, dtype=torch.float64)
    return LogNormalModel(prior, mean, GaussianLikelihood(scale=1.0), rows)


def draw(model: LogNormalModel, stars: int, seed: int) -> Batch:
    """Rays through a density drawn from the model, seen with errors of a twentieth."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        truth = model.log_mean() + model.prior.root().matmul(normal(model.prior.n_white))
    unit = torch.rand((stars, 3), generator=generator, dtype=torch.float64) - 0.5
    rays = LineIntegrals.from_observer(unit * torch.tensor([600.0, 600.0, 400.0]).double())
    f = model.interpolation(rays).matmul(truth.exp())
    sigma = 0.05 * float(f.median())
    return Batch(rays, f + sigma * normal(stars), torch.full_like(f, sigma**2))


def test_the_scale_height_of_a_disc_is_found_within_its_error() -> None:
    data = draw(model_of(LogDiscMean(math.log(DENSITY), HEIGHT, 3000.0, learn=False)), 400, 1)
    typical = typical_log_density(data, 0.25, DiscMean(1.0, 100.0, 3000.0))
    assert abs(typical - math.log(DENSITY)) < 0.7
    profile = LogDiscMean(typical, 100.0, 3000.0)
    model = model_of(profile)
    solution = fit_mgvi(model, data, MGVISettings(samples=32))
    assert solution.status is MGVIStatus.CONVERGED
    height, length = profile.scales(solution.coefficients)
    # Of 1/H: that of b, times its prior's.
    of_height = solution.deviations[:, model.prior.n_white + 1].std(correction=0)
    error = float(of_height * model.scales()[1]) / 100.0
    assert abs(1.0 / height - 1.0 / HEIGHT) < 2.5 * error
    assert error < 0.35 / HEIGHT
    assert 1 / 1.7 < math.exp(float(solution.coefficients[0])) / DENSITY < 1.7
    # A box of 600 pc knows nothing of 3 kpc: the prior stays.
    assert -3.0 < 3000.0 / length < 5.0
