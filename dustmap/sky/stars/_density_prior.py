"""A prior of exponentially decreasing density of stars: a table of the posterior per star."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.stars._distances import Array
from dustmap.sky.stars._parallax import MAS_PC, AbstractDistancePrior, check_scale
from dustmap.sky.stars._survey_ratio import SurveyRatio

#: Nodes of a star's table, and stars whose tables are in memory at once.
NODES = 256
STARS_AT_ONCE = 2048
#: Depth below the mode, in nats, at which the table ends.
DEPTH = 30.0


@final
@dataclass(frozen=True)
class ExponentialDensity(AbstractDistancePrior):
    """p(d) ∝ d² exp(−d/scale) r(d) for d ≤ distance_max (Bailer-Jones 2015), lengths in pc.

    ratio: ln r, as `learn_prior` has it of a survey; None for r = 1.

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
        found = {
            "distance_prior": "exponential-density",
            "distance_scale_pc": self.scale,
            "distance_max_pc": self.distance_max,
        }
        if self.ratio is None:
            return found
        return found | {"distance_ratio": self.ratio.attributes()}

    def log_density(self, parallax: Array, error: Array, t: Array) -> tuple[Array, Array]:
        """g(t) without its constant, and g'(t)."""
        value, slope = self._volume(parallax, error, t)
        if self.ratio is None:
            return value, slope
        more, steeper = self.ratio.at(t, error)
        return value + more, slope + steeper

    def _volume(self, parallax: Array, error: Array, t: Array) -> tuple[Array, Array]:
        """The same for r = 1."""
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
        """Where g for r = 1 is within DEPTH, and what r may add, of its highest value: both ends
        of t (n, 1)."""
        depth = DEPTH if self.ratio is None else DEPTH + self.ratio.span
        last = np.log(self.distance_max)
        modes = np.minimum(self._stationary(parallax, error), last)
        heights = self._volume(parallax, error, modes)[0]
        highest = heights.max(axis=1, keepdims=True)
        high = heights > highest - depth

        def excess(t: Array) -> Array:
            height: Array = self._volume(parallax, error, t)[0] - (highest - depth)
            return height

        nearest = np.maximum(parallax, MAS_PC / self.distance_max) + 20.0 * error
        first = np.log(MAS_PC / nearest)
        inner = np.where(high, modes, np.inf).min(axis=1, keepdims=True)
        outer = np.where(high, modes, -np.inf).max(axis=1, keepdims=True)
        left = _crossing(excess, np.minimum(first, inner), inner)
        right = _crossing(excess, np.full_like(outer, last), outer)
        return left, right

    def _stationary(self, parallax: Array, error: Array) -> Array:
        """ln d (n, 3) of the modes and the valley: g' = 0 is a cubic in the true parallax x,

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
    """Between a place where the excess is ≥ 0 and one beyond, its zero; or the latter if ≥ 0."""
    beyond = excess(outside) >= 0.0
    low, high = outside.copy(), inside.copy()
    for _ in range(40):
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
        """P(ln D > t) at t (n, P)."""
        place = np.clip((t - self.left) / self.step, 0.0, NODES - 1)
        cell = np.minimum(place.astype(np.int64), NODES - 2)
        value, _ = self._cubic(cell, place - cell)
        return np.clip(1.0 - value, 0.0, 1.0)

    def quantile(self, p: Array) -> Array:
        """t (n, P) with P(ln D ≤ t) = p (P,)."""
        cell = self._cell(p)
        first = np.take_along_axis(self.below, cell, 1)
        within = np.take_along_axis(self.below, cell + 1, 1) - first
        low, high = np.zeros_like(first), np.ones_like(first)
        u = np.clip((p - first) / np.where(within > 0.0, within, 1.0), 0.0, 1.0)
        for _ in range(12):  # Newton's steps, and halving where they leave the bracket
            value, slope = self._cubic(cell, u)
            low, high = np.where(value <= p, u, low), np.where(value > p, u, high)
            newton = u - (value - p) / np.where(slope > 0.0, slope, 1.0)
            u = np.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
        return self.left + self.step * (cell + u)

    def _cell(self, p: Array) -> NDArray[np.int64]:
        """The cell of every p: one search in all tables, set apart by 2 per star."""
        n, count = self.below.shape
        shift = 2.0 * np.arange(n)[:, None]
        found = np.searchsorted((self.below + shift).ravel(), (p + shift).ravel(), side="right")
        cell = found.reshape(n, len(p)) - count * np.arange(n)[:, None] - 1
        return np.asarray(np.clip(cell, 0, count - 2), np.int64)

    def _cubic(self, cell: NDArray[np.int64], u: Array) -> tuple[Array, Array]:
        """The cubic of a cell by values and slopes at its ends, at u in [0, 1]; and its slope."""
        p0, p1 = (np.take_along_axis(self.below, cell + k, 1) for k in (0, 1))
        m0, m1 = (np.take_along_axis(self.slope, cell + k, 1) for k in (0, 1))
        rise = p1 - p0
        c2, c3 = 3.0 * rise - 2.0 * m0 - m1, m0 + m1 - 2.0 * rise
        value = p0 + u * (m0 + u * (c2 + u * c3))
        return value, m0 + u * (2.0 * c2 + u * 3.0 * c3)
