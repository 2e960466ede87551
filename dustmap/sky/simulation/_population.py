"""Where simulated stars are, and how bright: a disc of stars seen to a limiting magnitude."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.simulation._checks import check_between, check_positive
from dustmap.sky.simulation._dust import SUN_RADIUS


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
