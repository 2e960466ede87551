"""VOTables, parsed by astropy in memory, which follows what they name: a first pass, as the file
streams by, refuses those that are too large, declare entities, lead to other files, or promise more
than they hold. They may be gzipped."""

import dataclasses
import logging
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final
from xml.parsers import expat

import numpy as np
from astropy.io import votable
from astropy.io.votable.tree import CooSys, Field, Info, TableElement
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import _columns
from dustmap.tables._columns import ColumnRef, ColumnType

log = logging.getLogger(__name__)

#: Bytes of XML that are read, unpacked.
MOST_XML = 2**28
_LETTERS_AT_ONCE = 2**20
#: Bytes of a tag, at most: a packed file may have one without end.
_LONGEST = 2**26
_TEXTS = ("char", "unicodeChar")
_NUMBERS = ("unsignedByte", "short", "int", "long", "float", "double", "boolean")


@final
class VotableReader(_columns.AbstractReader):
    """Hold the first table of the file; what is larger than `MOST_XML` bytes is refused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _columns.translating(path, "VOTable"):
            with _columns.opened(path) as stream:
                scan = scanned(stream)
            with _columns.opened(path) as stream, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what astropy tolerates in foreign files
                document = votable.parse(stream, table_number=0, verify="ignore")
            tables = [table for table in document.iter_tables() if len(table.fields)]
            if not tables:
                raise UserError("no table with columns (FIELD) in this VOTable")
            self._table: TableElement = tables[0]
            if scan.tables > 1:
                log.warning(
                    "%s: the first of %d tables is read, of %d rows; write the others to files of "
                    "their own",
                    *(path, scan.tables, len(self._table.array)),
                )
            _check_rows(self._table, scan)
            dtype = self._table.array.dtype
            systems = {each.ID: each for each in document.iter_coosys()}
            units = [str(field.unit or "") for field in self._table.fields]
            self.columns = tuple(
                _columns.FileColumn(f.name, units[i], _width(f, dtype[i]), _frame(f, systems))
                for i, f in enumerate(self._table.fields)
            )
        self._keywords = _of_the_only_frame(systems) | scan.keywords

    def keyword(self, name: str) -> str:
        return self._keywords.get(name.upper(), "")

    def chunks(self, rows: int, wanted: _columns.Wanted) -> Iterator[_columns.Chunk]:
        array = self._table.array
        with _columns.translating(self._path, "VOTable"):
            for first in range(0, len(array), rows):
                part = array[first : first + rows]
                yield {ref: self._values(part, ref, kind) for ref, kind in wanted.items()}

    def whole(self) -> Table:
        return self._table.to_table(use_names_over_ids=True)

    def _values(self, part: Any, ref: ColumnRef, kind: ColumnType) -> NDArray[Any]:
        index = [column.name for column in self.columns].index(ref.name)
        datatype = self._table.fields[index].datatype
        words = (ColumnType.TEXT, ColumnType.LABEL)
        if kind not in words and datatype not in _NUMBERS:
            raise _columns.wrong_type(ref, kind, datatype)
        values = ref.of(part[part.dtype.names[index]])
        raw, missing = np.ma.getdata(values), np.ma.getmaskarray(values)
        if kind is ColumnType.TEXT:
            raw = np.where(missing, "", raw)
        return _columns.typed(raw, kind, ref, missing)


def _elements(arraysize: str | None) -> int | None:
    """Count the elements of a cell; None where each row has its own number."""
    if arraysize is None:
        return 1
    return None if "*" in arraysize else math.prod(int(n) for n in arraysize.split("x"))


def _width(field: Field, dtype: np.dtype[Any]) -> int:
    """Return 1 for a number or a text, 0 for vectors whose length differs from row to row."""
    if field.datatype in _TEXTS:
        return 1
    return 0 if _elements(field.arraysize) is None else math.prod(dtype.shape)


def _frame(field: Field, systems: dict[str, CooSys]) -> str:
    """The system of coordinates that a field refers to."""
    system = systems.get(field.ref)
    return "" if system is None else f"{system.system} {system.equinox or ''}".strip()


def _of_the_only_frame(systems: dict[str, CooSys]) -> dict[str, str]:
    """Keywords for fields that refer to none, of the only equatorial system there is."""
    of_sky = [s for s in systems.values() if re.match("eq_|icrs", str(s.system).lower())]
    if len(of_sky) != 1:
        return {}
    return {"RADESYS": str(of_sky[0].system), "EQUINOX": str(of_sky[0].equinox or "")}


def _cell_bytes(field: Field, dtype: np.dtype[Any]) -> int | None:
    """Count the bytes of a cell in BINARY and BINARY2; None where each row has its own."""
    count = _elements(field.arraysize)
    if count is None:
        return None
    bits = {"bit": 1, "char": 8, "unicodeChar": 16}.get(field.datatype)
    return dtype.itemsize if bits is None else -(-count * bits // 8)


def _check_rows(table: TableElement, scan: "Scan") -> None:
    """Refuse rows that astropy leaves out in silence: it ends at the first that is cut."""
    rows, dtype = len(table.array), table.array.dtype
    if scan.declared_rows not in (None, rows):
        raise UserError(f"the VOTable declares {scan.declared_rows} rows and holds {rows}")
    if scan.format not in ("BINARY", "BINARY2"):
        return
    mask = -(-len(table.fields) // 8) if scan.format == "BINARY2" else 0
    cells = [_cell_bytes(field, dtype[i]) for i, field in enumerate(table.fields)]
    sizes = [size for size in cells if size is not None]
    held = scan.letters * 3 // 4
    whole = rows * (mask + sum(sizes)) == held if len(sizes) == len(cells) else rows or not held
    if not whole:
        raise UserError(
            f"the {held} bytes of rows in the VOTable end inside a row, after {rows} whole ones; "
            "it is truncated"
        )


@final
@dataclass
class Scan:
    """Notes of the first pass: keywords (PARAM, INFO) in capitals; of the first table the
    declared rows, the format of its data and the letters of base64."""

    keywords: dict[str, str] = dataclasses.field(default_factory=dict)
    declared_rows: int | None = None
    format: str = ""
    letters: int = 0
    #: The largest number of rows, or elements of a cell, that any table promises.
    promised: int = 0
    tables: int = 0
    _streaming: bool = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Note the start of an element; refuse what leads elsewhere."""
        name = tag.rpartition(":")[2]
        if name == "STREAM":
            if "href" in attributes:
                raise UserError(
                    f"expected rows inside the VOTable, got a remote {attributes['href']}"
                )
            if attributes.get("encoding", "base64") != "base64":
                raise UserError("expected rows of the VOTable in base64, got packed ones")
            self._streaming = self.tables == 1
        elif name == "FITS":
            raise UserError("a FITS file inside a VOTable is not read; save it as a FITS file")
        elif name == "TABLE":
            self.tables += 1
            self._promise(attributes.get("nrows"))
            if self.tables == 1 and "nrows" in attributes:
                self.declared_rows = int(attributes["nrows"])
        elif name == "FIELD":
            self._promise(*attributes.get("arraysize", "").split("x"))
        elif name in ("PARAM", "INFO") and self.tables <= 1:
            self.keywords[attributes.get("name", "").upper()] = attributes.get("value", "").strip()
        elif name in ("TABLEDATA", "BINARY", "BINARY2") and self.tables == 1:
            self.format = name

    def end(self, tag: str) -> None:
        """Note the end of an element."""
        self._streaming = self._streaming and not tag.endswith("STREAM")

    def characters(self, text: str) -> None:
        """Count letters of base64."""
        if self._streaming:
            self.letters += len("".join(text.split()).rstrip("="))

    def _promise(self, *numbers: str | None) -> None:
        counts = [int(n.rstrip("*")) for n in numbers if n is not None and n.rstrip("*").isdigit()]
        self.promised = max(self.promised, math.prod(counts))


def scanned(stream: IO[bytes]) -> Scan:
    """Parse a VOTable without keeping its rows.

    UserError where it is no XML to its end, has more than `MOST_XML` bytes, declares entities,
    names other files, or promises more rows or elements than it has bytes.
    """
    scan, parser, size = Scan(), expat.ParserCreate(), 0
    parser.buffer_text, parser.buffer_size = True, _LETTERS_AT_ONCE
    parser.StartElementHandler, parser.EndElementHandler = scan.start, scan.end
    parser.CharacterDataHandler = scan.characters
    parser.EntityDeclHandler = _refuse_entities
    try:
        while block := stream.read(_LETTERS_AT_ONCE):
            parser.Parse(block, False)
            size += len(block)
            if size > MOST_XML:
                raise UserError(
                    f"expected a VOTable of at most {MOST_XML >> 20} MiB (unpacked), which is held "
                    "in memory whole; convert it to FITS or Parquet"
                )
            if size - parser.CurrentByteIndex > _LONGEST:
                raise UserError(f"a tag of more than {_LONGEST} bytes in this VOTable")
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise UserError(f"no XML to its end ({error}); is the file whole?") from None
    if scan.promised > size:
        raise UserError(f"{size} bytes cannot hold {scan.promised} rows or elements of a cell")
    return scan


def _refuse_entities(name: str, *described: object) -> None:
    """Refuse what may stand for gigabytes of text, or for other files."""
    raise UserError(f"the VOTable declares the entity {name}, which no table needs; remove it")


def _signed(path: Path, table: Table) -> Table:
    """The table with wider signed numbers in place of unsigned ones, which VOTable has not."""
    for name in table.colnames:
        values = table[name]
        if values.dtype.kind == "u" and values.dtype.itemsize > 1:
            if (np.ma.filled(np.ma.asarray(values), 0) > np.iinfo(np.int64).max).any():
                raise UserError(
                    f"{path}: column {name} holds numbers beyond 2^63, which VOTable has no place "
                    "for: choose a name that ends in .parquet or .fits"
                )
            table[name] = values.astype(np.int64 if values.dtype.itemsize > 2 else np.int32)
    return table


def write_votable(path: Path, table: Table) -> None:
    """Write a table, and the plain keywords of its header as INFO, which astropy would drop."""
    document = votable.from_table(_signed(path, Table(table)))
    document.resources[0].infos.extend(
        Info(name=str(name), value=str(value))
        for name, value in table.meta.items()
        if isinstance(value, str | int | float)
    )
    document.to_xml(str(path))
