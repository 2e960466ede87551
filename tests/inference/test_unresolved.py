"""What lies between nodes, against draws of a field that is known everywhere."""

import itertools

import pytest
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32
from dustmap.inference.lognormal._unresolved import unresolved

#: Nodes of a test grid per axis, places per cell of a ray, cells that it is long.
NODES, PER_CELL, CELLS = 12, 10, 8


def multilinear(values: Tensor, x: Tensor) -> Tensor:
    """Values (S, N, ..., N) at the nodes 0, 1, ..., interpolated at x (n, D): (S, n)."""
    low = x.floor().clamp(0, NODES - 2)
    total = torch.zeros(len(values), len(x), dtype=x.dtype)
    for corner in itertools.product((0, 1), repeat=x.shape[1]):
        c = torch.tensor(corner)
        weight = (c * (x - low) + (1 - c) * (1 - x + low)).prod(1)
        flat = torch.zeros(len(x), dtype=torch.int64)
        for index in (low + c).long().unbind(1):
            flat = NODES * flat + index
        total += weight * values.flatten(1)[:, flat]
    return total


def lacking(kernel: AbstractKernel, dim: int, seed: int) -> tuple[float, float]:
    """Mean squares of ∫(ρ − interpolated ρ) dt along a random ray and of ρ, over 4,000 draws."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(dim, dtype=torch.float64, generator=generator).abs() + 0.05
    u /= u.norm()
    start = torch.rand(dim, dtype=torch.float64, generator=generator)
    t = (torch.arange(CELLS * PER_CELL, dtype=torch.float64) + 0.5) / PER_CELL
    ray = start + t[:, None] * u
    axis = torch.arange(NODES, dtype=torch.float64)
    nodes = torch.cartesian_prod(*[axis] * dim).reshape(-1, dim)
    near = (torch.cdist(nodes, ray).amin(1) <= dim**0.5).nonzero().squeeze(1)
    points = torch.cat([ray, nodes[near]])
    K = kernel(points[:, None] - points[None]) + 1e-9 * torch.eye(len(points))
    normal = torch.randn(len(points), 4000, dtype=torch.float64, generator=generator)
    density = (torch.linalg.cholesky(K) @ normal).exp().mT
    values = torch.zeros(len(density), len(nodes), dtype=torch.float64)
    values[:, near] = density[:, len(ray) :]
    shaped = values.reshape(len(density), *[NODES] * dim)
    difference = density[:, : len(ray)] - multilinear(shaped, ray)
    lack = difference.sum(1) / PER_CELL
    return float(lack.square().mean()), float(density[:, : len(ray)].square().mean())


@torch.no_grad()
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", [Matern12, Matern32])
@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_rays_lack_the_variance_between_nodes(make: type, dim: int, ratio: float) -> None:
    """Means over rays; the ends of a ray, which the formula leaves out, make a few per cent."""
    kernel = make(ratio, 0.5, dim=dim)
    grid = RegularGrid.from_bounds((0.0,) * dim, (NODES - 1.0,) * dim, (NODES,) * dim)
    expected = unresolved(kernel, grid)
    rays = [lacking(kernel, dim, seed) for seed in range(8)]
    lack, square = (sum(column) / len(rays) for column in zip(*rays, strict=True))
    assert lack / square / CELLS == pytest.approx(expected.length, rel=0.3 if dim == 1 else 0.2)


def test_it_scales_with_the_grid_and_goes_with_the_variance() -> None:
    coarse = RegularGrid.from_bounds((0.0,) * 2, (40.0,) * 2, (5, 5))
    fine = RegularGrid.from_bounds((0.0,) * 2, (4.0,) * 2, (5, 5))
    wide, narrow = (
        unresolved(Matern32(2.0 * grid.spacing[0], 1.0, dim=2), grid) for grid in (coarse, fine)
    )
    assert wide.variance == pytest.approx(narrow.variance)
    assert wide.length == pytest.approx(10.0 * narrow.length)
    flat = unresolved(Matern32(2.0, 1e-12, dim=2), fine)
    assert flat.length < 1e-12
