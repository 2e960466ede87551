"""CSV, ECSV and columns between blanks, plain or gzipped, parsed in blocks."""

import csv
import gzip
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast, final

import pyarrow as pa
from pyarrow import csv as pcsv

from dustmap.sky.catalogs.readers._base import (
    AbstractReader,
    CatalogError,
    Chunk,
    ColumnType,
    FileColumn,
    Wanted,
    translating,
)
from dustmap.sky.catalogs.readers._parquet import from_arrow
from dustmap.sky.catalogs.readers._yaml import NO_DESCRIPTION, delimiter, described

_BLOCK = 8 << 20
_LONGEST = 2 * _BLOCK
_TYPES = {
    ColumnType.INTEGER: pa.int64(),
    ColumnType.NUMBER: pa.float64(),
    ColumnType.TEXT: pa.string(),
}
_NULLS = ["", "nan", "NaN", "NAN", "null", "NULL", "NA", "N/A", "n/a", "None", "--"]
_CONVERSION = re.compile(r"column #(\d+): (?:Row #(\d+): )?CSV conversion error.*?value '(.*)'")


@final
class _Squeezed(io.RawIOBase):
    """A text file with its runs of blanks made one blank, and none at the ends of lines."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._left = stream, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """About `size` bytes, cut at the end of a line."""
        block = self._stream.read(size)
        if not block and not self._left:
            return b""
        lines, newline, rest = (self._left + block).rpartition(b"\n")
        _check_length(rest)
        whole, self._left = (lines + newline, rest) if block else (self._left, b"")
        clean = re.sub(rb"[ \t\r]+", b" ", whole)
        clean = re.sub(rb"^ | $", b"", clean, flags=re.MULTILINE)
        return clean or self.read(size)


@final
class TextReader(AbstractReader):
    """The names of the columns stand in the first line that is no comment (#)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translating(path, "text", UnicodeDecodeError, ValueError), self._open() as stream:
            comments, header = _header(stream)
            first = _line(stream).decode("utf-8", "replace")
        if not header:
            raise CatalogError(f"{path}: expected a line with the names of the columns, got none")
        self._description = NO_DESCRIPTION
        if comments and comments[0].startswith("%ECSV"):
            self._separator = self._read_ecsv(comments[1:])
        else:
            self._separator = next((s for s in ",\t;|" if s in header), " ")
        self._squeeze = self._separator == " " and self._description is NO_DESCRIPTION
        with translating(path, "text"):
            self._names = _names(header, self._separator, self._squeeze)
        if self._squeeze and len(first.split()) == len(self._names) + 1:
            self._names.insert(0, "index")  # rows are numbered, the numbers have no name

    @property
    def separator(self) -> str:
        """Between columns; a blank stands for any number of them."""
        return self._separator

    @property
    def is_ecsv(self) -> bool:
        return self._description is not NO_DESCRIPTION

    def _read_ecsv(self, lines: list[str]) -> str:
        try:
            self._description = described(lines)
        except ValueError as error:
            raise CatalogError(f"{self._path}: {error}") from None
        return delimiter(lines)

    @property
    def columns(self) -> tuple[FileColumn, ...]:
        units = self._description.units
        return tuple(FileColumn(name, units.get(name, "")) for name in self._names)

    @property
    def label(self) -> str:
        return self._description.label

    def chunks(self, rows: int, wanted: Wanted) -> Iterator[Chunk]:
        for ref in wanted:
            if self._names.count(ref.name) > 1:
                raise CatalogError(f"{self._path}: two columns have the name {ref.name}")
        with translating(self._path, "text"), self._open() as stream:
            _header(stream)
            source = _Squeezed(stream) if self._squeeze else stream
            try:
                for batch in self._batches(source, wanted):
                    for first in range(0, batch.num_rows, rows):
                        part = batch.slice(first, rows)
                        yield {r: from_arrow(part.column(r.name), r, wanted[r]) for r in wanted}
            except pa.ArrowException as error:
                raise self._explained(error, wanted) from None

    def _open(self) -> IO[bytes]:
        opener = gzip.open if self._path.suffix.lower() == ".gz" else open
        return cast(IO[bytes], opener(self._path, "rb"))

    def _batches(self, source: IO[bytes] | _Squeezed, wanted: Wanted) -> Iterator[pa.RecordBatch]:
        # Columns nobody wants need names that differ, no more.
        names = [n if n not in self._names[:i] else f"{n}#{i}" for i, n in enumerate(self._names)]
        options = pcsv.ConvertOptions(
            column_types={ref.name: _TYPES[kind] for ref, kind in wanted.items()},
            include_columns=[ref.name for ref in wanted],
            null_values=_NULLS,
        )
        file = pa.PythonFile(source, mode="r")
        try:
            batches = pcsv.open_csv(
                file,
                pcsv.ReadOptions(use_threads=False, block_size=_BLOCK, column_names=names),
                pcsv.ParseOptions(delimiter=self._separator),
                options,
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error):
                return
            raise
        yield from batches

    def _explained(self, error: Exception, wanted: Wanted) -> CatalogError:
        words = " ".join(str(error).split())
        match = _CONVERSION.search(words)
        if match is None:
            return CatalogError(
                f"{self._path}: not a table of {len(self._names)} columns to its end "
                f"({words[:160]}); is the file whole?"
            )
        name = self._names[int(match[1])]
        kind = next((wanted[ref] for ref in wanted if ref.name == name), ColumnType.NUMBER)
        return CatalogError(
            f"{self._path}: column {name}: expected {kind.value}, got {match[3][:40]!r}"
        )


def _header(stream: IO[bytes]) -> tuple[list[str], str]:
    """The comments before the line of names, without their marks, and that line."""
    comments: list[str] = []
    size = 0
    while line := _line(stream):
        _check_length(line, size := size + len(line))
        text = line.decode("utf-8-sig").rstrip("\r\n")
        if text.startswith("#"):
            comments.append(text[1:].removeprefix(" "))
        elif text.strip():
            return comments, text
    return comments, ""


def _line(stream: IO[bytes]) -> bytes:
    line = stream.readline(_LONGEST + 1)
    _check_length(line)
    return line


def _check_length(line: bytes, size: int = 0) -> None:
    """A packed file may have a line, or a header, without end. size: of all lines so far."""
    if max(len(line), size) > _LONGEST:
        raise CatalogError(f"a line, or the lines before the data, of more than {_LONGEST} bytes")


def _names(header: str, separator: str, squeeze: bool) -> list[str]:
    if squeeze:
        return header.split()
    try:
        names = [name.strip() for name in next(csv.reader([header], delimiter=separator))]
    except csv.Error as error:
        raise CatalogError(f"the names of the columns cannot be read: {error}") from None
    # A table with the index of its rows has no name above them.
    return [name or f"column{i}" for i, name in enumerate(names)]
