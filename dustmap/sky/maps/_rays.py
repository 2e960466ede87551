"""Integrals along rays from the Sun through a trilinear density, exact but for rounding.

Within a cell the density along a ray is a cubic of the distance, which two points of Gauss and
Legendre integrate exactly; a ray is cut wherever it enters another cell.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.sky.maps._cubes import Cube
from dustmap.sky.maps._trilinear import Cells, CubeReader

#: Points of all rays that are held at once.
_POINTS = 2**21
_GAUSS = 0.5 / math.sqrt(3.0)


@final
@dataclass(frozen=True, eq=False)
class Rays:
    """From the Sun in `direction` (N, 3), unit vectors, between distances near and far (N,)."""

    direction: Tensor
    near: Tensor
    far: Tensor

    def __len__(self) -> int:
        return len(self.far)

    def part(self, index: Tensor | slice) -> "Rays":
        """Some of the rays."""
        return Rays(self.direction[index], self.near[index], self.far[index])


def within(grid: RegularGrid, direction: Tensor, distance: Tensor) -> tuple[Rays, Tensor]:
    """The parts of rays of length `distance` (N,) inside the box, and whether that is all (N,)."""
    slack = 1e-6 * min(grid.spacing)
    enter, leave = _chord(grid, direction, slack)
    far = torch.minimum(leave, distance)
    near = torch.minimum(enter.clamp_min(0.0), far.clamp_min(0.0))
    missed = leave < enter
    far = torch.where(missed, near, torch.maximum(far, near))
    complete = (near <= slack) & (far >= distance - slack) & ~missed
    return Rays(direction, near, far), complete


def _chord(grid: RegularGrid, direction: Tensor, slack: float) -> tuple[Tensor, Tensor]:
    """Distances (N,) where rays from the Sun enter and leave the box; leave < enter if never."""
    lower, upper = (torch.tensor(v, dtype=torch.float64) for v in (grid.lower, grid.upper))
    moving = direction != 0
    speed = torch.where(moving, direction, 1.0)
    always = torch.full_like(direction, torch.inf)
    between = ((lower <= slack) & (upper >= -slack)).expand_as(direction)
    still = torch.where(between, always, -always)
    first, last = lower / speed, upper / speed
    enter = torch.where(moving, torch.minimum(first, last), -still)
    leave = torch.where(moving, torch.maximum(first, last), still)
    return enter.amax(-1), leave.amin(-1)


def integrate(reader: CubeReader, cubes: tuple[Cube, ...], rays: Rays) -> Tensor:
    """∫ρ ds in mag, (C, N) float64, of every cube along every ray."""
    grid = reader.cubes.layout.grid
    found = torch.zeros(len(cubes), len(rays), dtype=torch.float64)
    for rows in _batches(grid, rays):
        cells, weight, row = _quadrature(grid, rays.part(rows))
        for total, cube in zip(found, cubes, strict=True):
            values = reader.at(cube, cells).to(torch.float64)
            total.index_add_(0, rows[row], values.mul_(weight))
    return found


def _batches(grid: RegularGrid, rays: Rays) -> Iterator[Tensor]:
    """Rows of rays of like length, of bounded number of points."""
    order = (rays.far - rays.near).argsort()
    points = 2 * (1 + torch.stack(_counts(grid, rays)).sum(0)[order])
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


def _counts(grid: RegularGrid, rays: Rays) -> list[Tensor]:
    """Planes of voxel centres that a ray may cross, for each axis (N,)."""
    first, last = _span(grid, rays)
    return [(last[:, axis] - first[:, axis] + 1).clamp_min(0) for axis in range(3)]


def _span(grid: RegularGrid, rays: Rays) -> tuple[Tensor, Tensor]:
    """Index of the first and last plane strictly between near and far, (N, 3) each."""
    lower = torch.tensor(grid.lower, dtype=torch.float64)
    spacing = torch.tensor(grid.spacing, dtype=torch.float64)
    ends = [(rays.direction * s[:, None] - lower) / spacing for s in (rays.near, rays.far)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    return low.floor().to(torch.int64) + 1, high.ceil().to(torch.int64) - 1


def _quadrature(grid: RegularGrid, rays: Rays) -> tuple[Cells, Tensor, Tensor]:
    """Places, weights in pc and the ray of each."""
    edges = _edges(grid, rays)
    length = edges.diff(dim=-1)
    row, segment = (length > 0).nonzero(as_tuple=True)
    step = length[row, segment]
    middle = edges[row, segment] + 0.5 * step
    s = torch.cat([middle - _GAUSS * step, middle + _GAUSS * step])
    row = row.repeat(2)
    cells = Cells.of(grid, rays.direction[row] * s[:, None])
    return cells, 0.5 * step.repeat(2), row


def _edges(grid: RegularGrid, rays: Rays) -> Tensor:
    """Distances (N, K) where rays begin, enter another cell, and end; ascending, some repeated."""
    first, _ = _span(grid, rays)
    counts = _counts(grid, rays)
    near, far = rays.near[:, None], rays.far[:, None]
    parts = [near, far]
    for axis in range(3):
        most = int(counts[axis].max())
        if most == 0:
            continue
        along = rays.direction[:, axis, None]
        plane = first[:, axis, None] + torch.arange(most)
        s = (grid.lower[axis] + grid.spacing[axis] * plane) / torch.where(along == 0, 1.0, along)
        parts.append(torch.where(along == 0, near, s).clamp(near, far))
    return torch.cat(parts, dim=-1).sort(dim=-1).values
