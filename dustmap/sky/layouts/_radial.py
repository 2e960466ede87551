"""Bins of distance, equal in the logarithm, and shells at distances of one's choice."""

import math
from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.layouts._box import refuse_sun_outside
from dustmap.sky.maps import AbstractDensityField

#: As many as the published map has; few of them bias integrals that dustmaps makes.
COUNT = 516


@final
@dataclass(frozen=True)
class RadialBins:
    """`count` bins between boundaries at `nearest` and `farthest`, in pc."""

    nearest: float
    farthest: float
    count: int = COUNT

    def __post_init__(self) -> None:
        if not (0 < self.nearest < self.farthest and math.isfinite(self.farthest)):
            raise ValueError(
                f"distances: expected 0 < nearest < farthest in pc, got {self.nearest:g} and "
                f"{self.farthest:g}"
            )
        if self.count < 2:
            raise ValueError(f"distances: expected at least 2 bins, got {self.count}")

    @classmethod
    def of_box(cls, field: AbstractDensityField, count: int = COUNT) -> Self:
        """From 1/20 of the way to the farthest face of the box, and within it, to that face."""
        refuse_sun_outside(field)
        faces = np.abs([field.lower, field.upper])
        farthest = float(faces.max())
        return cls(min(farthest / 20, float(faces.min()) * 0.999), farthest, count)

    @property
    def boundaries(self) -> NDArray[np.float64]:
        """(count + 1,)."""
        return np.geomspace(self.nearest, self.farthest, self.count + 1)

    @property
    def centres(self) -> NDArray[np.float64]:
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
            given = ", ".join(f"{distance:g}" for distance in self.distances) or "none"
            raise ValueError(f"shells: expected ascending distances > 0 in pc, got {given}")

    @property
    def count(self) -> int:
        """How many."""
        return len(self.distances)

    @property
    def centres(self) -> NDArray[np.float64]:
        """The distances (count,)."""
        return np.array(self.distances)
