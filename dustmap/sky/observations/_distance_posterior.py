"""Distances of stars by their extinctions: the posterior of d given y behind a map of the dust.

    p(d | ϖ, y) ∝ p(d | ϖ) p(y | A(d)),    p(y | A(d)) = Σ_s p(y | A_s(d), v(d)) / S

with draws A_s of the map's extinction, and the variance v that they have not. The extinction grows
along the ray, so that it says between which clouds a star is whose parallax leaves that open. With
the normal score z of the distance, P(distance ≤ d(z) | ϖ) = Φ(z), the prior is φ(z) dz whatever its
shape: distances and A are tabulated at nodes of z, monotone cubics between them, and the posterior
is summed at the middles of their parts.

Of a cloud whose distance is not well known the draws are in front of a place or behind it: one
normal density of their moments would say that half of a cloud is likely. Few draws are smoothed so
that mean and variance stay (West 1993): A_s is shrunk to the mean by √(1 − h²), and h² of the
variance is v's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.special import ndtr

from dustmap.errors import UserError
from dustmap.sky.stars import AbstractDistances

Array: TypeAlias = NDArray[np.float64]
#: ln p(y | mean and variance (n, J) of the extinction) (n, J), of n stars: of the measurement.
LogDensity: TypeAlias = Callable[[Array, Array], Array]

#: Normal scores of the nodes: the ends hold all but 6e-7 of the prior, and a step is an eighth of
#: a standard deviation.
SCORES = np.linspace(-5.0, 5.0, 81)
#: Parts of a step that the posterior is summed over.
PARTS = 3
#: Width of the kernel that smooths draws, of one draw; Silverman's 1.06 is for one normal density.
_WIDTH = 0.6


@final
@dataclass(frozen=True, eq=False)
class DistancePosterior:
    """Posteriors of N distances, of constant density within J cells.

    edges : (N, J + 1), in pc, ascending
    mass : (N, J), which sum to 1
    """

    edges: Array
    mass: Array

    @property
    def mean(self) -> Array:
        """E d (N,) in pc."""
        return np.asarray((self.mass * self._middle).sum(1))

    @property
    def std(self) -> Array:
        """Standard deviation (N,) in pc."""
        off = self._middle - self.mean[:, None]
        within = np.diff(self.edges) ** 2 / 12.0
        return np.asarray(np.sqrt((self.mass * (off**2 + within)).sum(1)))

    def quantile(self, p: Array) -> Array:
        """Return the distances with P(distance ≤ d | ϖ, y) = p at probabilities p (K,): (N, K)."""
        below = np.concatenate([np.zeros((len(self.mass), 1)), self.mass.cumsum(1)], axis=1)
        rows = zip(below, self.edges, strict=True)
        return np.stack([np.interp(p, share, edges) for share, edges in rows])

    @property
    def _middle(self) -> Array:
        return np.asarray(0.5 * (self.edges[:, 1:] + self.edges[:, :-1]))


def distance_nodes(distances: AbstractDistances) -> Array:
    """Return the distances (N, K) in pc at which `distance_posterior` wants to know extinctions.

    Examples
    --------
    >>> from dustmap.sky.stars import GaussianDistances
    >>> stars = GaussianDistances(distance=np.array([100.0]), error=np.array([10.0]))
    >>> distance_nodes(stars)[0, [0, 40, -1]].round(3)
    array([ 50., 100., 150.])
    """
    if distances.exact:
        raise UserError(
            "distances by extinctions: expected uncertain distances, got exact ones, of which no "
            "extinction says more"
        )
    return distances.quantile(np.asarray(ndtr(SCORES), np.float64))


def smoothed(draws: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Return draws (S, ...) and the variance (...) that they lack, together of this mean and
    variance (...).

    Examples
    --------
    >>> draws, rest = smoothed(np.array([0.0, 2.0]), np.array(1.0), np.array(1.0))
    >>> bool(np.isclose(draws.var() + rest, 1.0)), draws.mean()
    (True, np.float64(1.0))
    """
    width2 = 1.0 if len(draws) == 1 else _WIDTH**2 * len(draws) ** -0.4
    off = np.sqrt(1.0 - width2) * (draws - draws.mean(0))
    return mean + off, np.maximum(variance - (off**2).mean(0), 0.0)


def distance_posterior(
    nodes: Array, extinction: Array, variance: Array, log_density: LogDensity
) -> DistancePosterior:
    """Return the posteriors of N distances given extinctions.

    Parameters
    ----------
    nodes : (N, K)
        Distances in pc, from `distance_nodes`.
    extinction : (S, N, K)
        Draws of the extinction A(<d) of the map there, in mag; of a normal one its mean alone.
    variance : (N, K)
        Variance that they lack, in mag².
    log_density : callable
        ln p(y | A) of the N measurements, of moments (N, J) as these, up to a constant of a star.

    Examples
    --------
    A star at 100 ± 30 pc and a cloud of 1 mag at 110 pc that it is not behind:

    >>> from dustmap.sky.stars import GaussianDistances
    >>> star = GaussianDistances(distance=np.array([100.0]), error=np.array([30.0]))
    >>> d = distance_nodes(star)
    >>> unreddened = lambda mean, variance: -0.5 * mean**2 / (0.1**2 + variance)
    >>> found = distance_posterior(d, 1.0 * (d[None] > 110.0), 0.0 * d, unreddened)
    >>> bool(found.quantile(np.array([0.99])) < 115.0)
    True
    """
    edges = np.linspace(0.0, nodes.shape[1] - 1.0, PARTS * (nodes.shape[1] - 1) + 1)
    middle = 0.5 * (edges[1:] + edges[:-1])
    first, step = SCORES[0], SCORES[1] - SCORES[0]
    rest = _between(variance, middle)
    likelihood = log_density(_between(extinction[0], middle), rest)
    for draw in extinction[1:]:
        likelihood = np.logaddexp(likelihood, log_density(_between(draw, middle), rest))
    height = likelihood - 0.5 * (first + step * middle) ** 2
    mass = np.exp(height - height.max(axis=1, keepdims=True))
    return DistancePosterior(_between(nodes, edges), mass / mass.sum(axis=1, keepdims=True))


def _between(values: Array, place: Array) -> Array:
    """Interpolate values (N, K), monotone where they are, at places (J,) in 0 to K − 1: (N, J)."""
    return np.asarray(PchipInterpolator(np.arange(values.shape[1]), values, axis=1)(place))
