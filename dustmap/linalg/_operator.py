"""What a linear operator is, and the plain ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
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
