"""What the tests of local features share: grids, data of every kind, dense weights."""

import torch
from torch import Tensor

from dustmap.gp import GridPrior
from dustmap.gp.features import LocalFeatures
from dustmap.gp.functionals import (
    Derivatives,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import Matern32
from tests.contracts.features import SHAPES as SHAPES
from tests.contracts.features import unit_grid as unit_grid


def draw(n: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, dim, dtype=torch.float64, generator=generator)


def some_points(dim: int, n: int) -> PointValues:
    return PointValues(draw(n, dim, 0))


def some_slopes(dim: int, n: int) -> Derivatives:
    direction = draw(n, dim, 1) + 0.1
    return Derivatives(draw(n, dim, 0), direction / direction.norm(dim=-1, keepdim=True))


def some_rays(dim: int, n: int) -> LineIntegrals:
    plain = LineIntegrals.segment(draw(n, dim, 2), draw(n, dim, 3))
    edges = plain.edges[:, 1:] * torch.tensor([0.0, 0.3, 0.5, 1.0])
    return LineIntegrals(plain.origin, plain.direction, edges, 0.2 + draw(n, 3, 4))


def some_measure(dim: int, n: int) -> PointMeasure:
    points, weights = draw(3 * n, dim, 5).reshape(n, 3, dim), draw(n, 3, 6) - 0.3
    return PointMeasure(points, weights, draw(n, dim, 7))


def some_mixed(dim: int, n: int = 5, seed: int = 0) -> Stacked:
    parts = (some_points(dim, n), some_slopes(dim, n), some_rays(dim, n), some_measure(dim, n))
    stacked = Stacked(parts)
    order = torch.randperm(len(stacked), generator=torch.Generator().manual_seed(seed))
    return stacked[order]


def make_features(
    shape: tuple[int, ...],
    order: int | None = None,
    dtype: torch.dtype = torch.float64,
    memory: int = 2**31,
) -> LocalFeatures:
    """Short length scales, so that few images of the kernel matter; 2³ nodes in 3-D."""
    scales = (0.13, 0.1, 0.15)[: len(shape)]
    prior = GridPrior.padded(Matern32(scales, 1.3), unit_grid(shape), padding=2.0, dtype=dtype)
    return LocalFeatures(prior, order=order or (4 if len(shape) < 3 else 2), memory=memory)
