"""Solves among the nodes that data see, where there are many data on few nodes.

A = I + W^½ J Jᵀ W^½ has the size of the data. With the pulls v = ρ Lᵀ W^½ z of multipliers z,

    A z = b   becomes   (I + ρ G ρ K) v = ρ Lᵀ W^½ b,   z = b − W^½ L ρ K v,   G = LᵀWL

whose vectors have the length of the nodes that data see, and whose steps take one product with G in
place of one each with L and Lᵀ. G has neither a density nor hyperparameters: one for all samples
and all steps under the same noise.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap import linalg

#: Entries that G may have: of those of the rows, so that products are cheaper, and for every node,
#: for the memory that making it takes. Among the nodes around one observer it has some 200 each.
_ENTRIES, _PER_NODE = 0.5, 400.0


@final
@dataclass(frozen=True, eq=False)
class SeenNodes:
    """The nodes that data see, and G = LᵀWL among them, made when it is asked for.

    rows L (N, M); index (a,) of the nodes, ascending; weights W (N,).
    """

    rows: linalg.SparseOperator
    index: Tensor
    weights: Tensor

    @staticmethod
    def of(
        rows: linalg.AbstractOperator,
        noise: Tensor,
        world: linalg.AbstractWorld,
        most: int | None = None,
    ) -> "SeenNodes | None":
        """The nodes where solves among them are worth their while: where the rows are stored, one
        rank has all of them, there are no fewer data than nodes, and G has no more entries than
        `most_information` allows, and than `most`. None elsewhere."""
        if world.size > 1 or not isinstance(rows, linalg.SparseOperator):
            return None
        if not 0 < rows.shape[1] <= rows.shape[0]:
            return None
        index = linalg.entered_columns(rows)
        stored, nodes = len(rows.matrix.values()), rows.shape[1]
        allowed = most_information(stored, nodes)
        if linalg.estimated_entries(rows, index) > (
            allowed if most is None else min(most, allowed)
        ):
            return None
        return SeenNodes(rows, index, 1.0 / noise)

    def under(self, noise: Tensor) -> "SeenNodes":
        """The same under another noise (N,)."""
        weights = 1.0 / noise
        return self if torch.equal(weights, self.weights) else replace(self, weights=weights)

    @cached_property
    def gram(self) -> linalg.SparseGram:
        """G (a, a)."""
        return linalg.SparseGram.of(self.rows, self.weights, self.index)

    def taken(self, field: Tensor) -> Tensor:
        """Values (..., a) of a field (..., M)."""
        return field[..., self.index]

    def spread(self, values: Tensor) -> Tensor:
        """The field (..., M) of values (..., a), 0 where no data see it."""
        field = values.new_zeros(*values.shape[:-1], self.rows.shape[1])
        return field.index_copy_(-1, self.index, values)


def most_information(stored: int, nodes: int) -> int:
    """Return the entries that G may have, of rows with so many, on so many nodes.

    Examples
    --------
    >>> most_information(stored=9_000_000, nodes=50_000)
    4500000
    """
    return int(min(_ENTRIES * stored, _PER_NODE * nodes))


@final
@dataclass(frozen=True, eq=False)
class NodeInformation(linalg.AbstractInformation):
    """B_s = ρ_s G ρ_s and T Tᵀ = K + (H B)(H B)ᵀ among the nodes that data see.

    densities ρ_s (S, a), or one for all vectors (1, a); covariance K (M, M); columns H B (a, P).
    """

    nodes: SeenNodes
    densities: Tensor
    covariance: linalg.AbstractOperator
    columns: Tensor
    preconditioner: "NodePreconditioner | None" = None

    def informed(self, x: Tensor) -> Tensor:
        return self.densities * self.nodes.gram.matmul(self.densities * x)

    def covaried(self, x: Tensor) -> Tensor:
        field = self.nodes.taken(self.covariance.matmul(self.nodes.spread(x)))
        return field + (x @ self.columns) @ self.columns.mT

    def preconditioned(self, r: Tensor, covaried: Tensor) -> tuple[Tensor, Tensor]:
        if self.preconditioner is None:
            return r, covaried
        return self.preconditioner.nystrom.applied(r, covaried, self._gains)

    @cached_property
    def traces(self) -> Tensor:
        """tr(B_s) (S,), float64."""
        return (self.densities.double().square() * self.nodes.gram.diagonal()).sum(-1)

    @cached_property
    def _gains(self) -> Tensor:
        """tr(B_s) over that where the preconditioner was made (S,)."""
        assert self.preconditioner is not None
        gains = self.traces / self.preconditioner.trace
        return torch.where(gains.isfinite() & (gains > 0.0), gains, 1.0)

    def taken(self, which: Tensor) -> "NodeInformation":
        if len(self.densities) == 1:
            return self
        return replace(self, densities=self.densities[which])


@final
@dataclass(frozen=True, eq=False)
class NodePreconditioner:
    """Nyström preconditioner of I + B K, for other densities and noise, too: g B K there, with the
    ratio g of traces.

    nystrom: of B where it was made; trace: tr(B) there; column (a,): of K, which says whose fields
    it has.
    """

    nystrom: linalg.CovarianceNystrom
    trace: float
    column: Tensor

    @staticmethod
    def of(
        information: NodeInformation, fields: Tensor, progress: linalg.Progress
    ) -> "NodePreconditioner":
        """Made of products of B with fields (r, a)."""
        nystrom = linalg.CovarianceNystrom.of(information, fields, progress)
        return NodePreconditioner(nystrom, float(information.traces[0]), _column_of(information))

    def under(self, information: NodeInformation) -> "NodePreconditioner":
        """The same approximation of B with fields of the information's K."""
        column = _column_of(information)
        if torch.equal(column, self.column):
            return self
        return NodePreconditioner(self.nystrom.under(information), self.trace, column)

    def apart_from(self, world: linalg.AbstractWorld) -> "NodePreconditioner":
        """The same: it belongs to one rank."""
        assert world.size == 1
        return self

    def refreshed(
        self, information: NodeInformation, progress: linalg.Progress
    ) -> "NodePreconditioner":
        """Made anew, from the eigenvectors so far."""
        return NodePreconditioner.of(information, self.under(information).nystrom.fields, progress)


def _column_of(information: NodeInformation) -> Tensor:
    """K u (a,) for u = (1, 0, 0, …), which determines a stationary K."""
    unit = torch.zeros_like(information.densities[:1])
    unit[:, 0] = 1.0
    return information.covaried(unit)[0]
