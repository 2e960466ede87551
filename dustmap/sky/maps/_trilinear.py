"""Trilinear interpolation in a map's cubes, and its integrals along rays from the Sun.

Within a cell the density along a ray is a cubic of the distance, which two points of Gauss and
Legendre integrate exactly; a ray is cut wherever it enters another cell.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dustmap.gp import RegularGrid
from dustmap.gp._grid import EDGE_SLACK
from dustmap.sky.maps._between import CellVariance
from dustmap.sky.maps._cubes import AbstractCubes, Box, Cube
from dustmap.sky.maps._quantities import PERCENTILES, Quantity, percentiles, standard_deviation

Floats: TypeAlias = NDArray[np.float64]
Values: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
#: Places interpolated at once: index and weights of more would leave the cache.
_CHUNK = 65_536
#: Voxels per axis of the blocks that are read for a few places.
_BLOCK = 64
#: A cube is read whole where blocks would be more than this part of it.
_PART = 0.25
#: Points of all rays that are held at once; places along one line of sight at most.
_POINTS, _MOST_ALONG = 2**21, 600
#: Steps of half a voxel before and behind, over which the reach of data is averaged.
_AROUND, _GAUSS = 4, 0.5 / math.sqrt(3.0)


def within_box(grid: RegularGrid, positions: Floats) -> Flags:
    """Tell which places (N, D) lie in the box that the nodes span, (N,), as `grid.contains`.

    Examples
    --------
    >>> within_box(RegularGrid((0.0,), (1.0,), (3,)), np.array([[1.5], [2.5]]))
    array([ True, False])
    """
    slack = EDGE_SLACK * np.array(grid.spacing)
    inside = (positions >= grid.lower - slack) & (positions <= grid.upper + slack)
    return np.asarray(inside.all(-1))


@final
@dataclass(frozen=True, eq=False)
class Cells:
    """N places within the box of voxel centres.

    cell (N, 3) int64: lower corners in x, y, z; offset (N, 3): from there, in [0, 1].
    """

    cell: Indices
    offset: Values

    @classmethod
    def of(cls, grid: RegularGrid, positions: Floats) -> Self:
        """Return cells of places X, Y, Z (N, 3) in pc; what is beyond a face counts as on it."""
        last = np.array(grid.shape, np.float64) - 1.0
        where = np.clip((positions - np.array(grid.lower)) / np.array(grid.spacing), 0.0, last)
        cell = np.minimum(np.floor(where), last - 1.0)
        return cls(cell.astype(np.int64), (where - cell).astype(np.float32))

    def __len__(self) -> int:
        return len(self.cell)

    def part(self, index: slice | Indices) -> "Cells":
        """Return some of the places."""
        return Cells(self.cell[index], self.offset[index])

    def corners(self, grid: RegularGrid) -> Floats:
        """Places X, Y, Z of the 8 corners (N, 8, 3), x the fastest."""
        shifts = np.array(list(itertools.product((0, 1), repeat=3)))[:, ::-1]
        corners = self.cell[:, None] + shifts
        return np.asarray(grid.lower + corners * np.array(grid.spacing), np.float64)

    @property
    def weights(self) -> Values:
        """Weights of the 8 corners (N, 8), x the fastest."""
        x, y, z = (np.stack([1.0 - t, t], axis=-1) for t in self.offset.T)
        product: Values = z[:, :, None, None] * y[:, None, :, None] * x[:, None, None, :]
        return product.reshape(len(self), 8)


#: What is made of a cube (z, y, x) at places.
Take: TypeAlias = Callable[[Values, Cells], Values]


@final
class CubeReader:
    """Interpolates in the cubes of a map. Few places read the blocks they lie in; many read the
    whole cube, which is kept while `memory` bytes hold it."""

    def __init__(self, cubes: AbstractCubes, memory: int) -> None:
        self.cubes = cubes
        self._memory = memory
        self._kept: OrderedDict[Cube, Values] = OrderedDict()

    def whole(self, cube: Cube) -> Values:
        """Return all voxels (z, y, x)."""
        if cube in self._kept:
            self._kept.move_to_end(cube)
            return self._kept[cube]
        values = self._read(cube, (slice(None), slice(None), slice(None)))
        while self._kept and (len(self._kept) + 1) * values.nbytes > self._memory:
            self._kept.popitem(last=False)
        # Even one that is larger than `memory` is worth keeping: the next question is likely of it.
        self._kept[cube] = values
        return values

    def order(self, cubes: Sequence[Cube]) -> list[int]:
        """Indices of cubes, those at hand first, whose reading a batch then saves."""
        return sorted(range(len(cubes)), key=lambda k: cubes[k] not in self._kept)

    def at(self, cube: Cube, cells: Cells) -> Values:
        """Return values (N,) at places."""
        return self._read_at(cube, cells, trilinear, ())

    def corners(self, cube: Cube, cells: Cells) -> Values:
        """Return values (N, 8) at the corners of the cells, of `Cells.weights`."""
        return self._read_at(cube, cells, corners, (8,))

    def _read_at(self, cube: Cube, cells: Cells, take: Take, shape: tuple[int, ...]) -> Values:
        if cube in self._kept:
            return _in_chunks(self.whole(cube), cells, take)
        blocks, block_of = self._blocks(cells)
        needed = len(blocks) * (_BLOCK + 1) ** 3
        if needed > _PART * np.prod(self.cubes.layout.shape):
            return _in_chunks(self.whole(cube), cells, take)
        values = np.empty((len(cells), *shape), np.float32)
        for i, block in enumerate(blocks):
            mine = (block_of == i).nonzero()[0]
            start = block * _BLOCK
            z, y, x = (slice(int(k), int(k) + _BLOCK + 1) for k in start[::-1])
            here = Cells(cells.cell[mine] - start, cells.offset[mine])
            values[mine] = _in_chunks(self._read(cube, (z, y, x)), here, take)
        return values

    def _blocks(self, cells: Cells) -> tuple[Indices, Indices]:
        """Return blocks (B, 3) in x, y, z that hold the places, and the block (N,) of each."""
        counts = [n // _BLOCK + 1 for n in self.cubes.layout.grid.shape]
        flat = np.ravel_multi_index(tuple((cells.cell // _BLOCK).T), counts)
        unique, inverse = np.unique(flat, return_inverse=True)
        return np.stack(np.unravel_index(unique, counts), axis=-1), inverse

    def _read(self, cube: Cube, box: Box) -> Values:
        return np.ascontiguousarray(self.cubes.read(cube, box), np.float32)


def voxel_means(values: Values) -> Values:
    """Return means over the voxels around the nodes of values (..., z, y, x), trilinear between:

        ∫ f over half a step to either side = (f_{i−1} + 6 f_i + f_{i+1}) / 8 along each axis,

    and over the half within the box, (3 f_0 + f_1) / 4, at its faces.

    Examples
    --------
    >>> values = np.zeros((3, 1, 1), np.float32)
    >>> values[1] = 8.0
    >>> voxel_means(values).ravel()
    array([2., 6., 2.], dtype=float32)
    """
    for axis in (-1, -2, -3):
        along = np.moveaxis(values, axis, 0)
        if len(along) > 1:
            around = np.concatenate([along[1:2], along, along[-2:-1]])
            along = 0.75 * along + 0.125 * (around[:-2] + around[2:])
        values = np.moveaxis(along, 0, axis)
    return values


def over_voxels(reader: CubeReader) -> dict[Quantity, Values]:
    """Return what a map says of means over voxels: their mean, their coverage as it is, and of two
    samples at least, themselves and the other quantities."""
    layout, positive = reader.cubes.layout, reader.cubes.layout.positive
    means: dict[Quantity, Values] = {}
    if Quantity.MEAN in layout.quantities:
        means[Quantity.MEAN] = voxel_means(reader.whole(Cube(Quantity.MEAN)))
    if Quantity.COVERAGE in layout.quantities:
        means[Quantity.COVERAGE] = reader.whole(Cube(Quantity.COVERAGE))
    if layout.samples < 2:
        return means
    draws = np.stack(
        [voxel_means(reader.whole(Cube(Quantity.SAMPLES, k))) for k in range(layout.samples)]
    )
    asked = [q for q in PERCENTILES if q in layout.quantities]
    if Quantity.STD in layout.quantities:
        means[Quantity.STD] = standard_deviation(draws, positive)  # type: ignore[type-var]
    if asked:
        levels = [PERCENTILES[q] for q in asked]
        values = percentiles(draws, levels, positive)  # type: ignore[type-var]
        means |= dict(zip(asked, values, strict=True))
    return means | {Quantity.SAMPLES: draws}


def _in_chunks(values: Values, cells: Cells, take: Take) -> Values:
    if len(cells) <= _CHUNK:
        return take(values, cells)
    starts = range(0, len(cells), _CHUNK)
    return np.concatenate([take(values, cells.part(slice(i, i + _CHUNK))) for i in starts])


def trilinear(values: Values, cells: Cells) -> Values:
    """Sum over the 8 corners of a cell, values (z, y, x) contiguous: (N,)."""
    _, y, x = values.shape
    corner = (cells.cell[:, 2] * y + cells.cell[:, 1]) * x + cells.cell[:, 0]
    flat = values.reshape(-1)
    along_x, along_y, along_z = cells.offset.T

    def row(shift: int) -> Values:
        return _between(flat.take(corner + shift), flat.take(corner + (shift + 1)), along_x)

    below = _between(row(0), row(x), along_y)
    above = _between(row(x * y), row(x * y + x), along_y)
    return _between(below, above, along_z)


def _between(low: Values, high: Values, share: Values) -> Values:
    """Return (1 − share) · low + share · high, in place of `high`: exact at both ends, whatever is
    unknown at the other."""
    before = (1.0 - share) * low
    np.copyto(before, 0.0, where=share == 1.0)
    high *= share
    np.copyto(high, 0.0, where=share == 0.0)
    high += before
    return high


def corners(values: Values, cells: Cells) -> Values:
    """Return values (z, y, x) at the 8 corners of cells, (N, 8), x the fastest."""
    _, y, x = values.shape
    corner = (cells.cell[:, 2] * y + cells.cell[:, 1]) * x + cells.cell[:, 0]
    shifts = np.array([(k * y + j) * x + i for k in (0, 1) for j in (0, 1) for i in (0, 1)])
    around: Values = values.reshape(-1).take(corner[:, None] + shifts)
    return around


def variance_between(between: Sequence[CellVariance], places: Floats) -> Floats:
    """Return the variance of ln ρ (N,) beside that of samples, at places (N, 3): that of the last
    grid in whose box they are, 0 in none."""
    variance = np.zeros(len(places))
    for rest in between:
        inside = within_box(rest.nodes, places)
        variance[inside] = rest.at(places[inside])
    return variance


@final
@dataclass(frozen=True, eq=False)
class Rays:
    """From the Sun in `direction` (N, 3), unit vectors, between distances near and far (N,)."""

    direction: Floats
    near: Floats
    far: Floats

    def __len__(self) -> int:
        return len(self.far)

    def part(self, index: Indices | Flags | slice) -> "Rays":
        """Return some of the rays."""
        return Rays(self.direction[index], self.near[index], self.far[index])


def within(grid: RegularGrid, direction: Floats, distance: Floats) -> tuple[Rays, Flags]:
    """Cut rays of length `distance` (N,) at the box; say also which of them are whole (N,)."""
    slack = 1e-6 * min(grid.spacing)
    enter, leave = chord(grid.lower, grid.upper, direction, slack)
    far = np.minimum(leave, distance)
    near = np.minimum(np.maximum(enter, 0.0), np.maximum(far, 0.0))
    missed = leave < enter
    far = np.where(missed, near, np.maximum(far, near))
    complete = (near <= slack) & (far >= distance - slack) & ~missed
    return Rays(direction, near, far), complete


def chord(
    lower: ArrayLike, upper: ArrayLike, direction: Floats, slack: float = 0.0
) -> tuple[Floats, Floats]:
    """Return distances (N,) where rays from the Sun enter and leave a box; leave < enter if never.

    A ray along a face is in the box, up to `slack` pc beside it: a component that is 0 but for
    round-off is along a face.
    """
    lower, upper = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    moving = np.abs(direction) > 1e-12
    speed = np.where(moving, direction, 1.0)
    still = np.where((lower <= slack) & (upper >= -slack), np.inf, -np.inf)
    first, last = lower / speed, upper / speed
    enter = np.where(moving, np.minimum(first, last), -still)
    leave = np.where(moving, np.maximum(first, last), still)
    return enter.max(-1), leave.min(-1)


def distances_through(
    lower: ArrayLike, upper: ArrayLike, ahead: Floats, step: float
) -> Floats | None:
    """Return distances (K,) at most `step` apart, but no more than 600, from the Sun or the near
    face of a box to the far one, along one unit vector (3,); None where it is never met."""
    enter, leave = chord(lower, upper, ahead[None])
    near, far = max(float(enter[0]), 0.0), float(leave[0])
    if not far > near:
        return None
    count = min(max(2, math.ceil((far - near) / step) + 1), _MOST_ALONG)
    # A hair inside, so that rounding does not put the ends outside.
    hair = 1e-9 * (far - near)
    return np.linspace(near + hair, far - hair, count)


def integrate(reader: CubeReader, cubes: tuple[Cube, ...], rays: Rays) -> Floats:
    """Integrate ∫ρ ds in mag, (C, N), of every cube along every ray."""
    grid = reader.cubes.layout.grid
    columns = np.zeros((len(cubes), len(rays)))
    for rows, points, weight, row in quadrature(grid, rays):
        cells = Cells.of(grid, points)
        for k in reader.order(cubes):
            columns[k, rows] = np.bincount(row, reader.at(cubes[k], cells) * weight, len(rows))
    return columns


def quadrature(grid: RegularGrid, rays: Rays) -> Iterator[tuple[Indices, Floats, Floats, Indices]]:
    """Yield points of the rays in batches: the batch, and of each point place, weight and ray.

    rows (R,): rays of the batch, of like length; points (P, 3) and weights (P,) in pc; row (P,):
    which of `rows` a point is of. Two points of Gauss and Legendre in every cell.
    """
    order = (rays.far - rays.near).argsort()
    points = 2 * (1 + _crossed(grid, rays)[1].sum(-1)[order])
    start = 0
    while start < len(order):
        # lengths ascend, so the last ray of a batch has about the most points
        taken = 1
        while start + taken < len(order):
            more = min(2 * taken, len(order) - start)
            if int(points[start : start + more].max()) * more > _POINTS:
                break
            taken = more
        rows = order[start : start + taken]
        yield rows, *_points(grid, rays.part(rows))
        start += taken


def _crossed(grid: RegularGrid, rays: Rays) -> tuple[Indices, Indices]:
    """Return first and number of the planes of voxels strictly between near and far: (N, 3)."""
    lower, spacing = np.array(grid.lower), np.array(grid.spacing)
    ends = [(rays.direction * s[:, None] - lower) / spacing for s in (rays.near, rays.far)]
    first = np.floor(np.minimum(*ends)).astype(np.int64) + 1
    last = np.ceil(np.maximum(*ends)).astype(np.int64) - 1
    return first, np.maximum(last - first + 1, 0)


def _points(grid: RegularGrid, rays: Rays) -> tuple[Floats, Floats, Indices]:
    """Return places (P, 3), weights and rays (P,) of two points in every cell."""
    first, counts = _crossed(grid, rays)
    near, far = rays.near[:, None], rays.far[:, None]
    edges = [near, far]  # where rays begin, enter another cell, and end
    for axis in range(3):
        along = rays.direction[:, axis, None]
        plane = first[:, axis, None] + np.arange(counts[:, axis].max(initial=0))
        s = (grid.lower[axis] + grid.spacing[axis] * plane) / np.where(along == 0, 1.0, along)
        edges.append(np.clip(np.where(along == 0, near, s), near, far))
    ascending = np.sort(np.concatenate(edges, axis=-1), axis=-1)
    length = np.diff(ascending)
    row, segment = (length > 0).nonzero()
    step = length[row, segment]
    middle = ascending[row, segment] + 0.5 * step
    s = np.concatenate([middle - _GAUSS * step, middle + _GAUSS * step])
    row = np.tile(row, 2)
    return rays.direction[row] * s[:, None], 0.5 * np.tile(step, 2), row


def range_of(
    values: Callable[[Floats], Floats],
    grid: RegularGrid,
    step: float,
    directions: Floats,
    least: float,
) -> Floats:
    """Find [from, to] in pc (N, 2) along unit vectors (N, 3) through the box of a grid, between
    which values of places (K, 3) first are at least `least`; NaN where they never are, as along
    directions that are no numbers.

    They are looked at in steps, averaged over `_AROUND` steps before and behind, for their own
    errors are of voxel to voxel, and linear between them.
    """
    known = np.isfinite(directions).all(-1)
    if not known.all():
        ranges = np.full((len(directions), 2), np.nan)
        ranges[known] = range_of(values, grid, step, directions[known], least)
        return ranges
    rays, _ = within(grid, directions, np.full(len(directions), np.inf))
    longest = float((rays.far - rays.near).max(initial=0.0))
    count = max(2, math.ceil(longest / step) + 1)
    ranges, size = np.empty((len(rays), 2)), max(1, _POINTS // (2 * count))
    for start in range(0, len(rays), size):
        part = rays.part(slice(start, start + size))
        near, far = part.near[:, None], part.far[:, None]
        s: Floats = near + step * np.arange(count, dtype=np.float64)
        beyond = (s >= far + step) | (far <= near)
        s = np.minimum(s, far)
        places = (part.direction[:, None] * s[..., None]).reshape(-1, 3)
        # Rounding takes the ends of rays out of the box.
        here = values(np.clip(places, grid.lower, grid.upper)).reshape(s.shape)
        # −1 stands for no value at all: the box ends at the step before.
        none = beyond | np.isnan(here)
        here[none] = -1.0
        ranges[start : start + size] = _range(s, _averaged(here), least)
    return ranges


def _averaged(values: Floats) -> Floats:
    """Means (N, K) over as many steps before as behind, `_AROUND` where so many have a value; of
    values (N, K), −1 for none."""
    smooth, known = values.copy(), np.pad(np.cumsum(values >= 0.0, axis=-1), ((0, 0), (1, 0)))
    sums = np.pad(np.cumsum(values, axis=-1), ((0, 0), (1, 0)))
    for half in range(1, min(_AROUND, (values.shape[1] - 1) // 2) + 1):
        width = 2 * half + 1
        whole: Flags = known[:, width:] - known[:, :-width] == width
        mean = (sums[:, width:] - sums[:, :-width]) / width
        smooth[:, half:-half] = np.where(whole, mean, smooth[:, half:-half])
    return smooth


def _range(s: Floats, values: Floats, least: float) -> Floats:
    """Find where values (N, K) first reach `least`, and next fall below: (N, 2)."""
    reached: Flags = values >= least
    first = reached.argmax(-1)
    falls = (np.arange(s.shape[1]) > first[:, None]) & ~reached
    last = np.where(falls.any(-1), falls.argmax(-1), s.shape[1])
    ends = np.stack([_crossing(s, values, k, least) for k in (first, last)], axis=-1)
    return np.where(reached.any(-1, keepdims=True), ends, np.nan)


def _crossing(s: Floats, values: Floats, k: Indices, least: float) -> Floats:
    """Find where values are `least` between the steps k − 1 and k (N,), or the last of them."""
    left, right = np.maximum(k - 1, 0), np.minimum(k, s.shape[1] - 1)
    row = np.arange(len(s))
    a, b = values[row, left], values[row, right]
    share: Floats = np.divide(least - a, b - a, out=np.ones_like(a), where=a != b)
    share = np.where(b < 0, 0.0, np.where(a < 0, 1.0, share))
    low, high = s[row, left], s[row, right]  # one place before the first step and after the last
    return np.asarray(low + np.clip(share, 0.0, 1.0) * (high - low))
