"""The formats of tables, by the endings of names: how each is read and written."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from astropy.table import Table, vstack

from dustmap.errors import UserError
from dustmap.tables import _arrays, _arrow, _fits, _votable
from dustmap.tables._columns import AbstractReader
from dustmap.tables._outputs import replacing


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
        """Whether a name in small letters has one of the endings."""
        return name.removesuffix(".gz" if self.packed else "").endswith(self.endings)


_write_tabs = partial(_arrow.write_csv, separator="\t")
FORMATS = (
    TableFormat((".fits", ".fit"), _fits.FitsReader, _fits.write_fits, packed=True),
    TableFormat((".h5", ".hdf5", ".hdf"), _arrays.Hdf5Reader, _arrays.write_hdf5),
    TableFormat((".parquet", ".pq"), _arrow.ParquetReader, _arrow.write_parquet),
    TableFormat(
        (".vot", ".votable", ".xml"), _votable.VotableReader, _votable.write_votable, packed=True
    ),
    TableFormat((".csv",), _arrow.TextReader, _arrow.write_csv, packed=True, bare=True),
    TableFormat((".ecsv",), _arrow.TextReader, _arrow.write_ecsv, packed=True),
    TableFormat((".tsv", ".txt", ".dat"), _arrow.TextReader, _write_tabs, packed=True, bare=True),
    TableFormat((".npz",), _arrays.NpzReader, _arrays.write_npz, bare=True),
)
#: All of them, for messages.
ENDINGS = ", ".join(ending for each in FORMATS for ending in each.endings)


def open_table(path: str | Path) -> AbstractReader:
    """Open a table to be read in chunks, in the format that the name's ending says.

    UserError where there is no such file, its ending is unknown, or its header is damaged.
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
        raise UserError(f"{path}: a star store is no table; data.catalog takes it as it is")
    raise UserError(f"{path}: expected a table that ends in {ENDINGS}")


def read_tables(*paths: str | Path) -> Table:
    """Read all columns of some files into one table.

    UserError where a file cannot be read, or the columns of two have other names.
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

    UserError where nothing is written under such a name.
    """
    for each in FORMATS:
        if str(path).lower().endswith(each.endings):
            return each
    raise UserError(f"{path}: expected a table that ends in {ENDINGS}")


def write_table(path: str | Path, table: Table, overwrite: bool = False) -> None:
    """Write a table, whole or not at all, in the format that the name's ending says."""
    kind = table_format(path)
    with replacing(Path(path), overwrite) as partial:
        kind.write(partial, table)
