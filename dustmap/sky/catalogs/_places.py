"""Places to predict at: any table with directions and distances."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from astropy import units as u
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.sky.catalogs import _rows
from dustmap.sky.catalogs._binding import bind, has_extinctions
from dustmap.sky.catalogs._card import SchemaCard, card_named
from dustmap.sky.catalogs._catalog import DEFAULT_PRIOR, milliarcseconds
from dustmap.sky.catalogs._selection import ROWS, invalid_row, problems_of_places
from dustmap.sky.stars import AbstractDistancePrior, AbstractDistances
from dustmap.tables import CatalogError, open_table

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
    """Read every row as a place: none is cut.

    Parameters
    ----------
    prior
        Of parallaxes, such as that of the stars of a map; d² exp(−d/1350 pc) by default, as no row
        says anything of another.

    Raises
    ------
    CatalogError
        Where a row has no direction or distance, or the file cannot be read.
    """
    path = Path(path)
    schema = card if isinstance(card, SchemaCard) else card_named(card)
    reader = open_table(path)
    if len(reader.columns) > MOST_COLUMNS:
        raise CatalogError(
            f"{path}: expected at most {MOST_COLUMNS:,} columns, all of which are kept beside the "
            f"answers, got {len(reader.columns):,}; select those you need"
        )
    binding = bind(path, schema, reader.columns, (), with_extinctions=False)
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
    table = reader.whole()
    if len(table) != len(l):
        raise CatalogError(f"{path}: {len(l)} places in {len(table)} rows; remove lines of remarks")
    return Places(table, l, b, distances, has_extinctions(path, schema, reader.columns))
