"""Columns of a table file, and their values in chunks of rows: the interface of all formats.

A reader knows the names, units and widths of the columns once it is open; `chunks` then gives the
columns asked for, so many rows at a time, and `whole` everything as one table of astropy.
"""

import enum
import gzip
import re
import traceback
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, cast, final

import numpy as np
from astropy import units as u
from astropy.table import Table
from astropy.table.meta import get_header_from_yaml
from numpy.typing import NDArray

from dustmap.errors import UserError, one_line

_ENTRY = re.compile(r"^(.+)\[:,\s*(\d+)\s*\]$")
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
#: Where astropy writes that a column has no values, `x` and `x.mask`.
MASK = ".mask"
#: Words for a value that is missing, in small letters.
MISSING = (
    *("", "nan", "null", "na", "n/a", "none", "-", "--", "...", "*"),
    *("<na>", "#n/a", "\\n", "masked"),
)


@final
class ColumnType(enum.Enum):
    """The types that values of a column are read as."""

    INTEGER = "whole numbers"  # masked int64; floating point would lose digits of identifiers
    NUMBER = "numbers"  # float64, NaN where the file has none
    TEXT = "text"  # stripped, "" where the file has none
    LABEL = "text or whole numbers"  # as text, "" where the file has none


@final
@dataclass(frozen=True)
class ColumnRef:
    """A column of a file, or one entry of a column of vectors: `est` or `est[:,4]`."""

    name: str
    entry: int | None = None

    @classmethod
    def parse(cls, written: str) -> Self:
        """Split `name[:,entry]`; any other text is a name.

        >>> ColumnRef.parse("est[:,4]")
        ColumnRef(name='est', entry=4)
        """
        match = _ENTRY.match(written)
        return cls(written) if match is None else cls(match[1], int(match[2]))

    def of(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the entry of the values (N,) or (N, K) of the column."""
        return values if self.entry is None else values[:, self.entry]

    def __str__(self) -> str:
        return self.name if self.entry is None else f"{self.name}[:,{self.entry}]"


@final
@dataclass(frozen=True)
class FileColumn:
    """A column as the file declares it.

    width : 1, or the entries of a column of vectors, 0 where that differs from row to row
    frame : system and equinox of a coordinate, where the file says so of single columns
    """

    name: str
    unit: str = ""
    width: int = 1
    frame: str = ""


Chunk = dict[ColumnRef, NDArray[Any]]
Wanted = Mapping[ColumnRef, ColumnType]


class AbstractReader(ABC):
    """One file. Opening it reads no rows, except of formats that are read whole.

    columns: all of them, in the order of the file.
    """

    columns: tuple[FileColumn, ...]

    @abstractmethod
    def keyword(self, name: str) -> str:
        """Return what the header of the file says under a name, stripped; "" for nothing."""

    @abstractmethod
    def chunks(self, rows: int, wanted: Wanted) -> Iterator[Chunk]:
        """Yield the wanted columns, at most about `rows` rows at a time, in the file's order.

        UserError where a column holds something else than is wanted, or the file ends early.
        """

    @abstractmethod
    def whole(self) -> Table:
        """Return all columns with their own types, units and header, as they are written back."""


def opened(path: Path) -> IO[bytes]:
    """Open a file to read bytes, unpacked where its name ends in .gz."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return cast(IO[bytes], opener(path, "rb"))


def raised_here(error: BaseException) -> bool:
    """Check whether a frame of this package raised the error, not one of a library below it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(_PACKAGE)


def words_of_damage(error: Exception) -> str:
    """Put what a library says of damaged bytes into one line; raise what is a fault of ours.

    An error that a frame of this package raises is a fault of ours, unless it is one that parsing
    foreign values raises by itself: ValueError, OverflowError, OSError, EOFError, zlib.error.
    """
    of_values = isinstance(error, ValueError | OverflowError | OSError | EOFError | zlib.error)
    if isinstance(error, MemoryError) or (raised_here(error) and not of_values):
        raise error
    return one_line(error)[:200]


@contextmanager
def translating(path: Path, format_name: str) -> Iterator[None]:
    """Turn errors of damaged files into one UserError that names the file.

    Errors of ours (`words_of_damage`) and MemoryError pass.
    """
    try:
        yield
    except UserError as error:
        if str(error).startswith(str(path)):
            raise
        raise UserError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except Exception as error:
        if isinstance(error, UnicodeDecodeError) and format_name in ("text", "ECSV"):
            byte = f"0x{error.object[error.start]:02x}"
            raise UserError(
                f"{path}: its text is not UTF-8 (byte {byte}); convert it, as by iconv -f latin1 "
                "-t utf-8"
            ) from None
        raise UserError(
            f"{path}: cannot be read as {format_name} to its end ({words_of_damage(error)}); is "
            "the file whole?"
        ) from None


def typed(
    raw: NDArray[Any], kind: ColumnType, ref: ColumnRef, missing: NDArray[np.bool_] | None = None
) -> NDArray[Any]:
    """Convert values of a file (N,) to a column type. Text is never parsed, numbers never rounded.

    UserError where the values are of another type.

    Parameters
    ----------
    missing
        Rows (N,) without a value: NaN among numbers, masked among whole numbers.
    """
    if kind is ColumnType.TEXT:
        return _text(raw, ref)
    missing = np.zeros(len(raw), bool) if missing is None else np.asarray(missing, bool)
    if kind is ColumnType.LABEL:
        return _labels(raw, ref, missing)
    if raw.dtype.kind == "b":
        raw = raw.astype(np.uint8)
    if raw.dtype.kind not in ("iu" if kind is ColumnType.INTEGER else "iuf"):
        raise wrong_type(ref, kind, _kind_words(raw.dtype))
    if kind is ColumnType.NUMBER:
        values = raw.astype(np.float64)
        values[missing] = np.nan
        return values
    if raw.dtype.kind == "u" and len(raw) and raw.max() > np.iinfo(np.int64).max:
        raise wrong_type(ref, kind, "values above 2^63 - 1")
    return np.ma.MaskedArray(raw.astype(np.int64), mask=missing)


def wrong_type(ref: ColumnRef | str, kind: ColumnType, got: str) -> UserError:
    """Name the column, the type that was expected, what is there and what to do."""
    plain = "; write decimal degrees for 12:30:45, a point for a comma, or name another column"
    remedy = plain if kind is ColumnType.NUMBER else "; name another column"
    return UserError(f"column {ref}: expected {kind.value}, got {got}{remedy}")


def _text(raw: NDArray[Any], ref: ColumnRef) -> NDArray[Any]:
    if raw.dtype.kind not in "SUO":
        raise wrong_type(ref, ColumnType.TEXT, _kind_words(raw.dtype))
    if raw.dtype.kind == "O":
        words = [value.decode() if isinstance(value, bytes) else value or "" for value in raw]
        raw = np.array(words, dtype=np.str_)
    elif raw.dtype.kind == "S":
        raw = np.char.decode(raw, "utf-8", "replace")
    return np.char.strip(raw)


def plain_label(label: str) -> str:
    """A label, of 1.0 the whole number: tables of text have it so beside a missing one.

    >>> [plain_label(label) for label in ("1.0", "1", "DR2.0")]
    ['1', '1', 'DR2.0']
    """
    return label.removesuffix(".0") if label.removesuffix(".0").isdecimal() else label


def _labels(raw: NDArray[Any], ref: ColumnRef, none: NDArray[np.bool_]) -> NDArray[Any]:
    """Return text, or whole numbers as text; "" where there is none, such as NaN."""
    if raw.dtype.kind in "SUO":
        words, places = np.unique(_text(raw, ref), return_inverse=True)
        labels = np.array([plain_label(str(word)) for word in words], dtype=np.str_)[places]
        none = none | np.isin(np.char.lower(labels), MISSING)
    elif raw.dtype.kind == "f":
        none = none | ~np.isfinite(raw)
        numbers = np.where(none, 0.0, raw)
        if (numbers != np.rint(numbers)).any():
            raise wrong_type(ref, ColumnType.LABEL, _kind_words(raw.dtype))
        labels = numbers.astype(np.int64).astype(np.str_)
    elif raw.dtype.kind in "iub":
        labels = raw.astype(np.str_)
    else:
        raise wrong_type(ref, ColumnType.LABEL, _kind_words(raw.dtype))
    return np.where(none, "", labels)


def _kind_words(dtype: np.dtype[Any]) -> str:
    names = {"f": "floating point", "i": "whole numbers", "u": "whole numbers", "b": "truth values"}
    return names.get(dtype.kind, "text")


def refuse_taken(table: Table, names: Iterable[str]) -> None:
    """Refuse a table that has columns of the names of answers, which would be overwritten.

    Raises
    ------
    UserError
        Where it has such columns, which it names.

    Examples
    --------
    >>> refuse_taken(Table({"l": [10.0], "density": [0.1]}), ["density_mean", "density_std"])
    """
    taken = [name for name in names if name in table.colnames]
    if taken:
        raise UserError(
            f"the table has columns {', '.join(taken)} already, the names of answers; rename "
            "these columns in the table"
        )


def number_column(table: Table, name: str, unit: str = "") -> NDArray[np.float64]:
    """Return the numbers of a column (N,), all finite; in a unit, where the column has another.

    Raises
    ------
    UserError
        Where there is no such column, a value in it that is no finite number, or a unit that does
        not convert.

    Examples
    --------
    >>> number_column(Table({"distance": [0.14]}, units={"distance": "kpc"}), "distance", "pc")
    array([140.])
    """
    values = in_unit(table, name, numbers_or_nan(table, name), unit)
    check_rows(np.isfinite(values), name, "finite")
    return values


def in_unit(table: Table, name: str, values: NDArray[np.float64], unit: str) -> NDArray[np.float64]:
    """Return the values (N,) of a column in a unit, where the column has another.

    >>> clouds = Table({"distance": [0.14]}, units={"distance": "kpc"})
    >>> in_unit(clouds, "distance", np.array([0.14]), "pc")
    array([140.])
    """
    own = getattr(table[name], "unit", None)
    if not unit or own is None or own == u.dimensionless_unscaled:
        return values
    try:
        return np.asarray(u.Unit(own).to(unit, values), np.float64)
    except (u.UnitConversionError, TypeError, ValueError):
        raise UserError(f"column {name} is in {own}: expected a unit like {unit}") from None


def numbers_or_nan(table: Table, name: str) -> NDArray[np.float64]:
    """Return the numbers of a column (N,), NaN where they are missing, or a word such as NA.

    Examples
    --------
    >>> numbers_or_nan(Table({"x": np.ma.array([1.0, 2.0], mask=[False, True])}), "x")
    array([ 1., nan])
    >>> numbers_or_nan(Table({"x": ["1.5", "NA"]}), "x")
    array([1.5, nan])
    """
    if name not in table.colnames:
        raise UserError(f"missing column {name}; the columns there are {', '.join(table.colnames)}")
    values = table[name]
    try:
        values = _without_words(np.ma.asarray(values))
        return np.asarray(np.ma.filled(values.astype(np.float64), np.nan), np.float64)
    except (TypeError, ValueError):
        row = next((row for row, value in enumerate(values) if not _is_number(value)), None)
        got = str(table[name].dtype)
        if row is not None:
            got = (
                f"{str(table[name][row])[:40]!r} in row {row} (counted from 0); for a missing "
                "value leave the place empty or write NA"
            )
        raise UserError(f"column {name}: expected numbers, got {got}") from None


def _without_words(values: NDArray[Any]) -> NDArray[Any]:
    """Values (N,), of text with "nan" where it is masked or says that a value is missing."""
    if values.dtype.kind not in "SUO":
        return values
    words = np.char.strip(np.ma.filled(values, "").astype(np.str_))
    return np.where(np.isin(np.char.lower(words), MISSING), "nan", words)


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def text_column(table: Table, name: str) -> tuple[str, ...]:
    """Return the words of a column (N,), "" where they are missing.

    Formats of text have no empty words: what is empty there is read as missing.

    Examples
    --------
    >>> names = np.ma.array(["Taurus", "?"], mask=[False, True])
    >>> text_column(Table({"name": names}), "name")
    ('Taurus', '')
    """
    return tuple(np.ma.filled(np.ma.asarray(table[name]).astype(np.str_), "").tolist())


def check_rows(good: NDArray[np.bool_], name: str, wanted: str) -> None:
    """Raise a UserError that counts the bad rows of a column (N,) and names the first.

    Examples
    --------
    >>> check_rows(np.array([True, False]), "distance", "positive numbers")
    Traceback (most recent call last):
    dustmap.errors.UserError: column distance: 1 of 2 rows are not positive numbers (first at ...
    """
    if not good.all():
        bad = np.flatnonzero(~good)
        raise UserError(
            f"column {name}: {len(bad)} of {len(good)} rows are not {wanted} (first at row "
            f"{bad[0]}, counted from 0); correct or remove them"
        )


def holds_lists(column: Any) -> bool:
    """Check whether a column has objects that are no text, such as lists of any length."""
    is_text = (str, bytes, type(None), np.ma.core.MaskedConstant)
    of_objects = getattr(column, "dtype", None) == np.dtype(object)
    return of_objects and not all(isinstance(value, is_text) for value in column)


def text_columns(table: Table) -> list[str]:
    """Name the columns that hold text."""
    dtypes = {name: getattr(table[name], "dtype", None) for name in table.colnames}
    return [name for name, dtype in dtypes.items() if dtype is not None and dtype.kind in "UO"]


@final
@dataclass(frozen=True)
class TableDescription:
    """The YAML header of astropy's ECSV, HDF5 and Parquet files.

    columns: unit, description and the like by column; meta: keywords; delimiter: of ECSV's fields.
    """

    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    delimiter: str = " "

    @classmethod
    def parse(cls, lines: list[str]) -> Self:
        """Read YAML lines without their comment marks.

        UserError where they are something else.
        """
        try:
            header = dict(get_header_from_yaml(lines))
            columns = {str(column["name"]): dict(column) for column in header.get("datatype") or ()}
            meta = dict(header.get("meta") or {})
        except Exception as error:  # PyYAML may raise anything on foreign text
            other_structure = isinstance(error, KeyError | TypeError)
            words = str(error) if other_structure else words_of_damage(error)
            raise UserError(f"its YAML header cannot be read: {words}") from None
        return cls(columns, meta, str(header.get("delimiter", " ")))

    def attribute(self, column: str, name: str) -> str:
        """Return what is said of a column, such as its unit; "" for nothing."""
        value = self.columns.get(column, {}).get(name)
        return "" if value is None else str(value)

    def frame(self, column: str) -> str:
        """Return frame and equinox of a coordinate that astropy has written in parts, as `sky.ra`;
        "" for others."""
        written = self.meta.get("__serialized_columns__")
        whole = written.get(column.rpartition(".")[0]) if isinstance(written, dict) else None
        if not isinstance(whole, dict):
            return ""
        equinox = getattr(whole.get("equinox"), "jyear", None)
        year = "" if equinox is None else f"J{float(equinox):.1f}"
        return f"{whole.get('frame') or ''} {year}".strip()

    def keyword(self, name: str) -> str:
        """Return a keyword in any letters, stripped; "" where there is none."""
        same = (value for key, value in self.meta.items() if str(key).upper() == name.upper())
        return str(self.meta.get(name, next(same, ""))).strip()


NO_DESCRIPTION = TableDescription()
