"""A cone from the Sun with a margin around it."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import cartesian
from dustmap.sky.stars import AbstractDistances
from dustmap.sky.tiles._pixel import FINE, SkyPixel

Array = NDArray[np.float64]

#: A star's line of sight ends where it is beyond with this probability: no more than that part of
#: a ray is cut at a tile's end.
END = 0.999
#: Stars, or places, whose angles are in memory at once.
AT_ONCE = 2**18


@final
@dataclass(frozen=True)
class Tile:
    """All places within `margin` pc of the cone {x : x/|x| in the pixel}.

    The Sun belongs to every cone, so what is nearer than `margin` belongs to every tile. With x
    in a tile so is all that lies between x and the Sun: no line of sight leaves and comes back.
    """

    pixel: SkyPixel
    margin: float

    def __post_init__(self) -> None:
        if not (self.margin > 0.0 and math.isfinite(self.margin)):
            raise ValueError(f"margin of a tile: expected more than 0 pc, got {self.margin:g}")

    def distances(self, points: Array) -> Array:
        """From points (N, 3) in pc to the cone (N,): r sin θ, θ the angle to the pixel, and r
        where θ > 90°."""
        r = np.linalg.norm(points, axis=1)
        away = r > 0.0
        found = np.zeros(len(points))
        angle = self.pixel.angle(points[away] / r[away, None])
        found[away] = r[away] * np.sin(np.minimum(angle, 0.5 * np.pi))
        return found

    def influence(self, points: Array) -> Array:
        """u(t) (N,) at t = distance / margin: 1 in the cone, 0 at the end of the margin.

            u = 1 − 10 t³ + 15 t⁴ − 6 t⁵,    u' = u'' = 0 at both ends.

        The weight of a tile is u over the sum of u of all tiles, of which one is 1 everywhere.
        """
        found = np.zeros(len(points))
        near = self._perhaps(points)
        t = np.minimum(self.distances(points[near]) / self.margin, 1.0)
        found[near] = np.maximum(1.0 - t**3 * (10.0 + t * (6.0 * t - 15.0)), 0.0)
        return found

    def _perhaps(self, points: Array) -> NDArray[np.bool_]:
        """Which points may be in the tile, by the cap around the pixel: cheap, and no miss."""
        r = np.linalg.norm(points, axis=1)
        cosine = points @ self.pixel.centre / np.where(r > 0.0, r, 1.0)
        beyond = np.arccos(np.clip(cosine, -1.0, 1.0)) - self.pixel.radius
        sine = np.sin(np.clip(beyond, 0.0, 0.5 * np.pi))
        return np.asarray(r * sine <= self.margin * (1.0 + 1e-9))

    def needs(
        self, l: Array, b: Array, distances: AbstractDistances, grid: RegularGrid
    ) -> NDArray[np.bool_]:
        """Which stars at Galactic l, b (N,) in degrees have their whole ray in the tile.

        A ray ends at the star, or where it leaves the box of the whole `grid`; for uncertain
        distances, where the star is beyond with a probability of 1e-3.
        """
        found = [
            self._needs(l[part], b[part], distances[part], grid)
            for start in range(0, len(l), AT_ONCE)
            for part in (slice(start, start + AT_ONCE),)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.bool_)

    def _needs(
        self, l: Array, b: Array, distances: AbstractDistances, grid: RegularGrid
    ) -> NDArray[np.bool_]:
        end = distances.median
        if not distances.exact:
            end = np.maximum(end, distances.quantile(np.array([END]))[:, 0])
        ahead = cartesian(l, b, np.ones(len(l)))
        end = np.minimum(end, _exits(ahead, np.array(grid.lower), np.array(grid.upper)))
        return np.asarray(self.distances(ahead * end[:, None]) <= self.margin)

    def part_of(self, grid: RegularGrid) -> RegularGrid:
        """The smallest box of nodes of `grid` that surely holds what the tile has of its box.

        Of the cone within the box made larger by the margin, made larger by the margin again.
        """
        lower, upper = np.array(grid.lower), np.array(grid.upper)
        corners = _corners_of_cone(self.pixel, lower - self.margin, upper + self.margin)
        if len(corners) == 0:
            raise self._misses(grid)
        # Between two points of the border a face is met at most so far off, in pc.
        slack = self.margin + FINE * float(np.linalg.norm(corners, axis=1).max())
        spacing = np.array(grid.spacing)
        first = np.floor((corners.min(0) - slack - lower) / spacing).astype(int)
        last = np.ceil((corners.max(0) + slack - lower) / spacing).astype(int)
        first, last = np.maximum(first, 0), np.minimum(last, np.array(grid.shape) - 1)
        if bool((last < first).any()):
            raise self._misses(grid)
        # A grid has two nodes along every axis, or more.
        last = np.maximum(last, np.minimum(first + 1, np.array(grid.shape) - 1))
        first = np.minimum(first, last - 1)
        return RegularGrid(
            tuple((lower + first * spacing).tolist()),
            grid.spacing,
            tuple((last - first + 1).tolist()),
        )

    def _misses(self, grid: RegularGrid) -> ValueError:
        return ValueError(
            f"tile {self.pixel}: its cone does not meet the box {grid.lower} to {grid.upper} pc; "
            "the sky needs no such tile"
        )


def _exits(ahead: Array, lower: Array, upper: Array) -> Array:
    """How far rays from the Sun along `ahead` (N, 3) are in the box, 0 if they miss it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = np.stack([lower / ahead, upper / ahead])
    # Along a face 0/0 is in the box or not wherever one is; beside it ±∞ settle the matter.
    near = np.where(np.isnan(ends), -np.inf, ends).min(0).max(1)
    far = np.where(np.isnan(ends), np.inf, ends).max(0).min(1)
    return np.asarray(np.where((near <= far) & (far > 0.0), far, 0.0))


def _entries(ahead: Array, lower: Array, upper: Array) -> Array:
    """Where rays from the Sun enter the box."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = np.stack([lower / ahead, upper / ahead])
    return np.asarray(np.maximum(np.where(np.isnan(ends), -np.inf, ends).min(0).max(1), 0.0))


def _corners_of_cone(pixel: SkyPixel, lower: Array, upper: Array) -> Array:
    """Points (P, 3) whose bounding box is that of the cone in the box, but for its round border.

    Where the rays of the border enter and leave the box, and the corners of the box.
    """
    far = _exits(pixel.border, lower, upper)
    hit = far > 0.0
    border = pixel.border[hit]
    found = [
        border * far[hit, None],
        border * _entries(border, lower, upper)[:, None],
        _corners(lower, upper, pixel),
    ]
    # Of a box that the cone surrounds no face is met by the border but all corners are inside; of
    # a box beside the Sun a ray inside the cone may be all there is.
    centre = pixel.centre[None]
    exit_of_centre = _exits(centre, lower, upper)
    if exit_of_centre[0] > 0.0:
        found += [
            centre * exit_of_centre[:, None],
            centre * _entries(centre, lower, upper)[:, None],
        ]
    return np.concatenate(found)


def _corners(lower: Array, upper: Array, pixel: SkyPixel) -> Array:
    """Corners of the box in the cone."""
    mesh = np.meshgrid(*zip(lower, upper, strict=True), indexing="ij")
    corners = np.stack([values.ravel() for values in mesh], axis=-1)
    corners = corners[np.linalg.norm(corners, axis=1) > 0.0]
    return np.asarray(corners[pixel.contains(corners)])
