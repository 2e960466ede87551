"""Fields that tiles know, and what they make together, node by node."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.maps import Quantity
from dustmap.sky.tiles import SkyPixel, Tile

GRID = RegularGrid((-60.0, -70.0, -40.0), (10.0,) * 3, (13, 14, 9))
MARGIN = 25.0
ARRAYS = (Quantity.MEAN, Quantity.STD, Quantity.SAMPLES)

#: (pixel, X, Y, Z (N, 3), quantity, sample) -> values (N,)
Field = Callable[[int, NDArray[np.float64], Quantity, int], NDArray[np.float64]]


def same(pixel: int, x: NDArray[np.float64], quantity: Quantity, k: int) -> NDArray[np.float64]:
    """What all tiles agree upon."""
    phase = ARRAYS.index(quantity) + 2.0 * k
    return 2.0 + np.sin(x @ [0.05, 0.03, -0.04] + phase)


def different(
    pixel: int, x: NDArray[np.float64], quantity: Quantity, k: int
) -> NDArray[np.float64]:
    """Every tile its own."""
    return same(pixel, x, quantity, k) * (1.0 + pixel)


def nodes(grid: RegularGrid) -> NDArray[np.float64]:
    """X, Y, Z of the voxels in the order [z, y, x]."""
    x, y, z = (axis.numpy() for axis in grid.axes())
    found = np.stack(np.meshgrid(z, y, x, indexing="ij"), axis=-1)[..., ::-1]
    return found.reshape(-1, 3)


def expected(field: Field, pixels: Sequence[int], q: Quantity, k: int = 0) -> NDArray[np.float64]:
    """Σ u q / Σ u over the tiles, every tile's field known everywhere."""
    points = nodes(GRID)
    influence = {p: Tile(SkyPixel(1, p), MARGIN).influence(points)[1] for p in pixels}
    weighted = sum(influence[p] * field(p, points, q, k) for p in pixels)
    total = np.sum([*influence.values()], axis=0)
    known = np.where(total > 0.0, weighted / np.where(total > 0.0, total, 1.0), np.nan)
    return known.reshape(GRID.shape[::-1])
