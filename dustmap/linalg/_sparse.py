"""Sparse matrices in compressed rows: products, transposes and Gram matrices."""

import itertools
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg._chunks import chunks, return_memory
from dustmap.linalg._operator import AbstractAdjointPair, AbstractSymmetric, check_vectors
from dustmap.linalg._row_products import RowPieces, row_pieces, sparse_product

# Entries that are sorted at once when the transpose is made: they stay in cache.
_SORTED = 2**20
# Rows whose products are summed at once, and columns these are summed for, in float64.
_ROWS, _BAND = 2**16, 2**16
# Bytes of an entry of their sum, and of one of the rows, meanwhile.
_SUM_BYTES, _ROW_BYTES = 48, 24
# Columns whose entries are counted for all.
_SAMPLED = 32
# Columns that are counted together.
_COUNTED = 8


@final
@dataclass(frozen=True, eq=False)
class SparseOperator(AbstractAdjointPair):
    """A sparse matrix (m, n) in compressed rows, kept together with its transpose.

    The transpose is stored because a transposed CSR product is tens of times slower than a
    plain one; 32-bit indices because 64-bit ones are copied at every product on the CPU.
    Differentiable in the vector, not in the entries.

    17 vectors at once cost about as much as 4 one by one (200,000 rows of 100 entries at random
    places among 60,000 columns, float32, one thread or two).
    """

    matrix: Tensor
    transposed: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.matrix.layout != torch.sparse_csr or self.matrix.ndim != 2:
            raise UserError(
                f"SparseOperator: matrix must be a 2-D sparse CSR tensor, got layout "
                f"{self.matrix.layout} of shape {tuple(self.matrix.shape)}; "
                "use SparseOperator.from_coo(rows, cols, values, shape)"
            )
        matrix, (m, n) = self.matrix.detach(), self.matrix.shape
        matrix = csr_from_parts(*csr_parts(matrix), (m, n), check_invariants=False)
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "transposed", transposed_csr(matrix))

    @staticmethod
    def from_csr(
        starts: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]
    ) -> "SparseOperator":
        """Build from compressed rows: entries starts[i] … starts[i + 1] − 1 are those of row i.

        starts (m + 1,); cols, values (K,), cols ascending in each row. Nothing is copied if starts
        and cols are int32.
        """
        if len(starts) != shape[0] + 1 or cols.shape != values.shape or cols.ndim != 1:
            raise UserError(
                f"SparseOperator.from_csr: expected starts ({shape[0] + 1},) and as many cols as "
                f"values, got starts {tuple(starts.shape)}, cols {tuple(cols.shape)}, values "
                f"{tuple(values.shape)}"
            )
        return SparseOperator(csr_from_parts(starts, cols, values.detach(), shape))

    @staticmethod
    def from_coo(
        rows: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]
    ) -> "SparseOperator":
        """Build from values (K,) at rows (K,), cols (K,); entries at one place are added.

        Examples
        --------
        >>> rows, cols = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 0])
        >>> A = SparseOperator.from_coo(rows, cols, torch.tensor([5.0, 1.0, 2.0]), (2, 3))
        >>> A.matmul(torch.tensor([1.0, 1.0, 1.0]))
        tensor([5., 3.])
        """
        for name, index, length in (("rows", rows, shape[0]), ("cols", cols, shape[1])):
            low, high = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
            if index.numel() and not 0 <= low <= high < length:
                wrong = low if low < 0 else high
                raise UserError(f"{name}: expected 0 <= index < {length}, got {wrong}")
        place = rows.long() * shape[1] + cols
        if bool((place.diff() <= 0).any()):
            place, order = place.sort()
            fresh = torch.ones_like(place, dtype=torch.bool)
            fresh[1:] = place.diff() > 0
            summed = values.new_zeros(int(fresh.sum()))
            values = summed.index_add_(0, fresh.cumsum(0) - 1, values[order])
            place = place[fresh]
        counts = torch.bincount(place // shape[1], minlength=shape[0])
        return SparseOperator.from_csr(_starts(counts), place % shape[1], values, shape)

    @staticmethod
    def from_both(matrix: Tensor, transposed: Tensor) -> "SparseOperator":
        """Take a matrix (m, n) and its transpose, both in compressed rows with int32 indices, as
        they are.

        Examples
        --------
        >>> A = SparseOperator.from_coo(torch.tensor([0]), torch.tensor([1]), torch.ones(1), (1, 2))
        >>> SparseOperator.from_both(A.transposed, A.matrix).shape
        (2, 1)
        """
        made = object.__new__(SparseOperator)
        object.__setattr__(made, "matrix", matrix)
        object.__setattr__(made, "transposed", transposed)
        return made

    @property
    def bytes(self) -> int:
        """Memory held: entries and indices of the matrix and of its transpose."""
        return sum(p.nbytes for csr in (self.matrix, self.transposed) for p in csr_parts(csr))

    def _product(self, x: Tensor) -> Tensor:
        return sparse_product(self.matrix, x, self._pieces)

    def _adjoint(self, y: Tensor) -> Tensor:
        return sparse_product(self.transposed, y, self._transposed_pieces)

    @cached_property
    def _pieces(self) -> RowPieces | None:
        return row_pieces(self.matrix)

    @cached_property
    def _transposed_pieces(self) -> RowPieces | None:
        return row_pieces(self.transposed)


@final
@dataclass(frozen=True, eq=False)
class EnteredOperator(AbstractAdjointPair):
    """L (m, n) = E P of which only some columns have entries: E (m, a) of these alone, and P x =
    x[index] takes them.

    What goes between a vector and its product, such as factors for every column, is done for a of
    them.

    entries E; index (a,), ascending; columns n.

    Examples
    --------
    >>> rows, cols = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2])
    >>> L = SparseOperator.from_coo(rows, cols, torch.tensor([5.0, 1.0, 2.0]), (2, 4))
    >>> entered = EnteredOperator.of(L)
    >>> entered.index, entered.entries.shape, torch.equal(entered.to_dense(), L.to_dense())
    (tensor([0, 2]), (2, 2), True)
    """

    entries: SparseOperator
    index: Tensor
    columns: int

    @staticmethod
    @torch.no_grad()
    def of(rows: SparseOperator, index: Tensor | None = None) -> "EnteredOperator":
        """Leave out the other columns than `index`, those with entries."""
        index, (m, n) = entered_columns(rows) if index is None else index, rows.shape
        starts, cols, values = csr_parts(rows.matrix)
        place = torch.zeros(n, dtype=cols.dtype, device=cols.device)
        place[index] = torch.arange(len(index), dtype=cols.dtype, device=cols.device)
        parts = starts, place.index_select(0, cols), values
        # Of the transpose empty rows go, and all else is as it was.
        starts, cols, values = csr_parts(rows.transposed)
        turned = torch.cat([starts.index_select(0, index), starts[-1:]]), cols, values
        shape = m, len(index)
        matrix = csr_from_parts(*parts, shape, check_invariants=False)
        transposed = csr_from_parts(*turned, shape[::-1], check_invariants=False)
        return EnteredOperator(SparseOperator.from_both(matrix, transposed), index, n)

    @property
    def shape(self) -> tuple[int, int]:
        return self.entries.shape[0], self.columns

    @property
    def bytes(self) -> int:
        """Memory held."""
        return self.entries.bytes + self.index.nbytes

    def taken(self, x: Tensor) -> Tensor:
        """P x (..., a) of x (..., n)."""
        return x.index_select(-1, self.index)

    def spread(self, y: Tensor) -> Tensor:
        """Pᵀ y (..., n) of y (..., a)."""
        out = y.new_zeros(*y.shape[:-1], self.columns)
        return out.index_copy_(-1, self.index, y)

    def _product(self, x: Tensor) -> Tensor:
        return self.entries.matmul(self.taken(x))

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.spread(self.entries.rmatmul(y))


@final
@dataclass(frozen=True, eq=False)
class SparseGram(AbstractSymmetric):
    """G = LᵀWL (a, a) among the a columns of L (m, n) that have entries, in compressed rows.

    Entries of G couple columns that share a row of L. Where many rows meet the same columns, as
    rays of stars behind one another do, it has far fewer entries than L.

    Examples
    --------
    >>> rows, cols = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 0, 2])
    >>> entries = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> L = SparseOperator.from_coo(rows, cols, entries, (2, 3))
    >>> G = SparseGram.of(L, torch.ones(2), entered_columns(L))
    >>> G.to_dense()
    tensor([[10., 14.],
            [14., 20.]])
    """

    matrix: Tensor

    @staticmethod
    @torch.no_grad()
    def of(rows: SparseOperator, weights: Tensor, columns: Tensor) -> "SparseGram":
        """Sum w_i L_iᵀ L_i over rows i in float64, for weights w (m,) ≥ 0 and the ascending
        columns (a,) of all entries.

        One band of rows of G after the other: sums in float64 are several times as long as G.
        """
        place = torch.zeros(rows.shape[1], dtype=torch.int32, device=rows.device)
        place[columns] = torch.arange(len(columns), dtype=torch.int32, device=rows.device)
        a = len(columns)
        own_rows = list(chunks(a, _BAND)) or [slice(0, 0)]
        bands = [_band(rows, weights, place, a, own) for own in own_rows]
        return SparseGram(_stacked(bands, a))

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        product = sparse_product(self.matrix, x.reshape(-1, x.shape[-1]), self._pieces)
        return product.reshape(x.shape)

    @cached_property
    def _pieces(self) -> RowPieces | None:
        return row_pieces(self.matrix)

    def diagonal(self) -> Tensor:
        """Return the diagonal (a,)."""
        starts, cols, values = csr_parts(self.matrix)
        row = torch.arange(len(self.matrix), device=cols.device).repeat_interleave(starts.diff())
        on = cols == row
        return values.new_zeros(len(self.matrix)).index_copy_(0, row[on], values[on])


def gram_making_bytes(entries: int, columns: int, rows: int, stored: int) -> int:
    """Return the bytes that making a `SparseGram` takes beside it: sums of products of a band, or
    rows that are multiplied, and one part of the bands while they are joined.

    entries, columns: of G; rows, stored: of L, with its entries.

    Examples
    --------
    >>> gram_making_bytes(entries=10**6, columns=10**4, rows=10**5, stored=2 * 10**6)
    48000000
    """
    band = _SUM_BYTES * entries * min(columns, _BAND) // max(1, columns)
    part = _ROW_BYTES * stored * min(rows, _ROWS) // max(1, rows)
    return max(band, part) + (4 * entries if columns > _BAND else 0)


def _band(rows: SparseOperator, weights: Tensor, place: Tensor, a: int, own: slice) -> Tensor:
    """Return rows `own` of G (b, a) for the places (n,) of columns among the a."""
    shape = own.stop - own.start, a
    total: Tensor | None = None
    for part in chunks(rows.shape[0], _ROWS):
        few = row_slice(rows.matrix, part.start, part.stop)
        starts, root = few.crow_indices(), weights[part].double().sqrt()
        values = few.values().double() * root.repeat_interleave(starts.diff())
        cols, height = place[few.col_indices()], part.stop - part.start
        scaled = csr_from_parts(starts, cols, values, (height, a), check_invariants=False)
        mine = scaled if shape[0] == a else _column_slice(scaled, own)
        # A product's rows are not sorted; those of its transpose are.
        gram = transposed_csr(transposed_csr(scaled) @ mine)
        total = gram if total is None else total + gram
    if total is None:
        total = torch.zeros(shape, dtype=torch.float64, device=rows.device).to_sparse_csr()
    narrow = total.crow_indices(), total.col_indices(), total.values().to(rows.dtype)
    return csr_from_parts(*narrow, shape, check_invariants=False)


def entered_columns(rows: SparseOperator) -> Tensor:
    """Return the columns (a,) that have entries, ascending."""
    columns = torch.bincount(rows.matrix.col_indices(), minlength=rows.shape[1])
    return columns.nonzero().squeeze(1)


@torch.no_grad()
def estimated_entries(rows: SparseOperator, columns: Tensor) -> int:
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


def row_slice(matrix: Tensor, first: int, last: int) -> Tensor:
    """Return rows first … last − 1 of a CSR tensor (m, n), in the memory of its entries."""
    starts = matrix.crow_indices()[first : last + 1]
    part, shape = slice(int(starts[0]), int(starts[-1])), (last - first, matrix.shape[1])
    cols, values = matrix.col_indices()[part], matrix.values()[part]
    return csr_from_parts(starts - starts[0], cols, values, shape, check_invariants=False)


def _column_slice(matrix: Tensor, columns: slice) -> Tensor:
    """Return some columns of a CSR tensor (m, n), copied."""
    starts, cols = matrix.crow_indices(), matrix.col_indices()
    inside = (cols >= columns.start) & (cols < columns.stop)
    before = torch.nn.functional.pad(inside.cumsum(0), (1, 0))
    shape = matrix.shape[0], columns.stop - columns.start
    kept = before[starts.long()], cols[inside] - columns.start, matrix.values()[inside]
    return csr_from_parts(*kept, shape, check_invariants=False)


def _stacked(bands: list[Tensor], width: int) -> Tensor:
    """Return bands of rows (m_i, n) below one another, and empty the list: bands and what they
    make are there at once but for one of their parts."""
    if len(bands) == 1:
        return bands.pop()
    starts = _starts(torch.cat([band.crow_indices().diff().long() for band in bands]))
    height = len(starts) - 1
    cols = [band.col_indices() for band in bands]
    values = [band.values() for band in bands]
    bands.clear()
    every = torch.cat(cols)
    cols.clear()
    joined = torch.cat(values)
    values.clear()
    return_memory(every.nbytes + joined.nbytes)
    return csr_from_parts(starts, every, joined, (height, width), check_invariants=False)


def csr_parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts, columns and values of a CSR tensor."""
    return matrix.crow_indices(), matrix.col_indices(), matrix.values()


def _starts(counts: Tensor) -> Tensor:
    """(m + 1,) where the entries of each row start, for counts (m,)."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def csr_from_parts(
    starts: Tensor,
    cols: Tensor,
    values: Tensor,
    shape: tuple[int, int],
    *,
    check_invariants: bool = True,
) -> Tensor:
    """Make a CSR tensor, with 32-bit indices where they suffice."""
    index = torch.int32 if max(*shape, values.numel()) < 2**31 else torch.int64
    with warnings.catch_warnings():
        # torch announces once per process that CSR is in beta, and 2.11 that checks are off by
        # default: nothing for the user to act on.
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        return torch.sparse_csr_tensor(
            starts.to(index), cols.to(index), values, shape, check_invariants=check_invariants
        )


def transposed_csr(matrix: Tensor) -> Tensor:
    """Counting sort by column, over groups of rows that are sorted in cache: each entry goes to
    the next free place of its column. Nothing as long as the entries is made but the result."""
    m, n = matrix.shape
    starts, cols, values = matrix.crow_indices().long(), matrix.col_indices(), matrix.values()
    column_starts = _starts(torch.bincount(cols, minlength=n))
    free = column_starts[:-1].clone()
    new_cols, new_values = torch.empty_like(cols), torch.empty_like(values)
    for rows in _row_groups(starts, max(_SORTED, n)):
        counts = starts[rows.start : rows.stop + 1].diff()
        part = slice(int(starts[rows.start]), int(starts[rows.stop]))
        row = torch.arange(rows.start, rows.stop, dtype=cols.dtype, device=cols.device)
        column, order = cols[part].sort(stable=True)
        per_column = torch.bincount(column, minlength=n)
        place = torch.arange(len(column), device=cols.device)
        place += (free - per_column.cumsum(0) + per_column)[column]
        new_cols[place] = row.repeat_interleave(counts)[order]
        new_values[place] = values[part][order]
        free += per_column
    return csr_from_parts(column_starts, new_cols, new_values, (n, m), check_invariants=False)


def _row_groups(starts: Tensor, entries: int) -> list[range]:
    """Return the rows in groups of about so many entries."""
    total, m = int(starts[-1]), len(starts) - 1
    goals = torch.arange(entries, max(total, entries), entries, device=starts.device)
    cuts = torch.searchsorted(starts, goals).tolist()
    edges = sorted({0, *cuts, m})
    return [range(a, b) for a, b in itertools.pairwise(edges) if b > a]
