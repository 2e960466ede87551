"""A HEALPix pixel as a part of the sphere, and how far directions are from it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

Array = NDArray[np.float64]

#: Angle in radians between neighbouring points of a border, about. Its great circles run at most
#: an eighth of the square of that, 3e-6, beside the border.
FINE = 0.005


@final
@dataclass(frozen=True)
class SkyPixel:
    """Pixel 0 <= pixel < 12 nside² in NESTED order, of Galactic directions."""

    nside: int
    pixel: int

    def __post_init__(self) -> None:
        if self.nside < 1 or self.nside & (self.nside - 1) or not 0 <= self.pixel < self.count:
            raise ValueError(
                f"{self}: expected NSIDE/PIXEL, a power of two and 0 to 12 NSIDE² - 1 (NESTED)"
            )

    def __str__(self) -> str:
        return f"{self.nside}/{self.pixel}"

    @classmethod
    def named(cls, name: str) -> Self:
        """From NSIDE/PIXEL, such as 2/17."""
        nside, _, pixel = name.partition("/")
        if not (nside.isdecimal() and pixel.isdecimal()):
            raise ValueError(f"{name!r}: expected NSIDE/PIXEL, such as 2/17")
        return cls(int(nside), int(pixel))

    @property
    def count(self) -> int:
        """Pixels of this size on the sphere."""
        return 12 * self.nside**2

    def contains(self, directions: Array) -> NDArray[np.bool_]:
        """Which of the directions (N, 3), of any length but 0, lie in the pixel."""
        import healpy

        x, y, z = directions.T
        return np.asarray(healpy.vec2pix(self.nside, x, y, z, nest=True) == self.pixel)

    @cached_property
    def border(self) -> Array:
        """Unit vectors (P, 3) around the pixel; each belongs to the next by a great circle."""
        import healpy

        steps = round(np.sqrt(4.0 * np.pi / self.count) / FINE)
        around = healpy.boundaries(self.nside, self.pixel, step=steps, nest=True)
        return np.array(around.T, np.float64, order="C")

    @cached_property
    def centre(self) -> Array:
        """Unit vector (3,)."""
        import healpy

        return np.array(healpy.pix2vec(self.nside, self.pixel, nest=True))

    @cached_property
    def radius(self) -> float:
        """Angle between the centre and the farthest point of the border."""
        return float(np.arccos((self.border @ self.centre).min()))

    @cached_property
    def _tree(self) -> cKDTree:
        return cKDTree(self.border)

    def angle(self, directions: Array) -> Array:
        """Angles (N,) in radians from unit vectors (N, 3) to the pixel; 0 inside."""
        outside = ~self.contains(directions)
        found = np.zeros(len(directions))
        found[outside] = self._to_border(directions[outside])
        return found

    def _to_border(self, directions: Array) -> Array:
        """To the nearer of the two great circles that meet in the nearest point of the border."""
        if len(directions) == 0:
            return np.zeros(0)
        _, nearest = self._tree.query(directions)
        here = self.border[nearest]
        found = _angle(directions, here)
        for step in (-1, 1):
            there = self.border[(nearest + step) % len(self.border)]
            found = np.minimum(found, _to_arc(directions, here, there))
        return np.asarray(found)


def _angle(a: Array, b: Array) -> Array:
    """Between unit vectors (N, 3); accurate at any angle."""
    half = np.arctan2(np.linalg.norm(a - b, axis=1), np.linalg.norm(a + b, axis=1))
    return np.asarray(2.0 * half, np.float64)


def _to_arc(x: Array, start: Array, end: Array) -> Array:
    """Angles (N,) to the great circle between start and end where x is beside it, else π."""
    normal = np.cross(start, end)
    length = np.linalg.norm(normal, axis=1)
    after = np.einsum("ij,ij->i", np.cross(normal, start), x) > 0.0
    before = np.einsum("ij,ij->i", np.cross(end, normal), x) > 0.0
    height = np.abs(np.einsum("ij,ij->i", normal, x)) / length
    return np.asarray(np.where(after & before, np.arcsin(np.minimum(height, 1.0)), np.pi))
