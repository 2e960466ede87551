"""Parquet, which Arrow decodes in batches of rows, and the columns of Arrow as those of numpy."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from astropy.table import Column, MaskedColumn, Table
from astropy.table.meta import get_yaml_from_table
from astropy.table.serialize import represent_mixins_as_columns
from numpy.typing import NDArray

from dustmap.tables import _columns
from dustmap.tables._columns import MASK, ColumnRef, ColumnType

_BUFFER = 1 << 20  # bytes that are read at once
_META = b"table_meta_yaml"  # where astropy keeps units
#: Types of Arrow, and those that columns of them become.
_READ_AS = (
    (pa.types.is_float16, pa.float32()),
    (pa.types.is_decimal, pa.float64()),
    (pa.types.is_duration, pa.int64()),
    (pa.types.is_temporal, pa.string()),
    (pa.types.is_null, pa.string()),
)


@final
class ParquetReader(_columns.AbstractReader):
    """Decode columns page by page, so that large row groups do not fill the memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _columns.translating(path, "Parquet"), self._open() as file:
            schema = file.schema_arrow
            self._metadata: dict[bytes, bytes] = schema.metadata or {}
            yaml = self._metadata.get(_META)
            self._description = _columns.NO_DESCRIPTION
            if yaml is not None:
                self._description = _columns.TableDescription.parse(yaml.decode().splitlines())
            self.columns = tuple(self._column(field) for field in schema)

    def keyword(self, name: str) -> str:
        written = self._metadata.get(name.encode())
        if written is None:
            return self._description.keyword(name)
        return written.decode("utf-8", "replace").strip()

    def chunks(self, rows: int, wanted: _columns.Wanted) -> Iterator[_columns.Chunk]:
        masks = {c.name.removesuffix(MASK) for c in self.columns if c.name.endswith(MASK)}
        names = {ref.name for ref in wanted}
        names |= {name + MASK for name in masks & names}
        with _columns.translating(self._path, "Parquet"), self._open() as file:
            for batch in file.iter_batches(
                batch_size=rows, columns=sorted(names), use_threads=False
            ):
                yield {ref: values_of(batch, ref, kind) for ref, kind in wanted.items()}

    def whole(self) -> Table:
        with _columns.translating(self._path, "Parquet"), self._open() as file:
            stored = file.read(use_threads=False).combine_chunks()
            table = Table(meta=dict(self._description.meta))
            table.meta.pop("__serialized_columns__", None)
            for column in self.columns:
                name = column.name
                if name.endswith(MASK) and name.removesuffix(MASK) in stored.schema.names:
                    continue
                table[name] = _as_stored(_masked(stored, name))
                table[name].unit = column.unit or None
                said = self._description.attribute(name, "description")
                table[name].description = said or None
            return table

    def _open(self) -> pq.ParquetFile:
        return pq.ParquetFile(self._path, buffer_size=_BUFFER, pre_buffer=False)

    def _column(self, field: pa.Field) -> _columns.FileColumn:
        metadata = field.metadata or {}
        declared = self._description.attribute(field.name, "unit")
        unit = metadata.get(b"unit", declared.encode()).decode()
        nested = pa.types.is_nested(field.type)
        fixed = pa.types.is_fixed_size_list(field.type)
        width = field.type.list_size if fixed else int(not nested)
        return _columns.FileColumn(field.name, unit, width, self._description.frame(field.name))


def _masked(table: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    """Take a column, null where a second one says that it has no values."""
    column = table.column(name)
    if name + MASK in table.schema.names:
        column = pc.if_else(table.column(name + MASK), None, column)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def values_of(batch: pa.RecordBatch, ref: ColumnRef, kind: ColumnType) -> NDArray[Any]:
    """Return one column, null where another says so, as numbers or text."""
    column = _masked(batch, ref.name)
    if ref.entry is not None:
        column = pc.list_element(column, ref.entry)
    return from_arrow(column, ref, kind)


def from_arrow(column: pa.Array, ref: ColumnRef, kind: ColumnType) -> NDArray[Any]:
    """Convert an Arrow array (N,) to numbers or text of numpy, nulls as `typed` marks them."""
    column = _plain(column)
    if _is_text(column):
        return _columns.typed(column.to_numpy(zero_copy_only=False).astype(object), kind, ref)
    if not pa.types.is_primitive(column.type):
        raise _columns.wrong_type(ref, kind, str(column.type))
    values = _filled(column)
    return _columns.typed(np.ma.getdata(values), kind, ref, np.ma.getmaskarray(values))


def _plain(column: pa.Array) -> pa.Array:
    """Convert to numbers or text: times and bytes, which astropy writes for those of FITS, too."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = "" if pa.types.is_nested(column.type) else str(column.type)
    if "binary" in kind or "view" in kind:
        column = pc.utf8_rtrim(_decoded(column.cast(pa.binary())), characters="\0 ")
    return column.cast(next((to for is_of, to in _READ_AS if is_of(column.type)), column.type))


def _decoded(column: pa.Array) -> pa.Array:
    """Read bytes as UTF-8, with marks in place of what is none."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        words = [None if b is None else b.decode("utf-8", "replace") for b in column.to_pylist()]
        return pa.array(words, pa.string())


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _filled(column: pa.Array) -> NDArray[Any]:
    """Convert numbers or truth values, masked where they are null."""
    missing = column.is_null().to_numpy(zero_copy_only=False)
    column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
    return np.ma.MaskedArray(column.to_numpy(zero_copy_only=False), mask=missing)


def _as_stored(column: pa.Array) -> Column:
    """Convert to a column of the array's own type, masked where it is null."""
    column = _plain(column)
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if _is_text(column):
        values = np.array([word or "" for word in column.to_pylist()], np.str_)
    elif pa.types.is_primitive(column.type):
        values = np.ma.getdata(_filled(column))
    else:
        values = column.to_numpy(zero_copy_only=False)
        if pa.types.is_fixed_size_list(column.type) and not missing.any() and len(values):
            values = np.stack(values)
    return MaskedColumn(values, mask=missing) if missing.any() else Column(values)


def write_parquet(path: Path, table: Table) -> None:
    """Write columns with nulls where they are masked; units and header as astropy keeps them."""
    plain = represent_mixins_as_columns(Table(table), exclude_classes=(MaskedColumn,))
    arrays = {}
    for name in plain.colnames:
        values = np.asarray(np.ma.getdata(plain[name]))
        mask = np.ma.getmaskarray(plain[name]) if np.ma.isMaskedArray(plain[name]) else None
        if values.dtype.kind == "S":
            values = np.char.decode(values, "utf-8", "replace")
        values = values.astype(values.dtype.newbyteorder("="))
        if values.ndim == 1:
            arrays[name] = pa.array(values, mask=mask)
        else:
            flat = pa.array(values.ravel(), mask=None if mask is None else mask.ravel())
            width = math.prod(values.shape[1:])
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    metadata = {_META: "\n".join(get_yaml_from_table(plain)).encode()}
    pq.write_table(pa.table(arrays).replace_schema_metadata(metadata), path)
