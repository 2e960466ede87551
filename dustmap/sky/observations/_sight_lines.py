"""Sight lines: from directions and distances of stars to line integrals of the density, and back.

The mean extinction of a star is E A(<d) = ∫ρ(s) sf(s) ds along its ray, sf(s) = P(d > s). Beams
through the centres of HEALPix pixels are rays that many stars share.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import healpy
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Prediction, RegularGrid
from dustmap.gp.features import AbstractBeams
from dustmap.gp.functionals import FACE_SLACK, Counts, LineIntegrals, OutsidePolicy, chord
from dustmap.sky._coordinates import cartesian
from dustmap.sky.observations import _segments
from dustmap.sky.observations._beyond import BeyondBox, PriorDust
from dustmap.sky.observations._segments import Array, DistanceSpread, Segments
from dustmap.sky.stars import AbstractDistances

#: Probability up to which the distribution of a distance is looked at behind the box.
_LAST = 1.0 - 1e-6
#: Parts of the first segment behind the box, for a mean density that changes along it.
PIECES = 6


@final
class HealpixBeams(AbstractBeams):
    """A beam for each pixel of `nside`, bilinear between the four nearest on two rings."""

    def __init__(self, nside: int) -> None:
        if nside < 1 or nside & (nside - 1):
            raise UserError(f"nside of beams: expected a power of two, got {nside}")
        self.nside = nside

    @cached_property
    def directions(self) -> Tensor:
        pixels = np.arange(12 * self.nside**2)
        return torch.from_numpy(np.stack(healpy.pix2vec(self.nside, pixels, nest=True), axis=-1))

    def around(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        theta, phi = healpy.vec2ang(direction.cpu().numpy())
        pixel, weight = healpy.get_interp_weights(self.nside, theta, phi, nest=True)
        return (
            torch.from_numpy(np.ascontiguousarray(pixel.T)).to(direction.device, torch.int64),
            torch.from_numpy(np.ascontiguousarray(weight.T)).to(direction.device),
        )


@final
@dataclass(frozen=True, eq=False)
class SightLines:
    """The mean extinction of N stars, E A(<d) = ∫ρ(s) sf(s) ds, as functionals of the density.

    rays: N line integrals weighted by the survival function sf(s) = P(d > s), 1 up to a known
    distance; rows (N,): the stars they come from; counts: rays that were truncated at the box, and
    those left out; spread: what the distances add to the variance, None where they are known;
    cut: stars of which more than 1e-3 of the expected distance lies beyond the last edge; beyond:
    the parts of the rays outside the box, where dust is expected there.
    """

    rays: LineIntegrals
    rows: NDArray[np.int64]
    counts: Counts
    spread: DistanceSpread | None
    cut: int = 0
    beyond: BeyondBox | None = None

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
    """Make rays from the Sun to stars at Galactic l, b (N,) in degrees, in the box of the grid.

    Every random rule knows a ray by its row, so that batches do not change it. A ray that loses
    at most 1e-3 of its weight at the box is truncated under every policy.
    """
    lines = lines_if_any(l, b, distances, grid, outside, device)
    refuse_nothing(len(lines), len(l), grid)
    return lines


def refuse_nothing(rays: int, stars: int, grid: RegularGrid) -> None:
    """Refuse stars of which none has a ray in the box."""
    if rays == 0:
        raise UserError(
            f"none of the {stars} stars is seen through the box {grid.lower} to "
            f"{grid.upper} pc; move or enlarge it (grid.center, grid.size)"
        )


def lines_if_any(
    l: Array,
    b: Array,
    distances: AbstractDistances,
    grid: RegularGrid,
    outside: OutsidePolicy,
    device: torch.device | None = None,
) -> SightLines:
    """Make `sight_lines` of stars of which none need be seen."""
    if distances.exact:
        segments, negligible = None, 0.0
        positions = torch.from_numpy(cartesian(l, b, distances.median)).to(device)
        whole = LineIntegrals.from_observer(positions)
    else:
        segments, negligible = _segments.segments_of(distances), _segments.NEGLIGIBLE
        omega = torch.from_numpy(cartesian(l, b, np.ones(len(l)))).to(device)
        omega = omega / omega.norm(dim=-1, keepdim=True)
        edges, weights = _tensors(device, segments.edges, segments.mean)
        whole = LineIntegrals(torch.zeros_like(omega), omega, edges, weights)
    rays, kept, counts = whole.clipped(grid.lower, grid.upper, outside, negligible)
    rows = kept.cpu().numpy()
    beyond = _beyond(rays, distances[rows], grid, outside)
    if segments is None:
        return SightLines(rays, rows, counts, None, beyond=beyond)
    spread = _within(rays, segments[rows], distances[rows])
    return SightLines(spread.rays, rows, counts, spread, int(segments.cut[rows].sum()), beyond)


def _beyond(
    rays: LineIntegrals, distances: AbstractDistances, grid: RegularGrid, outside: OutsidePolicy
) -> BeyondBox | None:
    """Cut the rays of the stars before and behind the box."""
    if outside is not OutsidePolicy.PRIOR:
        return None
    enter, leave = (
        face.clamp_min(0.0).cpu().numpy()
        for face in chord(rays.origin, rays.direction, grid.lower, grid.upper)
    )
    far = distances.quantile(np.array([_LAST]))[:, 0]
    rows = np.flatnonzero((enter > 0.0) | (far > leave * (1.0 + FACE_SLACK)))
    if len(rows) == 0:
        return BeyondBox.nothing(rays)
    before = _segments.segments_of(distances[rows], np.zeros(len(rows)), enter[rows])
    behind = _segments.segments_of(distances[rows], leave[rows]).subdivided(PIECES)
    if not (enter > 0.0).any():
        before = before.none()
    index = torch.from_numpy(rows).to(rays.device)
    spread = _spread(rays[index], before.apart_from(behind))
    return BeyondBox(index, spread, behind.mean.shape[1], len(rays))


def _within(rays: LineIntegrals, whole: Segments, distances: AbstractDistances) -> DistanceSpread:
    """Clip the distances of N rays, and their segments, to what the box has left of the rays."""
    edges = rays.edges.cpu().numpy()
    short = np.flatnonzero((edges != whole.edges).any(1))
    if len(short) > 0:
        clipped = _segments.segments_of(distances[short], edges[short, 0], edges[short, -1])
        whole = whole.with_rows(short, clipped)
    return _spread(rays, whole)


def _spread(rays: LineIntegrals, segments: Segments) -> DistanceSpread:
    edges, mean, variance = _tensors(rays.device, segments.edges, segments.mean, segments.variance)
    return DistanceSpread(replace(rays, edges=edges, weights=mean), variance)


def _tensors(device: torch.device | None, *arrays: Array) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def predict_extinction(
    posterior: AbstractPosterior,
    lines: SightLines,
    beyond: PriorDust | None = None,
    samples: int = 8,
    seed: int = 0,
) -> Prediction:
    """Predict A(<d): mean and variance (N,) over the posterior of ρ and the distribution of d.

        E A = E_ρ ∫ρ sf ds,    Var A = Var_ρ ∫ρ sf ds + E_ρ Var_d A(<d)

    The last term is the mean over `samples` draws of the posterior; 0 for known distances.
    beyond: the dust of the parts outside the box, where the lines have any.
    """
    inside = posterior.predict(lines.rays)
    mean, variance, behind = inside.mean, inside.variance, None
    if lines.beyond is not None and beyond is not None:
        behind, apart = lines.beyond.moments(beyond)
        mean, variance = mean + behind.to(mean), variance + apart.to(variance)
    if lines.spread is not None:
        added = lines.spread.added_variance(posterior, samples, seed, behind)
        variance = variance + added.to(variance)
    return Prediction(mean, variance, inside.clamped)
