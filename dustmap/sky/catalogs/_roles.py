"""The columns that mean something to every catalog, and the ways in which they go together."""

import enum
from dataclasses import dataclass
from typing import Optional, final

from astropy import units as u

from dustmap.sky.catalogs.readers import ColumnType


@final
@dataclass(frozen=True)
class Role:
    """A column that a star is made of, and the unit it is converted to."""

    name: str
    unit: u.UnitBase | None
    kind: ColumnType = ColumnType.NUMBER

    @staticmethod
    def every() -> tuple["Role", ...]:
        return _ROLES

    @staticmethod
    def named(name: str) -> Optional["Role"]:
        return next((role for role in _ROLES if role.name == name), None)


_UNITS: tuple[tuple[u.UnitBase, tuple[str, ...]], ...] = (
    (u.deg, ("l", "b", "ra", "dec")),
    (u.pc, ("x", "y", "z", "distance", "distance_error")),
    (u.pc, ("distance_p16", "distance_p50", "distance_p84")),
    (u.mas, ("parallax", "parallax_error")),
    (u.mag, ("extinction", "extinction_error")),
    (u.mag, ("extinction_p16", "extinction_p50", "extinction_p84")),
)
_ROLES = (
    Role("source_id", None, ColumnType.INTEGER),
    *(Role(name, unit) for unit, names in _UNITS for name in names),
)


class PositionKind(enum.Enum):
    """How directions are given."""

    GALACTIC = "galactic"
    ICRS = "icrs"
    CARTESIAN = "cartesian"  # heliocentric Galactic

    @property
    def columns(self) -> tuple[str, ...]:
        return _POSITIONS[self]


_POSITIONS = {
    PositionKind.GALACTIC: ("l", "b"),
    PositionKind.ICRS: ("ra", "dec"),
    PositionKind.CARTESIAN: ("x", "y", "z"),
}


class DistanceKind(enum.Enum):
    """What is known of distances."""

    PERCENTILES = "percentiles"
    GAUSSIAN = "error"
    PARALLAX = "parallax"
    EXACT = "exact"
    POSITION = "position"  # the length of x, y, z, taken as exact

    @property
    def columns(self) -> tuple[str, ...]:
        return _DISTANCES[self]


_DISTANCES = {
    DistanceKind.PERCENTILES: ("distance_p16", "distance_p50", "distance_p84"),
    DistanceKind.GAUSSIAN: ("distance", "distance_error"),
    DistanceKind.PARALLAX: ("parallax", "parallax_error"),
    DistanceKind.EXACT: ("distance",),
    DistanceKind.POSITION: ("x", "y", "z"),
}


class ExtinctionKind(enum.Enum):
    """What is known of extinctions."""

    ERROR = "error"
    PERCENTILES = "percentiles"  # value = median, error = (p84 - p16) / 2

    @property
    def columns(self) -> tuple[str, ...]:
        return _EXTINCTIONS[self]


_EXTINCTIONS = {
    ExtinctionKind.ERROR: ("extinction", "extinction_error"),
    ExtinctionKind.PERCENTILES: ("extinction_p16", "extinction_p50", "extinction_p84"),
}


class IdentifierPolicy(enum.Enum):
    """Where the identifiers of stars come from."""

    COLUMN = "column"
    ROW = "row"  # the number of the row, counted from 0 over all files
    EITHER = "column or row"


class InvalidRows(enum.Enum):
    """What to do with rows that are no stars: NaN, errors that are not positive, a second copy."""

    ERROR = "error"
    DROP = "drop"
