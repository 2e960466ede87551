"""Scales of many skies: (estimate − truth) / error has mean 0 and standard deviation 1."""

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ExactGP, GPModel, GridPrior, Prediction, ZeroPoints
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import without_groups
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GlobalSettings,
    LogNormalModel,
    MGVISettings,
    fit_mgvi,
    fit_with_scales,
)
from tests.inference.test_zero_points_calibration import COUNT, NOISE, STARS, STD, box, observers

pytestmark = pytest.mark.slow

SCALE = 0.1
POINTS = ZeroPoints(COUNT, STD, SCALE)
KERNEL = Matern32(0.5, 0.2, dim=2).fixed()


def scales(seed: int) -> Tensor:
    """s (COUNT,) of a sky."""
    generator = torch.Generator().manual_seed(5000 + seed)
    return SCALE * torch.randn(COUNT, generator=generator, dtype=torch.float64)


def linear(seed: int) -> tuple[Prediction | None, Tensor, Tensor]:
    """Of a sky drawn from the exact process of its rays around a mean of one, which is learned."""
    rays, _, errors = observers(seed)
    assert rays.groups is not None
    exact = ExactGP(KERNEL, ConstantMean(1.0)).covariance(without_groups(rays))
    root = torch.linalg.cholesky(exact + 1e-6 * torch.eye(STARS, dtype=torch.float64))
    white = torch.randn(STARS, generator=torch.Generator().manual_seed(9000 + seed)).double()
    f, s = rays.edges[:, 1] + root @ white, scales(seed)
    y = (1.0 + s[rays.groups]) * f + errors
    model = GPModel(KERNEL, ConstantMean(0.5), GaussianLikelihood().fixed(), POINTS)
    settings = GlobalSettings(samples=200, rtol=1e-5, dtype=torch.float64, seed=seed)
    data = Batch(rays, y, torch.full_like(y, NOISE**2))
    fit = fit_with_scales(model, data, box(11), settings)
    truth = fit.posterior.predict(without_groups(rays))
    return fit.posterior.scales(), s, (truth.mean - f) / truth.std


def lognormal(seed: int) -> tuple[Prediction | None, Tensor, Tensor]:
    """Of a sky drawn on a grid twice as fine as that of the fit."""
    rays, _, errors = observers(seed)
    assert rays.groups is not None
    fine = GridPrior.padded(KERNEL, box(21), dtype=torch.float64)
    generator = torch.Generator().manual_seed(9000 + seed)
    white = torch.randn(fine.n_white, generator=generator, dtype=torch.float64)
    density = fine.root().matmul(white).exp()
    f = interpolation(without_groups(rays), fine.grid, dtype=torch.float64).matmul(density)
    s = scales(seed)
    y = (1.0 + s[rays.groups]) * f + errors

    def rows(functional):  # type: ignore[no-untyped-def]
        return interpolation(functional, box(11), dtype=torch.float64)

    prior = GridPrior.padded(KERNEL, box(11), dtype=torch.float64)
    noise = GaussianLikelihood().fixed()
    model = LogNormalModel(prior, ConstantMean(0.0), noise, rows, zero_points=POINTS)
    settings = MGVISettings(samples=64, seed=seed)
    fit = fit_mgvi(model, Batch(rays, y, torch.full_like(y, NOISE**2)), settings)
    truth = fit.posterior.predict(without_groups(rays))
    return fit.posterior.scales(), s, (truth.mean - f) / truth.std


@pytest.mark.parametrize(("sky", "skies"), [(linear, 40), (lognormal, 24)])
def test_scales_are_as_uncertain_as_they_are_said_to_be(sky, skies: int) -> None:  # type: ignore[no-untyped-def]
    """Scales of one sky share what only their prior tells, so that of 3 n values about 2 n count:
    mean and standard deviation within three of their own."""
    z, far, differences, errors = [], [], list[Tensor](), list[Tensor]()
    for seed in range(skies):
        found, s, of_field = sky(seed)
        assert found is not None
        z.append((found.mean.double() - s) / found.std.double())
        apart = found.mean.double() - s
        differences.append(apart - apart.mean())
        errors.append(found.std.double())
        far.append(of_field.double().square().mean())
    every = torch.cat(z)
    assert abs(float(every.mean())) < 3.0 / (2 * skies) ** 0.5
    assert float(every.std()) == pytest.approx(1.0, abs=3.0 / (4 * skies) ** 0.5)
    # Differences are the data's to tell, what is common to all the prior's.
    assert float(torch.cat(differences).std()) < 0.8 * float(torch.cat(errors).mean())
    assert float(torch.stack(far).mean().sqrt()) == pytest.approx(1.0, abs=0.35)
