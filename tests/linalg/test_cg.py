import math
from collections.abc import Callable
from typing import Any, final

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import (
    AbstractOperator,
    AbstractStack,
    CirculantOperator,
    DenseOperator,
    DiagonalOperator,
    SolveResult,
    SolveStatus,
    ToeplitzOperator,
    block_pcg,
    pcg,
)
from tests.references import toeplitz_matrix

SHAPES = [(60,), (9, 8), (5, 4, 5)]


def _exponential_lags(shape: tuple[int, ...], lengthscale: float = 3.0) -> Tensor:
    axes = [torch.arange(m, dtype=torch.float64) for m in shape]
    squares = sum(a**2 for a in torch.meshgrid(*axes, indexing="ij"))
    assert isinstance(squares, Tensor)
    return torch.exp(-squares.sqrt() / lengthscale)


def _right_hand_sides(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _relative_residuals(A: AbstractOperator, x: Tensor, b: Tensor) -> Tensor:
    difference = b.double() - x.double() @ A.to_dense().double().mT
    ratio: Tensor = torch.linalg.vector_norm(difference, dim=-1) / torch.linalg.vector_norm(
        b.double(), dim=-1
    )
    return ratio


def _circulant_inverse(lags: Tensor, padding: int) -> CirculantOperator:
    """Upper-left block of C⁻¹ for the covariance of the periodic distance on a padded torus."""
    torus = tuple(2 * m + padding for m in lags.shape)
    axes = [torch.minimum(torch.arange(n), n - torch.arange(n)).double() for n in torus]
    squares = sum(a**2 for a in torch.meshgrid(*axes, indexing="ij"))
    assert isinstance(squares, Tensor)
    spectrum = torch.fft.rfftn(torch.exp(-squares.sqrt() / 3.0)).real
    return CirculantOperator(1.0 / spectrum, torus, tuple(lags.shape), tuple(lags.shape))


class TestAccuracy:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(
        ("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float64, 1e-4), (torch.float32, 1e-5)]
    )
    def test_equals_cholesky_within_ten_times_rtol(
        self, shape: tuple[int, ...], dtype: torch.dtype, rtol: float
    ) -> None:
        lags = _exponential_lags(shape)
        b = _right_hand_sides(2, 3, lags.numel()).to(dtype)
        result = pcg(ToeplitzOperator(lags, dtype), b, rtol=rtol)
        assert result.converged, result.message()
        K = toeplitz_matrix(lags.numpy())
        flat = b.double().reshape(-1, lags.numel()).numpy()
        exact = scipy.linalg.cho_solve(scipy.linalg.cho_factor(K), flat.T).T
        # What the residual bounds is K times the error.
        error = K @ (result.x.double().reshape(exact.shape).numpy() - exact).T
        assert np.linalg.norm(error) <= 10 * rtol * np.linalg.norm(flat)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_preconditioner_changes_the_steps_and_not_the_answer(
        self, shape: tuple[int, ...]
    ) -> None:
        lags = _exponential_lags(shape)
        A, b = ToeplitzOperator(lags), _right_hand_sides(4, lags.numel())
        plain = pcg(A, b, rtol=1e-10)
        fast = pcg(A, b, rtol=1e-10, preconditioner=_circulant_inverse(lags, 20))
        assert fast.converged
        assert int(fast.steps.max()) < 0.6 * int(plain.steps.max())
        torch.testing.assert_close(fast.x, plain.x, rtol=1e-7, atol=1e-7)

    def test_exact_preconditioner_takes_one_step(self) -> None:
        """Perfect information: P = A⁻¹."""
        d = torch.linspace(1.0, 50.0, 30, dtype=torch.float64)
        result = pcg(
            DiagonalOperator(d),
            _right_hand_sides(3, 30),
            preconditioner=DiagonalOperator(1 / d),
            rtol=1e-12,
        )
        assert result.converged
        assert result.steps.tolist() == [1, 1, 1]

    def test_as_many_steps_as_distinct_eigenvalues(self) -> None:
        d = torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64).repeat(10)
        result = pcg(DiagonalOperator(d), _right_hand_sides(2, 30), rtol=1e-12)
        assert result.converged
        assert result.steps.tolist() == [3, 3]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_reported_residuals_are_the_true_ones(self, dtype: torch.dtype) -> None:
        A = ToeplitzOperator(_exponential_lags((60,)), dtype)
        b = _right_hand_sides(5, 60).to(dtype)
        for max_steps in (0, 1, 7, 1000):
            result = pcg(A, b, rtol=1e-4, max_steps=max_steps)
            torch.testing.assert_close(
                result.residuals, _relative_residuals(A, result.x, b), rtol=1e-2, atol=1e-6
            )
            assert result.x.dtype == dtype

    def test_computes_in_the_precision_of_the_right_hand_side(self) -> None:
        A = ToeplitzOperator(_exponential_lags((60,)))
        b = _right_hand_sides(2, 60).float()
        P = _circulant_inverse(_exponential_lags((60,)), 20)
        result = pcg(A, b, rtol=1e-5, preconditioner=P)
        assert result.x.dtype == torch.float32
        narrow = pcg(A.to(torch.float32), b, rtol=1e-5, preconditioner=P.to(torch.float32))
        assert torch.equal(result.x, narrow.x)

    def test_steps_without_a_tolerance_approach_the_solution(self) -> None:
        """rtol = 0 asks for exactly max_steps steps, as the truncated PCG of HIP-GP does."""
        A, b = ToeplitzOperator(_exponential_lags((9, 8))), _right_hand_sides(2, 72)
        results = [pcg(A, b, rtol=0.0, max_steps=steps) for steps in (5, 10, 20)]
        assert [int(r.steps.max()) for r in results] == [5, 10, 20]
        worst = [float(r.residuals.max()) for r in results]
        assert worst[0] > worst[1] > worst[2] > 0

    def test_batch_shapes(self) -> None:
        A = DiagonalOperator(torch.arange(1.0, 5.0))
        for batch in ((), (3,), (2, 3), (0,)):
            result = pcg(A, torch.ones(*batch, 4))
            assert result.x.shape == (*batch, 4)
            assert result.status.shape == result.steps.shape == result.residuals.shape == batch
            assert result.converged
            torch.testing.assert_close(result.x, 1.0 / torch.arange(1.0, 5.0).expand(*batch, 4))

    def test_scale_of_the_right_hand_side_does_not_matter(self) -> None:
        """Squares of 1e-30 and 1e30 leave the range of float32."""
        A = ToeplitzOperator(_exponential_lags((60,)), torch.float32)
        b = _right_hand_sides(60).float()
        scales = torch.tensor([1e-30, 1.0, 1e30])
        result = pcg(A, b * scales[:, None], rtol=1e-5)
        assert result.converged, result.message()
        x = result.x / scales[:, None]
        torch.testing.assert_close(x, x[1].expand(3, -1), rtol=1e-4, atol=1e-4)

    def test_columns_do_not_depend_on_their_company(self) -> None:
        A = ToeplitzOperator(_exponential_lags((60,)))
        b = _right_hand_sides(7, 60)
        together = pcg(A, b, rtol=1e-8)
        for row, x in zip(b, together.x, strict=True):
            torch.testing.assert_close(pcg(A, row, rtol=1e-8).x, x, rtol=1e-6, atol=1e-6)

    def test_groups_of_columns_equal_one_group(self) -> None:
        """Larger than the cache: solved in several groups."""
        lags = _exponential_lags((20_000,), 0.5)
        A, b = ToeplitzOperator(lags), _right_hand_sides(12, 20_000)
        assert pcg(A, b).converged
        expected = pcg(A, b[11])
        torch.testing.assert_close(pcg(A, b).x[11], expected.x, rtol=1e-6, atol=1e-6)


class TestStopping:
    def test_each_column_stops_on_its_own_residual(self) -> None:
        """An eigenvector needs one step, beside a right-hand side that needs many."""
        d = torch.linspace(1.0, 100.0, 40, dtype=torch.float64)
        easy = torch.zeros(40, dtype=torch.float64)
        easy[3] = 1e-6
        hard = torch.ones(40, dtype=torch.float64)
        result = pcg(DiagonalOperator(d), torch.stack([hard, easy, hard]), rtol=1e-8)
        assert result.converged
        assert int(result.steps[1]) == 1
        assert int(result.steps[0]) == int(result.steps[2]) > 10
        assert float(result.residuals.max()) <= 1e-8

    def test_warm_start_at_the_solution_takes_no_step(self) -> None:
        A = ToeplitzOperator(_exponential_lags((60,)))
        b = _right_hand_sides(3, 60)
        x = pcg(A, b, rtol=1e-10).x
        result = pcg(A, b, x0=x, rtol=1e-9)
        assert result.converged
        assert result.steps.tolist() == [0, 0, 0]
        torch.testing.assert_close(result.x, x, rtol=1e-15, atol=0.0)

    def test_warm_start_saves_steps_and_leaves_x0_alone(self) -> None:
        A = ToeplitzOperator(_exponential_lags((60,)))
        b = _right_hand_sides(3, 60)
        x0 = pcg(A, b, rtol=1e-5).x
        before = x0.clone()
        warm, cold = pcg(A, b, x0=x0, rtol=1e-9), pcg(A, b, rtol=1e-9)
        assert warm.converged
        assert int(warm.steps.max()) < int(cold.steps.max())
        assert torch.equal(x0, before)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_looking_at_the_residual_costs_no_step(self, dtype: torch.dtype) -> None:
        """Directions are conjugate to the residual of the recursion: with another in its place, if
        only by rounding, a solve in float32 takes ten times as many steps or has no end."""
        values = torch.logspace(4.0, 0.0, 300, dtype=torch.float64)
        rotation = torch.linalg.qr(_right_hand_sides(300, 300)).Q
        A = DenseOperator(((rotation * values) @ rotation.mT).to(dtype))
        b = _right_hand_sides(3, 300).to(dtype)
        often, never = (pcg(A, b, rtol=1e-4, refresh=each) for each in (10, 10**6))
        assert torch.equal(often.steps, never.steps)
        assert torch.equal(often.status, never.status)
        torch.testing.assert_close(often.residuals, never.residuals, rtol=0.1, atol=0.0)

    def test_a_start_further_than_zero_is_left(self) -> None:
        """Of a system with eigenvalues from 1 to 10⁶ the solution of another one may leave millions
        of times b, which float32 does not get rid of."""
        values = torch.logspace(0.0, 6.0, 40, dtype=torch.float32)
        A, b = DenseOperator(values.diag()), _right_hand_sides(3, 40).float()
        near = b / values * 1.01
        x0 = torch.stack([near[0], 1e3 * torch.ones(40), near[2]])
        cold, warm = pcg(A, b, rtol=1e-4), pcg(A, b, x0=x0, rtol=1e-4)
        assert warm.converged
        assert torch.equal(warm.x[1], cold.x[1])
        assert bool((warm.steps <= cold.steps).all())
        assert int(warm.steps[0]) < int(cold.steps[0])

    @pytest.mark.parametrize("solve", [pcg, block_pcg])
    def test_a_start_is_compared_as_the_preconditioner_does(
        self, solve: Callable[..., SolveResult]
    ) -> None:
        """What is far in directions that the preconditioner knows is near all the same."""
        values = torch.cat([torch.full((5,), 1e6), torch.linspace(1.0, 40.0, 200)]).double()
        A, b = DenseOperator(values.diag()), _right_hand_sides(1, 205)
        known = DenseOperator(torch.where(values > 1e3, 1.0 / values, 1.0).diag())
        x0 = b / values
        x0[:, :5] += 1e-5
        x0[:, 5:] *= 1.001
        assert float((b - A.matmul(x0)).norm()) > 1.5 * float(b.norm())
        options: dict[str, Any] = {"preconditioner": known, "rtol": 1e-4}
        cold, warm = solve(A, b, **options), solve(A, b, x0=x0, **options)
        assert warm.converged
        assert int(warm.steps[0]) < 0.7 * int(cold.steps[0])
        # The same start is too far in float32, of whose rounding too much would stay.
        x0[:, :5] += 2e-3
        exact = solve(A, b, x0=x0, **options)
        assert int(exact.steps[0]) < int(cold.steps[0])
        narrow, options["preconditioner"] = (DenseOperator(M.matrix.float()) for M in (A, known))
        ends = [solve(narrow, b.float(), x0=x, **options) for x in (None, x0.float())]
        assert torch.equal(ends[0].x, ends[1].x)

    def test_no_right_hand_sides_have_no_tolerances(self) -> None:
        none = torch.zeros(0, 4, dtype=torch.float64)
        result = pcg(ToeplitzOperator(_exponential_lags((4,))), none, rtol=none[:, 0])
        assert result.x.shape == (0, 4)
        assert result.converged

    def test_zero_right_hand_side_is_solved_at_step_zero(self) -> None:
        A = ToeplitzOperator(_exponential_lags((60,)))
        b = _right_hand_sides(3, 60)
        b[1] = 0.0
        result = pcg(A, b, x0=torch.ones_like(b))
        assert result.converged
        assert int(result.steps[1]) == 0
        assert not result.x[1].any()
        assert bool(result.residuals.isfinite().all())

    def test_no_product_with_zero_and_one_per_step(self) -> None:
        products: list[int] = []
        matrix = torch.diag(torch.linspace(1.0, 9.0, 20, dtype=torch.float64))
        A = _CountingOperator(DenseOperator(matrix), products)
        result = pcg(A, _right_hand_sides(20), rtol=1e-10)
        # One per step, and one to confirm convergence.
        assert len(products) == int(result.steps) + 1

    def test_the_first_step_needs_no_product_to_confirm_it(self) -> None:
        products: list[int] = []
        d = torch.linspace(1.0, 9.0, 20, dtype=torch.float64)
        A = _CountingOperator(DenseOperator(torch.diag(d)), products)
        b = _right_hand_sides(20)
        result = pcg(A, b, preconditioner=DiagonalOperator(1 / d), rtol=1e-10)
        assert int(result.steps) == len(products) == 1
        assert float(_relative_residuals(A, result.x, b)) <= 1e-15
        one_of_many = pcg(A, b, max_steps=1)
        torch.testing.assert_close(
            one_of_many.residuals, _relative_residuals(A, one_of_many.x, b), rtol=1e-12, atol=0.0
        )

    def test_columns_that_leave_one_by_one_change_nothing_for_the_rest(self) -> None:
        """Column k has k + 1 distinct eigenvalues in it, so it takes k + 1 steps."""
        d = torch.linspace(1.0, 3.0, 30, dtype=torch.float64)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        b = (torch.arange(30) <= order[:, None]).double()
        b[5] = 0.0
        result = pcg(DiagonalOperator(d), b, rtol=1e-12)
        assert result.converged
        expected = torch.where(b.any(1), order + 1, 0)
        assert bool((result.steps <= expected).all())
        assert len(set(result.steps.tolist())) > 6
        torch.testing.assert_close(result.x, b / d, rtol=1e-10, atol=1e-10)

    def test_out_of_steps_says_so_with_a_remedy(self) -> None:
        A = ToeplitzOperator(_exponential_lags((200,), 50.0))
        result = pcg(A, _right_hand_sides(4, 200), max_steps=3)
        assert result.worst is SolveStatus.MAX_STEPS
        assert not result.converged
        assert result.steps.tolist() == [3, 3, 3, 3]
        assert "stopped after 3 steps at relative residual" in result.message()
        assert "> rtol 1.0e-06 in 4 of 4 columns: raise max_steps, loosen rtol" in result.message()

    def test_message_of_success_names_steps_and_tolerance(self) -> None:
        result = pcg(DiagonalOperator(torch.ones(3)), torch.ones(3))
        assert result.message() == "PCG converged after 1 steps to rtol 1.0e-06"


class TestStacks:
    """A matrix, a tolerance and a preconditioner of its own for every right-hand side."""

    def test_every_column_solves_its_own_system(self) -> None:
        matrices = _Stack(_matrices(5, 30))
        b, x0 = _right_hand_sides(5, 30), _right_hand_sides(5, 30) / 3.0
        rtol = torch.tensor([1e-10, 1e-2, 1e-6, 1e-8, 1e-4], dtype=torch.float64)
        b[3] = 0.0
        for start in (None, x0):
            result = pcg(matrices, b, rtol=rtol, x0=start)
            assert result.converged, result.message()
            exact = torch.linalg.solve(matrices.matrices, b)
            left = (matrices.matmul(result.x) - b).norm(dim=-1) / b.norm(dim=-1)
            assert bool((left[b.norm(dim=-1) > 0] <= rtol[b.norm(dim=-1) > 0]).all())
            torch.testing.assert_close(result.x[0], exact[0], rtol=1e-6, atol=1e-8)
            assert result.rtol == 1e-2
            tight = pcg(matrices, b, rtol=1e-10, x0=start)
            assert int(result.steps[0]) == int(tight.steps[0])
            assert int(result.steps[1]) < int(tight.steps[1])

    def test_their_preconditioners_are_taken_with_them(self) -> None:
        matrices = _matrices(4, 30)
        inverses = _Stack(torch.linalg.inv(matrices))
        b = _right_hand_sides(4, 30)
        b[1] *= 1e6
        result = pcg(_Stack(matrices), b, preconditioner=inverses, rtol=1e-8)
        assert result.converged
        assert int(result.steps.max()) <= 2

    def test_as_many_tolerances_as_right_hand_sides(self) -> None:
        b = _right_hand_sides(4, 30)
        with pytest.raises(UserError, match="one for each of 4 right-hand sides, got 3"):
            pcg(_Stack(_matrices(4, 30)), b, rtol=torch.full((3,), 1e-3))


def _matrices(count: int, n: int) -> torch.Tensor:
    """Positive definite matrices (count, n, n), the later the worse conditioned."""
    generator = torch.Generator().manual_seed(7)
    root = torch.randn(count, n, n, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-1, 0.5, count, dtype=torch.float64)[:, None, None]
    return torch.eye(n, dtype=torch.float64) + scale * root @ root.mT


@final
class _Stack(AbstractStack):
    def __init__(self, matrices: torch.Tensor) -> None:
        self.matrices = matrices

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrices.shape[1], self.matrices.shape[2]

    def _made_of(self) -> torch.Tensor:
        return self.matrices

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == len(self.matrices)
        return (self.matrices @ x[:, :, None]).squeeze(2)

    def taken(self, which: torch.Tensor) -> "_Stack":
        return _Stack(self.matrices[which])


class TestFailure:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_indefinite_matrix(self, shape: tuple[int, ...]) -> None:
        lags = _exponential_lags(shape)
        lags[(0,) * len(shape)] = 0.2
        result = pcg(ToeplitzOperator(lags), _right_hand_sides(3, lags.numel()))
        assert result.worst is SolveStatus.NOT_POSITIVE_DEFINITE
        assert "add a nugget" in result.message()

    def test_indefinite_preconditioner(self) -> None:
        A = DiagonalOperator(torch.linspace(1.0, 9.0, 20))
        P = DiagonalOperator(torch.linspace(-1.0, 2.0, 20))
        result = pcg(A, _right_hand_sides(20).float(), preconditioner=P)
        assert result.worst is SolveStatus.NOT_POSITIVE_DEFINITE
        assert "the preconditioner is not positive definite" in result.message()

    def test_one_bad_column_leaves_the_others_alone(self) -> None:
        d = torch.linspace(1.0, 9.0, 20, dtype=torch.float64)
        d[0] = -1.0
        b = torch.ones(2, 20, dtype=torch.float64)
        b[1, 0] = 0.0
        result = pcg(DiagonalOperator(d), b)
        bad = SolveStatus.NOT_POSITIVE_DEFINITE.value
        assert result.status.tolist() == [bad, SolveStatus.CONVERGED.value]
        assert "in 1 of 2 columns" in result.message()

    def test_float32_asked_for_too_much_stagnates_and_says_how_far_it_got(self) -> None:
        A = ToeplitzOperator(_exponential_lags((200,), 20.0), torch.float32)
        b = _right_hand_sides(4, 200).float()
        result = pcg(A, b, rtol=1e-12, max_steps=3000)
        assert result.worst is SolveStatus.STAGNATED
        assert int(result.steps.max()) < 1500
        assert "loosen rtol, solve in float64" in result.message()
        truth = _relative_residuals(A, result.x, b)
        assert 1e-9 < float(truth.max()) < 1e-3
        assert bool((result.residuals < 3 * truth).all())
        assert bool((result.residuals > truth / 3).all())

    def test_overflow_is_reported(self) -> None:
        A = DiagonalOperator(torch.tensor([1.0, math.inf]))
        assert pcg(A, torch.ones(2)).worst is SolveStatus.NON_FINITE

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_non_finite_input_is_refused(self, bad: float) -> None:
        A, b = DiagonalOperator(torch.ones(4)), torch.ones(4)
        wrong = b.clone()
        wrong[2] = bad
        with pytest.raises(ValueError, match=r"^b: 1 of 4 entries are NaN or infinite"):
            pcg(A, wrong)
        with pytest.raises(ValueError, match=r"^x0: 1 of 4 entries"):
            pcg(A, b, x0=wrong)

    def test_shapes_and_settings_are_checked(self) -> None:
        square, b = DiagonalOperator(torch.ones(4)), torch.ones(4)
        with pytest.raises(ValueError, match=r"A: expected a square operator, got shape \(3, 4\)"):
            pcg(DenseOperator(torch.ones(3, 4)), b)
        with pytest.raises(ValueError, match="preconditioner: expected shape"):
            pcg(square, b, preconditioner=DiagonalOperator(torch.ones(5)))
        with pytest.raises(ValueError, match=r"b: expected vectors of length 4"):
            pcg(square, torch.ones(5))
        with pytest.raises(ValueError, match=r"x0: expected the shape of b \(4,\), got \(2, 4\)"):
            pcg(square, b, x0=torch.ones(2, 4))
        with pytest.raises(ValueError, match="rtol=-1"):
            pcg(square, b, rtol=-1.0)


@pytest.mark.parametrize("status", list(SolveStatus))
def test_every_status_has_a_remedy(status: SolveStatus) -> None:
    assert len(status.remedy) > 5


class _CountingOperator(AbstractOperator):
    """Counts the products of another operator."""

    def __init__(self, operator: AbstractOperator, products: list[int]) -> None:
        self.operator, self.products = operator, products

    @property
    def shape(self) -> tuple[int, int]:
        return self.operator.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        return self.operator.device

    def matmul(self, x: Tensor) -> Tensor:
        self.products.append(x.shape[0])
        return self.operator.matmul(x)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.operator.rmatmul(y)
