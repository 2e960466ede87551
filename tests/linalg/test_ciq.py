"""Roots by contour integral quadrature against dense algebra, and the theory of their errors."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.linalg import (
    AbstractOperator,
    CirculantOperator,
    DenseOperator,
    DiagonalOperator,
    InverseRootOperator,
    RootMethod,
    RootPreconditioner,
    RootQuadrature,
    SpectrumBounds,
    ToeplitzOperator,
    UnconvergedWarning,
    inverse_root,
    square_root,
)
from tests.cuda.pretended import pretended_gpu
from tests.linalg.root_cases import (
    SHAPES,
    matern_lags,
    matrix_power,
    normal,
    relative_error,
    with_spectrum,
)


class TestRoots:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-4)])
    def test_equal_the_dense_roots(
        self, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
    ) -> None:
        lags = matern_lags(shape, ridge=1e-3)
        K, T, b = ToeplitzOperator(lags).to_dense(), ToeplitzOperator(lags, dtype), normal(4, 2)
        b = normal(2, 3, len(K))
        method = RootMethod.of(T, rtol=1e-9 if dtype == torch.float64 else 1e-4)
        y, report = inverse_root(lambda: T, (), b.to(dtype), method)
        assert report.converged, report.message
        assert report.quadrature_error < 1e-8
        assert y.dtype == dtype
        assert relative_error(y, b @ matrix_power(K, -0.5)) < tolerance
        z, _ = square_root(lambda: T, (), b.to(dtype), method)
        assert relative_error(z, b @ matrix_power(K, 0.5)) < tolerance
        back, _ = square_root(lambda: T, (), y, method)
        assert relative_error(back, b) < tolerance

    @pytest.mark.parametrize("condition", [1e3, 1e6])
    def test_error_falls_exponentially_with_the_nodes(self, condition: float) -> None:
        eigenvalues = torch.logspace(-math.log10(condition), 0, 80, dtype=torch.float64)
        K, b = DenseOperator(with_spectrum(eigenvalues)), normal(3, 80)
        exact, bounds = b @ matrix_power(K.matrix, -0.5), SpectrumBounds(1 / condition, 1.0)
        rate = 2 * math.pi**2 / (math.log(condition) + 3)
        errors = []
        for nodes in (3, 5, 7, 9):
            method = RootMethod(RootQuadrature.of(bounds, nodes), rtol=1e-12, max_steps=2000)
            errors.append(relative_error(inverse_root(lambda: K, (), b, method)[0], exact))
            assert errors[-1] <= 20 * math.exp(-rate * nodes)
        assert errors[-1] < 2 * errors[0] * math.exp(-6 * rate)

    def test_error_is_within_the_stated_bound_of_rtol(self) -> None:
        eigenvalues = torch.logspace(-3, 0, 80, dtype=torch.float64)
        K, b = DenseOperator(with_spectrum(eigenvalues)), normal(5, 80)
        exact = b @ matrix_power(K.matrix, -0.5)
        for rtol in (1e-2, 1e-4, 1e-6):
            y, _ = inverse_root(lambda: K, (), b, RootMethod.of(K, rtol=rtol))
            assert bool(((y - exact).norm(dim=-1) <= 1e3**0.5 * rtol * b.norm(dim=-1)).all())

    def test_badly_conditioned(self) -> None:
        """κ = 10¹⁰: fifteen nodes leave 4e-5, as reported; thirty-five 1e-9."""
        eigenvalues = torch.logspace(-10, 0, 30, dtype=torch.float64)
        K, b = DenseOperator(with_spectrum(eigenvalues)), normal(3, 30)
        exact = b @ matrix_power(K.matrix, 0.5)
        for nodes, tolerance in ((15, 1e-4), (35, 1e-8)):
            rule = RootQuadrature.of(SpectrumBounds(1e-10, 1.0), nodes)
            method = RootMethod(rule, rtol=1e-9, max_steps=20_000)
            z, report = square_root(lambda: K, (), b, method)
            assert relative_error(z, exact) < tolerance
            assert report.quadrature_error < tolerance

    def test_eigenvalues_below_the_bounds_are_noticed(self) -> None:
        eigenvalues = torch.logspace(-4, 0, 50, dtype=torch.float64)
        K, rule = (
            DenseOperator(with_spectrum(eigenvalues)),
            RootQuadrature.of(SpectrumBounds(0.1, 1)),
        )
        assert rule.relative_error() < 1e-12
        _, report = inverse_root(lambda: K, (), normal(50), RootMethod(rule, rtol=1e-10))
        assert report.quadrature_error > 0.1

    def test_indefinite_is_an_error_that_says_so(self) -> None:
        K = DiagonalOperator(torch.linspace(-0.05, 1.0, 50, dtype=torch.float64))
        method = RootMethod(RootQuadrature.of(SpectrumBounds(0.01, 1.0)))
        with pytest.raises(ValueError, match=r"is not positive definite: 2 of 2 .* add a nugget"):
            inverse_root(lambda: K, (), normal(2, 50), method)

    def test_too_few_steps_are_reported_and_warned_of(self) -> None:
        lags = matern_lags((60,)).requires_grad_()
        K = ToeplitzOperator(lags.detach())
        method = RootMethod.of(K, max_steps=3)
        y, report = inverse_root(ToeplitzOperator, (lags,), normal(2, 60), method)
        assert not report.converged
        assert "max steps after 3 steps" in report.message
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.autograd.grad(y.sum(), lags)
        assert [w.category for w in caught] == [UnconvergedWarning]
        operator = InverseRootOperator(K, method)
        with pytest.warns(UnconvergedWarning, match="product with an inverse root: msMINRES"):
            operator.matmul(normal(60))
        operator.matmul(normal(60))  # warns once


class TestPreconditioned:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_another_root_of_the_same_matrix_in_fewer_steps(self, shape: tuple[int, ...]) -> None:
        lags = matern_lags(shape, ridge=1e-4)
        T = ToeplitzOperator(lags)
        K, one = T.to_dense(), torch.eye(lags.numel(), dtype=torch.float64)
        P = RootPreconditioner.circulant(lags)
        method = RootMethod.of(T, rtol=1e-10, preconditioner=P)
        R = square_root(lambda: T, (), one, method)[0].mT
        torch.testing.assert_close(R @ R.mT, K, rtol=0, atol=1e-8)
        assert float((R - R.mT).abs().max()) > 1e-4  # not the symmetric root
        inverse = InverseRootOperator(T, method)
        torch.testing.assert_close(inverse.to_dense() @ R, one, rtol=0, atol=1e-7)
        torch.testing.assert_close(inverse.rmatmul(one), inverse.to_dense(), rtol=0, atol=1e-7)
        rest = RootMethod.of(T, rtol=1e-10)
        fast = inverse_root(lambda: T, (), one, method)[1].steps
        plain = inverse_root(lambda: T, (), one, rest)[1].steps
        assert int(fast.max()) < 0.7 * int(plain.max())

    @pytest.mark.parametrize("shape", SHAPES)
    def test_spectrum_of_the_optimal_circulant_lies_within_that_of_the_matrix(
        self, shape: tuple[int, ...]
    ) -> None:
        lags = matern_lags(shape)
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
        P = RootPreconditioner.circulant(matern_lags((5,)))
        with pytest.raises(ValueError, match=r"expected shape \(6, 6\) like the operator"):
            RootMethod.of(ToeplitzOperator(matern_lags((6,))), preconditioner=P)

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
        b = normal(2, math.prod(shape)).requires_grad_()
        lags = matern_lags(shape, 2.0, 1e-2)
        P = RootPreconditioner.circulant(lags) if preconditioned else None
        method = RootMethod.of(ToeplitzOperator(lags), nodes=25, rtol=1e-13, preconditioner=P)

        def value(theta: Tensor, b: Tensor) -> Tensor:
            return root(ToeplitzOperator, (matern_lags(shape, theta[0], theta[1]),), b, method)[0]

        assert torch.autograd.gradcheck(value, (theta, b), atol=1e-6, rtol=1e-5, fast_mode=True)

    def test_equals_the_derivative_of_the_dense_root(self) -> None:
        x = normal(30, 2)
        ell = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        b = normal(3, 30).requires_grad_()

        def gram() -> Tensor:
            one = torch.eye(30, dtype=torch.float64)
            return torch.exp(-torch.cdist(x, x).square() / (2 * ell**2)) + 1e-3 * one

        method = RootMethod.of(DenseOperator(gram().detach()), nodes=25, rtol=1e-10)
        y, _ = inverse_root(DenseOperator, (gram(),), b, method)
        eigenvalues, vectors = torch.linalg.eigh(gram())
        exact = ((b @ vectors) * eigenvalues.rsqrt()) @ vectors.mT
        weights = normal(3, 30, seed=3)
        found = torch.autograd.grad((weights * y).sum(), (ell, b))
        wanted = torch.autograd.grad((weights * exact).sum(), (ell, b))
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)

    def test_float32_with_float64_lags(self) -> None:
        lags, b = matern_lags((6, 5), ridge=0.3).requires_grad_(), normal(3, 30).float()

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
        K, b = DenseOperator(torch.diag(torch.arange(1.0, 9.0).double())), normal(2, 8)
        b.requires_grad_()
        y, _ = inverse_root(lambda: K, (), b, RootMethod.of(K, rtol=1e-12))
        (gradient,) = torch.autograd.grad(y.sum(), b)
        wanted = torch.arange(1.0, 9.0).double().rsqrt().expand(2, 8)
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9)


def test_operators_hold_their_contract() -> None:
    T = ToeplitzOperator(matern_lags((12,), ridge=0.1))
    x, y = normal(12), normal(12, seed=1)
    operators: list[AbstractOperator] = []
    for P in (None, RootPreconditioner.circulant(T.lags)):
        method = RootMethod.of(T, rtol=1e-12, preconditioner=P)
        operators.append(InverseRootOperator(T, method))
    for operator in operators:
        assert operator.shape == (12, 12)
        assert operator.dtype == torch.float64
        difference = y @ operator.matmul(x) - x @ operator.rmatmul(y)
        assert abs(float(difference)) < 1e-9
        with pytest.raises(ValueError, match="length 12"):
            operator.matmul(normal(11))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_all_stays_on_the_device_of_the_operator() -> None:
    lags, b = matern_lags((5, 4), ridge=0.1), normal(2, 20)
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
