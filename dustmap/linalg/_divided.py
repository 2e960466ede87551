"""Operators that every rank of a world holds, whose products the ranks divide among them.

Arguments and results are the same on all ranks, and whoever applies one does so on all of them.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._operator import (
    AbstractAdjointPair,
    AbstractComposite,
    AbstractOperator,
    SparseOperator,
    row_slice,
    sparse_product,
)
from dustmap.linalg._world import AbstractWorld


@final
class DividedColumns(AbstractComposite):
    """An operator that every rank applies to its share of a batch of vectors.

    A single vector, or a gradient, is computed by every rank.
    """

    def __init__(self, operator: AbstractOperator, world: AbstractWorld) -> None:
        self._operator, self._world = operator, world

    @property
    def shape(self) -> tuple[int, int]:
        return self._operator.shape

    def _made_of(self) -> AbstractOperator:
        return self._operator

    def matmul(self, x: Tensor) -> Tensor:
        return self._divided(x, self._operator, self.shape[0])

    def rmatmul(self, y: Tensor) -> Tensor:
        return self._divided(y, self._operator.transpose(), self.shape[1])

    def _divided(self, x: Tensor, operator: AbstractOperator, width: int) -> Tensor:
        columns = x.shape[:-1].numel()
        if columns <= 1 or (torch.is_grad_enabled() and x.requires_grad):
            return operator.matmul(x)
        mine = x.reshape(columns, -1)[self._world.share(columns)]
        own = x.new_empty(0, width) if len(mine) == 0 else operator.matmul(mine)
        return self._world.stacked(own, columns).reshape(*x.shape[:-1], width)


def divided(operator: AbstractOperator, world: AbstractWorld) -> AbstractOperator:
    """Return the operator with its columns divided, where there are ranks to divide them among."""
    return operator if world.size == 1 else DividedColumns(operator, world)


@final
@dataclass(frozen=True, eq=False)
class _OwnRows:
    """The rows of a sparse matrix (m, n) that this rank computes products with, and how many there
    are of each rank: about as many entries of all."""

    matrix: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def of(matrix: Tensor, world: AbstractWorld) -> "_OwnRows":
        """Cut where every rank has its share of entries; a row costs as much as one more."""
        work = matrix.crow_indices().long()
        work = work + torch.arange(len(work), device=work.device)
        goals = work[-1] * torch.arange(world.size + 1, device=work.device) // world.size
        ends = torch.searchsorted(work, goals)
        first, last = ends[world.rank : world.rank + 2].tolist()
        return _OwnRows(row_slice(matrix, first, last), tuple(ends.diff().tolist()))


@final
class DividedRows(AbstractAdjointPair):
    """A sparse matrix (m, n) of whose products every rank computes some numbers.

        A x: those of its rows, gathered        Aᵀ y: those of its columns, gathered

    so that every number is the sum that one process makes. Parts have as many entries, and share
    the memory of the matrix. Unlike columns they can be divided for a single vector.
    """

    def __init__(self, operator: SparseOperator, world: AbstractWorld) -> None:
        self._operator, self._world = operator, world
        self._rows = _OwnRows.of(operator.matrix, world)
        self._columns = _OwnRows.of(operator.transposed, world)

    @property
    def shape(self) -> tuple[int, int]:
        return self._operator.shape

    def _made_of(self) -> AbstractOperator:
        return self._operator

    def _product(self, x: Tensor) -> Tensor:
        return self._gathered(self._rows, x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._gathered(self._columns, y)

    def _gathered(self, part: _OwnRows, x: Tensor) -> Tensor:
        return self._world.gathered(sparse_product(part.matrix, x), part.counts)
