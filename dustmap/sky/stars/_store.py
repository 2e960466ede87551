"""The star store: one zarr v3 group, filled table by table, read whole or in chunks."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from dustmap.sky._outputs import replacing
from dustmap.sky._zarr import EVERY_CHUNK, checked_array, open_checked, read_array
from dustmap.sky.stars._kinds import KINDS, attributes_of, distances_from
from dustmap.sky.stars._table import StarTable, concatenate, thinned
from dustmap.sky.systems import ExtinctionSystem, system_named

#: Stars of one compressed chunk of a column.
CHUNK = 2**17
#: Chunks that a sample is taken of.
_PLACES = 64
FORMAT = "dustmap star store"
_UNITS = {"l": "deg", "b": "deg", "extinction": "mag", "extinction_error": "mag"}
_OWN = ("format", "extinction_system", "distances", "distance_prior")


@contextmanager
def star_store(path: str | Path, overwrite: bool = False) -> Iterator["StarStoreWriter"]:
    """A store to append tables to; it takes its place at `path` if the block succeeds."""
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
        """Adds the stars of the table after those that are there."""
        attributes, columns = table_attributes(table), columns_of(table)
        if not self._attributes:
            self._attributes = attributes
            self._create(columns, _UNITS | table.distances.units)
        check_same(self._attributes, attributes)
        for name, values in columns.items():
            array = self._arrays[name]
            array.resize((self._rows + len(table),))
            array[self._rows :] = values
        self._rows += len(table)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Adds provenance: names and values that JSON can hold."""
        json.dumps(attributes, allow_nan=False)
        taken = [name for name in attributes if name in _OWN]
        if taken:
            raise ValueError(f"the store itself sets the attributes {', '.join(taken)}")
        self._described |= attributes

    def close(self) -> None:
        if self._rows == 0:
            raise ValueError("the store would have no stars: expected at least one")
        self._group.attrs.update(self._described | self._attributes | {"stars": self._rows})

    def _create(self, columns: Mapping[str, NDArray[Any]], units: Mapping[str, str]) -> None:
        for name, values in columns.items():
            self._arrays[name] = self._group.create_array(
                name,
                shape=(0,),
                chunks=(CHUNK,),
                dtype=values.dtype,
                config=EVERY_CHUNK,
                dimension_names=("star",),
                attributes={"units": units[name]} if name in units else {},
            )


def table_attributes(table: StarTable) -> dict[str, Any]:
    """What all stars of a store have in common: their system and kind of distances."""
    return {
        "format": FORMAT,
        "extinction_system": table.system.name,
        **attributes_of(table.distances),
    }


def check_same(expected: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    """ValueError where a table does not belong into a store."""
    if attributes != expected:
        raise ValueError(
            f"a star store holds one extinction system and one kind of distances, {expected}; "
            f"got a table with {attributes}"
        )


def columns_of(table: StarTable) -> dict[str, NDArray[Any]]:
    """The numbers (N,) of a table, under their names in a store."""
    return {
        "source_id": table.source_id.astype(np.int64),
        "l": table.l,
        "b": table.b,
        **table.distances.columns(),
        "extinction": table.extinction,
        "extinction_error": table.extinction_error,
    }


def table_of(columns: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> StarTable:
    """The table of these columns, with the attributes of its store."""
    return StarTable(
        columns["source_id"],
        distances=distances_from(columns, attributes),
        system=system_named(str(attributes["extinction_system"])),
        **{name: columns[name] for name in _UNITS},
    )


@final
@dataclass(frozen=True, eq=False)
class StarStore:
    """A star store on disk: nothing but its attributes is in memory."""

    path: Path
    group: zarr.Group
    attributes: Mapping[str, Any]

    def __len__(self) -> int:
        return int(self.attributes["stars"])

    @property
    def system(self) -> ExtinctionSystem:
        return system_named(str(self.attributes["extinction_system"]))

    def chunks(self, rows: int = CHUNK) -> Iterator[StarTable]:
        """The stars in order, at most `rows` at a time."""
        for start in range(0, len(self), rows):
            yield self._table(slice(start, min(start + rows, len(self))))

    def part(self, rows: slice) -> StarTable:
        """The stars of these rows."""
        return self._table(rows)

    def read(self) -> StarTable:
        """All stars."""
        return self._table(slice(0, len(self)))

    def sample(self, most: int) -> StarTable:
        """At most `most` stars from places all over the store."""
        parts = min(_PLACES, -(-len(self) // CHUNK))
        starts = [i * len(self) // parts for i in range(parts)]
        rows = min(CHUNK, len(self) // parts)
        share = max(1, most // parts)
        return concatenate([thinned(self.part(slice(at, at + rows)), share) for at in starts])

    def _table(self, rows: slice) -> StarTable:
        names = KINDS[str(self.attributes["distances"])]
        columns = {name: self._column(name, rows) for name in ("source_id", *_UNITS, *names)}
        return table_of(columns, self.attributes)

    def _column(self, name: str, rows: slice) -> NDArray[Any]:
        array = self.group[name]
        assert isinstance(array, zarr.Array)
        return read_array(array, self.path, rows)


def open_star_store(path: str | Path) -> StarStore:
    """A store, to be read in chunks or whole."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such star store")
    group = open_checked(path, "a star store, a zarr v3 group")
    attributes = dict(group.attrs)
    if attributes.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected a star store, as `dustmap ingest` writes it; this zarr group is "
            "something else"
        )
    _check_columns(path, group, attributes)
    return StarStore(path, group, attributes)


def _check_columns(path: Path, group: zarr.Group, attributes: Mapping[str, Any]) -> None:
    """Every column is there, whole, with as many stars as the attributes say."""
    kind, stars = str(attributes.get("distances")), attributes.get("stars")
    if kind not in KINDS:
        raise ValueError(f"{path}: distances must be one of {', '.join(KINDS)}, got {kind!r}")
    if not isinstance(stars, int) or stars < 1:
        raise ValueError(f"{path}: stars must be a whole number >= 1, got {stars!r}")
    for name in ("source_id", *_UNITS, *KINDS[kind]):
        shape = checked_array(group, path, name).shape
        if shape != (stars,):
            raise ValueError(f"{path}: {name} must have the shape ({stars},), got {shape}")


def read_star_store(path: str | Path) -> StarTable:
    """All stars of a store."""
    return open_star_store(path).read()
