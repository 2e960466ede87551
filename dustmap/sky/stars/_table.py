"""Stars as one checked value: directions, distances, extinctions; to files and back; their means.

The mean of stars that a grid cannot tell apart is along their mean line of sight. Extinctions
y_n = φ_nᵀρ + e_n of the stars of a cell have the mean

    ȳ = Σ_n w_n y_n / Σ_n w_n,    φ̄ = Σ_n w_n φ_n / Σ_n w_n,    w_n = 1/σ_n²,

a datum of the density as good as any: what is lost is what the stars of a cell say of the
differences of their rows. φ̄ is taken as the row of one star, at the mean direction and with the
mean numbers of the distance; the cells are small beside spacing and error of distance, so that
this is of second order. What the distances of stars add to the noise is independent from star to
star: Var ȳ has it divided by the multiplicity (Σ w)² / Σ w². What lies between the nodes is the
same for all stars of a cell, and is not divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._coordinates import PIXEL, cartesian, galactic
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

#: The column of magnitudes, which some tables have, and the attribute that says so.
MAGNITUDE, HAS_MAGNITUDES = "magnitude_mag", "magnitudes"
#: Columns that some tables have, by the attribute that says so: the name in files, and the field.
OPTIONAL = MappingProxyType(
    {
        "grouped": ("group", "groups"),
        HAS_MAGNITUDES: (MAGNITUDE, "magnitude"),
        "combined": ("multiplicity", "multiplicity"),
    }
)
#: Number (N,) of the group of each row.
Labels: TypeAlias = NDArray[np.int64]
#: The largest nside of HEALPix.
_MOST_NSIDE = 2**24
#: Errors of distance below so much of a spacing are alike; others within a factor of 2^½.
_EXACT, _PER_OCTAVE = 0.25, 2.0


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
        fields = ("source_id", *MEASURED, "distances", *self._optional())
        return replace(self, **{field: getattr(self, field)[index] for field in fields})

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


def combined(stars: StarTable, spacing: Array, width: float = 1.0) -> StarTable:
    """Take the means of stars that lie in one cell.

    A cell is a pixel of the sky no wider than `width` spacings at the star; in distance it is
    between ½ and 1 `width` of the spacing, or of the error of the distance where that is larger,
    and errors in it differ by less than √2. Stars of several groups are in several cells.

    Parameters
    ----------
    stars : without magnitudes, N of them
    spacing : (N,), of the nodes around each star, in pc
    width : of a cell, in spacings

    Returns
    -------
    StarTable
        One row a cell, in the order of the first star of each, whose `source_id` it has.

    Examples
    --------
    >>> from dustmap.sky.stars import GaussianDistances
    >>> from dustmap.sky.systems import system_named
    >>> distance, error = np.array([100.0, 101.0, 180.0]), np.full(3, 5.0)
    >>> where, y = GaussianDistances(distance, error), np.array([0.1, 0.3, 0.5])
    >>> zero, system = np.zeros(3), system_named("A_V")
    >>> stars = StarTable(np.arange(3), zero + 45.0, zero + 1.0, where, y, zero + 0.1, system)
    >>> fewer = combined(stars, np.full(3, 20.0))
    >>> fewer.extinction, fewer.multiplicity, fewer.distance.round(1)
    (array([0.2, 0.5]), array([2., 1.]), array([100.5, 180. ]))
    """
    cell, first = _cells(stars, spacing, width)
    weight = stars.extinction_error**-2.0
    total = np.bincount(cell, weight)

    def mean(values: Array) -> Array:
        return np.bincount(cell, weight * values) / total

    direction = cartesian(stars.l, stars.b, np.ones(len(stars)))
    l, b, _ = galactic(np.stack([mean(axis) for axis in direction.T], axis=-1))
    distances = stars.distances
    fields = {field: mean(getattr(distances, field)) for field in distances.fields.values()}
    own = stars.multiplicity
    many = np.ones(len(stars)) if own is None else own
    return replace(
        stars[first],
        l=l,
        b=b,
        distances=replace(distances[first], **fields),
        extinction=mean(stars.extinction),
        extinction_error=1.0 / np.sqrt(total),
        magnitude=None,
        multiplicity=total**2 / np.bincount(cell, weight**2 / many),
    )


def _cells(stars: StarTable, spacing: Array, width: float) -> tuple[Labels, Labels]:
    """Return the cell (N,) of each star, counted by their first stars, and these (C,)."""
    distances = stars.distances
    step, (depth, error) = spacing * distances.depth_per_pc, distances.depths()
    octave = np.floor(np.log2(np.maximum(step, error)))
    shell = np.floor(depth / (width * 2.0**octave))
    known = error < _EXACT * step
    size = np.floor(_PER_OCTAVE * np.log2(np.where(known, 1.0, error)))
    labels: list[NDArray[Any]] = [octave, shell, known, size]
    if stars.groups is not None:
        labels.append(stars.groups)
    cell = _pixels(stars, width * spacing / distances.rough)
    for label in labels:
        inverse = np.unique(label, return_inverse=True)[1]
        cell = np.unique(cell * (inverse.max() + 1) + inverse, return_inverse=True)[1]
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    return np.argsort(order)[inverse], first[order]


def _pixels(stars: StarTable, width: Array) -> Labels:
    """Return a number (N,) for the pixels no wider than these angles (N,) in rad, of all nsides."""
    import healpy  # takes a second, as it takes matplotlib

    wanted = np.ceil(np.log2(np.maximum(PIXEL / width, 1.0)))
    order = np.minimum(wanted, np.log2(_MOST_NSIDE)).astype(np.int64)
    pixel = np.empty(len(stars), np.int64)
    for each in np.unique(order):
        rows, nside = order == each, 2 ** int(each)
        inside = healpy.ang2pix(nside, stars.l[rows], stars.b[rows], nest=True, lonlat=True)
        pixel[rows] = 4 * nside**2 + inside
    return np.unique(pixel, return_inverse=True)[1]
