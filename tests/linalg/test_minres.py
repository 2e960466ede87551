"""MINRES for many shifts: residuals, columns, combinations, and what cannot be solved."""

import math

import pytest
import torch

from dustmap.linalg import (
    DenseOperator,
    DiagonalOperator,
    SolveStatus,
    ToeplitzOperator,
    shifted_minres,
)
from tests.linalg.root_cases import (
    matern_lags,
    normal,
    relative_error,
    with_spectrum,
)


class TestShiftedMinres:
    @pytest.mark.parametrize("condition", [1e2, 1e5])
    def test_every_shift_is_solved_to_the_residual_that_is_reported(self, condition: float) -> None:
        K = with_spectrum(torch.logspace(0, -math.log10(condition), 90, dtype=torch.float64))
        b, shifts = normal(2, 3, 90), torch.tensor([0.0, 1e-3, 0.1, 10.0])
        solve = shifted_minres(DenseOperator(K), b, shifts, rtol=1e-8, max_steps=3000)
        assert solve.worst is SolveStatus.CONVERGED, solve.message()
        assert solve.x.shape == (4, 2, 3, 90)
        assert solve.steps.shape == (2, 3)
        for q, t in enumerate(shifts.tolist()):
            left = b - solve.x[q] @ K - t * solve.x[q]
            true = left.norm(dim=-1) / b.norm(dim=-1)
            assert bool((true <= 1.1e-8).all())
            torch.testing.assert_close(true, solve.residuals[q], rtol=1e-3, atol=1e-12)
        torch.testing.assert_close(solve.true_residuals, solve.residuals[0], rtol=1e-3, atol=1e-12)

    def test_many_blocks_of_steps_are_no_different(self) -> None:
        """Beyond BLOCK steps solutions are taken up in parts."""
        K = with_spectrum(torch.logspace(-5, 0, 200, dtype=torch.float64))
        b = normal(3, 200)
        shifts = torch.tensor([1e-6, 1e-2], dtype=torch.float64)
        solve = shifted_minres(DenseOperator(K), b, shifts, max_steps=3000)
        assert int(solve.steps.min()) > 128
        assert solve.worst is SolveStatus.CONVERGED, solve.message()
        exact = torch.linalg.solve(K + 1e-2 * torch.eye(200, dtype=torch.float64), b.mT).mT
        assert relative_error(solve.x[1], exact) < 1e-9

    def test_columns_stop_each_at_its_own_step(self) -> None:
        """A column of one eigenvector takes one step, of three of them three."""
        eigenvalues = torch.linspace(1.0, 50.0, 60, dtype=torch.float64)
        b = torch.zeros(4, 60, dtype=torch.float64)
        b[0, 7] = 1.0
        b[1, [3, 30, 59]] = 1.0
        b[3] = 1.0
        solve = shifted_minres(DiagonalOperator(eigenvalues), b, torch.tensor([0.0, 1.0]))
        assert solve.steps.tolist()[:3] == [1, 3, 0]
        assert int(solve.steps[3]) > 20
        for q, t in enumerate((0.0, 1.0)):
            torch.testing.assert_close(solve.x[q], b / (eigenvalues + t), rtol=0, atol=1e-6)

    def test_combinations_are_those_of_the_solutions(self) -> None:
        K, b = ToeplitzOperator(matern_lags((9, 8))), normal(5, 72)
        shifts, mix = torch.tensor([0.01, 0.1, 1.0]), normal(2, 3)
        all_of_them = shifted_minres(K, b, shifts, rtol=1e-12).x
        wanted = torch.einsum("pq,qrn->prn", mix, all_of_them)
        torch.testing.assert_close(shifted_minres(K, b, shifts, mix=mix, rtol=1e-12).x, wanted)
        in_groups = shifted_minres(K, b, shifts, mix=mix, rtol=1e-12, memory=1)
        torch.testing.assert_close(in_groups.x, wanted, rtol=1e-9, atol=1e-9)

    def test_scale_of_the_right_hand_side_changes_nothing(self) -> None:
        K, b, shifts = ToeplitzOperator(matern_lags((30,))), normal(2, 30), torch.tensor([0.1])
        x = shifted_minres(K, b, shifts, rtol=1e-12).x
        tiny = shifted_minres(K, b * 1e-200, shifts, rtol=1e-12).x
        torch.testing.assert_close(tiny * 1e200, x)

    def test_error_falls_with_the_steps(self) -> None:
        """As 2 ρ^J, ρ = (√κ − 1)/(√κ + 1), the bound of MINRES."""
        K = with_spectrum(torch.logspace(-2, 0, 100, dtype=torch.float64))
        b, rho = normal(4, 100), (math.sqrt(100) - 1) / (math.sqrt(100) + 1)
        for steps in (5, 10, 20, 40):
            solve = shifted_minres(
                DenseOperator(K), b, torch.tensor([0.0]), rtol=1e-12, max_steps=steps
            )
            assert float(solve.true_residuals.max()) <= 2 * rho**steps
            assert solve.worst is SolveStatus.MAX_STEPS
            assert solve.unconverged == 4
            assert f"max steps after {steps} steps" in solve.message()

    def test_float32_reaches_the_accuracy_of_its_condition(self) -> None:
        """κ rounding errors; the usual recurrence would lose κ² of them: here more than all."""
        K = with_spectrum(torch.logspace(-4, 0, 150, dtype=torch.float64)).float()
        solve = shifted_minres(
            DenseOperator(K), normal(3, 150).float(), torch.tensor([0.0]), rtol=1e-2
        )
        assert solve.worst is SolveStatus.CONVERGED, solve.message()
        assert int(solve.steps.max()) > 64

    def test_a_mistaken_recursion_is_reported(self) -> None:
        K = with_spectrum(torch.logspace(-6, 0, 100, dtype=torch.float64)).float()
        K = K + 1e-6 * torch.eye(100)
        solve = shifted_minres(
            DenseOperator(K), normal(2, 100).float(), torch.tensor([0.0]), max_steps=2000
        )
        assert solve.worst in (SolveStatus.STAGNATED, SolveStatus.MAX_STEPS)
        assert float(solve.true_residuals.max()) > 1e-6

    def test_not_positive_definite_and_not_finite(self) -> None:
        d = torch.linspace(-0.05, 1.0, 50, dtype=torch.float64)
        solve = shifted_minres(DiagonalOperator(d), normal(2, 50), torch.tensor([0.5]))
        assert solve.worst is SolveStatus.NOT_POSITIVE_DEFINITE
        assert "add a nugget" in solve.message()
        d[3] = math.nan
        solve = shifted_minres(DiagonalOperator(d), normal(2, 50), torch.tensor([0.5]))
        assert solve.worst is SolveStatus.NON_FINITE

    def test_no_columns_and_no_steps(self) -> None:
        K, shifts = DenseOperator(torch.eye(6)), torch.tensor([0.0, 1.0])
        assert shifted_minres(K, torch.zeros(0, 6), shifts).x.shape == (2, 0, 6)
        solve = shifted_minres(K, torch.ones(6), shifts, max_steps=0)
        assert solve.worst is SolveStatus.MAX_STEPS
        assert float(solve.true_residuals) == pytest.approx(1.0)
        assert shifted_minres(K, torch.zeros(6), shifts).worst is SolveStatus.CONVERGED

    def test_bad_shifts_are_refused(self) -> None:
        K, b = DenseOperator(torch.eye(3)), torch.ones(3)
        with pytest.raises(ValueError, match="numbers ≥ 0"):
            shifted_minres(K, b, torch.tensor([-1.0]))
        with pytest.raises(ValueError, match="ascending"):
            shifted_minres(K, b, torch.tensor([1.0, 0.5]))
