"""Square roots of positive definite operators by contour integral quadrature."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.errors import UserError
from dustmap.linalg import _operator
from dustmap.linalg._contour import RootQuadrature, SpectrumBounds, spectrum_bounds
from dustmap.linalg._iteration import SolveStatus, UnconvergedWarning
from dustmap.linalg._minres import ShiftedSolve, shifted_minres
from dustmap.linalg._preconditioners import PreconditionedOperator, RootPreconditioner

#: K(θ) of its parameters θ; its products are differentiable in them.
Build = Callable[..., _operator.AbstractOperator]


@final
@dataclass(frozen=True, eq=False)
class RootResult:
    """Report on a product with a root, one verdict per right-hand side.

    status, steps, rtol: as in `ShiftedSolve`; residuals (...): the true one of the smallest shift;
    bounds: the interval of the quadrature; quadrature_error: its largest relative error there, and
    where right-hand sides have met smaller eigenvalues than its own, down to these; message: one
    sentence on the worst columns.
    """

    status: Tensor
    steps: Tensor
    residuals: Tensor
    rtol: float
    bounds: SpectrumBounds
    quadrature_error: float
    message: str

    @staticmethod
    def of(solve: ShiftedSolve, quadrature: RootQuadrature) -> "RootResult":
        """Return the report of one batched solve with the shifts of a quadrature."""
        lowest = min(solve.lowest_ritz, quadrature.bounds.lowest)
        floor = torch.finfo(solve.x.dtype).eps * quadrature.bounds.highest
        return RootResult(
            solve.status,
            solve.steps,
            solve.true_residuals,
            solve.rtol,
            quadrature.bounds,
            quadrature.relative_error(max(lowest, min(floor, quadrature.bounds.lowest))),
            solve.message(),
        )

    @property
    def converged(self) -> bool:
        """Whether every right-hand side reached rtol."""
        return not bool((self.status != SolveStatus.CONVERGED.value).any())


@final
@dataclass(frozen=True, eq=False)
class RootMethod:
    """Method to take a root: the rule, the stop of msMINRES, and a preconditioner or none.

    quadrature: nodes and weights on the spectrum of K, or of L⁻¹ K L⁻ᵀ where there is a
    preconditioner L Lᵀ, from `RootMethod.of`; rtol, max_steps: relative residual and number of
    steps J at which the solves of all shifts stop; memory: bytes for the vectors worked on at once.
    """

    quadrature: RootQuadrature
    rtol: float = 1e-6
    max_steps: int = 1000
    preconditioner: RootPreconditioner | None = None
    memory: int = 2**29

    @staticmethod
    def of(
        K: _operator.AbstractOperator,
        *,
        nodes: int = 15,
        rtol: float = 1e-6,
        max_steps: int = 1000,
        preconditioner: RootPreconditioner | None = None,
        floor: float = 0.0,
        memory: int = 2**29,
    ) -> "RootMethod":
        """Make the method for roots of K, with bounds of its spectrum by `spectrum_bounds`.

        nodes: points Q of the quadrature; floor: what no eigenvalue (of the preconditioned
        operator) is known to be below.
        """
        system = K if preconditioner is None else PreconditionedOperator(K, preconditioner)
        quadrature = RootQuadrature.of(spectrum_bounds(system, floor=floor), nodes)
        return RootMethod(quadrature, rtol, max_steps, preconditioner, memory)


def inverse_root(
    build: Build, parameters: Sequence[Tensor], b: Tensor, method: RootMethod
) -> tuple[Tensor, RootResult]:
    """Return K^{-1/2} b, or R⁻¹ b for another root R Rᵀ = K where the method has a preconditioner.

        K^{-1/2} b ≈ Σ_q w_q x_q,   (K + t_q I) x_q = b:  msMINRES, one Krylov space for all q

    With P = L Lᵀ the same is done to A = L⁻¹ K L⁻ᵀ, whose condition is better:

        R = L A^{1/2} = K^{1/2} up to a rotation,   R⁻¹ b = A^{-1/2} L⁻¹ b,   R⁻ᵀ R⁻¹ = K⁻¹

    Differentiable in the parameters and in b, not through the iterations:

        b-bar = Σ_q w_q a_q,   (K + t_q I) a_q = y-bar,    θ-bar = −∂/∂θ Σ_q w_q a_qᵀ K(θ) x_q

    (P is held fixed) which is another solve and a product with all x_q. If θ wants no gradient, the
    x_q are never formed. A backward solve that misses rtol warns with `UnconvergedWarning`.

    The error is at most (rtol / √λ_min + quadrature_error ‖K^{-1/2}‖) ‖b‖.

    K(θ) = build(*parameters) (n, n), symmetric; a UserError where it turns out not to be positive
    definite. b (..., n): in the working precision.

    Reference: Pleiss et al. (2020), "Fast matrix square roots with applications to Gaussian
    processes and Bayesian optimization", eq. 4, algorithm 2 and appendices B and C.

    Examples
    --------
    >>> K = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    >>> method = RootMethod.of(DenseOperator(K), rtol=1e-10)
    >>> y, report = inverse_root(DenseOperator, (K,), torch.ones(2, dtype=torch.float64), method)
    >>> y.round(decimals=6), report.converged
    (tensor([1.0000, 0.5000], dtype=torch.float64), True)
    """
    P = method.preconditioner
    if P is None:
        return _inverse_root(build, parameters, b, method)
    return _inverse_root(_preconditioned(build, P), parameters, P.inverse.matmul(b), method)


def square_root(
    build: Build, parameters: Sequence[Tensor], b: Tensor, method: RootMethod
) -> tuple[Tensor, RootResult]:
    """K^{1/2} b = K K^{-1/2} b, or R b = L A A^{-1/2} b with a preconditioner; see `inverse_root`.

    Draws N(0, K) of white b. Differentiable in the parameters and in b.
    """
    P = method.preconditioner
    system = build if P is None else _preconditioned(build, P)
    y, report = _inverse_root(system, parameters, b, method)
    root = system(*parameters).matmul(y)
    return (root if P is None else P.root.matmul(root)), report


def _preconditioned(build: Build, P: RootPreconditioner) -> Build:
    """Build L⁻¹ K(θ) L⁻ᵀ in place of K(θ)."""
    return lambda *parameters: PreconditionedOperator(build(*parameters), P)


def _inverse_root(
    build: Build, parameters: Sequence[Tensor], b: Tensor, method: RootMethod
) -> tuple[Tensor, RootResult]:
    """Apply A^{-1/2}, differentiable in the parameters and in b."""
    report: list[RootResult] = []
    y: Tensor = _InverseRoot.apply(  # type: ignore[no-untyped-call]
        b, build, method, report, *parameters
    )
    return y, report[0]


class _InverseRoot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        b: Tensor,
        build: Build,
        method: RootMethod,
        report: list[RootResult],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.build, ctx.method = build, method
        keeps = any(ctx.needs_input_grad[4:])
        y, x, result = _solve(build(*parameters), b, method, keeps)
        report.append(result)
        ctx.save_for_backward(x, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        K = ctx.build(*parameters)
        grad_b, a, result = _solve(K, grads[0].contiguous(), ctx.method, x is not None)
        if not result.converged:
            warnings.warn(f"gradient of a root: {result.message}", UnconvergedWarning, stacklevel=2)
        if x is None or a is None:
            return grad_b, None, None, None, *(None for _ in parameters)
        wanted = ctx.needs_input_grad[4:]
        grad_parameters = _bilinear_gradient(ctx.build, parameters, wanted, a, x, ctx.method)
        return grad_b, None, None, None, *grad_parameters


def _solve(
    K: _operator.AbstractOperator, b: Tensor, method: RootMethod, keeps: bool
) -> tuple[Tensor, Tensor | None, RootResult]:
    """Return Σ_q w_q x_q (..., n), the x_q (Q, ..., n) if they are kept, and the report.

    Raise where a right-hand side met a negative eigenvalue.
    """
    rule = method.quadrature
    mix = None if keeps else rule.weights[None]
    solve = shifted_minres(
        K,
        b,
        rule.shifts,
        mix=mix,
        rtol=method.rtol,
        max_steps=method.max_steps,
        memory=method.memory,
    )
    result = RootResult.of(solve, rule)
    broken = result.status == SolveStatus.NOT_POSITIVE_DEFINITE.value
    if bool(broken.any()):
        raise UserError(
            f"the operator is not positive definite: {int(broken.sum())} of {broken.numel()} "
            f"right-hand sides met a negative eigenvalue, bounds of the spectrum were "
            f"[{result.bounds.lowest:.3g}, {result.bounds.highest:.3g}]; add a nugget, or take "
            "float64"
        )
    if not keeps:
        return solve.x[0], None, result
    return torch.tensordot(rule.weights.to(solve.x), solve.x, 1), solve.x, result


def _bilinear_gradient(
    build: Build,
    parameters: Sequence[Tensor],
    wanted: Sequence[bool],
    a: Tensor,
    x: Tensor,
    method: RootMethod,
) -> list[Tensor | None]:
    """Return −∂/∂θ Σ_q w_q a_qᵀ K(θ) x_q for the parameters that are wanted; a, x (Q, ..., n)."""
    weights = method.quadrature.weights.to(a).reshape(-1, *([1] * (a.ndim - 1)))
    if build is _operator.DenseOperator:  # without the product itself, which costs as much again
        n = a.shape[-1]
        return [-(weights * a).reshape(-1, n).mT @ x.reshape(-1, n)]
    with torch.enable_grad():
        leaves = [
            p.detach().requires_grad_(want) for p, want in zip(parameters, wanted, strict=True)
        ]
        product = build(*leaves).matmul(x)
        differentiated = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        gradients = iter(
            torch.autograd.grad(product, differentiated, -weights * a, allow_unused=True)
        )
    return [next(gradients) if want else None for want in wanted]


@final
class InverseRootOperator(_operator.AbstractComposite):
    """R⁻¹ (n, n) with R Rᵀ = K: `inverse_root` as an operator; warns the first time that a solve
    falls short."""

    def __init__(self, K: _operator.AbstractOperator, method: RootMethod) -> None:
        self._K, self._method, self._warned = K, method, False

    def _checked(self, y: Tensor, result: RootResult) -> Tensor:
        if not (result.converged or self._warned):
            text = f"product with an inverse root: {result.message}"
            warnings.warn(text, UnconvergedWarning, stacklevel=3)
        self._warned |= not result.converged
        return y

    def _made_of(self) -> _operator.AbstractOperator:
        return self._K

    def matmul(self, x: Tensor) -> Tensor:
        _operator.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return self._checked(*inverse_root(lambda: self._K, (), x, self._method))

    def rmatmul(self, y: Tensor) -> Tensor:
        """Return R⁻ᵀ y = L⁻ᵀ A^{-1/2} y."""
        _operator.check_vectors("y", y, self.shape[0], self.dtype, self.device)
        P = self._method.preconditioner
        if P is None:
            return self.matmul(y)
        A = PreconditionedOperator(self._K, P)
        return P.inverse.rmatmul(self._checked(*_inverse_root(lambda: A, (), y, self._method)))
