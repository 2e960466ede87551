"""K_uu + ν I of inducing points as an operator, whatever the points and the memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import AbstractEstimator, Wrapping
from dustmap.gp.features._base import chunks, rows_within
from dustmap.gp.features._point_covariances import point_covariances, point_gram
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, AbstractProfile, KernelTerm
from dustmap.linalg import AbstractOperator, DenseOperator, ToeplitzOperator, check_vectors


@final
@dataclass(frozen=True, eq=False)
class InducingGram:
    """K_uu + ν I (M, M) = build(*parameters), differentiable in the parameters.

    parameters: tensors with the graph of the kernel, and of the points where they have one.
    """

    build: Callable[..., AbstractOperator]
    parameters: tuple[Tensor, ...]

    def detached(self) -> AbstractOperator:
        """The operator without a graph."""
        return self.build(*(p.detach() for p in self.parameters))

    @staticmethod
    def of_grid(
        kernel: AbstractKernel,
        grid: RegularGrid,
        estimator: AbstractEstimator,
        wrapping: Wrapping | None,
        nugget: float,
        dtype: torch.dtype,
    ) -> "InducingGram":
        """Toeplitz in the covariances of the first node with all: O(M) memory."""
        device = next(kernel.parameters()).device
        origin = PointValues(torch.tensor([grid.lower], dtype=torch.float64, device=device))
        row = estimator.cross(kernel, origin, grid, wrapping, torch.float64).reshape(grid.shape)
        unit = torch.zeros_like(row.detach())
        unit.view(-1)[0] = 1.0
        lags = row + nugget * kernel.variance() * unit
        return InducingGram(lambda values: ToeplitzOperator(values, dtype), (lags,))

    @staticmethod
    def of_points(
        kernel: AbstractKernel, points: Tensor, nugget: float, dtype: torch.dtype, memory: int
    ) -> "InducingGram":
        """A stored matrix where `memory` bytes hold it, else evaluated anew for every product."""
        if len(points) ** 2 * dtype.itemsize <= memory:
            return InducingGram(DenseOperator, (point_gram(kernel, points, nugget).to(dtype),))
        terms = kernel.terms()
        profiles = tuple(term.profile for term in terms)
        scalars = [value for term in terms for value in (term.variance, term.lengthscale)]

        def build(z: Tensor, *values: Tensor) -> AbstractOperator:
            return _KernelOperator(profiles, z, values, nugget, dtype, memory)

        return InducingGram(build, (points, *scalars))

    @staticmethod
    def of_wrapped_points(
        kernel: AbstractKernel,
        points: Tensor,
        estimator: AbstractEstimator,
        wrapping: Wrapping,
        nugget: float,
        dtype: torch.dtype,
        memory: int,
    ) -> "InducingGram":
        """A stored matrix of the wrapped kernel."""
        needed = len(points) ** 2 * 8
        if needed > memory:
            raise MemoryError(
                f"K_uu of {len(points):,} free points under a wrapped kernel needs {needed:,} "
                f"bytes, memory = {memory:,}: raise memory, leave out the wrapping, or take a grid"
            )
        K = estimator.cross(kernel, PointValues(points), points, wrapping, torch.float64)
        ridge = nugget * kernel.variance() * torch.eye(len(points)).to(K)
        return InducingGram(DenseOperator, ((K + ridge).to(dtype),))


@final
class _TermKernel(AbstractKernel):
    """The sum of given terms; has no parameters of its own."""

    def __init__(self, terms: tuple[KernelTerm, ...], dim: int) -> None:
        super().__init__()
        self._terms, self._dim = terms, dim

    @property
    def dim(self) -> int:
        return self._dim

    def terms(self) -> tuple[KernelTerm, ...]:
        return self._terms


@final
class _KernelOperator(AbstractOperator):
    """k(z_m − z_l) + ν k(0) δ_ml (M, M), a block of rows at a time and never stored.

    values: variance and length scales of every term. Differentiable in them and in the points z
    (M, D); the backward pass evaluates every block again.
    """

    def __init__(
        self,
        profiles: Sequence[AbstractProfile],
        z: Tensor,
        values: Sequence[Tensor],
        nugget: float,
        dtype: torch.dtype,
        memory: int,
    ) -> None:
        self._profiles, self._z, self._values = tuple(profiles), z, tuple(values)
        self._nugget, self._dtype = nugget, dtype
        # the block in float64 and in the working precision, and its gradient
        self._rows = rows_within(memory, 3 * 8 * len(z))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._z), len(self._z)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._z.device

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        keeps = torch.is_grad_enabled() and any(v.requires_grad for v in (self._z, *self._values))
        parts = []
        for rows in chunks(len(self._z), self._rows):
            if keeps:
                part = checkpoint(self._block, rows, x, self._z, *self._values, use_reentrant=False)
            else:
                part = self._block(rows, x, self._z, *self._values)
            parts.append(part)
        ridge = self._nugget * torch.stack(self._values[::2]).sum()
        return torch.cat(parts, dim=-1) + ridge.to(x.dtype) * x

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)

    def _block(self, rows: slice, x: Tensor, z: Tensor, *values: Tensor) -> Tensor:
        """Entries `rows` of the product of K with vectors x (..., M)."""
        pairs = zip(values[::2], values[1::2], self._profiles, strict=True)
        terms = tuple(KernelTerm(variance, scale, profile) for variance, scale, profile in pairs)
        K = point_covariances(_TermKernel(terms, z.shape[1]), z[rows], z)
        return x @ K.to(x.dtype).mT
