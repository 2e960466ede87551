"""The formats of tables, by the endings of names: how each is read and written."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from astropy.table import Table, vstack
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import _columns, _fits, _hdf5, _parquet, _text, _votable
from dustmap.tables._columns import AbstractReader, typed
from dustmap.tables._outputs import replacing


@final
class NpzReader(AbstractReader):
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
        return ""

    def chunks(self, rows: int, wanted: _columns.Wanted) -> Iterator[_columns.Chunk]:
        with _columns.translating(self._path, "npz"):
            for first in range(0, len(next(iter(self._arrays.values()))), rows):
                part = slice(first, first + rows)
                yield {r: typed(self._arrays[r.name][part], k, r) for r, k in wanted.items()}

    def whole(self) -> Table:
        return Table(self._arrays)


def csv_text(table: Table, separator: str = ",") -> str:
    """Return the names of the columns and their values alone, one row a line; of vectors a column
    for each entry.

    Examples
    --------
    >>> csv_text(Table({"l": [10.0, 20.0], "b": [0.0, -5.0]})).splitlines()
    ['l,b', '10.0,0.0', '20.0,-5.0']
    >>> csv_text(Table({"est": [[1.0, 2.0]]})).splitlines()
    ['est_0,est_1', '1.0,2.0']
    """
    lists = [name for name in table.colnames if _columns.holds_lists(table[name])]
    if lists:
        raise UserError(
            f"columns {', '.join(lists)} hold lists that text has no place for; write a file that "
            "ends in .parquet or .ecsv, or leave the columns out"
        )
    text = io.StringIO()
    _of_single_values(table).write(text, format="ascii.csv", delimiter=separator)
    return text.getvalue()


def _of_single_values(table: Table) -> Table:
    """The same table with a column for each entry of vectors; itself where it has none."""
    if all(len(table[name].shape) == 1 for name in table.colnames):
        return table
    single = Table(meta=table.meta)
    for name in table.colnames:
        column = table[name]
        if len(column.shape) == 1:
            single[name] = column
        for place in np.ndindex(column.shape[1:]) if len(column.shape) > 1 else ():
            single["_".join(map(str, (name, *place)))] = column[(slice(None), *place)]
    return single


def write_csv(path: Path, table: Table, separator: str = ",") -> None:
    """Write the lines of `csv_text`."""
    path.write_text(csv_text(table, separator), encoding="utf-8")


def write_npz(path: Path, table: Table) -> None:
    """Write one array a column, one of every entry of vectors, which has no mask: NaN for missing
    numbers, "" for missing text."""
    table = _of_single_values(table)
    arrays = {name: _without_mask(table[name]) for name in table.colnames}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _without_mask(column: Any) -> NDArray[Any]:
    """The values of a column. UserError where whole numbers are missing beside others that NaN has
    no place among, for they are beyond 2⁵³."""
    masked = np.ma.asarray(column)
    values, missing = np.ma.getdata(masked), np.ma.getmaskarray(masked)
    if not missing.any():
        return np.asarray(values)
    if values.dtype.kind in "US":
        return np.where(missing, values.dtype.type(""), values)
    if values.dtype.kind in "iu" and (np.abs(values[~missing]) > 2**53).any():
        raise UserError(
            f"column {column.name} lacks whole numbers in {missing.sum()} rows and has others that "
            "an array with NaN would round; choose a name that ends in .parquet, .fits or .ecsv"
        )
    return np.where(missing, np.nan, values.astype(np.float64))


def write_hdf5(path: Path, table: Table) -> None:
    """Write compound rows, with units and header as astropy keeps them."""
    plain = Table(table)
    for name in _columns.text_columns(plain):  # HDF5 has no letters of four bytes
        plain[name] = np.char.encode(np.ma.filled(plain[name], "").astype(np.str_), "utf-8")
    plain.write(path, format="hdf5", path="table", serialize_meta=True)


@final
@dataclass(frozen=True)
class TableFormat:
    """One format. `packed`: read with .gz behind the ending, too; `bare`: keeps no header."""

    endings: tuple[str, ...]
    reader: Callable[[Path], AbstractReader]
    write: Callable[[Path, Table], None]
    packed: bool = False
    bare: bool = False

    def reads(self, name: str) -> bool:
        """Check whether a name in small letters has one of the endings."""
        return name.removesuffix(".gz" if self.packed else "").endswith(self.endings)


_write_tabs = partial(write_csv, separator="\t")
FORMATS = (
    TableFormat((".fits", ".fit"), _fits.FitsReader, _fits.write_fits, packed=True),
    TableFormat((".h5", ".hdf5", ".hdf"), _hdf5.Hdf5Reader, write_hdf5),
    TableFormat((".parquet", ".pq"), _parquet.ParquetReader, _parquet.write_parquet),
    TableFormat(
        (".vot", ".votable", ".xml"), _votable.VotableReader, _votable.write_votable, packed=True
    ),
    TableFormat((".csv",), _text.TextReader, write_csv, packed=True, bare=True),
    TableFormat((".ecsv",), _text.TextReader, _text.write_ecsv, packed=True),
    TableFormat((".tsv", ".txt", ".dat"), _text.TextReader, _write_tabs, packed=True, bare=True),
    TableFormat((".npz",), NpzReader, write_npz, bare=True),
)
#: All of them, for messages.
ENDINGS = ", ".join(ending for each in FORMATS for ending in each.endings)


def open_table(path: str | Path) -> AbstractReader:
    """Open a table to be read in chunks, in the format that the name's ending says.

    Raises
    ------
    UserError
        Where there is no such file, its ending is unknown, or its header is damaged.
    """
    path = Path(path)
    name = path.name.lower()
    for each in FORMATS:
        if each.reads(name):
            if not path.is_file():
                raise UserError(f"{path}: there is no such file")
            if path.stat().st_size == 0:
                raise UserError(f"{path}: the file is empty")
            return each.reader(path)
    if name.endswith(".zarr"):
        raise UserError(
            f"{path}: a star store is no table; a run takes one alone, as data.catalog: elsewhere "
            "name the catalog that it was ingested from"
        )
    remedy = ""
    if name.endswith(".tbl"):
        made = f'Table.read("{path.name}", format="ascii.ipac").write("{path.stem}.ecsv")'
        remedy = f"; astropy converts a table of IPAC: {made}"
    raise UserError(f"{path}: expected a table that ends in {ENDINGS}{remedy}")


def read_tables(*paths: str | Path) -> Table:
    """Read all columns of some files into one table.

    Raises
    ------
    UserError
        Where a file cannot be read, or the columns of two have other names.
    """
    tables = [open_table(path).whole() for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if table.colnames != tables[0].colnames:
            raise UserError(
                f"{path}: the columns are {', '.join(table.colnames)}, but those of {paths[0]} are "
                f"{', '.join(tables[0].colnames)}; all files of data.catalog must agree"
            )
    return tables[0] if len(tables) == 1 else vstack(tables, metadata_conflicts="silent")


def table_format(path: str | Path) -> TableFormat:
    """Choose the format in which a table is written by the ending of its name.

    Raises
    ------
    UserError
        Where nothing is written under such a name.

    Examples
    --------
    >>> table_format("sky.parquet") == table_format("stars.parquet")
    True
    """
    for each in FORMATS:
        if str(path).lower().endswith(each.endings):
            return each
    raise UserError(f"{path}: expected a table that ends in {ENDINGS}")


def write_table(path: str | Path, table: Table, overwrite: bool = False) -> None:
    """Write a table, whole or not at all, in the format that the name's ending says."""
    kind = table_format(path)
    with replacing(Path(path), overwrite) as partial:
        try:
            kind.write(partial, table)
        except (TypeError, ValueError) as error:
            lists = [name for name in table.colnames if _columns.holds_lists(table[name])]
            if not lists or isinstance(error, UserError):
                raise
            raise UserError(
                f"{path}: columns {', '.join(lists)} hold lists that this format has no place for; "
                "choose a name that ends in .parquet or .ecsv, or leave the columns out"
            ) from None
