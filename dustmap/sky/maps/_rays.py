"""Integrals along rays from the Sun through a trilinear density, exact but for rounding.

Within a cell the density along a ray is a cubic of the distance, which two points of Gauss and
Legendre integrate exactly; a ray is cut wherever it enters another cell.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from dustmap.gp import RegularGrid
from dustmap.sky.maps._cubes import Cube
from dustmap.sky.maps._trilinear import Cells, CubeReader, Flags, Floats, Indices

#: Points of all rays that are held at once.
_POINTS = 2**21
_GAUSS = 0.5 / math.sqrt(3.0)


@final
@dataclass(frozen=True, eq=False)
class Rays:
    """From the Sun in `direction` (N, 3), unit vectors, between distances near and far (N,)."""

    direction: Floats
    near: Floats
    far: Floats

    def __len__(self) -> int:
        return len(self.far)

    def part(self, index: Indices | Flags | slice) -> "Rays":
        """Some of the rays."""
        return Rays(self.direction[index], self.near[index], self.far[index])


def within(grid: RegularGrid, direction: Floats, distance: Floats) -> tuple[Rays, Flags]:
    """The parts of rays of length `distance` (N,) inside the box, and whether that is all (N,)."""
    slack = 1e-6 * min(grid.spacing)
    enter, leave = _chord(grid, direction, slack)
    far = np.minimum(leave, distance)
    near = np.minimum(np.maximum(enter, 0.0), np.maximum(far, 0.0))
    missed = leave < enter
    far = np.where(missed, near, np.maximum(far, near))
    complete = (near <= slack) & (far >= distance - slack) & ~missed
    return Rays(direction, near, far), complete


def _chord(grid: RegularGrid, direction: Floats, slack: float) -> tuple[Floats, Floats]:
    """Distances (N,) where rays from the Sun enter and leave the box; leave < enter if never."""
    lower, upper = np.array(grid.lower), np.array(grid.upper)
    moving = direction != 0
    speed = np.where(moving, direction, 1.0)
    still = np.where((lower <= slack) & (upper >= -slack), np.inf, -np.inf)
    first, last = lower / speed, upper / speed
    enter = np.where(moving, np.minimum(first, last), -still)
    leave = np.where(moving, np.maximum(first, last), still)
    return enter.max(-1), leave.min(-1)


def integrate(reader: CubeReader, cubes: tuple[Cube, ...], rays: Rays) -> Floats:
    """∫ρ ds in mag, (C, N), of every cube along every ray."""
    grid = reader.cubes.layout.grid
    found = np.zeros((len(cubes), len(rays)))
    for rows in _batches(grid, rays):
        cells, weight, row = _quadrature(grid, rays.part(rows))
        for total, cube in zip(found, cubes, strict=True):
            total[rows] = np.bincount(row, reader.at(cube, cells) * weight, len(rows))
    return found


def _batches(grid: RegularGrid, rays: Rays) -> Iterator[Indices]:
    """Rows of rays of like length, of bounded number of points."""
    order = (rays.far - rays.near).argsort()
    points = 2 * (1 + np.sum(_counts(grid, rays), axis=0)[order])
    start = 0
    while start < len(order):
        # lengths ascend, so the last ray of a batch has about the most points
        taken = 1
        while start + taken < len(order):
            more = min(2 * taken, len(order) - start)
            if int(points[start : start + more].max()) * more > _POINTS:
                break
            taken = more
        yield order[start : start + taken]
        start += taken


def _counts(grid: RegularGrid, rays: Rays) -> list[Indices]:
    """Planes of voxel centres that a ray may cross, for each axis (N,)."""
    first, last = _span(grid, rays)
    return list(np.maximum(last - first + 1, 0).T)


def _span(grid: RegularGrid, rays: Rays) -> tuple[Indices, Indices]:
    """Index of the first and last plane strictly between near and far, (N, 3) each."""
    lower, spacing = np.array(grid.lower), np.array(grid.spacing)
    ends = [(rays.direction * s[:, None] - lower) / spacing for s in (rays.near, rays.far)]
    low, high = np.minimum(*ends), np.maximum(*ends)
    return np.floor(low).astype(np.int64) + 1, np.ceil(high).astype(np.int64) - 1


def _quadrature(grid: RegularGrid, rays: Rays) -> tuple[Cells, Floats, Indices]:
    """Places, weights in pc and the ray of each."""
    edges = _edges(grid, rays)
    length = np.diff(edges)
    row, segment = (length > 0).nonzero()
    step = length[row, segment]
    middle = edges[row, segment] + 0.5 * step
    s = np.concatenate([middle - _GAUSS * step, middle + _GAUSS * step])
    row = np.tile(row, 2)
    return Cells.of(grid, rays.direction[row] * s[:, None]), 0.5 * np.tile(step, 2), row


def _edges(grid: RegularGrid, rays: Rays) -> Floats:
    """Distances (N, K) where rays begin, enter another cell, and end; ascending, some repeated."""
    first, _ = _span(grid, rays)
    near, far = rays.near[:, None], rays.far[:, None]
    parts = [near, far]
    for axis, counts in enumerate(_counts(grid, rays)):
        along = rays.direction[:, axis, None]
        plane = first[:, axis, None] + np.arange(counts.max(initial=0))
        s = (grid.lower[axis] + grid.spacing[axis] * plane) / np.where(along == 0, 1.0, along)
        parts.append(np.clip(np.where(along == 0, near, s), near, far))
    return np.sort(np.concatenate(parts, axis=-1), axis=-1)
