"""What a magnitude limit leaves of stars behind dust, from the magnitudes of the catalog itself.

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
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky.stars._distances import AbstractDistances
from dustmap.sky.stars._priors import Array

#: Stars without which nothing is learned, and magnitudes at which F is tabulated, at most.
LEAST, _NODES = 20, 40
#: Stars from one of these to the next at least, and of a bin of magnitudes.
_APART, _BIN = 8, 50
#: Distances known to this part of them are good: F is of the nearest stars, of which this share
#: are, of this many at least.
_GOOD, _SHARE, _NEAREST = 0.15, 0.8, 100
#: Steps of x in mag, its range, and how much brighter stars are looked at.
_STEP, _LOWEST, _HIGHEST, _BRIGHTER = 0.05, -10.0, 40.0, 20.0
#: Normal scores ±1.
_ONE_SIGMA = np.array([0.15865525393145707, 0.5, 0.8413447460685429])


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
    count = max(_NEAREST, int(enough[-1]) + 1 if len(enough) else 0)
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
