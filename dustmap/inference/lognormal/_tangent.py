"""The response of a log-normal field linearised at a place, its metric from the data's side, and
preconditioners of that: made once, and carried to other densities and noise."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp.features._grouped import GroupTerms
from dustmap.inference.lognormal._lognormal import LatentRoot
from dustmap.inference.lognormal._seen_nodes import SeenNodes


@final
@dataclass(frozen=True, eq=False)
class Tangent:
    """J = (diag(g) L diag(ρ) T, C), the derivative of the response at a place, or at S of them.

    Vectors are any number (..., n) and (..., N) at one place, and one (S, n) and (S, N) for each of
    several.

    rows L (N, M); density ρ (M,) or (S, M); root T; covariance K (M, M); root_weights W^½ (N,);
    groups: terms C of zero points and scales, None for none; gains g = 1 + κ c'_g (N,) or (S, N),
    None without scales; seen L ρ (N,) or (S, N), which scales need; nodes: where solves are made
    among the nodes that data see.
    """

    rows: linalg.AbstractOperator
    density: Tensor
    root: LatentRoot
    covariance: linalg.AbstractOperator
    root_weights: Tensor
    groups: GroupTerms | None = None
    gains: Tensor | None = None
    seen: Tensor | None = None
    nodes: SeenNodes | None = None

    @property
    def is_stack(self) -> bool:
        """Whether it is of several places."""
        return self.density.ndim > 1

    @property
    def size(self) -> Tensor:
        """W^½ g L ρ (..., N)."""
        seen = self.rows.matmul(self.density) if self.seen is None else self.seen
        return self.root_weights * self._gained(seen)

    def matmul(self, x: Tensor) -> Tensor:
        """J x (..., N) for x (..., n)."""
        return self.of_field(self.root.matmul(x), x[..., self.root.n_field :])

    def rmatmul(self, v: Tensor) -> Tensor:
        """Jᵀ v (..., n) for v (..., N)."""
        return self._latent(*self.pulled(v))

    def step_of(self, multipliers: Tensor) -> Tensor:
        """Jᵀ W^½ z (..., n) of multipliers (..., Q): z, or those of nodes."""
        return self._latent(*self.pull_of(multipliers))

    def of_field(self, field: Tensor, c: Tensor) -> Tensor:
        """J x (..., N) for T x (..., M) and the last variables (..., V) of x."""
        seen = self.response(field)
        return seen if self.groups is None else seen + self.groups.derivative(c, self.seen)

    def pulled(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """The pull ρ Lᵀ diag(g) v (..., M) on the log-density, and Cᵀ v (..., V)."""
        c = v[..., :0] if self.groups is None else self.groups.pulled(v, self.seen)
        return self.spread(v), c

    def pull_of(self, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """The same of W^½ z for multipliers (..., Q): z, or those of nodes."""
        if self.nodes is None:
            return self.pulled(self.root_weights * multipliers)
        return self.density * self.nodes.spread(multipliers), multipliers[..., :0]

    def response(self, field: Tensor) -> Tensor:
        """diag(g) L diag(ρ) v (..., N) of fields v (..., M)."""
        return self._gained(self.rows.matmul(self.density * field))

    def spread(self, v: Tensor) -> Tensor:
        """ρ Lᵀ diag(g) v (..., M) of v (..., N), one vector after the other in memory, as
        transforms want them: products of rows have them side by side."""
        return self.rows.rmatmul(self._gained(v)).contiguous().mul_(self.density)

    def covaried(self, pull: Tensor) -> Tensor:
        """T Tᵀ v (..., M) = (K + (H B)(H B)ᵀ) v of pulls v (..., M) on the log-density."""
        field, columns = self.covariance.matmul(pull), self.root.columns
        if columns.shape[1] == 0:
            return field
        rows, vectors = field.reshape(-1, len(columns)), pull.reshape(-1, len(columns))
        return rows.addmm_(vectors @ columns, columns.mT).view(pull.shape)

    def gram(self) -> "GramOperator":
        """I + W^½ J Jᵀ W^½."""
        return GramOperator(self)

    def taken(self, which: Tensor) -> "Tangent":
        """The places `which` (W,) of several; itself where there is one for all vectors."""
        if not self.is_stack:
            return self
        if torch.equal(which, torch.arange(len(self.density), device=which.device)):
            return self
        gains, seen = (None if v is None else v[which] for v in (self.gains, self.seen))
        return replace(self, density=self.density[which], gains=gains, seen=seen)

    def _gained(self, v: Tensor) -> Tensor:
        return v if self.gains is None else self.gains * v

    def _latent(self, pull: Tensor, c: Tensor) -> Tensor:
        """(Tᵀ v, c) (..., n) of a pull v (..., M)."""
        x = self.root.rmatmul(pull)
        if self.groups is not None:
            x[..., self.root.n_field :] = c
        return x


@final
@dataclass(frozen=True, eq=False)
class GramOperator(linalg.AbstractStack):
    """I + W^½ J Jᵀ W^½ (N, N) of a tangent, one for all vectors or one for each.

    The metric Λ = I + Jᵀ W J of the whitened field seen from the data: the same eigenvalues, and
    by Woodbury Λ⁻¹ = I − Jᵀ W^½ (I + W^½ J Jᵀ W^½)⁻¹ W^½ J. One product takes one transform pair
    of K where Λ takes one each of R and Rᵀ.
    """

    tangent: Tangent

    def _made_of(self) -> Tensor:
        return self.tangent.root_weights

    def matmul(self, x: Tensor) -> Tensor:
        tangent = self.tangent
        pull, c = tangent.pulled(tangent.root_weights * x)
        return x + tangent.root_weights * tangent.of_field(tangent.covaried(pull), c)

    def taken(self, which: Tensor) -> "GramOperator":
        return GramOperator(self.tangent.taken(which))


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

    def near(self, tangent: Tangent) -> linalg.NystromPreconditioner | linalg.NystromStack:
        """For the Gram matrix of a tangent, or for those of several."""
        if tangent.is_stack:
            return self.nystrom.stacked(self._scales(tangent.size))
        scales = self._scales(tangent.size)
        return self.nystrom if bool((scales == 1.0).all()) else self.nystrom.scaled(scales)

    def _scales(self, size: Tensor) -> Tensor:
        """D (..., N); a datum that sees nothing, or overflows, stays as it is."""
        scales = size / self.size
        return torch.where(scales.isfinite() & (scales > 0.0), scales, 1.0)
