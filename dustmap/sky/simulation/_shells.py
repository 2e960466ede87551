"""Bubbles: cavities blown into the dust, and the walls that hold what was swept up."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dustmap.gp import RegularGrid
from dustmap.sky.simulation._checks import check_between, check_positive

#: Tried for a bubble before it is left to overlap.
PLACES = 50


@final
@dataclass(frozen=True, eq=False)
class Shell:
    """One bubble: centre (3,), mean radius and width of its wall in pc.

    Its radius in the direction n is R(n) = radius (1 + nᵀ Q n), `shape` Q (3, 3) symmetric without
    trace. `remaining` is the density inside over that before.
    """

    centre: NDArray[np.float64]
    radius: float
    width: float
    remaining: float
    shape: NDArray[np.float64]

    def factor(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """What multiplies the density at points (..., 3); > 0, and 1 far outside.

        c + (1 − c) Φ((r − R)/w) + a exp(−(r − R)²/2w²) with c what remains, w the width, and a such
        that ∫ factor r² dr is what it was: the wall holds what the cavity has lost.
        """
        offset = points - self.centre
        r = np.linalg.norm(offset, axis=-1)
        n = offset / np.maximum(r, 1e-9)[..., None]
        R = self.radius * (1.0 + np.einsum("...i,ij,...j->...", n, self.shape, n))
        w, gone = self.width, 1.0 - self.remaining
        wall = gone * (R**3 + 3 * R * w**2) / (3 * math.sqrt(2 * math.pi) * w * (R**2 + w**2))
        u = (r - R) / w
        return np.asarray(self.remaining + gone * ndtr(u) + wall * np.exp(-0.5 * u**2))


@final
@dataclass(frozen=True)
class Bubbles:
    """The Local Bubble around the Sun, and others: what their radii and places are drawn from.

    local_radius: of the Local Bubble, in pc, within 10 % (0: there is none); offset: standard
    deviation of its centre from the Sun along each axis. others: how many more in the box, of radii
    between `smallest` and `largest`, even in their logarithm, with centres `height` around the
    plane and clear of the Local Bubble where there is room. wall: width over radius; remaining:
    density inside over that before; distortion: of the radius over directions, as a fraction.
    """

    local_radius: float = 120.0
    offset: float = 15.0
    others: int = 5
    smallest: float = 30.0
    largest: float = 80.0
    height: float = 40.0
    wall: float = 0.12
    remaining: float = 0.1
    distortion: float = 0.06

    def __post_init__(self) -> None:
        check_positive(self, "smallest", "largest", "height", "wall")
        check_between(self, 0.0, math.inf, "local_radius", "offset", "others")
        check_between(self, 1e-6, 1.0, "remaining")
        check_between(self, 0.0, 0.2, "distortion")
        if self.smallest > self.largest:
            raise ValueError(
                f"smallest must be at most largest = {self.largest:g}, got {self.smallest:g}"
            )

    def draw(
        self, grid: RegularGrid, sun_height: float, rng: np.random.Generator
    ) -> tuple[Shell, ...]:
        """The Local Bubble, if any, then the others, anywhere in the box."""
        found = []
        if self.local_radius > 0:
            radius = self.local_radius * rng.uniform(0.9, 1.1)
            found.append(self._shell(rng.normal(0.0, self.offset, 3), radius, rng))
        local = tuple(found)
        for _ in range(self.others):
            radius = float(np.exp(rng.uniform(math.log(self.smallest), math.log(self.largest))))
            centre = self._place(grid, sun_height, radius, local, rng)
            found.append(self._shell(centre, radius, rng))
        return tuple(found)

    def _place(
        self,
        grid: RegularGrid,
        sun_height: float,
        radius: float,
        local: tuple[Shell, ...],
        rng: np.random.Generator,
    ) -> NDArray[np.float64]:
        low, high = np.array(grid.lower), np.array(grid.upper)
        centre = np.zeros(3)
        for _ in range(PLACES):
            centre = rng.uniform(low, high)
            centre[2] = np.clip(rng.normal(-sun_height, self.height), low[2], high[2])
            gaps = [np.linalg.norm(centre - other.centre) - other.radius for other in local]
            if all(gap > radius for gap in gaps):
                break
        return centre

    def _shell(self, centre: NDArray[np.float64], radius: float, rng: np.random.Generator) -> Shell:
        a = rng.normal(0.0, self.distortion, (3, 3))
        symmetric = (a + a.T) / 2
        shape = symmetric - np.trace(symmetric) / 3 * np.eye(3)
        return Shell(centre, radius, self.wall * radius, self.remaining, shape)
