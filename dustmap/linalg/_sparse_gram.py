"""Gram matrices LᵀWL of sparse rows, among the columns that have entries."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.linalg import _operator
from dustmap.linalg._chunks import chunks

#: Rows whose products are summed at once, in float64.
_ROWS = 2**16
#: Columns whose entries are counted for all.
_SAMPLED = 32
#: Columns that are counted together.
_COUNTED = 8


@final
@dataclass(frozen=True, eq=False)
class SparseGram(_operator.AbstractSymmetric):
    """G = LᵀWL (a, a) among the a columns of L (m, n) that have entries, in compressed rows.

    Entries of G couple columns that share a row of L. Where many rows meet the same columns, as
    rays of stars behind one another do, it has far fewer entries than L.

    Examples
    --------
    >>> rows, cols = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 0, 2])
    >>> entries = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> L = _operator.SparseOperator.from_coo(rows, cols, entries, (2, 3))
    >>> G = SparseGram.of(L, torch.ones(2), entered_columns(L))
    >>> G.to_dense()
    tensor([[10., 14.],
            [14., 20.]])
    """

    matrix: Tensor

    @staticmethod
    @torch.no_grad()
    def of(rows: _operator.SparseOperator, weights: Tensor, columns: Tensor) -> "SparseGram":
        """Sum w_i L_iᵀ L_i over rows i in float64, for weights w (m,) ≥ 0 and the ascending
        columns (a,) of all entries."""
        matrix, count = rows.matrix, len(columns)
        place = torch.zeros(rows.shape[1], dtype=torch.int32, device=matrix.device)
        place[columns] = torch.arange(count, dtype=torch.int32, device=matrix.device)
        total: Tensor | None = None
        for part in chunks(rows.shape[0], _ROWS):
            few = _operator.row_slice(matrix, part.start, part.stop)
            starts, root = few.crow_indices(), weights[part].double().sqrt()
            values = few.values().double() * root.repeat_interleave(starts.diff())
            shape = (part.stop - part.start, count)
            cols = place[few.col_indices()]
            scaled = _operator.csr_from_parts(starts, cols, values, shape, check_invariants=False)
            # A product's rows are not sorted; those of its transpose, the same matrix, are.
            gram = _operator.transposed_csr(_operator.transposed_csr(scaled) @ scaled)
            total = gram if total is None else total + gram
        if total is None:
            total = torch.zeros(count, count, dtype=torch.float64).to_sparse_csr()
        parts = total.crow_indices(), total.col_indices(), total.values().to(rows.dtype)
        made = _operator.csr_from_parts(*parts, (count, count), check_invariants=False)
        return SparseGram(made)

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    def _made_of(self) -> Tensor:
        return self.matrix

    @property
    def entries(self) -> int:
        """Count the stored entries."""
        return int(self.matrix.values().numel())

    def matmul(self, x: Tensor) -> Tensor:
        _operator.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        product = _operator.sparse_product(self.matrix, x.reshape(-1, x.shape[-1]))
        return product.reshape(x.shape)

    def diagonal(self) -> Tensor:
        """Return the diagonal (a,)."""
        starts, cols, values = (
            self.matrix.crow_indices(),
            self.matrix.col_indices(),
            self.matrix.values(),
        )
        row = torch.arange(len(self.matrix), device=cols.device).repeat_interleave(starts.diff())
        on = cols == row
        return values.new_zeros(len(self.matrix)).index_copy_(0, row[on], values[on])


def entered_columns(rows: _operator.SparseOperator) -> Tensor:
    """Return the columns (a,) that have entries, ascending."""
    columns = torch.bincount(rows.matrix.col_indices(), minlength=rows.shape[1])
    return columns.nonzero().squeeze(1)


@torch.no_grad()
def estimated_entries(rows: _operator.SparseOperator, columns: Tensor) -> int:
    """Estimate the entries of a `SparseGram` among these columns (a,), from those of a few.

    Entries of L are taken to be positive.
    """
    picked = torch.linspace(0, len(columns) - 1, min(_SAMPLED, len(columns))).long()
    count = 0
    for part in chunks(len(picked), _COUNTED):
        own = columns[picked[part].to(columns.device)]
        unit = torch.zeros(len(own), rows.shape[1], dtype=rows.dtype, device=rows.device)
        unit.scatter_(1, own[:, None], 1.0)
        met = (rows.matmul(unit) > 0).to(rows.dtype)
        count += int((rows.rmatmul(met) > 0).sum())
    return count * len(columns) // max(1, len(picked))
