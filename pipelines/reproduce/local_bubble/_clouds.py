"""Distances of clouds along sight lines of a map, and those that are published.

A cloud is where the dust is densest along its sight line: ρ(s) is averaged over a cone and smoothed
by a Gaussian, and of every posterior sample the place of its maximum is taken. Its median over the
samples is the distance, and half of the range from the 16th to the 84th percentile its error.
Beside it stands the place where A(<s) has risen to half of what it is at the end of the sight line.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import astropy.units as u
import numpy as np
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from dustmap.sky import DustMap

Array: TypeAlias = NDArray[np.float64]
#: The half of the sight lines of Zucker et al. (2020) that the repository has.
PUBLISHED = Path(__file__).resolve().parents[3] / "catalogs" / "clouds_zucker2020.csv"
#: Steps along a sight line, nearest place that is asked, radius of the cone in degrees.
STEP, NEAREST, RADIUS = 2.5, 30.0, 1.5
#: Width of the Gaussian in pc.
SMOOTHING = 10.0
#: Clouds within so many pc of the box's faces have no dust behind them that would end them.
MARGIN = 20.0


@final
@dataclass(frozen=True)
class Cloud:
    """A published sight line through a cloud: name, l, b in degrees, distance and error in pc."""

    name: str
    l: float
    b: float
    distance: float
    error: float

    def position(self) -> Array:
        """Return X, Y, Z (3,) in pc."""
        place = SkyCoord(self.l * u.deg, self.b * u.deg, self.distance * u.pc, frame="galactic")
        return np.asarray(place.cartesian.xyz.to_value(u.pc), np.float64)


def read_clouds(path: Path = PUBLISHED) -> list[Cloud]:
    """Read name, l, b and the percentiles of the distance of a table of sight lines."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        Cloud(
            row["name"],
            float(row["l"]),
            float(row["b"]),
            float(row["distance_pc"]),
            0.5 * (float(row["distance_p84"]) - float(row["distance_p16"])),
        )
        for row in rows
    ]


def inside(density: DustMap, clouds: Sequence[Cloud]) -> list[Cloud]:
    """Return the clouds in the map, `MARGIN` or more from its faces."""
    lower, upper = density.bounds.to_value(u.pc)
    return [
        cloud
        for cloud in clouds
        if ((cloud.position() >= lower + MARGIN) & (cloud.position() <= upper - MARGIN)).all()
    ]


@final
@dataclass(frozen=True, eq=False)
class Profile:
    """Distances s (K,) in pc and ρ of every sample (K, S) in mag/pc, averaged over a cone."""

    s: Array
    density: Array

    def peak(self) -> tuple[float, float]:
        """Return where ρ is largest, and the error, in pc."""
        step = float(self.s[1] - self.s[0])
        smooth = gaussian_filter1d(self.density, SMOOTHING / step, axis=0, mode="nearest")
        return _summary(self.s[smooth.argmax(0)])

    def half_rise(self) -> tuple[float, float]:
        """Return where A(<s) is half of A at the end, and the error, in pc."""
        risen = np.cumsum(self.density, 0)
        places = [np.interp(0.5 * column[-1], column, self.s) for column in risen.T]
        return _summary(np.array(places))

    def extinction(self) -> float:
        """Return A at the end of the sight line, in mag."""
        return float(self.density.sum(0).mean() * (self.s[1] - self.s[0]))


def profile(density: DustMap, cloud: Cloud) -> Profile:
    """Read the samples of a map along seven rays of a cone towards a cloud, as far as it goes."""
    middle = SkyCoord(cloud.l * u.deg, cloud.b * u.deg, frame="galactic")
    around = middle.directional_offset_by(np.arange(0, 360, 60) * u.deg, RADIUS * u.deg)
    l = np.append(cloud.l, around.l.deg)
    b = np.append(cloud.b, around.b.deg)
    s = np.arange(NEAREST, density.distance_bounds[-1].to_value(u.pc), STEP)
    rays = SkyCoord(l[:, None] * u.deg, b[:, None] * u.deg, s * u.pc, frame="galactic")
    values = density.query(rays, mode="samples").mean(0)
    known = np.isfinite(values).all(1)
    return Profile(s[known], values[known])


def _summary(places: Array) -> tuple[float, float]:
    """Return the median and half of the central 68 %."""
    low, middle, high = np.percentile(places, [16, 50, 84])
    return float(middle), float(0.5 * (high - low))
