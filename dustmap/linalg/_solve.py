"""Differentiable solves with multilevel Toeplitz matrices."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.linalg._cg import pcg
from dustmap.linalg._operator import AbstractOperator
from dustmap.linalg._result import SolveResult, UnconvergedWarning
from dustmap.linalg._toeplitz import ToeplitzOperator, toeplitz_bilinear_derivative


def toeplitz_solve(
    lags: Tensor,
    b: Tensor,
    *,
    operator: AbstractOperator | None = None,
    preconditioner: AbstractOperator | None = None,
    rtol: float = 1e-6,
    max_steps: int = 1000,
) -> tuple[Tensor, SolveResult]:
    """x = K⁻¹ b by PCG, differentiable in lags and b without differentiating the iterations.

        a = K⁻¹ x̄,    b̄ = a,    lags-bar[ℓ] = −∂(aᵀ K x)/∂lags[ℓ]

    so the backward pass is one more solve with the same settings. It is exact for K in any
    number of dimensions, up to the tolerance of the two solves.

    lags: (M1, …, MD), K as in `ToeplitzOperator`.
    b: (..., M), right-hand sides; their precision is the working precision.
    operator: any operator equal to `ToeplitzOperator(lags)`, used for the products; `lags` then
        only carries the gradient.

    Returns x (..., M) and the report of the forward solve, for the caller to judge. A backward
    solve has no caller to report to: it warns with `UnconvergedWarning`.
    """
    if operator is None:
        operator = ToeplitzOperator(lags.detach(), b.dtype)
    if operator.shape != (lags.numel(), lags.numel()):
        raise ValueError(
            f"operator: expected shape {(lags.numel(), lags.numel())} for lags of shape "
            f"{tuple(lags.shape)}, got {operator.shape}"
        )
    system = operator

    def solve(right: Tensor) -> SolveResult:
        return pcg(system, right, preconditioner=preconditioner, rtol=rtol, max_steps=max_steps)

    report: list[SolveResult] = []
    x: Tensor = _ToeplitzSolve.apply(lags, b, solve, report)  # type: ignore[no-untyped-call]
    return x, report[0]


class _ToeplitzSolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lags: Tensor,
        b: Tensor,
        solve: Callable[[Tensor], SolveResult],
        report: list[SolveResult],
    ) -> Tensor:
        result = solve(b)
        report.append(result)
        ctx.solve, ctx.lags = solve, (tuple(lags.shape), lags.dtype)
        ctx.save_for_backward(result.x)
        return result.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        adjoint = ctx.solve(grads[0])
        if not adjoint.converged:
            warnings.warn(
                f"gradient of toeplitz_solve: {adjoint.message()}", UnconvergedWarning, stacklevel=2
            )
        shape, dtype = ctx.lags
        grad_lags = None
        if ctx.needs_input_grad[0]:
            grad_lags = -toeplitz_bilinear_derivative(adjoint.x, x, shape).to(dtype)
        return grad_lags, adjoint.x, None, None
