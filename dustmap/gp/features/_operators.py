"""Φ as a chain of operators: cross-covariances, inverses and roots, never a stored row."""

import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp.features import _base
from dustmap.gp.functionals import AbstractFunctional, operator_by_rows


@final
class ProductOperator(linalg.AbstractComposite):
    """A B for operators A (m, k) and B (k, n), each applied in its own precision."""

    def __init__(self, left: linalg.AbstractOperator, right: linalg.AbstractOperator) -> None:
        if left.shape[1] != right.shape[0]:
            raise UserError(f"cannot multiply operators of shapes {left.shape}, {right.shape}")
        self.left, self.right = left, right

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    def _made_of(self) -> linalg.AbstractOperator:
        return self.left

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        between = self.right.matmul(x.to(self.right.dtype))
        return self.left.matmul(between.to(self.left.dtype))

    def rmatmul(self, y: Tensor) -> Tensor:
        between = self.left.rmatmul(y).to(self.right.dtype)
        return self.right.rmatmul(between).to(self.left.dtype)


def rows_made_together(
    build: Callable[[AbstractFunctional], linalg.AbstractOperator],
    functional: AbstractFunctional,
    world: linalg.AbstractWorld,
) -> linalg.AbstractOperator:
    """build(functional) (N, n), of which each rank makes its share of rows where they are stored
    and do not depend on one another; every rank has all functionals, and gets all rows."""
    n = len(functional)
    first = functional[slice(0, 1)]
    if not 1 < world.size <= n or not isinstance(build(first), linalg.SparseOperator):
        return build(functional)
    own = build(functional[world.share(n)])
    stored = own.matrix if isinstance(own, linalg.SparseOperator) else None
    if int(world.total(torch.tensor(int(stored is None)))) > 0 or stored is None:
        return build(functional)
    starts, cols, values = stored.crow_indices(), stored.col_indices(), stored.values()
    counts = world.stacked(starts.diff().long(), n)
    entries = world.gathered(torch.tensor([len(values)])).tolist()
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    cols, values = world.gathered(cols, entries), world.gathered(values, entries)
    return linalg.SparseOperator.from_csr(starts, cols, values, (n, own.shape[1]))


def divided_rows(
    operator: linalg.AbstractOperator, world: linalg.AbstractWorld
) -> linalg.AbstractOperator:
    """Rows that every rank holds, with products divided among the ranks where they are stored."""
    if world.size > 1 and isinstance(operator, linalg.SparseOperator):
        return linalg.DividedRows(operator, world)
    if world.size > 1 and isinstance(operator, ProductOperator):
        return ProductOperator(divided_rows(operator.left, world), operator.right)
    return operator


@final
class ArrangedOperator(linalg.AbstractComposite):
    """Rows of several operators with n columns each, row i the order_i-th of their concatenation:
    order (m,) permutes the m rows of all, as in `Stacked`."""

    def __init__(self, parts: Sequence[linalg.AbstractOperator], order: Tensor) -> None:
        rows = sum(part.shape[0] for part in parts)
        if len({part.shape[1] for part in parts}) != 1 or len(order) != rows:
            raise UserError(
                f"cannot arrange operators of shapes {[part.shape for part in parts]} "
                f"in {len(order)} rows"
            )
        self._parts, self._order = tuple(parts), order

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._order), self._parts[0].shape[1]

    def _made_of(self) -> linalg.AbstractOperator:
        return self._parts[0]

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        rows = torch.cat([part.matmul(x) for part in self._parts], dim=-1)
        return rows.index_select(-1, self._order)

    def rmatmul(self, y: Tensor) -> Tensor:
        linalg.check_vectors("y", y, self.shape[0], self.dtype, self.device)
        natural = torch.empty_like(y).index_copy_(-1, self._order, y)
        pieces = torch.split(natural, [part.shape[0] for part in self._parts], dim=-1)
        products = (part.rmatmul(piece) for part, piece in zip(self._parts, pieces, strict=True))
        return functools.reduce(operator.add, products)


@final
@dataclass(eq=False)
class InverseOperator(linalg.AbstractSymmetric):
    """A⁻¹ for a symmetric positive definite A, one PCG for the whole batch of vectors.

    Warns the first time that a product misses the tolerance.
    """

    A: linalg.AbstractOperator
    preconditioner: linalg.AbstractOperator
    rtol: float
    max_steps: int
    _warned: bool = field(default=False, init=False)

    def matmul(self, x: Tensor) -> Tensor:
        result = linalg.pcg(
            self.A,
            x,
            preconditioner=self.preconditioner,
            rtol=self.rtol,
            max_steps=self.max_steps,
        )
        if not self._warned:
            self._warned = not result.converged
            warn_unconverged(result, "product with the inverse of K_uu")
        return result.x


@final
class CrossCovariance(linalg.AbstractComposite):
    """K_fu or K_fu K_uu⁻¹ (N, M): stored when it fits the budget, else recomputed by chunks.

    evaluate: functional ↦ rows (n, M) without a graph; like: a tensor of its dtype and device.
    """

    def __init__(
        self,
        evaluate: Callable[[AbstractFunctional], Tensor],
        functional: AbstractFunctional,
        columns: int,
        like: Tensor,
        budget: int,
    ) -> None:
        self._evaluate, self._functional, self._columns = evaluate, functional, columns
        self._like = like.new_empty(()).expand(len(functional), columns)
        width = columns * like.element_size()
        self._chunk = _base.rows_within(budget, 8 * width)
        self._matrix: Tensor | None = None
        if len(functional) * width <= budget:
            matrix = like.new_empty(self.shape)
            for part, block in self._blocks():
                matrix[part] = block
            self._matrix = matrix

    def _made_of(self) -> Tensor:
        return self._like

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self._columns, self.dtype, self.device)
        return torch.cat([x @ block.mT for _, block in self._blocks()], dim=-1)

    def rmatmul(self, y: Tensor) -> Tensor:
        linalg.check_vectors("y", y, self.shape[0], self.dtype, self.device)
        total = y.new_zeros((*y.shape[:-1], self._columns))
        for part, block in self._blocks():
            total += y[..., part] @ block
        return total

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        if self._matrix is not None:
            yield slice(0, self.shape[0]), self._matrix
            return
        for part in linalg.chunks(self.shape[0], self._chunk):
            yield part, self._evaluate(self._functional[part])


def cross_operator(
    functional: AbstractFunctional,
    evaluate: Callable[[AbstractFunctional], Tensor],
    columns: int,
    like: Tensor,
    budget: int,
) -> linalg.AbstractOperator:
    """Return evaluate(functional) (N, columns) without a graph, each rank's rows its own."""
    rows = torch.no_grad()(evaluate)
    return operator_by_rows(functional, lambda f: CrossCovariance(rows, f, columns, like, budget))


def warn_unconverged(result: linalg.SolveResult, what: str) -> None:
    """One warning that names the solve, its residual and the remedy, if any column missed rtol."""
    if not result.converged:
        warnings.warn(f"{what}: {result.message()}", linalg.UnconvergedWarning, stacklevel=3)
