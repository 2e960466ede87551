"""Stars in the order of the sky, sorted in files: memory does not grow with their number."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import healpy
import numpy as np
from numpy.typing import NDArray

from dustmap.sky.stars._store import check_same, columns_of, table_attributes, table_of
from dustmap.sky.stars._table import StarTable

#: Of the pixels in whose order stars are stored: 0.23 degrees across.
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
_OWN = ("key", "row")


def sky_keys(stars: StarTable) -> NDArray[np.int64]:
    """Integers (N,) in the order of the sky: nested HEALPix pixel, then distance to 24 bits."""
    pixel = healpy.ang2pix(NSIDE, stars.l, stars.b, nest=True, lonlat=True).astype(np.int64)
    with np.errstate(over="ignore"):
        depth = stars.distances.depth.astype(np.float32)
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
        """Stars with numbers len(self), len(self) + 1, .."""
        attributes, columns = table_attributes(stars), columns_of(stars)
        if not self._attributes:
            self._attributes = attributes
            numbers = [(name, values.dtype) for name, values in columns.items()]
            self._dtype = np.dtype([*((name, np.int64) for name in _OWN), *numbers])
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
        """All stars in order but those numbered `without`, ascending; their files go."""
        for place in range(_FILES):
            for records in self._sorted(_part(self._scratch / "sky", place)):
                kept = records[~np.isin(records["row"], without, assume_unique=True)]
                if len(kept):
                    columns = {name: kept[name].copy() for name in self._dtype.names or ()}
                    yield table_of(columns, self._attributes)

    def _sorted(self, path: Path) -> Iterator[NDArray[Any]]:
        """The records of a file in order, at most `ROWS` at a time."""
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
        """Keys that divide a file into parts of less than `ROWS` stars, as far as a sample tells;
        none where all keys are equal."""
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
        """Appends records to the files of the parts between limits, in their order."""
        place = np.searchsorted(limits, records["key"], side="right")
        order = np.argsort(place, kind="stable")
        records, place = records[order], place[order]
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        for start, stop in pairwise([*starts.tolist(), len(records)]):
            with _part(path, int(place[start])).open("ab") as stream:
                stream.write(records[start:stop].tobytes())


def _part(path: Path, place: int) -> Path:
    return path.with_name(f"{path.name}.{place}")
