"""VOTable, plain or gzipped: TABLEDATA, BINARY and BINARY2, parsed as the file streams by."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast, final
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
    translating,
    typed,
    wrong_type,
)
from dustmap.sky.catalogs.readers._votable_rows import (
    NUMERIC,
    AbstractRows,
    BinaryRows,
    TextRows,
    VoField,
)

_BLOCK = 1 << 20
#: Bytes of a tag or a header, at most: a packed file may have one without end.
_LONGEST = 1 << 26
_ELSEWHERE = "expected rows inside the VOTable in base64, got a remote or packed one"
_BROKEN = (expat.ExpatError, ValueError, LookupError)


@final
class VotableReader(AbstractReader):
    """The first table of the file. Only the wanted cells of one chunk are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translating(path, "VOTable", *_BROKEN), self._open() as stream:
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
        with translating(self._path, "VOTable", *_BROKEN), self._open() as stream:
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

    def _open(self) -> IO[bytes]:
        opener = gzip.open if self._path.suffix.lower() == ".gz" else open
        return cast(IO[bytes], opener(self._path, "rb"))

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
