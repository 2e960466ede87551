"""Places of layouts in the box of a field: along rays from the Sun, in HEALPix pixels and bins.

Rays leave the box sooner or later. Pixels are NESTED and Galactic; bins of distance are equal in
the logarithm, shells at distances of one's choice.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.linalg import chunks
from dustmap.sky._coordinates import PIXEL, pixel_directions
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from dustmap.sky.maps._field import Arrays
from dustmap.sky.maps._quantities import integrals_std
from dustmap.sky.maps._trilinear import chord

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[np.float64]
Array32: TypeAlias = NDArray[np.float32]

#: Distances at which standard deviations are those of whole rays, at most.
_KNOTS = 32
_INSIDE = 1 - 1e-9  # of the way to the face: a ray that ends there has not left the box
#: Numbers of one quantity that are made at once.
BLOCK = 2**20
#: Parts of the pixels of a sky, after each of which the log has a line.
_PARTS = 10
#: As many as the published map has; few of them bias integrals that dustmaps makes.
COUNT = 516


@final
@dataclass(frozen=True)
class LayoutCounts:
    """Numbers written, of them NaN as outside the box, and raised to a floor."""

    values: int = 0
    outside: int = 0
    raised: int = 0

    @classmethod
    def of(cls, values: NDArray[np.float32], raised: int = 0) -> Self:
        """Count the numbers of an array that is NaN outside the box."""
        return cls(values.size, int(np.isnan(values).sum()), raised)

    def __add__(self, other: "LayoutCounts") -> "LayoutCounts":
        return LayoutCounts(
            self.values + other.values, self.outside + other.outside, self.raised + other.raised
        )


def refuse_sun_outside(field: AbstractDensityField) -> None:
    """Refuse a box without the Sun, where rays start."""
    if not all(low < 0 < high for low, high in zip(field.lower, field.upper, strict=True)):
        raise UserError(
            f"box: expected the Sun (0, 0, 0) inside, got {field.lower} to {field.upper} pc; "
            "export a cube (zarr, fits or gtomo) in its place"
        )


def exits(field: AbstractDensityField, directions: Array) -> Array:
    """Return distance (P,) at which rays from the Sun along unit vectors (P, 3) leave the box."""
    return chord(field.lower, field.upper, directions)[1] * _INSIDE


def at_places(field: AbstractDensityField, positions: Array, request: MapRequest) -> Arrays:
    """Return values at X, Y, Z (..., 3) in pc: (...) by quantity, samples (S, ...); NaN outside."""
    inside = np.asarray(((positions >= field.lower) & (positions <= field.upper)).all(-1))
    places = PointValues(torch.from_numpy(positions[inside]))
    return _where(inside, field, places, request, np.nan)


def within(
    field: AbstractDensityField, directions: Array, distance: float, request: MapRequest
) -> Arrays:
    """Return integrals (P,) from the Sun to `distance` along unit vectors (P, 3); NaN outside."""
    inside = np.asarray(exits(field, directions) >= distance)
    rays = LineIntegrals.from_observer(torch.from_numpy(directions[inside] * distance))
    return _where(inside, field, rays, request, np.nan)


def cumulative(
    field: AbstractDensityField, directions: Array, distances: Array, request: MapRequest
) -> Arrays:
    """Return A(<d) to ascending `distances` (K,) along unit vectors (P, 3).

    Mean (P, K), samples (S, P, K).

    Sums of the segments in between: the mean is linear, and a sample is one density throughout.
    Beyond the face of the box A stays as it is there.
    """
    leave = exits(field, directions)[:, None]
    ends = np.minimum(distances, leave)
    starts = np.concatenate([np.zeros_like(leave), ends[:, :-1]], axis=1)
    inside = ends > starts
    rays = np.broadcast_to(directions[:, None], (*ends.shape, 3))[inside]
    segments = LineIntegrals.segment(
        torch.from_numpy(rays * starts[inside][:, None]),
        torch.from_numpy(rays * ends[inside][:, None]),
    )
    return {
        name: np.cumsum(values, axis=-1, dtype=np.float64).astype(np.float32)
        for name, values in _where(inside, field, segments, request, 0.0).items()
    }


def cumulative_std(
    field: AbstractDensityField, directions: Array, distances: Array, samples: Array32
) -> Array32:
    """Return standard deviations (P, K) of A(<d) to ascending `distances` (K,).

    samples (S, P, K): of `cumulative`. At as many as 32 of the distances they are those of whole
    rays. Between these, with the spread s of the samples, (s f)² + v, f ≤ 1 and v ≥ 0 of what the
    samples have too much and lack, linear in the index. NaN beyond the face of the box.
    """
    count = len(distances)
    knots = np.linspace(0, count - 1, min(count, _KNOTS)).round().astype(int)
    request = MapRequest((Quantity.STD,))
    whole = [within(field, directions, distances[k], request)["std"] for k in knots]
    std = np.stack(whole, axis=1)
    if len(knots) == count:
        return std
    spread = integrals_std(samples, field.traits.positive)  # type: ignore[type-var]
    known = spread[:, knots]
    factor = np.divide(std, known, out=np.ones_like(std), where=known > 0.0).clip(max=1.0)
    lacked = np.maximum(std**2 - known**2, 0.0)
    for row, f, v, at in zip(spread, factor, lacked, np.isfinite(std), strict=True):
        if at.any():
            f, v = (np.interp(np.arange(count), knots[at], each[at]) for each in (f, v))
            row[:] = np.sqrt((row * f) ** 2 + v)
    return np.where(distances > exits(field, directions)[:, None], np.float32(np.nan), spread)


def _where(
    inside: NDArray[np.bool_],
    field: AbstractDensityField,
    functional: AbstractFunctional,
    request: MapRequest,
    outside: float,
) -> Arrays:
    """Evaluate as many functionals as places `inside` (...): (..., *inside.shape) by quantity."""
    # A block of pixels can lie outside the box as a whole.
    answers = field.evaluate(functional, request) if len(functional) else {}
    values = {}
    for quantity in request.quantities:
        array = np.full((*request.leading(quantity), *inside.shape), outside, np.float32)
        if answers:
            array[..., inside] = answers[quantity.value]
        values[quantity.value] = array
    return values


def pixel_blocks(nside: int, per_pixel: int) -> Iterator[tuple[slice, Array]]:
    """Yield blocks of pixels that hold `BLOCK` numbers at `per_pixel` each: which, and unit vectors
    (P, 3) along Galactic X, Y, Z to them."""
    pixels = 12 * nside**2
    for part in chunks(pixels, max(1, BLOCK // per_pixel)):
        yield part, pixel_directions(nside, np.arange(part.start, part.stop))
        if _PARTS * part.start // pixels < _PARTS * part.stop // pixels < _PARTS:
            log.info("pixels %d of %d", part.stop, pixels)


@final
@dataclass(frozen=True)
class RadialBins:
    """`count` bins between boundaries at `nearest` and `farthest`, in pc.

    Examples
    --------
    >>> RadialBins(10.0, 1000.0, count=2).boundaries
    array([  10.,  100., 1000.])
    """

    nearest: float
    farthest: float
    count: int = COUNT

    def __post_init__(self) -> None:
        if not (0 < self.nearest < self.farthest and math.isfinite(self.farthest)):
            raise UserError(
                f"distances: expected 0 < nearest < farthest in pc, got {self.nearest:g} and "
                f"{self.farthest:g}"
            )
        if self.count < 2:
            raise UserError(f"distances: expected at least 2 bins, got {self.count}")

    @classmethod
    def of_box(cls, field: AbstractDensityField, count: int = COUNT) -> Self:
        """Reach from 1/20 of the way to the farthest face of the box, within it, to that face."""
        refuse_sun_outside(field)
        faces = np.abs([field.lower, field.upper])
        farthest = float(faces.max())
        return cls(min(farthest / 20, float(faces.min()) * 0.999), farthest, count)

    @classmethod
    def resolving(cls, field: AbstractDensityField, angle: float) -> Self:
        """The same reach in bins no wider than this part of their distance, 516 at most."""
        bins = cls.of_box(field)
        count = math.ceil(math.log(bins.farthest / bins.nearest) / math.log1p(angle))
        return replace(bins, count=min(max(2, count), COUNT))

    @property
    def boundaries(self) -> Array:
        """(count + 1,)."""
        return np.geomspace(self.nearest, self.farthest, self.count + 1)

    @property
    def centres(self) -> Array:
        """Geometric means of the boundaries (count,)."""
        edges = self.boundaries
        return np.sqrt(edges[1:] * edges[:-1])


@final
@dataclass(frozen=True)
class Shells:
    """Shells at these distances in pc, ascending; not bins, so that they have no boundaries."""

    distances: tuple[float, ...]

    def __post_init__(self) -> None:
        steps = zip((0.0, *self.distances), self.distances, strict=False)
        if not self.distances or not all(near < far < math.inf for near, far in steps):
            listed = ", ".join(f"{distance:g}" for distance in self.distances) or "none"
            raise UserError(f"shells: expected ascending distances > 0 in pc, got {listed}")

    @property
    def count(self) -> int:
        """How many."""
        return len(self.distances)

    @property
    def centres(self) -> Array:
        """The distances (count,)."""
        return np.array(self.distances)


def resolving_nside(angle: float) -> int:
    """The least power of two whose pixels are no wider than this angle in rad.

    Examples
    --------
    >>> resolving_nside(angle=0.05)
    32
    """
    return 1 << max(0, math.ceil(math.log2(PIXEL / angle)))


def refuse_beyond(field: AbstractDensityField, bins: RadialBins | Shells) -> None:
    """Refuse distances all of which are beyond the corners of the box."""
    corner = float(np.linalg.norm(np.abs([field.lower, field.upper]).max(0)))
    nearest = float(bins.centres[0])
    if nearest > corner:
        raise UserError(
            f"the first shell or bin is at {nearest:.5g} pc and the box ends {corner:.5g} pc from "
            "the Sun: expected distances within it"
        )
