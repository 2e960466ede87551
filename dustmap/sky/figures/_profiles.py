"""Density and extinction along one line of sight of a map, as curves with bands."""

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.sky._coordinates import cartesian, galactic
from dustmap.sky.figures._cells import Cells
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.stars import StarTable
from dustmap.sky.systems import ExtinctionSystem

Array: TypeAlias = NDArray[np.float64]

#: Percentiles between which 68 % lie.
_LOW, _HIGH = 16.0, 84.0
#: Rows of cells among which the busiest is looked for.
_ROWS = 40
#: Places along a line at most.
_MOST = 600


@final
@dataclass(frozen=True, eq=False)
class Band:
    """A curve (K,), with the edges of its central 68 % where they are known."""

    mean: Array
    low: Array | None = None
    high: Array | None = None


@final
@dataclass(frozen=True, eq=False)
class Profile:
    """Towards (l, b) in degrees at `distance` (K,) in pc: density in mag/pc, extinction in mag.

    coverage and the truths (K,) where they are known.
    """

    l: float
    b: float
    system: ExtinctionSystem
    distance: Array
    density: Band
    extinction: Band
    coverage: Array | None = None
    true_density: Array | None = None
    true_extinction: Array | None = None


def profile_of_map(density: DustMap, l: float, b: float, truth: DustMap | None = None) -> Profile:
    """From the Sun to the face of the map.

    Bands of the density are the map's percentiles or, without them, mean ± std; those of the
    extinction are the percentiles of the stored samples, if there are any.
    """
    step = 0.5 * min(density.grid.spacing)
    distance = distances_within(density.grid.lower, density.grid.upper, step, l, b)
    places = SkyCoord(
        l=np.full(len(distance), l) * u.deg,
        b=np.full(len(distance), b) * u.deg,
        distance=distance * u.pc,
        frame="galactic",
    )
    return Profile(
        l,
        b,
        density.system,
        distance,
        _density_band(density, places),
        _extinction_band(density, places),
        density.coverage(places) if Quantity.COVERAGE in density.available else None,
        None if truth is None else truth.query(places),
        None if truth is None else truth.query(places, integrated=True),
    )


def in_beam(stars: StarTable, profile: Profile, angle: float) -> StarTable | None:
    """The stars within `angle` degrees of the line, as far as it goes; None if there are none."""
    if not angle > 0.0:
        raise ValueError(f"beam: expected a radius of more than 0 degrees, got {angle:g}")
    ahead = cartesian([profile.l], [profile.b], [1.0])[0]
    near = cartesian(stars.l, stars.b, np.ones(len(stars))) @ ahead >= np.cos(np.radians(angle))
    near &= stars.distance <= profile.distance[-1]
    return stars[near] if near.any() else None


def busiest_direction(stars: StarTable) -> tuple[float, float]:
    """(l, b) of the middle of the stars in that cell of the sky, 4.5° wide, which has the most."""
    cells = Cells(_ROWS)
    of_star = cells.of(stars.l, stars.b)
    chosen = of_star == np.bincount(of_star, minlength=len(cells)).argmax()
    middle = cartesian(stars.l[chosen], stars.b[chosen], np.ones(int(chosen.sum()))).mean(0)
    l, b, _ = galactic(middle)
    return round(float(l), 1), round(float(b), 1)


def distances_within(
    lower: tuple[float, ...], upper: tuple[float, ...], step: float, l: float, b: float
) -> Array:
    """Places from the Sun to where the line leaves the box, at most `step` apart."""
    if not abs(b) <= 90.0:
        raise ValueError(f"b = {b:g}: expected -90 to 90 degrees")
    ahead = cartesian([l], [b], [1.0])[0]
    if not all(low <= 0.0 <= high for low, high in zip(lower, upper, strict=True)):
        raise ValueError(
            f"a line of sight starts at the Sun, which is outside the map ({tuple(lower)} to "
            f"{tuple(upper)} pc)"
        )
    faces = np.where(ahead > 0, upper, lower)
    moving = np.abs(ahead) > 1e-12
    far = float((faces[moving] / ahead[moving]).min())
    count = min(max(2, int(np.ceil(far / step)) + 1), _MOST)
    # A hair inside, so that rounding does not put the last place outside.
    return np.linspace(far / count, far * (1.0 - 1e-9), count)


def _density_band(density: DustMap, places: SkyCoord) -> Band:
    mean = density.query(places)
    known = density.available
    if {Quantity.P16, Quantity.P84} <= set(known) or density.n_samples > 1:
        low, high = density.query(places, mode="percentile", pct=[_LOW, _HIGH]).T
        return Band(mean, low, high)
    if Quantity.STD in known:
        std = density.query(places, mode="std")
        return Band(mean, mean - std, mean + std)
    return Band(mean)


def _extinction_band(density: DustMap, places: SkyCoord) -> Band:
    mean = density.query(places, integrated=True)
    if density.n_samples < 2:
        return Band(mean)
    low, high = density.query(places, mode="percentile", pct=[_LOW, _HIGH], integrated=True).T
    return Band(mean, low, high)
