"""What every reader of a catalog file offers: its columns, and their values in chunks of rows.

Columns have units, which astropy describes as YAML in ECSV, HDF5 and Parquet files.
"""

import enum
import gzip
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast, final

import numpy as np
from astropy.table.meta import get_header_from_yaml
from numpy.typing import NDArray

_ENTRY = re.compile(r"^(.+)\[:,\s*(\d+)\s*\]$")
#: Where astropy writes that a column has no values, `x` and `x.mask`.
MASK = ".mask"


class CatalogError(ValueError):
    """A catalog or a card that cannot be used; the message is one line and names the file."""


@final
class ColumnType(enum.Enum):
    """What a column is read as."""

    INTEGER = "whole numbers"  # masked int64; floating point would lose digits of identifiers
    NUMBER = "numbers"  # float64, NaN where the file has none
    TEXT = "text"  # stripped, "" where the file has none


@final
@dataclass(frozen=True)
class ColumnRef:
    """A column of a file, or one entry of a column of vectors: `est` or `est[:,4]`."""

    name: str
    entry: int | None = None

    @classmethod
    def parse(cls, written: str) -> Self:
        match = _ENTRY.match(written)
        return cls(written) if match is None else cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return self.name if self.entry is None else f"{self.name}[:,{self.entry}]"


@final
@dataclass(frozen=True)
class FileColumn:
    """A column as the file declares it. `width` is 1, or the entries of a column of vectors."""

    name: str
    unit: str = ""
    width: int = 1


Chunk = dict[ColumnRef, NDArray[Any]]
Wanted = Mapping[ColumnRef, ColumnType]


class AbstractReader(ABC):
    """One file. Opening it reads no rows."""

    @property
    @abstractmethod
    def columns(self) -> tuple[FileColumn, ...]:
        """All columns, in the order of the file."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The extinction system that the file names (EXTSYS), or nothing."""

    @abstractmethod
    def chunks(self, rows: int, wanted: Wanted) -> Iterator[Chunk]:
        """The wanted columns, at most about `rows` rows at a time, in the order of the file."""


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, those that it packs where its name ends in .gz."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return cast(IO[bytes], opener(path, "rb"))


@contextmanager
def translating(path: Path, format_name: str, *errors: type[Exception]) -> Iterator[None]:
    """Errors become one line that names the file, those of a format's library, too."""
    try:
        yield
    except CatalogError as error:
        if str(error).startswith(str(path)):
            raise
        raise CatalogError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise CatalogError(f"{path}: there is no such catalog") from None
    except MemoryError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, EOFError, zlib.error, *errors)):
            raise
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise CatalogError(
            f"{path}: cannot be read as {format_name} to its end ({words}); is the file whole?"
        ) from None


def typed(
    raw: NDArray[Any], kind: ColumnType, ref: ColumnRef, missing: NDArray[np.bool_] | None = None
) -> NDArray[Any]:
    """Values of a file as the column type says. Text is never parsed, numbers never rounded."""
    if kind is ColumnType.TEXT:
        return _text(raw, ref)
    if raw.dtype.kind == "b":
        raw = raw.astype(np.uint8)
    if raw.dtype.kind not in ("iu" if kind is ColumnType.INTEGER else "iuf"):
        raise wrong_type(ref, kind, _kind_words(raw.dtype))
    if kind is ColumnType.NUMBER:
        values = raw.astype(np.float64)
        if missing is not None:
            values[missing] = np.nan
        return values
    if raw.dtype.kind == "u" and len(raw) and raw.max() > np.iinfo(np.int64).max:
        raise wrong_type(ref, kind, "values above 2^63 - 1")
    mask = np.zeros(len(raw), bool) if missing is None else missing
    return np.ma.MaskedArray(raw.astype(np.int64), mask=mask)


def wrong_type(ref: ColumnRef, kind: ColumnType, got: str) -> CatalogError:
    return CatalogError(f"column {ref}: expected {kind.value}, got {got}")


def _text(raw: NDArray[Any], ref: ColumnRef) -> NDArray[Any]:
    if raw.dtype.kind not in "SUO":
        raise wrong_type(ref, ColumnType.TEXT, _kind_words(raw.dtype))
    if raw.dtype.kind == "O":
        words = [value.decode() if isinstance(value, bytes) else value or "" for value in raw]
        raw = np.array(words, dtype=np.str_)
    elif raw.dtype.kind == "S":
        raw = np.char.decode(raw, "utf-8", "replace")
    return np.char.strip(raw)


def _kind_words(dtype: np.dtype[Any]) -> str:
    names = {"f": "floating point", "i": "whole numbers", "u": "whole numbers", "b": "truth values"}
    return names.get(dtype.kind, "text")


@final
@dataclass(frozen=True)
class TableDescription:
    """Units of the columns that have one, and the extinction system, if there is one."""

    units: dict[str, str]
    label: str


NO_DESCRIPTION = TableDescription({}, "")


def described(lines: list[str]) -> TableDescription:
    """From YAML lines without their comment marks; ValueError where they are something else."""
    try:
        header = get_header_from_yaml(lines)
        units = {
            str(column["name"]): str(column["unit"])
            for column in header.get("datatype", [])
            if column.get("unit") is not None
        }
        meta = dict(header.get("meta") or {})
    except Exception as error:  # a YAML library may raise anything on foreign text
        raise ValueError(f"its YAML header cannot be read: {error}") from None
    return TableDescription(units, str(meta.get("EXTSYS", "")).strip())


def delimiter(lines: list[str]) -> str:
    """What separates the fields of an ECSV file: a space unless its header says otherwise."""
    return str(get_header_from_yaml(lines).get("delimiter", " "))
