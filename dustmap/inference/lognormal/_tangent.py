"""The response of a log-normal field linearised at a place, and its metric from the data's side."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from dustmap.inference.lognormal._lognormal import LatentRoot
from dustmap.linalg import AbstractOperator, AbstractSymmetric


@final
@dataclass(frozen=True, eq=False)
class GramOperator(AbstractSymmetric):
    """I + W^½ J Jᵀ W^½ (N, N) for J = (L diag(ρ) T, C), T Tᵀ = K + (H B)(H B)ᵀ.

    The metric Λ = I + Jᵀ W J of the whitened field seen from the data: the same eigenvalues, and
    by Woodbury Λ⁻¹ = I − Jᵀ W^½ (I + W^½ J Jᵀ W^½)⁻¹ W^½ J. One product takes one transform pair
    of K where Λ takes one each of R and Rᵀ.

    rows L (N, M); density ρ (M,); covariance K (M, M); columns H B (M, P); root_weights W^½ (N,);
    groups C (N, G) of zero points and scales, None for none.
    """

    rows: AbstractOperator
    density: Tensor
    covariance: AbstractOperator
    columns: Tensor
    root_weights: Tensor
    groups: AbstractOperator | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.rows.shape[0]

    def _made_of(self) -> Tensor:
        return self.density

    def matmul(self, x: Tensor) -> Tensor:
        weighted = self.root_weights * x
        spread = self.density * self.rows.rmatmul(weighted)
        covaried = self.covariance.matmul(spread) + (spread @ self.columns) @ self.columns.mT
        seen = self.rows.matmul(self.density * covaried)
        if self.groups is not None:
            seen = seen + self.groups.matmul(self.groups.rmatmul(weighted))
        return x + self.root_weights * seen


@final
@dataclass(frozen=True, eq=False)
class Tangent:
    """J = (diag(g) L diag(ρ) T, C) (N, n), the derivative of the response at a place.

    rows diag(g) L (N, M) with the gains g = 1 + s of scales, L without them; density ρ (M,);
    root T; groups C = (τ G, κ diag(L ρ) G), None without zero points; covariance K; noise (N,).
    """

    rows: AbstractOperator
    density: Tensor
    root: LatentRoot
    groups: AbstractOperator | None
    covariance: AbstractOperator
    noise: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        """J x (..., N) for x (..., n)."""
        return self.of_field(self.root.matmul(x), x[..., self.root.n_field :])

    def of_field(self, field: Tensor, c: Tensor) -> Tensor:
        """J x (..., N) for T x (..., M) and the last variables (..., G) of x."""
        seen = self.rows.matmul(self.density * field)
        return seen if self.groups is None else seen + self.groups.matmul(c)

    def rmatmul(self, v: Tensor) -> Tensor:
        """Jᵀ v (..., n) for v (..., N)."""
        pull = self.root.rmatmul(self.density * self.rows.rmatmul(v))
        if self.groups is not None:
            pull[..., self.root.n_field :] = self.groups.rmatmul(v)
        return pull

    def gram(self) -> GramOperator:
        """I + W^½ J Jᵀ W^½."""
        root_weights, columns = self.noise.rsqrt(), self.root.columns
        return GramOperator(
            self.rows, self.density, self.covariance, columns, root_weights, self.groups
        )
