"""The maps of tiles as one map of the whole grid, a slab at a time.

With u_t the weight of tile t by its influence and w_t = u_t / Σ_s u_s,

    mean, std, median, p16, p84, coverage   q(x) = Σ_t w_t(x) q_t(x).

Σ w std is the standard deviation of Σ w ρ_t for tiles that are perfectly correlated, an upper
bound for all others; at a seam the tiles know of the same stars, and are nearly so. Percentiles
are weighted like it. Draws k of different tiles are independent, and their weighted means would
scatter √Σ w² times as much: every ray has the seams around the Sun, and its integral too small an
error. Draws are those means whose deviations are as large as one tile's (and in the interior of a
tile its own),

    g_k = ḡ + Σ_t w_t (g_tk − ḡ_t) / √Σ_t w_t²,    ḡ = Σ_t w_t ḡ_t the mean over k,

of g = ρ, or of g = ln ρ of a positive density, then times what gives ρ_k the mean Σ_t w_t ρ̄_t.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.linalg import chunks
from dustmap.sky._coordinates import pixels_towards
from dustmap.sky._zarr import CheckedGroup
from dustmap.sky.maps import DustMap, Planes, Quantity, Slabs
from dustmap.sky.maps._between import mean_between
from dustmap.sky.maps._cubes import AbstractCubes, Layout
from dustmap.sky.maps._field import EVERY, empty_arrays, slabs
from dustmap.sky.tiles._tile import AT_ONCE, Tile

#: Arrays of one quantity that a slab needs for its weights: the sums of reaches, of weights, of
#: their squares and of the means of samples, those of one tile, and one cube of that tile.
WEIGHT_ARRAYS = 7
#: Sum of reaches from which on the tiles that are given know a voxel: up to half of the margin
#: from their cones, for a ray within a cone has nodes beside it, too. Less rounding, for many
#: voxels lie half-way.
_KNOWN = 0.5 - 1e-5
#: Least density whose logarithm is taken.
_LEAST = np.finfo(np.float32).tiny
Floats: TypeAlias = NDArray[np.float32]
#: Index of a tile's first node in the whole grid along x, y, z.
Offset: TypeAlias = tuple[int, ...]
#: What provenance says of a merged map.
MERGE_STEPS = (
    "merged with weights u_t / sum of u, u_t = 1 in the cone of tile t and 0 at the end of its "
    "margin, or at 10 degrees from the cone where that is nearer",
    "std: weighted mean of the tiles' stds, what perfectly correlated tiles have; an upper bound "
    "in seams",
    "median and percentiles: weighted means of the tiles' own",
    "samples: sample k is the weighted mean of the tiles' samples k, of ln density where it is "
    "positive, with deviations divided by sqrt(sum of w^2), for the tiles' samples are independent",
)


@final
@dataclass(frozen=True, eq=False)
class TileMap:
    """The map of one tile, on its part of the whole grid."""

    name: str
    tile: Tile
    cubes: AbstractCubes


@final
@dataclass(frozen=True, eq=False)
class Merged:
    """The whole map of the tiles, in slabs for writers; `uncovered` voxels are NaN."""

    slabs: Slabs
    uncovered: int

    def memory(self, available: int) -> int:
        """Return bytes that the slabs of a writer may take of `available`."""
        held = self.slabs.layout.request.values_per_place + 2
        return max(1, available * held // (held + WEIGHT_ARRAYS))


def merged(tiles: Sequence[TileMap], grid: RegularGrid, partial: bool) -> Merged:
    """Merge all tiles on the whole `grid`, of which their boxes are parts.

    Tiles of one nside, margin, system and set of quantities, each once. A voxel belongs to the
    tile in whose cone it is; where that is not among them, and no other reaches as far, it is NaN,
    if `partial` says so.
    """
    _check_alike(tiles)
    offsets = [_offset(tile, grid) for tile in tiles]
    first = tiles[0].cubes.layout
    # Tiles have kernels of their own; a voxel does not say whose it is.
    more = mean_between(grid, [tile.cubes.layout.between for tile in tiles])
    layout = Layout(grid, first.system, first.quantities, first.samples, first.positive, more)
    uncovered = _uncovered(tiles, grid, partial)
    placed = list(zip(tiles, offsets, strict=True))

    def walk(depth: int, part: slice = EVERY) -> Iterator[Planes]:
        for start, stop in slabs(grid.shape[2], depth, part):
            sums = _Sums(layout, start, stop)
            for tile, offset in placed:
                sums.add(tile, offset)
            yield Planes(start, stop, sums.divided())

    return Merged(Slabs(layout, walk), uncovered)


def _check_alike(tiles: Sequence[TileMap]) -> None:
    if not tiles:
        raise UserError("there are no tiles to merge: expected at least one")
    first, seen = tiles[0], dict[str, str]()
    for tile in tiles:
        mine, other = tile.cubes.layout, first.cubes.layout
        for what, a, b in (
            ("extinction system", mine.system.name, other.system.name),
            ("quantities", _listed(mine), _listed(other)),
            ("samples", mine.samples, other.samples),
            ("spacing", mine.grid.spacing, other.grid.spacing),
            ("nside", tile.tile.pixel.nside, first.tile.pixel.nside),
            ("margin", tile.tile.margin, first.tile.margin),
            ("positive", mine.positive, other.positive),
        ):
            same = np.allclose(a, b, rtol=1e-9) if isinstance(a, tuple) else a == b
            if not same:
                raise UserError(
                    f"{tile.name}: {what} {a} and {b} in {first.name}: expected tiles of one sky"
                )
        pixel = str(tile.tile.pixel)
        if pixel in seen:
            raise UserError(f"{tile.name} and {seen[pixel]} are both tile {pixel}: leave one out")
        seen[pixel] = tile.name


def _listed(layout: Layout) -> str:
    return ", ".join(quantity.value for quantity in layout.quantities)


def _offset(tile: TileMap, grid: RegularGrid) -> Offset:
    """Index of the tile's first node along x, y, z; its nodes must be the part it needs."""
    mine, part, offset = tile.cubes.layout.grid, tile.tile.part_of(grid), list[int]()
    for axis in range(3):
        step = grid.spacing[axis]
        place = (mine.lower[axis] - grid.lower[axis]) / step
        if abs(mine.spacing[axis] - step) > 1e-9 * step or abs(place - round(place)) > 1e-6:
            raise UserError(
                f"{tile.name}: along {'XYZ'[axis]} its nodes start at {mine.lower[axis]:g} pc, "
                f"{mine.spacing[axis]:g} pc apart: expected nodes of the whole grid, "
                f"{grid.lower[axis]:g} pc and on, {step:g} pc apart"
            )
        if mine.shape != part.shape or abs(mine.lower[axis] - part.lower[axis]) > 1e-6 * step:
            raise UserError(
                f"{tile.name}: it has {mine.shape} nodes from {mine.lower} pc: expected those of "
                f"tile {tile.tile.pixel}, {part.shape} from {part.lower} pc"
            )
        offset.append(round(place))
    return tuple(offset)


def _uncovered(tiles: Sequence[TileMap], grid: RegularGrid, partial: bool) -> int:
    nside = tiles[0].tile.pixel.nside
    present = {tile.tile.pixel.pixel for tile in tiles}
    missing = sorted(set(range(12 * nside**2)) - present)
    if not missing:
        return 0
    counts = np.zeros(12 * nside**2, np.int64)
    for _, points in _in_parts(grid, 0, grid.shape[2]):
        owner = _owners(nside, points)
        counts += np.bincount(owner[owner >= 0], minlength=len(counts))
    lacking = [pixel for pixel in missing if counts[pixel]]
    total = int(counts[missing].sum())
    if total and not partial:
        names = ", ".join(f"{nside}/{pixel}" for pixel in lacking[:8])
        more = "" if len(lacking) <= 8 else f" and {len(lacking) - 8} more"
        raise UserError(
            f"{total} of {grid.size} voxels lie in no tile given; missing: {names}{more}. Give "
            "them too, or pass --partial for NaN beyond half of a tile's margin"
        )
    return _unknown(tiles, grid) if total else 0


def _unknown(tiles: Sequence[TileMap], grid: RegularGrid) -> int:
    """Count the voxels that no tile reaches."""
    parts = (points for _, points in _in_parts(grid, 0, grid.shape[2]))
    return sum(
        int((np.sum([tile.tile.influence(x)[0] for tile in tiles], axis=0) < _KNOWN).sum())
        for x in parts
    )


def _owners(nside: int, points: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the pixel that each point (N, 3) lies in; −1 at the Sun, which lies in all."""
    away = (points != 0.0).any(1)
    owners = np.full(len(points), -1, np.int64)
    owners[away] = pixels_towards(nside, points[away])
    return owners


def _in_parts(
    grid: RegularGrid, start: int, stop: int
) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Yield some nodes of the planes start <= k < stop at a time: which [z, y, x], and X, Y, Z."""
    shape = (stop - start, *grid.shape[1::-1])
    for part in chunks(math.prod(shape), AT_ONCE):
        k, j, i = np.unravel_index(np.arange(part.start, part.stop), shape)
        index = np.stack([i, j, k + start], axis=-1)
        yield part, np.asarray(grid.lower + index * np.array(grid.spacing), np.float64)


@final
class _Sums:
    """Sums of reaches, of u, u² and u q over tiles, in some planes of the whole grid; of samples
    u ln ρ of a positive density, and u times their mean."""

    def __init__(self, layout: Layout, start: int, stop: int) -> None:
        self.layout, self.start = layout, start
        self.arrays = empty_arrays(layout.grid, layout.request, stop - start)
        for array in self.arrays.values():
            array[...] = 0.0
        shape = stop - start, *layout.shape[1:]
        self.reach, self.total, self.squares, self.sampled = np.zeros((4, *shape), np.float32)

    def add(self, tile: TileMap, offset: Offset) -> None:
        """Add those of one tile."""
        x, y, z = tile.cubes.layout.grid.shape
        i, j, k = offset
        first, last = max(self.start, k), min(self.start + len(self.total), k + z)
        if first >= last:
            return
        # The tile's own nodes, where they are in the whole grid.
        grid = self.layout.grid
        lower = tuple(a + n * h for a, n, h in zip(grid.lower, offset, grid.spacing, strict=True))
        mine, planes = RegularGrid(lower, grid.spacing, (x, y, z)), slice(first - k, last - k)
        reach, weight = np.empty((2, last - first, y, x), np.float32)
        for part, points in _in_parts(mine, planes.start, planes.stop):
            reach.reshape(-1)[part], weight.reshape(-1)[part] = tile.tile.influence(points)
        if not weight.any():
            return
        here = slice(first - self.start, last - self.start), slice(j, j + y), slice(i, i + x)
        self.reach[here] += reach
        self.total[here] += weight
        self.squares[here] += weight**2
        for cube in self.layout.cubes:
            values = tile.cubes.read(cube, (planes, slice(None), slice(None)))
            values = np.where(weight > 0.0, values, 1.0)
            if cube.quantity is Quantity.SAMPLES:
                self.sampled[here] += values * weight / self.layout.samples
                if self.layout.positive:
                    values = np.log(np.maximum(values, _LEAST))
            cube.of(self.arrays[cube.quantity.value])[here] += values * weight

    def divided(self) -> Mapping[str, Floats]:
        """Return the quantities of the map; NaN where the reach is small, for tiles are missing."""
        self.total[self.reach < _KNOWN] = np.nan
        for name, array in self.arrays.items():
            if name != Quantity.SAMPLES.value:
                array /= self.total
        if Quantity.SAMPLES.value in self.arrays:
            self._draw(self.arrays[Quantity.SAMPLES.value])
        return self.arrays

    def _draw(self, samples: Floats) -> None:
        """Turn the sums of samples (S, z, y, x) into samples, in place; NaN where Σ u is."""
        mean = self.sampled / self.total
        samples -= samples.mean(0)
        samples /= np.sqrt(np.where(np.isnan(mean), mean, self.squares))
        if self.layout.positive:
            np.exp(samples, out=samples)
            samples *= mean / samples.mean(0)
        else:
            samples += mean


def map_of_tile(path: Path) -> tuple[AbstractCubes, Mapping[str, Any]]:
    """Open a tile's map.zarr, or the run that has one: its cubes and its attribute `tile`."""
    place = path / "map.zarr" if (path / "config.toml").is_file() else path
    if not place.is_dir():
        raise UserError(
            f"{path}: expected a run of a tile with its map.zarr, or that map.zarr; export.formats "
            "of such runs must have zarr"
        )
    cubes = DustMap.open(place).cubes
    attribute = CheckedGroup(place, "the map of a tile").tile
    if attribute is None:
        raise UserError(
            f"{path}: this map is not that of a tile: expected a run with data.tile, such as 2/17"
        )
    return cubes, attribute
