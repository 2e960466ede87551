"""Low-rank + diagonal family against dense matrices, its limits and the best of its form."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.families import (
    AbstractGaussian,
    FullRankFamily,
    LowRankDiagonalFamily,
    LowRankDiagonalGaussian,
    MeanFieldFamily,
)
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import StudentTLikelihood
from dustmap.inference import (
    StepSchedule,
    SVISettings,
    fit_svi,
    full_elbo,
    settle,
    solve_direct,
)
from tests.contracts.families import Regression, dense_covariance, regression
from tests.cuda.pretended import pretended_gpu
from tests.inference.variational_cases import make_problem

M = 40
RANKS = [0, 1, 5, 15, M]
SHAPES = [(40,), (7, 6), (4, 4, 3)]

over_ranks = pytest.mark.parametrize("rank", RANKS)


def fitted(
    rank: int, dtype: torch.dtype = torch.float64, n: int = 70
) -> tuple[LowRankDiagonalGaussian, Regression]:
    data = regression(M, n)
    family = LowRankDiagonalFamily(M, rank)
    statistics = family.precision_statistics(data.phi.to(dtype), 1 / data.noise.to(dtype))
    state = family.posterior(torch.linspace(-1, 1, M, dtype=dtype), statistics)
    return state, data


def dense_precision(state: LowRankDiagonalGaussian) -> Tensor:
    """D + V Vᵀ as a matrix, from the state's numbers."""
    V = state.diagonal.sqrt()[:, None] * state.basis.double() * state.gains.sqrt()
    return torch.diag(state.diagonal) + V @ V.mT


def divergence(state: AbstractGaussian, precision: Tensor) -> float:
    """KL[N(0, S) ‖ N(0, Λ⁻¹)]: what the ELBO misses for the structure of S."""
    S = dense_covariance(state)
    trace = torch.trace(S @ precision) - torch.logdet(S) - torch.logdet(precision)
    return 0.5 * float(trace - len(S))


def spatial(shape: tuple[int, ...], n: int = 60) -> Regression:
    """Points seen through whitened inducing points of a grid."""
    dim = len(shape)
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, shape)
    generator = torch.Generator().manual_seed(dim)
    x = torch.rand(n, dim, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        rows = CholeskyFeatures(Matern32(0.3, 1.0, dim=dim), grid).rows(PointValues(x))
    y = torch.randn(n, generator=generator, dtype=torch.float64)
    return Regression(rows.phi, y, 0.02 + rows.residual_variance)


@over_ranks
def test_the_prior_is_standard_normal(rank: int) -> None:
    prior = LowRankDiagonalFamily(M, rank).prior()
    assert torch.equal(dense_covariance(prior), torch.eye(M, dtype=torch.float64))
    assert not prior.mean.any()
    assert float(prior.kl()) == 0.0


@over_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operations_agree_with_the_dense_covariance(rank: int, dtype: torch.dtype) -> None:
    state, _ = fitted(rank, dtype)
    assert state.basis.shape[1] <= rank
    precision = dense_precision(state)
    S = torch.linalg.inv(precision).to(dtype)
    v = torch.randn(2, 3, M, generator=torch.Generator().manual_seed(1)).to(dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5

    def near(got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=2 * tolerance, atol=tolerance)

    near(state.apply_covariance(v), v @ S)
    near(state.quadratic(v[0]), ((v[0] @ S) * v[0]).sum(-1))
    near(state.covariance_of(v[0], v[1]), v[0] @ S @ v[1].T)
    root = state.apply_root(torch.eye(M, dtype=dtype)).T
    near(root @ root.T, S)
    near(state.apply_root_transpose(v), v @ root)
    assert state.quadratic(v[0]).dtype == dtype


@over_ranks
def test_kl_equals_the_dense_kl(rank: int) -> None:
    state, _ = fitted(rank)
    q = torch.distributions.MultivariateNormal(state.mean, precision_matrix=dense_precision(state))
    p = torch.distributions.MultivariateNormal(
        torch.zeros_like(state.mean), torch.eye(M, dtype=torch.float64)
    )
    expected = torch.distributions.kl_divergence(q, p)
    torch.testing.assert_close(state.kl(), expected, rtol=1e-11, atol=0)
    single, _ = fitted(rank, torch.float32)
    torch.testing.assert_close(single.kl(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_its_limits_are_mean_field_and_full_rank(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    data = spatial(shape)
    phi, weights = data.phi.to(dtype), (1 / data.noise).to(dtype)
    n = data.phi.shape[1]
    mean = torch.linspace(-1, 1, n, dtype=dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for rank, other in ((0, MeanFieldFamily(n)), (n, FullRankFamily(n))):
        family = LowRankDiagonalFamily(n, rank)
        got = family.posterior(mean, family.precision_statistics(phi, weights))
        expected = other.posterior(mean, other.precision_statistics(phi, weights))
        S, S_expected = dense_covariance(got), dense_covariance(expected)
        torch.testing.assert_close(S, S_expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.kl(), expected.kl(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_as_many_data_as_the_rank_are_met_exactly(n: int) -> None:
    state, data = fitted(4, n=n)
    assert state.signs.shape[1] < M
    torch.testing.assert_close(dense_precision(state), data.precision, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.diagonal, torch.ones(M).double(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_elbo_rises_with_the_rank(shape: tuple[int, ...]) -> None:
    data = spatial(shape)
    n = data.phi.shape[1]
    m = torch.linalg.solve(data.precision, data.b)
    elbos, misses = [], []
    for rank in (0, 1, 2, 4, 8, 16, 32, n):
        family = LowRankDiagonalFamily(n, rank)
        state = family.posterior(m, family.precision_statistics(data.phi, 1 / data.noise))
        elbos.append(float(data.elbo(m, dense_covariance(state))))
        misses.append(divergence(state, data.precision))
    slack = 1e-8 * abs(elbos[-1])
    assert all(b >= a - slack for a, b in itertools.pairwise(elbos))
    evidence = data.log_evidence()
    assert elbos[-1] == pytest.approx(evidence, rel=1e-9)
    for elbo, miss in zip(elbos, misses, strict=True):
        assert evidence - elbo == pytest.approx(miss, rel=1e-6, abs=1e-7)
    assert misses[4] < 0.6 * misses[0]


def best_of_the_form(precision: Tensor, rank: int, start: LowRankDiagonalGaussian) -> float:
    """The least divergence of any D + V Vᵀ that L-BFGS finds from this state."""
    V = (start.diagonal.sqrt()[:, None] * start.basis * start.gains.sqrt()).contiguous()
    log_d = start.diagonal.log().clone()
    for tensor in (V, log_d):
        tensor.requires_grad_()
    optimiser = torch.optim.LBFGS([V, log_d], max_iter=400, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        P = torch.diag(log_d.exp()) + V @ V.mT
        loss = 0.5 * (torch.linalg.solve(P, precision).trace() + torch.logdet(P))
        loss.backward()
        return float(loss.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    assert V.shape[1] == rank
    return float(closure()) - 0.5 * float(torch.logdet(precision) + len(precision))


@pytest.mark.parametrize("rank", [1, 4, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_find_little_that_is_better(shape: tuple[int, ...], rank: int) -> None:
    data = spatial(shape)
    n = data.phi.shape[1]
    family = LowRankDiagonalFamily(n, rank)
    statistics = family.precision_statistics(data.phi, 1 / data.noise)
    state = family.posterior(torch.zeros(n).double(), statistics)
    none = LowRankDiagonalFamily(n, 0)
    diagonal = none.precision_statistics(data.phi, 1 / data.noise)
    mean_field = divergence(none.posterior(state.mean, diagonal), data.precision)
    found, best = divergence(state, data.precision), best_of_the_form(data.precision, rank, state)
    assert best <= found + 1e-9
    assert found - best < 0.05 * (mean_field - best)


@over_ranks
def test_statistics_add_over_batches_in_place(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, family = regression(M, 30), LowRankDiagonalFamily(M, rank)
    weights = 1 / data.noise
    whole = family.precision_statistics(data.phi, weights)
    total = family.precision_statistics(data.phi[:11], weights[:11])
    again = family.precision_statistics(data.phi[11:], weights[11:], into=total)
    assert again is total
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("dustmap.gp.families._structured._CHUNK", 7 * M)
    pieces = family.precision_statistics(data.phi, weights)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    none = family.precision_statistics(data.phi[:0], weights[:0])
    assert torch.equal(none, family.zero_statistics())


@over_ranks
def test_natural_steps_average_the_precision(rank: int) -> None:
    first, second = regression(M, 20, seed=1), regression(M, 25, seed=2)
    family = LowRankDiagonalFamily(M, rank)
    statistics = [family.precision_statistics(d.phi, 1 / d.noise) for d in (first, second)]
    zero = torch.zeros(M).double()
    state = family.posterior(zero, statistics[0])
    state_after = family.natural_step(state, first.b, statistics[1], 0.4, 0.3)
    both = torch.cat([first.phi, second.phi])
    weights = torch.cat([0.7 / first.noise, 0.3 / second.noise])
    expected = family.posterior(zero, family.precision_statistics(both, weights))
    S = dense_covariance(expected)
    torch.testing.assert_close(dense_covariance(state_after), S, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(state_after.mean, 0.4 * S @ first.b, rtol=1e-7, atol=1e-8)


@over_ranks
def test_natural_parameters(rank: int) -> None:
    state, _ = fitted(rank)
    family = LowRankDiagonalFamily(M, rank)
    same = family.posterior(state.mean, state.precision() - family.prior().precision())
    torch.testing.assert_close(dense_covariance(same), dense_covariance(state))
    moved = state.with_mean(torch.zeros_like(state.mean))
    assert torch.equal(dense_covariance(moved), dense_covariance(state))


def test_precisions_of_the_state_and_of_the_data_have_one_diagonal() -> None:
    # At the optimum; expectation maximisation is nearly there.
    state, data = fitted(5)
    got, expected = dense_precision(state).diagonal(), data.precision.diagonal()
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=0)


def test_samples_have_the_covariance_of_q() -> None:
    state, _ = fitted(5)
    S, count = torch.linalg.inv(dense_precision(state)), 20_000
    draws = state.sample(count, torch.Generator().manual_seed(5))
    variance = S.diagonal()
    assert float(((draws.mean(0) - state.mean) / (variance / count).sqrt()).abs().max()) < 5
    spread = ((variance[:, None] * variance[None, :] + S.square()) / count).sqrt()
    assert float(((draws.T.cov() - S) / spread).abs().max()) < 5


def test_no_direction_is_wider_than_the_prior() -> None:
    for rank in RANKS:
        state, _ = fitted(rank)
        assert float(state.diagonal.min()) >= 1.0
        assert float(torch.linalg.eigvalsh(dense_covariance(state))[-1]) <= 1.0 + 1e-12


@over_ranks
def test_quadratic_is_differentiable_in_the_features(rank: int) -> None:
    state, data = fitted(rank)
    phi = data.phi[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(state.quadratic, (phi,))


def test_float32_keeps_what_large_weights_leave_open() -> None:
    phi = torch.full((1, 4), 0.5)
    family = LowRankDiagonalFamily(4, 1)
    state = family.posterior(torch.zeros(4), family.precision_statistics(phi, torch.tensor([1e8])))
    open_direction = torch.tensor([[0.5, -0.5, 0.5, -0.5]])
    assert float(state.quadratic(open_direction)[0]) == pytest.approx(1.0, rel=1e-5)
    assert float(state.quadratic(phi)[0]) == pytest.approx(1e-8, rel=1e-2)


@over_ranks
@pytest.mark.parametrize("weight", [-1e3, math.nan])
def test_impossible_precisions_are_refused(rank: int, weight: float) -> None:
    data, family = regression(M), LowRankDiagonalFamily(M, rank)
    statistics = family.precision_statistics(data.phi, torch.full_like(data.y, weight))
    with pytest.raises(ValueError, match="finite weights >= 0"):
        family.posterior(data.b, statistics)


@pytest.mark.parametrize("rank", [1, 4, 15, M])
def test_negative_weights_leave_the_precision_positive(rank: int) -> None:
    data, family = regression(M, 70), LowRankDiagonalFamily(M, rank)
    weights = torch.where(torch.arange(70) % 4 == 0, -0.1, 1.0) / data.noise.clamp_min(2.0)
    precision = torch.eye(M).double() + data.phi.T @ (weights[:, None] * data.phi)
    smallest = float(torch.linalg.eigvalsh(precision)[0])
    assert 0.0 < smallest < 0.9
    statistics = family.precision_statistics(data.phi, weights)
    state = family.posterior(torch.zeros(M).double(), statistics)
    found = dense_precision(state)
    assert float(torch.linalg.eigvalsh(found)[0]) > 0
    torch.testing.assert_close(found.diagonal(), precision.diagonal(), rtol=0.1, atol=0)
    none = LowRankDiagonalFamily(M, 0)
    diagonal = none.precision_statistics(data.phi, weights)
    mean_field = divergence(none.posterior(state.mean, diagonal), precision)
    assert divergence(state, precision) < mean_field
    if rank == M:
        torch.testing.assert_close(found, precision, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "shape",
    [
        (12,),
        pytest.param((5, 4), marks=pytest.mark.slow),
        pytest.param((4, 4, 3), marks=pytest.mark.slow),
    ],
)
def test_likelihoods_that_are_not_log_concave(shape: tuple[int, ...]) -> None:
    problem = make_problem(shape, "cholesky", noise=0.02)
    batch, n = replace(problem.batch, y=3 * problem.batch.y), problem.features.n_features
    settings = SVISettings(batch_size=10, epochs=4, schedule=StepSchedule(0.5, 20.0, 0.6))
    elbos = []
    for family in (MeanFieldFamily(n), LowRankDiagonalFamily(n, 2), LowRankDiagonalFamily(n, n)):
        model = replace(problem.model(family), likelihood=StudentTLikelihood(3.0, 0.3))
        generator = torch.Generator().manual_seed(0)
        state = fit_svi(model, batch, problem.source, settings, generator).posterior
        elbos.append(settle(model, state, batch, problem.source, max_passes=40).elbo)
    assert elbos == sorted(elbos)
    model = replace(model, family=FullRankFamily(n))
    start = model.family.prior()
    full = settle(model, start, batch, problem.source, max_passes=80)
    assert elbos[-1] == pytest.approx(full.elbo, abs=0.05)


def test_impossible_ranks_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="rank must be from 0"):
        LowRankDiagonalFamily(5, 6)
    with pytest.raises(ValueError, match="rank must be from 0"):
        LowRankDiagonalFamily(5, -1)
    with pytest.raises(ValueError, match=r"rank 1,000 needs .* bytes"):
        LowRankDiagonalFamily(1_000_000, 1000)


def test_families_of_one_seed_are_equal_and_sketch_alike() -> None:
    assert LowRankDiagonalFamily(M, 3) == LowRankDiagonalFamily(M, 3)
    assert LowRankDiagonalFamily(M, 3) != LowRankDiagonalFamily(M, 3, seed=1)
    assert torch.equal(LowRankDiagonalFamily(M, 3).signs, LowRankDiagonalFamily(M, 3).signs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@over_ranks
def test_devices_are_those_of_the_features(rank: int) -> None:
    data, family = regression(M), LowRankDiagonalFamily(M, rank)
    on_cpu = family.posterior(data.b, family.precision_statistics(data.phi, 1 / data.noise))
    with pretended_gpu():
        phi, noise, b = (x.clone().to("cuda") for x in (data.phi, data.noise, data.b))
        prior = family.prior(device="cuda")
        statistics = family.precision_statistics(phi, 1 / noise)
        state = family.natural_step(prior, b, statistics, 0.0, 1.0).with_mean(b)
        parts = (state.kl(), state.quadratic(phi), state.precision())
        assert all(part.is_cuda for part in parts)
        on_gpu = [part.cpu().clone() for part in parts]
    expected = [on_cpu.kl(), on_cpu.quadratic(data.phi)]
    expected += [on_cpu.precision()]
    torch.testing.assert_close(on_gpu, expected)


@pytest.mark.parametrize("shape", [(12,), (5, 4), (4, 3, 3)])
def test_inference_takes_it_like_any_family(shape: tuple[int, ...]) -> None:
    problem = make_problem(shape, "cholesky", noise=0.3)
    n = problem.features.n_features
    unit = StepSchedule(1.0, power=0.0)
    settings = SVISettings(batch_size=1000, epochs=12, schedule=unit, safety=0.9)
    optima, gaps = [], []
    for rank in (0, 4, n):
        model = problem.model(LowRankDiagonalFamily(n, rank))
        solution = solve_direct(model, problem.batch, problem.source, rtol=1e-10)
        generator = torch.Generator().manual_seed(0)
        state = fit_svi(model, problem.batch, problem.source, settings, generator).posterior
        gaps.append(solution.elbo - full_elbo(model, state, problem.batch, problem.source))
        torch.testing.assert_close(dense_covariance(state), dense_covariance(solution.state))
        optima.append(solution.elbo)
    assert optima == sorted(optima)
    # The mean's steps are preconditioned by S: the better it is, the fewer they are.
    assert gaps[0] > gaps[1] > gaps[2] == pytest.approx(0.0, abs=1e-8)
    full = solve_direct(problem.model(FullRankFamily(n)), problem.batch, problem.source, rtol=1e-10)
    assert optima[-1] == pytest.approx(full.elbo, abs=1e-8)
