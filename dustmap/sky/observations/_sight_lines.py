"""Directions and distances as rays through a box."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import Counts, LineIntegrals, OutsidePolicy
from dustmap.sky._coordinates import cartesian
from dustmap.sky.observations._segments import NEGLIGIBLE, Segments, segments_of
from dustmap.sky.observations._spread import DistanceSpread
from dustmap.sky.stars import AbstractDistances

Array = NDArray[np.float64]

#: Stars whose quantiles are in memory at once.
_STARS_AT_ONCE = 2**15


@final
@dataclass(frozen=True, eq=False)
class SightLines:
    """The mean extinction of N stars, E A(<d) = ∫ρ(s) sf(s) ds, as functionals of the density.

    rays: N line integrals weighted by the survival function sf(s) = P(d > s), 1 up to a known
    distance; rows (N,): the stars they come from; counts: rays that were truncated at the box, and
    those left out; spread: what the distances add to the variance, None where they are known;
    cut: stars of which more than 1e-3 of the expected distance lies beyond the last edge.
    """

    rays: LineIntegrals
    rows: NDArray[np.int64]
    counts: Counts
    spread: DistanceSpread | None
    cut: int = 0

    def __len__(self) -> int:
        return len(self.rows)


def sight_lines(
    l: Array,
    b: Array,
    distances: AbstractDistances,
    grid: RegularGrid,
    outside: OutsidePolicy,
    device: torch.device | None = None,
) -> SightLines:
    """Rays from the Sun to stars at Galactic l, b (N,) in degrees, within the box of the grid.

    Every random rule knows a ray by its row, so that batches do not change it. A ray that loses
    at most 1e-3 of its weight at the box is truncated under every policy.
    """
    if distances.exact:
        positions = torch.from_numpy(cartesian(l, b, distances.median)).to(device)
        whole, cut = LineIntegrals.from_observer(positions), np.zeros(len(positions), np.bool_)
    else:
        whole, cut = _weighted(cartesian(l, b, np.ones(len(l))), distances, device)
    rays, kept, counts = whole.clipped(
        grid.lower, grid.upper, outside, 0.0 if distances.exact else NEGLIGIBLE
    )
    if len(rays) == 0:
        raise ValueError(
            f"none of the {len(whole)} stars is seen through the box {grid.lower} to "
            f"{grid.upper} pc; move or enlarge it (grid.center, grid.size)"
        )
    rows = kept.cpu().numpy()
    if distances.exact:
        return SightLines(rays, rows, counts, None)
    spread = _within(rays, distances, rows)
    return SightLines(spread.rays, rows, counts, spread, int(cut[rows].sum()))


def _weighted(
    direction: Array, distances: AbstractDistances, device: torch.device | None
) -> tuple[LineIntegrals, NDArray[np.bool_]]:
    """Rays of whole stars, and which of them lose more than a little beyond their last edge."""
    parts = [segments_of(distances[part]) for part in _chunks(len(distances))]
    edges, weights = (
        torch.from_numpy(np.concatenate([getattr(part, name) for part in parts])).to(device)
        for name in ("edges", "mean")
    )
    omega = torch.from_numpy(direction).to(device)
    omega = omega / omega.norm(dim=-1, keepdim=True)
    rays = LineIntegrals(torch.zeros_like(omega), omega, edges, weights)
    return rays, np.concatenate([part.cut for part in parts])


def _within(
    rays: LineIntegrals, distances: AbstractDistances, rows: NDArray[np.int64]
) -> DistanceSpread:
    """Rays and spreads of distances clipped to what the rays have left of them in the box."""
    edges = rays.edges.cpu().numpy()
    parts = [
        segments_of(distances[rows[part]], edges[part, 0], edges[part, -1])
        for part in _chunks(len(rows))
    ]
    whole = Segments(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("edges", "mean", "variance", "beyond")
        )
    )
    along, weights, variance = (
        torch.from_numpy(values).to(rays.device)
        for values in (whole.edges, whole.mean, whole.variance)
    )
    inside = LineIntegrals(rays.origin, rays.direction, along, weights, rays.keys)
    return DistanceSpread(inside, variance)


def _chunks(n: int) -> list[slice]:
    return [slice(start, start + _STARS_AT_ONCE) for start in range(0, n, _STARS_AT_ONCE)]
