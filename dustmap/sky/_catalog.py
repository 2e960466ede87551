"""Star catalogs: directions, distances and extinctions, read from tables and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from astropy import units as u
from astropy.table import QTable, Table
from numpy.typing import NDArray

from dustmap.sky._atomic import replacing
from dustmap.sky._coordinates import cartesian

# Column -> (field, unit); the unit is taken where the file names none.
COLUMNS: dict[str, tuple[str, u.UnitBase]] = {
    "l": ("l", u.deg),
    "b": ("b", u.deg),
    "distance_pc": ("distance", u.pc),
    "extinction": ("extinction", u.mag),
    "extinction_error": ("extinction_error", u.mag),
}
ARRAYS = ("source_id", *(field for field, _ in COLUMNS.values()))
FORMATS = {
    ".fits": "fits",
    ".fit": "fits",
    ".csv": "ascii.csv",
    ".ecsv": "ascii.ecsv",
}


@final
@dataclass(frozen=True, eq=False)
class StarTable:
    """N stars. `system` names the band or curve of the extinctions, such as A_V.

    source_id (N,); Galactic l, b (N,) in degrees; distance (N,) in pc; extinction and
    extinction_error (N,) in mag. Every value is finite, every distance and error positive.
    """

    source_id: NDArray[np.int64]
    l: NDArray[np.float64]
    b: NDArray[np.float64]
    distance: NDArray[np.float64]
    extinction: NDArray[np.float64]
    extinction_error: NDArray[np.float64]
    system: str

    def __post_init__(self) -> None:
        _check_lengths(self)
        for column, (field, _) in COLUMNS.items():
            _check_rows(np.isfinite(getattr(self, field)), column, "finite")
        _check_rows(np.abs(self.b) <= 90.0, "b", "between -90 and 90 degrees")
        _check_rows(self.distance > 0.0, "distance_pc", "> 0")
        _check_rows(self.extinction_error > 0.0, "extinction_error", "> 0")

    def __len__(self) -> int:
        return len(self.source_id)

    def __getitem__(self, index: NDArray[Any]) -> Self:
        """The stars at an index array or under a mask."""
        arrays = {name: getattr(self, name)[index] for name in ARRAYS}
        return type(self)(system=self.system, **arrays)

    def positions(self) -> NDArray[np.float64]:
        """Heliocentric Galactic X, Y, Z in pc (N, 3)."""
        return cartesian(self.l, self.b, self.distance)


def _check_lengths(stars: StarTable) -> None:
    lengths = {name: getattr(stars, name).shape for name in ARRAYS}
    if len(set(lengths.values())) != 1 or stars.source_id.ndim != 1:
        raise ValueError(f"every column of a catalog must have one length (N,), got {lengths}")
    if len(stars) == 0:
        raise ValueError("the catalog has no rows: expected at least one star")


def _check_rows(good: NDArray[np.bool_], column: str, wanted: str) -> None:
    if not good.all():
        bad = np.flatnonzero(~good)
        raise ValueError(
            f"column {column}: {len(bad)} of {len(good)} rows are not {wanted} "
            f"(first at row {bad[0]}, counted from 0); correct or remove them"
        )


def read_stars(paths: Sequence[str | Path], system: str) -> StarTable:
    """Reads tables with the columns source_id, l, b, distance_pc, extinction, extinction_error.

    FITS, CSV and ECSV. Units of the file are converted; a file without them has degrees, pc and
    mag. A file that names its extinction system must name `system`.
    """
    parts = [_read(Path(path), system) for path in paths]
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    return StarTable(system=system, **arrays)


def _read(path: Path, system: str) -> StarTable:
    table = _table(path)
    _check_columns(path, table, ("source_id", *COLUMNS))
    _check_system(path, table, system)
    try:
        columns = {field: _values(table, name, unit) for name, (field, unit) in COLUMNS.items()}
        return StarTable(source_id=_identifiers(table), system=system, **columns)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _table(path: Path) -> Table:
    kind = _format(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such catalog")
    return Table.read(path, format=kind)


def _format(path: Path) -> str:
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: expected a catalog that ends in {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()]


def _check_columns(path: Path, table: Table, wanted: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in table.colnames]
    if missing:
        raise ValueError(
            f"{path}: missing {', '.join(missing)}; the columns there are "
            f"{', '.join(table.colnames)}"
        )


def _check_system(path: Path, table: Table, system: str) -> None:
    found = table.meta.get("EXTSYS", system)
    if found != system:
        raise ValueError(
            f"{path}: the extinctions are {found} by the file's header and {system} by "
            f"data.system; correct the one that is wrong"
        )


def _values(table: Table, name: str, unit: u.UnitBase) -> NDArray[np.float64]:
    """Values in `unit`, float64; masked entries become NaN, which the checks name."""
    column = table[name]
    try:
        values = np.ma.filled(np.ma.asarray(column, np.float64), np.nan)
        factor = 1.0 if column.unit is None else u.Unit(column.unit).to(unit)
    except (ValueError, TypeError, u.UnitConversionError) as error:
        raise ValueError(f"column {name}: expected numbers in {unit} ({error})") from None
    return np.asarray(values * factor, np.float64)


def _identifiers(table: Table) -> NDArray[np.int64]:
    column = np.ma.asarray(table["source_id"])
    if column.dtype.kind not in "iu" or np.ma.is_masked(column):
        raise ValueError(f"column source_id: expected whole numbers, got {column.dtype}")
    return np.ma.getdata(column).astype(np.int64)


def read_places(path: str | Path) -> tuple[Table, NDArray[np.float64]]:
    """Any table with the columns l, b, distance_pc; and X, Y, Z in pc (N, 3) of its rows."""
    path = Path(path)
    table = _table(path)
    names = ("l", "b", "distance_pc")
    _check_columns(path, table, names)
    try:
        l, b, distance = (_values(table, name, COLUMNS[name][1]) for name in names)
        for name, values in zip(names, (l, b, distance), strict=True):
            _check_rows(np.isfinite(values), name, "finite")
        _check_rows(np.abs(b) <= 90.0, "b", "between -90 and 90 degrees")
        _check_rows(distance > 0.0, "distance_pc", "> 0")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return table, cartesian(l, b, distance)


def write_table(path: str | Path, table: Table, overwrite: bool = False) -> None:
    """Writes a table in the format that the name's ending says."""
    path = Path(path)
    with replacing(path, overwrite) as partial:
        table.write(partial, format=_format(path))


def write_stars(path: str | Path, stars: StarTable, overwrite: bool = False) -> None:
    """Writes a FITS table with units that `read_stars` reads back exactly."""
    columns = {"source_id": stars.source_id}
    columns |= {name: getattr(stars, field) * unit for name, (field, unit) in COLUMNS.items()}
    table = QTable(columns, meta={"EXTSYS": stars.system})
    with replacing(Path(path), overwrite) as partial:
        table.write(partial, format="fits")
