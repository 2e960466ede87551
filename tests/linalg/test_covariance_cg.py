"""Solves with I + B K in the inner product of K against dense ones."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import (
    AbstractInformation,
    CovarianceNystrom,
    SolveStatus,
    covariance_cg,
)

N = 40


@dataclass(frozen=True, eq=False)
class Dense(AbstractInformation):
    """B_k (S, N, N), or one for all (1, N, N), and K (N, N)."""

    B: Tensor
    K: Tensor
    nystrom: CovarianceNystrom | None = None
    gains: float = 1.0

    def informed(self, x: Tensor) -> Tensor:
        return (self.B @ x[:, :, None]).squeeze(2)

    def covaried(self, x: Tensor) -> Tensor:
        return x @ self.K

    def preconditioned(self, r: Tensor, covaried: Tensor) -> tuple[Tensor, Tensor]:
        if self.nystrom is None:
            return r, covaried
        return self.nystrom.applied(r, covaried, r.new_full((len(r),), self.gains))

    @property
    def bound(self) -> float:
        return 1.0 if self.nystrom is None else 100.0

    def taken(self, which: Tensor) -> "Dense":
        return self if len(self.B) == 1 else replace(self, B=self.B[which])


def system_of(count: int = 3, rank: int = 15, dtype: torch.dtype = torch.float64) -> Dense:
    """Informations of low rank with eigenvalues to 10⁴, and a smooth covariance."""
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(count, N, rank, generator=generator, dtype=torch.float64)
    B = (U * torch.logspace(-1, 2, rank, dtype=torch.float64)) @ U.mT
    place = torch.arange(N, dtype=torch.float64)
    K = (-(place[:, None] - place).abs() / 5.0).exp()
    return Dense(B.to(dtype), K.to(dtype))


def right_hand_sides(system: Dense, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, N, generator=generator, dtype=torch.float64)
    return system.informed(x.to(system.B))


def exact(system: Dense, b: Tensor) -> Tensor:
    A = torch.eye(N, dtype=torch.float64) + (system.B @ system.K).double()
    found: Tensor = torch.linalg.solve(A, b.double()[:, :, None]).squeeze(2)
    return found


def errors_of(system: Dense, x: Tensor, b: Tensor) -> Tensor:
    """√(eᵀ (K + K B K) e)."""
    e, wide = x.double() - exact(system, b), replace(system, B=system.B.double())
    field = e @ system.K.double()
    return ((field * e).sum(1) + (field * wide.informed(field)).sum(1)).sqrt()


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("rank", [0, 8, 15])
@pytest.mark.parametrize("count", [1, 3])
def test_solutions_are_as_exact_as_asked(count: int, rank: int, start: bool) -> None:
    """Every column to its own tolerance, with and without a preconditioner."""
    system = system_of(count)
    b = right_hand_sides(system, 3)
    if rank:
        fields = torch.linalg.cholesky(system.K) @ torch.randn(
            N, rank, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        first = replace(system, B=system.B[:1])
        system = replace(system, nystrom=CovarianceNystrom.of(first, fields.mT.contiguous()))
    tolerance = torch.tensor([1e-2, 1e-4, 1e-8], dtype=torch.float64)
    x0 = 0.9 * exact(system, b) if start else None
    solve = covariance_cg(system, b, x0=x0, tolerance=tolerance, max_steps=400)
    assert solve.status.tolist() == [SolveStatus.CONVERGED.value] * 3
    assert bool((errors_of(system, solve.x, b) <= 1.5 * tolerance).all())
    assert bool((solve.errors <= tolerance).all())
    torch.testing.assert_close(solve.covaried, solve.x @ system.K)


def test_a_start_further_than_zero_is_left() -> None:
    system = system_of()
    b, tolerance = right_hand_sides(system, 3), torch.full((3,), 1e-6, dtype=torch.float64)
    x0 = 0.999 * exact(system, b)
    x0[1] = 1e6
    cold = covariance_cg(system, b, tolerance=tolerance)
    warm = covariance_cg(system, b, x0=x0, tolerance=tolerance)
    assert torch.equal(warm.x[1], cold.x[1])
    assert bool((warm.steps <= cold.steps).all())
    assert bool((errors_of(system, warm.x, b) <= 1.5 * tolerance).all())


def test_columns_together_are_those_alone() -> None:
    system = system_of()
    b, tolerance = right_hand_sides(system, 3), torch.tensor([1e-2, 1e-8, 1e-4])
    together = covariance_cg(system, b, tolerance=tolerance)
    for k in range(3):
        own = system.taken(torch.tensor([k]))
        alone = covariance_cg(own, b[k : k + 1], tolerance=tolerance[k : k + 1])
        apart = errors_of(own, exact(own, b[k : k + 1]) + alone.x - together.x[k], b[k : k + 1])
        assert float(apart) < 2.0 * float(tolerance[k])


def test_a_preconditioner_of_full_rank_solves_at_once_and_for_another_size_too() -> None:
    """I + g B K of a gain g is solved as fast by the preconditioner made of B."""
    system = system_of(1)
    fields = torch.linalg.cholesky(system.K).mT.contiguous()
    nystrom = CovarianceNystrom.of(system, fields)
    assert len(nystrom.values) == 15
    gram = nystrom.basis @ system.K @ nystrom.basis.mT
    torch.testing.assert_close(gram, torch.eye(15, dtype=torch.float64), rtol=0.0, atol=1e-8)
    B = (nystrom.basis.mT * nystrom.values) @ nystrom.basis
    torch.testing.assert_close(B, system.B[0], rtol=1e-6, atol=1e-6)
    for gain in (1.0, 7.0):
        louder = Dense(gain * system.B, system.K, nystrom, gain)
        b = right_hand_sides(louder, 2)
        solve = covariance_cg(louder, b, tolerance=torch.full((2,), 1e-6))
        assert int(solve.steps.max()) <= 2


def test_errors_are_known_where_a_preconditioner_is_of_other_densities() -> None:
    """Within three times of what was asked, where ⟨r, P r⟩ alone misses a factor of 18."""
    place = torch.arange(N, dtype=torch.float64)
    generator, I = torch.Generator().manual_seed(0), torch.eye(N, dtype=torch.float64)
    K = (-0.5 * ((place[:, None] - place) / 8.0).square()).exp() + 1e-6 * I
    made = Dense(100.0 * I[None], K)
    root = torch.linalg.cholesky(K)
    nystrom = CovarianceNystrom.of(made, root.mT.contiguous())
    rough = torch.linalg.cholesky((-(place[:, None] - place).abs() / 5.0).exp())
    white = torch.randn(2, 20, N, generator=generator, dtype=torch.float64)
    for draw in white[0, :5]:
        density = (1.6 * rough @ draw).exp()
        B = torch.diag(100.0 * density.square())
        gain = float(density.square().mean())
        there = Dense(B[None], K, nystrom, gain)
        b = (white[0] @ root.mT) @ B + white[1] * 10.0 * density
        solve = covariance_cg(there, b, tolerance=torch.full((20,), 0.1).double(), max_steps=500)
        assert bool((solve.status == SolveStatus.CONVERGED.value).all())
        assert float(errors_of(there, solve.x, b).max()) < 0.3


def test_a_preconditioner_follows_another_covariance() -> None:
    system = system_of(1)
    nystrom = CovarianceNystrom.of(system, torch.linalg.cholesky(system.K).mT.contiguous())
    other = replace(system, K=0.5 * system.K + 0.5 * torch.eye(N, dtype=torch.float64))
    moved = nystrom.under(other)
    torch.testing.assert_close(moved.fields, moved.basis @ other.K)
    B = (moved.basis.mT * moved.values) @ moved.basis
    torch.testing.assert_close(B, system.B[0], rtol=1e-6, atol=1e-6)
    b = right_hand_sides(other, 2)
    solve = covariance_cg(replace(other, nystrom=moved), b, tolerance=torch.full((2,), 1e-6))
    assert int(solve.steps.max()) <= 2


def test_single_precision_reaches_what_its_rounding_allows() -> None:
    system = system_of(dtype=torch.float32)
    b = right_hand_sides(system, 3)
    size = errors_of(system, torch.zeros_like(b), b)
    solve = covariance_cg(system, b, tolerance=1e-3 * size, max_steps=400)
    assert solve.status.tolist() == [0, 0, 0]
    assert bool((errors_of(system, solve.x, b) <= 2e-3 * size).all())
    tight = covariance_cg(system, b, tolerance=1e-12 * size, max_steps=400)
    assert SolveStatus.CONVERGED.value not in tight.status.tolist()


def test_what_cannot_be_solved_says_so() -> None:
    system = system_of(1)
    b = right_hand_sides(system, 2)
    never = torch.zeros(2)
    steps = covariance_cg(system, b, tolerance=never, max_steps=3)
    assert steps.status.tolist() == [SolveStatus.MAX_STEPS.value] * 2
    assert steps.steps.tolist() == [3, 3]
    negative = covariance_cg(replace(system, B=-system.B), b, tolerance=never)
    assert negative.status.tolist() == [SolveStatus.NOT_POSITIVE_DEFINITE.value] * 2
    infinite = covariance_cg(replace(system, B=system.B / 0.0), b, tolerance=never)
    assert infinite.status.tolist() == [SolveStatus.NON_FINITE.value] * 2
    nothing = covariance_cg(system, torch.zeros_like(b), tolerance=never)
    assert (nothing.status.tolist(), nothing.steps.tolist()) == ([0, 0], [0, 0])
    with pytest.raises(UserError, match="expected b and x0"):
        covariance_cg(system, b, tolerance=torch.zeros(3))
