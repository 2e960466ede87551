"""How far the data reach along a direction."""

import math

import numpy as np

from dustmap.gp import RegularGrid
from dustmap.sky.maps._cubes import Cube
from dustmap.sky.maps._rays import Rays, within
from dustmap.sky.maps._request import Quantity
from dustmap.sky.maps._trilinear import Cells, CubeReader, Flags, Floats, Indices

#: Points of all rays that are held at once.
_POINTS = 2**20


def reliable_range(reader: CubeReader, directions: Floats, least: float) -> Floats:
    """[from, to] in pc (N, 2) along unit vectors (N, 3); NaN where coverage is never `least`.

    Coverage is looked at in steps of half a voxel and is linear between them.
    """
    grid = reader.cubes.layout.grid
    rays, _ = within(grid, directions, np.full(len(directions), np.inf))
    step = 0.5 * min(grid.spacing)
    longest = float((rays.far - rays.near).max(initial=0.0))
    count = max(2, math.ceil(longest / step) + 1)
    steps: Floats = step * np.arange(count, dtype=np.float64)
    found, size = np.empty((len(rays), 2)), max(1, _POINTS // count)
    for start in range(0, len(rays), size):
        part = slice(start, start + size)
        s, covered = _of_rays(reader, grid, rays.part(part), steps)
        found[part] = _range(s, covered, least)
    return found


def _of_rays(
    reader: CubeReader, grid: RegularGrid, rays: Rays, steps: Floats
) -> tuple[Floats, Floats]:
    """Distances and coverage there, (N, K) each; −1 beyond the box's faces."""
    s = rays.near[:, None] + steps
    beyond = s >= rays.far[:, None] + steps[1]
    s = np.minimum(s, rays.far[:, None])
    points = (rays.direction[:, None] * s[..., None]).reshape(-1, 3)
    covered = reader.at(Cube(Quantity.COVERAGE), Cells.of(grid, points)).reshape(s.shape)
    missed = (rays.far <= rays.near)[:, None]
    unknown = beyond | missed | np.isnan(covered)
    return s, np.where(unknown, -1.0, covered.astype(np.float64))


def _range(s: Floats, covered: Floats, least: float) -> Floats:
    """Where coverage (N, K) first reaches `least`, and where it next falls below: (N, 2)."""
    reached: Flags = covered >= least
    first = reached.argmax(-1)
    falls = (np.arange(s.shape[1]) > first[:, None]) & ~reached
    last = np.where(falls.any(-1), falls.argmax(-1), s.shape[1])
    found = np.stack([_crossing(s, covered, k, least) for k in (first, last)], axis=-1)
    return np.where(reached.any(-1, keepdims=True), found, np.nan)


def _crossing(s: Floats, covered: Floats, k: Indices, least: float) -> Floats:
    """Where coverage is `least` between the steps k − 1 and k (N,), at the end if one is none."""
    left, right = np.maximum(k - 1, 0), np.minimum(k, s.shape[1] - 1)
    row = np.arange(len(s))
    a, b = covered[row, left], covered[row, right]
    differ: Flags = b != a
    share = np.where(differ, (least - a) / np.where(differ, b - a, 1.0), 1.0)
    # −1 stands for no coverage at all: the box ends at the step before.
    share = np.where(b < 0, 0.0, np.where(a < 0, 1.0, share))
    share = np.clip(np.where(left == right, 1.0, share), 0.0, 1.0)
    low, high = s[row, left], s[row, right]
    return np.where(k >= s.shape[1], s[:, -1], low + share * (high - low))
