"""The star store, a zarr v3 group filled table by table; and the order of the sky in it.

A `SkySorter` sorts stars in files: memory does not grow with their number.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import zarr
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._zarr import CheckedGroup, create_array
from dustmap.sky.stars import _table
from dustmap.sky.stars._distances import AbstractDistances, ParallaxDistances, kind_named
from dustmap.sky.stars._priors import prior_from
from dustmap.sky.stars._table import MEASURED, StarTable
from dustmap.sky.systems import ExtinctionSystem, system_named
from dustmap.tables import replacing

#: Stars of one compressed chunk of a column.
CHUNK = 2**17
#: Chunks that a sample is taken of.
_PLACES = 64
FORMAT = "dustmap star store"
_OWN = ("format", "extinction_system", "distances", "distance_prior", *_table.OPTIONAL)
#: Stars are stored in the order of the pixels of this resolution, 0.23 degrees across.
NSIDE = 256
#: What a store says of its order.
SKY_ORDER: Final[Mapping[str, Any]] = {
    "frame": "galactic",
    "healpix_nside": NSIDE,
    "healpix_ordering": "nested",
    "within_pixels": "distance",
}
#: Stars that are sorted at once, and pixels (nside 4) that files are for at first.
ROWS = 2**19
_FILES = 192
_DEPTH_BITS = 32
_SORT_COLUMNS = ("key", "row")


@contextmanager
def star_store(path: str | Path, overwrite: bool = False) -> Iterator["StarStoreWriter"]:
    """Yield a store to append tables to, which takes its place at `path` if the block succeeds.

    Examples
    --------
    >>> one = np.ones(1)
    >>> where, system = ExactDistances(one), system_named("A_V")
    >>> stars = StarTable(np.array([1]), one, one, where, one, one, system)
    >>> with star_store("stars.zarr") as store:
    ...     store.append(stars)
    >>> len(open_star_store("stars.zarr").read())
    1
    """
    with replacing(Path(path), overwrite) as partial:
        writer = StarStoreWriter(partial)
        yield writer
        writer.close()


@final
class StarStoreWriter:
    """Appends tables of one extinction system and one kind of distances."""

    def __init__(self, path: Path) -> None:
        self._group = zarr.create_group(path, zarr_format=3)
        self._attributes: dict[str, Any] = {}
        self._described: dict[str, Any] = {}
        # As they were made: opened again they would leave out empty chunks.
        self._arrays: dict[str, zarr.Array[Any]] = {}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def append(self, table: StarTable) -> None:
        """Add the stars of the table after those that are there."""
        attributes, columns = table.attributes(), table.columns()
        if not self._attributes:
            self._attributes = attributes
            units = {**MEASURED, **table.distances.units, _table.MAGNITUDE: "mag"}
            self._arrays = {
                name: create_array(
                    self._group,
                    name,
                    (0,),
                    ("star",),
                    values.dtype,
                    chunks=(CHUNK,),
                    fill=0,
                    attributes={"units": units[name]} if name in units else {},
                )
                for name, values in columns.items()
            }
        check_same(self._attributes, attributes)
        for name, array in self._arrays.items():
            array.resize((self._rows + len(table),))
            array[self._rows :] = columns[name]
        self._rows += len(table)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Add provenance: names and values that JSON can hold."""
        json.dumps(attributes, allow_nan=False)
        taken = [name for name in attributes if name in _OWN]
        if taken:
            raise UserError(f"the store itself sets the attributes {', '.join(taken)}")
        self._described |= attributes

    def close(self) -> None:
        """Write the metadata; refuse a store without stars."""
        if self._rows == 0:
            raise UserError("the store would have no stars: expected at least one")
        own = {"format": FORMAT, **self._attributes, "stars": self._rows}
        self._group.attrs.update(self._described | own)


def check_same(expected: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    """Refuse a table that does not belong into a store."""
    if attributes != expected:
        raise UserError(
            f"a star store holds one extinction system and one kind of distances, {expected}; "
            f"got a table with {attributes}"
        )


@final
@dataclass(frozen=True, eq=False)
class StarStore:
    """A star store on disk: nothing but its attributes is in memory."""

    path: Path
    group: CheckedGroup
    attributes: Mapping[str, Any]

    def __len__(self) -> int:
        return int(self.attributes["stars"])

    @property
    def system(self) -> ExtinctionSystem:
        """Extinction system of the stars."""
        return system_named(str(self.attributes["extinction_system"]))

    def chunks(self, rows: int = CHUNK) -> Iterator[StarTable]:
        """Yield the stars in order, at most `rows` at a time."""
        for start in range(0, len(self), rows):
            yield self.part(slice(start, min(start + rows, len(self))))

    def read(self) -> StarTable:
        """Read all stars."""
        return self.part(slice(0, len(self)))

    def sample(self, most: int) -> StarTable:
        """Read at most `most` stars from places all over the store."""
        parts = min(_PLACES, -(-len(self) // CHUNK))
        starts = [i * len(self) // parts for i in range(parts)]
        rows = min(CHUNK, len(self) // parts)
        share = max(1, most // parts)
        return _table.concatenate(
            [_table.thinned(self.part(slice(at, at + rows)), share) for at in starts]
        )

    def blocks(self, most: int) -> StarTable:
        """Read at most `most` stars, neighbours together, from places all over the store."""
        parts = min(_PLACES, -(-len(self) // CHUNK))
        starts, share = [i * len(self) // parts for i in range(parts)], max(1, most // parts)
        rows = min(share, len(self) // parts)
        return _table.concatenate([self.part(slice(at, at + rows)) for at in starts])

    def part(self, rows: slice) -> StarTable:
        """Read the stars of these rows."""
        names = _names(kind_named(self.attributes["distances"]), self.attributes)
        columns = {name: self.group.read(name, rows) for name in names}
        return StarTable.from_columns(columns, self.attributes)


def open_star_store(path: str | Path) -> StarStore:
    """Open a store, to be read in chunks or whole."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such star store")
    group = CheckedGroup(path, "a star store, a zarr v3 group")
    attributes = group.attributes
    if attributes.get("format") != FORMAT:
        raise UserError(
            f"{path}: expected a star store, as `dustmap ingest` writes it; this zarr group is "
            "something else"
        )
    _check_columns(path, group, attributes)
    return StarStore(path, group, attributes)


def _check_columns(path: Path, group: CheckedGroup, attributes: Mapping[str, Any]) -> None:
    """Refuse attributes that cannot be read, and columns without a number for every star."""
    stars = attributes.get("stars")
    try:
        kind = kind_named(attributes.get("distances"))
        system_named(str(attributes.get("extinction_system")))
        if kind is ParallaxDistances:
            prior_from(attributes)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(stars, int) or stars < 1:
        raise UserError(f"{path}: stars must be a whole number >= 1, got {stars!r}")
    for name in _names(kind, attributes):
        shape = group.shape(name)
        if shape != (stars,):
            raise UserError(f"{path}: {name} must have the shape ({stars},), got {shape}")


def _names(kind: type[AbstractDistances], attributes: Mapping[str, Any]) -> tuple[str, ...]:
    more = [name for has, (name, _) in _table.OPTIONAL.items() if attributes.get(has)]
    return "source_id", *MEASURED, *kind.fields, *more


def sky_keys(stars: StarTable) -> NDArray[np.int64]:
    """Return integers (N,) in the order of the sky: nested HEALPix pixel, then 24 bits of depth."""
    import healpy  # takes a second, as it takes matplotlib

    pixel = healpy.ang2pix(NSIDE, stars.l, stars.b, nest=True, lonlat=True).astype(np.int64)
    with np.errstate(over="ignore"):
        depth = stars.distances.depths()[0].astype(np.float32)
    bits = depth.view(np.int32).astype(np.int64)
    # Floats of one sign have the order of their bits, negative ones the reverse.
    growing = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + 2**31
    return np.asarray((pixel << _DEPTH_BITS) + growing, np.int64)


@final
class SkySorter:
    """Takes stars in any order and gives them back in the order of the sky.

    Neighbours on the sky cross the same cells: rows of consecutive stars then lie near each other
    in memory, a part of the sky is a part of the store, and a chunk of it touches few nodes.

    Stars with one key keep their order, so that the result does not depend on chunks. They wait
    in files of `scratch`, 8 bytes a number; a file of more than `ROWS` stars is divided by key.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._attributes: dict[str, Any] = {}
        self._dtype = np.dtype([])
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, stars: StarTable) -> None:
        """Add stars with numbers len(self), len(self) + 1, .."""
        attributes, columns = stars.attributes(), stars.columns()
        if not self._attributes:
            self._attributes = attributes
            numbers = [(name, values.dtype) for name, values in columns.items()]
            self._dtype = np.dtype([*((name, np.int64) for name in _SORT_COLUMNS), *numbers])
        check_same(self._attributes, attributes)
        records = np.empty(len(stars), self._dtype)
        records["key"] = sky_keys(stars)
        records["row"] = np.arange(self._rows, self._rows + len(stars))
        for name, values in columns.items():
            records[name] = values
        self._rows += len(stars)
        step = 12 * NSIDE**2 // _FILES << _DEPTH_BITS
        self._divide(records, step * np.arange(1, _FILES), self._scratch / "sky")

    def tables(self, without: NDArray[np.int64]) -> Iterator[StarTable]:
        """Yield all stars in order but those numbered `without`, ascending; their files go."""
        for place in range(_FILES):
            for records in self._sorted(_part(self._scratch / "sky", place)):
                kept = records[~np.isin(records["row"], without, assume_unique=True)]
                if len(kept):
                    columns = {name: kept[name].copy() for name in self._dtype.names or ()}
                    yield StarTable.from_columns(columns, self._attributes)

    def _sorted(self, path: Path) -> Iterator[NDArray[Any]]:
        """Yield the records of a file in order, at most `ROWS` at a time."""
        if not path.exists():
            return
        count = path.stat().st_size // self._dtype.itemsize
        if count <= ROWS:
            records = np.fromfile(path, self._dtype)
            path.unlink()
            yield records[np.argsort(records["key"], kind="stable")]
            return
        limits = self._limits(path, count)
        if len(limits) == 0:  # one key, whose stars are in order
            yield from self._blocks(path)
            path.unlink()
            return
        for records in self._blocks(path):
            self._divide(records, limits, path)
        path.unlink()
        for place in range(len(limits) + 1):
            yield from self._sorted(_part(path, place))

    def _limits(self, path: Path, count: int) -> NDArray[np.int64]:
        """Sample keys that divide a file into parts below `ROWS` stars; none if all are equal."""
        low, high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        sample: list[NDArray[np.int64]] = []
        for records in self._blocks(path):
            key = records["key"]
            low, high = min(low, int(key.min())), max(high, int(key.max()))
            sample.append(key[:: max(1, count // ROWS)].copy())
        if low == high:
            return np.empty(0, np.int64)
        parts = min(_FILES, 2 * count // ROWS)
        ordered = np.sort(np.concatenate(sample))
        limits = np.unique(ordered[np.arange(1, parts) * len(ordered) // parts])
        limits = limits[limits > low]
        return limits if len(limits) else np.array([low + 1])

    def _blocks(self, path: Path) -> Iterator[NDArray[Any]]:
        with path.open("rb") as stream:
            while len(records := np.fromfile(stream, self._dtype, ROWS // 2)):
                yield records

    def _divide(self, records: NDArray[Any], limits: NDArray[np.int64], path: Path) -> None:
        """Append records to the files of the parts between limits, in their order."""
        place = np.searchsorted(limits, records["key"], side="right")
        order = np.argsort(place, kind="stable")
        records, place = records[order], place[order]
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        for start, stop in pairwise([*starts.tolist(), len(records)]):
            with _part(path, int(place[start])).open("ab") as stream:
                stream.write(records[start:stop].tobytes())


def _part(path: Path, place: int) -> Path:
    return path.with_name(f"{path.name}.{place}")
