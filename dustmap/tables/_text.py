"""Text that Arrow decodes: CSV, ECSV and columns between blanks, plain or gzipped.

It is parsed in blocks of whole lines.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import pyarrow as pa
from astropy.table import Table
from pyarrow import csv as pcsv

from dustmap.errors import UserError
from dustmap.tables import _columns
from dustmap.tables._columns import MASK, ColumnType
from dustmap.tables._parquet import values_of

#: Bytes that are read at once, and of the longest line.
_BLOCK = 8 << 20
_LONGEST = 2 * _BLOCK
_ARROW = {
    ColumnType.INTEGER: pa.int64(),
    ColumnType.NUMBER: pa.float64(),
    ColumnType.TEXT: pa.string(),
    ColumnType.LABEL: pa.string(),
}
#: Blanks of a column of fixed width, among them.
_NULLS = sorted(
    {f(word) for word in _columns.MISSING for f in (str, str.upper, str.title)}
    | {"NaN"}
    | {" " * width for width in range(1, 33)}
)
#: What a line of units below the names begins with, as VizieR writes it.
_UNITS = frozenset(("deg", "degree", "rad", "h", "h:m:s", '"h:m:s"', "mas", "pc", "kpc", "mag"))
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_ROW = re.compile(r"Row #(\d+)")
_CONVERSION = re.compile(r"column #(\d+): (?:Row #(\d+): )?CSV conversion error.*?value '(.*)'")


@final
class TextReader(_columns.AbstractReader):
    """Read delimited text; the first line that is no comment (#) names the columns, or where it
    holds numbers the comment before it, as `numpy.savetxt` writes. VizieR underlines the names:
    units and dashes follow them, and fields are filled up with blanks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _columns.translating(path, "text"), _columns.opened(self._path) as stream:
            comments, header = _header(stream)
            after = [_line(stream).decode("utf-8", "replace").rstrip("\r\n") for _ in range(2)]
        if not header:
            raise UserError(f"{path}: expected a line with the names of the columns, got none")
        self._description = _columns.NO_DESCRIPTION
        self._separator = _separator(header, after)
        if comments and comments[0].startswith("%ECSV"):
            with _columns.translating(path, "ECSV"):
                self._description = _columns.TableDescription.parse(comments[1:])
            self._separator = self._description.delimiter
        self._squeeze = self._separator == " " and self._description is _columns.NO_DESCRIPTION
        with _columns.translating(path, "text"):
            words = _words(header, self._separator, self._squeeze)
            plain = self._description is _columns.NO_DESCRIPTION
            self._names_in_comment = plain and _are_numbers(words)
            if self._names_in_comment:
                words = self._commented_names(comments, len(words))
        # A table with the index of its rows has no name above them.
        self._names = [name or f"column{i}" for i, name in enumerate(words)]
        if self._squeeze and not self._names_in_comment:
            self._name_numbers_of_rows([line.split() for line in after if line.strip()])
        said, self._underline = self._description, 0
        units = [said.attribute(name, "unit") for name in self._names]
        if plain and self._separator != " ":
            rows = [[w.strip(' "') for w in line.split(self._separator)] for line in after]
            self._underline = next((i + 1 for i, row in enumerate(rows) if _are_dashes(row)), 0)
            if self._underline == 2:
                units = [*rows[0], *units[len(rows[0]) :]]
        self.columns = tuple(
            _columns.FileColumn(name, unit, frame=said.frame(name))
            for name, unit in zip(self._names, units, strict=False)
        )

    def _name_numbers_of_rows(self, rows: list[list[str]]) -> None:
        """Call the first of more words than names "index" where they number the rows; refuse
        others, such as names of two words, by which columns would have their neighbours' values."""
        names = len(self._names)
        if not rows or len(rows[0]) != names + 1:
            return
        first = [row[0] for row in rows]
        numbers = [int(word) for word in first if word.isdecimal()]
        are_quoted = all(len(word) > 2 and word[0] == word[-1] == '"' for word in first)  # as of R
        if not are_quoted and (len(numbers) < len(first) or any(np.diff(numbers) != 1)):
            raise UserError(
                f"{self._path}: {names} names of columns and {names + 1} words in the first row: "
                "expected a name for each; write a CSV file, or quote words with blanks in them "
                "and leave out numbers of rows (index=False of pandas, row.names=FALSE of R)"
            )
        self._names.insert(0, "index")

    def _commented_names(self, comments: list[str], count: int) -> list[str]:
        """Take so many names from the last comment before rows of numbers."""
        last = comments[-1] if comments else ""
        for names in _words(last, self._separator, self._squeeze), last.split():
            if len(names) == count and not _are_numbers(names):
                return names
        raise UserError(
            "the first line holds numbers where names of columns are expected; write a line of "
            f"{count} names before it"
        )

    def keyword(self, name: str) -> str:
        return self._description.keyword(name)

    def whole(self) -> Table:
        """Parse by what the header says, not the file's name: Gaia's .csv are ECSV, with null."""
        empty = {"fill_values": [("", "0"), ("null", "0")]}
        options: dict[str, Any] = {"delimiter": self._separator, "comment": "#", "guess": False}
        if self._description is not _columns.NO_DESCRIPTION:
            kind, options = "ascii.ecsv", {}
        elif self._names_in_comment:
            kind, options = "ascii.no_header", {**options, "names": self._names}
        elif self._separator != " ":
            # As ascii.csv a field that is empty between tabs would be left out.
            kind = "ascii.tab" if self._separator == "\t" else "ascii.csv"
        else:  # the numbers of the rows may have no name in the first line
            kind = "ascii.no_header"
            options |= {"names": self._names, "data_start": 1}
        with _columns.translating(self._path, "text"), _columns.opened(self._path) as stream:
            names = self._skip_names(stream) if self._underline else ""
            rows = stream.read()
            if self._underline:
                rows = f"{names}\n".encode() + _trimmed(rows, self._separator)
            # Without an end of a line astropy takes a text for the name of a file.
            text = (rows + b"\n").decode("utf-8-sig")
            del rows
            table = Table.read(text, format=kind, **empty, **options)
        for column in self.columns if self._underline else ():
            table[column.name].unit = column.unit or None
        return table

    def _skip_names(self, stream: IO[bytes]) -> str:
        """Go to the first row; return the line of names."""
        _, header = _header(stream)
        for _ in range(self._underline):
            _line(stream)
        return header

    def chunks(self, rows: int, wanted: _columns.Wanted) -> Iterator[_columns.Chunk]:
        for ref in wanted:
            if self._names.count(ref.name) > 1:
                raise UserError(f"{self._path}: two columns have the name {ref.name}")
        with _columns.translating(self._path, "text"), _columns.opened(self._path) as stream:
            header, before = self._skip_names(stream), 0
            for block in _blocks(stream, f"{header}\n" if self._names_in_comment else ""):
                if self._squeeze or self._underline:
                    block = _squeezed(block) if self._squeeze else _trimmed(block, self._separator)
                try:
                    table = self._parsed(block, wanted)
                except pa.ArrowException as error:
                    raise self._explained(error, wanted, before) from None
                for batch in table.to_batches(max_chunksize=rows):
                    yield {r: values_of(batch, r, kind) for r, kind in wanted.items()}
                before += table.num_rows

    def _parsed(self, lines: bytes, wanted: _columns.Wanted) -> pa.Table:
        """Parse the wanted columns of whole lines."""
        if not lines.strip():
            return pa.table({ref.name: pa.array([], _ARROW[kind]) for ref, kind in wanted.items()})
        masks = {ref.name + MASK for ref in wanted} & set(self._names)
        options = pcsv.ConvertOptions(
            column_types={ref.name: _ARROW[kind] for ref, kind in wanted.items()}
            | {mask: pa.bool_() for mask in masks},
            include_columns=[*(ref.name for ref in wanted), *masks],
            null_values=_NULLS,
        )
        # Arrow's own copy: a thread of Arrow that still held an object of Python when the process
        # ends would abort it.
        copy = pa.BufferOutputStream()
        copy.write(lines)
        names = _distinct(self._names)
        return pcsv.read_csv(
            pa.BufferReader(copy.getvalue()),
            pcsv.ReadOptions(use_threads=False, block_size=len(lines), column_names=names),
            pcsv.ParseOptions(
                delimiter=self._separator, quote_char=False if self._underline else '"'
            ),
            options,
        )

    def _explained(self, error: Exception, wanted: _columns.Wanted, before: int) -> UserError:
        """Put an error of Arrow into words; `before`: rows in front of the lines that it counts."""
        words = " ".join(str(error).split())
        match = _CONVERSION.search(words)
        if match is None:
            words = _ROW.sub(lambda row: f"Row #{int(row[1]) + before}", words)
            return UserError(
                f"{self._path}: not a table of {len(self._names)} columns to its end "
                f"({words[:160]}); is the file whole?"
            )
        name = self._names[int(match[1])]
        kind = next((wanted[ref] for ref in wanted if ref.name == name), ColumnType.NUMBER)
        word = match[3][:40]
        wrong = str(_columns.wrong_type(name, kind, repr(word)))
        if word.strip('" ').lower() in _UNITS or set(word) == {"-"}:
            wrong += (
                "; a line of units, or of dashes, below the names is none of a table: remove it"
            )
        return UserError(f"{self._path}: {wrong}")


def _blocks(stream: IO[bytes], first: str) -> Iterator[bytes]:
    """Yield whole lines, some _BLOCK bytes of them at a time, after those of `first`."""
    left = first.encode()
    while block := stream.read(_BLOCK):
        end = block.rfind(b"\n") + 1
        if end:
            yield left + block[:end]
            left = b""
        left += block[end:]
        _check_length(left)
    if left:
        yield left


def _squeezed(lines: bytes) -> bytes:
    """Make one blank of runs of blanks, and none at the ends of lines."""
    clean = re.sub(rb"[ \t\r]+", b" ", lines)
    return re.sub(rb"^ | $", b"", clean, flags=re.MULTILINE)


def _trimmed(lines: bytes, separator: str) -> bytes:
    """Remove comments, and the blanks that fields are filled up with."""
    mark = re.escape(separator).encode()
    before, after = rb"(?<! ) ++(?=%b|\r?$)" % mark, rb"(?:^|(?<=%b)) ++" % mark
    return re.sub(rb"(?m)^#.*|" + before + rb"|" + after, b"", lines)


def _distinct(names: list[str]) -> list[str]:
    """Number repeated names: Arrow needs distinct ones, though nobody can ask for these."""
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    return [name if first[name] == i else f"{name}#{i}" for i, name in enumerate(names)]


def _header(stream: IO[bytes]) -> tuple[list[str], str]:
    """Read the comments before the line of names, without their marks, and that line."""
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
    """Refuse a line, or lines of `size` bytes so far, without end: a packed file may have one."""
    if max(len(line), size) > _LONGEST:
        raise UserError(f"a line, or the lines before the data, of more than {_LONGEST} bytes")


def _separator(header: str, after: list[str]) -> str:
    """Return what divides the fields of a line: a comma where all is one column, whose values may
    have blanks in them, but for rows with numbers that have no name."""
    for separator in ",\t;|":
        if separator in header:
            return separator
    is_one = len(header.split()) == 1 and not _are_numbers([header.strip()])
    first = [line.split()[0] for line in after if line.strip()]
    return "," if is_one and not _are_numbers(first) else " "


def _words(line: str, separator: str, squeeze: bool) -> list[str]:
    if squeeze:
        return line.split()
    try:
        return [word.strip() for word in next(csv.reader([line], delimiter=separator))]
    except csv.Error as error:
        raise UserError(f"the names of the columns cannot be read: {error}") from None


def _are_dashes(words: list[str]) -> bool:
    """Tell whether a line is dashes alone, and not the marks of values that are missing."""
    return all(set(word) == {"-"} for word in words) and any(len(word) > 2 for word in words)


def _are_numbers(words: list[str]) -> bool:
    """Tell whether words are numbers, some of which may be missing."""
    there = [word for word in words if word not in _NULLS]
    return bool(there) and all(_NUMBER.fullmatch(word) for word in there)


def write_ecsv(path: Path, table: Table) -> None:
    """Write text with units and header in comments."""
    table.write(path, format="ascii.ecsv")
