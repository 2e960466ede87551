"""The response of a log-normal field linearised at a place, its metric from the data's side, and
preconditioners of that: made once, and carried to other densities and noise."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp.features._grouped import GroupTerms
from dustmap.inference.lognormal._lognormal import LatentRoot
from dustmap.inference.lognormal._seen_nodes import SeenNodes


@final
@dataclass(frozen=True, eq=False)
class GramOperator(linalg.AbstractSymmetric):
    """I + W^½ J Jᵀ W^½ (N, N) for J = (L diag(ρ) T, C), T Tᵀ = K + (H B)(H B)ᵀ.

    The metric Λ = I + Jᵀ W J of the whitened field seen from the data: the same eigenvalues, and
    by Woodbury Λ⁻¹ = I − Jᵀ W^½ (I + W^½ J Jᵀ W^½)⁻¹ W^½ J. One product takes one transform pair
    of K where Λ takes one each of R and Rᵀ.

    rows L (N, M); density ρ (M,); covariance K (M, M); columns H B (M, P); root_weights W^½ (N,);
    groups C (N, G) of zero points and scales, None for none.
    """

    rows: linalg.AbstractOperator
    density: Tensor
    covariance: linalg.AbstractOperator
    columns: Tensor
    root_weights: Tensor
    groups: linalg.AbstractOperator | None = None

    def _made_of(self) -> Tensor:
        return self.root_weights

    def matmul(self, x: Tensor) -> Tensor:
        weighted = self.root_weights * x
        spread = spread_on(self.density, self.rows, weighted)
        seen = self.rows.matmul(self.density * _covaried(self.covariance, self.columns, spread))
        if self.groups is not None:
            seen = seen + self.groups.matmul(self.groups.rmatmul(weighted))
        return x + self.root_weights * seen


@final
@dataclass(frozen=True, eq=False)
class TangentStack(linalg.AbstractStack):
    """I + W^½ J_s J_sᵀ W^½ of S tangents J_s = (diag(g_s) L diag(ρ_s) T, C_s): a Gram matrix (N, N)
    for every vector; products share the rows L.

    rows L (N, M); densities ρ_s (S, M); covariance K (M, M); columns H B (M, P); root_weights W^½
    (N,); groups: terms of zero points and scales, None for none; seen L ρ_s (S, N); c: variables
    (c, c')_s of groups (S, V); nodes: where solves are made among the nodes that data see.
    """

    rows: linalg.AbstractOperator
    densities: Tensor
    covariance: linalg.AbstractOperator
    columns: Tensor
    root_weights: Tensor
    groups: GroupTerms | None
    seen: Tensor
    c: Tensor
    nodes: SeenNodes | None = None

    def gram(self) -> "TangentStack":
        """The matrices themselves."""
        return self

    def _made_of(self) -> Tensor:
        return self.root_weights

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
        return spread_on(self.densities, self.rows, v), c

    def pull_of(self, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """The same of W^½ z_s for multipliers (S, Q): z_s, or those of nodes."""
        if self.nodes is None:
            return self.pulled(self.root_weights * multipliers)
        return self.densities * self.nodes.spread(multipliers), multipliers[:, :0]

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
    root T; groups C = (τ G, κ diag(L ρ) G), None without zero points; covariance K; noise (N,);
    nodes: where solves are made among the nodes that data see.
    """

    rows: linalg.AbstractOperator
    density: Tensor
    root: LatentRoot
    groups: linalg.AbstractOperator | None
    covariance: linalg.AbstractOperator
    noise: Tensor
    nodes: SeenNodes | None = None

    @property
    def densities(self) -> Tensor:
        """ρ (1, M)."""
        return self.density[None]

    @property
    def columns(self) -> Tensor:
        """H B (M, P)."""
        return self.root.columns

    @property
    def root_weights(self) -> Tensor:
        """W^½ (N,)."""
        return self.noise.rsqrt()

    def matmul(self, x: Tensor) -> Tensor:
        """J x (..., N) for x (..., n)."""
        return self.of_field(self.root.matmul(x), x[..., self.root.n_field :])

    def of_field(self, field: Tensor, c: Tensor) -> Tensor:
        """J x (..., N) for T x (..., M) and the last variables (..., G) of x."""
        seen = self.rows.matmul(self.density * field)
        return seen if self.groups is None else seen + self.groups.matmul(c)

    def rmatmul(self, v: Tensor) -> Tensor:
        """Jᵀ v (..., n) for v (..., N)."""
        pull = self.root.rmatmul(spread_on(self.density, self.rows, v))
        if self.groups is not None:
            pull[..., self.root.n_field :] = self.groups.rmatmul(v)
        return pull

    def step_of(self, multipliers: Tensor) -> Tensor:
        """Jᵀ W^½ z (..., n) of multipliers (..., Q): z, or those of nodes."""
        if self.nodes is None:
            return self.rmatmul(self.root_weights * multipliers)
        return self.root.rmatmul(self.density * self.nodes.spread(multipliers))

    def gram(self) -> GramOperator:
        """I + W^½ J Jᵀ W^½."""
        here = self.covariance, self.columns, self.root_weights
        return GramOperator(self.rows, self.density, *here, self.groups)

    @property
    def size(self) -> Tensor:
        """W^½ g L ρ (N,)."""
        return self.root_weights * self.rows.matmul(self.density)


def spread_on(density: Tensor, rows: linalg.AbstractOperator, v: Tensor) -> Tensor:
    """ρ Lᵀ v (..., M) of v (..., N), one vector after the other in memory, as transforms want
    them: products of rows have them side by side."""
    return rows.rmatmul(v).contiguous().mul_(density)


def _covaried(covariance: linalg.AbstractOperator, columns: Tensor, v: Tensor) -> Tensor:
    """T Tᵀ v (..., M) = (K + (H B)(H B)ᵀ) v for v (..., M)."""
    field = covariance.matmul(v)
    if columns.shape[1] == 0:
        return field
    rows, vectors = field.reshape(-1, len(columns)), v.reshape(-1, len(columns))
    return rows.addmm_(vectors @ columns, columns.mT).view(v.shape)


@final
@dataclass(frozen=True, eq=False)
class GramPreconditioner:
    """Nyström preconditioner of I + G, G = W^½ J Jᵀ W^½, for other densities and noise, too.

        G' ≈ D G D,   D = diag(W'^½ L ρ') / diag(W^½ L ρ)

    which is exact for another noise, and for a density that changes by one factor along every ray.
    Samples differ from their centre by less than that, and yet take 24 steps of CG in place of 57
    (the embedded example, to a residual of 0.1).

    nystrom: of G at the tangent where it was made; size: W^½ L ρ there (N,).
    """

    nystrom: linalg.NystromPreconditioner
    size: Tensor

    @staticmethod
    def of(
        gram: linalg.AbstractOperator,
        size: Tensor,
        rank: int,
        world: linalg.AbstractWorld,
        progress: linalg.Progress,
    ) -> "GramPreconditioner":
        """Made of `rank` products with a Gram matrix I + G; size: W^½ L ρ there (N,)."""
        made = linalg.nystrom(gram, rank, seed=0, world=world, progress=progress)
        return GramPreconditioner(made, size)

    def refreshed(
        self, gram: linalg.AbstractOperator, size: Tensor, progress: linalg.Progress
    ) -> "GramPreconditioner":
        """Made anew of another Gram matrix, from the eigenvectors so far, by as many products."""
        return GramPreconditioner(self.nystrom.refreshed(gram, progress), size)

    def apart_from(self, world: linalg.AbstractWorld) -> "GramPreconditioner":
        """For products that each of these ranks makes alone; the same where there are no others."""
        if world.size == 1:
            return self
        return replace(self, nystrom=replace(self.nystrom, world=linalg.Alone()))

    def near(
        self, tangent: Tangent | TangentStack
    ) -> linalg.NystromPreconditioner | linalg.NystromStack:
        """For the Gram matrix of a tangent, or for those of several."""
        if isinstance(tangent, TangentStack):
            return self.nystrom.stacked(self._scales(tangent.size))
        scales = self._scales(tangent.size)
        return self.nystrom if bool((scales == 1.0).all()) else self.nystrom.scaled(scales)

    def _scales(self, size: Tensor) -> Tensor:
        """D (..., N); a datum that sees nothing, or overflows, stays as it is."""
        scales = size / self.size
        return torch.where(scales.isfinite() & (scales > 0.0), scales, 1.0)
