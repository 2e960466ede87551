"""Stars as one checked value: directions, distances, extinctions; to files and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._coordinates import cartesian
from dustmap.sky.stars._distances import (
    AbstractDistances,
    ParallaxDistances,
    check_columns,
    kind_named,
)
from dustmap.sky.stars._priors import Array, prior_from
from dustmap.sky.systems import ExtinctionSystem, system_named
from dustmap.tables import check_rows

#: Largest |extinction|, and smallest and largest error, that can be a measurement, in mag.
MOST_EXTINCTION, LEAST_ERROR, MOST_ERROR = 1e3, 1e-9, 1e6
#: Columns of numbers that every star has beside its distance, and their units.
MEASURED = MappingProxyType(
    {"l": "deg", "b": "deg", "extinction": "mag", "extinction_error": "mag"}
)

#: Columns that some tables have, and the attributes that say so.
GROUP, GROUPED = "group", "grouped"
MAGNITUDE, HAS_MAGNITUDES = "magnitude_mag", "magnitudes"
MULTIPLICITY, COMBINED = "multiplicity", "combined"
#: Fields of a table by attribute, and the column of each.
OPTIONAL = MappingProxyType(
    {
        GROUPED: (GROUP, "groups"),
        HAS_MAGNITUDES: (MAGNITUDE, "magnitude"),
        COMBINED: (MULTIPLICITY, "multiplicity"),
    }
)


@final
@dataclass(frozen=True, eq=False)
class StarTable:
    """N ≥ 1 stars, whose values are finite and can be measurements.

    Attributes
    ----------
    source_id : (N,)
    l, b : (N,)
        Galactic coordinates in degrees.
    distances : distributions of the N distances
    extinction, extinction_error : (N,)
        In mag of `system`, within ±1000 mag and from 1e-9 to 1e6 mag.
    groups : (N,) or None
        Numbers ≥ 0 of groups whose extinctions may have a zero point of their own, −1 for none of
        those that are known; None where stars have no groups.
    magnitude : (N,) or None
        Apparent, dimmed by the dust, in the band that limits the catalog; None where unknown.
    multiplicity : (N,) or None
        How many stars of independent distances a row is the mean of (`combined`); None where
        every row is one.

    Examples
    --------
    >>> from dustmap.sky.stars import ExactDistances
    >>> l, b, distance, extinction, error = np.array([[90.0], [0.0], [100.0], [0.2], [0.01]])
    >>> where, system = ExactDistances(distance), system_named("A_V")
    >>> stars = StarTable(np.array([1]), l, b, where, extinction, error, system)
    >>> stars.positions().round(6)
    array([[  0., 100.,   0.]])
    """

    source_id: NDArray[np.int64]
    l: Array
    b: Array
    distances: AbstractDistances
    extinction: Array
    extinction_error: Array
    system: ExtinctionSystem
    groups: NDArray[np.int64] | None = None
    magnitude: Array | None = None
    multiplicity: Array | None = None

    def __post_init__(self) -> None:
        check_columns(self.columns())
        if len(self) == 0:
            raise UserError("the catalog has no rows: expected at least one star")
        check_rows(np.abs(self.b) <= 90.0, "b", "between -90 and 90 degrees")
        within = f"between -{MOST_EXTINCTION:g} and {MOST_EXTINCTION:g} mag"
        check_rows(np.abs(self.extinction) <= MOST_EXTINCTION, "extinction", within)
        error = self.extinction_error
        check_rows(error > 0.0, "extinction_error", "> 0")
        within = f"between {LEAST_ERROR:g} and {MOST_ERROR:g} mag"
        check_rows((error >= LEAST_ERROR) & (error <= MOST_ERROR), "extinction_error", within)

    def __len__(self) -> int:
        return len(self.source_id)

    def __getitem__(self, index: NDArray[Any] | slice) -> "StarTable":
        """The stars at an index array, under a mask, or in a slice."""
        measured = {name: getattr(self, name)[index] for name in MEASURED}
        return StarTable(
            self.source_id[index],
            distances=self.distances[index],
            system=self.system,
            **{field: values[index] for field, values in self._optional().items()},
            **measured,
        )

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]
    ) -> Self:
        """Make the table that `columns` and `attributes` of one describe."""
        kind = kind_named(attributes.get("distances"))
        values: dict[str, Any] = {field: columns[name] for name, field in kind.fields.items()}
        if kind is ParallaxDistances:
            values["prior"] = prior_from(attributes)
        there = (both for has, both in OPTIONAL.items() if attributes.get(has))
        more = {field: columns[name] for name, field in there}
        return cls(
            columns["source_id"],
            distances=kind(**values),
            system=system_named(str(attributes["extinction_system"])),
            **{name: columns[name] for name in MEASURED},
            **more,
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return all numbers (N,) under their names in files."""
        own = self._optional()
        return {
            "source_id": self.source_id,
            "l": self.l,
            "b": self.b,
            **self.distances.columns(),
            "extinction": self.extinction,
            "extinction_error": self.extinction_error,
            **{name: own[field] for name, field in OPTIONAL.values() if field in own},
        }

    def attributes(self) -> dict[str, Any]:
        """Return what all stars of a table have in common: system and kind of distances."""
        own, distances = {"extinction_system": self.system.name}, self.distances
        prior = distances.prior.attributes() if isinstance(distances, ParallaxDistances) else {}
        more = {has: True for has, (_, field) in OPTIONAL.items() if field in self._optional()}
        return {**own, "distances": distances.kind, **prior, **more}

    def _optional(self) -> dict[str, NDArray[Any]]:
        """Return the columns, by field, that not every table has."""
        fields = {field: getattr(self, field) for _, field in OPTIONAL.values()}
        return {field: values for field, values in fields.items() if values is not None}

    @property
    def distance(self) -> Array:
        """Median distance (N,) in pc."""
        return self.distances.median

    def positions(self) -> Array:
        """Return heliocentric Galactic X, Y, Z in pc (N, 3), at the median distance."""
        return cartesian(self.l, self.b, self.distance)


def concatenate(parts: Sequence[StarTable]) -> StarTable:
    """Join the stars of all parts, in order.

    Raises
    ------
    UserError
        Where their systems, kinds of distances or priors differ.
    """
    if not parts:
        raise UserError("there are no tables to join: expected at least one")
    systems = {part.system.name for part in parts}
    if len(systems) > 1:
        raise UserError(
            f"tables in {' and '.join(sorted(systems))} cannot be joined: convert them to one "
            "extinction system first"
        )
    if len(parts) == 1:
        return parts[0]
    first, *others = [part.attributes() for part in parts]
    for other in others:
        if other != first:
            raise UserError(
                f"distances of two kinds cannot be joined: {_text(first)} and {_text(other)}; "
                "use one schema and one prior for all files"
            )
    columns = [part.columns() for part in parts]
    every = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    return StarTable.from_columns(every, first)


def _text(attributes: Mapping[str, Any]) -> str:
    named = {name: v for name, v in attributes.items() if name != "extinction_system"}
    return " ".join(str(v) for v in named.values() if not isinstance(v, Mapping))


def thinned(stars: StarTable, most: int) -> StarTable:
    """Keep every k-th star, at most `most` of them.

    Examples
    --------
    >>> from dustmap.sky.stars import ExactDistances
    >>> rows, system = np.arange(1.0, 6.0), system_named("A_V")
    >>> stars = StarTable(rows.astype(int), rows, rows, ExactDistances(rows), rows, rows, system)
    >>> thinned(stars, most=2).source_id, len(concatenate([stars, stars]))
    (array([1, 4]), 10)
    """
    return stars[:: -(-len(stars) // most)]
