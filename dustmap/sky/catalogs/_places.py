"""Places to predict at: any table with directions and distances."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import h5py
import numpy as np
from astropy import units as u
from astropy.io.fits.verify import VerifyWarning
from astropy.table import Table
from astropy.units import UnitsWarning
from numpy.typing import NDArray

from dustmap.sky.catalogs import _rows
from dustmap.sky.catalogs._binding import bind
from dustmap.sky.catalogs._card import SchemaCard
from dustmap.sky.catalogs._catalog import DEFAULT_PRIOR, milliarcseconds
from dustmap.sky.catalogs._selection import ROWS, invalid_row, problems_of_places
from dustmap.sky.catalogs._shelf import card_named
from dustmap.sky.catalogs.readers import CatalogError, Hdf5Reader, TextReader, open_reader
from dustmap.sky.stars import AbstractDistancePrior, AbstractDistances

_FORMATS = {
    ".fits": "fits",
    ".fit": "fits",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".vot": "votable",
    ".votable": "votable",
    ".xml": "votable",
    ".ecsv": "ascii.ecsv",
    ".csv": "ascii.csv",
    ".tsv": "ascii.tab",
    ".txt": "ascii.basic",
    ".dat": "ascii.basic",
}


@final
@dataclass(frozen=True, eq=False)
class Places:
    """The whole table, and Galactic l, b (N,) in degrees and distances of its N rows."""

    table: Table
    l: NDArray[np.float64]
    b: NDArray[np.float64]
    distances: AbstractDistances

    def __len__(self) -> int:
        return len(self.l)


def read_places(
    path: str | Path,
    card: SchemaCard | str | Path = "generic",
    *,
    prior: AbstractDistancePrior | None = None,
    parallax_zero_point: float | u.Quantity = 0.0,
) -> Places:
    """Every row is a place: none is cut, and one without a direction or distance is an error."""
    path = Path(path)
    found = card if isinstance(card, SchemaCard) else card_named(card)
    reader = open_reader(path)
    binding = bind(path, found, reader.columns, (), with_extinctions=False)
    chunks = [binding.values(chunk) for chunk in reader.chunks(ROWS, binding.wanted)]
    if not chunks:
        raise CatalogError(f"{path}: the table has no rows")
    values = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    for reason, bad in problems_of_places(binding, values).items():
        if bad.any():
            raise invalid_row(path, reason, np.flatnonzero(bad))
    l, b = _rows.directions(binding.position, values)
    distances = _rows.distances(
        binding.distance, values, prior or DEFAULT_PRIOR, milliarcseconds(parallax_zero_point)
    )
    return Places(_whole_table(path), l, b, distances)


def _whole_table(path: Path) -> Table:
    """All columns, so that what is written beside the predictions is the user's own table."""
    reader = open_reader(path)
    if isinstance(reader, Hdf5Reader):
        return _hdf5_table(path)
    kind = _FORMATS[f".{path.name.lower().removesuffix('.gz').rpartition('.')[2]}"]
    options: dict[str, Any] = {}
    if isinstance(reader, TextReader):
        # Gaia's files are ECSV whatever their names say, and write null for nothing.
        kind = "ascii.ecsv" if reader.is_ecsv else kind
        options["fill_values"] = [("", "0"), ("null", "0")]
    with warnings.catch_warnings():
        # Foreign units and keywords are kept as they are.
        warnings.simplefilter("ignore", UnitsWarning)
        warnings.simplefilter("ignore", VerifyWarning)
        return Table.read(path, format=kind, **options)


def _hdf5_table(path: Path) -> Table:
    reader = Hdf5Reader(path)
    with h5py.File(path, "r") as file:
        columns: dict[str, Any] = {
            column.name: file[column.name][()] for column in reader.columns if column.name in file
        }
    if not columns:
        return Table.read(path, format="hdf5")
    return Table(columns)
