"""Distances as named columns and attributes, and back: how files hold them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dustmap.sky.stars._density_prior import ExponentialDensity
from dustmap.sky.stars._distances import (
    AbstractDistances,
    Array,
    ExactDistances,
    GaussianDistances,
    PercentileDistances,
)
from dustmap.sky.stars._flat_prior import FlatParallax
from dustmap.sky.stars._learned_prior import ToLearn
from dustmap.sky.stars._parallax import AbstractDistancePrior, ParallaxDistances
from dustmap.sky.stars._survey_ratio import SurveyRatio

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
