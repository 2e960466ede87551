"""Preconditioners with a known root, for roots of the matrices that they resemble."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._circulant import CirculantOperator
from dustmap.linalg._nystrom import NystromPreconditioner
from dustmap.linalg._operator import AbstractOperator, check_vectors


@final
@dataclass(frozen=True, eq=False)
class RootPreconditioner:
    """P = L Lᵀ ≈ K (n, n), given by L and L⁻¹.

    root, inverse: L and L⁻¹ (n, n), adjoint pairs. Neither need be symmetric or a triangle.
    """

    root: AbstractOperator
    inverse: AbstractOperator

    def __post_init__(self) -> None:
        n = self.root.shape[0]
        if self.root.shape != (n, n) or self.inverse.shape != (n, n):
            raise ValueError(
                "RootPreconditioner: expected a square root and its inverse of the same shape, got "
                f"{self.root.shape} and {self.inverse.shape}"
            )

    @staticmethod
    def circulant(lags: Tensor, dtype: torch.dtype | None = None) -> "RootPreconditioner":
        """T. Chan's circulant of a multilevel Toeplitz matrix: the nearest in Frobenius norm.

            c_j = ((M − j) lags_j + j lags_{M−j}) / M    along every axis

        It has K's size, so that its root is one, and its eigenvalues lie between those of K.

        lags: (M1, …, MD), as in `ToeplitzOperator`. dtype: working precision, by default lags'.

        Reference: T. Chan (1988); Chan & Jin (2007), sections 2.2 and 5.2.
        """
        column = lags.detach().to(torch.float64)
        for axis, m in enumerate(column.shape):
            j = torch.arange(m, device=column.device)
            place = [m if a == axis else 1 for a in range(column.ndim)]
            share = (j.to(torch.float64) / m).reshape(place)
            mirrored = column.index_select(axis, (m - j) % m)
            column = (1.0 - share) * column + share * mirrored
        spectrum = torch.fft.rfftn(column).real
        lowest = float(spectrum.min())
        if not lowest > 0:
            raise ValueError(
                f"circulant preconditioner: an eigenvalue {lowest:.3g} is not positive, so the "
                "Toeplitz matrix is not positive definite; add a nugget"
            )
        working, torus = lags.dtype if dtype is None else dtype, tuple(lags.shape)
        return RootPreconditioner(
            CirculantOperator(spectrum.sqrt().to(working), torus),
            CirculantOperator(spectrum.rsqrt().to(working), torus),
        )

    @staticmethod
    def low_rank(preconditioner: NystromPreconditioner) -> "RootPreconditioner":
        """Of P = Uᵀ diag(s + shift) U + (tail + shift)(I − Uᵀ U), low rank + shift (`nystrom`)."""
        return RootPreconditioner(
            _SpectralOperator.of(preconditioner, torch.sqrt),
            _SpectralOperator.of(preconditioner, torch.rsqrt),
        )


@final
@dataclass(frozen=True, eq=False)
class _SpectralOperator(AbstractOperator):
    """rest · I + Uᵀ diag(values − rest) U for orthonormal rows U (r, n); symmetric."""

    vectors: Tensor
    above: Tensor
    rest: float

    @staticmethod
    def of(P: NystromPreconditioner, function: Callable[[Tensor], Tensor]) -> "_SpectralOperator":
        rest = function(P.values.new_tensor(P.tail + P.shift))
        above = (function(P.values + P.shift) - rest).to(P.dtype)
        return _SpectralOperator(P.vectors, above, float(rest))

    @property
    def shape(self) -> tuple[int, int]:
        return self.vectors.shape[1], self.vectors.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.vectors.dtype

    @property
    def device(self) -> torch.device:
        return self.vectors.device

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return self.rest * x + ((x @ self.vectors.mT) * self.above) @ self.vectors

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)


@final
@dataclass(frozen=True, eq=False)
class PreconditionedOperator(AbstractOperator):
    """L⁻¹ K L⁻ᵀ (n, n), symmetric with K."""

    operator: AbstractOperator
    preconditioner: RootPreconditioner

    def __post_init__(self) -> None:
        if self.operator.shape != self.preconditioner.inverse.shape:
            raise ValueError(
                f"preconditioner: expected shape {self.operator.shape} like the operator, got "
                f"{self.preconditioner.inverse.shape}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.operator.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        return self.operator.device

    def matmul(self, x: Tensor) -> Tensor:
        inverse = self.preconditioner.inverse
        return inverse.matmul(self.operator.matmul(inverse.rmatmul(x)))

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)
