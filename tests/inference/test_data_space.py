"""The solve in data space against the dense exact answer and the solve in field space."""

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, GridPrior, LinearMean, RegularGrid
from dustmap.gp.features import LocalFeatures
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern12
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel, SolveSettings, solve_global, solve_in_data_space

NOISE = 0.05


def problem(dtype: torch.dtype = torch.float64) -> tuple[GridModel, Batch]:
    """300 values between and on the nodes of a 16 × 20 grid."""
    grid = RegularGrid((0.0, 0.0), (0.5, 0.4), (16, 20))
    generator = torch.Generator().manual_seed(0)
    nodes = grid.points()[torch.randperm(grid.size, generator=generator)[:200]]
    upper = torch.tensor(grid.upper, dtype=torch.float64)
    between = upper * torch.rand(100, 2, dtype=torch.float64, generator=generator)
    x = torch.cat([nodes, between])
    y = torch.sin(x[:, 0]) + 0.3 * x[:, 1] + NOISE * torch.randn(300, generator=generator)
    kernel = Matern12((2.0, 3.0), 1.2, dim=2)
    prior = GridPrior.padded(kernel, grid, padding=2.0, dtype=dtype)
    features = LocalFeatures(prior, order=4)
    model = GridModel(features, ConstantMean(0.5), GaussianLikelihood(jitter=NOISE))
    return model, Batch(PointValues(x), y.to(dtype))


def test_both_spaces_agree_in_mean_and_draws() -> None:
    model, data = problem()
    settings = SolveSettings(rtol=1e-8, max_steps=2000, samples=4, seed=3)
    ours, other = solve_in_data_space(model, data, settings), solve_global(model, data, settings)
    assert ours.converged
    assert torch.allclose(ours.eps_mean, other.eps_mean, atol=1e-5)
    assert torch.allclose(ours.deviations, other.deviations, atol=1e-5)
    assert ours.block_steps < other.block_steps


def test_mean_coefficients_are_those_of_generalised_least_squares() -> None:
    model, data = problem()
    model = GridModel(model.features, LinearMean((0.0, 0.0)), model.likelihood)
    settings = SolveSettings(rtol=1e-9, max_steps=2000, samples=2, fit_mean=True)
    found = solve_in_data_space(model, data, settings)
    phi = model.features.operator(data.functional).to_dense()
    A = phi @ phi.mT + torch.diag(model.sigma(data).detach())
    H, weights = model.mean.basis(data.functional), torch.linalg.inv(A)
    beta = torch.linalg.solve(H.mT @ weights @ H, H.mT @ weights @ data.y)
    assert torch.allclose(found.mean_coefficients, beta, atol=1e-6)
    rest = data.y - H @ beta
    assert torch.allclose(found.eps_mean, phi.mT @ weights @ rest, atol=1e-6)


def test_the_tolerance_is_in_units_of_the_noise_in_float32_too() -> None:
    model, data = problem(torch.float32)
    exact = solve_in_data_space(*problem(), SolveSettings(1e-9, 2000, samples=2))
    found = solve_in_data_space(model, data, SolveSettings(1e-3, 200, samples=2))
    assert found.converged
    phi = problem()[0].features.operator(data.functional)
    error = phi.matmul(found.eps_mean.double() - exact.eps_mean)
    assert float(error.square().mean().sqrt()) < 0.05 * NOISE


def test_more_draws_begin_with_the_same() -> None:
    model, data = problem()
    first, more = (
        solve_in_data_space(model, data, SolveSettings(1e-8, 500, samples=s)) for s in (3, 5)
    )
    assert torch.allclose(more.deviations[:3], first.deviations)
    assert len(more.deviations) == 5


def test_line_integrals_are_refused() -> None:
    model, data = problem()
    rays = LineIntegrals.from_observer(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match="solve_global"):
        solve_in_data_space(model, Batch(rays, data.y[:3]), SolveSettings())


@pytest.mark.parametrize("loose", [1.0, 10.0, 1e3])
def test_precise_data_are_solved_for_beside_loose_ones(loose: float) -> None:
    """Half of the errors are a thousand times the others, which a plain residual would not see."""
    model, data = problem(torch.float32)
    sigma = torch.full((300,), NOISE**2, dtype=torch.float64)
    sigma[::2] = loose**2
    settings = SolveSettings(1e-4, 400, samples=64, seed=1)
    found = solve_in_data_space(model, data, settings, sigma=sigma)
    exact = solve_global(*problem(), SolveSettings(1e-9, 4000, samples=64, seed=1), sigma=sigma)
    assert found.converged
    places = data.functional[torch.arange(1, 300, 2)]
    ours, theirs = (s.posterior.predict(places) for s in (found, exact))
    assert ((ours.mean - theirs.mean).abs() / theirs.std).max() < 0.05
    assert ((ours.std / theirs.std) - 1.0).abs().max() < 0.05


def test_directions_of_the_mean_that_no_data_determine_are_left_out() -> None:
    model, data = problem()
    assert isinstance(data.functional, PointValues)
    x = data.functional.x.clone()
    x[:, 1] = 0.5 * x[:, 0] + 0.4  # in the box, and along one line
    data = Batch(PointValues(x), data.y)
    model = GridModel(model.features, LinearMean((0.0, 0.0)), model.likelihood)
    settings = SolveSettings(rtol=1e-9, max_steps=3000, samples=16, seed=2, fit_mean=True)
    ours, other = solve_in_data_space(model, data, settings), solve_global(model, data, settings)
    assert ours.mean_coefficients.abs().max() < 10.0
    places = data.functional[torch.arange(20)]
    here, there = (s.posterior.predict(places) for s in (ours, other))
    assert torch.allclose(here.mean, there.mean, atol=1e-4)
    assert torch.allclose(here.std, there.std, rtol=0.02)
