"""Simulated stars: where they are, how bright, and what a survey measures of them.

A disc of stars seen to a limiting magnitude, with extinctions and parallaxes whose errors grow as
those of a survey do.
"""

import math
from dataclasses import dataclass, fields
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.simulation._dust import SUN_RADIUS, check_between, check_positive

#: Half of the variance of an extinction's error comes from photons at this magnitude.
TYPICAL_MAGNITUDE = 15.0
#: Behind so much dust no survey sees a star, and errors need not overflow.
UNSEEN = 40.0


@final
@dataclass(frozen=True)
class Candidates:
    """Stars that would be seen were there no dust: positions (N, 3) in pc, magnitude (N,)."""

    positions: NDArray[np.float64]
    magnitude: NDArray[np.float64]


@final
@dataclass(frozen=True)
class Population:
    """Stars of number density ∝ exp(−|z − z₀|/height − R/length), z₀ = −sun_height, in pc.

    Absolute magnitudes M are between brightest and faintest with density ∝ 10^(slope · M). A star
    enters the catalog if its apparent magnitude, extinction included, is at most `limit`.
    """

    limit: float = 17.5
    brightest: float = -1.0
    faintest: float = 12.0
    slope: float = 0.15
    height: float = 300.0
    length: float = 2600.0
    sun_height: float = 20.8

    def __post_init__(self) -> None:
        check_positive(self, "slope", "height", "length")
        check_between(self, -1000.0, 1000.0, "sun_height")
        check_between(self, self.brightest, math.inf, "faintest")
        check_between(self, self.brightest, math.inf, "limit")

    def candidates(self, grid: RegularGrid, rng: np.random.Generator, tries: int) -> Candidates:
        """Those of `tries` places, uniform in the grid's box, that hold a star bright enough."""
        positions = rng.uniform(grid.lower, grid.upper, (tries, 3))
        keep, shine = rng.uniform(size=(2, tries))
        distance = np.linalg.norm(positions, axis=-1)
        # The faintest absolute magnitude that is seen from there, if nothing is in between.
        modulus = 5 * np.log10(np.maximum(distance, 1e-3) / 10)
        reach = np.clip(self.limit - modulus, self.brightest, self.faintest)
        seen = self._below(reach) / self._below(np.array(self.faintest))
        kept = keep < self._relative_density(grid, positions) * seen
        # The inverse of the distribution of M, cut at what is seen.
        low = 10 ** (self.slope * self.brightest)
        absolute = np.log10(low + shine * self._below(reach)) / self.slope
        return Candidates(positions[kept], (absolute + modulus)[kept])

    def _below(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """Stars brighter than an absolute magnitude, in units of slope · ln 10 of them."""
        return np.asarray(10 ** (self.slope * magnitude) - 10 ** (self.slope * self.brightest))

    def _relative_density(
        self, grid: RegularGrid, positions: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Number density over its largest possible value in the box."""
        x, y, z = positions.T
        radius = np.hypot(SUN_RADIUS - x, y)
        inner = max(0.0, SUN_RADIUS - grid.upper[0])
        exponent = np.abs(z + self.sun_height) / self.height + (radius - inner) / self.length
        return np.asarray(np.exp(-exponent))


@final
@dataclass(frozen=True, eq=False)
class Measured:
    """parallax and its error (N,) in mas, extinction and its error (N,) in mag, outlier (N,)."""

    parallax: NDArray[np.float64]
    parallax_error: NDArray[np.float64]
    extinction: NDArray[np.float64]
    extinction_error: NDArray[np.float64]
    outlier: NDArray[np.bool_]

    def __getitem__(self, index: NDArray[np.bool_]) -> Self:
        """The stars under a mask."""
        return type(self)(**{part.name: getattr(self, part.name)[index] for part in fields(self)})


@final
@dataclass(frozen=True)
class Measurements:
    """Errors that grow with magnitude, and outliers among the extinctions.

    The error of an extinction is error · √((1 + 10^(0.4 (G − 15)))/2) mag, times a factor from star
    to star of which `scatter` is the standard deviation of the logarithm. The error of a parallax
    is parallax_scale · √(40 + 800 z + 30 z²) µas with z = 10^(0.4 (max(G, 13) − 15)), Gaia's of
    its third release for a scale of 1. A fraction `outliers` of the extinctions is off by
    `outlier_size` of its errors more, normally distributed.
    """

    error: float = 0.03
    scatter: float = 0.3
    parallax_scale: float = 1.0
    outliers: float = 0.01
    outlier_size: float = 10.0

    def __post_init__(self) -> None:
        check_positive(self, "error", "parallax_scale", "outlier_size")
        check_between(self, 0.0, 3.0, "scatter")
        check_between(self, 0.0, 0.5, "outliers")

    def parallax_error(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """In mas (N,)."""
        z = 10 ** (0.4 * (np.clip(magnitude, 13.0, UNSEEN) - 15.0))
        return np.asarray(1e-3 * self.parallax_scale * np.sqrt(40 + 800 * z + 30 * z**2))

    def extinction_error(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """In mag (N,), that of the typical star of a magnitude."""
        photons = 10 ** (0.4 * (np.minimum(magnitude, UNSEEN) - TYPICAL_MAGNITUDE))
        return np.asarray(self.error * np.sqrt((1 + photons) / 2))

    def measure(
        self,
        distance: NDArray[np.float64],
        extinction: NDArray[np.float64],
        magnitude: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> Measured:
        """Of stars at `distance` in pc behind `extinction` in mag, with apparent magnitudes."""
        normal = rng.standard_normal((4, len(distance)))
        outlier = rng.uniform(size=len(distance)) < self.outliers
        parallax_error = self.parallax_error(magnitude)
        error = self.extinction_error(magnitude) * np.exp(self.scatter * normal[2])
        off = normal[1] + np.where(outlier, self.outlier_size * normal[3], 0.0)
        return Measured(
            parallax=1000.0 / distance + parallax_error * normal[0],
            parallax_error=parallax_error,
            extinction=extinction + error * off,
            extinction_error=error,
            outlier=outlier,
        )
