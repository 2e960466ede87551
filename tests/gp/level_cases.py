"""Nested grids of tests, in boxes around the origin, and rays through them."""

import torch
from torch import Tensor

from dustmap.gp import NestedGrids, RegularGrid, rows_by_grid
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    SquaredExponential,
)

KERNELS = {"matern12": Matern12, "matern32": Matern32, "smooth": SquaredExponential}
#: Half sides of the coarse and of the fine box, in coarse spacings.
SIDES = {1: (24, 8), 2: (9, 5), 3: (5, 3)}


def grid_of(half: int, ratio: int, dim: int) -> RegularGrid:
    side = (float(half),) * dim
    return RegularGrid.from_bounds(tuple(-v for v in side), side, (2 * half * ratio + 1,) * dim)


def nested_of(dim: int, ratio: int = 2) -> NestedGrids:
    far, near = SIDES[dim]
    return NestedGrids((grid_of(far, 1, dim), grid_of(near, ratio, dim)))


def kernel_of(name: str, dim: int, length: float) -> AbstractKernel:
    kernel: AbstractKernel = KERNELS[name](length, dim=dim)
    return kernel


def random_rays(dim: int, half: float, count: int) -> LineIntegrals:
    ends = torch.rand(2, count, dim, generator=torch.Generator().manual_seed(dim)).double()
    return LineIntegrals.segment(*(1.98 * half * (ends - 0.5)))


def owner(nested: NestedGrids, x: Tensor) -> Tensor:
    """Number (N,) of the finest grid whose box contains a point."""
    found = torch.empty(len(x), dtype=torch.int64)
    for number, rows in rows_by_grid(nested, x):
        found[rows] = number
    return found


def seen(nested: NestedGrids) -> Tensor:
    """Which nodes (M,) are of the finest grid at their place."""
    level = torch.cat([torch.full((g.size,), i) for i, g in enumerate(nested.grids)])
    return owner(nested, nested.points()) == level
