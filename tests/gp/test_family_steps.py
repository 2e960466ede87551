"""Structured Gaussian families: natural steps and bounds."""

import pytest
import torch

from dustmap.gp.families import (
    AbstractFamily,
    BlockFamily,
    FullRankFamily,
    MeanFieldFamily,
)
from dustmap.linalg import TilePartition
from tests.contracts.families import Case, dense_covariance, fitted, over_cases, regression


@over_cases
@pytest.mark.parametrize("length", [0.3, 1.0])
def test_natural_step_is_the_gradient_in_expectation_parameters(case: Case, length: float) -> None:
    data = regression(case.family.n_features, seed=3)
    state, precision = fitted(case)
    S = torch.linalg.inv(precision)
    eta1 = state.mean.clone().requires_grad_()
    eta2 = (case.mask * (S + torch.outer(state.mean, state.mean))).requires_grad_()
    # S6: ∂L/∂η is the natural gradient in θ, within the structure of S.
    loss = data.elbo(eta1, case.mask * (eta2 - torch.outer(eta1, eta1)))
    d1, d2 = torch.autograd.grad(loss, (eta1, eta2))
    theta1 = precision @ state.mean + length * d1  # S11
    theta2 = -0.5 * precision + case.mask * (length * d2)  # S12
    expected_S = torch.linalg.inv(-2 * theta2)

    weights = 1 / data.noise
    statistics = case.family.precision_statistics(data.phi, weights)
    gradient = data.phi.T @ ((data.y - data.phi @ state.mean) * weights) - state.mean
    after = case.family.natural_step(state, gradient, statistics, length, length)
    torch.testing.assert_close(dense_covariance(after), expected_S, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(after.mean, expected_S @ theta1, rtol=1e-9, atol=1e-10)


@over_cases
def test_the_precision_can_run_ahead_of_the_mean(case: Case) -> None:
    data = regression(case.family.n_features)
    statistics = case.family.precision_statistics(data.phi, 1 / data.noise)
    prior = case.family.prior()
    ahead = case.family.natural_step(prior, data.b, statistics, 0.0, 1.0)
    assert torch.equal(ahead.mean, prior.mean)
    S = torch.linalg.inv(case.mask * data.precision)
    torch.testing.assert_close(dense_covariance(ahead), S, rtol=1e-10, atol=1e-12)
    moved = case.family.natural_step(ahead, data.b, statistics, 0.5, 0.0)
    torch.testing.assert_close(moved.mean, 0.5 * S @ data.b, rtol=1e-10, atol=1e-12)
    assert torch.equal(dense_covariance(moved), dense_covariance(ahead))


@over_cases
def test_elbo_never_exceeds_the_evidence_and_is_largest_at_the_optimum(case: Case) -> None:
    data = regression(case.family.n_features)
    statistics = case.family.precision_statistics(data.phi, 1 / data.noise)
    m = torch.linalg.solve(data.precision, data.b)  # S5
    best = case.family.posterior(m, statistics)  # S4
    at_best = float(data.elbo(m, dense_covariance(best)))
    assert at_best <= data.log_evidence() + 1e-9
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        nudge = torch.randn(len(m), generator=generator, dtype=torch.float64)
        extra = case.family.precision_statistics(0.1 * nudge[None], torch.ones(1).double())
        other = case.family.posterior(m + 0.05 * nudge, statistics + extra)
        assert float(data.elbo(other.mean, dense_covariance(other))) < at_best


def test_full_rank_unit_step_is_bayesian_linear_regression() -> None:
    data = regression(9)
    family = FullRankFamily(9)
    statistics = family.precision_statistics(data.phi, 1 / data.noise)
    state = family.natural_step(family.prior(), data.b, statistics, 1.0, 1.0)
    torch.testing.assert_close(state.mean, torch.linalg.solve(data.precision, data.b))
    torch.testing.assert_close(dense_covariance(state), torch.linalg.inv(data.precision))
    elbo = float(data.elbo(state.mean, dense_covariance(state)))
    assert elbo == pytest.approx(data.log_evidence(), rel=1e-12)


def test_limits_of_the_block_family() -> None:
    data = regression(24)
    weights = 1 / data.noise
    one_tile = BlockFamily(TilePartition((4, 6), (4, 6)))
    one_point = BlockFamily(TilePartition((4, 6), (1, 1)))
    pairs: list[tuple[AbstractFamily, AbstractFamily]] = [
        (one_tile, FullRankFamily(24)),
        (one_point, MeanFieldFamily(24)),
    ]
    for block, other in pairs:
        a, b = (
            family.natural_step(
                family.prior(), data.b, family.precision_statistics(data.phi, weights), 0.4, 0.7
            )
            for family in (block, other)
        )
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(a.kl(), b.kl(), rtol=1e-11, atol=0)
        torch.testing.assert_close(a.quadratic(data.phi), b.quadratic(data.phi))


def test_mean_field_optimum_is_the_inverse_diagonal_of_the_precision() -> None:
    data = regression(8)
    family = MeanFieldFamily(8)
    state = family.posterior(
        torch.zeros(8).double(), family.precision_statistics(data.phi, 1 / data.noise)
    )
    s2 = state.std.square().requires_grad_()
    torch.testing.assert_close(s2, 1 / data.precision.diagonal())
    (gradient,) = torch.autograd.grad(data.elbo(state.mean, torch.diag(s2)), s2)
    assert float(gradient.abs().max()) < 1e-12


def test_float32_keeps_what_large_weights_leave_open() -> None:
    # One datum with σ = 1e-4 fixes one direction; the variance of the others must stay one.
    phi = torch.full((1, 4), 0.5)
    for family in (FullRankFamily(4), BlockFamily(TilePartition((4,), (4,)))):
        statistics = family.precision_statistics(phi, torch.tensor([1e8]))
        state = family.posterior(torch.zeros(4), statistics)
        open_direction = torch.tensor([[0.5, -0.5, 0.5, -0.5]])
        assert float(state.quadratic(open_direction)[0]) == pytest.approx(1.0, rel=1e-5)
        assert float(state.quadratic(phi)[0]) == pytest.approx(1e-8, rel=1e-2)
