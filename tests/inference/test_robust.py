"""Student-t noise: outliers lose their say, clean data keep theirs, the density is the integral."""

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel
from dustmap.inference.evidence._robust import (
    RobustFit,
    SolverOf,
    fit_student_t,
)
from dustmap.inference.evidence._student_t_noise import (
    RobustSettings,
    StudentTNoise,
    fitted_noise,
)
from tests.inference.evidence_cases import Dense, DenseSolver, functionals, model, observed

SKY = 200


def sky() -> tuple[GridModel, Batch, Tensor]:
    """Rays through a plane, seen with little noise, and their rows of Φ."""
    grid_model = model(
        2,
        0.5,
        1.0,
        shape=(8, 8),
        mean=ConstantMean(0.0),
        likelihood=GaussianLikelihood(),
    )
    batch = observed(functionals("rays", 2, SKY), noise=0.05)
    return grid_model, batch, grid_model.features.rows(batch.functional).phi.detach()


def solver(phi: Tensor) -> SolverOf[Dense]:
    """Dense solves of the sky with these rows."""
    return lambda batch: DenseSolver(batch, phi)


def with_outliers(batch: Batch) -> tuple[Batch, Tensor]:
    """5 % of the data moved by 20 to 60 standard deviations, upwards or downwards."""
    generator = torch.Generator().manual_seed(3)
    hit = torch.randperm(SKY, generator=generator)[: SKY // 20]
    assert batch.noise_variance is not None
    size = 20.0 + 40.0 * torch.rand(len(hit), generator=generator, dtype=torch.float64)
    sign = torch.where(torch.rand(len(hit), generator=generator) < 0.7, 1.0, -1.0).double()
    y = batch.y.clone()
    y[hit] += sign * size * batch.noise_variance[hit].sqrt()
    return Batch(batch.functional, y, batch.noise_variance), hit


def at_points(grid_model: GridModel, solution: Dense) -> tuple[Tensor, Tensor]:
    """Posterior mean and standard deviation at 50 places."""
    x = torch.rand((50, 2), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    rows = grid_model.features.rows(PointValues(x))
    mean = grid_model.mean.basis(PointValues(x)) @ solution.mean_coefficients
    mean = mean + rows.phi @ solution.eps_mean
    variance = (solution.deviations @ rows.phi.mT).square().mean(0) + rows.residual_variance
    return mean.detach(), variance.detach().sqrt()


def test_gross_outliers_do_not_move_the_map() -> None:
    grid_model, clean, phi = sky()
    dirty, hit = with_outliers(clean)
    reference = DenseSolver(clean, phi)(grid_model, grid_model.sigma(clean).detach(), 64, None)
    expected, std = at_points(grid_model, reference)
    fit: RobustFit[Dense] = fit_student_t(
        grid_model, dirty, RobustSettings(samples=64), solver(phi)
    )
    assert fit.converged, fit.message()
    assert bool((fit.weights[hit] < 0.1).all())
    assert len(hit) <= fit.outliers <= len(hit) + 4
    assert f"{fit.outliers} of {SKY} data" in fit.message()
    assert "scale" not in fit.message()  # which the noise of the report has, from another start
    got, robust_std = at_points(grid_model, fit.solution)
    assert float(((got - expected) / std).abs().max()) < 1.0
    assert float(((got - expected) / std).square().mean().sqrt()) < 0.5
    assert 0.8 < float((robust_std / std).mean()) < 1.3
    naive = DenseSolver(dirty, phi)(grid_model, grid_model.sigma(dirty).detach(), 64, None)
    wrong, _ = at_points(grid_model, naive)
    assert float(((wrong - expected) / std).abs().max()) > 3.0
    assert fit.noise.nu < 5.0
    assert 0.5 < fit.noise.scale < 1.1


def test_clean_data_give_the_gaussian_posterior() -> None:
    grid_model, clean, phi = sky()
    reference = DenseSolver(clean, phi)(grid_model, grid_model.sigma(clean).detach(), 64, None)
    expected, std = at_points(grid_model, reference)
    fit = fit_student_t(grid_model, clean, RobustSettings(samples=64), solver(phi))
    assert fit.converged
    assert fit.noise.nu > 15.0
    assert fit.outliers == 0
    assert fit.noise.scale == pytest.approx(1.0, abs=0.1)
    got, robust_std = at_points(grid_model, fit.solution)
    assert float(((got - expected) / std).abs().max()) < 0.3
    torch.testing.assert_close(robust_std, std, rtol=0.1, atol=0.0)


def test_too_few_rounds_are_reported() -> None:
    grid_model, clean, phi = sky()
    dirty, _ = with_outliers(clean)
    fit = fit_student_t(grid_model, dirty, RobustSettings(samples=4, max_rounds=1), solver(phi))
    assert not fit.converged
    assert "increase max_rounds" in fit.message()


@pytest.mark.parametrize(("nu", "scale"), [(2.0, 0.7), (8.0, 1.5)])
def test_degrees_of_freedom_and_scale_of_plain_residuals(nu: float, scale: float) -> None:
    e = scipy.stats.t.rvs(nu, scale=scale, size=20_000, random_state=0)
    ratio = torch.tensor(e).square()
    got = fitted_noise(ratio, StudentTNoise(4.0), RobustSettings())
    expected_nu, _, expected_scale = scipy.stats.t.fit(e, floc=0.0)
    assert got.nu == pytest.approx(expected_nu, rel=0.02)
    assert got.scale == pytest.approx(expected_scale, rel=0.01)
    held = fitted_noise(ratio, StudentTNoise(5.0), RobustSettings(learn_nu=False))
    assert held.nu == 5.0
    fixed = fitted_noise(ratio, StudentTNoise(5.0), RobustSettings(learn_scale=False))
    assert fixed.scale == 1.0


def test_data_without_errors_of_their_own_say_nothing_of_the_law() -> None:
    law, ratio = StudentTNoise(4.0, 1.2), torch.ones(20, dtype=torch.float64)
    assert fitted_noise(ratio, law, RobustSettings(), torch.zeros(20).double()) == law


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="nu must be positive"):
        StudentTNoise(-1.0)
    with pytest.raises(ValueError, match="nu must be between"):
        RobustSettings(nu=0.1)
    with pytest.raises(ValueError, match="samples at least 2"):
        RobustSettings(samples=1)


@pytest.mark.parametrize("shares", [1.0, 0.2])
def test_stated_errors_weigh_as_their_prior_says(shares: float) -> None:
    """Beside a grid of scales: thirty residuals of a tenth of the stated errors, ν known."""
    e = scipy.stats.t.rvs(6.0, scale=0.1, size=30, random_state=1)
    ratio, share = torch.tensor(e).square(), torch.full((30,), shares, dtype=torch.float64)
    settings = RobustSettings(learn_nu=False, scale_std=0.5)
    got = fitted_noise(ratio, StudentTNoise(6.0, 0.3), settings, share)
    scales = np.geomspace(0.05, 2.0, 4001)
    logs = scipy.stats.t.logpdf(e[:, None], 6.0, scale=scales).sum(0)
    best = scales[np.argmax(shares * logs - 0.5 * (np.log(scales) / 0.5) ** 2)]
    assert got.scale == pytest.approx(best, rel=2e-3)
    flat = fitted_noise(ratio, StudentTNoise(6.0, 0.3), RobustSettings(learn_nu=False), share)
    assert got.scale > 1.02 * flat.scale
