"""Readers of catalog files: one class a format, all with bounded memory."""

from pathlib import Path

from dustmap.sky.catalogs.readers._arrow import ParquetReader as ParquetReader
from dustmap.sky.catalogs.readers._arrow import TextReader as TextReader
from dustmap.sky.catalogs.readers._base import AbstractReader as AbstractReader
from dustmap.sky.catalogs.readers._base import CatalogError as CatalogError
from dustmap.sky.catalogs.readers._base import Chunk as Chunk
from dustmap.sky.catalogs.readers._base import ColumnRef as ColumnRef
from dustmap.sky.catalogs.readers._base import ColumnType as ColumnType
from dustmap.sky.catalogs.readers._base import FileColumn as FileColumn
from dustmap.sky.catalogs.readers._base import Wanted as Wanted
from dustmap.sky.catalogs.readers._fits import FitsReader as FitsReader
from dustmap.sky.catalogs.readers._hdf5 import Hdf5Reader as Hdf5Reader
from dustmap.sky.catalogs.readers._votable import VotableReader as VotableReader

_READERS: dict[type[AbstractReader], tuple[str, ...]] = {
    FitsReader: (".fits", ".fit", ".fits.gz", ".fit.gz"),
    Hdf5Reader: (".h5", ".hdf5", ".hdf"),
    ParquetReader: (".parquet", ".pq"),
    VotableReader: (".vot", ".votable", ".xml", ".vot.gz", ".votable.gz", ".xml.gz"),
    TextReader: tuple(
        ending + gz for ending in (".csv", ".ecsv", ".tsv", ".txt", ".dat") for gz in ("", ".gz")
    ),
}
ENDINGS = tuple(ending for endings in _READERS.values() for ending in endings)


def open_reader(path: str | Path) -> AbstractReader:
    """The reader that the name's ending asks for."""
    path = Path(path)
    name = path.name.lower()
    for reader, endings in _READERS.items():
        if name.endswith(endings):
            _check_file(path)
            return reader(path)  # type: ignore[call-arg]  # every final reader takes a path
    if name.endswith(".zarr"):
        raise CatalogError(f"{path}: a star store is no catalog; data.catalog takes it as it is")
    raise CatalogError(f"{path}: expected a catalog that ends in {', '.join(ENDINGS)}")


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise CatalogError(f"{path}: there is no such catalog")
    if path.stat().st_size == 0:
        raise CatalogError(f"{path}: the file is empty")
