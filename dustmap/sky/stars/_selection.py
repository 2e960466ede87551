"""Stars behind dust that a magnitude limit leaves, and distances weighted by it.

A star of absolute magnitude M at the distance d behind the extinction A has the magnitude

    m = M + x,    x = 5 lg(d / 10 pc) + R A,

and is in a catalog that ends at m_lim where M ≤ m_lim − x. With F the part of stars that are
brighter than M, the part of them that is seen is F(m_lim − x).

F comes from the stars whose distances are well known. Each of them could have been seen as far as
the magnitude b = m_lim − x at its place, which truncates the sample. Of stars truncated at b ≥ M
that is independent of M, the estimate of largest likelihood is (Lynden-Bell 1971)

    F(M) = exp(−Σ_{M_j > M} 1/C_j),    C_j = #{n: M_n ≤ M_j ≤ b_n},

here with Nelson's exponential in place of the product. C_j is the number of stars that are seen and
would be as faint as M_j: for stars of constant density in space this is the weight 1/V_max, but it
asks for no density of stars, and dust is in b. Ratios of F at two magnitudes are those of the stars
between them alone, whatever is not known of fainter ones.

Distances weighted by what is seen have p(d) w(d) in place of p(d). With the normal score z of a
distance, P(distance ≤ d(z)) = Φ(z), the weighted distribution is φ(z) w(d(z)) dz, whatever the
shape of the first one: w is tabulated at nodes of z and its logarithm is linear between them.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.special import ndtr, ndtri

from dustmap.errors import UserError
from dustmap.sky.stars._distances import AbstractDistances
from dustmap.sky.stars._priors import Array, cubic, last_below

#: Stars without which nothing is learned, and magnitudes at which F is tabulated, at most.
LEAST, _NODES = 20, 40
#: Stars from one of these to the next at least, and of a bin of magnitudes.
_APART, _BIN = 8, 50
#: Distances known to this part of them are good: F is of the nearest stars, of which this share
#: are, of this many at least.
_GOOD, _SHARE, _FEWEST = 0.15, 0.8, 100
#: Steps of x in mag, its range, and how much brighter stars are looked at.
_STEP, _LOWEST, _HIGHEST, _BRIGHTER = 0.05, -10.0, 40.0, 20.0
#: Normal scores ±1.
_ONE_SIGMA = np.array([0.15865525393145707, 0.5, 0.8413447460685429])
#: Normal scores at which weights are tabulated; beyond them they are constant.
WEIGHT_SCORES = np.linspace(-4.0, 4.0, 33)
#: Normal scores between which the weighted density is log-linear, and those of distances.
_CELLS, _DISTANCES = np.linspace(-5.0, 5.0, 161), np.linspace(-5.0, 5.0, 81)
#: The least distance in pc: normal distributions go down to 0, which has no logarithm.
_NEAREST = 1e-3
#: Stars whose tables are in memory at once.
_STARS_AT_ONCE = 4096


def distance_modulus(distance: Array) -> Array:
    """Return 5 lg(d / 10 pc) (...) at distances (...) in pc."""
    return np.asarray(5.0 * np.log10(distance / 10.0), np.float64)


def well_known(distances: AbstractDistances) -> NDArray[np.int64]:
    """Return the nearest stars (K,), as far as four of five have distances known to 15 %; at least
    a hundred.

    The cut is one of distances alone: of stars chosen by their own errors, which are those of faint
    stars, too few faint ones would be far.
    """
    low, middle, high = distances.quantile(_ONE_SIGMA).T
    order = np.argsort(middle, kind="stable")
    good = ((high - low) / (2.0 * middle) <= _GOOD)[order]
    share = good.cumsum() / np.arange(1.0, len(order) + 1.0)
    enough = np.flatnonzero(share >= _SHARE)
    count = max(_FEWEST, int(enough[-1]) + 1 if len(enough) else 0)
    return np.asarray(order[:count], np.int64)


@final
@dataclass(frozen=True, eq=False)
class LuminosityFunction:
    """ln F (K,) at absolute magnitudes (K,), ascending: linear between them, constant behind the
    last one, and with the slope of the first two before them.

    Examples
    --------
    Stars of density 10^(0.4 M) on −1 ≤ M ≤ 9, at places where the limit is at 2 to 10:

    >>> rng = np.random.default_rng(0)
    >>> M = 9.0 + np.log10(rng.uniform(size=20_000)) / 0.4
    >>> limit = rng.uniform(2.0, 10.0, size=20_000)
    >>> seen = M <= limit
    >>> function = LuminosityFunction.of(M[seen], limit[seen])
    >>> two, seven = function.log_below(np.array([2.0, 7.0]))
    >>> bool(abs((seven - two) / np.log(10.0) - 0.4 * 5.0) < 0.05)
    True
    """

    magnitude: Array
    log_part: Array

    @staticmethod
    def of(absolute: Array, faintest: Array) -> "LuminosityFunction":
        """Estimate F from stars of absolute magnitudes (N,), each at a place where those up to
        `faintest` (N,) are seen; stars beyond that are left out."""
        seen = absolute <= faintest
        absolute, faintest = np.sort(absolute[seen]), np.sort(faintest[seen])
        if len(absolute) < LEAST:
            raise UserError(
                f"a luminosity function needs {LEAST} stars within the magnitude limit, got "
                f"{len(absolute)}"
            )
        brighter = np.searchsorted(absolute, absolute, side="right")
        at_risk = brighter - np.searchsorted(faintest, absolute, side="left")
        above = np.cumsum((1.0 / at_risk)[::-1])[::-1]
        log_part = -np.append(above[1:], 0.0)
        count = min(_NODES, max(2, len(absolute) // _APART))
        rows = np.linspace(0, len(absolute) - 1, count).astype(np.int64)
        magnitude, last = np.unique(absolute[rows][::-1], return_index=True)
        if len(magnitude) < 2:
            raise UserError("a luminosity function needs stars of different magnitudes")
        return LuminosityFunction(magnitude, log_part[rows][::-1][last])

    def log_below(self, magnitude: Array) -> Array:
        """Return ln F (...) at absolute magnitudes (...)."""
        slope = (self.log_part[1] - self.log_part[0]) / (self.magnitude[1] - self.magnitude[0])
        before = np.minimum(magnitude - self.magnitude[0], 0.0)
        return np.asarray(np.interp(magnitude, self.magnitude, self.log_part) + slope * before)


@final
@dataclass(frozen=True, eq=False)
class SeenPart:
    """ln G_k(x) of C classes of stars (C, J) at x = first, first + step, ..; linear between these
    and beyond their ends.

        G_k(x) = ∫ φ(M) g_k(M + x) dM

    is the part of all stars that is in the class k of the catalog where their magnitudes are
    M + x; φ = F', and g_k(m) the part of the stars of magnitude m that is in the class, 0 beyond
    the limit. The G_k of all classes add up to F(m_lim − x). A prior of distances that is one for
    each class of errors of parallaxes asks for these: errors are those of faint stars.
    """

    first: float
    step: float
    log_part: Array

    @staticmethod
    def of(
        luminosity: LuminosityFunction,
        limit: float,
        magnitude: Array,
        kind: NDArray[np.int64],
        kinds: int,
    ) -> "SeenPart":
        """Tabulate G_k for a catalog that ends at `limit`, of stars with these magnitudes (N,) in
        classes (N,) from 0 to kinds − 1.

        Examples
        --------
        One class: G is F, and behind 1 mag more of F ∝ 10^(0.4 M) there are 0.4 of the stars.

        >>> luminosity = LuminosityFunction(np.array([0.0, 10.0]), np.array([0.0, np.log(1e4)]))
        >>> seen = SeenPart.of(luminosity, 12.0, np.array([11.0]), np.array([0]), 1)
        >>> x = np.array([5.0, 6.0])
        >>> np.exp(np.diff(seen.at(x, np.zeros(2, np.int64)))).round(3)
        array([0.398])
        """
        low, high = round(_LOWEST / _STEP), round(_HIGHEST / _STEP)
        last = high + round(_BRIGHTER / _STEP)
        steps = np.arange(low, last + 1, dtype=np.float64)
        # Cells of M that end at the limit less x: whole steps, for every x that is tabulated.
        below = np.exp(luminosity.log_below(limit - _STEP * steps))
        each, depth = below[:-1] - below[1:], steps[:-1] - low
        shares = _shares(limit - _STEP * (depth + 0.5), limit, magnitude, kind, kinds)
        rows = [
            [float(each[j:] @ share[: len(each) - j]) for j in range(high - low)]
            for share in shares
        ]
        return SeenPart(_STEP * low, _STEP, np.log(np.maximum(rows, 1e-300)))

    def at(self, x: Array, kind: NDArray[np.int64]) -> Array:
        """Return ln G_k at x (..., n, K) or (n,) of stars of classes k (n,)."""
        count = self.log_part.shape[1]
        place = (x - self.first) / self.step
        cell = np.clip(np.floor(place), 0, count - 2).astype(np.int64)
        row = kind.reshape(len(kind), *([1] * min(1, x.ndim - 1)))
        low, high = (self.log_part[row, cell + k] for k in (0, 1))
        return np.asarray(low + (place - cell) * (high - low), np.float64)


def _shares(
    at: Array, limit: float, magnitude: Array, kind: NDArray[np.int64], kinds: int
) -> Array:
    """Return the share of every class (kinds, A) of the stars at magnitudes (A,), linear between
    the medians of bins of equally many."""
    if kinds == 1:
        return np.ones((1, len(at)))
    seen = np.flatnonzero(magnitude <= limit)
    order = seen[np.argsort(magnitude[seen], kind="stable")]
    bins = np.array_split(order, max(1, min(_NODES, len(order) // _BIN)))
    middle = np.array([np.median(magnitude[rows]) for rows in bins])
    counts = np.array([np.bincount(kind[rows], minlength=kinds) for rows in bins])
    # Half a star of every class, so that none is impossible.
    shares = (counts + 0.5) / (counts.sum(1, keepdims=True) + 0.5 * kinds)
    return np.stack([np.interp(at, middle, share) for share in shares.T])


@final
@dataclass(frozen=True, eq=False)
class WeightedDistances(AbstractDistances):
    """Distributions p(d) w(d) / ∫p w of N distances, which are not stored with stars.

    Attributes
    ----------
    base : p(d), not exact
    log_weight : (N, K)
        ln w, up to a constant of a star, at the distances `nodes` of base.

    Examples
    --------
    A star at 100 ± 10 pc, where a cloud at 100 pc hides nine of ten stars behind it:

    >>> from dustmap.sky.stars import GaussianDistances
    >>> star = GaussianDistances(np.array([100.0]), np.array([10.0]))
    >>> seen = WeightedDistances(star, np.log(np.where(weight_nodes(star) > 100.0, 0.1, 1.0)))
    >>> seen.survival(np.array([[101.0]])).round(2)
    array([[0.09]])
    """

    kind = "weighted"
    fields = MappingProxyType({})
    base: AbstractDistances
    log_weight: Array

    def __post_init__(self) -> None:
        """Check that there are weights for every star of distances that are not exact."""
        if self.base.exact:
            raise UserError("weighted distances: expected uncertain distances, got exact ones")
        expected = (len(self.base), len(WEIGHT_SCORES))
        if self.log_weight.shape != expected or not np.isfinite(self.log_weight).all():
            raise UserError(
                f"the logarithms of weights must be finite {expected}, got {self.log_weight.shape}"
            )

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: NDArray[Any] | slice) -> Self:
        return type(self)(self.base[index], self.log_weight[index])

    def columns(self) -> dict[str, Array]:
        return self.base.columns()

    def depths(self) -> tuple[Array, Array]:
        return self.base.depths()

    @property
    def rough(self) -> Array:
        return self.base.rough

    @property
    def depth_per_pc(self) -> Array:
        return self.base.depth_per_pc

    def survival(self, d: Array) -> Array:
        with np.errstate(divide="ignore"):
            z = np.clip(-ndtri(self.base.survival(d)), _CELLS[0], _CELLS[-1])
        z = np.broadcast_to(z, (len(self), z.shape[1]))
        table = _Table.of(self.log_weight)
        place = (z - _CELLS[0]) / (_CELLS[1] - _CELLS[0])
        return np.asarray(1.0 - table.below(place), np.float64)

    def quantile(self, p: Array) -> Array:
        parts = [np.empty((0, len(p)))]
        for start in range(0, len(self), _STARS_AT_ONCE):
            some = self[start : start + _STARS_AT_ONCE]
            z = _Table.of(some.log_weight).score(p)
            known = some.base.quantile(np.asarray(ndtr(_DISTANCES), np.float64))
            known = np.log(np.maximum(known, _NEAREST))
            parts.append(np.exp(_at_scores(known, z)))
        return np.concatenate(parts)


def weight_nodes(distances: AbstractDistances) -> Array:
    """Return the distances (N, K) in pc at which `WeightedDistances` are weighted."""
    nodes = distances.quantile(np.asarray(ndtr(WEIGHT_SCORES), np.float64))
    return np.maximum(nodes, _NEAREST)


@final
@dataclass(frozen=True, eq=False)
class _Table:
    """Weighted densities of n scores, φ w = exp of values (n, C + 1) at the ends of C cells, linear
    between them; first (n, C): probability below every cell; mass (n, C): within it."""

    steepness: Array
    first: Array
    mass: Array

    @staticmethod
    def of(log_weight: Array) -> "_Table":
        """Tabulate densities with weights ln w (n, K) at WEIGHT_SCORES."""
        place = np.interp(_CELLS, WEIGHT_SCORES, np.arange(len(WEIGHT_SCORES)))
        node = np.minimum(place.astype(np.int64), len(WEIGHT_SCORES) - 2)
        part = place - node
        between = (1.0 - part) * log_weight[:, node] + part * log_weight[:, node + 1]
        height = between - 0.5 * _CELLS**2
        height -= height.max(axis=1, keepdims=True)
        steepness = np.diff(height)
        mass = np.exp(height[:, :-1]) * _mean_growth(steepness)
        mass /= mass.sum(axis=1, keepdims=True)
        return _Table(steepness, mass.cumsum(axis=1) - mass, mass)

    def below(self, place: Array) -> Array:
        """Return the probability below places (n, P) in 0 to C."""
        cell = np.minimum(place.astype(np.int64), self.mass.shape[1] - 1)
        first, mass, c = self._at(cell)
        u = place - cell
        return np.asarray(np.clip(first + mass * u * _mean_growth(c * u) / _mean_growth(c), 0, 1))

    def score(self, p: Array) -> Array:
        """Return the scores z (n, P) with P(score ≤ z) = p at probabilities p (P,)."""
        cell = np.clip(last_below(self.first, p), 0, self.first.shape[1] - 1)
        first, mass, c = self._at(cell)
        share = np.clip((p - first) / np.where(mass > 0.0, mass, 1.0), 0.0, 1.0)
        # ln(1 + share (eᶜ − 1)) / c; of the larger end, so that nothing overflows.
        steep = np.abs(c) > 1e-6
        safe = np.where(steep, c, 1.0)
        rising = safe > 0.0
        fall = np.exp(-np.abs(safe))
        inside = np.where(rising, fall + share * (1.0 - fall), 1.0 - share * (1.0 - fall))
        u = np.log(inside) / safe + np.where(rising, 1.0, 0.0)
        u = np.where(steep, u, share)
        return np.asarray(_CELLS[0] + (_CELLS[1] - _CELLS[0]) * (cell + np.clip(u, 0.0, 1.0)))

    def _at(self, cell: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Gather what cells (n, P) have."""
        first, mass = (np.take_along_axis(values, cell, 1) for values in (self.first, self.mass))
        return first, mass, np.take_along_axis(self.steepness, cell, 1)


def _mean_growth(c: Array) -> Array:
    """Return ∫₀¹ exp(c u) du = (eᶜ − 1) / c."""
    small = np.abs(c) < 1e-6
    safe = np.where(small, 1.0, c)
    return np.where(small, 1.0 + 0.5 * c, np.expm1(safe) / safe)


def _at_scores(values: Array, z: Array) -> Array:
    """Interpolate values (n, K) at _DISTANCES, monotone where they are, at scores z (n, P)."""
    place = (z - _DISTANCES[0]) / (_DISTANCES[1] - _DISTANCES[0])
    cell = np.clip(place.astype(np.int64), 0, values.shape[1] - 2)
    u = place - cell
    cubics = PchipInterpolator(np.arange(values.shape[1]), values, axis=1).c  # (4, K − 1, n)
    return cubic([np.take_along_axis(part.T, cell, 1) for part in cubics[::-1]], u)[0]
