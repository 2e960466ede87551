"""HDF5: datasets of one length at the root, or one table of compound rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import h5py
import numpy as np
from numpy.typing import NDArray

from dustmap.sky._hdf5 import DamagedHdf5, open_hdf5
from dustmap.sky.catalogs.readers._base import (
    MASK,
    NO_DESCRIPTION,
    AbstractReader,
    CatalogError,
    Chunk,
    FileColumn,
    TableDescription,
    Wanted,
    described,
    translating,
    typed,
)

_META = ".__table_column_meta__"  # where astropy keeps units
#: What h5py raises on damaged files, beside OSError.
_BROKEN = (KeyError, RuntimeError, ValueError, TypeError)
#: Nothing is packed 65536-fold; and so many bytes of fill values more do no harm.
_MOST, _SPARE = 2**16, 2**26
_UNITS = ("unit", "units", "UNIT", "UNITS")


@final
class Hdf5Reader(AbstractReader):
    """Reads slabs of rows; a dataset of vectors, such as `est` (N, 5), is read once a slab."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _opened(path) as file:
            _refuse_links(file)
            self._table = _compound(file)
            self._description = _description(file, self._table)
            self._label = str(_text(file.attrs.get("EXTSYS", self._description.label)))
            self._columns = tuple(self._find(file))
            self._rows = self._length(file)
            for name in [self._table] if self._table else [c.name for c in self._columns]:
                _check_storage(file[name])

    @property
    def columns(self) -> tuple[FileColumn, ...]:
        return self._columns

    @property
    def label(self) -> str:
        return self._label

    def chunks(self, rows: int, wanted: Wanted) -> Iterator[Chunk]:
        names = sorted({ref.name for ref in wanted})
        with _opened(self._path) as file:
            for first in range(0, self._rows, rows):
                part = slice(first, min(first + rows, self._rows))
                slabs = self._slabs(file, names, part)
                yield {
                    ref: typed(
                        _entry(slabs[ref.name], ref.entry), kind, ref, slabs.get(ref.name + MASK)
                    )
                    for ref, kind in wanted.items()
                }

    def _find(self, file: h5py.File) -> Iterator[FileColumn]:
        if self._table:
            dtype = file[self._table].dtype
            for name in dtype.names or ():
                width = int(np.prod(dtype[name].shape, dtype=int))
                yield FileColumn(name, self._description.units.get(name, ""), width)
            return
        for name, dataset in file.items():
            if not isinstance(name, str):
                continue  # bytes that are no text
            if isinstance(dataset, h5py.Dataset) and dataset.ndim in (1, 2):
                units = [dataset.attrs[key] for key in _UNITS if key in dataset.attrs]
                unit = str(_text(units[0])) if units else ""
                yield FileColumn(name, unit, 1 if dataset.ndim == 1 else dataset.shape[1])

    def _length(self, file: h5py.File) -> int:
        if self._table:
            return int(file[self._table].shape[0])
        lengths = {column.name: int(file[column.name].shape[0]) for column in self._columns}
        if len(set(lengths.values())) > 1:
            raise CatalogError(
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
    with translating(path, "HDF5", *_BROKEN):
        try:
            with open_hdf5(path) as file:
                yield file
        except DamagedHdf5 as error:
            raise CatalogError(str(error)) from None


def _refuse_links(file: h5py.File) -> None:
    """All that is read is in this file."""
    for name in file:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise CatalogError(
                f"{name} is a link to another file, {link.filename}; put a copy in its place"
            )


def _check_storage(dataset: h5py.Dataset) -> None:
    """Values that are in the file, not elsewhere, and not promised by the header alone."""
    if dataset.is_virtual or dataset.external:
        raise CatalogError(f"{dataset.name} has its values in other files; put a copy in its place")
    stored = dataset.id.get_storage_size()
    if dataset.nbytes > _MOST * stored + _SPARE:
        raise CatalogError(
            f"{dataset.name}: {stored} bytes cannot hold an array of shape {dataset.shape}"
        )


def _compound(file: h5py.File) -> str:
    """The path of the first table of compound rows, or nothing."""
    found: list[str] = []

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.names and item.ndim == 1:
            found.append(name)

    file.visititems(visit)
    return found[0] if found else ""


def _description(file: h5py.File, table: str) -> TableDescription:
    if not table or not isinstance(file.get(table + _META, getlink=True), h5py.HardLink):
        return NO_DESCRIPTION
    return described([str(_text(line)) for line in file[table + _META][()]])


def _entry(slab: NDArray[Any], entry: int | None) -> NDArray[Any]:
    return slab if entry is None else slab[:, entry]


def _text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value
