"""Gradient and information of the evidence by matrices, against autograd of the dense evidence."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, FitStatus, GPModel, Parameters, RegularGrid, ZeroPoints
from dustmap.gp.features import DenseCovariance, GroupedFeatures, LocalFeatures, in_float64
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32, SumKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalSettings, GridModel, fit_global
from dustmap.inference.evidence._steps import (
    DENSE_SHIFT,
    DenseDerivatives,
    differentiate_dense,
    moved_models,
    noise_variance,
    secant_metric,
)
from tests.inference.evidence_cases import dense_log_evidence, functionals, model, observed
from tests.inference.test_global_fit import GRID, sky


def local(dim: int) -> GridModel:
    noise = GaussianLikelihood(scale=1.2, jitter=0.05)
    return model(dim, features=LocalFeatures, likelihood=noise, padding=3.0)


def derivatives(
    grid_model: GridModel, data: Batch, weights: Tensor | None = None
) -> DenseDerivatives:
    with torch.no_grad():
        residual = grid_model.features.residual_variance(data.functional).double()
        sigma = noise_variance(grid_model, data, weights) + residual
        covariance = DenseCovariance.of(grid_model.features, data.functional, sigma)
        assert covariance is not None
        moved = moved_models(grid_model, data, weights, residual, None, ("mean",), DENSE_SHIFT)
        return differentiate_dense(grid_model, data, covariance, sigma, moved)


def by_autograd(grid_model: GridModel, data: Batch) -> Tensor:
    parameters = Parameters.of(grid_model, without=("mean",))
    leaf = parameters.theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(dense_log_evidence(parameters.build(leaf), data), leaf)
    return gradient


def assert_like(found: Tensor, wanted: Tensor) -> None:
    """Forward differences err by ½ 1e-4 of second derivatives, which are of the order of N."""
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["points", "rays"])
@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_dense_evidence(dim: int, kind: str) -> None:
    grid_model, data = local(dim), observed(functionals(kind, dim, 20))
    found = derivatives(grid_model, data).gradient
    assert_like(found, by_autograd(grid_model, data))


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_information_is_that_of_differences_of_the_dense_covariance(dim: int) -> None:
    grid_model, data = local(dim), observed(functionals("rays", dim, 20))
    parameters = Parameters.of(grid_model, without=("mean",))

    def covariance(theta: Tensor) -> Tensor:
        with torch.no_grad():
            moved = parameters.build(theta)
            rows = moved.features.rows(data.functional)
            noise = moved.likelihood.noise_variance(data)
            return rows.phi @ rows.phi.mT + torch.diag(noise + rows.residual_variance)

    h, theta = 1e-4, parameters.theta
    A, units = covariance(theta), h * torch.eye(len(theta), dtype=torch.float64)
    residual = data.y - grid_model.mean.values(data.functional).detach()
    alpha = torch.linalg.solve(A, residual)
    rates = [(covariance(theta + u) - covariance(theta - u)) / (2.0 * h) for u in units]
    q = torch.stack([rate @ alpha for rate in rates])
    found = derivatives(grid_model, data)
    torch.testing.assert_close(found.of_covariance, q, rtol=2e-3, atol=2e-4)
    wanted = 0.5 * q @ torch.linalg.solve(A, q.mT)
    torch.testing.assert_close(found.average_information(), wanted, rtol=2e-3, atol=2e-4)
    seen = A - torch.diag(grid_model.sigma(data).detach())
    leverage = (seen @ torch.linalg.inv(A)).diagonal()
    torch.testing.assert_close(found.leverage, leverage, rtol=1e-8, atol=1e-10)


def test_sums_of_kernels_and_groups() -> None:
    grid_model, functional = local(1), functionals("rays", 1, 20)
    assert isinstance(grid_model.features, LocalFeatures)
    assert isinstance(functional, LineIntegrals)
    both = SumKernel((Matern32(0.5, 1.0, dim=1), Matern32(0.15, 0.3, dim=1)))
    field = LocalFeatures(grid_model.features.prior.with_kernel(both))
    grouped = GroupedFeatures(field, ZeroPoints(2, 0.4))
    data = observed(replace(functional, groups=torch.arange(20) % 2))
    of_both = replace(grid_model, features=grouped)
    found = derivatives(of_both, data).gradient
    assert_like(found, by_autograd(of_both, data))


def test_weights_divide_the_noise() -> None:
    noise = GaussianLikelihood(scale=1.2)
    grid_model = replace(local(1), likelihood=noise)
    data = observed(functionals("rays", 1, 20))
    assert data.noise_variance is not None
    tau = torch.linspace(0.5, 2.0, 20, dtype=torch.float64)
    divided = Batch(data.functional, data.y, data.noise_variance / tau)
    found = derivatives(grid_model, data, tau).gradient
    assert_like(found, by_autograd(grid_model, divided))


def test_a_secant_is_the_curvature_along_the_step() -> None:
    information = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    step = torch.tensor([0.3, -0.1], dtype=torch.float64)
    change = torch.tensor([1.5, -0.2], dtype=torch.float64)
    metric = secant_metric(information, step, change)
    torch.testing.assert_close(metric @ step, change)
    assert bool((torch.linalg.eigvalsh(metric) > 0).all())
    torch.testing.assert_close(secant_metric(information, step, information @ step), information)
    for far in (-change, 100.0 * information @ step, 0.01 * information @ step):
        assert torch.equal(secant_metric(information, step, far), information)


def test_learning_ends_at_the_top_of_the_dense_evidence() -> None:
    """From a start far away, without noise of draws, in few steps."""
    data = sky(200)
    start = GPModel(Matern32(0.15, 2.0, dim=2), ConstantMean(0.0), GaussianLikelihood(scale=2.0))
    learned = fit_global(start, data, GRID, GlobalSettings(samples=4, order=4)).learned
    assert learned is not None
    assert learned.status is FitStatus.CONVERGED
    assert learned.monte_carlo_errors == (0.0,) * 3
    assert len(learned.history) <= 12
    slope = by_autograd(replace(learned.model, features=in_float64(learned.model.features)), data)
    # What is left of the way, in standard deviations.
    left = slope * torch.tensor(learned.standard_deviations, dtype=torch.float64)
    assert float(left.abs().max()) < 0.2, left


@pytest.mark.parametrize("std", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_a_field_below_its_noise_is_learned_from_any_start(std: float, share: float) -> None:
    """The evidence is as large as anywhere on a grid of variances, within what is left for rest:
    where y is small beside A, standard deviations of the average information are long steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(60, generator=generator, dtype=torch.float64)
    y = 0.3 * share * torch.sin(6.0 * x[:, 0]) + noise
    data = Batch(PointValues(x), y, torch.full((60,), 0.09, dtype=torch.float64))
    grid = RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), (15, 15))
    mean, likelihood = ConstantMean(0.0), GaussianLikelihood(learn=False)
    model = GPModel(Matern32(0.3, std**2, dim=2).learning("variance"), mean, likelihood)
    fit = fit_global(model, data, grid, GlobalSettings(samples=2, dtype=torch.float64))

    def evidence(variance: float) -> float:
        A = Matern32(0.3, variance, dim=2)(x[:, None] - x).detach() + 0.09 * torch.eye(60).double()
        weights = torch.linalg.inv(A)
        left = y - (weights @ y).sum() / weights.sum()
        return float(-0.5 * left @ weights @ left - 0.5 * torch.logdet(A))

    best = max(evidence(float(v)) for v in torch.logspace(-3.0, 0.0, 40))
    assert evidence(float(fit.gp.kernel.variance())) > best - 0.1
