"""Cases of feature maps: Φ with Φ Φᵀ = K_fu K_uu⁻¹ K_uf, or nearly so on a torus."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm, Wrapping
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    CIQFeatures,
    HIPFeatures,
    LocalFeatures,
    TorusFeatures,
)
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import AbstractKernel

Build = Callable[[AbstractKernel, RegularGrid, torch.dtype], AbstractFeatureMap]
SHAPES: tuple[tuple[int, ...], ...] = ((14,), (7, 6), (5, 4, 4))


@dataclass(frozen=True)
class FeatureCase:
    """build(kernel, grid, dtype): the map whose torus, where it has one, is that of the grid.

    inducing: whether Φ Φᵀ is what the grid's nodes explain, K_fu K_uu⁻¹ K_uf; those of a torus
    explain more, those of a stencil about as much. accuracy: of Φ Φᵀ, and single: of Φ in float32,
    relative to the largest number. turning: the root that Φ belongs to moves with the kernel in a
    way that no gradient is taken of. empty: whether no data at all have rows, of which there are
    none (a rank's share of the data may be empty).
    """

    name: str
    build: Build
    inducing: bool = True
    accuracy: float = 2e-6
    single: float = 1e-4
    turning: bool = False
    empty: bool = False


def unit_grid(shape: tuple[int, ...]) -> RegularGrid:
    """Of the unit box."""
    return RegularGrid.from_bounds((0.0,) * len(shape), (1.0,) * len(shape), shape)


def every_datum(dim: int, n: int = 6) -> AbstractFunctional:
    """n points, derivatives and rays each, inside the unit box."""
    generator = torch.Generator().manual_seed(dim)

    def draw() -> Tensor:
        return torch.rand(n, dim, dtype=torch.float64, generator=generator)

    direction = torch.nn.functional.normalize(draw() + 0.1, dim=-1)
    return Stacked(
        (PointValues(draw()), Derivatives(draw(), direction), LineIntegrals.segment(draw(), draw()))
    )


def padded(kernel: AbstractKernel, grid: RegularGrid, dtype: torch.dtype) -> GridPrior:
    """On one torus for all kernels, so that gradients are those of one function."""
    torus = tuple(m + math.ceil(2.4 * (m - 1)) for m in grid.shape)
    return GridPrior.padded(kernel, grid, torus_shape=torus, dtype=dtype)


def _hip(below: int) -> Build:
    def build(kernel: AbstractKernel, grid: RegularGrid, dtype: torch.dtype) -> HIPFeatures:
        rtol = 1e-13 if dtype == torch.float64 else 1e-6
        prior = padded(kernel, grid, dtype)
        return HIPFeatures(prior, rtol=rtol, max_steps=500, dense_below=below)

    return build


def _torus(kernel: AbstractKernel, grid: RegularGrid, dtype: torch.dtype) -> TorusFeatures:
    return TorusFeatures(padded(kernel, grid, dtype))


def _local(kernel: AbstractKernel, grid: RegularGrid, dtype: torch.dtype) -> LocalFeatures:
    order = 2 if grid.dim == 3 else 4  # a quarter of the time, and the same code
    return LocalFeatures(padded(kernel, grid, dtype), order=order)


def _wrapping(kernel: AbstractKernel, grid: RegularGrid) -> Wrapping | None:
    return padded(kernel, grid, torch.float64).wrapping


def _cholesky(kernel: AbstractKernel, grid: RegularGrid, dtype: torch.dtype) -> CholeskyFeatures:
    return CholeskyFeatures(kernel, grid, wrapping=_wrapping(kernel, grid), rows_dtype=dtype)


def _ciq(points: bool, turned: bool) -> Build:
    def build(kernel: AbstractKernel, grid: RegularGrid, dtype: torch.dtype) -> CIQFeatures:
        rtol = 1e-11 if dtype == torch.float64 else 1e-5
        inducing = grid.points() if points else grid
        made = CIQFeatures(
            kernel,
            inducing,
            wrapping=_wrapping(kernel, grid),
            nodes=25,
            rtol=rtol,
            rows_dtype=dtype,
        )
        return made.preconditioned() if turned else made

    return build


FEATURE_CASES: tuple[FeatureCase, ...] = (
    FeatureCase("hip", _hip(0)),
    FeatureCase("hip-dense", _hip(4096)),
    FeatureCase("cholesky", _cholesky),
    FeatureCase("ciq", _ciq(points=False, turned=False), accuracy=1e-5, single=2e-3),
    FeatureCase("ciq-points", _ciq(points=True, turned=False), accuracy=1e-5, single=2e-3),
    FeatureCase(
        "ciq-preconditioned",
        _ciq(points=False, turned=True),
        accuracy=1e-5,
        single=2e-3,
        turning=True,
    ),
    FeatureCase("torus", _torus, inducing=False),
    FeatureCase("local", _local, inducing=False, empty=True),
)


def dense_terms(
    kernel: AbstractKernel, grid: RegularGrid, functional: AbstractFunctional
) -> tuple[Tensor, Tensor, Tensor]:
    """K_uu (M, M), K_fu (N, M) and k_ff (N,) of the wrapped kernel by the closed forms."""
    estimator, wrapping = ClosedForm(), _wrapping(kernel, grid)
    nodes = PointValues(grid.points())
    K_uu = estimator.between(kernel, nodes, nodes, wrapping)
    K_fu = estimator.cross(kernel, functional, grid, wrapping)
    return K_uu.detach(), K_fu.detach(), estimator.variance(kernel, functional, wrapping).detach()
