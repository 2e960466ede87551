"""Stars whose distances are distributions: segments of their rays, and the variance that these add.

With a_k = ∫ρ over segment k of a ray and U_k the fraction of it before the star, the extinction is
A(<d) = Σ_k a_k U_k; E U_k is the mean of sf(s) = P(d > s) over the segment. U_k > 0 only where
U_i = 1 for all i < k, so that Cov(U_i, U_k) = E U_k (1 − E U_i).
"""

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

from dustmap.gp import AbstractPosterior, variance_of_pairs
from dustmap.gp.functionals import LineIntegrals
from dustmap.inference import GriddedDraws, LogNormalPosterior, PathwisePosterior
from dustmap.linalg import Progress, chunks, unwatched, watched_chunks
from dustmap.sky.stars import AbstractDistances
from dustmap.sky.stars._priors import Array

#: Normal scores of the quantiles at which segments end, dense where sf falls; the first segment
#: starts at the Sun.
EDGES = np.array(
    [-3.2, -2.2, -1.6, -1.2, -0.8, -0.4, 0.0, 0.4, 0.8, 1.2, 1.6, 2.05, 2.55, 3.1, 3.7, 4.4]
)
#: Which of them is the median.
MEDIAN = 6
#: Gauss-Legendre nodes of each part of the distribution, the first and last as far as OUTMOST.
ORDER = 4
OUTMOST = 7.0
#: Parts of a segment between two quantiles, with a place in each, of `Stops`.
_PARTS = 2
#: Stars whose quantiles are in memory at once.
STARS_AT_ONCE = 2**15
#: Part of E d that a ray may lose beyond its last edge without being counted.
NEGLIGIBLE = 1e-3
#: Segments whose integrals are drawn at once: of fields that are stored as draws, and of others,
#: whose joint draws may take a dense covariance.
_STORED, _DENSE = 2**17, 128
#: What is done, for whoever watches.
_SPREADS = "spread of distances, stars"


def _quadrature() -> tuple[Array, Array]:
    """Return normal scores and probabilities (J + 1, ORDER) of nodes between edges and beyond."""
    ends = np.concatenate([[-OUTMOST], EDGES, [OUTMOST]])
    node, weight = leggauss(ORDER)
    z = ends[:-1, None] + np.diff(ends)[:, None] * 0.5 * (node + 1.0)
    density = weight * np.exp(-0.5 * z**2)
    # Differences of whichever tail is the smaller; what is beyond OUTMOST belongs to the ends.
    bounds = np.concatenate([[-np.inf], EDGES, [np.inf]])
    mass = np.where(bounds[:-1] > 0.0, -np.diff(ndtr(-bounds)), np.diff(ndtr(bounds)))
    return z, mass[:, None] * density / density.sum(axis=1, keepdims=True)


@final
@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of N rays, exact where ρ is constant within segments.

    edges (N, J + 1) in pc; mean (N, J) = E U_k; variance (N, J) of U_k; beyond (N,):
    E(d − last edge)₊ in pc.
    """

    edges: Array
    mean: Array
    variance: Array
    beyond: Array

    def __getitem__(self, rows: NDArray[np.int64]) -> "Segments":
        return Segments(*(values[rows] for values in self._arrays()))

    def with_rows(self, rows: NDArray[np.int64], other: "Segments") -> "Segments":
        """Return the same but for some rows, which are those of `other`."""
        arrays = [values.copy() for values in self._arrays()]
        for values, new in zip(arrays, other._arrays(), strict=True):
            values[rows] = new
        return Segments(*arrays)

    @staticmethod
    def none(edge: Array) -> "Segments":
        """Return no segments but one edge (N,) each."""
        empty = np.zeros((len(edge), 0))
        return Segments(edge[:, None], empty, empty, np.zeros(len(edge)))

    def apart_from(self, behind: "Segments") -> "Segments":
        """Return these segments and those behind them, with one of weight 0 in between."""
        box = np.zeros((len(self.mean), 1))
        edges = np.concatenate([self.edges, behind.edges], axis=1)
        mean, variance = (
            np.concatenate([one, box, other], axis=1)
            for one, other in ((self.mean, behind.mean), (self.variance, behind.variance))
        )
        return Segments(edges, mean, variance, behind.beyond)

    def subdivided(self, pieces: int) -> "Segments":
        """Return the same with the first segment, which hardly a star ends in, in equal pieces."""
        part = np.arange(1, pieces) / pieces
        between = self.edges[:, :1] + (self.edges[:, 1:2] - self.edges[:, :1]) * part
        edges = np.concatenate([self.edges[:, :1], between, self.edges[:, 1:]], axis=1)
        mean, variance = (
            np.concatenate([np.repeat(values[:, :1], pieces, axis=1), values[:, 1:]], axis=1)
            for values in (self.mean, self.variance)
        )
        return Segments(edges, mean, variance, self.beyond)

    def _arrays(self) -> tuple[Array, Array, Array, Array]:
        return self.edges, self.mean, self.variance, self.beyond

    @property
    def expected(self) -> Array:
        """E d (N,), of what is before the last edge."""
        return np.asarray(self.edges[:, 0] + (self.mean * np.diff(self.edges)).sum(1), np.float64)

    @property
    def cut(self) -> NDArray[np.bool_]:
        """Whether more than a thousandth of E d lies beyond the last edge (N,)."""
        return np.asarray(self.beyond > NEGLIGIBLE * self.expected, np.bool_)


def quantiles_of(distances: AbstractDistances) -> Array:
    """Return the distances at all normal scores that segments are made of (N, Q).

    All segments of a star are made of one row, for these take the time.
    """
    probability = ndtr(np.concatenate([EDGES, _quadrature()[0].ravel()]))
    shape = len(distances), len(probability)
    if distances.exact:
        return np.broadcast_to(distances.median[:, None], shape)
    quantiles = np.empty(shape)
    for rows in chunks(len(distances), STARS_AT_ONCE):
        quantiles[rows] = distances[rows].quantile(probability)
    return quantiles


def segments_of(quantiles: Array, near: Array | None = None, far: Array | None = None) -> Segments:
    """Return segments of the distances with these quantiles (N, Q), clipped to [near, far] (N,).

    No dust is seen beyond `far`, so a star there is as good as at `far`.
    """
    n = len(quantiles)
    near = np.zeros(n) if near is None else near
    far = np.full(n, np.inf) if far is None else far
    parts = [
        _segments(quantiles[rows], near[rows, None], far[rows, None])
        for rows in chunks(max(n, 1), STARS_AT_ONCE)
    ]
    arrays = zip(*(part._arrays() for part in parts), strict=True)
    return Segments(*(np.concatenate(values) for values in arrays))


def _segments(quantiles: Array, near: Array, far: Array) -> Segments:
    """Cut the rays of few stars, all at once; near and far (n, 1)."""
    n, count = len(quantiles), len(EDGES)
    mass = _quadrature()[1]
    d = np.clip(quantiles, near, far)
    # Monotone but for round-off.
    edges = np.maximum.accumulate(np.concatenate([near, d[:, :count]], axis=1), axis=1)
    nodes = d[:, count:].reshape(n, count + 1, ORDER)
    length = np.diff(edges)
    safe = np.where(length > 0.0, length, 1.0)[..., None]
    u = np.clip((nodes[:, :-1] - edges[:, :-1, None]) / safe, 0.0, 1.0)
    after = ndtr(-EDGES)
    mean = after + (mass[:-1] * u).sum(-1)
    variance = np.maximum(after + (mass[:-1] * u**2).sum(-1) - mean**2, 0.0)
    beyond = (mass[-1] * (nodes[:, -1] - edges[:, -1:])).sum(-1)
    return Segments(edges, mean, variance, beyond)


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Expectation and variance (N,) of what is added to N extinctions, in mag and mag².

    shared (N,): variance that a fit takes on top, for data whose additions are correlated; beyond
    (N,): the part of the variance that is of dust beyond the box.
    """

    mean: Tensor
    variance: Tensor
    shared: Tensor
    beyond: Tensor

    def times(self, factor: Tensor) -> "Moments":
        """Make those of additions that are so many times (N,) as large."""
        variances = self.variance, self.shared, self.beyond
        return Moments(factor * self.mean, *(factor.square() * each for each in variances))


@final
@dataclass(frozen=True, eq=False)
class Outside:
    """Expected extinctions of N rays before and behind their segments, for `DistanceSpread`.

    behind (N,): E A behind the last edge; before (N,): Σ_k E a_k (1 − E U_k) before the first one,
    the dust that a star is not behind.
    """

    behind: Tensor
    before: Tensor

    def __getitem__(self, index: slice) -> "Outside":
        return Outside(self.behind[index], self.before[index])


@final
@dataclass(frozen=True, eq=False)
class DistanceSpread:
    """Var_d A(<d) of N stars whose distances d are distributions, for a density ρ:

        V_n = 2 ∫ρ(s) A(<s) sf(s) ds − (∫ρ sf ds)²,    A(<s) = ∫₀^s ρ,   sf(s) = P(d > s)
            = Σ_k a_k² Var U_k + 2 Σ_{i<k} a_i a_k E U_k (1 − E U_i).

    rays: N rays whose weights (N, J) are E U_k; variance (N, J): Var U_k. The density is 0 where
    the rays end. multiplicity (N,): of how many independent distances each ray is the mean, V_n is
    divided by it; None where each is one star's.
    """

    rays: LineIntegrals
    variance: Tensor
    multiplicity: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rays)

    def __getitem__(self, index: slice | Tensor) -> "DistanceSpread":
        many = None if self.multiplicity is None else self.multiplicity[index]
        return DistanceSpread(self.rays[index], self.variance[index], many)

    def joint(self) -> Tensor:
        """Return E U_i U_k (N, J, J), of the means over `multiplicity` stars."""
        mean = self.rays.weights
        later = torch.arange(mean.shape[1], device=mean.device)
        joint = mean[:, torch.maximum(later[:, None], later[None, :])]
        joint = joint + torch.diag_embed(self.variance + mean.square() - mean)
        if self.multiplicity is None:
            return joint
        apart = mean[:, :, None] * mean[:, None, :]
        return apart + (joint - apart) / self.multiplicity[:, None, None]

    def of_segments(self, a: Tensor, outside: Outside | None = None) -> Tensor:
        """Return V_n (..., N) of the integrals a (..., N, J) of ρ over the segments.

        outside: what the rays have besides. Only stars that have all of a before them see what is
        behind it, and only stars behind what is before it see a:

            Cov(A, A_behind) = E A_behind Σ_k a_k (1 − E U_k)
            Cov(A, A_before) = Σ_i E a_i (1 − E U_i) Σ_k a_k E U_k
        """
        a = a.to(self.variance)
        unseen = a * (1.0 - self.rays.weights)
        before = unseen.cumsum(-1) - unseen
        own = a.square() * self.variance
        # Not negative for ρ ≥ 0; of a field that dips below 0, but for round-off.
        spread = (own + 2.0 * a * self.rays.weights * before).sum(-1).clamp_min(0.0)
        if outside is not None:
            spread = spread + 2.0 * outside.behind.to(a) * unseen.sum(-1)
            spread = spread + 2.0 * outside.before.to(a) * (a - unseen).sum(-1)
            spread = spread.clamp_min(0.0)
        return spread if self.multiplicity is None else spread / self.multiplicity

    def uniform(self, density: float | Tensor, outside: Outside | None = None) -> Tensor:
        """Return V_n (N,) of the same density all along a ray, ρ² Var d: a start. Float64."""
        each = torch.as_tensor(density, dtype=self.variance.dtype, device=self.rays.device)
        return self.of_segments(self.rays.edges.diff(dim=-1) * each[..., None], outside)

    @torch.no_grad()
    def added_variance(
        self,
        posterior: AbstractPosterior,
        samples: int = 8,
        seed: int = 0,
        outside: Outside | None = None,
        progress: Progress = unwatched,
    ) -> Tensor:
        """Return V_n (N,), the mean over at most `samples` draws of the posterior density. Float64.

        A posterior that is stored as fewer draws gives those it has. outside: what the rays have
        besides. progress: of the rays.

        With the variance of the weighted ray it makes up the variance of the extinction:
        Var A = Var_ρ E_d A + E_ρ Var_d A.
        """
        parts = [torch.zeros(0, dtype=self.variance.dtype, device=self.rays.device)]
        at_once = rays_at_once(posterior, self.variance.shape[1])
        # Draws know a segment by its key: neither chunks nor ranks change them.
        for rows in watched_chunks(len(self), at_once, _SPREADS, progress):
            chunk = self[rows]
            a = segment_draws(chunk.rays, posterior, samples, seed)
            more = None if outside is None else outside[rows]
            parts.append(chunk.of_segments(a, more).mean(0))
        return torch.cat(parts)


@final
@dataclass(frozen=True, eq=False)
class Stops:
    """Where the star of a ray may be: at K places, in place of a distribution of distances.

        p(y) = Σ_k p_k p(y | A(< place k)),    A(< place k) = Σ_j a_j before_jk

    Segments between two quantiles are cut into parts of one length, with a place in each.

    probability (K,): p; before (J, K): the share of a part that is before a place.

    Examples
    --------
    >>> stops = Stops.of_segments()
    >>> round(float(stops.probability.sum()), 12)
    1.0
    """

    probability: Tensor
    before: Tensor

    @staticmethod
    def of_segments() -> "Stops":
        """Make those of the segments of uncertain distances."""
        parts = np.arange(_PARTS + 1) / _PARTS
        ends = np.unique(EDGES[:-1, None] + np.diff(EDGES)[:, None] * parts)
        # What is before the first quantile and behind the last is at these.
        below = ndtr(ends)
        probability = np.concatenate([below[:1], np.diff(below), 1.0 - below[-1:]])
        place = np.concatenate([[1.0], np.arange(1, len(ends)) + 0.5, [len(ends)]])
        before = np.clip(place - np.arange(len(ends))[:, None], 0.0, 1.0)
        return Stops(torch.from_numpy(probability), torch.from_numpy(before))

    def to(self, device: torch.device) -> "Stops":
        """Return them on a device."""
        return Stops(self.probability.to(device), self.before.to(device))

    @torch.no_grad()
    def extinctions(self, rays: LineIntegrals, posterior: LogNormalPosterior) -> Tensor:
        """Return mean, variance, and the variance that the nodes lack before the data, of A before
        the places along rays of segments (N, 3, K), by all draws. Float64."""
        moments = [self.before.new_zeros(0, 3, len(self.probability))]
        for rows in chunks(len(rays), rays_at_once(posterior, len(self.before))):
            segments, filled = _filled_segments(_cut(rays[rows]))
            a = posterior.sample(segments, posterior.n_samples, torch.Generator())
            drawn, whole = (
                _in_place(values, filled) @ self.before.to(values)
                for values in (a, posterior.lacking(segments).to(a))
            )
            spread = variance_of_pairs(drawn)
            moments.append(torch.stack([drawn.mean(0), spread, whole], 1).double())
        return torch.cat(moments)


def _cut(rays: LineIntegrals) -> LineIntegrals:
    """Cut segments but the first into parts of one length, of weight 1."""
    first, length = rays.edges[:, :2], rays.edges[:, 1:].diff(dim=-1)
    part = torch.arange(1, _PARTS + 1, dtype=length.dtype, device=length.device) / _PARTS
    # Rounded up, a segment's end would be behind the start of the next one.
    between = torch.minimum(
        rays.edges[:, 1:-1, None] + length[..., None] * part, rays.edges[:, 2:, None]
    )
    edges = torch.cat([first, between.flatten(1)], dim=-1)
    return replace(rays, edges=edges, weights=torch.ones_like(edges[:, 1:]))


def segment_draws(
    rays: LineIntegrals, posterior: AbstractPosterior, samples: int, seed: int
) -> Tensor:
    """Draw ∫ρ over every segment of N rays jointly (samples, N, J); 0 for those of no length.

    A posterior that is stored as fewer draws gives those it has.
    """
    count, generator = draws_of(posterior, samples), torch.Generator().manual_seed(seed)
    segments, filled = _filled_segments(rays)
    return _in_place(posterior.sample(segments, count, generator), filled)


def _in_place(values: Tensor, filled: Tensor) -> Tensor:
    """Put values (..., F) where segments are `filled` (N, J): (..., N, J), 0 elsewhere."""
    every = values.new_zeros(*values.shape[:-1], filled.numel())
    every[..., filled.flatten()] = values
    return every.view(*values.shape[:-1], *filled.shape)


def _filled_segments(rays: LineIntegrals) -> tuple[LineIntegrals, Tensor]:
    """Make rays of the segments that have a length; return which they are, too (N, J)."""
    filled = rays.edges.diff(dim=-1) > 0
    row, segment = filled.nonzero(as_tuple=True)
    edges = torch.stack([rays.edges[row, segment], rays.edges[row, segment + 1]], dim=-1)
    keys = rays.keys[row] * filled.shape[1] + segment
    ones = torch.ones_like(edges[:, :1])
    return LineIntegrals(rays.origin[row], rays.direction[row], edges, ones, keys), filled


def draws_of(posterior: AbstractPosterior, most: int) -> int:
    """Count the draws that a posterior gives, `most` if it has them."""
    stored = _stored_draws(posterior)
    return most if stored is None else min(most, stored)


def rays_at_once(posterior: AbstractPosterior, segments: int) -> int:
    """Count the rays of so many segments whose integrals are drawn at once."""
    together = _DENSE if _stored_draws(posterior) is None else _STORED
    return max(1, together // segments)


def _stored_draws(posterior: AbstractPosterior) -> int | None:
    """Count the draws of the field that a posterior keeps; None where it makes them anew."""
    if isinstance(posterior, LogNormalPosterior | GriddedDraws):
        return posterior.n_samples
    if isinstance(posterior, PathwisePosterior):
        return len(posterior.deviations)
    return None
