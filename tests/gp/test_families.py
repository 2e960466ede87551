"""Families against dense matrices: their S is a masked precision, inverted."""

import math
from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor

from dustmap.gp.families import (
    AbstractFamily,
    AbstractGaussian,
    BlockFamily,
    FullRankFamily,
    MeanFieldFamily,
    dense_expectation_to_moment,
    dense_moment_to_expectation,
    dense_moment_to_natural,
    dense_natural_to_moment,
    diagonal_expectation_to_moment,
    diagonal_moment_to_expectation,
    diagonal_moment_to_natural,
    diagonal_natural_to_moment,
)
from dustmap.linalg import TilePartition


def block_mask(shape: tuple[int, ...], tile: tuple[int, ...]) -> Tensor:
    """Whether two points of the grid lie in one tile, by integer division of their coordinates."""
    axes = [torch.arange(size) // t for size, t in zip(shape, tile, strict=True)]
    label = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(math.prod(shape), -1)
    return (label[:, None] == label[None, :]).all(-1)


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    family: AbstractFamily
    mask: Tensor


def block_case(shape: tuple[int, ...], tile: tuple[int, ...]) -> Case:
    family = BlockFamily(TilePartition(shape, tile))
    return Case(f"block-{shape}-{tile}", family, block_mask(shape, tile))


CASES = [
    Case("mean-field", MeanFieldFamily(11), torch.eye(11, dtype=torch.bool)),
    block_case((13,), (4,)),
    block_case((6,), (1,)),
    block_case((5, 6), (2, 4)),
    block_case((4, 6), (2, 3)),
    block_case((3, 4, 3), (2, 2, 2)),
    block_case((2, 3, 4), (2, 3, 4)),
    Case("full-rank", FullRankFamily(11), torch.ones(11, 11, dtype=torch.bool)),
]

over_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@dataclass(frozen=True, eq=False)
class Regression:
    """y = Φ ε + noise: everything about it is known in closed form."""

    phi: Tensor
    y: Tensor
    noise: Tensor

    @property
    def precision(self) -> Tensor:
        """Λ = I + Φᵀ Σ⁻¹ Φ."""
        identity = torch.eye(self.phi.shape[1], dtype=self.phi.dtype)
        return identity + self.phi.T @ torch.diag(1 / self.noise) @ self.phi

    @property
    def b(self) -> Tensor:
        return self.phi.T @ (self.y / self.noise)

    def log_evidence(self) -> float:
        covariance = self.phi @ self.phi.T + torch.diag(self.noise)
        zero = torch.zeros_like(self.y)
        return float(stats.multivariate_normal.logpdf(self.y, zero, covariance))

    def elbo(self, m: Tensor, S: Tensor) -> Tensor:
        """Eq. 13-14 with no residual variance, for a dense S."""
        mu = self.phi @ m
        v = ((self.phi @ S) * self.phi).sum(-1)
        a = -0.5 * (2 * math.pi * self.noise).log() - ((self.y - mu) ** 2 + v) / (2 * self.noise)
        kl = 0.5 * (S.trace() + m @ m - torch.logdet(S) - len(m))
        return a.sum() - kl


def regression(n_features: int, n: int = 17, seed: int = 0) -> Regression:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Regression(0.6 * normal(n, n_features), normal(n), 0.2 + normal(n).square())


def dense_covariance(state: AbstractGaussian) -> Tensor:
    identity = torch.eye(len(state.mean), dtype=state.mean.dtype)
    return state.apply_covariance(identity)


def fitted(case: Case, dtype: torch.dtype = torch.float64) -> tuple[AbstractGaussian, Tensor]:
    """A state with some mean and the S of some data, and its dense precision."""
    data = regression(case.family.n_features)
    statistics = case.family.precision_statistics(data.phi.to(dtype), 1 / data.noise.to(dtype))
    mean = torch.linspace(-1, 1, case.family.n_features, dtype=dtype)
    identity = torch.eye(case.family.n_features, dtype=torch.float64)
    return case.family.posterior(mean, statistics), identity + case.mask * (
        data.precision - identity
    )


@over_cases
def test_prior_is_standard_normal(case: Case) -> None:
    prior = case.family.prior()
    identity = torch.eye(case.family.n_features, dtype=torch.float64)
    assert torch.equal(dense_covariance(prior), identity)
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
    near(state.apply_precision(v), v @ precision.to(dtype))
    near(state.quadratic(v[0]), ((v[0] @ S) * v[0]).sum(-1))
    near(state.covariance_of(v[0], v[1]), v[0] @ S @ v[1].T)
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
    state, precision = fitted(case)
    theta1, theta2 = state.natural()
    torch.testing.assert_close(theta1, precision @ state.mean, rtol=1e-12, atol=1e-12)
    prior = case.family.prior()
    assert torch.equal(prior.natural()[0], prior.mean)
    step = case.family.posterior(state.mean, -2 * theta2 - prior.precision())
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


def test_statistics_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = regression(30)
    families = (BlockFamily(TilePartition((5, 6), (2, 4))), FullRankFamily(30))
    whole = [family.precision_statistics(data.phi, data.noise) for family in families]
    monkeypatch.setattr("dustmap.gp.families._block._CHUNK", 300)
    monkeypatch.setattr("dustmap.gp.families._full_rank._CHUNK", 100)
    pieces = [family.precision_statistics(data.phi, data.noise) for family in families]
    torch.testing.assert_close(pieces, whole, rtol=1e-13, atol=1e-13)


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


def moments(*batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    A = torch.randn((*batch, 4, 4), generator=generator, dtype=torch.float64)
    m = torch.randn((*batch, 4), generator=generator, dtype=torch.float64)
    return m, A @ A.mT + 0.5 * torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_dense_maps_invert_each_other(batch: tuple[int, ...]) -> None:
    m, S = moments(*batch)
    theta1, theta2 = dense_moment_to_natural(m, S)
    torch.testing.assert_close(theta2, -0.5 * torch.linalg.inv(S))
    torch.testing.assert_close(dense_natural_to_moment(theta1, theta2), (m, S))
    eta1, eta2 = dense_moment_to_expectation(m, S)
    torch.testing.assert_close(dense_expectation_to_moment(eta1, eta2), (m, S))


def test_diagonal_maps_are_the_dense_maps_of_a_diagonal() -> None:
    m, S = moments()
    s = S.diagonal()
    theta1, theta2 = diagonal_moment_to_natural(m, s)
    dense1, dense2 = dense_moment_to_natural(m, torch.diag(s))
    torch.testing.assert_close((theta1, torch.diag(theta2)), (dense1, dense2))
    torch.testing.assert_close(diagonal_natural_to_moment(theta1, theta2), (m, s))
    eta1, eta2 = diagonal_moment_to_expectation(m, s)
    torch.testing.assert_close(eta2, dense_moment_to_expectation(m, torch.diag(s))[1].diagonal())
    torch.testing.assert_close(diagonal_expectation_to_moment(eta1, eta2), (m, s))


def test_maps_are_differentiable() -> None:
    m, S = (t.requires_grad_() for t in moments(2))
    assert torch.autograd.gradcheck(
        lambda m, S: dense_natural_to_moment(*dense_moment_to_natural(m, 0.5 * (S + S.mT))), (m, S)
    )


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


def test_a_step_beyond_one_is_refused() -> None:
    family = MeanFieldFamily(3)
    prior = family.prior()
    with pytest.raises(ValueError, match="step_covariance must be in"):
        family.natural_step(prior, prior.mean, prior.statistics, 0.1, 1.5)


def test_matrices_that_do_not_fit_are_refused_before_allocation() -> None:
    with pytest.raises(ValueError, match=r"FullRankFamily with 1,000,000 features.* bytes"):
        FullRankFamily(1_000_000)
    with pytest.raises(ValueError, match=r"BlockFamily with 1 blocks.* bytes"):
        BlockFamily(TilePartition((1000, 1000), (1000, 1000)))
