"""A map of several levels on one grid, whose voxels are interpolated when they are read."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.maps._answers import Answers
from dustmap.sky.maps._cubes import AbstractCubes, Box, Cube, Layout

#: Voxels of one grid that has all levels: 2 by 2 by 0.8 kpc at 5 pc have 26 million.
VOXELS = 2**25
#: Voxels that are interpolated at a time.
_TOGETHER = 2**20


@final
@dataclass(frozen=True, eq=False)
class OneGridCubes(AbstractCubes):
    """Cubes of a map on the grid of `described`, by its answers at the voxels' centres."""

    described: Layout
    answers: Answers

    @property
    def layout(self) -> Layout:
        return self.described

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        z, y, x = (axis[part] for axis, part in zip(self.layout.axes[::-1], box, strict=True))
        values = np.empty((len(z), len(y), len(x)), np.float32)
        step = max(1, _TOGETHER // max(1, len(y) * len(x)))
        for first in range(0, len(z), step):
            planes = slice(first, first + step)
            places = np.stack(np.meshgrid(z[planes], y, x, indexing="ij")[::-1], axis=-1)
            (found,) = self.answers.of_cube(cube, places.reshape(-1, 3))
            values[planes] = found.reshape(values[planes].shape)
        return values


def finest_grid(
    grid: RegularGrid, spacings: Iterable[tuple[float, ...]], most: int = VOXELS
) -> RegularGrid:
    """Return a grid of the same box with the last of some spacings, which divide its sides, that
    gives it no more than so many voxels; finer ones come later.

    Examples
    --------
    >>> finest_grid(RegularGrid((0.0,), (2.0,), (5,)), [(0.5,), (1e-9,)]).shape
    (17,)
    """
    finest = grid
    for spacing in spacings:
        sides = zip(grid.lower, grid.upper, spacing, strict=True)
        shape = tuple(round((b - a) / h) + 1 for a, b, h in sides)
        finest = RegularGrid(grid.lower, spacing, shape) if math.prod(shape) <= most else finest
    return finest
