import math

import pytest
import torch
from torch import Tensor

from dustmap.linalg import AbstractOperator, DenseOperator, block_pcg, nystrom, pcg
from tests.linalg.root_cases import normal, with_spectrum

DTYPES = [torch.float32, torch.float64]


def _low_rank(n: int, rank: int, largest: float) -> Tensor:
    eigenvalues = torch.zeros(n, dtype=torch.float64)
    eigenvalues[:rank] = torch.logspace(math.log10(largest), 0.0, rank, dtype=torch.float64)
    return with_spectrum(eigenvalues)


def _decaying(n: int, largest: float, power: float = 2.0) -> Tensor:
    return with_spectrum(largest * torch.arange(1, n + 1, dtype=torch.float64) ** -power)


def _condition(P: AbstractOperator, A: Tensor) -> float:
    """Ratio of the extreme eigenvalues of P⁻¹ A."""
    root = torch.linalg.cholesky(A)
    eigenvalues = torch.linalg.eigvalsh(root.mT @ P.to_dense().double() @ root)
    return float(eigenvalues[-1] / eigenvalues[0])


class TestApproximation:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shift", [0.01, 1.0, 30.0])
    def test_exact_inverse_when_G_has_no_more_eigenvalues(
        self, dtype: torch.dtype, shift: float
    ) -> None:
        G = _low_rank(60, 9, 100.0)
        A = G + shift * torch.eye(60, dtype=torch.float64)
        P = nystrom(DenseOperator(A.to(dtype)), 20, shift=shift)
        assert P.rank == 9
        tolerance = 1e-10 if dtype == torch.float64 else 1e-3
        torch.testing.assert_close(
            P.to_dense().double() @ A / shift,
            torch.eye(60, dtype=torch.float64),
            rtol=0.0,
            atol=tolerance,
        )

    def test_eigenvalues_and_vectors_are_those_of_G(self) -> None:
        G = _low_rank(60, 9, 100.0)
        P = nystrom(DenseOperator(G + torch.eye(60, dtype=torch.float64)), 20)
        expected = torch.linalg.eigvalsh(G).flip(0)[:9]
        torch.testing.assert_close(P.values, expected, rtol=1e-9, atol=0.0)
        torch.testing.assert_close(P.vectors @ G, P.values[:, None] * P.vectors)
        identity = torch.eye(9, dtype=torch.float64)
        torch.testing.assert_close(P.vectors @ P.vectors.mT, identity)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_full_rank_is_the_inverse(self, dtype: torch.dtype) -> None:
        A = _decaying(40, 50.0) + torch.eye(40, dtype=torch.float64)
        P = nystrom(DenseOperator(A.to(dtype)), 50)
        assert P.rank == 40
        assert _condition(P, A) < 1 + (1e-8 if dtype == torch.float64 else 1e-3)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("largest", [1e2, 1e5])
    def test_symmetric_and_positive_definite(self, dtype: torch.dtype, largest: float) -> None:
        A = DenseOperator((_decaying(80, largest) + torch.eye(80, dtype=torch.float64)).to(dtype))
        P = nystrom(A, 20).to_dense().double()
        torch.testing.assert_close(P, P.mT, rtol=0.0, atol=1e-6)
        assert float(torch.linalg.eigvalsh(P)[0]) > 0
        orthonormal = nystrom(A, 20).vectors.double()
        torch.testing.assert_close(
            orthonormal @ orthonormal.mT, torch.eye(20, dtype=torch.float64), rtol=0.0, atol=1e-6
        )

    @pytest.mark.parametrize("seed", range(4))
    def test_condition_number(self, seed: int) -> None:
        """Frangella et al., theorem 5.1: at a rank of 2⌈1.5 d⌉ + 1, d the effective dimension
        Σ s/(s + shift), the expected condition number is below 28."""
        G = _decaying(300, 1e4, power=3.0)
        A = G + torch.eye(300, dtype=torch.float64)
        s = torch.linalg.eigvalsh(G)
        rank = 2 * math.ceil(1.5 * float((s / (s + 1)).sum())) + 1
        assert rank < 300
        P = nystrom(DenseOperator(A), rank, seed=seed)
        assert _condition(P, A) < 28

    def test_power_step_comes_closer_to_the_best_of_its_rank(self) -> None:
        G = _decaying(200, 1e4, power=1.0)
        A = DenseOperator(G + torch.eye(200, dtype=torch.float64))
        best = torch.linalg.eigvalsh(G).flip(0)[:30]
        plain = nystrom(A, 30)
        power = plain.refreshed(A)
        assert bool((plain.values <= best * (1 + 1e-9)).all())
        assert float((best - power.values).sum()) < 0.5 * float((best - plain.values).sum())

    def test_what_rounding_hides_is_not_taken_for_nothing(self) -> None:
        """Of float32 products the eigenvalues below the rounding of the largest are lost: the tail
        says how large they may be, and so P⁻¹A has the condition number of tail over rest."""
        eigenvalues = torch.full((300,), 10.0, dtype=torch.float64)
        eigenvalues[:6] = torch.logspace(8.0, 6.0, 6, dtype=torch.float64)
        A = with_spectrum(eigenvalues) + torch.eye(300, dtype=torch.float64)
        P = nystrom(DenseOperator(A.float()), 60)
        assert P.rank == 6
        assert 10.0 < P.tail < 200.0
        assert _condition(P, A) < 20.0

    def test_nothing_to_precondition(self) -> None:
        for rank in (0, 5):
            P = nystrom(DenseOperator(torch.eye(20)), rank)
            assert P.rank == 0
            assert torch.equal(P.to_dense(), torch.eye(20))

    def test_seed_decides(self) -> None:
        A = DenseOperator(_decaying(40, 50.0) + torch.eye(40, dtype=torch.float64))
        one, same, other = (nystrom(A, 5, seed=seed).vectors for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


class TestPreconditioning:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_saves_steps(self, dtype: torch.dtype) -> None:
        A = DenseOperator((_decaying(300, 1e4) + torch.eye(300, dtype=torch.float64)).to(dtype))
        b = normal(3, 300).to(dtype)
        for solver in (pcg, block_pcg):
            plain = solver(A, b, rtol=1e-3)
            fast = solver(A, b, rtol=1e-3, preconditioner=nystrom(A, 60))
            assert fast.converged, fast.message()
            assert int(fast.steps.max()) < 0.5 * int(plain.steps.max())
            exact = torch.linalg.solve(A.matrix.double(), b.double().mT).mT
            torch.testing.assert_close(fast.x.double(), exact, rtol=0.0, atol=3e-2)

    def test_refreshed_follows_a_changing_operator(self) -> None:
        """Larger, and its eigenvectors turned a little."""
        identity = torch.eye(300, dtype=torch.float64)
        old = _decaying(300, 1e4, power=3.0)
        skew = normal(300, 300) - normal(300, 300).mT
        turn = torch.linalg.matrix_exp(0.005 * skew)
        A = 1.3 * turn @ old @ turn.mT + identity
        P = nystrom(DenseOperator(old + identity), 60)
        refreshed, fresh = P.refreshed(DenseOperator(A)), nystrom(DenseOperator(A), 60)
        assert refreshed.rank <= 60
        assert _condition(refreshed, A) < 0.2 * _condition(P, A)
        assert _condition(refreshed, A) < 1.5 * _condition(fresh, A)

    def test_refreshing_improves_the_basis_of_the_same_operator(self) -> None:
        A = _decaying(300, 1e4, power=2.0) + torch.eye(300, dtype=torch.float64)
        P = nystrom(DenseOperator(A), 60)
        assert _condition(P.refreshed(DenseOperator(A)), A) < _condition(P, A)


class TestRefusal:
    def test_shift_that_is_too_large(self) -> None:
        A = DenseOperator(_decaying(40, 50.0) + torch.eye(40, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"A - shift I positive semi-definite.* lower the"):
            nystrom(A, 20, shift=5.0)

    def test_products_that_are_not_finite(self) -> None:
        with pytest.raises(ValueError, match="products with A are not finite"):
            nystrom(DenseOperator(torch.full((4, 4), math.nan)), 2)

    def test_arguments(self) -> None:
        A = DenseOperator(torch.eye(4))
        with pytest.raises(ValueError, match=r"A: expected a square operator, got shape \(3, 4\)"):
            nystrom(DenseOperator(torch.ones(3, 4)), 2)
        with pytest.raises(ValueError, match="shift: expected > 0, got 0"):
            nystrom(A, 2, shift=0.0)
        with pytest.raises(ValueError, match="got rank=-1"):
            nystrom(A, -1)
        with pytest.raises(ValueError, match=r"A: expected shape \(4, 4\) like before"):
            nystrom(A, 2).refreshed(DenseOperator(torch.eye(5)))
        with pytest.raises(ValueError, match="x: expected vectors of length 4"):
            nystrom(A, 2).matmul(torch.ones(5))


class TestScaling:
    """Preconditioners of shift · I + D G D from that of shift · I + G."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shift", [0.1, 1.0, 30.0])
    def test_exact_inverse_when_G_has_no_more_eigenvalues(
        self, dtype: torch.dtype, shift: float
    ) -> None:
        G, identity = _low_rank(60, 9, 100.0), torch.eye(60, dtype=torch.float64)
        base = nystrom(DenseOperator((G + shift * identity).to(dtype)), 20, shift=shift)
        scales = normal(3, 60, seed=3).mul(0.5).exp()
        stack = base.stacked(scales[:, None].to(dtype))
        tolerance = 1e-9 if dtype == torch.float64 else 3e-3
        for k, D in enumerate(scales):
            A = D[:, None] * G * D + shift * identity
            one = stack.taken(torch.tensor([k])).matmul
            columns = torch.cat([one(e[None].to(dtype)) for e in identity])
            for inverse in (base.stacked(D[None, None].to(dtype)).to_dense(), columns.mT):
                product = inverse.double() @ A / shift
                torch.testing.assert_close(product, identity, rtol=0.0, atol=tolerance)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_responses_one_below_the_other(self, dtype: torch.dtype) -> None:
        """shift · I + D G Dᵀ for D of three diagonals (3 n, n), of two matrices at once."""
        n, shift = 40, 2.0
        G, identity = _low_rank(n, 7, 50.0), torch.eye(3 * n, dtype=torch.float64)
        base = nystrom(DenseOperator((G + shift * identity[:n, :n]).to(dtype)), 20, shift=shift)
        scales = normal(2, 3, n, seed=6).mul(0.5).exp()
        stack = base.stacked(scales.to(dtype))
        assert stack.shape == (3 * n, 3 * n)
        tolerance = 1e-9 if dtype == torch.float64 else 3e-3
        for k, D in enumerate(scales):
            tall = torch.cat([torch.diag(d) for d in D])
            x = normal(2, 3 * n, seed=7)
            expected = shift * torch.linalg.solve(tall @ G @ tall.mT + shift * identity, x[k])
            found = stack.matmul(x.to(dtype))[k].double()
            torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)

    def test_scales_of_one_change_nothing(self) -> None:
        A = _decaying(50, 300.0) + torch.eye(50, dtype=torch.float64)
        base, x = nystrom(DenseOperator(A), 12), normal(4, 50, seed=5)
        ones = torch.ones(4, 1, 50, dtype=torch.float64)
        torch.testing.assert_close(base.stacked(ones).matmul(x), base.matmul(x))
        one = base.stacked(ones[:1])
        torch.testing.assert_close(one.taken(torch.tensor([0, 0])).matmul(x), base.matmul(x))
        torch.testing.assert_close(one.matmul(x[0]), base.matmul(x[0]))

    def test_it_precedes_the_old_one_by_far(self) -> None:
        identity = torch.eye(80, dtype=torch.float64)
        G = _decaying(80, 3000.0)
        D = normal(80, seed=4).exp()
        A = D[:, None] * G * D + identity
        base = nystrom(DenseOperator(G + identity), 30)
        assert _condition(base.stacked(D[None, None]), A) < 0.1 * _condition(base, A)
