"""A sky that no kernel has drawn: balls of dust with sharp edges in thin dust."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
THIN, CLOUD, ERROR = 5e-4, 8e-3, 0.02


@final
@dataclass(frozen=True, eq=False)
class CloudySky:
    """centres (C, 3) in pc of clouds of one radius; extinctions are lengths of chords."""

    centres: Array
    radius: float

    @staticmethod
    def of(
        size: tuple[float, float, float], filled: float, radius: float, seed: int
    ) -> "CloudySky":
        """Clouds at random in a box, which would fill that part of it side by side."""
        volume = 4.0 / 3.0 * np.pi * radius**3
        count = round(filled * np.prod(size) / volume)
        half = 0.5 * np.array(size)
        return CloudySky(np.random.default_rng(seed).uniform(-half, half, (count, 3)), radius)

    def extinctions(self, places: Array) -> Array:
        """A (N,) from the Sun to places (N, 3)."""
        distance = np.linalg.norm(places, axis=1)
        towards = places / distance[:, None]
        along = towards @ self.centres.T  # (N, C)
        aside = (self.centres**2).sum(1) - along**2
        half = np.sqrt(np.maximum(self.radius**2 - aside, 0.0))
        far, near = along + half, along - half
        chord = np.clip(far, 0.0, distance[:, None]) - np.clip(near, 0.0, distance[:, None])
        return np.asarray(THIN * distance + CLOUD * chord.sum(1))


def places_in(size: tuple[float, float, float], count: int, seed: int) -> Array:
    """Places (count, 3) at random in a box around the Sun."""
    half = 0.5 * np.array(size)
    return np.random.default_rng(seed).uniform(-half, half, (count, 3))


def write_cloudy(path: Path, sky: CloudySky, places: Array, seed: int) -> None:
    """A catalog of stars at places, whose distances are exact."""
    noise = ERROR * np.random.default_rng(seed).standard_normal(len(places))
    measured = sky.extinctions(places) + noise
    columns = np.c_[places, measured, np.full(len(places), ERROR)]
    header = "x,y,z,extinction,extinction_error"
    np.savetxt(path, columns, delimiter=",", header=header, comments="")
