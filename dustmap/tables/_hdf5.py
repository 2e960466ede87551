"""HDF5: tables, new files on disks that may fill, and those of others, which may be damaged.

A table is datasets of one length at the root or in one group, or one dataset of compound rows.

The library crashes where a write fails as it closes a file: `new_hdf5` writes through a
`SparedFile`, whose writes seem to work, and raises what went wrong afterwards.

It never returns from three structures of a damaged file: a global heap (texts of variable length,
also of attributes) with an object that takes no room, a local heap (names) whose list of free
blocks comes back to itself, and nodes of a B-tree of version 1 that are their own neighbours.
Nothing in Python can interrupt it, so that `open_hdf5` looks at every such structure as the library
reads it.

The library reads each of them by itself, from its signature on; only a read that starts with one
is looked at, other data cost nothing, and only these structures are read twice.
Data that start with a signature by chance are refused only if what follows is such a loop, too:
a size that fits into the file and objects that do not fill it, or pointers that return exactly.

Not looked at: children of B-trees that are their own ancestors, for which the library crashes, and
what has checksums (headers, heaps and trees of later versions). Damage hardly makes them; malice
can.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, final

import h5py
import numpy as np
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import _columns
from dustmap.tables._columns import MASK, typed

_SUPERBLOCK, _GLOBAL, _LOCAL, _TREE = b"\x89HDF\r\n\x1a\n", b"GCOL\x01", b"HEAP\x00", b"TREE"
_NO_BLOCK = 1  # ends a list of free blocks
#: Bytes of a collection of a global heap, at least, and its objects, whose numbers have 16 bits.
_SMALLEST, _MOST = 4096, 2**16
_META = ".__table_column_meta__"  # where astropy keeps units
#: Nothing is packed so many fold; and so many bytes of fill values more do no harm.
_MOST_PACKED, _SPARE = 2**16, 2**26
_SHOWN = 5  # places of tables that an error lists
_UNIT_NAMES = ("unit", "units", "UNIT", "UNITS")


@contextmanager
def new_hdf5(path: Path, cache: int = 2**20) -> "Iterator[tuple[h5py.File, SparedFile]]":
    """Make a new file, with `cache` bytes of chunks per dataset; yield it and the bytes under it.

    A failed write is an OSError at the end, or before at the next `SparedFile.check`.

    Examples
    --------
    >>> with new_hdf5(Path("map.h5")) as (file, _):
    ...     file["density"] = np.zeros((2, 2))
    >>> with open_hdf5(Path("map.h5")) as file:
    ...     file["density"].shape
    (2, 2)
    """
    with SparedFile(path, "w+") as spared:
        with h5py.File(spared, "w", rdcc_nbytes=cache, rdcc_nslots=10_007) as file:
            yield file, spared
        spared.check()


@final
class SparedFile(FileIO):
    """Bytes of a file for HDF5, whose writes seem to work: it must be able to close the file.

    After the first failure nothing is written, and `check` raises it.
    """

    _failed: OSError | None = None

    def check(self) -> None:
        """Raise what went wrong with a write since the beginning, in one line."""
        if self._failed is not None:
            raise _named(self._failed, self.name)

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        count = len(rest)
        while len(rest) and self._failed is None:
            try:
                rest = rest[super().write(rest) :]  # not all of it on a disk that is filling
            except OSError as error:
                self._failed = error
        return count

    def truncate(self, size: int | None = None, /) -> int:
        if self._failed is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self._failed = error
        return size or 0

    def readinto(self, buffer: Any, /) -> int:
        """Zeros where a write failed: HDF5 crashes on missing bytes too."""
        view = memoryview(buffer).cast("B")
        count = super().readinto(view)
        if self._failed is None:
            return count
        view[count:] = bytes(len(view) - count)
        return len(view)


def _named(error: OSError, path: Any) -> OSError:
    """Make the same error name the file."""
    number = error.errno or 0
    again = OSError(number, os.strerror(number), str(path))
    again.__cause__ = error
    return again


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open a file to read.

    UserError in place of any error that follows from a loop in the file.
    """
    with GuardedFile(path) as guarded:
        guarded.find_superblock()
        guarded.check()
        try:
            with h5py.File(guarded, "r") as file:
                yield file
        except Exception:
            guarded.check()
            raise
        guarded.check()


@final
class GuardedFile(FileIO):
    """Bytes of a file for HDF5, which gets zeros in place of a structure that never ends.

    An exception must not go through the library; `check` raises it afterwards.
    """

    _structures: "_Structures | None" = None
    _failed: UserError | OSError | None = None

    def check(self) -> None:
        """Raise what was wrong with any read since the beginning, in one line."""
        if isinstance(self._failed, OSError):
            raise _named(self._failed, self.name)
        if self._failed is not None:
            raise UserError(
                f"{self.name}: {self._failed}; copy the file again from where it is whole"
            ) from None

    def find_superblock(self) -> None:
        """Look for it where the library does, at byte 0, 512, 1024, 2048 and so on, if anywhere.

        The library is never asked to open a file whose superblock is refused: it would fail, and
        crash the process at its end.
        """
        try:
            size, start = os.fstat(self.fileno()).st_size, 0
            while start < size and os.pread(self.fileno(), 8, start) != _SUPERBLOCK:
                start = max(512, 2 * start)
            if start < size:
                self._structures = _Structures.of(self.fileno(), start)
        except (UserError, OSError) as error:
            self._failed = error

    def readinto(self, buffer: Any, /) -> int:
        """Zeros behind the end: HDF5 crashes on missing bytes."""
        view, count = memoryview(buffer).cast("B"), 0
        try:
            start = self.tell()
            while got := super().readinto(view[count:]):
                count += got
            if self._structures is not None:
                self._structures.check(start, bytes(view[:8]))
        except (UserError, OSError) as error:
            self._failed, count = self._failed or error, 0
        view[count:] = bytes(len(view) - count)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except OverflowError:
            self._failed = self._failed or UserError(
                f"expected addresses within its bytes, got {offset}"
            )
            return super().seek(0, os.SEEK_END)


@final
@dataclass(frozen=True, eq=False)
class _Structures:
    """Heaps and B-trees of a file, whose superblock starts at `base`.

    address, length: bytes of one; ended: nodes whose neighbours on a side come to an end, and the
    side.
    """

    descriptor: int
    size: int
    base: int
    address: int
    length: int
    ended: set[tuple[int, int]]

    @classmethod
    def of(cls, descriptor: int, base: int) -> "_Structures":
        head = os.pread(descriptor, 16, base).ljust(16, b"\0")
        address, length = head[13:15] if head[8] < 2 else head[9:11]
        if {address, length} - {2, 4, 8}:
            raise UserError(
                f"its addresses have {address} bytes and its lengths {length}, expected 8 and 8"
            )
        return cls(descriptor, os.fstat(descriptor).st_size, base, address, length, set())

    def check(self, start: int, signature: bytes) -> None:
        """Raise where reading the structure that starts there would never end."""
        if signature.startswith(_GLOBAL):
            self._global_heap(start)
        elif signature.startswith(_LOCAL):
            self._local_heap(start)
        elif signature.startswith(_TREE):
            self._neighbours(start)

    def _global_heap(self, start: int) -> None:
        """Follow objects, padded to 8 bytes, up to the end; number 0 is room that is free."""
        (size,) = self._numbers(start + 8, self.length, 1)
        if not _SMALLEST <= size <= self.size - start:
            return  # the library says so itself
        data, header = os.pread(self.descriptor, size, start), _padded(8 + self.length)
        at, count = header, 0
        while at + header <= len(data):
            taken, count = int.from_bytes(data[at + 8 : at + 8 + self.length], "little"), count + 1
            if data[at : at + 2] != b"\0\0":
                taken = header + _padded(taken)
            if not header <= taken <= len(data) - at or count > _MOST:
                raise UserError(
                    f"the global heap at byte {start} is damaged: expected at most {_MOST} "
                    f"objects, each of {header} bytes or more up to byte {start + len(data)}, got "
                    f"number {count} of {taken} bytes at byte {start + at}"
                )
            at += taken

    def _local_heap(self, start: int) -> None:
        """Follow the free blocks: each has the place of the next, and its own length."""
        size, block = self._numbers(start + 8, self.length, 2)
        (data,) = self._numbers(start + 8 + 2 * self.length, self.address, 1)
        seen: set[int] = set()
        while block != _NO_BLOCK and block < size:
            if block in seen or len(seen) * 2 * self.length > size:
                raise UserError(
                    f"the local heap at byte {start} is damaged: expected a list of free blocks "
                    f"with an end, got one that returns to the block at {block}"
                )
            seen.add(block)
            (block,) = self._numbers(self.base + data + block, self.length, 1)

    def _neighbours(self, start: int) -> None:
        """Follow the nodes of one level, from left to right and back."""
        for side in (0, 1):
            at, seen = start, set[int]()
            while (at, side) not in self.ended and self._is_tree(at):
                if at in seen:
                    raise UserError(
                        f"the B-tree at byte {start} is damaged: expected nodes in a row, got the "
                        f"node at byte {at} as its own neighbour"
                    )
                seen.add(at)
                at = self.base + self._numbers(at + 8, self.address, 2)[side]
            self.ended.update((at, side) for at in seen)

    def _is_tree(self, at: int) -> bool:
        return at + 8 < self.size and os.pread(self.descriptor, 4, at) == _TREE

    def _numbers(self, at: int, width: int, count: int) -> list[int]:
        """Read numbers, zeros behind the end of the file."""
        data = b"" if at >= self.size else os.pread(self.descriptor, width * count, at)
        data = data.ljust(width * count, b"\0")
        return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def _padded(size: int) -> int:
    return -(-size // 8) * 8


@final
class Hdf5Reader(_columns.AbstractReader):
    """Read slabs of rows; a dataset of vectors, such as `est` (N, 5), is read once a slab."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _opened(path) as file:
            _refuse_links(file)
            self._at = _place(file)
            self._table = self._at if isinstance(file[self._at], h5py.Dataset) else ""
            self._description = _description(file, self._table)
            self.columns = tuple(self._find(file[self._at]))
            datasets = [file[self._table]] if self._table else self._datasets(file)
            lengths = {each.name.rpartition("/")[2]: int(each.shape[0]) for each in datasets}
            if len(set(lengths.values())) > 1:
                place = "at the root" if self._at == "/" else f"in {self._at}"
                raise UserError(f"the datasets {place} have different lengths: {lengths}")
            self._rows = next(iter(lengths.values()), 0)
            for each in datasets:
                _check_storage(each)

    def keyword(self, name: str) -> str:
        with _opened(self._path) as file:
            said = file[self._at].attrs.get(name, self._description.keyword(name))
            return str(_text(file.attrs.get(name, said))).strip()

    def whole(self) -> Table:
        with _opened(self._path) as file:
            if self._table:
                return Table.read(file, path=self._table, format="hdf5", character_as_bytes=False)
            names = [column.name for column in self.columns]
            table = Table([each[()] for each in self._datasets(file)], names=names)
        for column in self.columns:
            table[column.name].unit = column.unit or None
        return table

    def chunks(self, rows: int, wanted: _columns.Wanted) -> Iterator[_columns.Chunk]:
        names = sorted({ref.name for ref in wanted})
        with _opened(self._path) as file:
            for first in range(0, self._rows, rows):
                part = slice(first, min(first + rows, self._rows))
                slabs = self._slabs(file, names, part)
                masks = {ref: slabs.get(ref.name + MASK) for ref in wanted}
                yield {r: typed(r.of(slabs[r.name]), k, r, masks[r]) for r, k in wanted.items()}

    def _datasets(self, file: h5py.File) -> list[h5py.Dataset]:
        return [file[self._at][column.name] for column in self.columns]

    def _find(self, at: h5py.Dataset | h5py.Group) -> Iterator[_columns.FileColumn]:
        said = self._description
        if self._table:
            shapes = {name: at.dtype[name].shape for name in at.dtype.names}
            units = {name: said.attribute(name, "unit") for name in shapes}
        else:
            _refuse_links(at)
            # A name may be bytes that are no text.
            found = {n: each for n, each in at.items() if isinstance(n, str) and _is_column(each)}
            shapes = {name: each.shape[1:] for name, each in found.items()}
            units = {name: ", ".join(_words(each, _UNIT_NAMES)) for name, each in found.items()}
        if not all(units.values()):
            units = _listed_units(at, list(shapes) if self._table else None) | {
                name: unit for name, unit in units.items() if unit
            }
        for name, shape in shapes.items():
            width = int(np.prod(shape, dtype=int))
            yield _columns.FileColumn(name, units.get(name, ""), width, said.frame(name))

    def _slabs(self, file: h5py.File, names: list[str], part: slice) -> dict[str, NDArray[Any]]:
        if self._table:
            slab = file[self._table][part]
            return {name: slab[name] for name in slab.dtype.names}
        slabs = {name: file[self._at][name][part] for name in names}
        return {n: s[:, 0] if s.shape[1:] == (1,) else s for n, s in slabs.items()}


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    with _columns.translating(path, "HDF5"), open_hdf5(path) as file:
        yield file


def _refuse_links(file: h5py.Group) -> None:
    """Refuse links to other files."""
    for name in file:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise UserError(
                f"{name} is a link to another file, {link.filename}; put a copy in its place"
            )


def _check_storage(dataset: h5py.Dataset) -> None:
    """Refuse values that are in other files, or that the header alone promises."""
    if dataset.is_virtual or dataset.external:
        raise UserError(f"{dataset.name} has its values in other files; put a copy in its place")
    stored = dataset.id.get_storage_size()
    if dataset.nbytes > _MOST_PACKED * stored + _SPARE:
        raise UserError(
            f"{dataset.name}: {stored} bytes cannot hold an array of shape {dataset.shape}"
        )


def _is_column(item: object) -> bool:
    return isinstance(item, h5py.Dataset) and item.ndim in (1, 2)


def _place(file: h5py.File) -> str:
    """Find the path of the first table of compound rows, or of the group that has the columns, the
    root if it has any; refuse several, of which others would be left out."""
    groups, tables = dict[str, None](), dict[str, tuple[str, ...]]()

    def visit(path: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.names and item.ndim == 1:
            tables[path] = item.dtype.names
        elif _is_column(item):
            groups[path.rpartition("/")[0]] = None

    file.visititems(visit)
    places = ["/"] if any(map(_is_column, file.values())) else list(groups)
    if tables:
        places = [path for path, names in tables.items() if names == next(iter(tables.values()))]
    if len(places) > 1:
        raise UserError(
            f"columns in {len(places)} places, {', '.join(places[:_SHOWN])}: expected them at the "
            "root, in one group or in one table of rows; copy what is meant into one of a new file"
        )
    return places[0] if places else "/"


def _words(item: h5py.Dataset | h5py.Group, keys: tuple[str, ...]) -> list[str]:
    """Return the words of the first of some attributes that is there."""
    values = [np.ravel(item.attrs[key]).tolist() for key in keys if key in item.attrs]
    return [str(_text(word)).strip() for word in values[0]] if values else []


def _listed_units(at: h5py.Dataset | h5py.Group, names: list[str] | None) -> dict[str, str]:
    """Return units that one attribute has for all columns, in the order of their names."""
    units, of = _words(at, _UNIT_NAMES), names or _words(at, ("columns", "names"))
    if 1 < len(units) != len(of):
        raise UserError(
            f"{at.name} has {len(units)} units in one attribute, and {len(of)} names that they are "
            "of; give each dataset an attribute unit of its own"
        )
    return dict(zip(of, units, strict=True)) if len(units) > 1 else {}


def _description(file: h5py.File, table: str) -> _columns.TableDescription:
    if not table or not isinstance(file.get(table + _META, getlink=True), h5py.HardLink):
        return _columns.NO_DESCRIPTION
    return _columns.TableDescription.parse([str(_text(line)) for line in file[table + _META][()]])


def _text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value
