"""Sight lines: from directions and distances of stars to line integrals of the density, and back.

The mean extinction of a star is E A(<d) = ∫ρ(s) sf(s) ds along its ray, sf(s) = P(d > s). Its parts
outside the box go through the dust of the prior.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import cumulative_trapezoid
from scipy.interpolate import CubicHermiteSpline
from scipy.spatial import cKDTree
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractMean, AbstractPosterior, Prediction, RegularGrid, functionals
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import chunks
from dustmap.sky._coordinates import cartesian, weighted_neighbours
from dustmap.sky.observations import _segments
from dustmap.sky.observations._segments import DistanceSpread, Outside, Segments
from dustmap.sky.stars import AbstractDistances
from dustmap.sky.stars._priors import Array

#: Parts of the first segment behind the box, for a mean density that changes along it.
PIECES = 6
#: Nodes of the table of G, as far as the kernel is felt.
NODES = 4096
FAINT = 1e-7
#: Rays whose pairs of segments are in memory at once.
RAYS_AT_ONCE = 2**13
#: Neighbours on the sky whose depths are compared; parts of ∫c t dt within the rings around a ray.
NEIGHBOURS, RINGS = 16, np.array([0.02, 0.15, 0.45, 0.75, 0.95])


@final
@dataclass(frozen=True, eq=False)
class PriorDust:
    """The density before any star is seen: its expectation, and its covariance along a line.

    Gaussian:    E ρ = m,                Cov(ρ, ρ') = k
    log-normal:  E ρ = exp(m + k(0)/2),  Cov(ρ, ρ') = Eρ Eρ' (exp k − 1)

    Attributes
    ----------
    kernel, mean : k, isotropic, and m, of the density or of its logarithm
    lognormal : whether they are of the logarithm
    level, level_std : a factor on Eρ, and how uncertain it is
    spread : a factor on the covariance

    Examples
    --------
    >>> from dustmap.gp import ConstantMean
    >>> from dustmap.gp.kernels import Matern32
    >>> dust = PriorDust(Matern32(60.0, 1.0, dim=3), ConstantMean(-6.0), lognormal=True)
    >>> dust.expected(torch.zeros(1, 3)).log()  # of the mean of exp(N(−6, 1))
    tensor([-5.5000], dtype=torch.float64)
    """

    kernel: AbstractKernel
    mean: AbstractMean
    lognormal: bool
    level: float = 1.0
    level_std: float = 0.0
    spread: float = 1.0

    @torch.no_grad()
    def expected(self, points: Tensor) -> Tensor:
        """Return E ρ at points (..., 3): (...), float64, on their device."""
        variance = self.kernel.variance()
        places = points.reshape(-1, 3).to(variance.device)
        m = self.mean.values(PointValues(places)).reshape(points.shape[:-1])
        density = (m + 0.5 * variance).exp() if self.lognormal else m
        return (self.level * density).to(points.device)

    def size(self, expected: Tensor) -> Tensor:
        """Scale the covariance of distance: by Eρ of a log-normal density, 1 of others."""
        return expected if self.lognormal else torch.ones_like(expected)

    def pairs(self, distance: Tensor) -> Tensor:
        """Return G(t) = ∫₀ᵗ (t − u) c(u) du at distances t >= 0 in pc, c = k or exp(k) − 1.

        ∬ c(|s − s'|) over [a, b] × [a', b'] is G|a − b'| + G|b − a'| − G|a − a'| − G|b − b'|.
        """
        table, near = self._table, distance.clamp_max(self._table.x[-1])
        cell = (near / table.x[1]).to(torch.int64).clamp_max(len(table.x) - 2)  # even knots
        along, value = near - cell.to(near) * table.x[1], torch.zeros_like(near)
        for coefficient in torch.from_numpy(table.c).to(distance.device):
            value.mul_(along).add_(coefficient[cell])
        return value + float(table(table.x[-1], nu=1)) * (distance - near)

    def between(self, edges: Tensor) -> Tensor:
        """Return G of the distances between all edges (N, K) of rays: (N, K, K), symmetric."""
        i, j = torch.triu_indices(edges.shape[1], edges.shape[1], 1, device=edges.device)
        g = edges.new_zeros(*edges.shape, edges.shape[1])
        g[:, i, j] = g[:, j, i] = self.pairs(edges[:, j] - edges[:, i])
        return g

    def correlation(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        """Correlate the integrals from one place on over lengths a and b along one line."""
        g, h, apart = (
            self.pairs(torch.from_numpy(np.asarray(t))).numpy() for t in (a, b, np.abs(a - b))
        )
        return np.asarray(0.5 * (g + h - apart) / np.sqrt(g * h))

    def rings(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the outer radii in pc of rings around a ray, which have equal parts of ∫c(t) t dt
        but for the last, which has the tail as well; and the mean of c(t) / c(0) in each."""
        t = self._table.x
        c = self._covariance(t)
        area = cumulative_trapezoid(c * t, t, initial=0.0) / c[0]
        edges = np.interp(np.append(0.0, RINGS) * area[-1], area, t)
        parts = np.diff(np.append(np.append(0.0, RINGS[:-1]), 1.0)) * area[-1]
        return edges[1:], parts / (0.5 * np.diff(edges**2))

    @cached_property
    def _table(self) -> CubicHermiteSpline:
        """Tabulate G and its slope ∫₀ᵗ c du, by Gauss-Legendre in every cell."""
        reach = float(self.kernel.cutoff(FAINT).max())
        t = np.linspace(0.0, reach, NODES)
        node, weight = np.polynomial.legendre.leggauss(4)
        h = t[1]
        inside = 0.5 * h * (node + 1.0)
        c = self._covariance(t[:-1, None] + inside)
        zeroth = 0.5 * h * (c * weight).sum(1)
        first = 0.5 * h * (c * weight * (h - inside)).sum(1)
        slope = np.concatenate([[0.0], np.cumsum(zeroth)])
        value = np.concatenate([[0.0], np.cumsum(first + h * slope[:-1])])
        return CubicHermiteSpline(t, value, slope)

    @torch.no_grad()
    def _covariance(self, distance: NDArray[np.float64]) -> NDArray[np.float64]:
        device = self.kernel.variance().device
        dx = torch.zeros(*distance.shape, self.kernel.dim, dtype=torch.float64, device=device)
        dx[..., 0] = torch.from_numpy(distance).to(device)
        k = self.kernel(dx)
        return np.asarray((k.expm1() if self.lognormal else k).cpu().numpy())


@final
@dataclass(frozen=True, eq=False)
class BeyondBox:
    """The parts of N rays outside the box, before it and behind it.

    rows (B,): the rays that have something there; spread: the edges of their segments outside,
    E U_k and Var U_k, the weight of the segment within the box being 0; behind: how many segments
    are behind the box; total: N. Over the prior's
    ρ and the star's distance the extinction A = Σ_k a_k U_k of these segments has

        E A = Σ_k E a_k E U_k
        Var A = Σ_ik Cov(a_i, a_k) E U_i U_k + Σ_ik E a_i E a_k Cov(U_i, U_k),

    with E U_i U_k = E U_k for i < k, since U_k > 0 only where U_i = 1. Of the mean of n stars along
    one ray, with distances of their own, Cov(U_i, U_k) is divided by n (`spread.multiplicity`).
    """

    rows: Tensor
    spread: DistanceSpread
    behind: int
    total: int

    @torch.no_grad()
    def moments(self, dust: PriorDust) -> tuple[Tensor, Tensor]:
        """Return E A and Var A (N,), float64; 0 for rays that are in the box from end to end."""
        mean, prior, distances = self.parts(dust)
        return mean, prior + distances + (dust.level_std / dust.level * mean).square()

    @torch.no_grad()
    def expected(self, dust: PriorDust) -> Tensor:
        """Return E A (N,) alone."""
        mean = torch.zeros(self.total, dtype=torch.float64, device=self.rows.device)
        for part in chunks(len(self.rows), RAYS_AT_ONCE):
            rays = self.spread.rays[part]
            mean[self.rows[part]] = (_expected(rays, dust)[1] * rays.weights).sum(-1)
        return mean

    @torch.no_grad()
    def parts(self, dust: PriorDust) -> Tensor:
        """Return E A and the terms of Var A (3, N): of the covariance of ρ, and of distances."""
        parts = torch.zeros(3, self.total, dtype=torch.float64, device=self.rows.device)
        for part in chunks(len(self.rows), RAYS_AT_ONCE):
            parts[:, self.rows[part]] = self._parts(self.spread[part], dust)
        return parts

    @torch.no_grad()
    def outside(self, dust: PriorDust) -> Outside:
        """Return E A behind the box, and what a star is not behind of the dust before it."""
        behind, before = torch.zeros(2, self.total, dtype=torch.float64, device=self.rows.device)
        for part in chunks(len(self.rows), RAYS_AT_ONCE):
            rows, rays = self.rows[part], self.spread.rays[part]
            a = _expected(rays, dust)[1]
            box = a.shape[1] - self.behind - 1
            behind[rows] = (a * rays.weights)[:, box + 1 :].sum(-1)
            before[rows] = (a * (1.0 - rays.weights))[:, :box].sum(-1)
        return Outside(behind, before)

    def tracks(self) -> Tensor:
        """Return direction, distance to the face of the box, and E of the path behind it (N, 5)."""
        rays = self.spread.rays
        out = torch.zeros(self.total, 5, dtype=torch.float64, device=self.rows.device)
        length = (rays.weights * rays.edges.diff(dim=-1))[:, -self.behind :].sum(-1)
        face = rays.edges[:, -1 - self.behind]
        out[self.rows] = torch.cat([rays.direction, face[:, None], length[:, None]], dim=-1)
        return out

    @staticmethod
    def _parts(spread: DistanceSpread, dust: PriorDust) -> Tensor:
        rays = spread.rays
        density, a = _expected(rays, dust)
        size = dust.size(density) * (rays.weights > 0)
        g = dust.between(rays.edges)
        pairs = g[:, :-1, 1:] + g[:, 1:, :-1] - g[:, :-1, :-1] - g[:, 1:, 1:]
        covariance = size[:, :, None] * size[:, None, :] * pairs
        prior = dust.spread * (covariance * spread.joint()).sum((1, 2)).clamp_min(0.0)
        return torch.stack([(a * rays.weights).sum(-1), prior, spread.of_segments(a)])


def _expected(rays: LineIntegrals, dust: PriorDust) -> tuple[Tensor, Tensor]:
    """Return E ρ and E a of the segments (N, K); those of no weight have no dust."""
    length = rays.edges.diff(dim=-1) * (rays.weights > 0)
    density = dust.expected(rays.at(0.5 * (rays.edges[:, 1:] + rays.edges[:, :-1])))
    return density, density * length


def crowding(tracks: Tensor, dust: PriorDust) -> Tensor:
    """Return how many stars see the same dust beyond the box as each of N does: n (N,) >= 1.

    For additions of covariance C ≥ 0 with variances V, diag(V n) − C is not negative definite if
    n_i = Σ_j C_ij / √(V_i V_j), so that noise of V n, independent from star to star, claims no more
    than the correlated one of V. The sum is that of the stars in rings around i on the sky, each
    star times the mean of c(t) / c(0) in its ring, and times the mean correlation of the depths of
    the nearest 16 of them. Rays at an angle θ are t = θ s apart, s² the face of the box times the
    end of the dust, so that stars all over the sky have their density times 2π ∫c t dt / c(0) / s².
    """
    out = torch.ones(len(tracks), dtype=torch.float64, device=tracks.device)
    values = tracks.cpu().numpy()
    rows = np.flatnonzero(values[:, 4] > 0.0)
    count = min(NEIGHBOURS, len(rows) - 1)
    if count < 1:
        return out
    direction, face, path = values[rows, :3], values[rows, 3], values[rows, 4]
    middle = np.sqrt(face * (face + path))
    apart, others = cKDTree(direction).query(direction, k=np.arange(2, count + 2))
    radii, weights = dust.rings()
    chords = 2.0 * np.sin(0.5 * np.minimum(radii / middle[:, None], np.pi))
    number = weighted_neighbours(direction, chords, weights)
    near = apart <= chords[:, -1:]
    depths = np.where(near, dust.correlation(path[:, None], path[others]), 0.0).sum(1)
    number *= depths / np.maximum(near.sum(1), 1)
    out[torch.from_numpy(rows).to(out.device)] += torch.from_numpy(number).to(out.device)
    return out


@final
@dataclass(frozen=True, eq=False)
class SightLines:
    """The mean extinction of N stars, E A(<d) = ∫ρ(s) sf(s) ds, as functionals of the density.

    Attributes
    ----------
    rays : N line integrals weighted by sf(s) = P(d > s), 1 up to a known distance
    rows : (N,), the stars they come from
    counts : rays that were truncated at the box, and those left out
    spread : what the distances add to the variance; None where they are known
    cut : stars of which more than 1e-3 of the expected distance lies beyond the last edge
    beyond : parts of the rays outside the box, where dust is expected there
    outside : stars whose median place is outside the box, of all that were given
    """

    rays: LineIntegrals
    rows: NDArray[np.int64]
    counts: functionals.Counts
    spread: DistanceSpread | None
    outside: int
    cut: int = 0
    beyond: BeyondBox | None = None

    def __len__(self) -> int:
        return len(self.rows)


def sight_lines(
    l: Array,
    b: Array,
    distances: AbstractDistances,
    grid: RegularGrid,
    outside: OutsidePolicy,
    device: torch.device | None = None,
    *,
    may_be_none: bool = False,
) -> SightLines:
    """Make rays from the Sun to stars, in the box of the grid.

    Every random rule knows a ray by its row, so that batches do not change it. A ray that loses
    at most 1e-3 of its weight at the box is truncated under every policy.

    Parameters
    ----------
    l, b : (N,), in degrees
    distances : distributions of the N distances
    grid, outside : the box, and what becomes of rays that leave it
    device : of the rays
    may_be_none : whether stars of which none is seen through the box are not refused

    Examples
    --------
    >>> from dustmap.sky.stars import GaussianDistances
    >>> grid = RegularGrid((-200.0,) * 3, (20.0,) * 3, (21,) * 3)
    >>> distances = GaussianDistances(np.array([100.0]), np.array([10.0]))
    >>> l, b = np.array([[0.0], [0.0]])
    >>> lines = sight_lines(l, b, distances, grid, OutsidePolicy.TRUNCATE)
    >>> lines.rays.moments()[:, 0].round(decimals=1)  # ∫ P(d > s) ds, the mean distance
    tensor([100.], dtype=torch.float64)
    """
    if distances.exact:
        segments, negligible, median = None, 0.0, distances.median
        positions = torch.from_numpy(cartesian(l, b, median)).to(device)
        whole = LineIntegrals.from_observer(positions)
    else:
        quantiles, negligible = _segments.quantiles_of(distances), _segments.NEGLIGIBLE
        segments, median = _segments.segments_of(quantiles), quantiles[:, _segments.MEDIAN]
        whole = rays_towards(l, b, *_tensors(device, segments.edges, segments.mean))
    far = int((~grid.contains(torch.from_numpy(cartesian(l, b, median)))).sum())
    rays, kept, counts = whole.clipped(grid.lower, grid.upper, outside, negligible)
    rows = kept.cpu().numpy()
    if not may_be_none:
        refuse_nothing(len(rows), len(l), grid)
    if segments is None:
        quantiles = _segments.quantiles_of(distances[rows])
    elif len(rows) < len(quantiles):
        quantiles = quantiles[rows]
    beyond = _beyond(rays, quantiles, grid) if outside is OutsidePolicy.PRIOR else None
    if segments is None:
        return SightLines(rays, rows, counts, None, far, beyond=beyond)
    spread = _within(rays, segments[rows], quantiles)
    cut = int(segments.cut[rows].sum())
    return SightLines(spread.rays, rows, counts, spread, far, cut, beyond)


def rays_towards(
    l: Array, b: Array, edges: Tensor, weights: Tensor, *keys: Tensor
) -> LineIntegrals:
    """Make rays from the Sun in directions (N,) in degrees, of these segments and keys."""
    omega = torch.from_numpy(cartesian(l, b, np.ones(len(l)))).to(edges.device)
    omega = omega / omega.norm(dim=-1, keepdim=True)
    return LineIntegrals(torch.zeros_like(omega), omega, edges, weights, *keys)


def refuse_nothing(rays: int, stars: int, grid: RegularGrid) -> None:
    """Refuse stars of which none has a ray in the box."""
    if rays == 0:
        raise UserError(
            f"none of the {stars} stars is seen through the box {grid.lower} to "
            f"{grid.upper} pc; move or enlarge it (grid.center, grid.size)"
        )


def _beyond(rays: LineIntegrals, quantiles: Array, grid: RegularGrid) -> BeyondBox:
    """Cut the rays of the stars before and behind the box."""
    enter, leave = (
        face.clamp_min(0.0).cpu().numpy()
        for face in functionals.chord(rays.origin, rays.direction, grid.lower, grid.upper)
    )
    far = quantiles[:, len(_segments.EDGES) - 1]
    rows = np.flatnonzero((enter > 0.0) | (far > leave * (1.0 + functionals.FACE_SLACK)))
    own = quantiles[rows]
    behind = _segments.segments_of(own, leave[rows]).subdivided(PIECES)
    before = Segments.none(np.zeros(len(rows)))
    if (enter > 0.0).any():
        before = _segments.segments_of(own, far=enter[rows])
    index = torch.from_numpy(rows).to(rays.device)
    spread = _spread(rays[index], before.apart_from(behind))
    return BeyondBox(index, spread, behind.mean.shape[1], len(rays))


def _within(rays: LineIntegrals, whole: Segments, quantiles: Array) -> DistanceSpread:
    """Clip the distances of N rays, and their segments, to what the box has left of the rays."""
    edges = rays.edges.cpu().numpy()
    short = np.flatnonzero((edges != whole.edges).any(1))
    if len(short) > 0:
        clipped = _segments.segments_of(quantiles[short], edges[short, 0], edges[short, -1])
        whole = whole.with_rows(short, clipped)
    return _spread(rays, whole)


def _spread(rays: LineIntegrals, segments: Segments) -> DistanceSpread:
    edges, mean, variance = _tensors(rays.device, segments.edges, segments.mean, segments.variance)
    return DistanceSpread(replace(rays, edges=edges, weights=mean), variance)


def _tensors(device: torch.device | None, *arrays: Array) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def predict_extinction(
    posterior: AbstractPosterior,
    lines: SightLines,
    beyond: PriorDust | None = None,
    samples: int = 32,
    seed: int = 0,
    gains: Tensor | None = None,
) -> Prediction:
    """Predict A(<d): mean and variance (N,) over the posterior of ρ and the distribution of d.

        E A = E_ρ ∫ρ sf ds,    Var A = Var_ρ ∫ρ sf ds + E_ρ Var_d A(<d)

    The last term is the mean over draws of the posterior; 0 for known distances.

    Parameters
    ----------
    posterior, lines
    beyond : the dust of the parts outside the box, where the lines have any
    samples, seed : of the draws, at most so many of those that a posterior has
    gains : (N,) or None
        E(1 + s) of measurements that are so many times A, where the rays have groups; None for A.

    Examples
    --------
    >>> from dustmap.gp import ConstantMean, ExactGP, functionals
    >>> from dustmap.gp.kernels import Matern32
    >>> from dustmap.sky.stars import ExactDistances
    >>> prior = ExactGP(Matern32(50.0, 1e-6, dim=3), ConstantMean(0.002, learn=False))
    >>> at = functionals.PointValues(torch.zeros(1, 3, dtype=torch.float64))
    >>> y, noise_variance = torch.tensor([[0.002], [1e-6]], dtype=torch.float64)
    >>> posterior = prior.condition(at, y, noise_variance)
    >>> l, b, distance = np.array([[0.0], [0.0], [100.0]])
    >>> grid = RegularGrid((-200.0,) * 3, (20.0,) * 3, (21,) * 3)
    >>> lines = sight_lines(l, b, ExactDistances(distance), grid, OutsidePolicy.ERROR)
    >>> predict_extinction(posterior, lines).mean
    tensor([0.2000], dtype=torch.float64)
    """
    inside = posterior.predict(lines.rays)
    mean, variance = inside.mean, inside.variance
    gains = torch.ones_like(mean) if gains is None else gains.to(mean)
    if lines.beyond is not None and beyond is not None:
        more, apart = lines.beyond.moments(beyond)
        mean, variance = mean + gains * more.to(mean), variance + gains.square() * apart.to(mean)
    if lines.spread is not None:
        outside = None
        if lines.beyond is not None and beyond is not None:
            outside = lines.beyond.outside(beyond)
        added = lines.spread.added_variance(posterior, samples, seed, outside)
        variance = variance + gains.square() * added.to(mean)
    return Prediction(mean, variance, inside.clamped)
