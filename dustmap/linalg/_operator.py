"""Linear operators: what they are, and the plain ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dustmap.errors import UserError


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
    """An operator of the precision, device and shape of what it is made of: its first field.

    Where that is something else `_made_of` says so, where it is of another shape `shape`.
    """

    def _made_of(self) -> Tensor | AbstractOperator:
        """Return the tensor or the operator that decides them."""
        first: Tensor | AbstractOperator = next(iter(vars(self).values()))
        return first

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
    """Symmetric matrices A_1, …, A_K, one for every row of a block of vectors, or one for all.

    `matmul` takes blocks (K, n) alone, and row k is A_k x_k; one for all takes any (..., n).
    """

    @abstractmethod
    def taken(self, which: Tensor) -> "AbstractStack":
        """Return A_k for k in `which` (W,), in that order; itself where there is one for all."""


@final
@dataclass(frozen=True, eq=False)
class TransposedOperator(AbstractComposite):
    """Aᵀ: the products of `operator` (m, n) with their roles swapped."""

    operator: AbstractOperator

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.operator.shape
        return n, m

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

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return x * self.diagonal


def check_square(A: AbstractOperator) -> None:
    """Refuse an operator of another shape than (n, n)."""
    if A.shape[0] != A.shape[1]:
        raise UserError(f"A: expected a square operator, got shape {A.shape}")


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
