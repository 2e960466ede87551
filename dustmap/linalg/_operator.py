"""What a linear operator is, and the four plain ones."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor


class AbstractOperator(ABC):
    """A linear map A (m, n) that is only ever applied, never formed.

    Vectors live on the last axis; leading axes are batch. The map is an adjoint pair:
    `matmul(x) · y == x · rmatmul(y)`.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(m, n): length of the result, length of the argument."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Precision in which the operator is stored."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the operator lives."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """A x for x (..., n), giving (..., m)."""

    @abstractmethod
    def rmatmul(self, y: Tensor) -> Tensor:
        """Aᵀ y for y (..., m), giving (..., n)."""

    def to_dense(self) -> Tensor:
        """The matrix (m, n), column by column; for tests and small problems."""
        identity = torch.eye(self.shape[1], dtype=self.dtype, device=self.device)
        return self.matmul(identity).mT

    def transpose(self) -> "TransposedOperator":
        """Aᵀ (n, m) as an operator."""
        return TransposedOperator(self)


@final
@dataclass(frozen=True, eq=False)
class TransposedOperator(AbstractOperator):
    """Aᵀ: the products of `operator` (m, n) with their roles swapped."""

    operator: AbstractOperator

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.operator.shape
        return n, m

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        return self.operator.device

    def matmul(self, x: Tensor) -> Tensor:
        return self.operator.rmatmul(x)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.operator.matmul(y)


@final
@dataclass(frozen=True, eq=False)
class DenseOperator(AbstractOperator):
    """The operator of a stored matrix (m, n)."""

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2:
            raise ValueError(
                f"DenseOperator: matrix must be (m, n), got shape {tuple(self.matrix.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return x @ self.matrix.mT

    def rmatmul(self, y: Tensor) -> Tensor:
        check_vectors("y", y, self.shape[0], self.dtype, self.device)
        return y @ self.matrix


@final
@dataclass(frozen=True, eq=False)
class DiagonalOperator(AbstractOperator):
    """diag(d) for `diagonal` d (n,)."""

    diagonal: Tensor

    def __post_init__(self) -> None:
        if self.diagonal.ndim != 1:
            raise ValueError(
                f"DiagonalOperator: diagonal must be (n,), got shape {tuple(self.diagonal.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.diagonal.shape[0], self.diagonal.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.diagonal.dtype

    @property
    def device(self) -> torch.device:
        return self.diagonal.device

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return x * self.diagonal

    def rmatmul(self, y: Tensor) -> Tensor:
        check_vectors("y", y, self.shape[0], self.dtype, self.device)
        return y * self.diagonal


@final
@dataclass(frozen=True, eq=False)
class SparseOperator(AbstractOperator):
    """A sparse matrix (m, n) in compressed rows, kept together with its transpose.

    The transpose is stored because a transposed CSR product is tens of times slower than a
    plain one; 32-bit indices because 64-bit ones are copied at every product on the CPU.
    Differentiable in the vector, not in the entries.
    """

    matrix: Tensor
    transposed: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.matrix.layout != torch.sparse_csr or self.matrix.ndim != 2:
            raise ValueError(
                f"SparseOperator: matrix must be a 2-D sparse CSR tensor, got layout "
                f"{self.matrix.layout} of shape {tuple(self.matrix.shape)}; "
                "use SparseOperator.from_coo(rows, cols, values, shape)"
            )
        matrix = _with_narrow_indices(self.matrix.detach())
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "transposed", _transposed_csr(matrix))

    @staticmethod
    def from_coo(
        rows: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]
    ) -> "SparseOperator":
        """From entries values (K,) at rows (K,), cols (K,); entries at one place are added."""
        for name, index, length in (("rows", rows, shape[0]), ("cols", cols, shape[1])):
            _check_indices(name, index, length)
        order = torch.argsort(rows * shape[1] + cols)
        rows, cols, values = rows[order], cols[order], values[order]
        fresh = torch.ones_like(rows, dtype=torch.bool)
        fresh[1:] = (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
        summed = values.new_zeros(int(fresh.sum())).index_add_(0, fresh.cumsum(0) - 1, values)
        return SparseOperator(_csr(rows[fresh], cols[fresh], summed, shape))

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return apply_linear(x, lambda v: _sparse_product(self.matrix, v), self.rmatmul)

    def rmatmul(self, y: Tensor) -> Tensor:
        check_vectors("y", y, self.shape[0], self.dtype, self.device)
        return apply_linear(y, lambda v: _sparse_product(self.transposed, v), self.matmul)


def check_vectors(
    name: str, x: Tensor, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse what is not (..., length) of the given precision and device, saying what to do."""
    if x.ndim == 0 or x.shape[-1] != length:
        raise ValueError(
            f"{name}: expected vectors of length {length} on the last axis, "
            f"got shape {tuple(x.shape)}"
        )
    if x.dtype != dtype or x.device != device:
        raise ValueError(
            f"{name}: expected {dtype} on {device} like the operator, got {x.dtype} on "
            f"{x.device}; convert one of them"
        )


def _check_indices(name: str, index: Tensor, length: int) -> None:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < length:
        wrong = int(index.min()) if int(index.min()) < 0 else int(index.max())
        raise ValueError(f"{name}: expected 0 <= index < {length}, got {wrong}")


def apply_linear(
    x: Tensor, product: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
) -> Tensor:
    """product(x), a linear map, whose derivative is adjoint(ȳ) instead of product's own graph."""
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


def _sparse_product(matrix: Tensor, x: Tensor) -> Tensor:
    if x.ndim == 1:
        return matrix @ x
    flat = x.reshape(-1, x.shape[-1])
    return (matrix @ flat.mT).mT.reshape(*x.shape[:-1], matrix.shape[0])


def _csr(rows: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """CSR tensor of entries already sorted by row."""
    counts = torch.bincount(rows, minlength=shape[0])
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return _csr_from_parts(starts, cols, values, shape)


def _csr_from_parts(starts: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    narrow = max(*shape, values.numel()) < 2**31
    index = torch.int32 if narrow else torch.int64
    with warnings.catch_warnings():
        # torch announces once per process that CSR is in beta; nothing for the user to act on.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            starts.to(index), cols.to(index), values, shape, check_invariants=True
        )


def _with_narrow_indices(matrix: Tensor) -> Tensor:
    m, n = matrix.shape
    return _csr_from_parts(matrix.crow_indices(), matrix.col_indices(), matrix.values(), (m, n))


def _transposed_csr(matrix: Tensor) -> Tensor:
    m, n = matrix.shape
    counts = matrix.crow_indices().diff()
    rows = torch.repeat_interleave(torch.arange(m, device=matrix.device), counts)
    cols, order = torch.sort(matrix.col_indices(), stable=True)
    return _csr(cols, rows[order], matrix.values()[order], (n, m))
