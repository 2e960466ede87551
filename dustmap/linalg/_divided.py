"""Operators whose work is shared by the ranks of a world."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._operator import AbstractOperator, check_vectors
from dustmap.linalg._world import AbstractWorld


@final
class ShardedRows(AbstractOperator):
    """A (N, n) of which every rank holds some rows.

    Arguments and results are the same on all ranks, and whoever applies it does so on all of them:

        A x = the ranks' products, gathered        Aᵀ y = Σ_ranks A_rᵀ y_r

    local A_r (N_r, n): this rank's rows. counts: N_r of every rank. order (N,): row i is the
    order_i-th of the ranks' rows, one after the other; None where that is i itself.
    """

    def __init__(
        self,
        local: AbstractOperator,
        counts: Sequence[int],
        world: AbstractWorld,
        order: Tensor | None = None,
    ) -> None:
        if len(counts) != world.size or counts[world.rank] != local.shape[0]:
            raise ValueError(
                f"counts must be the rows of {world.size} ranks, {local.shape[0]} of them on rank "
                f"{world.rank}, got {list(counts)}"
            )
        start = sum(counts[: world.rank])
        mine = slice(start, start + local.shape[0])
        self._local, self._counts, self._world = local, tuple(counts), world
        self._order, self._mine = order, mine if order is None else order.argsort()[mine]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self._counts), self._local.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        return self._local.device

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        found = self._world.gathered(self._product(x), self._counts)
        return found if self._order is None else found.index_select(-1, self._order)

    def rmatmul(self, y: Tensor) -> Tensor:
        check_vectors("y", y, self.shape[0], self.dtype, self.device)
        return self._world.total(self._adjoint(y[..., self._mine]))

    def _product(self, x: Tensor) -> Tensor:
        return self._local.matmul(x) if self._local.shape[0] else x.new_empty(*x.shape[:-1], 0)

    def _adjoint(self, y: Tensor) -> Tensor:
        width = self.shape[1]
        return self._local.rmatmul(y) if y.shape[-1] else y.new_zeros(*y.shape[:-1], width)


@final
class DividedColumns(AbstractOperator):
    """An operator that every rank holds, applied by each to its share of a batch of vectors.

    Arguments and results are the same on all ranks, and whoever applies it does so on all of them.
    A single vector, or a gradient, is computed by every rank.
    """

    def __init__(self, operator: AbstractOperator, world: AbstractWorld) -> None:
        self._operator, self._world = operator, world

    @property
    def shape(self) -> tuple[int, int]:
        return self._operator.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._operator.dtype

    @property
    def device(self) -> torch.device:
        return self._operator.device

    def matmul(self, x: Tensor) -> Tensor:
        return self._divided(x, self._operator, self.shape[0])

    def rmatmul(self, y: Tensor) -> Tensor:
        return self._divided(y, self._operator.transpose(), self.shape[1])

    def _divided(self, x: Tensor, operator: AbstractOperator, width: int) -> Tensor:
        columns = x.shape[:-1].numel()
        if columns <= 1 or (torch.is_grad_enabled() and x.requires_grad):
            return operator.matmul(x)
        mine = x.reshape(columns, -1)[self._world.share(columns)]
        found = x.new_empty(0, width) if len(mine) == 0 else operator.matmul(mine)
        gathered = self._world.gathered(found.mT, self._world.shares(columns)).mT
        return gathered.reshape(*x.shape[:-1], width)


def divided(operator: AbstractOperator, world: AbstractWorld) -> AbstractOperator:
    """The operator with its columns divided, where there are ranks to divide them among."""
    return operator if world.size == 1 else DividedColumns(operator, world)
