"""What the tests of residual variances share: priors, data, dense references."""

import itertools

import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features._residuals import LocalResiduals
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    PointMeasure,
)
from dustmap.gp.kernels import AbstractKernel, Matern32
from tests.contracts.kernels import kernel_derivative

SHAPES = [(14,), (8, 7), (6, 5, 5)]


SPACING = (0.8, 1.0, 1.1)


F64 = torch.float64


def make_prior(
    shape: tuple[int, ...], kernel: AbstractKernel | None = None, dtype: torch.dtype = F64
) -> GridPrior:
    dim = len(shape)
    grid = RegularGrid((-1.5, 0.0, 2.0)[:dim], SPACING[:dim], shape)
    return GridPrior.padded(kernel or Matern32(2.0, 1.3, dim=dim), grid, padding=9.0, dtype=dtype)


def inside(prior: GridPrior, n: int, seed: int = 0) -> Tensor:
    """Points (n, D) of the box."""
    generator = torch.Generator().manual_seed(seed)
    lower = torch.tensor(prior.grid.lower, dtype=F64)
    upper = torch.tensor(prior.grid.upper, dtype=F64)
    fraction = torch.rand(n, prior.grid.dim, dtype=F64, generator=generator)
    return lower + (upper - lower) * fraction


def rays(prior: GridPrior, n: int, seed: int = 0) -> LineIntegrals:
    return LineIntegrals.segment(inside(prior, n, seed), inside(prior, n, seed + 1))


def directions(n: int, dim: int) -> Tensor:
    direction = torch.randn(n, dim, dtype=F64, generator=torch.Generator().manual_seed(3))
    unit: Tensor = direction / direction.norm(dim=-1, keepdim=True)
    return unit


def dense_weights(prior: GridPrior, measure: PointMeasure, order: int) -> Tensor:
    """Kriging weights of every row on the nodes of a large grid, point by point: (N, M)."""
    grid, kernel = wide_grid(prior), prior.kernel
    W = torch.zeros(len(measure), grid.size, dtype=F64)
    lower, spacing = (torch.tensor(v, dtype=F64) for v in (grid.lower, grid.spacing))
    points = grid.points()
    for n, q in itertools.product(range(len(measure)), range(measure.points.shape[1])):
        x = measure.points[n, q]
        corner = ((x - lower) / spacing).floor()
        axis = torch.arange(order) - (order // 2 - 1)
        node = (corner + torch.cartesian_prod(*[axis] * grid.dim).reshape(-1, grid.dim)).long()
        flat = torch.zeros(len(node), dtype=torch.long)
        for d, length in enumerate(grid.shape):
            flat = flat * length + node[:, d]
        S = points[flat]
        K_SS = kernel(S[:, None] - S[None])
        if measure.direction is None:
            k_S = kernel(x - S)
        else:
            k_S = kernel_derivative(kernel, x - S, measure.direction[n].expand_as(S))
        W[n, flat] += measure.weights[n, q] * torch.linalg.solve(K_SS, k_S)
    return W.detach()


def wide_grid(prior: GridPrior) -> RegularGrid:
    """The grid with four more nodes on every side, for stencils that stick out of the box."""
    grid = prior.grid
    lower = tuple(a - 4 * h for a, h in zip(grid.lower, grid.spacing, strict=True))
    return RegularGrid(lower, grid.spacing, tuple(m + 8 for m in grid.shape))


def dense_residual(
    prior: GridPrior, functional: AbstractFunctional, measure: PointMeasure, order: int
) -> Tensor:
    """k_ff − 2 wᵀ k_fu + wᵀ K w, k_ff and K_fu of the functional, w of the measure: (N,)."""
    W = dense_weights(prior, measure, order)
    met = (W != 0).any(0)
    W, points = W[:, met], wide_grid(prior).points()[met]
    k_ff = ClosedForm().variance(prior.kernel, functional).detach()
    K_fu = ClosedForm().cross(prior.kernel, functional, points).detach()
    K = prior.kernel(points[:, None] - points[None]).detach()
    residual: Tensor = k_ff - 2.0 * (W * K_fu).sum(-1) + ((W @ K) * W).sum(-1)
    return residual


def variance(prior: GridPrior, functional: AbstractFunctional, order: int) -> Tensor:
    return LocalResiduals(prior, ClosedForm(), order).variance(functional).value
