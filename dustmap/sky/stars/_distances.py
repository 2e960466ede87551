"""Distances of stars: exact, or a distribution for each star.

Distributions have a survival function sf(d) = P(distance > d) and quantiles. From a parallax
ϖ ± σ it is p(d | ϖ) ∝ prior(d) N(ϖ; 1/d, σ²), with a declared prior.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from dustmap.errors import UserError
from dustmap.sky.stars._priors import MAS_PC, AbstractDistancePrior, Array
from dustmap.tables import check_rows


def check_columns(columns: Mapping[str, NDArray[Any]]) -> None:
    """Refuse columns that are not finite vectors (N,) of one length N."""
    shapes = {name: values.shape for name, values in columns.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise UserError(f"every column of a catalog must have one length (N,), got {shapes}")
    for name, values in columns.items():
        check_rows(np.isfinite(values), name, "finite")


@dataclass(frozen=True, eq=False)
class AbstractDistances(ABC):
    """Independent distributions of N distances, in pc.

    kind: the name in files; exact: whether the distances are taken as known; fields: the columns
    (N,) in files, whose names end in their unit -> the fields that hold them.
    """

    kind: ClassVar[str]
    exact: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, str]]

    def columns(self) -> dict[str, Array]:
        """Return the numbers (N,) behind the distances, under their names in files."""
        return {name: getattr(self, field) for name, field in self.fields.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))

    def __getitem__(self, index: NDArray[Any] | slice) -> Self:
        """The distances at an index array, under a mask, or in a slice."""
        values = {field: getattr(self, field)[index] for field in self.fields.values()}
        return replace(self, **values)

    @property
    def units(self) -> dict[str, str]:
        """Unit of every column."""
        return {name: name.rsplit("_", 1)[1] for name in self.fields}

    @cached_property
    def median(self) -> Array:
        """Median distance (N,), computed once."""
        return self.quantile(np.array([0.5]))[:, 0]

    @abstractmethod
    def depths(self) -> tuple[Array, Array]:
        """Return depths (N,), numbers that grow with the measured distance, to sort by at no cost,
        and their standard deviations (N,)."""

    @property
    def rough(self) -> Array:
        """Distances (N,) in pc as they are measured, without a prior, at no cost."""
        return self.depths()[0]

    @property
    def depth_per_pc(self) -> Array:
        """By how much depths grow with distance (N,)."""
        return np.ones(len(self))

    @abstractmethod
    def survival(self, d: Array) -> Array:
        """Return P(distance > d) at d (N, K) or (1, K) in pc: (N, K)."""

    @abstractmethod
    def quantile(self, p: Array) -> Array:
        """Return the distances with P(distance ≤ d) = p at probabilities p (K,): (N, K)."""

    def __post_init__(self) -> None:
        """Check that columns have one length, and that all numbers but parallaxes are positive."""
        columns = self.columns()
        check_columns(columns)
        for name, values in columns.items():
            if name != "parallax_mas":
                check_rows(values > 0.0, name, "> 0")


@final
@dataclass(frozen=True, eq=False)
class ExactDistances(AbstractDistances):
    """Distances (N,) in pc, > 0, without errors."""

    kind = "exact"
    exact = True
    fields = MappingProxyType({"distance_pc": "distance"})
    distance: Array

    def survival(self, d: Array) -> Array:
        return (self.distance[:, None] > d).astype(np.float64)

    def quantile(self, p: Array) -> Array:
        return np.repeat(self.distance[:, None], len(p), axis=1)

    def depths(self) -> tuple[Array, Array]:
        return self.distance, np.zeros(len(self))


@final
@dataclass(frozen=True, eq=False)
class GaussianDistances(AbstractDistances):
    """Normal distributions of mean `distance` and deviation `error` (N,) in pc, cut at 0.

    P(D > d) = Φ((μ − d)/σ) / Φ(μ/σ) for d ≥ 0.

    Examples
    --------
    >>> stars = GaussianDistances(distance=np.array([100.0]), error=np.array([10.0]))
    >>> stars.quantile(np.array([0.16, 0.5])).round(1)
    array([[ 90.1, 100. ]])
    """

    kind = "gaussian"
    fields = MappingProxyType({"distance_pc": "distance", "distance_error_pc": "error"})
    distance: Array
    error: Array

    def survival(self, d: Array) -> Array:
        z = (self.distance[:, None] - np.maximum(d, 0.0)) / self.error[:, None]
        return np.asarray(ndtr(z) / self._kept(), np.float64)

    def quantile(self, p: Array) -> Array:
        kept, p = self._kept(), p[None, :]
        # Φ((d − μ)/σ) = Φ(−μ/σ) + p Φ(μ/σ): ndtri of whichever tail is the smaller.
        below, above = (1.0 - kept) + p * kept, (1.0 - p) * kept
        z = np.where(below < above, ndtri(below), -ndtri(above))
        d = self.distance[:, None] + self.error[:, None] * z
        return np.asarray(np.maximum(d, 0.0), np.float64)

    def depths(self) -> tuple[Array, Array]:
        return self.distance, self.error

    def _kept(self) -> Array:
        """Return Φ(μ/σ) (N, 1), what the cut at 0 leaves."""
        return np.asarray(ndtr(self.distance / self.error), np.float64)[:, None]


#: Normal scores of the 16th and 84th percentile are −_Z and +_Z.
_Z = float(ndtri(0.84))


@final
@dataclass(frozen=True, eq=False)
class PercentileDistances(AbstractDistances):
    """16th, 50th and 84th percentile (N,) in pc, 0 < p16 < p50 < p84.

    z(ln d) is linear from the 16th to the 50th and from the 50th to the 84th percentile, and goes
    on with the same slope beyond: P(D > d) = Φ(−z(ln d)).

    >>> star = PercentileDistances(*np.array([[90.0], [100.0], [120.0]]))
    >>> star.survival(np.array([[90.0, 100.0]])).round(2)
    array([[0.84, 0.5 ]])
    """

    kind = "percentile"
    fields = MappingProxyType(
        {"distance_p16_pc": "p16", "distance_p50_pc": "p50", "distance_p84_pc": "p84"}
    )
    p16: Array
    p50: Array
    p84: Array

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows(self.p16 < self.p50, "distance_p16_pc", "below distance_p50_pc")
        check_rows(self.p50 < self.p84, "distance_p84_pc", "above distance_p50_pc")

    def survival(self, d: Array) -> Array:
        positive = d > 0.0
        y = np.log(np.where(positive, d, 1.0)) - np.log(self.p50)[:, None]
        below, above = self._widths()
        z = y / np.where(y < 0.0, below, above)
        return np.asarray(np.where(positive, ndtr(-z), 1.0), np.float64)

    def quantile(self, p: Array) -> Array:
        z = ndtri(p)[None, :]
        below, above = self._widths()
        with np.errstate(over="ignore"):
            return np.asarray(self.p50[:, None] * np.exp(z * np.where(z < 0.0, below, above)))

    def depths(self) -> tuple[Array, Array]:
        return self.p50, 0.5 * (self.p84 - self.p16)

    def _widths(self) -> tuple[Array, Array]:
        """Return d ln d / dz below and above the median, (N, 1) each."""
        middle = np.log(self.p50)
        below, above = middle - np.log(self.p16), np.log(self.p84) - middle
        return below[:, None] / _Z, above[:, None] / _Z


@final
@dataclass(frozen=True, eq=False)
class ParallaxDistances(AbstractDistances):
    """Distances by parallax ± error (N,) in mas and a prior. A parallax is never inverted.

    p(d | ϖ) ∝ prior(d) exp(−(ϖ − 1/d)² / 2σ²): parallaxes of zero and below are data as any other.

    Examples
    --------
    >>> from dustmap.sky.stars import prior_named
    >>> prior = prior_named("exponential-density", scale=1350.0, distance_max=10_000.0)
    >>> stars = ParallaxDistances(np.array([10.0, -0.1]), np.array([0.1, 0.1]), prior)
    >>> stars.median.round(-1)  # 10 mas is 100 pc; a parallax below zero says "far away"
    array([ 100., 7290.])
    """

    kind = "parallax"
    fields = MappingProxyType({"parallax_mas": "parallax", "parallax_error_mas": "error"})
    parallax: Array
    error: Array
    prior: AbstractDistancePrior

    def survival(self, d: Array) -> Array:
        return self.prior.survival(self.parallax[:, None], self.error[:, None], np.maximum(d, 0.0))

    def quantile(self, p: Array) -> Array:
        return self.prior.quantile(self.parallax[:, None], self.error[:, None], p)

    def depths(self) -> tuple[Array, Array]:
        return -self.parallax, self.error

    @property
    def rough(self) -> Array:
        """1/ϖ, or 1/σ where the parallax is below its error σ."""
        return MAS_PC / np.maximum(self.parallax, self.error)

    @property
    def depth_per_pc(self) -> Array:
        return MAS_PC / self.rough**2


#: The kinds of distances by their names in files.
KINDS: Mapping[str, type[AbstractDistances]] = MappingProxyType(
    {
        each.kind: each
        for each in (ExactDistances, GaussianDistances, PercentileDistances, ParallaxDistances)
    }
)


def kind_named(name: object) -> type[AbstractDistances]:
    """Return the class of a kind of distances."""
    if str(name) not in KINDS:
        raise UserError(f"distances must be one of {', '.join(KINDS)}, got {name!r}")
    return KINDS[str(name)]
