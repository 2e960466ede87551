"""φ = L⁻¹ k with the gradient of the factorisation and the solve in one."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def whitened_rows(gram: Tensor | None, factor: Tensor, K_fu: Tensor) -> Tensor:
    """Φ = K_fu L⁻ᵀ (N, M) for gram = L Lᵀ (M, M) with its graph, or None where it has none.

    factor: L, without a graph; it is taken to the dtype of K_fu (N, M) for the solve.
    Differentiable once in gram and K_fu.
    """
    if gram is None:
        return _solved(factor, K_fu)
    phi: Tensor = _Whitened.apply(gram, factor, K_fu)  # type: ignore[no-untyped-call]
    return phi


class _Whitened(torch.autograd.Function):
    """Φᵀ = L⁻¹ Kᵀ.

    K̄ᵀ = L⁻ᵀ Φ̄ᵀ and L̄ = −tril(K̄ᵀ Φ), in the derivative of the Cholesky factor (Murray 2016)

        Ḡ = L⁻ᵀ P L⁻¹      P = lower half of Lᵀ L̄, its diagonal halved
                             = −lower half of Φ̄ᵀ Φ, since Lᵀ is upper triangular:

    no product Lᵀ L̄, and L̄ itself is never formed. Ḡ is left as it is where the reference has its
    symmetric part: the two are one to a gram matrix, which is symmetric in whatever it depends on.
    """

    @staticmethod
    def forward(ctx: Any, gram: Tensor, factor: Tensor, K_fu: Tensor) -> Tensor:
        phi = _solved(factor, K_fu)
        ctx.save_for_backward(factor, phi)
        return phi

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor]:
        factor, phi = ctx.saved_tensors
        of_cross = torch.linalg.solve_triangular(factor.to(grad.dtype).mT, grad.mT, upper=True).mT
        if not ctx.needs_input_grad[0]:
            return None, None, of_cross
        P = (grad.mT.to(factor.dtype) @ phi.to(factor.dtype)).tril_()
        P.diagonal().mul_(0.5)
        right = torch.linalg.solve_triangular(factor, P, upper=False, left=False)
        of_gram = torch.linalg.solve_triangular(factor.mT, right, upper=True)
        return of_gram.neg_(), None, of_cross


def _solved(factor: Tensor, K_fu: Tensor) -> Tensor:
    solved: Tensor = torch.linalg.solve_triangular(factor.to(K_fu.dtype), K_fu.mT, upper=False)
    return solved.mT
