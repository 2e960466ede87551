"""How far the data reach along a direction."""

import math

import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.features import chunks
from dustmap.sky.maps._cubes import Cube
from dustmap.sky.maps._rays import Rays, within
from dustmap.sky.maps._request import Quantity
from dustmap.sky.maps._trilinear import Cells, CubeReader

#: Points of all rays that are held at once.
_POINTS = 2**20


def reliable_range(reader: CubeReader, directions: Tensor, least: float) -> Tensor:
    """[from, to] in pc (N, 2) along unit vectors (N, 3); NaN where coverage is never `least`.

    Coverage is looked at in steps of half a voxel and is linear between them.
    """
    grid = reader.cubes.layout.grid
    rays, _ = within(grid, directions, torch.full((len(directions),), torch.inf).double())
    step = 0.5 * min(grid.spacing)
    longest = float((rays.far - rays.near).max()) if len(rays) else 0.0
    count = max(2, math.ceil(longest / step) + 1)
    steps = step * torch.arange(count)
    ranges = []
    for part in chunks(len(rays), max(1, _POINTS // count)):
        s, covered = _of_rays(reader, grid, rays.part(part), steps)
        ranges.append(_range(s, covered, least))
    return torch.cat(ranges) if ranges else torch.empty(0, 2, dtype=torch.float64)


def _of_rays(
    reader: CubeReader, grid: RegularGrid, rays: Rays, steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Distances and coverage there, (N, K) each; −1 beyond the box's faces."""
    s = rays.near[:, None] + steps
    beyond = s >= rays.far[:, None] + steps[1]
    s = torch.minimum(s, rays.far[:, None])
    points = (rays.direction[:, None] * s[..., None]).reshape(-1, 3)
    covered = reader.at(Cube(Quantity.COVERAGE), Cells.of(grid, points)).double().reshape(s.shape)
    missed = (rays.far <= rays.near)[:, None]
    return s, torch.where(beyond | missed, -1.0, covered.nan_to_num(-1.0))


def _range(s: Tensor, covered: Tensor, least: float) -> Tensor:
    """Where coverage (N, K) first reaches `least`, and where it next falls below: (N, 2)."""
    reached = covered >= least
    never = ~reached.any(-1)
    first = reached.int().argmax(-1)
    after = torch.arange(s.shape[1]) > first[:, None]
    falls = after & ~reached
    last = torch.where(falls.any(-1), falls.int().argmax(-1), s.shape[1])
    found = torch.stack([_crossing(s, covered, k, least) for k in (first, last)], dim=-1)
    return torch.where(never[:, None], torch.nan, found)


def _crossing(s: Tensor, covered: Tensor, k: Tensor, least: float) -> Tensor:
    """Where coverage is `least` between the steps k − 1 and k (N,), at the end if one is none."""
    left = (k - 1).clamp_min(0)[:, None]
    right = k.clamp_max(s.shape[1] - 1)[:, None]
    a, b = covered.gather(1, left)[:, 0], covered.gather(1, right)[:, 0]
    share = torch.where(b != a, (least - a) / torch.where(b != a, b - a, 1.0), 1.0)
    # −1 stands for no coverage at all: the box ends at the step before.
    share = torch.where(b < 0, 0.0, torch.where(a < 0, 1.0, share))
    share = torch.where(left[:, 0] == right[:, 0], 1.0, share).clamp(0.0, 1.0)
    low, high = s.gather(1, left)[:, 0], s.gather(1, right)[:, 0]
    ended = k >= s.shape[1]
    return torch.where(ended, s[:, -1], low + share * (high - low))
