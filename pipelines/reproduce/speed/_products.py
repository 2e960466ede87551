"""Products of a log-normal fit, whose rays are in the order of the sky, beside what they need at
least.

The limit of a Gram product of 8 vectors is the time to read the rows and their transpose once at
the bandwidth of a copy, and a real transform and its inverse of every vector at the speed of
transforms on their own. Products with K by matrices in place of fast transforms may be below it.
"""

import functools
import math
from dataclasses import dataclass
from typing import final

import torch

from dustmap.gp import GridPrior
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals, sky_order
from dustmap.gp.kernels import Matern12
from dustmap.linalg import SparseOperator
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import time_together
from pipelines.reproduce.beyond_memory._sky import Sky

#: Vectors of a product.
VECTORS = 8


@final
@dataclass(frozen=True)
class Products:
    """Stars and spacing of the nodes in the box of `Sky`."""

    stars: int
    spacing: float


def sizes(quick: bool) -> tuple[Products, ...]:
    """Few and many stars, and many nodes."""
    if quick:
        return (Products(500, 40.0),)
    return Products(5_000, 20.0), Products(80_000, 20.0), Products(20_000, 8.0)


@torch.no_grad()
def product(case: Products) -> Row:
    """Seconds of L x, Lᵀ y and K x of 8 vectors, and of what they need at least."""
    sky = Sky(case.stars, (1000.0, 1000.0, 400.0), spacing=case.spacing)
    grid, half = sky.grid(), 0.5 * torch.tensor(sky.size, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    ends = half * (2.0 * torch.rand(case.stars, 3, dtype=torch.float64, generator=random) - 1.0)
    rays = LineIntegrals.from_observer(ends)
    rows = interpolation(rays[sky_order(rays)], grid, memory=2**34)
    assert isinstance(rows, SparseOperator)
    prior = GridPrior.padded(Matern12(60.0, 1.0, dim=3), grid, dtype=torch.float32)
    x, y = torch.randn(VECTORS, grid.size), torch.randn(VECTORS, case.stars)
    torus = torch.randn(prior.torus_shape)
    source = torch.randn(2**26)
    target = torch.empty_like(source)
    calls = {
        "rows": functools.partial(rows.matmul, x),
        "transposed": functools.partial(rows.rmatmul, y),
        "covariance": functools.partial(prior.covariance_products().matmul, x),
        "copy": functools.partial(target.copy_, source),
        "transforms": functools.partial(_there_and_back, torus),
    }
    times = {name: timing.median for name, timing in time_together(calls).items()}
    bandwidth = 2.0 * source.numel() * source.itemsize / times["copy"]
    # The transforms of a box in the torus have no padding to transform: 1 + m/L + (m/L)² of 3 axes.
    parts = [m / length for m, length in zip(grid.shape, prior.torus_shape, strict=True)]
    share = (1.0 + parts[0] + parts[0] * parts[1]) / 3.0
    limit = rows.bytes / bandwidth + VECTORS * share * times["transforms"]
    taken = times["rows"] + times["transposed"] + times["covariance"]
    return {
        "part": "products",
        "stars": case.stars,
        "nodes": grid.size,
        "torus": math.prod(prior.torus_shape),
        "entries": len(rows.matrix.values()),
        "rows_s": times["rows"] + times["transposed"],
        "covariance_s": times["covariance"],
        "bandwidth_gb_s": bandwidth / 1e9,
        "limit_s": limit,
        "fraction": limit / taken,
    }


def _there_and_back(x: torch.Tensor) -> torch.Tensor:
    back: torch.Tensor = torch.fft.irfftn(torch.fft.rfftn(x), x.shape)
    return back
