"""Parquet, in batches of rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
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
from dustmap.sky.catalogs.readers._yaml import MASK, NO_DESCRIPTION, TableDescription, described

_BUFFER = 1 << 20
_META = b"table_meta_yaml"  # where astropy keeps units


@final
class ParquetReader(AbstractReader):
    """Columns are decoded page by page, so that large row groups do not fill the memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translating(path, "Parquet", pa.ArrowException, ValueError), self._open() as file:
            schema = file.schema_arrow
            metadata = schema.metadata or {}
            self._description = _description(metadata)
            label = metadata.get(b"EXTSYS", self._description.label.encode())
            self._label = str(label.decode().strip())
            self._columns = tuple(self._column(field) for field in schema)

    @property
    def columns(self) -> tuple[FileColumn, ...]:
        return self._columns

    @property
    def label(self) -> str:
        return self._label

    def chunks(self, rows: int, wanted: Wanted) -> Iterator[Chunk]:
        masks = {c.name.removesuffix(MASK) for c in self._columns if c.name.endswith(MASK)}
        names = {ref.name for ref in wanted}
        names |= {name + MASK for name in masks & names}
        with (
            translating(self._path, "Parquet", pa.ArrowException, ValueError),
            self._open() as file,
        ):
            for batch in file.iter_batches(
                batch_size=rows, columns=sorted(names), use_threads=False
            ):
                yield {ref: _values(batch, ref, kind) for ref, kind in wanted.items()}

    def _open(self) -> pq.ParquetFile:
        if not self._path.is_file():
            raise CatalogError(f"{self._path}: there is no such catalog")
        return pq.ParquetFile(self._path, buffer_size=_BUFFER, pre_buffer=False)

    def _column(self, field: pa.Field) -> FileColumn:
        metadata = field.metadata or {}
        unit = metadata.get(b"unit", self._description.units.get(field.name, "").encode()).decode()
        nested = pa.types.is_nested(field.type)
        fixed = pa.types.is_fixed_size_list(field.type)
        return FileColumn(field.name, unit, field.type.list_size if fixed else int(not nested))


def _description(metadata: dict[bytes, bytes]) -> TableDescription:
    if _META not in metadata:
        return NO_DESCRIPTION
    return described(metadata[_META].decode().splitlines())


def _values(batch: pa.RecordBatch, ref: ColumnRef, kind: ColumnType) -> NDArray[Any]:
    column = batch.column(ref.name)
    if ref.name + MASK in batch.schema.names:
        column = pc.if_else(batch.column(ref.name + MASK), None, column)
    if ref.entry is not None:
        column = pc.list_element(column, ref.entry)
    return from_arrow(column, ref, kind)


def from_arrow(column: pa.Array, ref: ColumnRef, kind: ColumnType) -> NDArray[Any]:
    """An Arrow array as numbers or text of numpy, nulls as `typed` marks them."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return typed(column.to_numpy(zero_copy_only=False).astype(object), kind, ref)
    if not (pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type)):
        raise wrong_type(ref, kind, str(column.type))
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    if missing is not None:
        column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
    return typed(np.asarray(column.to_numpy(zero_copy_only=False)), kind, ref, missing)
