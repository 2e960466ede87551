"""Tiles of the sky: cones from the Sun through HEALPix pixels, with a margin around them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.linalg import chunks
from dustmap.sky._coordinates import cartesian, pixel_directions, pixels_towards
from dustmap.sky.maps._trilinear import chord
from dustmap.sky.stars import AbstractDistances

Array = NDArray[np.float64]
#: Angle in radians between neighbouring points of a border, about. Its great circles run at most
#: an eighth of the square of that, 3e-6, beside the border.
FINE = 0.005
#: A star's line of sight ends where it is beyond with this probability: no more than that part of
#: a ray is cut at a tile's end.
END = 0.999
#: Angle in radians from a cone within which another tile's weight falls where that is nearer than
#: the margin's end, and the part of its reach that its weight keeps, for tiles may be missing.
SEAM, _FAINT = math.radians(10.0), 1e-3
#: Stars, or places, whose angles are in memory at once.
AT_ONCE = 2**18


@final
@dataclass(frozen=True)
class SkyPixel:
    """Pixel 0 <= pixel < 12 nside² in NESTED order, of Galactic directions.

    Examples
    --------
    >>> pixel = SkyPixel.named("1/4")
    >>> pixel.count, pixel.contains(np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    (12, array([ True, False]))
    """

    nside: int
    pixel: int

    def __post_init__(self) -> None:
        if self.nside < 1 or self.nside & (self.nside - 1) or not 0 <= self.pixel < self.count:
            raise UserError(
                f"{self}: expected NSIDE/PIXEL, a power of two and 0 to 12 NSIDE² - 1 (NESTED)"
            )

    def __str__(self) -> str:
        return f"{self.nside}/{self.pixel}"

    @classmethod
    def named(cls, name: str) -> Self:
        """Build from NSIDE/PIXEL, such as 2/17."""
        nside, _, pixel = name.partition("/")
        if not (nside.isdecimal() and pixel.isdecimal()):
            raise UserError(f"{name!r}: expected NSIDE/PIXEL, such as 2/17")
        return cls(int(nside), int(pixel))

    def seed(self, seed: int) -> int:
        """The pixel's own seed, 32 bits, of that of all pixels: their draws are independent."""
        return int(np.random.SeedSequence((seed, self.nside, self.pixel)).generate_state(1)[0])

    @property
    def count(self) -> int:
        """Pixels of this size on the sphere."""
        return 12 * self.nside**2

    def contains(self, directions: Array) -> NDArray[np.bool_]:
        """Return which of the directions (N, 3), of any length but 0, lie in the pixel."""
        return np.asarray(pixels_towards(self.nside, directions) == self.pixel)

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
        return pixel_directions(self.nside, self.pixel)

    @cached_property
    def radius(self) -> float:
        """Angle between the centre and the farthest point of the border."""
        return float(np.arccos((self.border @ self.centre).min()))

    @cached_property
    def _tree(self) -> cKDTree:
        return cKDTree(self.border)

    def angle(self, directions: Array) -> Array:
        """Return angles (N,) in radians from unit vectors (N, 3) to the pixel; 0 inside."""
        outside = ~self.contains(directions)
        angles = np.zeros(len(directions))
        angles[outside] = self._to_border(directions[outside])
        return angles

    def _to_border(self, directions: Array) -> Array:
        """Measure to the nearer of the two great circles that meet in the nearest border point."""
        _, nearest = self._tree.query(directions)
        here = self.border[nearest]
        angles = _angle(directions, here)
        for step in (-1, 1):
            there = self.border[(nearest + step) % len(self.border)]
            angles = np.minimum(angles, _to_arc(directions, here, there))
        return np.asarray(angles)


def _falling(t: Array) -> Array:
    """Return u (N,) at t >= 0, 0 from 1 on."""
    t = np.minimum(t, 1.0)
    return np.asarray(np.maximum(1.0 - t**3 * (10.0 + t * (6.0 * t - 15.0)), 0.0))


def _angle(a: Array, b: Array) -> Array:
    """Return angles (N,) between unit vectors (N, 3), accurate at any angle."""
    half = np.arctan2(np.linalg.norm(a - b, axis=1), np.linalg.norm(a + b, axis=1))
    return np.asarray(2.0 * half, np.float64)


def _to_arc(x: Array, start: Array, end: Array) -> Array:
    """Return angles (N,) to the arc between start and end where x is abreast of it, else π."""
    normal = np.cross(start, end)
    length = np.linalg.norm(normal, axis=1)
    after = np.einsum("ij,ij->i", np.cross(normal, start), x) > 0.0
    before = np.einsum("ij,ij->i", np.cross(end, normal), x) > 0.0
    height = np.abs(np.einsum("ij,ij->i", normal, x)) / length
    return np.asarray(np.where(after & before, np.arcsin(np.minimum(height, 1.0)), np.pi))


@final
@dataclass(frozen=True)
class Tile:
    """All places within `margin` pc of the cone {x : x/|x| in the pixel}.

    The Sun belongs to every cone, so what is nearer than `margin` belongs to every tile. With x
    in a tile so is all that lies between x and the Sun: no line of sight leaves and comes back.

    Examples
    --------
    >>> tile = Tile(SkyPixel(nside=1, pixel=4), margin=100.0)
    >>> tile.influence(np.array([[500.0, 0.0, 0.0], [-500.0, 0.0, 0.0]]))
    (array([1., 0.]), array([1., 0.]))
    """

    pixel: SkyPixel
    margin: float

    def __post_init__(self) -> None:
        if not (self.margin > 0.0 and math.isfinite(self.margin)):
            raise UserError(f"margin of a tile: expected more than 0 pc, got {self.margin:g}")

    def distances(self, points: Array) -> Array:
        """Measure from points (N, 3) in pc to the cone (N,): r sin θ, θ the angle to the pixel; r
        where θ > 90°."""
        r = np.linalg.norm(points, axis=1)
        away = r > 0.0
        distances = np.zeros(len(points))
        angle = self.pixel.angle(points[away] / r[away, None])
        distances[away] = r[away] * np.sin(np.minimum(angle, 0.5 * np.pi))
        return distances

    def influence(self, points: Array) -> tuple[Array, Array]:
        """Return reach and weight (N,), 1 in the cone and 0 at the end of the margin.

            reach = u(d / margin),   weight = max(u(max(d / margin, sin θ / sin α)), 0.001 reach),

            u(t) = 1 − 10 t³ + 15 t⁴ − 6 t⁵,    u' = u'' = 0 at t = 0 and 1,

        d the distance to the cone and θ the angle to it. All tiles have what is near the Sun, and
        the one in whose cone a place is has the stars behind it: at α = 10° others know little of
        the rays through it, however near these are. The share of a tile is its weight over the sum
        of all, of which one is 1 everywhere.
        """
        reach, weight = np.zeros(len(points)), np.zeros(len(points))
        near = self._in_cap(points)
        distances, r = self.distances(points[near]), np.linalg.norm(points[near], axis=1)
        sine = np.divide(distances, r, out=np.zeros_like(r), where=r > 0.0)
        part, turned = distances / self.margin, sine / math.sin(SEAM)
        reach[near] = _falling(part)
        weight[near] = np.maximum(_falling(np.maximum(part, turned)), _FAINT * reach[near])
        return reach, weight

    def _in_cap(self, points: Array) -> NDArray[np.bool_]:
        """Return which points may be in the tile: those in the cap around the pixel."""
        r = np.linalg.norm(points, axis=1)
        cosine = points @ self.pixel.centre / np.where(r > 0.0, r, 1.0)
        beyond = np.arccos(np.clip(cosine, -1.0, 1.0)) - self.pixel.radius
        sine = np.sin(np.clip(beyond, 0.0, 0.5 * np.pi))
        return np.asarray(r * sine <= self.margin * (1.0 + 1e-9))

    def needs(
        self, l: Array, b: Array, distances: AbstractDistances, grid: RegularGrid
    ) -> NDArray[np.bool_]:
        """Return which stars at Galactic l, b (N,) in degrees have their whole ray in the tile.

        A ray ends at the star, or where it leaves the box of the whole `grid`; for uncertain
        distances, where the star is beyond with a probability of 1e-3.
        """
        needed = np.zeros(len(l), np.bool_)
        for part in chunks(len(l), AT_ONCE):
            end = distances[part].median
            if not distances.exact:
                end = np.maximum(end, distances[part].quantile(np.array([END]))[:, 0])
            ahead = cartesian(l[part], b[part], np.ones(len(end)))
            end = np.minimum(end, _chord(ahead, np.array(grid.lower), np.array(grid.upper))[1])
            needed[part] = self.distances(ahead * end[:, None]) <= self.margin
        return needed

    def part_of(self, grid: RegularGrid) -> RegularGrid:
        """Find the smallest box of nodes of `grid` that surely holds the tile's part of it.

        Of the cone within the box made larger by the margin, made larger by the margin again.
        """
        lower, upper = np.array(grid.lower), np.array(grid.upper)
        corners = _corners_of_cone(self.pixel, lower - self.margin, upper + self.margin)
        misses = UserError(
            f"tile {self.pixel}: its cone does not meet the box {grid.lower} to {grid.upper} pc; "
            "the sky needs no such tile"
        )
        if len(corners) == 0:
            raise misses
        # Between two points of the border a face is met at most so far off, in pc.
        slack = self.margin + FINE * float(np.linalg.norm(corners, axis=1).max())
        spacing = np.array(grid.spacing)
        first = np.floor((corners.min(0) - slack - lower) / spacing).astype(int)
        last = np.ceil((corners.max(0) + slack - lower) / spacing).astype(int)
        first, last = np.maximum(first, 0), np.minimum(last, np.array(grid.shape) - 1)
        if bool((last < first).any()):
            raise misses
        # A grid has two nodes along every axis, or more.
        last = np.maximum(last, np.minimum(first + 1, np.array(grid.shape) - 1))
        first = np.minimum(first, last - 1)
        return RegularGrid(
            tuple((lower + first * spacing).tolist()),
            grid.spacing,
            tuple((last - first + 1).tolist()),
        )


def _chord(ahead: Array, lower: Array, upper: Array) -> tuple[Array, Array]:
    """Return distances (N,) where rays from the Sun enter and leave the box; 0 if they miss it."""
    near, far = chord(lower, upper, ahead)
    hit = (near <= far) & (far > 0.0)
    return np.where(hit, np.maximum(near, 0.0), 0.0), np.where(hit, far, 0.0)


def _corners_of_cone(pixel: SkyPixel, lower: Array, upper: Array) -> Array:
    """Return ends (P, 3) in the box of the rays of the border, and its corners in the cone."""
    # Of a box that the cone surrounds no face is met by the border but all corners are inside; of
    # a box beside the Sun the ray through the centre may be all there is.
    ahead = np.concatenate([pixel.border, pixel.centre[None]])
    near, far = _chord(ahead, lower, upper)
    hit = far > 0.0
    ends = [ahead[hit] * distance[hit, None] for distance in (near, far)]
    mesh = np.meshgrid(*zip(lower, upper, strict=True), indexing="ij")
    corners = np.stack([values.ravel() for values in mesh], axis=-1)
    corners = corners[np.linalg.norm(corners, axis=1) > 0.0]
    return np.concatenate([*ends, corners[pixel.contains(corners)]])
