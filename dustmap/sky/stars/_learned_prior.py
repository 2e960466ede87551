"""The distribution of a survey's distances, from its own parallaxes: deconvolution by penalised
maximum likelihood."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from scipy.special import ndtr

from dustmap.sky.stars._density_prior import ExponentialDensity
from dustmap.sky.stars._distances import Array
from dustmap.sky.stars._log_ratio import LogRatio
from dustmap.sky.stars._parallax import MAS_PC, ParallaxDistances

#: Stars from which more than the scale is learned, and the most that are used.
LEAST, MOST = 200, 50_000
#: Cells of ln d, and the least distance in pc.
_STEP, _NEAREST = 0.08, 1.0
#: A parallax that so many errors below zero cannot be one.
_STRANGE = 5.0
#: Standard deviation of the prior of ln scale, around the scale that is stated.
_SCALE_STD = 1.0
#: Weights of the roughness of ln r that are tried, and where Newton's steps end, in nats.
_ROUGHNESS = 10.0 ** np.arange(5, -2, -1)
_STEPS, _SETTLED = 60, 1e-3
_QUANTILES = (0.05, 0.16, 0.5, 0.84, 0.95)


@final
@dataclass(frozen=True)
class LearnedPrior:
    """prior: what was learned; used: stars it was learned from, of `stars`; strange: those among
    the used ones whose parallax is too negative to say anything."""

    prior: ExponentialDensity
    stars: int
    used: int
    strange: int

    def as_dict(self) -> dict[str, Any]:
        """For provenance and reports: plain values."""
        d, p = _distribution(self.prior)
        quantiles = np.interp(_QUANTILES, np.cumsum(p), d).tolist()
        return {
            "prior": "learned from the parallaxes",
            "scale_pc": self.prior.scale,
            "nonparametric": self.prior.ratio is not None,
            "stars": self.stars,
            "stars_used": self.used,
            "stars_too_negative": self.strange,
            **{f"p{100 * q:02.0f}_pc": x for q, x in zip(_QUANTILES, quantiles, strict=True)},
        }


@final
class ParallaxSample:
    """At most MOST stars, evenly spread over all that are added, whatever their number."""

    def __init__(self) -> None:
        self._every, self._seen = 1, 0
        self._rows = np.empty((0, 2))

    def add(self, distances: ParallaxDistances) -> None:
        first = -self._seen % self._every
        taken = slice(first, None, self._every)
        new = np.stack([distances.parallax[taken], distances.error[taken]], axis=1)
        self._rows = np.concatenate([self._rows, new])
        self._seen += len(distances)
        while len(self._rows) > MOST:
            self._rows, self._every = self._rows[::2], 2 * self._every

    def learned(self, scale: float, distance_max: float) -> LearnedPrior:
        """p(d) of the stars, selection included; scale: what is expected of their density."""
        parallax, error = self._rows.T
        usable = parallax > -_STRANGE * error
        strange = int((~usable).sum())
        prior = ExponentialDensity(scale, distance_max)
        if usable.any():
            prior = _learned(parallax[usable], error[usable], prior)
        return LearnedPrior(prior, self._seen, len(parallax), strange)


def learn_prior(
    distances: ParallaxDistances, scale: float = 1350.0, distance_max: float = 10_000.0
) -> LearnedPrior:
    """The distribution of these stars' distances, from their parallaxes.

    d² exp(−d/L), L of maximum likelihood under a log-normal prior around `scale`; from LEAST stars
    on times r(d), ln r a spline in ln d whose second differences are normal, with a variance of
    largest (Laplace) evidence. Magnitude limits and other selections are part of it.
    """
    sample = ParallaxSample()
    sample.add(distances)
    return sample.learned(scale, distance_max)


def _learned(parallax: Array, error: Array, stated: ExponentialDensity) -> ExponentialDensity:
    last = np.log(stated.distance_max)
    nearest = max(_NEAREST, MAS_PC / float((parallax + 2.0 * error).max()))
    first = min(np.log(nearest), last - 1.0)
    cells = int(np.ceil((last - first) / _STEP))
    bounds = np.linspace(first, last, cells + 1)
    t = 0.5 * (bounds[1:] + bounds[:-1])
    likelihood = _likelihood(parallax, error, MAS_PC * np.exp(-bounds))
    scale = _scale(likelihood, t, stated.scale)
    if len(parallax) < LEAST:
        return ExponentialDensity(scale, stated.distance_max)
    values = _log_ratio(likelihood, 3.0 * t - np.exp(t) / scale)
    ratio = LogRatio(float(t[0]), float(t[1] - t[0]), tuple(values.tolist()))
    return ExponentialDensity(scale, stated.distance_max, ratio)


def _likelihood(parallax: Array, error: Array, bounds: Array) -> Array:
    """∫N(ϖ; x, σ) dx / Δx over every cell of the true parallax x, over its largest (n, K).

    Exact for a density that is constant in the cell: an error much below the cell does no harm.
    """
    z = (bounds[None, :] - parallax[:, None]) / error[:, None]
    # Differences of whichever tail is the smaller.
    upper, lower = z[:, :-1], z[:, 1:]
    above = lower > 0.0
    mass = np.where(above, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
    found = mass / -np.diff(bounds)
    # A parallax far above all cells is that of the nearest.
    found[:, 0] += np.where(found.max(axis=1) > 0.0, 0.0, 1.0)
    return np.asarray(found / found.max(axis=1, keepdims=True), np.float64)


def _scale(likelihood: Array, t: Array, stated: float) -> float:
    """L of the largest posterior, to 1 %."""
    scales = np.exp(np.arange(t[0] - 1.0, t[-1], 0.01))
    if len(scales) == 0:
        return stated

    def log_posterior(scale: float) -> float:
        p = _normalised(3.0 * t - np.exp(t) / scale)
        off = np.log(scale / stated) / _SCALE_STD
        return float(np.log(likelihood @ p).sum() - 0.5 * off**2)

    low, high = 0, len(scales) - 1
    while high - low > 2:  # unimodal in the scale
        a, b = low + (high - low) // 3, high - (high - low) // 3
        if log_posterior(scales[a]) < log_posterior(scales[b]):
            low = a + (a == low)
        else:
            high = b - (b == high)
    return float(max(scales[low : high + 1], key=log_posterior))


def _log_ratio(likelihood: Array, base: Array) -> Array:
    """ln r (K,) at the roughness of the largest evidence."""
    difference = np.diff(np.eye(len(base)), n=2, axis=0)
    penalty = difference.T @ difference
    best, found, f = -np.inf, np.zeros_like(base), np.zeros_like(base)
    for weight in _ROUGHNESS:
        f, evidence = _fitted(likelihood, base, weight * penalty, f)
        evidence += 0.5 * len(difference) * np.log(weight)
        if evidence > best:
            best, found = evidence, f
    return found


def _fitted(likelihood: Array, base: Array, penalty: Array, f: Array) -> tuple[Array, float]:
    """The f that maximises Σ ln Σ_k L_nk p_k − fᵀPf/2, p ∝ exp(base + f), and the logarithm of
    Laplace's integral, without the constants of P."""
    n = len(likelihood)
    # The constant is free: any curvature holds it.
    penalty = penalty + 1e-6 * np.eye(len(base))

    def objective(f: Array) -> float:
        p = _normalised(base + f)
        return float(np.log(likelihood @ p).sum() - 0.5 * f @ penalty @ f)

    value = objective(f)
    for _ in range(_STEPS):
        p = _normalised(base + f)
        share = likelihood * p
        share /= share.sum(axis=1, keepdims=True)
        counts = share.sum(axis=0)
        gradient = counts - n * p - penalty @ f
        complete = n * (np.diag(p) - np.outer(p, p)) + penalty
        hessian = complete - np.diag(counts) + share.T @ share
        # Where it is not concave, the curvature of the complete data.
        safe = hessian if np.linalg.eigvalsh(hessian)[0] > 0.0 else complete
        step = np.linalg.solve(safe, gradient)
        length, gain = 1.0, -np.inf
        while length > 1e-6 and not (gain := objective(f + length * step) - value) >= 0.0:
            length *= 0.5
        if not gain > 0.0:
            break
        f, value = f + length * step, value + gain
        if gain < _SETTLED:
            break
    determinant = np.linalg.slogdet(safe)[1]
    return f - f.mean(), value - 0.5 * float(determinant)


def _normalised(log_density: Array) -> Array:
    p = np.exp(log_density - log_density.max())
    return np.asarray(p / p.sum(), np.float64)


def _distribution(prior: ExponentialDensity) -> tuple[Array, Array]:
    """Distances and their probabilities."""
    t = np.linspace(np.log(_NEAREST * 1e-2), np.log(prior.distance_max), 4000)
    no_parallax = (np.zeros(1), np.full(1, 1e9))
    return np.exp(t), _normalised(prior.log_density(*no_parallax, t)[0])
