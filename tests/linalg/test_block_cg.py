import math

import pytest
import torch
from torch import Tensor

from dustmap.linalg import (
    DenseOperator,
    DiagonalOperator,
    SolveStatus,
    block_pcg,
    pcg,
)
from tests.linalg.root_cases import normal, with_spectrum


def _spread(n: int, condition: float) -> Tensor:
    return torch.logspace(0.0, math.log10(condition), n, dtype=torch.float64)


def _relative_residuals(A: Tensor, x: Tensor, b: Tensor) -> Tensor:
    residual = b.double() - x.double() @ A.double()
    ratio: Tensor = torch.linalg.vector_norm(residual, dim=-1) / torch.linalg.vector_norm(
        b.double(), dim=-1
    )
    return ratio


class TestAccuracy:
    @pytest.mark.parametrize("count", [1, 2, 7, 33, 50, 80])
    @pytest.mark.parametrize(
        ("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float64, 1e-4), (torch.float32, 1e-5)]
    )
    @pytest.mark.parametrize("is_preconditioned", [False, True])
    def test_equals_the_dense_solve(
        self, count: int, dtype: torch.dtype, rtol: float, is_preconditioned: bool
    ) -> None:
        """From one right-hand side to more than there are unknowns."""
        matrix = with_spectrum(_spread(50, 100.0))
        rough = torch.linalg.inv(matrix + 0.1 * torch.diag(normal(50, seed=2) ** 2))
        A, b = DenseOperator(matrix.to(dtype)), normal(count, 50).to(dtype)
        T = DenseOperator(rough.to(dtype)) if is_preconditioned else None
        result = block_pcg(A, b, preconditioner=T, rtol=rtol)
        assert result.converged, result.message()
        exact = torch.linalg.solve(matrix, b.double().mT).mT
        error = (result.x.double() - exact) @ matrix
        lengths = torch.linalg.vector_norm(b.double(), dim=1)
        assert bool((torch.linalg.vector_norm(error, dim=1) <= 10 * rtol * lengths).all())
        assert result.x.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_reported_residuals_are_the_true_ones(self, dtype: torch.dtype) -> None:
        matrix = with_spectrum(_spread(60, 1e3))
        A, b = DenseOperator(matrix.to(dtype)), normal(5, 60).to(dtype)
        for max_steps in (0, 1, 4, 1000):
            result = block_pcg(A, b, rtol=1e-4, max_steps=max_steps)
            torch.testing.assert_close(
                result.residuals, _relative_residuals(matrix, result.x, b), rtol=2e-2, atol=1e-6
            )

    def test_exact_preconditioner_takes_one_step(self) -> None:
        d = torch.linspace(1.0, 50.0, 30, dtype=torch.float64)
        T = DiagonalOperator(1 / d)
        result = block_pcg(DiagonalOperator(d), normal(3, 30), preconditioner=T, rtol=1e-12)
        assert result.converged
        assert result.steps.tolist() == [1, 1, 1]

    def test_as_many_right_hand_sides_as_unknowns_take_one_step(self) -> None:
        matrix = with_spectrum(_spread(20, 100.0))
        result = block_pcg(DenseOperator(matrix), normal(20, 20), rtol=1e-9)
        assert result.converged
        assert int(result.steps.max()) == 1

    def test_batch_shapes(self) -> None:
        A = DiagonalOperator(torch.arange(1.0, 5.0))
        for batch in ((), (3,), (2, 3), (0,)):
            result = block_pcg(A, torch.ones(*batch, 4))
            assert result.x.shape == (*batch, 4)
            assert result.status.shape == result.steps.shape == result.residuals.shape == batch
            assert result.converged
            torch.testing.assert_close(result.x, 1.0 / torch.arange(1.0, 5.0).expand(*batch, 4))

    def test_scales_of_the_right_hand_sides_do_not_matter(self) -> None:
        """Squares of 1e-30 and 1e30 leave the range of float32."""
        A = DenseOperator(with_spectrum(_spread(60, 100.0)).float())
        b = normal(3, 60).float()
        scales = torch.tensor([1e-30, 1.0, 1e30])
        result = block_pcg(A, b * scales[:, None], rtol=1e-5)
        assert result.converged, result.message()
        expected = block_pcg(A, b, rtol=1e-5).x
        torch.testing.assert_close(result.x / scales[:, None], expected, rtol=1e-3, atol=1e-4)


class TestSharedSpace:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_never_more_steps_than_separate_ones(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        n = int(torch.randint(20, 120, (), generator=generator))
        count = int(torch.randint(1, 12, (), generator=generator))
        condition = 10.0 ** float(3 * torch.rand((), generator=generator))
        A = DenseOperator(with_spectrum(_spread(n, condition), seed).to(dtype))
        b = normal(count, n, seed=seed).to(dtype)
        block, single = block_pcg(A, b, rtol=1e-4), pcg(A, b, rtol=1e-4)
        assert block.converged, block.message()
        assert int(block.steps.max()) <= 1.1 * int(single.steps.max()) + 1

    def test_a_few_stray_eigenvalues_are_found_together(self) -> None:
        """8 large eigenvalues cost one vector 8 steps and more, 12 vectors about one."""
        eigenvalues = torch.linspace(1.0, 2.0, 300, dtype=torch.float64)
        eigenvalues[:8] = torch.logspace(2.0, 5.0, 8, dtype=torch.float64)
        A, b = DenseOperator(with_spectrum(eigenvalues)), normal(12, 300)
        block, single = block_pcg(A, b, rtol=1e-8), pcg(A, b, rtol=1e-8)
        assert block.converged
        assert int(block.steps.max()) < 0.6 * int(single.steps.min())

    def test_identical_and_dependent_right_hand_sides(self) -> None:
        matrix = with_spectrum(_spread(60, 1e3))
        b = normal(6, 60)
        b[1] = b[0]
        b[2] = 3.0 * b[0]
        b[3] = b[4] - 2.0 * b[5]
        for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            A = DenseOperator(matrix.to(dtype))
            result = block_pcg(A, b.to(dtype), rtol=rtol)
            assert result.converged, result.message()
            torch.testing.assert_close(result.x[1], result.x[0], rtol=10 * rtol, atol=10 * rtol)
            torch.testing.assert_close(result.x[2], 3 * result.x[0], rtol=1e-2, atol=30 * rtol)

    def test_nearly_parallel_right_hand_sides(self) -> None:
        matrix = with_spectrum(_spread(60, 100.0))
        b = normal(1, 60) + 1e-5 * normal(5, 60, seed=3)
        result = block_pcg(DenseOperator(matrix.float()), b.float(), rtol=1e-5)
        assert result.converged, result.message()

    def test_converged_columns_leave_the_others_going(self) -> None:
        """An eigenvector needs one step, beside a right-hand side that needs many."""
        d = torch.linspace(1.0, 100.0, 40, dtype=torch.float64)
        easy = torch.zeros(40, dtype=torch.float64)
        easy[3] = 1e-6
        hard = torch.ones(40, dtype=torch.float64)
        result = block_pcg(DiagonalOperator(d), torch.stack([hard, easy, hard]), rtol=1e-8)
        assert result.converged
        assert int(result.steps[1]) == 1
        assert int(result.steps[0]) == int(result.steps[2]) > 10
        torch.testing.assert_close(result.x[0], 1 / d, rtol=1e-6, atol=1e-8)

    def test_done_columns_lend_their_directions_to_the_last(self) -> None:
        """One right-hand side beside eleven that start solved: as few steps as for twelve."""
        matrix = with_spectrum(_spread(300, 1e4))
        A, b = DenseOperator(matrix), normal(12, 300)
        together = block_pcg(A, b, rtol=1e-6, refresh=10)
        x0 = torch.linalg.solve(matrix, b.mT).mT + 1e-12 * normal(12, 300, seed=4)
        x0[0] = 0.0
        lent = block_pcg(A, b, x0=x0, rtol=1e-6, refresh=10)
        assert lent.converged
        assert lent.steps[1:].tolist() == [0] * 11
        alone = block_pcg(A, b[0], rtol=1e-6)
        assert int(lent.steps[0]) < 0.5 * int(alone.steps)
        assert int(lent.steps[0]) < 1.5 * int(together.steps.max())


class TestStopping:
    def test_warm_start_at_the_solution_takes_no_step(self) -> None:
        A, b = DenseOperator(with_spectrum(_spread(60, 100.0))), normal(3, 60)
        x = block_pcg(A, b, rtol=1e-10).x
        result = block_pcg(A, b, x0=x, rtol=1e-9)
        assert result.converged
        assert result.steps.tolist() == [0, 0, 0]
        torch.testing.assert_close(result.x, x, rtol=1e-15, atol=0.0)

    def test_warm_start_of_some_columns(self) -> None:
        A, b = DenseOperator(with_spectrum(_spread(60, 100.0))), normal(4, 60)
        x0 = torch.zeros_like(b)
        x0[1:3] = block_pcg(A, b[1:3], rtol=1e-12).x
        before = x0.clone()
        result = block_pcg(A, b, x0=x0, rtol=1e-8)
        assert result.converged
        assert result.steps[1:3].tolist() == [0, 0]
        assert int(result.steps[0]) > 1
        assert torch.equal(x0, before)

    def test_looking_at_residuals_costs_no_step(self) -> None:
        A, b = DenseOperator(with_spectrum(_spread(300, 1e5))), normal(3, 300)
        often, never = (block_pcg(A, b, rtol=1e-4, refresh=each) for each in (10, 10**6))
        assert often.converged
        assert torch.equal(often.steps, never.steps)

    def test_a_start_further_than_zero_is_left(self) -> None:
        A, b = DenseOperator(with_spectrum(_spread(60, 100.0))), normal(3, 60)
        x0 = torch.zeros_like(b)
        x0[1] = 1e9
        cold, warm = block_pcg(A, b, rtol=1e-8), block_pcg(A, b, x0=x0, rtol=1e-8)
        assert warm.converged
        assert torch.equal(warm.x, cold.x)

    def test_zero_right_hand_sides_are_solved_at_step_zero(self) -> None:
        A, b = DenseOperator(with_spectrum(_spread(60, 100.0))), normal(3, 60)
        b[1] = 0.0
        result = block_pcg(A, b, x0=torch.ones_like(b))
        assert result.converged
        assert int(result.steps[1]) == 0
        assert not result.x[1].any()
        assert block_pcg(A, torch.zeros_like(b)).converged

    def test_out_of_steps_says_so_with_a_remedy(self) -> None:
        A = DenseOperator(with_spectrum(_spread(200, 1e6)))
        result = block_pcg(A, normal(4, 200), max_steps=3)
        assert result.worst is SolveStatus.MAX_STEPS
        assert result.steps.tolist() == [3, 3, 3, 3]
        assert "stopped after 3 steps at relative residual" in result.message()
        assert "raise max_steps" in result.message()

    def test_steps_without_a_tolerance_approach_the_solution(self) -> None:
        A, b = DenseOperator(with_spectrum(_spread(100, 100.0))), normal(2, 100)
        results = [block_pcg(A, b, rtol=0.0, max_steps=steps) for steps in (5, 10, 20)]
        assert [int(r.steps.max()) for r in results] == [5, 10, 20]
        worst = [float(r.residuals.max()) for r in results]
        assert worst[0] > worst[1] > worst[2] > 0


class TestFailure:
    @pytest.mark.parametrize("count", [1, 6, 40])
    def test_float32_asked_for_too_much_stagnates_and_advises_float64(self, count: int) -> None:
        matrix = with_spectrum(_spread(200, 1e4))
        b = normal(count, 200).float()
        result = block_pcg(DenseOperator(matrix.float()), b, rtol=1e-9, max_steps=5000)
        assert result.worst is SolveStatus.STAGNATED
        assert int(result.steps.max()) < 1500
        assert "solve in float64" in result.message()
        truth = _relative_residuals(matrix, result.x, b)
        assert 1e-9 < float(truth.max()) < 1e-2
        assert float(result.residuals.max()) < 3 * float(truth.max())

    def test_indefinite_matrix(self) -> None:
        eigenvalues = _spread(60, 100.0)
        eigenvalues[:10] = -5.0
        result = block_pcg(DenseOperator(with_spectrum(eigenvalues)), normal(3, 60))
        assert result.worst is SolveStatus.NOT_POSITIVE_DEFINITE
        assert "positive definite" in result.message()
        assert bool(result.x.isfinite().all())

    def test_indefinite_preconditioner(self) -> None:
        A = DiagonalOperator(torch.linspace(1.0, 9.0, 20))
        T = DiagonalOperator(torch.linspace(-1.0, 2.0, 20))
        result = block_pcg(A, normal(2, 20).float(), preconditioner=T)
        assert result.worst is SolveStatus.NOT_POSITIVE_DEFINITE

    def test_zero_preconditioner(self) -> None:
        A = DiagonalOperator(torch.ones(20))
        T = DiagonalOperator(torch.zeros(20))
        result = block_pcg(A, normal(2, 20).float(), preconditioner=T)
        assert result.worst is SolveStatus.NOT_POSITIVE_DEFINITE

    def test_overflow_is_reported(self) -> None:
        A = DiagonalOperator(torch.tensor([1.0, math.inf]))
        assert block_pcg(A, torch.ones(2)).worst is SolveStatus.NON_FINITE
        T = DiagonalOperator(torch.tensor([1.0, math.nan]))
        A = DiagonalOperator(torch.ones(2))
        assert block_pcg(A, torch.ones(2), preconditioner=T).worst is SolveStatus.NON_FINITE

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_non_finite_input_is_refused(self, bad: float) -> None:
        A, b = DiagonalOperator(torch.ones(4)), torch.ones(4)
        wrong = b.clone()
        wrong[2] = bad
        with pytest.raises(ValueError, match=r"^b: 1 of 4 entries are NaN or infinite"):
            block_pcg(A, wrong)
        with pytest.raises(ValueError, match=r"^x0: 1 of 4 entries"):
            block_pcg(A, b, x0=wrong)

    def test_shapes_and_settings_are_checked(self) -> None:
        square, b = DiagonalOperator(torch.ones(4)), torch.ones(4)
        with pytest.raises(ValueError, match=r"A: expected a square operator, got shape \(3, 4\)"):
            block_pcg(DenseOperator(torch.ones(3, 4)), b)
        with pytest.raises(ValueError, match="preconditioner: expected shape"):
            block_pcg(square, b, preconditioner=DiagonalOperator(torch.ones(5)))
        with pytest.raises(ValueError, match=r"b: expected vectors of length 4"):
            block_pcg(square, torch.ones(5))
        with pytest.raises(ValueError, match=r"x0: expected the shape of b \(4,\), got \(2, 4\)"):
            block_pcg(square, b, x0=torch.ones(2, 4))
        with pytest.raises(ValueError, match="rtol=-1"):
            block_pcg(square, b, rtol=-1.0)
