"""The response of a log-normal field linearised at a place, and its metric from the data's side."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._groups import GroupTerms
from dustmap.inference.lognormal._lognormal import LatentRoot
from dustmap.linalg import AbstractOperator, AbstractStack, AbstractSymmetric


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
        seen = self.rows.matmul(self.density * _covaried(self.covariance, self.columns, spread))
        if self.groups is not None:
            seen = seen + self.groups.matmul(self.groups.rmatmul(weighted))
        return x + self.root_weights * seen


@final
@dataclass(frozen=True, eq=False)
class TangentStack(AbstractStack):
    """I + W^½ J_s J_sᵀ W^½ of S tangents J_s = (diag(g_s) L diag(ρ_s) T, C_s): a Gram matrix (N, N)
    for every vector; products share the rows L.

    rows L (N, M); densities ρ_s (S, M); covariance K (M, M); columns H B (M, P); root_weights W^½
    (N,); groups: terms of zero points and scales, None for none; seen L ρ_s (S, N); c: variables
    (c, c')_s of groups (S, V).
    """

    rows: AbstractOperator
    densities: Tensor
    covariance: AbstractOperator
    columns: Tensor
    root_weights: Tensor
    groups: GroupTerms | None
    seen: Tensor
    c: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.rows.shape[0]

    def _made_of(self) -> Tensor:
        return self.densities

    @cached_property
    def gains(self) -> Tensor | None:
        """g_s = 1 + κ c'_g (S, N); None without scales."""
        has_scales = self.groups is not None and self.groups.has_scales
        return self.groups.gains(self.c) if self.groups is not None and has_scales else None

    def matmul(self, x: Tensor) -> Tensor:
        weighted = self.root_weights * x
        pull, c = self.pulled(weighted)
        return x + self.root_weights * self.of_field(self.covaried(pull), c)

    def covaried(self, pull: Tensor) -> Tensor:
        """T Tᵀ v (S, M) of pulls v (S, M) on the log-density."""
        return _covaried(self.covariance, self.columns, pull)

    def of_field(self, field: Tensor, c: Tensor) -> Tensor:
        """J_s x_s (S, N) for T x_s (S, M) and the last variables (S, V) of x_s."""
        seen = self.rows.matmul(self.densities * field)
        if self.gains is not None:
            seen = self.gains * seen
        return seen if self.groups is None else seen + self.groups.derivative(c, self.seen)

    def pulled(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """The pull ρ_s Lᵀ diag(g_s) v_s (S, M) on the log-density, and C_sᵀ v_s (S, V)."""
        c = v[:, :0] if self.groups is None else self.groups.pulled(v, self.seen)
        if self.gains is not None:
            v = self.gains * v
        return self.densities * self.rows.rmatmul(v), c

    @property
    def size(self) -> Tensor:
        """W^½ g_s L ρ_s (S, N)."""
        size = self.root_weights * self.seen
        return size if self.gains is None else self.gains * size

    def taken(self, which: Tensor) -> "TangentStack":
        if torch.equal(which, torch.arange(len(self.c), device=which.device)):
            return self
        own = self.densities[which], self.seen[which], self.c[which]
        return replace(self, densities=own[0], seen=own[1], c=own[2])


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

    @property
    def size(self) -> Tensor:
        """W^½ g L ρ (N,)."""
        return self.noise.rsqrt() * self.rows.matmul(self.density)


def _covaried(covariance: AbstractOperator, columns: Tensor, v: Tensor) -> Tensor:
    """T Tᵀ v (..., M) = (K + (H B)(H B)ᵀ) v for v (..., M)."""
    return covariance.matmul(v) + (v @ columns) @ columns.mT
