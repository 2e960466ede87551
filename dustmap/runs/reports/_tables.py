"""Tables of numbers: CSV, ECSV, FITS, npz and Parquet files, read and written by columns."""

import importlib.util
from pathlib import Path

import numpy as np
from astropy.table import Table, vstack
from numpy.typing import NDArray

from dustmap.sky import write_table
from dustmap.sky._outputs import replacing

FORMATS = {".csv": "ascii.csv", ".ecsv": "ascii.ecsv", ".fits": "fits", ".fit": "fits"}
OTHERS = (".npz", ".parquet")


def read_tables(paths: tuple[str | Path, ...]) -> Table:
    """One table of all files, whose columns must have the same names."""
    tables = [read_table(Path(path)) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if table.colnames != tables[0].colnames:
            raise ValueError(
                f"{path}: the columns are {_names(table)}, but those of {paths[0]} are "
                f"{_names(tables[0])}; all files of data.catalog must agree"
            )
    return tables[0] if len(tables) == 1 else vstack(tables, metadata_conflicts="silent")


def read_table(path: Path) -> Table:
    """A table by the ending of its name.

    An npz file holds one array a column, or a matrix `data` (N, C) with the names `columns` (C,).
    """
    kind = path.suffix.lower()
    if kind not in (*FORMATS, *OTHERS):
        raise ValueError(f"{path}: expected a table that ends in {', '.join((*FORMATS, *OTHERS))}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        return _read(path, kind)
    except MemoryError:
        raise
    except Exception as error:  # of the library of any of the formats
        words = " ".join(str(error).split())
        if words.startswith(str(path)):
            raise
        raise ValueError(
            f"{path}: cannot be read to its end ({words[:200] or type(error).__name__}); is the "
            "file whole?"
        ) from error


def _read(path: Path, kind: str) -> Table:
    if kind == ".npz":
        return _read_npz(path)
    if kind == ".parquet":
        return _read_parquet(path)
    return Table.read(path, format=FORMATS[kind])


def write_columns(path: Path, table: Table, overwrite: bool) -> None:
    """Writes a table by the ending of its name; npz as one array a column."""
    kind = path.suffix.lower()
    if kind in FORMATS:
        write_table(path, table, overwrite)
        return
    if kind != ".npz":
        raise ValueError(f"{path}: expected a name that ends in {', '.join(FORMATS)} or .npz")
    with replacing(path, overwrite) as partial, partial.open("wb") as file:
        arrays = {name: np.asarray(table[name]) for name in table.colnames}
        np.savez(file, allow_pickle=False, **arrays)


def column(table: Table, name: str) -> NDArray[np.float64]:
    """The numbers of a column (N,), all finite."""
    if name not in table.colnames:
        raise ValueError(f"missing column {name}; the columns there are {_names(table)}")
    try:
        values = np.ma.filled(np.ma.asarray(table[name]).astype(np.float64), np.nan)
    except (TypeError, ValueError):
        raise ValueError(f"column {name}: expected numbers, got {table[name].dtype}") from None
    check_rows(np.isfinite(values), name, "finite")
    return np.asarray(values, np.float64)


def check_rows(good: NDArray[np.bool_], name: str, wanted: str) -> None:
    """An error that counts the bad rows of a column and names the first."""
    if not good.all():
        bad = np.flatnonzero(~good)
        raise ValueError(
            f"column {name}: {len(bad)} of {len(good)} rows are not {wanted} (first at row "
            f"{bad[0]}, counted from 0); correct or remove them"
        )


def _read_npz(path: Path) -> Table:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read without pickle ({error})") from None
    if "columns" in arrays and "data" in arrays:
        names, matrix = arrays.pop("columns"), arrays.pop("data")
        if matrix.ndim != 2 or names.shape != matrix.shape[1:]:
            raise ValueError(
                f"{path}: expected data (N, C) with columns (C,), got {matrix.shape} and "
                f"{names.shape}"
            )
        arrays |= {str(name): matrix[:, i] for i, name in enumerate(names)}
    lengths = {name: array.shape for name, array in arrays.items()}
    if not arrays or len(set(lengths.values())) != 1 or next(iter(arrays.values())).ndim != 1:
        raise ValueError(f"{path}: expected arrays of one length (N,), one a column, got {lengths}")
    return Table(arrays)


def _read_parquet(path: Path) -> Table:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path}: reading Parquet needs pyarrow; run `pip install pyarrow`")
    import pandas as pd

    return Table.from_pandas(pd.read_parquet(path))


def _names(table: Table) -> str:
    return ", ".join(table.colnames)
