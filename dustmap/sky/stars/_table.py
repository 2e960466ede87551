"""Stars as one checked value; distances as the named columns and attributes of files, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky._coordinates import cartesian
from dustmap.sky.stars._distances import (
    AbstractDistancePrior,
    AbstractDistances,
    Array,
    ExactDistances,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
    check_finite,
    check_lengths,
    check_magnitudes,
)
from dustmap.sky.stars._learned_prior import ToLearn
from dustmap.sky.stars._priors import ExponentialDensity, FlatParallax, SurveyRatio
from dustmap.sky.systems import ExtinctionSystem
from dustmap.tables import check_rows

#: Kind -> columns, in the order of the fields.
KINDS: dict[str, tuple[str, ...]] = {
    "exact": ("distance_pc",),
    "gaussian": ("distance_pc", "distance_error_pc"),
    "percentile": ("distance_p16_pc", "distance_p50_pc", "distance_p84_pc"),
    "parallax": ("parallax_mas", "parallax_error_mas"),
}


def attributes_of(distances: AbstractDistances) -> dict[str, Any]:
    """Kind of the distances and their prior, if they have one."""
    names = tuple(distances.columns())
    kind = next(kind for kind, columns in KINDS.items() if columns == names)
    found: dict[str, Any] = {"distances": kind}
    if isinstance(distances, ParallaxDistances):
        found |= distances.prior.attributes()
    return found


def distances_from(
    columns: Mapping[str, Array], attributes: Mapping[str, Any]
) -> AbstractDistances:
    """What `columns()` and `attributes_of` of distances give back."""
    kind = str(attributes.get("distances"))
    if kind not in KINDS:
        raise ValueError(f"distances must be one of {', '.join(KINDS)}, got {kind!r}")
    values = [columns[name] for name in KINDS[kind]]
    if kind == "exact":
        return ExactDistances(*values)
    if kind == "gaussian":
        return GaussianDistances(*values)
    if kind == "percentile":
        return PercentileDistances(*values)
    return ParallaxDistances(values[0], values[1], prior_from(attributes))


def prior_named(name: str, scale: float, distance_max: float) -> AbstractDistancePrior | ToLearn:
    """A prior by the name that configurations and commands have for it; lengths in pc."""
    if name == "learned":
        return ToLearn(scale, distance_max)
    return prior_from(
        {"distance_prior": name, "distance_scale_pc": scale, "distance_max_pc": distance_max}
    )


def prior_from(attributes: Mapping[str, Any]) -> AbstractDistancePrior:
    """The prior of the attributes that `AbstractDistancePrior.attributes` gave."""
    name = attributes.get("distance_prior")
    if name == "flat-parallax":
        return FlatParallax(float(attributes["distance_max_pc"]))
    if name == "exponential-density":
        scale, furthest = attributes["distance_scale_pc"], attributes["distance_max_pc"]
        ratio = attributes.get("distance_ratio")
        table = None if ratio is None else SurveyRatio.of(ratio)
        return ExponentialDensity(float(scale), float(furthest), table)
    raise ValueError(f"distance_prior must be flat-parallax or exponential-density, got {name!r}")


def joined(parts: Sequence[AbstractDistances]) -> AbstractDistances:
    """The distances of all parts, in order; of one kind, with one prior."""
    first, *others = [attributes_of(part) for part in parts]
    for other in others:
        if other != first:
            raise ValueError(
                f"distances of two kinds cannot be joined: {_text(first)} and {_text(other)}; "
                "use one schema and one prior for all files"
            )
    columns = [part.columns() for part in parts]
    every = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    return distances_from(every, first)


def _text(attributes: Mapping[str, Any]) -> str:
    plain = (v for v in attributes.values() if not isinstance(v, Mapping))
    return " ".join(map(str, plain))


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
        columns = self._columns()
        check_lengths({"source_id": self.source_id, **columns, **self.distances.columns()})
        if len(self) == 0:
            raise ValueError("the catalog has no rows: expected at least one star")
        check_finite(columns)
        check_rows(np.abs(self.b) <= 90.0, "b", "between -90 and 90 degrees")
        check_magnitudes(columns)

    def __len__(self) -> int:
        return len(self.source_id)

    def __getitem__(self, index: NDArray[Any] | slice) -> "StarTable":
        """The stars at an index array, under a mask, or in a slice."""
        columns = {name: values[index] for name, values in self._columns().items()}
        return StarTable(
            source_id=self.source_id[index],
            distances=self.distances[index],
            system=self.system,
            **columns,
        )

    @property
    def distance(self) -> Array:
        """Median distance (N,) in pc."""
        return self.distances.median

    def positions(self) -> Array:
        """Heliocentric Galactic X, Y, Z in pc (N, 3), at the median distance."""
        return cartesian(self.l, self.b, self.distance)

    def _columns(self) -> dict[str, Array]:
        names = ("l", "b", "extinction", "extinction_error")
        return {name: getattr(self, name) for name in names}


def concatenate(parts: Sequence[StarTable]) -> StarTable:
    """The stars of all parts, in order: of one system, with one kind of distances."""
    if not parts:
        raise ValueError("there are no tables to join: expected at least one")
    systems = {part.system.name for part in parts}
    if len(systems) > 1:
        raise ValueError(
            f"tables in {' and '.join(sorted(systems))} cannot be joined: convert them to one "
            "extinction system first"
        )
    if len(parts) == 1:
        return parts[0]
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("source_id", "l", "b", "extinction", "extinction_error")
    }
    distances = joined([part.distances for part in parts])
    return StarTable(distances=distances, system=parts[0].system, **columns)


def thinned(stars: StarTable, most: int) -> StarTable:
    """Every k-th star, at most `most` of them."""
    return stars[:: -(-len(stars) // most)]
