"""Priors of a field at nodes: what inference asks of one on a single grid, or on nested ones; how
wide a torus has to be around a grid, and what it leaves of a kernel's images."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp._grid import NestedGrids, RegularGrid
from dustmap.gp._parameters import AbstractParametric, Parameter
from dustmap.gp.covariances import wrapped_variance
from dustmap.gp.kernels import AbstractKernel

#: What images may add to the variance at a node, as a part of it.
MOST_INFLATION = 0.05
#: By this factor a padding grows that leaves more; images below this part are left out of that sum.
_MORE_PADDING, _IMAGE_TOLERANCE = 1.1, 1e-5


@final
@dataclass(frozen=True)
class PriorReport:
    """Report on the construction of a `GridPrior`.

    torus_shape: points per axis (L_1, ..., L_D); wrap_error: largest prior correlation between
    opposite faces of the box through the padding, the one approximation of the wrapped kernel (0
    for the minimal embedding); wrap_inflation: Σ_{j≠0} k(jL) / k(0), by which the images raise the
    variance at a node; smallest_eigenvalue: of C over the largest, before clamping, with nugget;
    clamped: number of eigenvalues raised to round-off; nugget: variance added to the diagonal of
    K, C and R Rᵀ.
    """

    torus_shape: tuple[int, ...]
    wrap_error: float
    wrap_inflation: float
    smallest_eigenvalue: float
    clamped: int
    nugget: float


class AbstractSlopes(ABC):
    """∂K/∂θ_q (Q of M × M), of which products and quadratic forms are taken."""

    @abstractmethod
    def products(self, x: Tensor) -> Tensor:
        """(∂K/∂θ_q) x (Q, M) of x (M,)."""

    @abstractmethod
    def quadratic(self, x: Tensor) -> Tensor:
        """x_sᵀ (∂K/∂θ_q) x_s (Q, S) of x (S, M), float64."""


@final
@dataclass(frozen=True, eq=False)
class CirculantSlopes(AbstractSlopes):
    """Slopes of K on one grid: leading blocks of circulants on its torus."""

    circulants: tuple[linalg.CirculantOperator, ...]

    def products(self, x: Tensor) -> Tensor:
        return torch.stack([slope.matmul(x) for slope in self.circulants])

    def quadratic(self, x: Tensor) -> Tensor:
        return linalg.quadratic_forms(self.circulants, x)


class AbstractLatticePrior(AbstractParametric, ABC):
    """A Gaussian field s ~ N(0, K) at M nodes with a root R Rᵀ = K (M, M_w).

    report: of the torus around `box`.
    """

    parts = ("kernel",)

    kernel: AbstractKernel
    grid: RegularGrid | NestedGrids
    dtype: torch.dtype
    world: linalg.AbstractWorld
    report: PriorReport

    @property
    def lattice(self) -> RegularGrid | NestedGrids:
        """The nodes."""
        return self.grid

    @property
    @abstractmethod
    def box(self) -> RegularGrid:
        """The coarsest grid with all its nodes that are computed: what a torus is around."""

    @property
    def torus_shape(self) -> tuple[int, ...]:
        """Points per axis of the torus around `box`."""
        return self.report.torus_shape

    @property
    @abstractmethod
    def circulants(self) -> tuple[tuple[Tensor, tuple[int, ...]], ...]:
        """λ on the half spectrum, and points per axis, of every torus; white variables have their
        order."""

    @property
    @abstractmethod
    def grows(self) -> bool:
        """Whether that torus may be replaced by another."""

    @property
    def n_white(self) -> int:
        """M_w, the number of whitened variables."""
        return self.white_on(self.torus_shape)

    def white_on(self, torus_shape: Sequence[int]) -> int:
        """M_w on another torus around `box`."""
        others = [math.prod(torus) for _, torus in self.circulants[1:]]
        return math.prod(torus_shape) + sum(others)

    @abstractmethod
    def root(self) -> linalg.AbstractOperator:
        """R (M, M_w)."""

    @abstractmethod
    def covariance_products(self) -> linalg.AbstractOperator:
        """K (M, M), for many products in one precision."""

    @abstractmethod
    def on_torus(self, kernel: AbstractKernel, torus_shape: Sequence[int]) -> Self:
        """The prior of another kernel, on a torus of this shape."""

    def with_kernel(self, kernel: AbstractKernel) -> Self:
        """The prior of another kernel, on the same torus."""
        return self.on_torus(kernel, self.torus_shape)

    def with_parameters(self, parameters: Sequence[Parameter]) -> Self:
        return self.with_kernel(self.kernel.with_parameters(parameters))

    @abstractmethod
    def slopes(self, kernels: Sequence[AbstractKernel], step: float) -> AbstractSlopes:
        """(K' − K)/step for the K' of every kernel on the same torus; none carries a graph."""

    @abstractmethod
    def node_variance(self, drawn: Tensor) -> Tensor:
        """Variance (M,) of the field at the nodes, by that of draws of it where none is at hand."""

    @property
    def device(self) -> torch.device:
        """Device of the spectrum."""
        return self.circulants[0][0].device


def torus_for(kernel: AbstractKernel, grid: RegularGrid, padding: float) -> tuple[int, ...]:
    """Fast FFT lengths ≥ M_d + padding · ℓ_d / h_d, ℓ_d the longest scale of the kernel's terms;
    longer where images would raise the variance at a node by more than `MOST_INFLATION`."""
    refuse_no_padding(padding)
    shape = padded_shape(kernel, grid, padding)
    while wrap_inflation(kernel, grid, shape) > MOST_INFLATION:
        padding *= _MORE_PADDING
        shape = padded_shape(kernel, grid, padding)
    return shape


def refuse_no_padding(padding: float) -> None:
    """Refuse a padding that is none, by which no torus is ever long enough."""
    if not (padding > 0.0 and math.isfinite(padding)):
        raise UserError(f"padding must be positive and finite (in length scales), got {padding}")


def wrap_inflation(kernel: AbstractKernel, grid: RegularGrid, torus: Sequence[int]) -> float:
    """Return Σ_{j≠0} k(jL) / k(0) on a torus of this shape: what its images add to the variance."""
    with torch.no_grad():
        periods = [length * h for length, h in zip(torus, grid.spacing, strict=True)]
        wrapped = wrapped_variance(kernel, periods, _IMAGE_TOLERANCE)
        return float(wrapped / kernel.variance()) - 1.0


def padded_shape(kernel: AbstractKernel, grid: RegularGrid, padding: float) -> tuple[int, ...]:
    """Fast FFT lengths ≥ M_d + padding · ℓ_d / h_d."""
    longest = torch.stack([term.lengthscale.detach() for term in kernel.terms()]).amax(0)
    scales = longest.expand(grid.dim).tolist()
    return tuple(
        linalg.fast_length(m + math.ceil(padding * scale / h))
        for m, scale, h in zip(grid.shape, scales, grid.spacing, strict=True)
    )


def wrap_error(kernel: AbstractKernel, grid: RegularGrid, torus: Sequence[int]) -> float:
    """Largest correlation between opposite faces: k(L_d − (M_d − 1) h_d) / k(0) over the axes, on a
    torus of this shape."""
    gaps = [(p - m + 1) * h for p, m, h in zip(torus, grid.shape, grid.spacing, strict=True)]
    with torch.no_grad():
        variance = kernel.variance()
        across = torch.diag(torch.tensor(gaps, dtype=torch.float64, device=variance.device))
        return float((kernel(across) / variance).max())


def frequencies(torus: Sequence[int], spacing: Sequence[float]) -> list[Tensor]:
    """Angular frequencies ≥ 0 of the axes of a torus (L_i//2+1,); others differ by signs alone."""
    return [
        2.0 * math.pi * torch.arange(length // 2 + 1, dtype=torch.float64) / (length * h)
        for length, h in zip(torus, spacing, strict=True)
    ]
