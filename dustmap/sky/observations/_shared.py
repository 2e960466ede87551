"""Observations whose rays are shared by the ranks of a world."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp import Batch, RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, Sharded
from dustmap.linalg import AbstractWorld
from dustmap.sky.observations._observe import Observations
from dustmap.sky.observations._sight_lines import lines_if_any, refuse_nothing
from dustmap.sky.stars import StarTable


def observe_share(
    stars: StarTable,
    first: int,
    grid: RegularGrid,
    outside: OutsidePolicy,
    dtype: torch.dtype,
    device: torch.device | None,
    world: AbstractWorld,
) -> Observations:
    """`observe` of all stars, of which this rank has those from row `first` on.

    Only the rays are shared: extinctions, errors and counts of all are on every rank.
    """
    lines = lines_if_any(stars.l, stars.b, stars.distances, grid, outside, device)
    rays = Sharded.of(_counted_from(first, lines.rays), world)
    refuse_nothing(len(rays), int(world.total(torch.tensor(len(stars)))), grid)
    spread = None
    if lines.spread is not None:
        spread = replace(lines.spread, rays=_counted_from(first, lines.spread.rays))
    y, sigma = stars.extinction[lines.rows], stars.extinction_error[lines.rows]
    measured, noise = (
        rays.gathered(torch.from_numpy(values).to(device, dtype))
        for values in (y, np.square(sigma))
    )
    told = torch.tensor([lines.counts.truncated, lines.counts.dropped, lines.cut])
    truncated, dropped, cut = world.total(told).tolist()
    counts = replace(lines.counts, truncated=truncated, dropped=dropped)
    batch = Batch(rays, measured, noise)
    rows = _rows(rays, lines.rows + first)
    return Observations(batch, rows, counts, spread, measured, noise, cut, lines.beyond)


def _counted_from(first: int, rays: LineIntegrals) -> LineIntegrals:
    return replace(rays, keys=rays.keys + first)


def _rows(rays: Sharded, local: NDArray[np.int64]) -> NDArray[np.int64]:
    gathered: NDArray[np.int64] = rays.gathered(torch.from_numpy(local)).numpy()
    return gathered
