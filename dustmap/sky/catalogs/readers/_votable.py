"""VOTable, plain or gzipped: TABLEDATA, BINARY and BINARY2, parsed as the file streams by.

Rows are text between tags or base64; a parser of either keeps the wanted cells of one chunk.
"""

import base64
import dataclasses
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.catalogs.readers._base import (
    AbstractReader,
    CatalogError,
    Chunk,
    ColumnRef,
    ColumnType,
    FileColumn,
    Wanted,
    opened,
    translating,
    typed,
    wrong_type,
)

# VOTable datatype -> numpy type in a binary stream
NUMERIC = {
    "unsignedByte": "u1",
    "short": ">i2",
    "int": ">i4",
    "long": ">i8",
    "float": ">f4",
    "double": ">f8",
}
#: Bytes of a cell or a row, at most: it is in memory as a whole.
_LONGEST_CELL = 1 << 24
_SIZES = {"boolean": 1, "char": 1, "unicodeChar": 2, "floatComplex": 8, "doubleComplex": 16}
Taken = dict[int, tuple[NDArray[Any], NDArray[np.bool_]]]
_BLOCK = 1 << 20
#: Bytes of a tag or a header, at most: a packed file may have one without end.
_LONGEST = 1 << 26
_ELSEWHERE = "expected rows inside the VOTable in base64, got a remote or packed one"
_BROKEN = (expat.ExpatError, ValueError, LookupError)


@final
@dataclass(frozen=True)
class VoField:
    """A FIELD. `length` is the number of elements of a cell; None where each row has its own."""

    name: str
    datatype: str
    unit: str
    length: int | None
    null: int | None = None

    @classmethod
    def parse(cls, attributes: dict[str, str]) -> Self:
        size = attributes.get("arraysize", "1")
        sizes = [int(n) for n in size.split("x") if n.isdigit()]
        return cls(
            name=attributes.get("name", attributes.get("ID", "")),
            datatype=attributes.get("datatype", "char"),
            unit=attributes.get("unit", ""),
            length=None if "*" in size else int(np.prod(sizes, dtype=int)),
        )

    def with_null(self, written: str) -> Self:
        whole = self.datatype in ("unsignedByte", "short", "int", "long")
        null = int(written) if whole and written.lstrip("-").isdigit() else None
        return dataclasses.replace(self, null=null)

    @property
    def width(self) -> int:
        """1 for a number or a text; columns of vectors are not read from VOTables."""
        return int(self.datatype in ("char", "unicodeChar") or self.length == 1)

    @property
    def element_bytes(self) -> int:
        if self.datatype in NUMERIC:
            return np.dtype(NUMERIC[self.datatype]).itemsize
        return _SIZES.get(self.datatype, 1)

    @property
    def cell_bytes(self) -> int | None:
        if self.length is None:
            return None
        return -(-self.length // 8) if self.datatype == "bit" else self.length * self.element_bytes


class AbstractRows(ABC):
    """Collects the wanted cells of rows; `take` gives some back and forgets them."""

    @abstractmethod
    def start(self, tag: str) -> None: ...

    @abstractmethod
    def end(self, tag: str) -> None: ...

    @abstractmethod
    def characters(self, text: str) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Called at the end of the table; CatalogError where a row is cut."""

    @abstractmethod
    def __len__(self) -> int:
        """Whole rows that await collection."""

    @abstractmethod
    def take(self, count: int) -> Taken:
        """By index of the field: values and where there are none, of at most `count` rows."""


@final
class TextRows(AbstractRows):
    """TABLEDATA: <TR><TD>1</TD><TD/></TR>."""

    def __init__(self, fields: Sequence[VoField], wanted: Mapping[int, ColumnType]) -> None:
        self._fields, self._wanted = fields, wanted
        self._cells: dict[int, list[str]] = {i: [] for i in wanted}
        self._cell = -1
        self._inside = False
        self._text: list[str] = []
        self._length = self._rows = 0

    def start(self, tag: str) -> None:
        if tag == "TR":
            self._cell = -1
        elif tag == "TD":
            self._cell += 1
            self._inside = self._cell in self._cells
            self._text, self._length = [], 0

    def end(self, tag: str) -> None:
        if tag == "TD" and self._inside:
            self._cells[self._cell].append("".join(self._text).strip())
            self._inside = False
        elif tag == "TR":
            self._rows += 1
            if self._cell + 1 != len(self._fields):
                raise CatalogError(
                    f"a row of the VOTable has {self._cell + 1} cells, its header "
                    f"{len(self._fields)} columns"
                )

    def characters(self, text: str) -> None:
        if self._inside:
            self._text.append(text)
            self._length += len(text)
            if self._length > _LONGEST_CELL:
                raise CatalogError(f"a cell of more than {_LONGEST_CELL} letters in the VOTable")

    def finish(self) -> None:
        """XML closes every row that it opens."""

    def __len__(self) -> int:
        return self._rows

    def take(self, count: int) -> Taken:
        taken = {i: self._parsed(i, cells[:count]) for i, cells in self._cells.items()}
        self._cells = {i: cells[count:] for i, cells in self._cells.items()}
        self._rows -= min(count, self._rows)
        return taken

    def _parsed(self, i: int, cells: list[str]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        field, kind = self._fields[i], self._wanted[i]
        missing = np.array([not cell for cell in cells], dtype=bool)
        if field.datatype not in NUMERIC:
            return np.array(cells, dtype=np.str_), missing
        whole = np.dtype(NUMERIC[field.datatype]).kind in "iu"
        convert: type[int] | type[float] = int if whole else float
        try:
            values = [convert(cell) if cell else 0 for cell in cells]
            return np.array(values, np.int64 if whole else np.float64), missing
        except (ValueError, OverflowError) as error:
            raise wrong_type(ColumnRef(field.name), kind, str(error)[:100]) from None


@final
class BinaryRows(AbstractRows):
    """BINARY and BINARY2: big-endian rows in base64; BINARY2 (masked) has bits for null cells."""

    def __init__(
        self, fields: Sequence[VoField], wanted: Mapping[int, ColumnType], masked: bool
    ) -> None:
        self._fields, self._wanted = fields, wanted
        self._mask_bytes = -(-len(fields) // 8) if masked else 0
        self._cells: dict[int, list[bytes]] = {i: [] for i in wanted}
        self._missing: dict[int, list[bool]] = {i: [] for i in wanted}
        self._text, self._bytes, self._inside, self._rows = "", b"", False, 0
        self._sizes = [(field.cell_bytes, field.element_bytes) for field in fields]

    def start(self, tag: str) -> None:
        self._inside = self._inside or tag == "STREAM"

    def end(self, tag: str) -> None:
        self._inside = self._inside and tag != "STREAM"

    def characters(self, text: str) -> None:
        if not self._inside:
            return
        text = self._text + "".join(text.split())
        whole = len(text) // 4 * 4
        self._text = text[whole:]
        self._bytes += base64.b64decode(text[:whole])
        self._parse()

    def finish(self) -> None:
        if self._bytes or self._text:
            raise CatalogError("the rows of the VOTable end inside a row; it is truncated")

    def __len__(self) -> int:
        return self._rows

    def take(self, count: int) -> Taken:
        taken = {i: self._joined(i, count) for i in self._cells}
        self._cells = {i: cells[count:] for i, cells in self._cells.items()}
        self._missing = {i: missing[count:] for i, missing in self._missing.items()}
        self._rows -= min(count, self._rows)
        return taken

    def _joined(self, i: int, count: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        field, cells = self._fields[i], self._cells[i][:count]
        missing = np.array(self._missing[i][:count], dtype=bool)
        if field.datatype in NUMERIC:
            return np.frombuffer(b"".join(cells), NUMERIC[field.datatype]), missing
        codec = "utf-16-be" if field.datatype == "unicodeChar" else "utf-8"
        words = [cell.decode(codec, "replace").rstrip("\0") for cell in cells]
        return np.array(words, dtype=np.str_), missing

    def _parse(self) -> None:
        """Takes whole rows off the front of the bytes."""
        data, done = self._bytes, 0
        while (end := self._row(data, done)) is not None:
            done = end
            self._rows += 1
        self._bytes = data[done:]
        if len(self._bytes) > _LONGEST_CELL:
            raise CatalogError(f"a row of more than {_LONGEST_CELL} bytes in the VOTable")

    def _row(self, data: bytes, start: int) -> int | None:
        """Where the row that starts here ends, its wanted cells kept; None if it is not whole."""
        position = start + self._mask_bytes
        spans: list[tuple[int, int]] = []
        for size, element in self._sizes:
            if size is None:
                if position + 4 > len(data):
                    return None
                size = struct.unpack_from(">i", data, position)[0] * element
                position += 4
                if size < 0:
                    raise CatalogError(f"a cell of {size} bytes in the rows of the VOTable")
            spans.append((position, position + size))
            position += size
        if position > len(data) or position == start:
            return None
        for i, cells in self._cells.items():
            begin, end = spans[i]
            cells.append(data[begin:end])
            null = self._mask_bytes and data[start + i // 8] & (0x80 >> i % 8)
            self._missing[i].append(bool(null))
        return position


@final
class VotableReader(AbstractReader):
    """The first table of the file. Only the wanted cells of one chunk are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translating(path, "VOTable", *_BROKEN), opened(self._path) as stream:
            document, size = _Document({}), 0
            while not document.has_fields:
                block = stream.read(_BLOCK)
                document.feed(block)
                size += len(block)
                if not block:
                    break
                if size > _LONGEST:
                    raise CatalogError(f"no rows in the first {_LONGEST} bytes of this VOTable")
        if not document.fields:
            raise CatalogError(f"{path}: no table with columns (FIELD) in this VOTable")
        self._fields, self._label = tuple(document.fields), document.label

    @property
    def columns(self) -> tuple[FileColumn, ...]:
        return tuple(FileColumn(field.name, field.unit, field.width) for field in self._fields)

    @property
    def label(self) -> str:
        return self._label

    def chunks(self, rows: int, wanted: Wanted) -> Iterator[Chunk]:
        names = [field.name for field in self._fields]
        indices = {names.index(ref.name): ref for ref in wanted}
        with translating(self._path, "VOTable", *_BROKEN), opened(self._path) as stream:
            document = _Document({i: wanted[ref] for i, ref in indices.items()})
            while block := stream.read(_BLOCK):
                document.feed(block)
                while document.rows is not None and len(document.rows) >= rows:
                    yield self._chunk(document.rows, rows, indices, wanted)
            document.feed(b"")
            if document.rows is not None:
                document.rows.finish()
                while len(document.rows):
                    yield self._chunk(document.rows, rows, indices, wanted)

    def _chunk(
        self, rows: AbstractRows, count: int, indices: dict[int, ColumnRef], wanted: Wanted
    ) -> Chunk:
        taken = rows.take(count)
        return {
            ref: _values(self._fields[i], *taken[i], ref, wanted[ref]) for i, ref in indices.items()
        }


def _values(
    field: VoField, raw: NDArray[Any], missing: NDArray[np.bool_], ref: ColumnRef, kind: ColumnType
) -> NDArray[Any]:
    if kind is not ColumnType.TEXT and field.datatype not in NUMERIC:
        raise wrong_type(ref, kind, f"{field.datatype}")
    if field.null is not None and raw.dtype.kind in "iu":
        missing = missing | (raw == field.null)
    return typed(raw, kind, ref, missing)


@final
class _Document:
    """What the parser has seen: fields, the label, and the rows that await collection."""

    def __init__(self, wanted: dict[int, ColumnType]) -> None:
        self.fields: list[VoField] = []
        self.label = ""
        self.rows: AbstractRows | None = None
        self.has_fields = False
        self._wanted, self._done = wanted, False
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.buffer_size = _BLOCK
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.EntityDeclHandler = _refuse_entities
        self._fed = 0

    def feed(self, block: bytes) -> None:
        self._parser.Parse(block, not block)
        self._fed += len(block)
        if self._fed - self._parser.CurrentByteIndex > _LONGEST:
            raise CatalogError(f"a tag of more than {_LONGEST} bytes in this VOTable")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition(":")[2]
        if name == "STREAM" and "href" in attributes:  # of any table: other readers would follow it
            raise CatalogError(
                f"expected rows inside the VOTable, got a remote {attributes['href']}"
            )
        if self._done:
            return
        if name in ("PARAM", "INFO") and attributes.get("name", "").upper() == "EXTSYS":
            self.label = attributes.get("value", "").strip()
        elif name == "FIELD":
            self.fields.append(VoField.parse(attributes))
        elif name == "VALUES" and self.fields and "null" in attributes:
            self.fields[-1] = self.fields[-1].with_null(attributes["null"])
        elif name == "DATA":
            self.has_fields = True
        elif name == "TABLEDATA":
            self._collect(TextRows(self.fields, self._wanted))
        elif name in ("BINARY", "BINARY2"):
            self._collect(BinaryRows(self.fields, self._wanted, masked=name == "BINARY2"))
        elif name == "STREAM":
            _check_stream(attributes)
        elif name == "FITS":
            raise CatalogError("a FITS file inside a VOTable is not read; save it as a FITS file")
        if self.rows is not None:
            self.rows.start(name)

    def _collect(self, rows: AbstractRows) -> None:
        self.rows = rows
        self._parser.CharacterDataHandler = rows.characters

    def _end(self, tag: str) -> None:
        name = tag.rpartition(":")[2]
        if self._done:
            return
        if self.rows is not None:
            self.rows.end(name)
        if name == "TABLE":
            self._done = self.has_fields = True
            self._parser.CharacterDataHandler = None


def _refuse_entities(name: str, *described: object) -> None:
    """A few of them may stand for gigabytes of text, or for other files."""
    del described
    raise CatalogError(f"the VOTable declares the entity {name}, which no table needs; remove it")


def _check_stream(attributes: dict[str, str]) -> None:
    if attributes.get("encoding", "base64") != "base64":
        raise CatalogError(_ELSEWHERE)
