"""The sky as pixels: the density at a distance, or the extinction up to it."""

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.sky.maps import DustMap, Quantity, quietly

Array: TypeAlias = NDArray[np.float64]


@final
@dataclass(frozen=True, eq=False)
class Pixels:
    """Cells of the sky between l_edges (H + 1,) and b_edges (V + 1,) in degrees.

    Both ascend; l is continuous, from below 0 if need be.
    """

    l_edges: Array
    b_edges: Array

    @classmethod
    def whole_sky(cls, size: float = 1.0) -> "Pixels":
        """All of it, −180° to 180°, in cells of about `size` degrees."""
        if not 0.0 < size <= 90.0:
            raise ValueError(f"size of pixels: expected 0 to 90 degrees, got {size:g}")
        rows = round(180.0 / size)
        return cls(np.linspace(-180.0, 180.0, 2 * rows + 1), np.linspace(-90.0, 90.0, rows + 1))

    @classmethod
    def around(cls, l: float, b: float, radius: float, rows: int = 200) -> "Pixels":
        """A window that reaches `radius` degrees to every side of (l, b)."""
        if not abs(b) <= 90.0 or not 0.0 < radius <= 45.0 or abs(b) + radius > 85.0:
            raise ValueError(
                f"window at l = {l:g}, b = {b:g} of radius {radius:g} degrees: expected a radius "
                "of 45 at most, with |b| + radius <= 85; near the poles take the whole sky"
            )
        l = (l + 180.0) % 360.0 - 180.0
        across = min(radius / np.cos(np.radians(b)), 180.0)
        return cls(
            np.linspace(l - across, l + across, rows + 1),
            np.linspace(b - radius, b + radius, rows + 1),
        )

    @property
    def whole(self) -> bool:
        """Whether this is all of the sky."""
        return bool(np.ptp(self.l_edges) >= 360.0 and np.ptp(self.b_edges) >= 180.0)

    @property
    def longitudes(self) -> Array:
        """Centres (H,)."""
        return 0.5 * (self.l_edges[1:] + self.l_edges[:-1])

    @property
    def latitudes(self) -> Array:
        """Centres (V,)."""
        return 0.5 * (self.b_edges[1:] + self.b_edges[:-1])

    def at(self, distance: float) -> SkyCoord:
        """The centres (V, H) at a distance in pc."""
        l, b = np.meshgrid(self.longitudes, self.latitudes)
        away = np.full(l.shape, distance) * u.pc
        return SkyCoord(l=l * u.deg, b=b * u.deg, distance=away, frame="galactic")


@final
@dataclass(frozen=True, eq=False)
class SkyImage:
    """Values (V, H) on pixels: densities in mag/pc at `distance`, or integrals in mag up to it.

    NaN outside the map. std, coverage and truth where they are known.
    """

    pixels: Pixels
    distance: float
    integrated: bool
    mean: Array
    std: Array | None
    coverage: Array | None
    truth: Array | None


def shell_of(
    density: DustMap, distance: float, pixels: Pixels, truth: DustMap | None = None
) -> SkyImage:
    """The density at a distance from the Sun in pc."""
    _check(density, distance)
    coords = pixels.at(distance)
    known = density.available
    mean = density.query(coords)
    _check_known(mean, f"no place at {distance:g} pc")
    with quietly():  # the mean has told how many places are outside
        std = density.query(coords, mode="std") if Quantity.STD in known else None
        coverage = density.coverage(coords) if Quantity.COVERAGE in known else None
    return SkyImage(
        pixels=pixels,
        distance=distance,
        integrated=False,
        mean=mean,
        std=std,
        coverage=coverage,
        truth=None if truth is None else truth.query(coords),
    )


def extinction_of(
    density: DustMap, distance: float, pixels: Pixels, truth: DustMap | None = None
) -> SkyImage:
    """The extinction A(<d) up to a distance from the Sun in pc; NaN where that leaves the map.

    The standard deviation is that of the stored samples, if there are any.
    """
    _check(density, distance)
    coords = pixels.at(distance)
    several = density.n_samples > 1
    mean = density.query(coords, integrated=True)
    _check_known(mean, f"no line from the Sun to {distance:g} pc")
    with quietly():  # the mean has told how many lines leave the map
        std = density.query(coords, mode="std", integrated=True) if several else None
    return SkyImage(
        pixels=pixels,
        distance=distance,
        integrated=True,
        mean=mean,
        std=std,
        coverage=None,
        truth=None if truth is None else truth.query(coords, integrated=True),
    )


def _check(density: DustMap, distance: float) -> None:
    near, far = density.distance_bounds.to_value(u.pc)
    if not max(near, 0.0) < distance <= far:
        raise ValueError(
            f"distance = {distance:g} pc: expected more than {near:g} and at most {far:g} pc, "
            "where the map is"
        )


def _check_known(mean: Array, what: str) -> None:
    """A picture of nothing is an error."""
    if not np.isfinite(mean).any():
        raise ValueError(f"{what} in this direction is inside the map: choose another")
