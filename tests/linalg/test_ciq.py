"""Roots by contour integral quadrature against dense algebra, and the theory of its errors."""

import math
import warnings
from collections.abc import Callable

import mpmath
import pytest
import scipy.special
import torch
from torch import Tensor

from dustmap.linalg import (
    AbstractOperator,
    CirculantOperator,
    DenseOperator,
    DiagonalOperator,
    InverseRootOperator,
    RootMethod,
    RootOperator,
    RootPreconditioner,
    RootQuadrature,
    SolveStatus,
    SpectrumBounds,
    ToeplitzOperator,
    UnconvergedWarning,
    inverse_root,
    nystrom,
    shifted_minres,
    spectrum_bounds,
    square_root,
)
from dustmap.linalg._contour import complete_elliptic, jacobi_elliptic
from tests.cuda.pretended import pretended_gpu

SHAPES = [(40,), (8, 7), (4, 5, 3)]
CONDITIONS = [1e1, 1e3, 1e6, 1e9]


def _vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _lags(shape: tuple[int, ...], ell: float | Tensor = 3.0, ridge: float | Tensor = 0.0) -> Tensor:
    """Matérn-3/2 at the lags of a grid of unit spacing, with a ridge at lag 0."""
    axes = [torch.arange(m, dtype=torch.float64) for m in shape]
    squares = torch.stack([a**2 for a in torch.meshgrid(*axes, indexing="ij")]).sum(0)
    a = math.sqrt(3) * squares.sqrt() / ell
    unit = torch.zeros(math.prod(shape), dtype=torch.float64)
    unit[0] = 1.0
    return (1 + a) * torch.exp(-a) + ridge * unit.reshape(shape)


def _power(K: Tensor, power: float) -> Tensor:
    eigenvalues, vectors = torch.linalg.eigh(K)
    result: Tensor = (vectors * eigenvalues**power) @ vectors.mT
    return result


def _with_spectrum(eigenvalues: Tensor, seed: int = 1) -> Tensor:
    n = len(eigenvalues)
    Q = torch.linalg.qr(_vectors(n, n, seed=seed)).Q
    result: Tensor = (Q * eigenvalues) @ Q.mT
    return 0.5 * (result + result.mT)


def _error(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


class TestQuadrature:
    @pytest.mark.parametrize("k", [0.9, 1e-1, 1e-3, 1e-5, 1e-7])
    def test_elliptic_functions(self, k: float) -> None:
        period = complete_elliptic(k)
        assert math.isclose(period, scipy.special.ellipkm1(k**2), rel_tol=1e-14)
        for part in (0.03, 0.2, 0.5):
            with mpmath.workdps(40):
                m = 1 - mpmath.mpf(k) ** 2
                exact = [mpmath.ellipfun(name, part * period, m=m) for name in ("sn", "cn", "dn")]
            for value, wanted in zip(jacobi_elliptic(part * period, k), exact, strict=True):
                assert math.isclose(value, float(wanted), rel_tol=1e-15 / k)

    @pytest.mark.parametrize("condition", CONDITIONS)
    def test_error_falls_exponentially_at_the_rate_of_the_theorem(self, condition: float) -> None:
        bounds = SpectrumBounds(0.3, 0.3 * condition)
        rate = 2 * math.pi**2 / (math.log(condition) + 3)
        for nodes in (2, 4, 7, 10, 15, 20, 30):
            error = RootQuadrature.of(bounds, nodes).relative_error()
            assert error <= 20 * math.exp(-rate * nodes) + 1e-14
            assert error >= 1e-2 * math.exp(-1.1 * rate * nodes - 2) or nodes > 4

    @pytest.mark.parametrize(
        ("condition", "tolerance"),
        [(1e2, 1e-14), (1e4, 1e-9), (1e6, 1e-6), (1e8, 1e-5), (1e10, 1e-4)],
    )
    def test_fifteen_nodes(self, condition: float, tolerance: float) -> None:
        rule = RootQuadrature.of(SpectrumBounds(2.0 / condition, 2.0))
        assert rule.nodes == 15
        assert rule.relative_error() <= tolerance
        assert bool((rule.shifts.diff() > 0).all())
        assert bool((rule.weights > 0).all())

    def test_bounds_that_are_none_are_refused(self) -> None:
        for lowest, highest in ((0.0, 1.0), (2.0, 1.0), (-1.0, 1.0), (1.0, math.inf)):
            with pytest.raises(ValueError, match="expected 0 < lowest <= highest"):
                SpectrumBounds(lowest, highest)
        with pytest.raises(ValueError, match="at least one point"):
            RootQuadrature.of(SpectrumBounds(1.0, 2.0), 0)


class TestBounds:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_they_hold_the_spectrum(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        K = ToeplitzOperator(_lags(shape, 1.5), dtype)
        eigenvalues = torch.linalg.eigvalsh(K.to_dense().double())
        bounds = spectrum_bounds(K)
        assert float(eigenvalues[0]) / 100 < bounds.lowest <= float(eigenvalues[0])
        assert float(eigenvalues[-1]) <= bounds.highest < 1.1 * float(eigenvalues[-1])
        assert 0 < bounds.steps <= 100

    def test_a_floor_is_believed(self) -> None:
        K = DenseOperator(_with_spectrum(torch.logspace(-8, 0, 30, dtype=torch.float64)))
        assert spectrum_bounds(K, floor=5e-9).lowest == 5e-9

    def test_the_identity_takes_one_step(self) -> None:
        bounds = spectrum_bounds(DiagonalOperator(torch.full((50,), 3.0, dtype=torch.float64)))
        assert bounds.steps == 1
        assert bounds.lowest <= 3.0 <= bounds.highest

    def test_indefinite_operators_are_refused(self) -> None:
        d = torch.linspace(-0.1, 1.0, 40, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"not positive definite in torch\.float64: Lanczos"):
            spectrum_bounds(DiagonalOperator(d))
        with pytest.raises(ValueError, match="not positive definite"):
            spectrum_bounds(DiagonalOperator(torch.full((5,), math.nan)))


class TestShiftedMinres:
    @pytest.mark.parametrize("condition", [1e2, 1e5])
    def test_every_shift_is_solved_to_the_residual_that_is_reported(self, condition: float) -> None:
        K = _with_spectrum(torch.logspace(0, -math.log10(condition), 90, dtype=torch.float64))
        b, shifts = _vectors(2, 3, 90), torch.tensor([0.0, 1e-3, 0.1, 10.0])
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
        K = _with_spectrum(torch.logspace(-5, 0, 200, dtype=torch.float64))
        b = _vectors(3, 200)
        shifts = torch.tensor([1e-6, 1e-2], dtype=torch.float64)
        solve = shifted_minres(DenseOperator(K), b, shifts, max_steps=3000)
        assert int(solve.steps.min()) > 128
        assert solve.worst is SolveStatus.CONVERGED, solve.message()
        exact = torch.linalg.solve(K + 1e-2 * torch.eye(200, dtype=torch.float64), b.mT).mT
        assert _error(solve.x[1], exact) < 1e-9

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
        K, b = ToeplitzOperator(_lags((9, 8))), _vectors(5, 72)
        shifts, mix = torch.tensor([0.01, 0.1, 1.0]), _vectors(2, 3)
        all_of_them = shifted_minres(K, b, shifts, rtol=1e-12).x
        wanted = torch.einsum("pq,qrn->prn", mix, all_of_them)
        torch.testing.assert_close(shifted_minres(K, b, shifts, mix=mix, rtol=1e-12).x, wanted)
        in_groups = shifted_minres(K, b, shifts, mix=mix, rtol=1e-12, memory=1)
        torch.testing.assert_close(in_groups.x, wanted, rtol=1e-9, atol=1e-9)

    def test_scale_of_the_right_hand_side_changes_nothing(self) -> None:
        K, b, shifts = ToeplitzOperator(_lags((30,))), _vectors(2, 30), torch.tensor([0.1])
        x = shifted_minres(K, b, shifts, rtol=1e-12).x
        tiny = shifted_minres(K, b * 1e-200, shifts, rtol=1e-12).x
        torch.testing.assert_close(tiny * 1e200, x)

    def test_error_falls_with_the_steps(self) -> None:
        """As 2 ρ^J, ρ = (√κ − 1)/(√κ + 1), the bound of MINRES."""
        K = _with_spectrum(torch.logspace(-2, 0, 100, dtype=torch.float64))
        b, rho = _vectors(4, 100), (math.sqrt(100) - 1) / (math.sqrt(100) + 1)
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
        K = _with_spectrum(torch.logspace(-4, 0, 150, dtype=torch.float64)).float()
        solve = shifted_minres(
            DenseOperator(K), _vectors(3, 150).float(), torch.tensor([0.0]), rtol=1e-2
        )
        assert solve.worst is SolveStatus.CONVERGED, solve.message()
        assert int(solve.steps.max()) > 64

    def test_a_mistaken_recursion_is_reported(self) -> None:
        K = _with_spectrum(torch.logspace(-6, 0, 100, dtype=torch.float64)).float()
        K = K + 1e-6 * torch.eye(100)
        solve = shifted_minres(
            DenseOperator(K), _vectors(2, 100).float(), torch.tensor([0.0]), max_steps=2000
        )
        assert solve.worst in (SolveStatus.STAGNATED, SolveStatus.MAX_STEPS)
        assert float(solve.true_residuals.max()) > 1e-6

    def test_not_positive_definite_and_not_finite(self) -> None:
        d = torch.linspace(-0.05, 1.0, 50, dtype=torch.float64)
        solve = shifted_minres(DiagonalOperator(d), _vectors(2, 50), torch.tensor([0.5]))
        assert solve.worst is SolveStatus.NOT_POSITIVE_DEFINITE
        assert "add a nugget" in solve.message()
        d[3] = math.nan
        solve = shifted_minres(DiagonalOperator(d), _vectors(2, 50), torch.tensor([0.5]))
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


class TestRoots:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-4)])
    def test_equal_the_dense_roots(
        self, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
    ) -> None:
        lags = _lags(shape, ridge=1e-3)
        K, T, b = ToeplitzOperator(lags).to_dense(), ToeplitzOperator(lags, dtype), _vectors(4, 2)
        b = _vectors(2, 3, len(K))
        method = RootMethod.of(T, rtol=1e-9 if dtype == torch.float64 else 1e-4)
        y, report = inverse_root(lambda: T, (), b.to(dtype), method)
        assert report.converged, report.message
        assert report.quadrature_error < 1e-8
        assert y.dtype == dtype
        assert _error(y, b @ _power(K, -0.5)) < tolerance
        z, _ = square_root(lambda: T, (), b.to(dtype), method)
        assert _error(z, b @ _power(K, 0.5)) < tolerance
        back, _ = square_root(lambda: T, (), y, method)
        assert _error(back, b) < tolerance

    @pytest.mark.parametrize("condition", [1e3, 1e6])
    def test_error_falls_exponentially_with_the_nodes(self, condition: float) -> None:
        eigenvalues = torch.logspace(-math.log10(condition), 0, 80, dtype=torch.float64)
        K, b = DenseOperator(_with_spectrum(eigenvalues)), _vectors(3, 80)
        exact, bounds = b @ _power(K.matrix, -0.5), SpectrumBounds(1 / condition, 1.0)
        rate = 2 * math.pi**2 / (math.log(condition) + 3)
        errors = []
        for nodes in (3, 5, 7, 9):
            method = RootMethod(RootQuadrature.of(bounds, nodes), rtol=1e-12, max_steps=2000)
            errors.append(_error(inverse_root(lambda: K, (), b, method)[0], exact))
            assert errors[-1] <= 20 * math.exp(-rate * nodes)
        assert errors[-1] < 2 * errors[0] * math.exp(-6 * rate)

    def test_error_is_within_the_stated_bound_of_rtol(self) -> None:
        eigenvalues = torch.logspace(-3, 0, 80, dtype=torch.float64)
        K, b = DenseOperator(_with_spectrum(eigenvalues)), _vectors(5, 80)
        exact = b @ _power(K.matrix, -0.5)
        for rtol in (1e-2, 1e-4, 1e-6):
            y, _ = inverse_root(lambda: K, (), b, RootMethod.of(K, rtol=rtol))
            assert bool(((y - exact).norm(dim=-1) <= 1e3**0.5 * rtol * b.norm(dim=-1)).all())

    def test_badly_conditioned(self) -> None:
        """κ = 10¹⁰: fifteen nodes leave 4e-5, as reported; thirty-five 1e-9."""
        eigenvalues = torch.logspace(-10, 0, 30, dtype=torch.float64)
        K, b = DenseOperator(_with_spectrum(eigenvalues)), _vectors(3, 30)
        exact = b @ _power(K.matrix, 0.5)
        for nodes, tolerance in ((15, 1e-4), (35, 1e-8)):
            rule = RootQuadrature.of(SpectrumBounds(1e-10, 1.0), nodes)
            method = RootMethod(rule, rtol=1e-9, max_steps=20_000)
            z, report = square_root(lambda: K, (), b, method)
            assert _error(z, exact) < tolerance
            assert report.quadrature_error < tolerance

    def test_eigenvalues_below_the_bounds_are_noticed(self) -> None:
        eigenvalues = torch.logspace(-4, 0, 50, dtype=torch.float64)
        K, rule = (
            DenseOperator(_with_spectrum(eigenvalues)),
            RootQuadrature.of(SpectrumBounds(0.1, 1)),
        )
        assert rule.relative_error() < 1e-12
        _, report = inverse_root(lambda: K, (), _vectors(50), RootMethod(rule, rtol=1e-10))
        assert report.quadrature_error > 0.1

    def test_indefinite_is_an_error_that_says_so(self) -> None:
        K = DiagonalOperator(torch.linspace(-0.05, 1.0, 50, dtype=torch.float64))
        method = RootMethod(RootQuadrature.of(SpectrumBounds(0.01, 1.0)))
        with pytest.raises(ValueError, match=r"is not positive definite: 2 of 2 .* add a nugget"):
            inverse_root(lambda: K, (), _vectors(2, 50), method)

    def test_too_few_steps_are_reported_and_warned_of(self) -> None:
        lags = _lags((60,)).requires_grad_()
        K = ToeplitzOperator(lags.detach())
        method = RootMethod.of(K, max_steps=3)
        y, report = inverse_root(ToeplitzOperator, (lags,), _vectors(2, 60), method)
        assert not report.converged
        assert "max steps after 3 steps" in report.message
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.autograd.grad(y.sum(), lags)
        assert [w.category for w in caught] == [UnconvergedWarning]
        operator = InverseRootOperator(K, method)
        with pytest.warns(UnconvergedWarning, match="product with an inverse root: msMINRES"):
            operator.matmul(_vectors(60))
        operator.matmul(_vectors(60))  # warns once


def _preconditioners(lags: Tensor) -> dict[str, RootPreconditioner]:
    K = ToeplitzOperator(lags)
    ridge = float(torch.linalg.eigvalsh(K.to_dense())[0])
    return {
        "circulant": RootPreconditioner.circulant(lags),
        "low rank": RootPreconditioner.low_rank(nystrom(K, 15, shift=0.9 * ridge)),
    }


class TestPreconditioned:
    @pytest.mark.parametrize("name", ["circulant", "low rank"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_another_root_of_the_same_matrix_in_fewer_steps(
        self, shape: tuple[int, ...], name: str
    ) -> None:
        lags = _lags(shape, ridge=1e-4)
        T = ToeplitzOperator(lags)
        K, one = T.to_dense(), torch.eye(lags.numel(), dtype=torch.float64)
        method = RootMethod.of(T, rtol=1e-10, preconditioner=_preconditioners(lags)[name])
        R = RootOperator(T, method).to_dense()
        torch.testing.assert_close(R @ R.mT, K, rtol=0, atol=1e-8)
        assert float((R - R.mT).abs().max()) > 1e-4  # not the symmetric root
        inverse = InverseRootOperator(T, method)
        torch.testing.assert_close(inverse.to_dense() @ R, one, rtol=0, atol=1e-7)
        torch.testing.assert_close(inverse.rmatmul(one), inverse.to_dense(), rtol=0, atol=1e-7)
        torch.testing.assert_close(RootOperator(T, method).rmatmul(one), R, rtol=0, atol=1e-7)
        rest = RootMethod.of(T, rtol=1e-10)
        fast = inverse_root(lambda: T, (), one, method)[1].steps
        plain = inverse_root(lambda: T, (), one, rest)[1].steps
        assert int(fast.max()) < 0.7 * int(plain.max())

    @pytest.mark.parametrize("shape", SHAPES)
    def test_spectrum_of_the_optimal_circulant_lies_within_that_of_the_matrix(
        self, shape: tuple[int, ...]
    ) -> None:
        lags = _lags(shape)
        K = ToeplitzOperator(lags).to_dense()
        root = RootPreconditioner.circulant(lags).root
        assert isinstance(root, CirculantOperator)
        C = root.to_dense() @ root.to_dense()
        outer, inner = torch.linalg.eigvalsh(K), torch.linalg.eigvalsh(C)
        assert float(outer[0]) <= float(inner[0]) + 1e-12
        assert float(inner[-1]) <= float(outer[-1]) + 1e-12
        # nearest in Frobenius norm: C − K has no component along any cyclic shift
        shift = torch.roll(torch.eye(shape[-1], dtype=torch.float64), 1, 0)
        power = torch.kron(torch.eye(math.prod(shape[:-1]), dtype=torch.float64), shift)
        assert abs(float(((C - K) * power).sum())) < 1e-9

    def test_of_another_size_is_refused(self) -> None:
        P = RootPreconditioner.circulant(_lags((5,)))
        with pytest.raises(ValueError, match=r"expected shape \(6, 6\) like the operator"):
            RootMethod.of(ToeplitzOperator(_lags((6,))), preconditioner=P)

    def test_indefinite_lags_have_no_circulant_root(self) -> None:
        with pytest.raises(ValueError, match="is not positive, so the Toeplitz matrix"):
            RootPreconditioner.circulant(torch.tensor([1.0, 1.5]))


Root = Callable[..., tuple[Tensor, object]]


class TestGradients:
    @pytest.mark.parametrize("root", [inverse_root, square_root])
    @pytest.mark.parametrize("preconditioned", [False, True])
    @pytest.mark.parametrize("shape", [(9,), (4, 3), (3, 2, 3)])
    def test_gradcheck_in_parameters_and_right_hand_side(
        self, shape: tuple[int, ...], preconditioned: bool, root: Root
    ) -> None:
        theta = torch.tensor([2.0, 1e-2], dtype=torch.float64, requires_grad=True)
        b = _vectors(2, math.prod(shape)).requires_grad_()
        lags = _lags(shape, 2.0, 1e-2)
        P = RootPreconditioner.circulant(lags) if preconditioned else None
        method = RootMethod.of(ToeplitzOperator(lags), nodes=25, rtol=1e-13, preconditioner=P)

        def value(theta: Tensor, b: Tensor) -> Tensor:
            return root(ToeplitzOperator, (_lags(shape, theta[0], theta[1]),), b, method)[0]

        assert torch.autograd.gradcheck(value, (theta, b), atol=1e-6, rtol=1e-5, fast_mode=True)

    def test_equals_the_derivative_of_the_dense_root(self) -> None:
        x = _vectors(30, 2)
        ell = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        b = _vectors(3, 30).requires_grad_()

        def gram() -> Tensor:
            one = torch.eye(30, dtype=torch.float64)
            return torch.exp(-torch.cdist(x, x).square() / (2 * ell**2)) + 1e-3 * one

        method = RootMethod.of(DenseOperator(gram().detach()), nodes=25, rtol=1e-10)
        y, _ = inverse_root(DenseOperator, (gram(),), b, method)
        eigenvalues, vectors = torch.linalg.eigh(gram())
        exact = ((b @ vectors) * eigenvalues.rsqrt()) @ vectors.mT
        weights = _vectors(3, 30, seed=3)
        found = torch.autograd.grad((weights * y).sum(), (ell, b))
        wanted = torch.autograd.grad((weights * exact).sum(), (ell, b))
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)

    def test_float32_with_float64_lags(self) -> None:
        lags, b = _lags((6, 5), ridge=0.3).requires_grad_(), _vectors(3, 30).float()

        def single(k: Tensor) -> ToeplitzOperator:
            return ToeplitzOperator(k, torch.float32)

        y, report = inverse_root(single, (lags,), b, RootMethod.of(single(lags), rtol=2e-5))
        assert report.converged
        (gradient,) = torch.autograd.grad(y.sum(), lags)
        assert gradient.dtype == torch.float64
        double = inverse_root(
            ToeplitzOperator, (lags,), b.double(), RootMethod.of(ToeplitzOperator(lags), rtol=1e-10)
        )[0]
        (wanted,) = torch.autograd.grad(double.sum(), lags)
        assert float((gradient - wanted).norm()) < 2e-3 * float(wanted.norm())

    def test_only_the_right_hand_side(self) -> None:
        K, b = DenseOperator(torch.diag(torch.arange(1.0, 9.0).double())), _vectors(2, 8)
        b.requires_grad_()
        y, _ = inverse_root(lambda: K, (), b, RootMethod.of(K, rtol=1e-12))
        (gradient,) = torch.autograd.grad(y.sum(), b)
        wanted = torch.arange(1.0, 9.0).double().rsqrt().expand(2, 8)
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9)


def test_operators_hold_their_contract() -> None:
    T = ToeplitzOperator(_lags((12,), ridge=0.1))
    x, y = _vectors(12), _vectors(12, seed=1)
    operators: list[AbstractOperator] = []
    for P in (None, RootPreconditioner.circulant(T.lags)):
        method = RootMethod.of(T, rtol=1e-12, preconditioner=P)
        operators += [RootOperator(T, method), InverseRootOperator(T, method)]
    for operator in operators:
        assert operator.shape == (12, 12)
        assert operator.dtype == torch.float64
        difference = y @ operator.matmul(x) - x @ operator.rmatmul(y)
        assert abs(float(difference)) < 1e-9
        with pytest.raises(ValueError, match="length 12"):
            operator.matmul(_vectors(11))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_all_stays_on_the_device_of_the_operator() -> None:
    lags, b = _lags((5, 4), ridge=0.1), _vectors(2, 20)
    with pretended_gpu():
        theta = lags.to("cuda").requires_grad_()
        right = b.to("cuda")
        P = RootPreconditioner.circulant(theta)
        for preconditioner in (None, P):
            method = RootMethod.of(
                ToeplitzOperator(theta.detach()), preconditioner=preconditioner, rtol=1e-4
            )
            y, _ = square_root(ToeplitzOperator, (theta,), right, method)
            (gradient,) = torch.autograd.grad(y.sum(), theta)
            assert y.is_cuda
            assert gradient.is_cuda
