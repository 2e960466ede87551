"""Quantities of a density: their names, requests and queries for them, and their statistics.

Columns of answers have the name of their quantity, and its unit (`add_answers`).

From samples to mean, standard deviation and percentiles, the same way everywhere:

    m = Σ_s f_s / S,   μ = Σ_s ln f_s / S,   τ² = Σ_s (ln f_s − μ)² / S

            f > 0                       f of any sign
    mean    m                           m
    std     m √(exp(τ²) − 1)            √(Σ_s (f_s − m)² / (S − 1))
    p(q)    exp(μ + Φ⁻¹(q) τ)           m + Φ⁻¹(q) std

Integrals of a positive density, which are not log-normal, have the std on the right. Percentiles
are smoother than the order statistics of S samples; those of a positive density are positive and
ascend with q. Samples of a log-normal density miss most of its tail: with τ = 2.2 their own
deviation has a median of 0.14 of the true one, m √(exp(τ²) − 1) of 0.6. Where the variance of ln f
is known better than from the samples, it takes the place of τ².

Samples of a positive density are pairs about a known centre, the two of a pair one after the other,
so τ² is divided by S: their mean is that centre, which costs no degree of freedom. An odd S ends
with half a pair x, whose mean is x/S off: τ² is divided by S − 1/S. Samples that are no pairs, as
other programs draw them, would need S − 1: of them τ is too small by √(1 − 1/S). Where a sample is
0 (a ray without length) so are all its percentiles.
"""

import enum
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

from dustmap.errors import UserError
from dustmap.gp._pairs import variance_of_pairs
from dustmap.sky.systems import ANSWERED

if TYPE_CHECKING:
    import numpy as np
    from astropy.table import Table
    from numpy.typing import NDArray
    from torch import Tensor

    from dustmap.sky.systems import ExtinctionSystem

#: Draws of which coverage takes half the odds.
_DOUBTFUL = 8
#: A field has tensors, a file of a map arrays, which are read without torch.
Draws = TypeVar("Draws", "Tensor", "NDArray[np.float64]")


@final
class Quantity(enum.Enum):
    """A quantity of maps; the value is its name in configurations, files and results.

    Densities in mag/pc, coverage without unit. The median and the 16th and 84th percentiles are
    those of `percentiles`: ordered, and positive where the density is.
    """

    MEAN = "mean"
    STD = "std"
    MEDIAN = "median"
    P16 = "p16"
    P84 = "p84"
    COVERAGE = "coverage"
    SAMPLES = "samples"


#: Coverage above which the data, and not the prior, say what the density is.
DATA_DOMINATED = 0.5


#: Probabilities of the percentiles.
PERCENTILES = {Quantity.P16: 0.16, Quantity.MEDIAN: 0.5, Quantity.P84: 0.84}


@final
@dataclass(frozen=True)
class MapRequest:
    """Quantities, each once, and the number of samples, > 0 exactly if SAMPLES is among them.

    Examples
    --------
    >>> MapRequest.named(("mean", "std", "samples"), samples=4).values_per_place
    6
    """

    quantities: tuple[Quantity, ...]
    samples: int = 0

    def __post_init__(self) -> None:
        if not self.quantities or len(set(self.quantities)) < len(self.quantities):
            names = [quantity.value for quantity in self.quantities]
            raise UserError(f"quantities: expected one or more, each once, got {names}")
        if (Quantity.SAMPLES in self.quantities) != (self.samples > 0):
            raise UserError(
                f"samples: expected more than 0 if the quantities have samples, else 0, got "
                f"{self.samples} with {[quantity.value for quantity in self.quantities]}"
            )

    @classmethod
    def named(cls, names: Sequence[str], samples: int = 0) -> Self:
        """Build from the names of a configuration or a command line.

        `samples` counts only where the names have "samples".
        """
        known = {quantity.value: quantity for quantity in Quantity}
        for name in names:
            if name not in known:
                raise UserError(f"quantity {name!r}: expected one of {', '.join(known)}")
        return cls(tuple(known[name] for name in names), samples if "samples" in names else 0)

    def __contains__(self, quantity: Quantity) -> bool:
        return quantity in self.quantities

    def any_of(self, quantities: Iterable[Quantity]) -> bool:
        """Return whether one of them is asked for."""
        return any(quantity in self.quantities for quantity in quantities)

    def without(self, names: Container[str]) -> "MapRequest | None":
        """Drop the quantities of these names; None if nothing is left."""
        left = tuple(q for q in self.quantities if q.value not in names)
        return MapRequest(left, self.samples if Quantity.SAMPLES in left else 0) if left else None

    def leading(self, quantity: Quantity) -> tuple[int, ...]:
        """Shape of the axes of a quantity's numbers that stand before those of places."""
        return (self.samples,) if quantity is Quantity.SAMPLES else ()

    @property
    def cubes(self) -> tuple[Quantity, ...]:
        """All but the samples."""
        return tuple(q for q in self.quantities if q is not Quantity.SAMPLES)

    @property
    def values_per_place(self) -> int:
        """Numbers at every voxel."""
        return len(self.cubes) + self.samples


class _Named(enum.Enum):
    """Choices that users give by name."""

    @classmethod
    def named(cls, name: str) -> Self:
        known = [choice.value for choice in cls]
        if name not in known:
            kind = cls.__name__.lower()
            raise UserError(f"{kind}: expected one of {', '.join(known)}, got {name!r}")
        return cls(name)


@final
class Mode(_Named):
    """A statistic of the density or of its integral."""

    MEAN = "mean"
    STD = "std"
    MEDIAN = "median"
    PERCENTILE = "percentile"
    SAMPLES = "samples"
    RANDOM_SAMPLE = "random_sample"


@final
class Outside(_Named):
    """The policy for places beyond the outermost voxel centres, and rays that go there.

    NAN: unknown. ERROR: refused. TRUNCATE: nothing is there; densities are 0 and rays count as far
    as they run inside.
    """

    NAN = "nan"
    ERROR = "error"
    TRUNCATE = "truncate"


def normal_quantile(q: float) -> float:
    """Return Φ⁻¹(q)."""
    return NormalDist().inv_cdf(q)


def statistics(
    draws: "Tensor",
    request: MapRequest,
    relative: "Tensor | float" = 0.0,
    ratio: "Tensor | float" = 1.0,
) -> "dict[str, Tensor]":
    """Compute all but coverage of draws (S, ...) > 0 at places, each (...); samples are not copied.

    relative (...): variance over E f² that samples have not; ratio (...): variance of ln f over
    that of the samples.
    """
    results: dict[str, Tensor] = {}
    if request.any_of((Quantity.MEAN, Quantity.STD)):
        results["mean"] = draws.mean(0)
    asked = [quantity for quantity in PERCENTILES if quantity in request]
    if asked or Quantity.STD in request:
        centre, width = log_moments(draws)
        if not isinstance(ratio, float):
            width = width * ratio.sqrt()
        if not isinstance(relative, float):
            width = (width.square() + relative.log1p()).sqrt()
        if Quantity.STD in request:
            results["std"] = _relative_std(width).mul_(results["mean"])
        for quantity in asked:
            results[quantity.value] = _log_quantile(centre, width, PERCENTILES[quantity])
    if request.samples:
        results["samples"] = draws[: request.samples]
    return {q.value: results[q.value] for q in request.quantities if q.value in results}


def statistics_of_integrals(draws: "Tensor", request: MapRequest) -> "dict[str, Tensor]":
    """Compute the same of integrals of a positive density."""
    results = statistics(draws, request)
    if Quantity.STD in request:
        results["std"] = integrals_std(draws, positive=True)
    return results


def integrals_std(draws: Draws, positive: bool) -> Draws:
    """Return the std (...) of draws (S, ...) of integrals, which come in pairs where the density is
    positive."""
    if positive:
        paired: Draws = variance_of_pairs(draws) ** 0.5
        return paired
    return deviation(draws, draws.mean(0), len(draws) - 1)


def percentiles(draws: Draws, levels: Sequence[float], positive: bool) -> Draws:
    """Return p(q) of draws (S, ...) at the probabilities `levels` (Q,): (Q, ...)."""
    if positive:
        centre, width = log_moments(draws)
        values = [_log_quantile(centre, width, q) for q in levels]
    else:
        centre = draws.mean(0)
        width = deviation(draws, centre, len(draws) - 1)
        values = [centre + normal_quantile(q) * width for q in levels]
    stacked: Draws = _namespace(draws).stack(values)
    return stacked


def standard_deviation(draws: Draws, positive: bool) -> Draws:
    """Return the std (...) of draws (S, ...)."""
    mean = draws.mean(0)
    if not positive:
        return deviation(draws, mean, len(draws) - 1)
    std: Draws = mean * _relative_std(log_moments(draws)[1])
    return std


def _log_quantile(centre: Draws, width: Draws, q: float) -> Draws:
    value: Draws = _namespace(centre).exp(centre + normal_quantile(q) * width)
    return value


def _relative_std(width: Draws) -> Draws:
    """Return √(exp(τ²) − 1)."""
    relative: Draws = _namespace(width).expm1(width**2) ** 0.5
    return relative


def deviation(draws: Draws, mean: Draws, divisor: float) -> Draws:
    """Return √(Σ_s (f_s − m)² / divisor)."""
    total: Draws = _namespace(draws).zeros_like(mean)
    for draw in draws:
        difference = draw - mean
        difference *= difference
        total += difference
    total /= divisor
    total **= 0.5
    return total


def log_moments(draws: Draws) -> tuple[Draws, Draws]:
    """Return μ and τ of ln f; −∞ and 0 where a sample is not positive, NaN where one is unknown."""
    of = _namespace(draws)
    positive = (draws > 0).all(0)
    logs = of.log(draws if bool(positive.all()) else of.where(positive, draws, 1.0))
    mean = logs.mean(0)
    count = len(draws)
    # E Σ_s (x_s − m)² / σ² of samples ±δ, ±δ', ..., the last of an odd number alone.
    spread = deviation(logs, mean, count - 1.0 / count if count % 2 and count > 1 else count)
    if bool(positive.all()):
        return mean, spread
    unknown = of.isnan(draws).any(0)
    none = of.where(unknown, of.nan, -of.inf), of.where(unknown, of.nan, 0.0)
    return of.where(positive, mean, none[0]), of.where(positive, spread, none[1])


def log_variance(mean: Draws, std: Draws) -> Draws:
    """Return ln(1 + σ²/μ²), the variance of ln f of a log-normal f; 0 where μ is not positive."""
    of, positive = _namespace(mean), mean > 0
    relative = of.where(positive, std / of.where(positive, mean, 1.0), 0.0)
    variance: Draws = of.log1p(relative**2)
    return variance


def _namespace(draws: "Tensor | NDArray[np.float64]") -> Any:
    """Return torch or numpy, which name alike what is taken of them here."""
    return sys.modules[type(draws).__module__]


def sure_coverage(explained: "Tensor", draws: int) -> "Tensor":
    """Return c (...) of the share e (...) of the prior's variance that S draws find explained:

        c / (1 − c) = e / (1 − e) / (1 + (8/S)²)

    e has an error of e (1 − e) √(4/S): few draws see data where there are none. The odds are those
    of a bound that holds 93 % of the times with 4 draws, 83 % with 8, 67 % with 16, where what is
    wrong is near what is right.

    Examples
    --------
    >>> import torch
    >>> sure_coverage(torch.tensor([0.0, 0.5, 1.0]), draws=8)
    tensor([0.0000, 0.3333, 1.0000])
    """
    return explained / (explained + (1.0 + (_DOUBTFUL / draws) ** 2) * (1.0 - explained))


def coverage(std: "Tensor", prior_std: float) -> "Tensor":
    """Return 1 − (posterior variance / prior variance), within [0, 1]."""
    return (1.0 - (std / prior_std).square()).clamp_(0.0, 1.0)


#: What the names of columns start with -> their unit.
_UNITS = MappingProxyType({"extinction": "mag", "density": "mag / pc"})
#: The column of the coverage at places.
COVERAGE = Quantity.COVERAGE.value
_OTHER_UNITS = MappingProxyType({COVERAGE: "", "distance": "pc"})


def labels(system: "ExtinctionSystem") -> dict[str, str]:
    """Return units and extinction system, by the names of their columns."""
    units = {f"{quantity}_unit": unit for quantity, unit in _UNITS.items()}
    return {**units, "extinction_system": system.name}


def unit_of(name: str) -> str:
    """Return the unit of a column such as density_std; measurement_mean has that of extinctions."""
    quantity = name.partition("_")[0]
    if quantity in _OTHER_UNITS:
        return _OTHER_UNITS[quantity]
    return _UNITS["extinction" if quantity == "measurement" else quantity]


def add_answers(
    table: "Table",
    columns: "Mapping[str, NDArray[np.float64]]",
    system: "ExtinctionSystem",
    labelled: bool,
) -> None:
    """Add columns (N,) named extinction_..., density_..., measurement_..., distance_... or coverage
    to a table, in place, and the system to its header.

    Parameters
    ----------
    labelled
        Adds units and system in columns of their own, for files that keep nothing else.

    Examples
    --------
    >>> import numpy as np
    >>> from astropy.table import Table
    >>> from dustmap.sky.systems import system_named
    >>> table = Table({"id": [1, 2]})
    >>> add_answers(table, {"density_mean": np.array([0.001, 0.002])}, system_named("A_V"), False)
    >>> table.colnames, table["density_mean"].unit == unit_of("density_mean")
    (['id', 'density_mean'], True)
    """
    from astropy.table import Column

    table.meta[ANSWERED] = system.name
    for name, values in columns.items():
        quantity, _, what = name.partition("_")
        meaning = "share of the prior's variance that the data took away"
        if what:
            given = "given the extinction" if quantity == "distance" else f"in {system}"
            meaning = f"{what} of the {quantity} {given}"
        table[name] = Column(values, unit=unit_of(name), description=meaning)
    if labelled:
        for label, value in labels(system).items():
            table[label] = value


def variable_of(quantity: Quantity) -> str:
    """Name a quantity's array in zarr and xarray: density_mean, coverage."""
    return "coverage" if quantity is Quantity.COVERAGE else f"density_{quantity.value}"


def dimensions_of(quantity: Quantity) -> tuple[str, ...]:
    """Name the axes of that array."""
    return (*(("sample",) if quantity is Quantity.SAMPLES else ()), "z", "y", "x")


def refuse_other_axes(
    path: Path, name: str, given: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """Refuse names of axes, where they are given, in another order than those of maps."""
    if given and given != expected:
        raise UserError(
            f"{path}: expected the axes {', '.join(expected)} of {name}, got {', '.join(given)}; "
            "transpose it"
        )
