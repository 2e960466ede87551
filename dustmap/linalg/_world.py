"""The processes that share a computation, as linear algebra sees them.

Inner products summed over them, and operators whose work they divide: of rows that each has some
of, or that every one holds. Arguments and results of the latter are the same on all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg._chunks import chunks
from dustmap.linalg._operator import (
    AbstractAdjointPair,
    AbstractComposite,
    AbstractOperator,
    check_vectors,
)
from dustmap.linalg._row_products import sparse_product
from dustmap.linalg._sparse import SparseOperator, row_slice

# Entries of a block that are widened to float64 at a time.
_WIDENED = 2**17


class AbstractWorld(ABC):
    """`size` processes of which this is number `rank`; all call the same methods in one order.

    Results are the same bits on every rank, and in every run of the same size.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def total(self, part: Tensor) -> Tensor:
        """Return Σ over ranks of tensors of one shape."""

    @abstractmethod
    def gathered(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Return the parts (..., n_r) of all ranks, one after the other: (..., Σ n_r).

        counts: n_r of all ranks where they are known; else the ranks ask each other.
        """

    def share(self, n: int) -> slice:
        """Return this rank's part of n rows or columns: contiguous, in the order of ranks, even."""
        return slice(*self._ends(n, self.rank))

    def shares(self, n: int) -> tuple[int, ...]:
        """Count the rows or columns of n in the share of each rank."""
        ends = (self._ends(n, rank) for rank in range(self.size))
        return tuple(stop - start for start, stop in ends)

    def stacked(self, part: Tensor, n: int) -> Tensor:
        """Return the n rows or columns (n, ...) of which every rank has its share (n_r, ...)."""
        return self.gathered(part.movedim(0, -1), self.shares(n)).movedim(-1, 0)

    def texts(self, text: str) -> list[str]:
        """Gather a text of each rank."""
        spoken = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        joined = bytes(self.gathered(spoken).tolist())
        return [part.decode() for part in joined.split(b"\0")[:-1]]

    def _ends(self, n: int, rank: int) -> tuple[int, int]:
        return rank * n // self.size, (rank + 1) * n // self.size


@final
class Alone(AbstractWorld):
    """One process."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def total(self, part: Tensor) -> Tensor:
        return part

    def gathered(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        del counts
        return part


def gram(x: Tensor, y: Tensor) -> Tensor:
    """Return x yᵀ (k, j) in float64 for rows x (k, n) and y (j, n) of any precision."""
    if x.dtype == torch.float64:
        return x @ y.mT
    width = max(1024, _WIDENED // max(1, x.shape[0] + y.shape[0]))
    total = torch.zeros(x.shape[0], y.shape[0], dtype=torch.float64, device=x.device)
    for part in chunks(x.shape[1], width):
        total.addmm_(x[:, part].double(), y[:, part].double().mT)
    return total


def turned_in_place(turn: Tensor, x: Tensor) -> Tensor:
    """Return T x (j, n) for T (j, k), j ≤ k, written over x (k, n), some columns at a time."""
    turn = turn.to(x.dtype)
    for part in chunks(x.shape[1], max(1024, _WIDENED // max(1, x.shape[0]))):
        x[: len(turn), part] = turn @ x[:, part]
    return x if len(turn) == len(x) else x[: len(turn)].clone()


def symmetric(matrix: Tensor) -> Tensor:
    """Return the symmetric part; what is lost is rounding."""
    return 0.5 * (matrix + matrix.mT)


@final
@dataclass(frozen=True, eq=False)
class RowFactor:
    """W = S Q for rows W (k, n) of Gram matrix G = W T Wᵀ, with Q T Qᵀ = I of as many rows as
    W has independent ones.

    expand: S (k, r). reduce: S⁺ (r, k), so that Q = S⁺ W.
    lowest, highest: extreme eigenvalues of G; a negative one beyond rounding says that T is not
        positive definite.
    """

    expand: Tensor
    reduce: Tensor
    lowest: float
    highest: float


def row_factor(G: Tensor, floor: float, scale: float = 0.0) -> RowFactor:
    """Eigenvalues of G (k, k) float64 up to floor · max(largest, scale) count as dependent rows."""
    eigenvalues, vectors = torch.linalg.eigh(symmetric(G))
    highest = float(eigenvalues[-1])
    kept = eigenvalues > max(floor * max(highest, scale), torch.finfo(torch.float64).tiny)
    roots, vectors = eigenvalues[kept].sqrt(), vectors[:, kept]
    return RowFactor(vectors * roots, (vectors / roots).mT, float(eigenvalues[0]), highest)


def orthonormal_rows(x: Tensor, world: AbstractWorld | None = None) -> Tensor:
    """(x xᵀ)^{-1/2} x: the orthonormal rows nearest to x (k, n); dependent rows are left out.

    world: ranks of which each has some of the columns.
    """
    total = (world or Alone()).total(gram(x, x))
    eigenvalues, vectors = torch.linalg.eigh(symmetric(total))
    kept = eigenvalues > torch.finfo(x.dtype).eps ** 2 * eigenvalues[-1:]
    kept &= eigenvalues > 1e-14 * eigenvalues[-1:]
    inverse_root = vectors[:, kept] / eigenvalues[kept].sqrt()
    if bool(kept.all()):
        inverse_root = inverse_root @ vectors.mT
    rows: Tensor = inverse_root.mT.to(x.dtype) @ x
    return rows


@final
class ShardedRows(AbstractComposite):
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
            raise UserError(
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

    def _made_of(self) -> AbstractOperator:
        return self._local

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        own = self._local.matmul(x) if self._local.shape[0] else x.new_empty(*x.shape[:-1], 0)
        rows = self._world.gathered(own, self._counts)
        return rows if self._order is None else rows.index_select(-1, self._order)

    def rmatmul(self, y: Tensor) -> Tensor:
        check_vectors("y", y, self.shape[0], self.dtype, self.device)
        own = y[..., self._mine]
        if own.shape[-1] == 0:
            return self._world.total(y.new_zeros(*y.shape[:-1], self.shape[1]))
        return self._world.total(self._local.rmatmul(own))


@final
@dataclass(frozen=True, eq=False)
class DividedColumns(AbstractComposite):
    """An operator that every rank applies to its share of a batch of vectors.

    A single vector, or a gradient, is computed by every rank.
    """

    operator: AbstractOperator
    world: AbstractWorld

    def matmul(self, x: Tensor) -> Tensor:
        return self._divided(x, self.operator, self.shape[0])

    def rmatmul(self, y: Tensor) -> Tensor:
        return self._divided(y, self.operator.transpose(), self.shape[1])

    def _divided(self, x: Tensor, operator: AbstractOperator, width: int) -> Tensor:
        columns = x.shape[:-1].numel()
        if columns <= 1 or (torch.is_grad_enabled() and x.requires_grad):
            return operator.matmul(x)
        mine = x.reshape(columns, -1)[self.world.share(columns)]
        own = x.new_empty(0, width) if len(mine) == 0 else operator.matmul(mine)
        return self.world.stacked(own, columns).reshape(*x.shape[:-1], width)


def divided(operator: AbstractOperator, world: AbstractWorld) -> AbstractOperator:
    """Return the operator with its columns divided, where there are ranks to divide them among."""
    return operator if world.size == 1 else DividedColumns(operator, world)


def _own_rows(matrix: Tensor, world: AbstractWorld) -> tuple[Tensor, tuple[int, ...]]:
    """Return the rows of a sparse matrix (m, n) that this rank computes products with, and how many
    there are of each rank: about as many entries of all, a row costing as much as one more."""
    work = matrix.crow_indices().long()
    work = work + torch.arange(len(work), device=work.device)
    goals = work[-1] * torch.arange(world.size + 1, device=work.device) // world.size
    ends = torch.searchsorted(work, goals)
    first, last = ends[world.rank : world.rank + 2].tolist()
    return row_slice(matrix, first, last), tuple(ends.diff().tolist())


@final
class DividedRows(AbstractAdjointPair):
    """A sparse matrix (m, n) of whose products every rank computes some numbers.

        A x: those of its rows, gathered        Aᵀ y: those of its columns, gathered

    so that every number is the sum that one process makes. Parts have as many entries, and share
    the memory of the matrix. Unlike columns they can be divided for a single vector.
    """

    def __init__(self, operator: SparseOperator, world: AbstractWorld) -> None:
        self._operator, self._world = operator, world
        self._rows = _own_rows(operator.matrix, world)
        self._columns = _own_rows(operator.transposed, world)

    def _made_of(self) -> AbstractOperator:
        return self._operator

    def _product(self, x: Tensor) -> Tensor:
        return self._gathered(x, *self._rows)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._gathered(y, *self._columns)

    def _gathered(self, x: Tensor, matrix: Tensor, counts: tuple[int, ...]) -> Tensor:
        return self._world.gathered(sparse_product(matrix, x), counts)
