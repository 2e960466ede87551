"""The solve by matrices of the nodes against dense algebra and the solve in field space."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior, LinearMean, RegularGrid
from dustmap.gp.features import LocalFeatures, ProductOperator
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import AbstractKernel, Matern32, Matern52
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GridModel,
    NodeCovariance,
    PrecisionOperator,
    SolveSettings,
    solve_at_nodes,
    solve_global,
)
from dustmap.inference._precision import NodePrecision
from dustmap.linalg import SparseOperator

NOISE = 0.05


def problem(
    kernel: AbstractKernel | None = None,
    noise: float = NOISE,
    dtype: torch.dtype = torch.float64,
    n: int = 300,
) -> tuple[GridModel, Batch]:
    """n values on a grid of 9 × 11 nodes."""
    grid = RegularGrid((0.0, 0.0), (0.5, 0.4), (9, 11))
    generator = torch.Generator().manual_seed(0)
    upper = torch.tensor(grid.upper, dtype=torch.float64)
    x = upper * torch.rand(n, 2, dtype=torch.float64, generator=generator)
    y = torch.sin(x[:, 0]) + 0.3 * x[:, 1] + noise * torch.randn(n, generator=generator)
    prior = GridPrior.padded(kernel or Matern32((2.0, 3.0), 1.2, dim=2), grid, dtype=dtype)
    model = GridModel(LocalFeatures(prior), ConstantMean(0.5), GaussianLikelihood(jitter=noise))
    return model, Batch(PointValues(x), y.to(dtype))


def dense(model: GridModel, data: Batch) -> tuple[Tensor, Tensor]:
    """Φ (N, M_w) and A = ΦΦᵀ + Σ (N, N)."""
    phi = model.features.operator(data.functional).to_dense().double()
    return phi, phi @ phi.mT + torch.diag(model.sigma(data).detach().double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mean_and_draws_are_those_of_the_solve_in_field_space(dtype: torch.dtype) -> None:
    model, data = problem(dtype=dtype)
    ours = solve_at_nodes(model, data, SolveSettings(samples=4, seed=3))
    assert ours is not None
    assert ours.converged
    assert (ours.block_steps, ours.eps_mean.dtype) == (0, dtype)
    exact = SolveSettings(rtol=1e-9, max_steps=2000, samples=4, seed=3)
    other = solve_global(*problem(), exact)
    atol = 1e-6 if dtype == torch.float64 else 2e-4
    assert torch.allclose(ours.eps_mean.double(), other.eps_mean, atol=atol)
    if dtype == torch.float64:  # of float32 noise otherwise
        assert torch.allclose(ours.deviations, other.deviations, atol=atol)


def test_mean_coefficients_are_those_of_generalised_least_squares() -> None:
    model, data = problem()
    model = GridModel(model.features, LinearMean((0.0, 0.0)), model.likelihood)
    found = solve_at_nodes(model, data, SolveSettings(samples=2, fit_mean=True))
    assert found is not None
    (phi, A), H = dense(model, data), model.mean.basis(data.functional)
    weights = torch.linalg.inv(A)
    beta = torch.linalg.solve(H.mT @ weights @ H, H.mT @ weights @ data.y)
    assert torch.allclose(found.mean_coefficients, beta, atol=1e-8)
    assert torch.allclose(found.eps_mean, phi.mT @ weights @ (data.y - H @ beta), atol=1e-8)
    assert found.posterior.spread is not None


def test_the_covariance_is_that_of_the_data() -> None:
    model, data = problem()
    sigma = model.sigma(data).detach()
    covariance = NodeCovariance.of(model.features, data.functional, sigma)
    assert covariance is not None
    _, A = dense(model, data)
    v = torch.randn(3, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(covariance.matmul(v), v @ A, atol=1e-10)
    z = covariance.solve(v)
    assert torch.allclose(z @ A, v, atol=1e-5 * NOISE)
    left = (v - 1.1 * z @ A) / sigma.sqrt()
    assert torch.allclose(covariance.residuals(1.1 * z, v), left.square().mean(1).sqrt())


def test_a_kernel_as_long_as_the_box_with_little_noise_is_solved_for() -> None:
    # The field has 10⁵ times the standard deviation of the noise.
    model, data = problem(Matern52((4.0, 3.5), 1e4, dim=2), noise=1e-3)
    found = solve_at_nodes(model, data, SolveSettings(rtol=1e-4, samples=2))
    assert found is not None
    assert found.converged
    phi, A = dense(model, data)
    fitted = data.y - 0.5 - model.sigma(data).detach() * torch.linalg.solve(A, data.y - 0.5)
    assert torch.allclose(phi @ found.eps_mean, fitted, atol=2e-5)


def test_the_precision_among_nodes_is_that_of_the_data() -> None:
    model, data = problem(n=400)
    phi, weights = model.features.operator(data.functional), 1.0 / model.sigma(data).detach()
    assert isinstance(phi, ProductOperator)
    assert isinstance(phi.left, SparseOperator)
    x = torch.randn(3, phi.shape[1], dtype=torch.float64)
    ours = NodePrecision(phi.left, phi.right, weights).matmul(x)
    assert torch.allclose(ours, PrecisionOperator(phi, weights).matmul(x), rtol=1e-9, atol=1e-9)
    settings = SolveSettings(rtol=1e-9, max_steps=2000, samples=2)
    found, exact = solve_global(model, data, settings), solve_at_nodes(model, data, settings)
    assert exact is not None
    assert torch.allclose(found.deviations, exact.deviations, atol=1e-6)


def test_a_prior_without_a_factor_gives_no_solution() -> None:
    model, data = problem()
    assert isinstance(model.features, LocalFeatures)
    prior = replace(model.features.prior, spectrum=-model.features.prior.spectrum)
    broken = replace(model, features=replace(model.features, prior=prior))
    assert solve_at_nodes(broken, data, SolveSettings(samples=2)) is None


def test_line_integrals_are_refused() -> None:
    model, data = problem()
    rays = LineIntegrals.from_observer(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match="solve_global"):
        solve_at_nodes(model, Batch(rays, data.y[:3]), SolveSettings())
