"""Places to predict at: any table with directions and distances."""

import gzip
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from astropy import units as u
from astropy.io.fits.verify import VerifyWarning
from astropy.table import Table
from astropy.units import UnitsWarning
from numpy.typing import NDArray

from dustmap.sky._hdf5 import open_hdf5
from dustmap.sky.catalogs import _rows
from dustmap.sky.catalogs._binding import bind, has_extinctions
from dustmap.sky.catalogs._card import SchemaCard, card_named
from dustmap.sky.catalogs._catalog import DEFAULT_PRIOR, milliarcseconds
from dustmap.sky.catalogs._selection import ROWS, invalid_row, problems_of_places
from dustmap.sky.catalogs.readers import CatalogError, Hdf5Reader, TextReader, open_reader
from dustmap.sky.catalogs.readers._base import translating
from dustmap.sky.stars import AbstractDistancePrior, AbstractDistances

_FORMATS = {
    ".fits": "fits",
    ".fit": "fits",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".vot": "votable",
    ".votable": "votable",
    ".xml": "votable",
}
#: Columns of a table of places: astropy takes a millisecond for each.
MOST_COLUMNS = 5000


@final
@dataclass(frozen=True, eq=False)
class Places:
    """The whole table, and Galactic l, b (N,) in degrees and distances of its N rows.

    measured: whether the card finds extinctions in the table, too.
    """

    table: Table
    l: NDArray[np.float64]
    b: NDArray[np.float64]
    distances: AbstractDistances
    measured: bool

    def __len__(self) -> int:
        return len(self.l)


def read_places(
    path: str | Path,
    card: SchemaCard | str | Path = "generic",
    *,
    prior: AbstractDistancePrior | None = None,
    parallax_zero_point: float | u.Quantity = 0.0,
) -> Places:
    """Every row is a place: none is cut, and one without a direction or distance is an error.

    prior: of parallaxes, such as that of the stars of a map; stated, as no row says anything of
    another: without one d² exp(−d/1350 pc).
    """
    path = Path(path)
    found = card if isinstance(card, SchemaCard) else card_named(card)
    reader = open_reader(path)
    if len(reader.columns) > MOST_COLUMNS:
        raise CatalogError(
            f"{path}: expected at most {MOST_COLUMNS:,} columns, all of which are kept beside the "
            f"answers, got {len(reader.columns):,}; select those you need"
        )
    binding = bind(path, found, reader.columns, (), with_extinctions=False)
    chunks = [binding.values(chunk) for chunk in reader.chunks(ROWS, binding.wanted)]
    if not chunks:
        raise CatalogError(f"{path}: the table has no rows")
    values = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    for reason, bad in problems_of_places(binding, values).items():
        if bad.any():
            raise invalid_row(path, reason, np.flatnonzero(bad))
    l, b = _rows.directions(binding.position, values)
    zero_point, known = milliarcseconds(parallax_zero_point), prior or DEFAULT_PRIOR.stated
    distances = _rows.distances(binding.distance, values, known, zero_point)
    with translating(path, "a table", Exception):  # of the library of any of the formats
        table = _whole_table(path)
    if len(table) != len(l):
        raise CatalogError(f"{path}: {len(l)} places in {len(table)} rows; remove lines of remarks")
    return Places(table, l, b, distances, has_extinctions(path, found, reader.columns))


def _whole_table(path: Path) -> Table:
    """All columns, so that what is written beside the predictions is the user's own table."""
    reader = open_reader(path)
    if isinstance(reader, Hdf5Reader):
        return _hdf5_table(path)
    with warnings.catch_warnings():
        # Foreign units and keywords are kept as they are.
        warnings.simplefilter("ignore", UnitsWarning)
        warnings.simplefilter("ignore", VerifyWarning)
        if isinstance(reader, TextReader):
            return _text_table(path, reader)
        ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
        return Table.read(path, format=_FORMATS[f".{ending}"])


def _text_table(path: Path, reader: TextReader) -> Table:
    kind, options = _text_format(reader)
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as stream:
        return Table.read(stream.read(), format=kind, **options)


def _text_format(reader: TextReader) -> tuple[str, dict[str, Any]]:
    """As the reader has it, whatever the file's name says: Gaia's .csv are ECSV, with null."""
    empty = {"fill_values": [("", "0"), ("null", "0")]}
    if reader.is_ecsv:
        return "ascii.ecsv", empty
    options: dict[str, Any] = {"delimiter": reader.separator, "comment": "#", "guess": False}
    if reader.separator != " ":
        return "ascii.csv", empty | options
    # The numbers of the rows may have no name in the first line.
    names = [column.name for column in reader.columns]
    return "ascii.no_header", empty | options | {"names": names, "data_start": 1}


def _hdf5_table(path: Path) -> Table:
    reader = Hdf5Reader(path)
    with open_hdf5(path) as file:
        columns: dict[str, Any] = {
            column.name: file[column.name][()] for column in reader.columns if column.name in file
        }
        return Table(columns) if columns else Table.read(file, format="hdf5")
