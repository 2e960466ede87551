"""Tables of FITS files, read row by row from the front; they may be gzipped."""

import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

import numpy as np
from astropy.io import fits
from astropy.table import Table
from astropy.units import UnitsWarning
from astropy.utils.exceptions import AstropyUserWarning
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import _columns
from dustmap.tables._columns import ColumnRef, ColumnType

log = logging.getLogger(__name__)

_BLOCK = 2880
_HEADER = 5000 * _BLOCK  # bytes of a header, at most: a packed one may go on for ever
_MOST = 2**28  # bytes of rows that are read at once
_FORM = re.compile(r"^\s*(\d*)([LXBIJKAEDCMPQ])")
# TFORM code -> numpy type of one element. X, C, M, P and Q are skipped over, not read.
_READ = {"L": "S1", "B": "u1", "I": ">i2", "J": ">i4", "K": ">i8", "E": ">f4", "D": ">f8"}
#: Whole numbers that leave room in 64 bits for a TZERO.
_SHORT = "BIJ"
_UNSIGNED = {"I": 2**15, "J": 2**31, "K": 2**63}


@final
@dataclass(frozen=True)
class _Field:
    """Hold TTYPE, TFORM, TUNIT, TSCAL, TZERO and TNULL of one column."""

    name: str
    code: str
    repeat: int
    unit: str
    scale: float
    zero: float
    null: int | None

    @property
    def dtype(self) -> tuple[Any, ...]:
        """The numpy type of all elements of one row."""
        if self.code in _READ:
            return (_READ[self.code],) if self.repeat == 1 else (_READ[self.code], (self.repeat,))
        if self.code == "A":
            return (f"S{self.repeat}",)
        bits = {"X": 1, "C": 64, "P": 64, "M": 128, "Q": 128}[self.code]
        return (f"V{-(-self.repeat * bits // 8)}",)

    @property
    def width(self) -> int:
        return 1 if self.code == "A" else self.repeat * (self.code in _READ)


@final
class FitsReader(_columns.AbstractReader):
    """Read the first binary table. Nothing is mapped: one chunk is in memory at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _columns.translating(path, "FITS"), _columns.opened(self._path) as stream:
            self._headers: list[fits.Header] = []
            if stream.read(6) != b"SIMPLE":
                raise UserError(f"{path}: not a FITS file, whatever its name says")
            stream.seek(0)
            header = self._find_table(stream)
            self._start = stream.tell()
            others = _tables_behind(stream, header)
            self._rows, self._row_bytes = _integer(header, "NAXIS2"), _integer(header, "NAXIS1")
            count = _integer(header, "TFIELDS")
            self._fields = tuple(_field(header, i + 1) for i in range(count))
            self.columns = tuple(_columns.FileColumn(f.name, f.unit, f.width) for f in self._fields)
            self._dtype = np.dtype([(f"{i}", *f.dtype) for i, f in enumerate(self._fields)])
        if self._rows < 0 or self._row_bytes > _MOST:
            raise UserError(
                f"{path}: NAXIS2 = {self._rows} rows of NAXIS1 = {self._row_bytes} bytes is no "
                "table; the header is wrong"
            )
        if self._dtype.itemsize != self._row_bytes:
            raise UserError(
                f"{path}: the columns of the FITS table take {self._dtype.itemsize} bytes a row, "
                f"NAXIS1 says {self._row_bytes}; the header is wrong"
            )
        if others:
            log.warning(
                "%s: the first of %d tables is read, of %d rows; not those of %s rows behind it: "
                "write them to files of their own",
                *(path, 1 + len(others), self._rows, ", ".join(map(str, others))),
            )

    def keyword(self, name: str) -> str:
        with _columns.translating(self._path, "FITS"):  # cards are parsed as they are asked for
            values = [header[name] for header in self._headers if name in header]
            return str(values[-1]).strip() if values else ""

    def chunks(self, rows: int, wanted: _columns.Wanted) -> Iterator[_columns.Chunk]:
        rows = min(rows, max(1, _MOST // max(1, self._row_bytes)))
        with _columns.translating(self._path, "FITS"), _columns.opened(self._path) as stream:
            stream.seek(self._start)
            for first in range(0, self._rows, rows):
                count = min(rows, self._rows - first)
                block = stream.read(count * self._row_bytes)
                if len(block) < count * self._row_bytes:
                    got = first + len(block) // self._row_bytes
                    raise UserError(
                        f"{self._path}: the file ends after {got} of {self._rows} rows; "
                        f"it is truncated, fetch it again"
                    )
                table = np.frombuffer(block, self._dtype)
                yield {ref: self._values(table, ref, kind) for ref, kind in wanted.items()}

    def whole(self) -> Table:
        with _columns.translating(self._path, "FITS"), warnings.catch_warnings():
            # Foreign units and keywords are kept as they are.
            warnings.simplefilter("ignore", UnitsWarning)
            warnings.simplefilter("ignore", AstropyUserWarning)
            # The table whose chunks are read: one in ASCII may come before it.
            return Table.read(self._path, format="fits", hdu=len(self._headers) - 1)

    def _find_table(self, stream: IO[bytes]) -> fits.Header:
        """Read the header of the first binary table; leave the stream at its first row."""
        seen: list[str] = []
        while True:
            try:
                header = _next_header(stream)
            except EOFError:
                raise UserError(
                    f"{self._path}: no binary table in this FITS file; its parts are "
                    f"{', '.join(seen) or 'none'}"
                ) from None
            self._headers.append(header)
            if _is_table(header):
                return header
            kind = str(header.get("XTENSION", "PRIMARY")).strip()
            seen.append(kind if kind != "BINTABLE" else "a compressed table or image")
            size = int(header.data_size_padded)
            if size < 0:
                raise UserError(f"NAXIS, PCOUNT and GCOUNT stand for {size} bytes")
            stream.seek(size, 1)

    def _values(self, table: NDArray[Any], ref: ColumnRef, kind: ColumnType) -> NDArray[Any]:
        index = [field.name for field in self._fields].index(ref.name)
        field, raw = self._fields[index], ref.of(table[f"{index}"])
        if field.code == "L":
            return _columns.typed(raw == b"T", kind, ref, missing=raw == b"\0")
        missing = None if field.null is None else raw == field.null
        return _columns.typed(_scaled(raw, field), kind, ref, missing)


def _is_table(header: fits.Header) -> bool:
    """Whether it is of a binary table, and not of one that holds something else packed."""
    kind = str(header.get("XTENSION", "PRIMARY")).strip()
    return kind == "BINTABLE" and "ZTABLE" not in header and "ZIMAGE" not in header


def _tables_behind(stream: IO[bytes], header: fits.Header) -> list[int]:
    """Return the rows of all binary tables behind the one whose rows begin here; what is no header
    ends them, for files may have anything at their end."""
    rows = list[int]()
    try:
        while (size := int(header.data_size_padded)) >= 0:
            stream.seek(size, 1)
            header = _next_header(stream)
            if _is_table(header):
                rows.append(_integer(header, "NAXIS2"))
    except (EOFError, OSError, ValueError, KeyError, TypeError):
        pass
    return rows


def _next_header(stream: IO[bytes]) -> fits.Header:
    """Read the cards of a header; letters beyond ASCII, in many a comment, do no harm."""
    cards = bytearray()
    while block := stream.read(_BLOCK):
        cards += block
        if any(block[i : i + 80].rstrip() == b"END" for i in range(0, _BLOCK, 80)):
            break
        if len(cards) > _HEADER:
            raise UserError(f"no END of a header in {_HEADER} bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AstropyUserWarning)
        return fits.Header.fromfile(io.BytesIO(cards))


def _scaled(raw: NDArray[Any], field: _Field) -> NDArray[Any]:
    """Return raw * TSCAL + TZERO, in whole numbers where TZERO only makes them unsigned."""
    if field.code == "A" or (field.scale == 1 and field.zero == 0):
        return raw
    if field.code in _SHORT and field.scale == 1 and float(field.zero).is_integer():
        return np.asarray(raw.astype(np.int64) + int(field.zero))
    if field.scale == 1 and field.zero == _UNSIGNED.get(field.code):
        native = raw.astype(raw.dtype.newbyteorder("="))
        unsigned = native.view(native.dtype.str.replace("i", "u"))
        return np.asarray(unsigned ^ unsigned.dtype.type(_UNSIGNED[field.code]))
    return np.asarray(raw.astype(np.float64) * float(field.scale) + float(field.zero))


def _field(header: fits.Header, i: int) -> _Field:
    form = str(header.get(f"TFORM{i}"))
    match = _FORM.match(form)
    if match is None:
        raise UserError(f"TFORM{i} = {form!r} is no format of a binary table")
    return _Field(
        name=str(header.get(f"TTYPE{i}", f"col{i}")).strip(),
        code=match[2],
        repeat=int(match[1] or 1),
        unit=str(header.get(f"TUNIT{i}", "")).strip(),
        scale=_number(header, f"TSCAL{i}", 1),
        zero=_number(header, f"TZERO{i}", 0),
        null=_integer(header, f"TNULL{i}") if f"TNULL{i}" in header else None,
    )


def _number(header: fits.Header, key: str, default: float | None = None) -> float:
    value: object = header.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{key} = {value!r}: expected a number")
    return value


def _integer(header: fits.Header, key: str) -> int:
    return int(_number(header, key))


def write_fits(path: Path, table: Table) -> None:
    """Write the header into the cards of the table's unit, as astropy does.

    UserError where a text has letters beyond ASCII, which FITS has no place for.
    """
    for name in _columns.text_columns(table):
        if not all(str(word).isascii() for word in table[name]):
            raise UserError(
                f"column {name}: FITS holds ASCII letters alone, and others are here; choose a "
                "name that ends in .ecsv or .parquet"
            )
    table.write(path, format="fits")
