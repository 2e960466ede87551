"""Linear operators: what they are, the plain ones, and sparse matrices in compressed rows."""

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from dustmap.errors import UserError

# Vectors multiplied at once. More share each read of the entries, until the rows of vectors that
# the entries pick no longer stay in cache; sums of rows fetch these ahead of their use.
_TOGETHER, _SUMMED_TOGETHER = 20, 32
# Vectors from which on sums of rows are faster than MKL's products of sparse matrices.
_SUMMED = 12
# Entries that are sorted at once when the transpose is made: they stay in cache.
_SORTED = 2**20


class AbstractOperator(ABC):
    """A linear map A (m, n) that is only ever applied, never formed.

    Vectors live on the last axis; leading axes are batch. The map is an adjoint pair:
    `matmul(x) · y == x · rmatmul(y)`.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Length of the result and of the argument, (m, n)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Precision in which the operator is stored."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the operator."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Return A x for x (..., n), giving (..., m)."""

    @abstractmethod
    def rmatmul(self, y: Tensor) -> Tensor:
        """Return Aᵀ y for y (..., m), giving (..., n)."""

    def to_dense(self) -> Tensor:
        """Return the matrix (m, n), column by column; for tests and small problems."""
        identity = torch.eye(self.shape[1], dtype=self.dtype, device=self.device)
        return self.matmul(identity).mT

    def transpose(self) -> "TransposedOperator":
        """Return Aᵀ (n, m) as an operator."""
        return TransposedOperator(self)


class AbstractComposite(AbstractOperator):
    """An operator of the precision, the device and the shape of what it is made of.

    Where that is of another shape `shape` says so.
    """

    @abstractmethod
    def _made_of(self) -> Tensor | AbstractOperator:
        """Return the tensor or the operator that decides them."""

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self._made_of().shape
        return m, n

    @property
    def dtype(self) -> torch.dtype:
        return self._made_of().dtype

    @property
    def device(self) -> torch.device:
        return self._made_of().device


class AbstractAdjointPair(AbstractComposite):
    """A composite whose two products are each other's derivatives, for vectors as rows (k, ·)."""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """Return A x for x (k, n): (k, m)."""

    @abstractmethod
    def _adjoint(self, y: Tensor) -> Tensor:
        """Return Aᵀ y for y (k, m): (k, n)."""

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return apply_linear(x, lambda v: _as_rows(self._product, v, self.shape[0]), self.rmatmul)

    def rmatmul(self, y: Tensor) -> Tensor:
        check_vectors("y", y, self.shape[0], self.dtype, self.device)
        return apply_linear(y, lambda v: _as_rows(self._adjoint, v, self.shape[1]), self.matmul)


def _as_rows(product: Callable[[Tensor], Tensor], x: Tensor, length: int) -> Tensor:
    """Return product(x) (..., length) of a product of rows, for x (..., n)."""
    return product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], length)


class AbstractSymmetric(AbstractComposite):
    """A composite with A = Aᵀ, of the length of the last axis of what it is made of."""

    @property
    def shape(self) -> tuple[int, int]:
        n = self._made_of().shape[-1]
        return n, n

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)


class AbstractStack(AbstractSymmetric):
    """Symmetric matrices A_1, …, A_K, one for every row of a block of vectors.

    `matmul` takes blocks (K, n) alone, and row k is A_k x_k.
    """

    @abstractmethod
    def taken(self, which: Tensor) -> "AbstractStack":
        """Return A_k for k in `which` (W,), in that order."""


@final
@dataclass(frozen=True, eq=False)
class TransposedOperator(AbstractComposite):
    """Aᵀ: the products of `operator` (m, n) with their roles swapped."""

    operator: AbstractOperator

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.operator.shape
        return n, m

    def _made_of(self) -> AbstractOperator:
        return self.operator

    def matmul(self, x: Tensor) -> Tensor:
        return self.operator.rmatmul(x)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.operator.matmul(y)


@final
@dataclass(frozen=True, eq=False)
class DenseOperator(AbstractComposite):
    """The operator of a stored matrix (m, n)."""

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2:
            raise UserError(
                f"DenseOperator: matrix must be (m, n), got shape {tuple(self.matrix.shape)}"
            )

    def _made_of(self) -> Tensor:
        return self.matrix

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return x @ self.matrix.mT

    def rmatmul(self, y: Tensor) -> Tensor:
        check_vectors("y", y, self.shape[0], self.dtype, self.device)
        return y @ self.matrix


@final
@dataclass(frozen=True, eq=False)
class DiagonalOperator(AbstractSymmetric):
    """diag(d) for `diagonal` d (n,)."""

    diagonal: Tensor

    def __post_init__(self) -> None:
        if self.diagonal.ndim != 1:
            raise UserError(
                f"DiagonalOperator: diagonal must be (n,), got shape {tuple(self.diagonal.shape)}"
            )

    def _made_of(self) -> Tensor:
        return self.diagonal

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return x * self.diagonal


def check_vectors(
    name: str, x: Tensor, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse what is not (..., length) of the given precision and device, saying what to do."""
    if x.ndim == 0 or x.shape[-1] != length:
        raise UserError(
            f"{name}: expected vectors of length {length} on the last axis, "
            f"got shape {tuple(x.shape)}"
        )
    if x.dtype != dtype or x.device != device:
        raise UserError(
            f"{name}: expected {dtype} on {device} like the operator, got {x.dtype} on "
            f"{x.device}; convert one of them"
        )


def apply_linear(
    x: Tensor, product: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
) -> Tensor:
    """product(x) of x (..., n), linear, whose derivative is adjoint(ȳ) and not product's graph."""
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = _LinearMap.apply(x, product, adjoint)  # type: ignore[no-untyped-call]
        return result
    return product(x)


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        product: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.adjoint = adjoint
        return product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grads[0]), None, None


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
        matrix = _with_narrow_indices(self.matrix.detach())
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

    def _made_of(self) -> Tensor:
        return self.matrix

    @property
    def bytes(self) -> int:
        """Memory held: entries and indices of the matrix and of its transpose."""
        return sum(
            part.numel() * part.element_size()
            for csr in (self.matrix, self.transposed)
            for part in (csr.crow_indices(), csr.col_indices(), csr.values())
        )

    def _product(self, x: Tensor) -> Tensor:
        return sparse_product(self.matrix, x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return sparse_product(self.transposed, y)


def sparse_product(matrix: Tensor, x: Tensor) -> Tensor:
    """Products (k, m) with vectors x (k, n), laid out with neighbouring vectors side by side, as
    the next product wants them."""
    if 0 in (len(x), len(matrix)):
        return x.new_empty(len(x), len(matrix))
    if len(x) == 1:
        return (matrix @ x[0])[None]
    is_summed = len(x) >= _SUMMED and x.dtype == torch.float32 and x.device.type == "cpu"
    product, most = (_summed, _SUMMED_TOGETHER) if is_summed else (torch.matmul, _TOGETHER)
    count = -(-len(x) // most)
    if count <= 1:
        return product(matrix, x.mT).mT
    columns = x.new_empty(matrix.shape[0], len(x))
    for out, part in zip(columns.tensor_split(count, 1), x.tensor_split(count), strict=True):
        out.copy_(product(matrix, part.mT))
    return columns.mT


def _summed(matrix: Tensor, columns: Tensor) -> Tensor:
    """Product (m, k) with columns (n, k): of row i the weighted sum of the rows of `columns` that
    its entries pick, Σ_j A_ij columns_j."""
    return torch.nn.functional.embedding_bag(
        matrix.col_indices(),
        columns.contiguous(),
        matrix.crow_indices(),
        mode="sum",
        per_sample_weights=matrix.values(),
        include_last_offset=True,
    )


def row_slice(matrix: Tensor, first: int, last: int) -> Tensor:
    """Return rows first … last − 1 of a CSR tensor (m, n), in the memory of its entries."""
    starts = matrix.crow_indices()[first : last + 1]
    part, shape = slice(int(starts[0]), int(starts[-1])), (last - first, matrix.shape[1])
    cols, values = matrix.col_indices()[part], matrix.values()[part]
    return csr_from_parts(starts - starts[0], cols, values, shape, check_invariants=False)


def _starts(counts: Tensor) -> Tensor:
    """(m + 1,) where the entries of each row start, for counts (m,)."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _index_dtype(shape: tuple[int, int], count: int) -> torch.dtype:
    """Choose 32-bit indices where they suffice."""
    return torch.int32 if max(*shape, count) < 2**31 else torch.int64


def csr_from_parts(
    starts: Tensor,
    cols: Tensor,
    values: Tensor,
    shape: tuple[int, int],
    *,
    check_invariants: bool = True,
) -> Tensor:
    """Make a CSR tensor with the narrowest indices."""
    index = _index_dtype(shape, values.numel())
    with warnings.catch_warnings():
        # torch announces once per process that CSR is in beta; nothing for the user to act on.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            starts.to(index), cols.to(index), values, shape, check_invariants=check_invariants
        )


def _with_narrow_indices(matrix: Tensor) -> Tensor:
    """Convert the indices of a CSR tensor where narrower ones suffice."""
    m, n = matrix.shape
    starts, cols, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    if cols.dtype == _index_dtype((m, n), len(values)):
        return matrix
    return csr_from_parts(starts, cols, values, (m, n))


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
