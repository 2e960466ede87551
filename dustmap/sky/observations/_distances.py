"""Distances of stars behind a map of the dust: by their extinctions, and under a magnitude limit.

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

Where a catalog has a magnitude limit and the dust hides stars, a star of the catalog is likely in
front of it. With n(d) the density of stars along a ray, volume included, and G the part of them
that is seen behind A(<d),

    p(d | ϖ, seen) ∝ n(d) G(μ(d) + R A(<d)) p(ϖ | d),    μ(d) = 5 lg(d / 10 pc).

The prior p(d) of distances is that of the stars of the catalog, in all directions ω together:
p(d) ∝ n(d) Ḡ(d), Ḡ the mean of G over directions, each as often as it has stars, seen or not. So

    p(d | ϖ, seen) ∝ p(d | ϖ) w(d),    w(d) = G(μ(d) + R A(<d ω)) / Ḡ(d).

Where dust is the same in all directions w is 1. A direction ω of a star of the catalog is met as
often as Z(ω) = ∫ n G dd says, so that

    Ḡ(d) = Σ_n G_n(d) / Z_n / Σ_n 1 / Z_n,    Z_n = ∫ p(d) G_n(d) / Ḡ(d) dd,

of the stars n of a sample: iterated from Z = 1.

A is that of draws of the map, and w the mean over them. The magnitude of the star itself is not
used: given that, the limit says nothing more, and the luminosity function at one magnitude would
have to be right for every type of star. Nor is its extinction y: it is the datum of the fit, whose
density p(y | ϖ, seen) = ∫ p(d | ϖ, seen) p(y | A(<d)) dd has y once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.special import logsumexp, ndtr

from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy
from dustmap.linalg import chunks
from dustmap.sky.observations._segments import draws_of, rays_at_once, segment_draws
from dustmap.sky.observations._sight_lines import PriorDust, rays_towards
from dustmap.sky.stars import (
    AbstractDistances,
    ExponentialDensity,
    ParallaxDistances,
    SeenPart,
    distance_modulus,
)
from dustmap.sky.stars._priors import Array

#: ln p(y | mean and variance (n, J) of the extinction) (n, J), of n stars: of the measurement.
LogDensity: TypeAlias = Callable[[Array, Array], Array]

#: Normal scores of the nodes: the ends hold all but 6e-7 of the prior, and a step is an eighth of
#: a standard deviation.
SCORES = np.linspace(-5.0, 5.0, 81)
#: Parts of a step that the posterior is summed over.
PARTS = 3
#: Width of the kernel that smooths draws, of one draw; Silverman's 1.06 is for one normal density.
_WIDTH = 0.6
#: Distances at which the mean over directions is tabulated, and the quantiles of these at its ends.
_PLACES, _ENDS = 64, (0.001, 0.999)
#: The least of them in pc.
_NEAREST = 1.0
#: Quantiles of every star that make up the distribution of all, and turns of its weights.
_LEVELS, _TURNS = np.linspace(0.02, 0.98, 25), 50
#: Least logarithm of a part, for numbers that do not vanish.
_FAINTEST = -300.0
#: Draws of the map.
_DRAWS = 8


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


def classes_of(distances: AbstractDistances) -> tuple[NDArray[np.int64], int]:
    """Return the classes (N,) for which the prior of distances is one each, and how many there
    are: those of errors of parallaxes of a learned prior."""
    if isinstance(distances, ParallaxDistances) and isinstance(distances.prior, ExponentialDensity):
        ratio = distances.prior.ratio
        if ratio is not None:
            kind = np.searchsorted(ratio.bounds, distances.error).astype(np.int64)
            return kind, len(ratio.values)
    return np.zeros(len(distances), np.int64), 1


def common_distances(distances: AbstractDistances) -> Array:
    """Return the distances (J,) in pc at which `SelectionWeights` take the mean over directions of
    such stars."""
    near, far = np.quantile(distances.quantile(_LEVELS), _ENDS)
    near = max(near, _NEAREST)
    return np.geomspace(near, max(far, 1.001 * near), _PLACES)


@final
@dataclass(frozen=True, eq=False)
class DustAlong:
    """Draws of A(<d) in mag, along rays from the Sun, of a map and of the dust around it.

    grid: whose box the map is in; dust: expected outside it, None for none.
    """

    posterior: AbstractPosterior
    grid: RegularGrid
    dust: PriorDust | None
    device: torch.device
    seed: int = 0

    @torch.no_grad()
    def draws(self, l: Array, b: Array, distance: Array, keys: NDArray[np.int64]) -> Array:
        """Return A(<d) (S, N, K) at ascending distances (N, K) in pc, in directions in degrees.

        keys (N,): identities of the stars, which random numbers belong to.
        """
        parts = [np.empty((draws_of(self.posterior, _DRAWS), 0, distance.shape[1]))]
        for rows in chunks(len(l), rays_at_once(self.posterior, distance.shape[1])):
            parts.append(self._draws(l[rows], b[rows], distance[rows], keys[rows]))
        return np.concatenate(parts, axis=1)

    def _draws(self, l: Array, b: Array, distance: Array, keys: NDArray[np.int64]) -> Array:
        """Draw those of few stars at once."""
        ends = np.concatenate([np.zeros((len(l), 1)), np.maximum.accumulate(distance, 1)], axis=1)
        edges = torch.from_numpy(ends).to(self.device)
        names = torch.from_numpy(keys).to(self.device)
        whole = rays_towards(l, b, edges, torch.ones_like(edges[:, 1:]), names)
        box = self.grid.lower, self.grid.upper
        rays, kept, _ = whole.clipped(*box, OutsidePolicy.TRUNCATE)
        each = edges.new_zeros(draws_of(self.posterior, _DRAWS), *distance.shape)
        if len(kept) > 0:
            each[:, kept] = segment_draws(rays, self.posterior, len(each), self.seed).to(each)
        if self.dust is not None:
            within = torch.zeros_like(edges)
            within[kept] = rays.edges
            each = each + self._outside(whole, within, self.dust)
        return each.cumsum(-1).cpu().double().numpy()

    @staticmethod
    def _outside(whole: LineIntegrals, within: torch.Tensor, dust: PriorDust) -> torch.Tensor:
        """Return what is expected (N, K) of the parts of segments that are not `within` the box."""
        length = whole.edges.diff(dim=-1) - within.diff(dim=-1)
        first = torch.maximum(
            whole.edges[:, :-1], torch.minimum(within[:, -1:], whole.edges[:, 1:])
        )
        middle = 0.5 * (first + whole.edges[:, 1:])
        return dust.expected(whole.at(middle)) * length.clamp_min(0.0)


@final
@dataclass(frozen=True, eq=False)
class SelectionWeights:
    """The weights w(d) of distances in a catalog with a magnitude limit.

    Attributes
    ----------
    seen : ln G of classes of stars
    dimming : R, magnitudes that a magnitude of the map's extinction takes
    log_distance, log_mean : (J,) and (C, J)
        ln d, and ln Ḡ / G(μ(d)) of every class there: linear between, constant beyond.
    """

    seen: SeenPart
    dimming: float
    log_distance: Array
    log_mean: Array

    @staticmethod
    def of(
        seen: SeenPart, dimming: float, distances: AbstractDistances, places: Array, draws: Array
    ) -> "SelectionWeights":
        """Find Ḡ from a sample of the stars of the catalog.

        Parameters
        ----------
        seen, dimming : see the attributes
        distances : of the N stars of the sample
        places : (J,), distances in pc, from `common_distances`
        draws : (S, N, J), of A at these in the directions of the sample, in mag

        Examples
        --------
        Half of the directions have 1 mag from 100 pc on, behind which 0.4 of the stars are seen:
        0.7 of all there. A star of those directions is behind it as likely as 0.4 / 0.7:

        >>> from dustmap.sky.stars import GaussianDistances, LuminosityFunction
        >>> luminosity = LuminosityFunction(np.array([0.0, 10.0]), np.array([0.0, np.log(1e4)]))
        >>> rows = np.arange(1700)
        >>> seen = SeenPart.of(luminosity, 12.0, 0.01 * rows, 0 * rows, 1)
        >>> sky = GaussianDistances(np.where(rows < 1000, 75.0, 125.0), np.full(1700, 5.0))
        >>> d = common_distances(sky)
        >>> dust = np.where((rows[:, None] % 17 < 7) & (d > 100.0), 1.0, 0.0)
        >>> weights = SelectionWeights.of(seen, 1.0, sky, d, dust[None])
        >>> ends = weights.log_weights(d[None], dust[None, :1], np.array([0]))[0, [0, -1]]
        >>> np.exp(np.diff(ends)).round(2), round(0.4 / 0.7, 2)
        (array([0.57]), 0.57)
        """
        kind, kinds = classes_of(distances)
        every = np.broadcast_to(places, draws.shape[1:])
        log_part = _log_part(seen, dimming, every, draws, kind)
        t, known = np.log(places), np.log(np.maximum(distances.quantile(_LEVELS), _NEAREST))
        rows = [_log_mean(log_part[kind == k], known[kind == k], t) for k in range(kinds)]
        return SelectionWeights(seen, dimming, t, np.stack(rows))

    def log_weights(self, distance: Array, draws: Array, kind: NDArray[np.int64]) -> Array:
        """Return ln w (N, K) at distances (N, K) in pc behind draws of A (S, N, K), of stars of
        classes (N,); 0 at most."""
        log_part = _log_part(self.seen, self.dimming, distance, draws, kind)
        mean = np.empty_like(log_part)
        for k in range(len(self.log_mean)):
            rows = kind == k
            mean[rows] = np.interp(np.log(distance[rows]), self.log_distance, self.log_mean[k])
        log_weight = log_part - mean
        return np.asarray(log_weight - log_weight.max(axis=1, keepdims=True), np.float64)


def _log_part(
    seen: SeenPart, dimming: float, distance: Array, draws: Array, kind: NDArray[np.int64]
) -> Array:
    """Return ln G(μ + R A) / G(μ) (N, K), of the mean of G over draws of A (S, N, K)."""
    modulus = distance_modulus(distance)
    behind = logsumexp(seen.at(modulus + dimming * draws, kind), axis=0) - np.log(len(draws))
    return np.asarray(behind - seen.at(modulus, kind), np.float64)


def _log_mean(log_part: Array, known: Array, places: Array) -> Array:
    """Return ln of the mean over directions (J,) of n stars; none: nothing is hidden.

    log_part (n, J): of these; known (n, Q): quantiles of their ln d.
    """
    if len(log_part) == 0:
        return np.zeros_like(places)
    bounds = np.concatenate([[-np.inf], 0.5 * (places[1:] + places[:-1]), [np.inf]])
    number = np.histogram(known, bounds)[0]
    share, part = number / number.sum(), np.exp(np.maximum(log_part, _FAINTEST))
    mean = part.mean(0)
    for _ in range(_TURNS):
        often = 1.0 / ((part / mean) @ share)
        mean = (often @ part) / often.sum()
    return np.asarray(np.log(mean), np.float64)
