"""The maps of tiles as one map of the whole grid, a slab at a time.

With u_t the influence of tile t and w_t = u_t / Σ_s u_s,

    mean, std, median, p16, p84, coverage, sample k   q(x) = Σ_t w_t(x) q_t(x).

Σ w std is the standard deviation of Σ w ρ_t for tiles that are perfectly correlated, an upper
bound for all others; at a seam the tiles know of the same stars, and are nearly so. Percentiles
are weighted like it. Draws k of different tiles are independent: in the interior of a tile they are
draws of the posterior, across a seam they go over into each other, and scatter less than std, down
to √Σ w² of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._zarr import CheckedGroup
from dustmap.sky.maps import DustMap, MapRequest, Planes, Quantity, Slabs
from dustmap.sky.maps._cubes import AbstractCubes, Cube, Layout
from dustmap.sky.maps._field import EVERY, slabs
from dustmap.sky.tiles._tile import AT_ONCE, Tile

#: What the weights of a slab take beside it, in arrays of one quantity: the sum of the influences,
#: those of one tile, one cube of that tile, and which voxels belong to a tile.
BESIDE = 4
Floats: TypeAlias = NDArray[np.float32]
STEPS = (
    "merged with weights u_t / sum of u, u_t = 1 in the cone of tile t and 0 at the end of its "
    "margin",
    "std: weighted mean of the tiles' stds, what perfectly correlated tiles have; an upper bound "
    "in seams",
    "median and percentiles: weighted means of the tiles' own",
    "samples: sample k is the weighted mean of the tiles' samples k, which are independent of each "
    "other: in seams they scatter less than std",
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
    """slabs: for the writers; uncovered: voxels in no tile, which are NaN."""

    slabs: Slabs
    uncovered: int

    def memory(self, available: int) -> int:
        """Return bytes that the slabs of a writer may take of `available`."""
        held = self.slabs.request.values_per_place + 2
        return max(1, available * held // (held + BESIDE))


def merged(tiles: Sequence[TileMap], grid: RegularGrid, partial: bool) -> Merged:
    """Merge all tiles on the whole `grid`, of which their boxes are parts.

    Tiles of one nside, margin, system and set of quantities, each once. A voxel belongs to the
    tile in whose cone it is; where that is not among them it is NaN, if `partial` says so.
    """
    _check_alike(tiles)
    offsets = [_offset(tile, grid) for tile in tiles]
    first = tiles[0].cubes.layout
    layout = Layout(grid, first.system, first.quantities, first.samples, first.positive)
    uncovered = _uncovered(tiles, grid, partial)
    request = MapRequest(layout.quantities, layout.samples)
    parts = [_Part(tile, offset) for tile, offset in zip(tiles, offsets, strict=True)]
    work = _Work(tuple(parts), layout)
    return Merged(Slabs(layout, request, work.walk), uncovered)


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


def _offset(tile: TileMap, grid: RegularGrid) -> tuple[int, int, int]:
    """Index of the tile's first node along x, y, z; its nodes must be the part it needs."""
    mine, part = tile.cubes.layout.grid, tile.tile.part_of(grid)
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
    x, y, z = (
        round((a - b) / h) for a, b, h in zip(mine.lower, grid.lower, grid.spacing, strict=True)
    )
    return x, y, z


def _uncovered(tiles: Sequence[TileMap], grid: RegularGrid, partial: bool) -> int:
    nside = tiles[0].tile.pixel.nside
    present = {tile.tile.pixel.pixel for tile in tiles}
    missing = sorted(set(range(12 * nside**2)) - present)
    if not missing:
        return 0
    places = _Places(grid, 0, grid.shape[2])
    counts = np.zeros(12 * nside**2, np.int64)
    for part in places.parts():
        owner = _owners(nside, places.at(part))
        counts += np.bincount(owner[owner >= 0], minlength=len(counts))
    lacking = [pixel for pixel in missing if counts[pixel]]
    total = int(counts[missing].sum())
    if total and not partial:
        names = ", ".join(f"{nside}/{pixel}" for pixel in lacking[:8])
        more = "" if len(lacking) <= 8 else f" and {len(lacking) - 8} more"
        raise UserError(
            f"{total} of {grid.size} voxels lie in no tile given; missing: {names}{more}. Give "
            "them too, or pass --partial for NaN there"
        )
    return total


def _owners(nside: int, points: NDArray[np.float64]) -> NDArray[np.int64]:
    """The pixel that each point (N, 3) lies in; −1 at the Sun, which lies in all."""
    import healpy

    away = (points != 0.0).any(1)
    owners = np.full(len(points), -1, np.int64)
    owners[away] = healpy.vec2pix(nside, *points[away].T, nest=True)
    return owners


@final
@dataclass(frozen=True, eq=False)
class _Places:
    """The nodes of a box of planes start <= k < stop, counted in the order of z, y, x."""

    grid: RegularGrid
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int, int]:
        x, y, _ = self.grid.shape
        return self.stop - self.start, y, x

    def parts(self) -> Iterator[slice]:
        """Yield few nodes at a time."""
        size = int(np.prod(self.shape))
        for start in range(0, size, AT_ONCE):
            yield slice(start, min(start + AT_ONCE, size))

    def at(self, part: slice) -> NDArray[np.float64]:
        """Return X, Y, Z (N, 3) in pc."""
        k, j, i = np.unravel_index(np.arange(part.start, part.stop), self.shape)
        index = np.stack([i, j, k + self.start], axis=-1)
        return np.asarray(self.grid.lower + index * np.array(self.grid.spacing), np.float64)


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """A tile, and where its first node is in the whole grid along x, y, z."""

    map: TileMap
    offset: tuple[int, int, int]

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """Return planes of the tile among the whole grid's planes start <= k < stop."""
        first = self.offset[2]
        return max(start, first), min(stop, first + self.map.cubes.layout.grid.shape[2])

    def where(self, start: int, first: int, last: int) -> tuple[slice, slice, slice]:
        """Locate planes first <= k < last of the tile in a slab [z, y, x] from `start` on."""
        x, y, _ = self.map.cubes.layout.grid.shape
        i, j, _ = self.offset
        return slice(first - start, last - start), slice(j, j + y), slice(i, i + x)

    def influence(self, grid: RegularGrid, first: int, last: int) -> Floats:
        """Return u [z, y, x] at the tile's own nodes, where they are in the whole grid."""
        lower = tuple(
            a + n * h for a, n, h in zip(grid.lower, self.offset, grid.spacing, strict=True)
        )
        mine = RegularGrid(lower, grid.spacing, self.map.cubes.layout.grid.shape)
        places = _Places(mine, first - self.offset[2], last - self.offset[2])
        weights = np.empty(int(np.prod(places.shape)), np.float32)
        for part in places.parts():
            weights[part] = self.map.tile.influence(places.at(part))
        return weights.reshape(places.shape)


@final
@dataclass(frozen=True, eq=False)
class _Work:
    """Slabs of the whole grid, one tile after the other: Σ u q, then divided by Σ u."""

    parts: tuple[_Part, ...]
    layout: Layout

    def walk(self, depth: int, part: slice = EVERY) -> Iterator[Planes]:
        """Yield `depth` planes at a time, in the order of z."""
        for start, stop in slabs(self.layout.grid.shape[2], depth, part):
            yield self._slab(start, stop)

    def _slab(self, start: int, stop: int) -> Planes:
        shape = (stop - start, *self.layout.shape[1:])
        held = {q.value: np.zeros(shape, np.float32) for q in self.layout.quantities}
        if self.layout.samples:
            held[Quantity.SAMPLES.value] = np.zeros((self.layout.samples, *shape), np.float32)
        total = np.zeros(shape, np.float32)
        for part in self.parts:
            self._add(part, start, stop, held, total)
        self._divide(start, stop, held, total)
        return Planes(start, stop, held)

    def _add(
        self, part: _Part, start: int, stop: int, held: dict[str, Floats], total: Floats
    ) -> None:
        first, last = part.overlap(start, stop)
        if first >= last:
            return
        weight = part.influence(self.layout.grid, first, last)
        if not weight.any():
            return
        here = part.where(start, first, last)
        total[here] += weight
        planes = slice(first - part.offset[2], last - part.offset[2])
        for cube in self.layout.cubes:
            values = part.map.cubes.read(cube, (planes, slice(None), slice(None)))
            _into(held, cube)[here] += np.where(weight > 0.0, values, 0.0) * weight

    def _divide(self, start: int, stop: int, held: dict[str, Floats], total: Floats) -> None:
        nside = self.parts[0].map.tile.pixel.nside
        present = np.zeros(12 * nside**2 + 1, np.bool_)
        present[[-1, *(part.map.tile.pixel.pixel for part in self.parts)]] = True
        places = _Places(self.layout.grid, start, stop)
        flat = total.reshape(-1)
        for part in places.parts():
            flat[part][~present[_owners(nside, places.at(part))]] = np.nan
        for cube in self.layout.cubes:
            _into(held, cube)[...] /= total


def _into(held: dict[str, Floats], cube: Cube) -> Floats:
    array = held[cube.quantity.value]
    return array[cube.sample] if cube.quantity is Quantity.SAMPLES else array


def map_of_tile(path: Path) -> tuple[AbstractCubes, Mapping[str, Any]]:
    """Open a tile's map.zarr, or the run that has one: its cubes and its attribute `tile`."""
    place = path / "map.zarr" if (path / "config.toml").is_file() else path
    if not place.is_dir():
        raise UserError(
            f"{path}: expected a run of a tile with its map.zarr, or that map.zarr; export.formats "
            "of such runs must have zarr"
        )
    cubes = DustMap.open(place).cubes
    attribute = CheckedGroup(place, "the map of a tile").attributes.get("tile")
    if not isinstance(attribute, Mapping):
        raise UserError(
            f"{path}: this map is not that of a tile: expected a run with data.tile, such as 2/17"
        )
    return cubes, dict(attribute)
