"""Every family against dense matrices: its S is a masked precision, inverted."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp.families import (
    AbstractRootedGaussian,
)
from tests.contracts.families import (
    Case,
    dense_covariance,
    fitted,
    over_cases,
    regression,
)


@over_cases
def test_prior_is_standard_normal(case: Case) -> None:
    prior = case.family.prior()
    identity = torch.eye(case.family.n_features, dtype=torch.float64)
    torch.testing.assert_close(dense_covariance(prior), identity, rtol=0, atol=1e-14)
    assert torch.equal(prior.mean, torch.zeros(case.family.n_features, dtype=torch.float64))
    assert float(prior.kl()) == 0.0


@over_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operations_agree_with_the_dense_covariance(case: Case, dtype: torch.dtype) -> None:
    state, precision = fitted(case, dtype)
    S = torch.linalg.inv(precision).to(dtype)
    generator = torch.Generator().manual_seed(1)
    v = torch.randn((2, 3, len(S)), generator=generator, dtype=torch.float64).to(dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5

    def near(got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=2 * tolerance, atol=tolerance)

    near(state.apply_covariance(v), v @ S)
    near(state.quadratic(v[0]), ((v[0] @ S) * v[0]).sum(-1))
    near(state.covariance_of(v[0], v[1]), v[0] @ S @ v[1].T)
    if isinstance(state, AbstractRootedGaussian):
        root = state.apply_root(torch.eye(len(S), dtype=dtype)).T
        near(root @ root.T, S)
        near(state.apply_root_transpose(v), v @ root)
    assert state.quadratic(v[0]).dtype == state.mean.dtype == dtype


@over_cases
def test_kl_equals_the_dense_kl(case: Case) -> None:
    state, precision = fitted(case)
    q = torch.distributions.MultivariateNormal(state.mean, precision_matrix=precision)
    identity = torch.eye(len(precision), dtype=torch.float64)
    p = torch.distributions.MultivariateNormal(torch.zeros_like(state.mean), identity)
    expected = torch.distributions.kl_divergence(q, p)
    torch.testing.assert_close(state.kl(), expected, rtol=1e-12, atol=0)
    single, _ = fitted(case, torch.float32)
    torch.testing.assert_close(single.kl(), expected, rtol=1e-5, atol=0)


@over_cases
def test_natural_parameters(case: Case) -> None:
    state, prior = fitted(case)[0], case.family.prior()
    step = case.family.posterior(state.mean, state.precision() - prior.precision())
    torch.testing.assert_close(dense_covariance(step), dense_covariance(state))


@over_cases
def test_with_mean_keeps_the_covariance(case: Case) -> None:
    state, _ = fitted(case)
    moved = state.with_mean(torch.zeros_like(state.mean))
    assert torch.equal(dense_covariance(moved), dense_covariance(state))
    assert not moved.mean.any()
    assert state.mean.any()


@over_cases
def test_statistics_add_over_batches_in_place(case: Case) -> None:
    data = regression(case.family.n_features)
    weights = 1 / data.noise
    whole = case.family.precision_statistics(data.phi, weights)
    total = case.family.precision_statistics(data.phi[:5], weights[:5])
    again = case.family.precision_statistics(data.phi[5:], weights[5:], into=total)
    assert again is total
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
    none = case.family.precision_statistics(data.phi[:0], weights[:0])
    assert torch.equal(none, case.family.zero_statistics())


@over_cases
def test_samples_have_the_mean_and_covariance_of_q(case: Case) -> None:
    state, precision = fitted(case)
    S = torch.linalg.inv(precision)
    count = 20_000
    draws = state.sample(count, torch.Generator().manual_seed(5))
    assert torch.equal(draws, state.sample(count, torch.Generator().manual_seed(5)))
    variance = S.diagonal()
    error = (draws.mean(0) - state.mean) / (variance / count).sqrt()
    assert float(error.abs().max()) < 5
    # Var of a sample covariance: (S_ii S_jj + S_ij²)/count.
    spread = ((variance[:, None] * variance[None, :] + S.square()) / count).sqrt()
    assert float(((draws.T.cov() - S) / spread).abs().max()) < 5


@over_cases
def test_quadratic_is_differentiable_in_the_features(case: Case) -> None:
    state, _ = fitted(case)
    phi = regression(case.family.n_features).phi[:2].requires_grad_()
    assert torch.autograd.gradcheck(state.quadratic, (phi,))


@over_cases
@pytest.mark.parametrize("weight", [-1e3, math.nan])
def test_impossible_precisions_are_refused(case: Case, weight: float) -> None:
    data = regression(case.family.n_features)
    statistics = case.family.precision_statistics(data.phi, torch.full_like(data.y, weight))
    with pytest.raises(ValueError, match="finite weights >= 0"):
        case.family.posterior(data.b, statistics)


@over_cases
def test_disagreeing_shapes_are_refused(case: Case) -> None:
    data = regression(case.family.n_features + 1)
    with pytest.raises(ValueError, match="phi must be"):
        case.family.precision_statistics(data.phi, data.noise)
    data = regression(case.family.n_features)
    with pytest.raises(ValueError, match="weights"):
        case.family.precision_statistics(data.phi, data.noise[:-1])
