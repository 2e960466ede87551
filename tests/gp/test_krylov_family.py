"""The family that only solves with S⁻¹, against the dense one."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp.families import (
    FullRankFamily,
    KrylovFullRankFamily,
    KrylovFullRankGaussian,
    SolveLog,
)
from dustmap.gp.families import _full_rank as krylov
from dustmap.linalg import UnconvergedWarning
from tests.cuda.pretended import pretended_gpu

M, N = 60, 200


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(n: int = N, seed: int = 1) -> Tensor:
    """Rows whose Gram matrix has eigenvalues over six orders of magnitude, in no simple basis."""
    rotation: Tensor = torch.linalg.qr(normal(M, M, seed=9)).Q
    return normal(n, M, seed=seed) * torch.logspace(0, -3, M, dtype=torch.float64) @ rotation


def both(
    rtol: float, rank: int = 10, dtype: torch.dtype = torch.float64
) -> tuple[KrylovFullRankGaussian, Tensor]:
    """A state given 200 rows of σ = 0.1, and its S."""
    family = KrylovFullRankFamily(M, rank=rank, rtol=rtol)
    statistics = family.precision_statistics(rows(), torch.full((N,), 100.0).double())
    dense = FullRankFamily(M).posterior(torch.zeros(M).double(), statistics)
    S = dense.apply_covariance(torch.eye(M, dtype=torch.float64))
    return family.posterior(torch.zeros(M, dtype=dtype), statistics), S


@pytest.mark.parametrize("rank", [0, 10, M])
def test_solves_are_products_with_the_covariance(rank: int) -> None:
    state, S = both(1e-12, rank)
    phi, other = rows(7, seed=2), rows(3, seed=3)
    torch.testing.assert_close(state.apply_covariance(phi), phi @ S, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(state.covariance_of(phi, other), phi @ S @ other.T)
    torch.testing.assert_close(state.quadratic(phi), ((phi @ S) * phi).sum(-1), rtol=1e-10, atol=0)
    assert state.quadratic(phi[:0]).shape == (0,)
    assert state.log.unconverged == 0


@pytest.mark.parametrize("rtol", [1e-1, 1e-2, 1e-3])
def test_variances_err_downwards_by_the_square(rtol: float) -> None:
    state, S = both(rtol, rank=0)
    phi = normal(1, M, seed=4)
    exact = float(((phi @ S) * phi).sum())
    x = state.apply_covariance(phi)
    error = x - phi @ S
    squared = float(((error + error @ state.statistics) * error).sum())
    short = exact - float(state.quadratic(phi)[0])
    assert 1e-16 < squared < rtol
    assert short == pytest.approx(squared, rel=1e-3)


def test_derivatives() -> None:
    state, S = both(1e-11)
    phi = rows(3, seed=2).requires_grad_()
    for function in state.quadratic, state.apply_covariance:
        assert torch.autograd.gradcheck(function, (phi,), fast_mode=True)
    assert torch.autograd.gradcheck(lambda a: state.covariance_of(a, a), (phi,), fast_mode=True)
    solves = state.log.columns
    (slope,) = torch.autograd.grad(state.quadratic(phi).sum(), phi)
    assert state.log.columns == solves + 3  # none for the derivative
    torch.testing.assert_close(slope, (2.0 * phi @ S).detach(), rtol=1e-8, atol=1e-10)


def test_steps_are_counted_and_fewer_with_a_better_preconditioner() -> None:
    logs = []
    for rank in (0, 10, 40):
        state, _ = both(1e-8, rank)
        state.quadratic(normal(1, M, seed=4))
        logs.append(state.log)
    assert [log.columns for log in logs] == [1, 1, 1]
    assert logs[0].steps > logs[1].steps > logs[2].steps > 0
    assert [log.products for log in logs] == [log.steps for log in logs]
    assert all(0 < log.residual <= 1e-8 for log in logs)
    state, _ = both(1e-8, 0)
    state.quadratic(normal(30, M, seed=4))
    assert state.log.steps < logs[0].steps  # they share a Krylov space


def test_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    state, S = both(1e-10)
    monkeypatch.setattr(krylov, "_TOGETHER", 4)
    phi = rows(10, seed=2)
    torch.testing.assert_close(state.quadratic(phi), ((phi @ S) * phi).sum(-1))
    assert state.log.columns == 10
    shaped = state.apply_covariance(phi.reshape(2, 5, M))
    torch.testing.assert_close(shaped, (phi @ S).reshape(2, 5, M), rtol=1e-6, atol=1e-8)


def test_columns_short_of_the_tolerance_are_counted_and_told() -> None:
    family = KrylovFullRankFamily(M, rank=0, rtol=1e-8, max_steps=3)
    statistics = family.precision_statistics(rows(), torch.full((N,), 100.0).double())
    state = family.posterior(torch.zeros(M).double(), statistics)
    with pytest.warns(UnconvergedWarning, match=r"precision of q: PCG stopped.*in 5 of 5 columns"):
        state.quadratic(normal(5, M))
    assert (family.log.columns, family.log.unconverged, family.log.steps) == (5, 5, 3)
    assert family.log.residual > 1e-8
    assert family == KrylovFullRankFamily(M, rank=0, rtol=1e-8, max_steps=3, log=SolveLog())


@pytest.mark.parametrize("rank", [0, 2])
def test_indefinite_precisions_are_errors(rank: int) -> None:
    family = KrylovFullRankFamily(4, rank=rank)
    statistics = 5.0 * (torch.ones(4, 4) - torch.eye(4)).double()
    with pytest.raises(ValueError, match="positive"):
        family.posterior(torch.zeros(4).double(), statistics).quadratic(normal(3, 4))
    with pytest.raises(ValueError, match="0 of 4 directions"):
        family.posterior(torch.zeros(4).double(), torch.full((4, 4), math.inf).double())


def test_negative_weights_are_met_where_the_precision_stays_positive() -> None:
    family = KrylovFullRankFamily(M, rank=20, rtol=1e-10)
    weights = torch.where(torch.arange(40) < 20, 1.0, -0.01).double()
    statistics = family.precision_statistics(rows(40), weights)
    assert float(torch.linalg.eigvalsh(statistics)[0]) < 0
    dense = FullRankFamily(M).posterior(torch.zeros(M).double(), statistics)
    state, phi = family.posterior(torch.zeros(M).double(), statistics), rows(4, seed=5)
    torch.testing.assert_close(state.quadratic(phi), dense.quadratic(phi), rtol=1e-10, atol=0)


def test_single_precision_rows() -> None:
    state, S = both(1e-6, dtype=torch.float32)
    phi = rows(4, seed=5)
    found = state.quadratic(phi.float())
    assert found.dtype == state.apply_covariance(phi.float()).dtype == torch.float32
    torch.testing.assert_close(found.double(), ((phi @ S) * phi).sum(-1), rtol=1e-5, atol=0)
    # One datum with σ = 1e-4 fixes one direction; the variance of the others must stay one.
    family, half = KrylovFullRankFamily(4, rank=1), torch.full((1, 4), 0.5)
    statistics = family.precision_statistics(half, torch.tensor([1e8]))
    state = family.posterior(torch.zeros(4), statistics)
    open_direction = torch.tensor([[0.5, -0.5, 0.5, -0.5]])
    assert float(state.quadratic(open_direction)[0]) == pytest.approx(1.0, rel=1e-5)
    assert float(state.quadratic(half)[0]) == pytest.approx(1e-8, rel=1e-2)


def test_divergence_and_samples_are_those_of_the_factorised_state() -> None:
    state, _ = both(1e-4)
    state = state.with_mean(normal(M, seed=6))
    dense = state.factorised()
    assert state.divergence()() == float(state.kl()) == float(dense.kl())
    draws = [q.sample(3, torch.Generator().manual_seed(0)) for q in (state, dense)]
    assert torch.equal(*draws)
    assert state.log.columns == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("rank", [0, 10])
def test_all_stays_on_the_device_of_the_rows(rank: int) -> None:
    expected, _ = both(1e-6, rank)
    with pretended_gpu():
        family = KrylovFullRankFamily(M, rank=rank, rtol=1e-6)
        phi, weights = rows().to("cuda"), torch.full((N,), 100.0).double().to("cuda")
        statistics = family.precision_statistics(phi, weights)
        state = family.natural_step(family.prior(device="cuda"), phi.sum(0), statistics, 1.0, 1.0)
        found = state.quadratic(phi.requires_grad_())
        found.sum().backward()  # type: ignore[no-untyped-call]
        assert found.is_cuda
        assert state.mean.is_cuda
        assert phi.grad is not None
        assert phi.grad.is_cuda
        assert state.divergence()() > 0
        values = found.detach().cpu()
    torch.testing.assert_close(values, expected.quadratic(rows()), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "settings", [{"rank": -1}, {"rtol": 0.0}, {"rtol": 1.0}, {"max_steps": 0}], ids=str
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"expected rank >= 0, max_steps >= 1 and rtol in"):
        KrylovFullRankFamily(3, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"KrylovFullRankFamily with 1,000,000 features.* bytes"):
        KrylovFullRankFamily(1_000_000)
