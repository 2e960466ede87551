"""Distances weighted by what else is known of them: p(d) w(d) in place of p(d).

With the normal score z of a distance, P(distance ≤ d(z)) = Φ(z), the weighted distribution is
φ(z) w(d(z)) dz, whatever the shape of the first one: w is tabulated at nodes of z and its logarithm
is linear between them.
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
from dustmap.sky.stars._priors import Array

#: Normal scores at which weights are tabulated; beyond them they are constant.
WEIGHT_SCORES = np.linspace(-4.0, 4.0, 33)
#: Normal scores between which the weighted density is log-linear, and those of distances.
_CELLS, _DISTANCES = np.linspace(-5.0, 5.0, 161), np.linspace(-5.0, 5.0, 81)
#: The least distance in pc: normal distributions go down to 0, which has no logarithm.
_NEAREST = 1e-3
#: Stars whose tables are in memory at once.
_STARS_AT_ONCE = 4096


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

    @property
    def depth(self) -> Array:
        return self.base.depth

    @property
    def depth_error(self) -> Array:
        return self.base.depth_error

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
        n, count = self.first.shape
        shift = 2.0 * np.arange(n)[:, None]
        found = np.searchsorted((self.first + shift).ravel(), (p + shift).ravel(), side="right")
        cell = np.clip(found.reshape(n, len(p)) - count * np.arange(n)[:, None] - 1, 0, count - 1)
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
        some = (np.take_along_axis(v, cell, 1) for v in (self.first, self.mass, self.steepness))
        first, mass, steepness = some
        return first, mass, steepness


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
    c3, c2, c1, c0 = (np.take_along_axis(part.T, cell, 1) for part in cubics)
    return np.asarray(c0 + u * (c1 + u * (c2 + u * c3)), np.float64)
