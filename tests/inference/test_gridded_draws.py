"""Draws at nodes in place of a posterior: the same moments of rays, for a sparse row each."""

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, ExactGP, RegularGrid
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern52
from dustmap.inference import GriddedDraws


def case(draws: int) -> tuple[GriddedDraws, LineIntegrals, torch.Tensor, torch.Tensor]:
    """Draws of an exact posterior, rays, and the exact mean and std of their integrals."""
    generator = torch.Generator().manual_seed(0)
    stars = 2.0 * torch.rand(30, 2, generator=generator, dtype=torch.float64) - 1.0
    rays = LineIntegrals.from_observer(stars)
    y = torch.randn(30, generator=generator, dtype=torch.float64)
    gp = ExactGP(Matern52(0.8, 1.0, dim=2), ConstantMean(0.0))
    data = Batch(rays, y, torch.full_like(y, 0.3))
    assert data.noise_variance is not None
    posterior = gp.condition(data.functional, data.y, data.noise_variance)
    grid = RegularGrid.from_bounds((-1.0, -1.0), (1.0, 1.0), (21, 21))
    exact = posterior.predict(rays)
    return GriddedDraws.of(posterior, grid, draws, 1), rays, exact.mean, exact.std


def test_rays_have_the_moments_of_the_posterior() -> None:
    found, rays, mean, std = case(2000)
    predicted = found.predict(rays)
    error = std / 2000**0.5
    # Five Monte Carlo errors, and what a cell of an eighth of a length scale smooths away.
    assert float(((predicted.mean - mean).abs() - 0.01 * std).max()) < 5 * float(error.max())
    torch.testing.assert_close(predicted.std, std, rtol=0.1, atol=0.0)
    covariance = found.covariance(rays)
    torch.testing.assert_close(covariance.diagonal().sqrt(), predicted.std)


def test_samples_are_the_stored_draws() -> None:
    found, _, _, _ = case(4)
    nodes = PointValues(found.grid.points())
    drawn = found.sample(nodes, 3, torch.Generator())
    torch.testing.assert_close(drawn, found.draws[:3])
    with pytest.raises(ValueError, match="count must be 1 to the 4 draws, got 5"):
        found.sample(nodes, 5, torch.Generator())
