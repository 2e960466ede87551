"""Preconditioners of the data's Gram matrix, made once and carried to other densities and noise."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._tangent import Tangent, TangentStack
from dustmap.linalg import (
    AbstractOperator,
    AbstractWorld,
    Alone,
    NystromPreconditioner,
    NystromStack,
    Progress,
    nystrom,
)


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

    nystrom: NystromPreconditioner
    size: Tensor

    @staticmethod
    def of(
        gram: AbstractOperator, size: Tensor, rank: int, world: AbstractWorld, progress: Progress
    ) -> "GramPreconditioner":
        """Made of `rank` products with a Gram matrix I + G; size: W^½ L ρ there (N,)."""
        made = nystrom(gram, rank, seed=0, world=world, progress=progress)
        return GramPreconditioner(made, size)

    def refreshed(
        self, gram: AbstractOperator, size: Tensor, progress: Progress
    ) -> "GramPreconditioner":
        """Made anew of another Gram matrix, from the eigenvectors so far, by as many products."""
        return GramPreconditioner(self.nystrom.refreshed(gram, progress), size)

    def apart_from(self, world: AbstractWorld) -> "GramPreconditioner":
        """For products that each of these ranks makes alone; the same where there are no others."""
        if world.size == 1:
            return self
        return replace(self, nystrom=replace(self.nystrom, world=Alone()))

    def at(self, tangent: Tangent) -> NystromPreconditioner:
        """For the Gram matrix of a tangent."""
        scales = self._scales(tangent.size)
        return self.nystrom if bool((scales == 1.0).all()) else self.nystrom.scaled(scales)

    def stacked(self, tangents: TangentStack) -> NystromStack:
        """For the Gram matrices of several."""
        return self.nystrom.stacked(self._scales(tangents.size))

    def _scales(self, size: Tensor) -> Tensor:
        """D (..., N); a datum that sees nothing, or overflows, stays as it is."""
        scales = size / self.size
        return torch.where(scales.isfinite() & (scales > 0.0), scales, 1.0)
