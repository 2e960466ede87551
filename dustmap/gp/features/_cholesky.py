"""The classical whitening of sparse variational Gaussian processes: φ = L⁻¹ k.

The gradient of the factorisation and the solve is one.
"""

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.errors import UserError
from dustmap.gp.features._base import Features, gathered, rows_within
from dustmap.gp.features._inducing import AbstractInducingFeatures, point_covariances
from dustmap.gp.features._operators import ProductOperator, cross_operator
from dustmap.gp.functionals import AbstractFunctional
from dustmap.linalg import AbstractComposite, AbstractOperator, chunks


def whitened_rows(gram: Tensor | None, factor: Tensor, K_fu: Tensor) -> Tensor:
    """Return Φ = K_fu L⁻ᵀ (N, M) for gram = L Lᵀ (M, M) with its graph, or None where it has none.

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
    """Solve Φᵀ = L⁻¹ Kᵀ in the precision of K_fu."""
    solved: Tensor = torch.linalg.solve_triangular(factor.to(K_fu.dtype), K_fu.mT, upper=False)
    return solved.mT


@final
@dataclass(frozen=True, eq=False)
class CholeskyFeatures(AbstractInducingFeatures):
    """φ_n = L⁻¹ k_{u,n} with K_uu + ν I = L Lᵀ (Hensman et al. 2015).

    A factorisation that fails is an error that asks for a larger nugget. K_uu is factorised in
    float64, and so are rows of point values under free points computed; of other rows the solves
    are in `rows_dtype`.

    gram: K_uu + ν I (M, M) with its graph, None where nothing is differentiated; factor: L without.
    """

    gram: Tensor | None = field(init=False)
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        cells = 3 * self.n_features**2 * 8
        if cells > 16 * 2**30:
            raise MemoryError(
                f"Cholesky whitening of M = {self.n_features:,} points needs {cells:,} bytes: use "
                "HIPFeatures or TorusFeatures on a grid"
            )
        gram = self._dense_gram()
        factor, info = torch.linalg.cholesky_ex(gram.detach())
        if int(info) != 0:
            raise UserError(
                f"K_uu of {len(gram)} inducing points is not numerically positive definite "
                f"(pivot {int(info)}, nugget {self.nugget}): pass a larger nugget, e.g. "
                f"{max(1e-8, 100 * self.nugget):.0e}, or fewer points per length scale"
            )
        object.__setattr__(self, "gram", gram if gram.requires_grad else None)
        object.__setattr__(self, "factor", factor)

    @property
    def chunk(self) -> int:
        return rows_within(self.memory, 8 * self.n_features * self.dtype.itemsize)

    def rows(self, functional: AbstractFunctional) -> Features:
        parts = (self._rows(functional[part]) for part in chunks(len(functional), self.chunk))
        return gathered(parts, len(functional))

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            factor = self.factor.to(self.dtype)
            cross = cross_operator(
                functional, self._estimated_cross, self.n_features, factor, self.memory
            )
            return ProductOperator(cross, _InverseTriangle(factor))

    def _rows(self, functional: AbstractFunctional) -> Features:
        seen = self._points_seen(functional)
        if seen is not None:
            K_fu = point_covariances(self.kernel, *seen)
            k_ff = self.kernel.variance().expand(len(functional))
            phi = whitened_rows(self.gram, self.factor, K_fu)
            rows = Features.of(phi, k_ff, (phi * phi).sum(-1))
            return Features(
                rows.phi.to(self.dtype), rows.residual_variance.to(self.dtype), clamped=rows.clamped
            )
        phi = whitened_rows(self.gram, self.factor, self._estimated_cross(functional))
        k_ff = self.estimator.variance(self.kernel, functional, self.wrapping, self.dtype)
        return Features.of(phi, k_ff, (phi * phi).sum(-1))


@final
class _InverseTriangle(AbstractComposite):
    """L⁻ᵀ (M, M) for a lower triangle L."""

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._factor), len(self._factor)

    def _made_of(self) -> Tensor:
        return self._factor

    def matmul(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).mT
        solved: Tensor = torch.linalg.solve_triangular(self._factor.mT, flat, upper=True)
        return solved.mT.reshape(x.shape)

    def rmatmul(self, y: Tensor) -> Tensor:
        return _solved(self._factor, y.reshape(-1, y.shape[-1])).reshape(y.shape)
