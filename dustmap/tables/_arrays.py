"""Named arrays as tables: HDF5 and npz.

HDF5: datasets of one length at the root, or one table of compound rows. npz: one array a column, or
a matrix `data` (N, C) with the names `columns` (C,).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import h5py
import numpy as np
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import _columns
from dustmap.tables._columns import MASK, typed
from dustmap.tables._hdf5_files import open_hdf5

_META = ".__table_column_meta__"  # where astropy keeps units
#: Nothing is packed 65536-fold; and so many bytes of fill values more do no harm.
_MOST, _SPARE = 2**16, 2**26
_UNIT_NAMES = ("unit", "units", "UNIT", "UNITS")
#: What a table without a name of its own is called.
_PATH = "table"


@final
class Hdf5Reader(_columns.AbstractReader):
    """Read slabs of rows; a dataset of vectors, such as `est` (N, 5), is read once a slab."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _opened(path) as file:
            _refuse_links(file)
            self._table = _compound(file)
            self._description = _description(file, self._table)
            self.columns = tuple(self._find(file))
            self._rows = self._length(file)
            for name in [self._table] if self._table else [c.name for c in self.columns]:
                _check_storage(file[name])

    def keyword(self, name: str) -> str:
        with _opened(self._path) as file:
            value = file.attrs.get(name, self._description.keyword(name))
            return str(_text(value)).strip()

    def whole(self) -> Table:
        with _opened(self._path) as file:
            if self._table:
                return Table.read(file, path=self._table, format="hdf5", character_as_bytes=False)
            table = Table({column.name: file[column.name][()] for column in self.columns})
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

    def _find(self, file: h5py.File) -> Iterator[_columns.FileColumn]:
        if self._table:
            dtype = file[self._table].dtype
            for name in dtype.names or ():
                width = int(np.prod(dtype[name].shape, dtype=int))
                yield _columns.FileColumn(name, self._description.attribute(name, "unit"), width)
            return
        for name, dataset in file.items():
            if not isinstance(name, str):
                continue  # bytes that are no text
            if isinstance(dataset, h5py.Dataset) and dataset.ndim in (1, 2):
                units = [dataset.attrs[key] for key in _UNIT_NAMES if key in dataset.attrs]
                unit = str(_text(units[0])) if units else ""
                yield _columns.FileColumn(name, unit, 1 if dataset.ndim == 1 else dataset.shape[1])

    def _length(self, file: h5py.File) -> int:
        if self._table:
            return int(file[self._table].shape[0])
        lengths = {column.name: int(file[column.name].shape[0]) for column in self.columns}
        if len(set(lengths.values())) > 1:
            raise UserError(
                f"{self._path}: the datasets at the root have different lengths: {lengths}"
            )
        return next(iter(lengths.values()), 0)

    def _slabs(self, file: h5py.File, names: list[str], part: slice) -> dict[str, NDArray[Any]]:
        if self._table:
            slab = file[self._table][part]
            masks = [name + MASK for name in names if name + MASK in slab.dtype.names]
            return {name: slab[name] for name in (*names, *masks)}
        return {name: file[name][part] for name in names}


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    with _columns.translating(path, "HDF5"), open_hdf5(path) as file:
        yield file


def _refuse_links(file: h5py.File) -> None:
    """All that is read is in this file."""
    for name in file:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise UserError(
                f"{name} is a link to another file, {link.filename}; put a copy in its place"
            )


def _check_storage(dataset: h5py.Dataset) -> None:
    """Values that are in the file, not elsewhere, and not promised by the header alone."""
    if dataset.is_virtual or dataset.external:
        raise UserError(f"{dataset.name} has its values in other files; put a copy in its place")
    stored = dataset.id.get_storage_size()
    if dataset.nbytes > _MOST * stored + _SPARE:
        raise UserError(
            f"{dataset.name}: {stored} bytes cannot hold an array of shape {dataset.shape}"
        )


def _compound(file: h5py.File) -> str:
    """The path of the first table of compound rows, or nothing."""

    def visit(name: str, item: object) -> str | None:
        is_table = isinstance(item, h5py.Dataset) and item.dtype.names and item.ndim == 1
        return name if is_table else None

    return file.visititems(visit) or ""


def _description(file: h5py.File, table: str) -> _columns.TableDescription:
    if not table or not isinstance(file.get(table + _META, getlink=True), h5py.HardLink):
        return _columns.NO_DESCRIPTION
    return _columns.TableDescription.parse([str(_text(line)) for line in file[table + _META][()]])


def _text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


def write_hdf5(path: Path, table: Table) -> None:
    """Write compound rows, with units and header as astropy keeps them."""
    plain = Table(table)
    for name in _columns.text_columns(plain):  # HDF5 has no letters of four bytes
        plain[name] = np.char.encode(np.ma.filled(plain[name], "").astype(np.str_), "utf-8")
    plain.write(path, format="hdf5", path=_PATH, serialize_meta=True)


@final
class NpzReader(_columns.AbstractReader):
    """Hold the arrays of an npz file, which is read whole and without pickles."""

    def __init__(self, path: Path) -> None:
        with _columns.translating(path, "npz"), np.load(path, allow_pickle=False) as stored:
            arrays = {name: np.asarray(stored[name]) for name in stored.files}
        if "columns" in arrays and "data" in arrays:
            names, matrix = arrays.pop("columns"), arrays.pop("data")
            if matrix.ndim != 2 or names.shape != matrix.shape[1:]:
                raise UserError(
                    f"{path}: expected data (N, C) with columns (C,), got {matrix.shape} and "
                    f"{names.shape}"
                )
            arrays |= {str(name): matrix[:, i] for i, name in enumerate(names)}
        shapes = {name: array.shape for name, array in arrays.items()}
        if not arrays or {len(s) for s in shapes.values()} != {1} or len(set(shapes.values())) > 1:
            raise UserError(
                f"{path}: expected arrays of one length (N,), one a column, got {shapes}"
            )
        self._path, self._arrays = path, arrays
        self.columns = tuple(map(_columns.FileColumn, arrays))

    def keyword(self, name: str) -> str:
        del name
        return ""

    def chunks(self, rows: int, wanted: _columns.Wanted) -> Iterator[_columns.Chunk]:
        with _columns.translating(self._path, "npz"):
            for first in range(0, len(next(iter(self._arrays.values()))), rows):
                part = slice(first, first + rows)
                yield {r: typed(self._arrays[r.name][part], k, r) for r, k in wanted.items()}

    def whole(self) -> Table:
        return Table(self._arrays)


def write_npz(path: Path, table: Table) -> None:
    """Write one array a column."""
    arrays = {name: np.asarray(table[name]) for name in table.colnames}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
