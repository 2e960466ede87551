"""Priors of the distances behind parallaxes: flat in 1/d, or an exponential density of stars.

A `SurveyRatio` is what the selection of a survey makes of the density of its distances.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.special import erfcx, log_ndtr, ndtri_exp

from dustmap.errors import UserError

Array = NDArray[np.float64]
#: Parallax in mas times distance in pc.
MAS_PC = 1000.0
#: Nodes of a star's table, and stars whose tables are in memory at once.
NODES = 256
STARS_AT_ONCE = 2048
#: Depth below the mode, in nats, at which the table ends.
DEPTH = 30.0
#: Errors from the measured parallax at which the posterior is far below its table's depth, and
#: bisections from there that find where the table ends: it may be longer by 2⁻¹⁰ of the way.
_FAR_OUT, _BISECTIONS = 20.0, 10
#: Step of Newton's method in a cell, of its width, after which there is no need of another.
_AT_REST = 1e-7


class AbstractDistancePrior(ABC):
    """A prior density of the distance d on (0, distance_max], in pc.

    Parallaxes ϖ and errors σ (n, 1) in mas; they may be zero or negative.
    """

    distance_max: float

    @abstractmethod
    def survival(self, parallax: Array, error: Array, d: Array) -> Array:
        """Return P(distance > d | ϖ, σ) at d (n, K) or (1, K), 0 ≤ d: (n, K)."""

    @abstractmethod
    def quantile(self, parallax: Array, error: Array, p: Array) -> Array:
        """Return the distances with P(distance ≤ d | ϖ, σ) = p at p (K,): (n, K)."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """Return name and numbers, as a star store has them."""


def check_scale(name: str, value: float) -> None:
    if not 0.0 < value < np.inf:
        raise UserError(f"{name} must be positive and finite, in pc, got {value}")


@final
@dataclass(frozen=True)
class SurveyRatio:
    """ln r(t) of C classes of stars, t = ln d: cubic splines through `values` (C, K) at first,
    first + step, ..; constant, with slope 0, beyond their ends.

    bounds (C − 1): errors of the parallax in mas between the classes. Stars with large errors are
    faint, and so farther than others, or nearer.
    """

    first: float
    step: float
    values: tuple[tuple[float, ...], ...]
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.values}
        if len(self.values) != len(self.bounds) + 1 or len(lengths) != 1 or min(lengths) < 2:
            raise UserError("the table of a distance prior must have a row for every class")
        if not self.step > 0.0 or not all(np.isfinite(row).all() for row in self.values):
            raise UserError("the table of a distance prior must be of finite numbers")

    def at(self, t: Array, error: Array) -> tuple[Array, Array]:
        """Return ln r and its slope at t (n, P) or (P,) of stars with errors (n, 1)."""
        splines = CubicSpline(np.arange(len(self.values[0])), np.transpose(self.values), axis=0)
        place = np.clip((t - self.first) / self.step, 0.0, len(self.values[0]) - 1.0)
        rows = np.searchsorted(self.bounds, error)
        cell = np.minimum(place.astype(np.int64), len(self.values[0]) - 2)
        u = place - cell
        each = cell * len(self.values) + rows
        value, slope = cubic([part.ravel().take(each) for part in splines.c[::-1]], u)
        inside = (place > 0.0) & (place < len(self.values[0]) - 1.0)
        return value, np.where(inside, slope / self.step, 0.0)

    def attributes(self) -> dict[str, Any]:
        return {
            "first_ln_pc": self.first,
            "step": self.step,
            "ln_ratio": [list(row) for row in self.values],
            "error_bounds_mas": list(self.bounds),
        }

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "SurveyRatio":
        """Rebuild from `attributes`."""
        first, step = (float(attributes[name]) for name in ("first_ln_pc", "step"))
        values = tuple(tuple(map(float, row)) for row in attributes["ln_ratio"])
        return cls(first, step, values, tuple(map(float, attributes["error_bounds_mas"])))


@final
@dataclass(frozen=True)
class FlatParallax(AbstractDistancePrior):
    """Flat in 1/d for d ≤ distance_max: the true parallax is N(ϖ, σ²) above a = 1/distance_max.

        P(D > d) = P(a < ϖ' < 1/d) / P(ϖ' > a) = 1 − Q((1/d − ϖ)/σ) / Q((a − ϖ)/σ)

    with Q = 1 − Φ, from logarithms of Q and their differences: no tail loses its digits.

    Examples
    --------
    >>> near = FlatParallax(distance_max=10_000.0)
    >>> near.quantile(np.array([[10.0]]), np.array([[1.0]]), np.array([0.5])).round(1)
    array([[100.]])
    """

    distance_max: float

    def __post_init__(self) -> None:
        check_scale("distance_max", self.distance_max)

    def survival(self, parallax: Array, error: Array, d: Array) -> Array:
        least = MAS_PC / self.distance_max
        start = (least - parallax) / error
        with np.errstate(divide="ignore"):
            step = np.maximum(MAS_PC / d - least, 0.0) / error
        return np.asarray(-np.expm1(_log_tail_ratio(start, step)), np.float64)

    def quantile(self, parallax: Array, error: Array, p: Array) -> Array:
        least = MAS_PC / self.distance_max
        start = (least - parallax) / error
        # Q(x) = p Q(start); from the nearer of the two ends, ϖ and a.
        with np.errstate(divide="ignore"):
            log_p = np.log(p)[None, :]
            x = -ndtri_exp(log_p + log_ndtr(-start))
        step = _polished(start, np.maximum(x - start, 0.0), log_p)
        true = np.where(start > 0.0, least + error * step, parallax + error * x)
        d = MAS_PC / np.maximum(true, least)
        return np.asarray(np.minimum(d, self.distance_max), np.float64)

    def attributes(self) -> dict[str, Any]:
        return {"distance_prior": "flat-parallax", "distance_max_pc": self.distance_max}


def _polished(start: Array, step: Array, log_p: Array) -> Array:
    """Take Newton's steps to ln Q(start + step) − ln Q(start) = ln p where start > 0.

    Far out in the tail x − start has lost its digits: x is large and step is −ln p / x.
    """
    far = np.maximum(start, 0.0)
    for _ in range(3):
        hazard = np.sqrt(2.0 / np.pi) / erfcx((far + step) / np.sqrt(2.0))
        with np.errstate(invalid="ignore"):
            change = (_log_tail_ratio(far, step) - log_p) / hazard
        step = np.where(np.isfinite(change), np.maximum(step + change, 0.0), step)
    return step


def _log_tail_ratio(start: Array, step: Array) -> Array:
    """Return ln Q(start + step) − ln Q(start), step ≥ 0."""
    far = np.maximum(start, 0.0)
    # Q(x) = exp(−x²/2) erfcx(x/√2) / 2, whose large exponents cancel by hand.
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.log(erfcx((far + step) / np.sqrt(2.0)) / erfcx(far / np.sqrt(2.0)))
        beyond = np.where(np.isinf(step), -np.inf, scaled - 0.5 * step * (2.0 * far + step))
    near = log_ndtr(-start - step) - log_ndtr(-start)
    return np.asarray(np.where(start >= 0.0, beyond, near), np.float64)


@final
@dataclass(frozen=True)
class ExponentialDensity(AbstractDistancePrior):
    """p(d) ∝ d² exp(−d/scale) r(d) for d ≤ distance_max (Bailer-Jones 2015), lengths in pc.

    ratio: ln r, as `ParallaxSample` has it of a survey; None for r = 1.

    The posterior of t = ln d has the logarithm g(t) = 3t − d/L + ln r − (ϖ − 1/d)²/2σ². It is
    tabulated where, but for r, it is within 30 nats of its mode, integrated with its exact slope
    (error h⁴), and its integral interpolated by cubics: quantiles and probabilities are good to
    1e-6, and to 3e-4 where there is a ratio.
    """

    scale: float
    distance_max: float
    ratio: SurveyRatio | None = None

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)
        check_scale("distance_max", self.distance_max)

    def survival(self, parallax: Array, error: Array, d: Array) -> Array:
        with np.errstate(divide="ignore"):
            log_d = np.broadcast_to(np.log(d), (len(parallax), d.shape[1]))
        parts = [table.survival(log_d[rows]) for rows, table in self._tables(parallax, error)]
        return np.concatenate(parts)

    def quantile(self, parallax: Array, error: Array, p: Array) -> Array:
        parts = [table.quantile(p) for _, table in self._tables(parallax, error)]
        return np.minimum(np.exp(np.concatenate(parts)), self.distance_max)

    def attributes(self) -> dict[str, Any]:
        attributes = {
            "distance_prior": "exponential-density",
            "distance_scale_pc": self.scale,
            "distance_max_pc": self.distance_max,
        }
        if self.ratio is None:
            return attributes
        return attributes | {"distance_ratio": self.ratio.attributes()}

    def log_density(self, parallax: Array, error: Array, t: Array) -> tuple[Array, Array]:
        """Return g(t) without its constant, and g'(t)."""
        value, slope = self._volume(parallax, error, t)
        if self.ratio is None:
            return value, slope
        more, steeper = self.ratio.at(t, error)
        return value + more, slope + steeper

    def _volume(self, parallax: Array, error: Array, t: Array) -> tuple[Array, Array]:
        """Return `log_density` for r = 1."""
        d, true = np.exp(t), MAS_PC * np.exp(-t)
        misfit = (parallax - true) / error
        return 3 * t - d / self.scale - 0.5 * misfit**2, 3 - d / self.scale - misfit * true / error

    def _tables(self, parallax: Array, error: Array) -> Iterator[tuple[slice, "_Table"]]:
        for start in range(0, len(parallax), STARS_AT_ONCE):
            rows = slice(start, start + STARS_AT_ONCE)
            yield rows, self._table(parallax[rows], error[rows])

    def _table(self, parallax: Array, error: Array) -> "_Table":
        left, right = self._range(parallax, error)
        t = left + (right - left) * np.linspace(0.0, 1.0, NODES)
        value, slope = self.log_density(parallax, error, t)
        highest = value.max(axis=1, keepdims=True)
        step = (right - left) / (NODES - 1)
        density = np.exp(value - highest) * step
        bend = density * slope * step
        cells = 0.5 * (density[:, 1:] + density[:, :-1]) - np.diff(bend, axis=1) / 12.0
        below = np.concatenate([np.zeros_like(left), np.cumsum(cells, axis=1)], axis=1)
        total = below[:, -1:]
        return _Table(left, step, below / total, density / total)

    def _range(self, parallax: Array, error: Array) -> tuple[Array, Array]:
        """Find both ends of t (n, 1) where g for r = 1 is DEPTH below its mode, more for r."""
        span = 0.0 if self.ratio is None else float(np.ptp(self.ratio.values, axis=1).max())
        depth = DEPTH + span
        last = np.log(self.distance_max)
        modes = np.minimum(self._stationary(parallax, error), last)
        heights = self._volume(parallax, error, modes)[0]
        highest = heights.max(axis=1, keepdims=True)
        high = heights > highest - depth

        def excess(t: Array) -> Array:
            return np.asarray(self._volume(parallax, error, t)[0] - (highest - depth))

        least = MAS_PC / self.distance_max
        first = np.log(MAS_PC / (np.maximum(parallax, least) + _FAR_OUT * error))
        farthest = np.log(MAS_PC / np.maximum(parallax - _FAR_OUT * error, least))
        inner = np.where(high, modes, np.inf).min(axis=1, keepdims=True)
        outer = np.where(high, modes, -np.inf).max(axis=1, keepdims=True)
        left = _crossing(excess, np.minimum(first, inner), inner)
        right = _crossing(excess, np.maximum(farthest, outer), outer)
        return left, right

    def _stationary(self, parallax: Array, error: Array) -> Array:
        """Return ln d (n, 3) of the modes and the valley: g' = 0 is a cubic in the true parallax x,

            x³ − ϖ x² + 3σ² x − σ²/L = 0,

        with one or three positive roots. The real part of a complex pair does no harm.
        """
        companion = np.zeros((len(parallax), 3, 3))
        companion[:, 1, 0] = companion[:, 2, 1] = 1.0
        companion[:, 0, 2] = (error**2 * MAS_PC / self.scale)[:, 0]
        companion[:, 1, 2] = -3.0 * error[:, 0] ** 2
        companion[:, 2, 2] = parallax[:, 0]
        roots = np.linalg.eigvals(companion).real
        # One root is real and positive; a pair with a negative real part repeats it.
        positive = np.where(roots > 0.0, roots, roots.max(axis=1, keepdims=True))
        return np.log(MAS_PC / positive)


def _crossing(excess: Callable[[Array], Array], outside: Array, inside: Array) -> Array:
    """Bisect the excess, ≥ 0 inside, to just outside its zero; return the place outside where ≥ 0,
    too."""
    beyond = excess(outside) >= 0.0
    low, high = outside.copy(), inside.copy()
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        positive = excess(middle) >= 0.0
        high, low = np.where(positive, middle, high), np.where(positive, low, middle)
    return np.where(beyond, outside, low)


@final
@dataclass(frozen=True, eq=False)
class _Table:
    """P(ln D ≤ t) of n stars at nodes left + k·step: below (n, K), with slopes dP/dk (n, K)."""

    left: Array
    step: Array
    below: Array
    slope: Array

    def survival(self, t: Array) -> Array:
        """Return P(ln D > t) at t (n, P)."""
        place = np.clip((t - self.left) / self.step, 0.0, NODES - 1)
        cell = np.minimum(place.astype(np.int64), NODES - 2)
        value, _ = cubic(self._cubics(cell), place - cell)
        return np.clip(1.0 - value, 0.0, 1.0)

    def quantile(self, p: Array) -> Array:
        """Return t (n, P) with P(ln D ≤ t) = p (P,)."""
        cell = np.clip(last_below(self.below, p), 0, NODES - 2)
        cubics = self._cubics(cell)
        first = cubics[0]
        within = np.take_along_axis(self.below, cell + 1, 1) - first
        low, high = np.zeros_like(first), np.ones_like(first)
        u = _inverse(p - first, within, cubics)
        for _ in range(12):  # Newton's steps, and halving where they leave the bracket
            value, slope = cubic(cubics, u)
            low, high = np.where(value <= p, u, low), np.where(value > p, u, high)
            newton = u - (value - p) / np.where(slope > 0.0, slope, 1.0)
            before, u = u, np.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
            if np.abs(u - before).max(initial=0.0) < _AT_REST:
                break  # the next step would be the square of it
        return self.left + self.step * (cell + u)

    def _cubics(self, cell: NDArray[np.int64]) -> tuple[Array, Array, Array, Array]:
        """Return coefficients (n, P) of the cells (n, P), from values and slopes at their ends."""
        place = cell + NODES * np.arange(len(cell))[:, None]
        values, slopes = self.below.ravel(), self.slope.ravel()
        p0, p1, m0, m1 = (end.take(place + k) for end in (values, slopes) for k in (0, 1))
        rise = p1 - p0
        return p0, m0, 3.0 * rise - 2.0 * m0 - m1, m0 + m1 - 2.0 * rise


def _inverse(rise: Array, within: Array, cubics: tuple[Array, ...]) -> Array:
    """Return the place u in [0, 1] of a rise, by the cubic whose ends and slopes are those of the
    inverse: an error of the fourth order in the width of a cell, from which Newton's steps start.
    """
    _, m0, bend, twist = cubics
    m1 = m0 + 2.0 * bend + 3.0 * twist
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        v = rise / within
        w = 1.0 - v
        u = v * (v * (3.0 - 2.0 * v) + within * w * (w / m0 - v / m1))
    return np.clip(np.where(np.isfinite(u), u, 0.5), 0.0, 1.0)


def cubic(coefficients: Sequence[Array], u: Array) -> tuple[Array, Array]:
    """Return values and slopes at u of cubics with these coefficients of 1, u, u² and u³."""
    c0, c1, c2, c3 = coefficients
    return c0 + u * (c1 + u * (c2 + u * c3)), c1 + u * (2.0 * c2 + u * 3.0 * c3)


def last_below(tables: Array, p: Array) -> NDArray[np.int64]:
    """Return the last entries (n, P) of ascending rows (n, K) in [0, 1] that are at most p (P,), −1
    for none: one search in all rows, set apart by 2 each."""
    n, count = tables.shape
    row = np.arange(n)[:, None]
    place = np.searchsorted((tables + 2.0 * row).ravel(), (p + 2.0 * row).ravel(), side="right")
    return np.asarray(place.reshape(n, len(p)) - count * row - 1, np.int64)


@final
@dataclass(frozen=True)
class ToLearn:
    """A prior that is to be learned from the parallaxes. scale: what is expected of that of their
    density, in pc; distance_max: the end of the prior."""

    scale: float = 1350.0
    distance_max: float = 10_000.0

    @property
    def stated(self) -> ExponentialDensity:
        """The prior of stars of which nothing is learned."""
        return ExponentialDensity(self.scale, self.distance_max)


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
    if name not in ("flat-parallax", "exponential-density"):
        raise UserError(
            f"distance_prior must be flat-parallax or exponential-density, got {name!r}"
        )
    try:
        furthest = float(attributes["distance_max_pc"])
        if name == "flat-parallax":
            return FlatParallax(furthest)
        ratio = attributes.get("distance_ratio")
        table = None if ratio is None else SurveyRatio.of(ratio)
        return ExponentialDensity(float(attributes["distance_scale_pc"]), furthest, table)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"the numbers of distance_prior {name} are damaged: {error!r}") from None
