"""Stars as one checked value; distances as the named columns and attributes of files, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._coordinates import cartesian
from dustmap.sky.stars import _distances
from dustmap.sky.stars._distances import (
    AbstractDistancePrior,
    AbstractDistances,
    Array,
    ParallaxDistances,
)
from dustmap.sky.stars._learned_prior import ToLearn
from dustmap.sky.stars._priors import ExponentialDensity, FlatParallax, SurveyRatio
from dustmap.sky.systems import ExtinctionSystem, system_named
from dustmap.tables import check_rows

#: The kinds of distances by their names in files.
KINDS: Mapping[str, type[AbstractDistances]] = MappingProxyType(
    {
        each.kind: each
        for each in (
            _distances.ExactDistances,
            _distances.GaussianDistances,
            _distances.PercentileDistances,
            ParallaxDistances,
        )
    }
)
#: Columns of numbers that every star has beside its distance, and their units.
MEASURED = MappingProxyType(
    {"l": "deg", "b": "deg", "extinction": "mag", "extinction_error": "mag"}
)


def kind_named(name: object) -> type[AbstractDistances]:
    """Return the class of a kind of distances."""
    if str(name) not in KINDS:
        raise UserError(f"distances must be one of {', '.join(KINDS)}, got {name!r}")
    return KINDS[str(name)]


def prior_named(name: str, scale: float, distance_max: float) -> AbstractDistancePrior | ToLearn:
    """Make a prior by its name in configurations and commands; lengths in pc."""
    if name == "learned":
        return ToLearn(scale, distance_max)
    return prior_from(
        {"distance_prior": name, "distance_scale_pc": scale, "distance_max_pc": distance_max}
    )


def prior_from(attributes: Mapping[str, Any]) -> AbstractDistancePrior:
    """Make the prior that `AbstractDistancePrior.attributes` describe."""
    name = attributes.get("distance_prior")
    if name == "flat-parallax":
        return FlatParallax(float(attributes["distance_max_pc"]))
    if name == "exponential-density":
        scale, furthest = attributes["distance_scale_pc"], attributes["distance_max_pc"]
        ratio = attributes.get("distance_ratio")
        table = None if ratio is None else SurveyRatio.of(ratio)
        return ExponentialDensity(float(scale), float(furthest), table)
    raise UserError(f"distance_prior must be flat-parallax or exponential-density, got {name!r}")


@final
@dataclass(frozen=True, eq=False)
class StarTable:
    """N ≥ 1 stars.

    source_id (N,); Galactic l, b (N,) in degrees; distances of N stars; extinction and
    extinction_error (N,) in mag of `system`. Every value is finite and can be a measurement: errors
    from 1e-9 to 1e6 mag, extinctions within ±1000 mag; an extinction may be negative.
    """

    source_id: NDArray[np.int64]
    l: Array
    b: Array
    distances: AbstractDistances
    extinction: Array
    extinction_error: Array
    system: ExtinctionSystem

    def __post_init__(self) -> None:
        _distances.check_lengths(self.columns())
        if len(self) == 0:
            raise UserError("the catalog has no rows: expected at least one star")
        measured = {name: getattr(self, name) for name in MEASURED}
        _distances.check_finite(measured)
        check_rows(np.abs(self.b) <= 90.0, "b", "between -90 and 90 degrees")
        _distances.check_magnitudes(measured)

    def __len__(self) -> int:
        return len(self.source_id)

    def __getitem__(self, index: NDArray[Any] | slice) -> "StarTable":
        """The stars at an index array, under a mask, or in a slice."""
        measured = {name: getattr(self, name)[index] for name in MEASURED}
        return StarTable(
            self.source_id[index], distances=self.distances[index], system=self.system, **measured
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
        return cls(
            columns["source_id"],
            distances=kind(**values),
            system=system_named(str(attributes["extinction_system"])),
            **{name: columns[name] for name in MEASURED},
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return all numbers (N,) under their names in files."""
        return {
            "source_id": self.source_id,
            "l": self.l,
            "b": self.b,
            **self.distances.columns(),
            "extinction": self.extinction,
            "extinction_error": self.extinction_error,
        }

    def attributes(self) -> dict[str, Any]:
        """Return what all stars of a table have in common: system and kind of distances."""
        own, distances = {"extinction_system": self.system.name}, self.distances
        prior = distances.prior.attributes() if isinstance(distances, ParallaxDistances) else {}
        return {**own, "distances": distances.kind, **prior}

    @property
    def distance(self) -> Array:
        """Median distance (N,) in pc."""
        return self.distances.median

    def positions(self) -> Array:
        """Return heliocentric Galactic X, Y, Z in pc (N, 3), at the median distance."""
        return cartesian(self.l, self.b, self.distance)


def concatenate(parts: Sequence[StarTable]) -> StarTable:
    """Join the stars of all parts, in order.

    ValueError where their systems, kinds of distances or priors differ.
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
    """Keep every k-th star, at most `most` of them."""
    return stars[:: -(-len(stars) // most)]
