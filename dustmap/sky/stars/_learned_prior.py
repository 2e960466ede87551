"""The distribution of a survey's distances, from its own parallaxes: deconvolution by penalised
maximum likelihood."""

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve
from scipy.optimize import minimize
from scipy.special import ndtr
from threadpoolctl import threadpool_limits

from dustmap.sky.stars._distances import ParallaxDistances
from dustmap.sky.stars._priors import MAS_PC, Array, ExponentialDensity, SurveyRatio, ToLearn

#: Stars from which more than the scale is learned, and the most that are used.
LEAST, MOST = 200, 20_000
#: Cells of ln d, the least distance in pc, and the most that ln p falls below its maximum.
_STEP, _NEAREST, _DEEPEST = 0.04, 1.0, 20.0
#: Logarithm of a fall that is deeper than that at any t.
_OVER = 100.0
#: Most classes of parallax errors that have a ratio of their own, and the fewest stars of each.
_CLASSES, _FEWEST = 8, 100
#: A parallax that so many errors below zero cannot be one.
_STRANGE = 5.0
#: Stars within 5 % of the lowest of a sample that was cut there, at least, and the most of all.
_AT_EDGE, _MOST_AT_EDGE = 20, 0.3
#: A limit beyond which distances are as the parallaxes have them, whatever the distribution.
_HARMLESS = 20.0
#: Groups of errors, and the least probability to be in a cut sample.
_GROUPS, _LEAST_SEEN = 64, 1e-12
#: Probability to be in a cut sample, in the mean, up to which a place has a part in it.
_RARE = 1e-3
#: Standard deviation of the prior of ln scale, around the scale that is stated.
_SCALE_STD = 1.0
#: Standard deviations of the priors of ln (a/2) and of ln b, and the largest b that cells resolve.
_RISE_STD, _END_STD, _STEEPEST = 0.5, 3.0, 40.0
#: Weights of the roughness of ln r that are tried, and where Newton's steps end, in nats.
_ROUGHNESS = 10.0 ** np.array([4.9, 3.4, 1.9, 0.4])
_STEPS, _SETTLED = 30, 1e-2
_QUANTILES = (0.05, 0.16, 0.5, 0.84, 0.95)


@final
@dataclass(frozen=True)
class SampleCuts:
    """The lower limit c of ϖ/σ by which a sample was cut; -inf for none."""

    over_error: float = -np.inf

    @staticmethod
    def of(parallax: Array, error: Array) -> "SampleCuts":
        """Find the limit that parallaxes and errors (n,) in mas show: many are at the lowest of a
        cut sample, hardly any at that of another.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> parallax = 1e3 / rng.gamma(3.0, 300.0, 5000) + 0.2 * rng.standard_normal(5000)
        >>> kept, error = parallax > 5.0 * 0.2, np.full(5000, 0.2)
        >>> round(SampleCuts.of(parallax[kept], error[kept]).over_error, 2)
        5.0
        >>> SampleCuts.of(parallax, error)
        SampleCuts(over_error=-inf)
        """
        over = parallax / error
        low = float(over.min())
        first, second = (np.sum((k * low <= over) & (over < (k + 0.05) * low)) for k in (1.0, 1.05))
        is_cut = 0.0 < low < _HARMLESS and first >= _AT_EDGE and 2 * first >= second
        # Members of a cluster with errors alike are all at one place.
        return SampleCuts(low if is_cut and first < _MOST_AT_EDGE * len(over) else -np.inf)

    def seen(self, error: Array, bounds: Array) -> Array:
        """Return the mean of P(ϖ > c σ | d, σ) (n, K) over cells of the true parallax between
        bounds (K + 1,), descending, in mas."""
        if not np.isfinite(self.over_error):
            return np.ones((len(error), len(bounds) - 1))
        z = bounds / error[:, None] - self.over_error
        integral = z * ndtr(z) + np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
        mean = np.diff(integral) / np.diff(z)
        return np.asarray(mean.clip(_LEAST_SEEN, 1.0), np.float64)

    def as_dict(self) -> dict[str, float]:
        """Return the limit, if there is one."""
        limit = self.over_error
        return {"cut_at_parallax_over_error": limit} if np.isfinite(limit) else {}


@final
@dataclass(frozen=True)
class LearnedPrior:
    """A distance prior learned from `used` of the `stars`.

    strange: those among the used ones whose parallax is too negative to say anything; cuts: by
    which the stars were selected, which the distribution is free of.
    """

    prior: ExponentialDensity
    stars: int
    used: int
    strange: int
    cuts: SampleCuts

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for provenance and reports."""
        (d, p), ratio = _distribution(self.prior), self.prior.ratio
        names = [f"distance_p{100 * q:02.0f}_pc" for q in _QUANTILES]
        quantiles = np.interp(_QUANTILES, np.cumsum(p), d).tolist()
        return {
            "prior": "learned from the parallaxes",
            "scale_pc": self.prior.scale,
            "nonparametric": ratio is not None,
            "classes_of_errors": 0 if ratio is None else len(ratio.values),
            "stars": self.stars,
            "stars_used": self.used,
            "stars_too_negative": self.strange,
            **self.cuts.as_dict(),
            **dict(zip(names, quantiles, strict=True)),
        }


@final
class ParallaxSample:
    """At most MOST stars, taken evenly from all that are added, whatever their number."""

    def __init__(self) -> None:
        self._every, self._seen = 1, 0
        self._rows = np.empty((0, 3))

    def __len__(self) -> int:
        return self._seen

    def add(self, distances: ParallaxDistances, numbers: NDArray[np.int64] | None = None) -> None:
        """Add stars. numbers (N,): by which `learned` leaves some out, from 0 on by default."""
        if numbers is None:
            numbers = self._seen + np.arange(len(distances))
        first = -self._seen % self._every
        taken = slice(first, None, self._every)
        new = np.stack([distances.parallax, distances.error, numbers], axis=1)[taken]
        self._rows = np.concatenate([self._rows, new])
        self._seen += len(distances)
        while len(self._rows) > MOST:
            self._rows, self._every = self._rows[::2], 2 * self._every

    def learned(self, wanted: ToLearn, without: NDArray[np.int64] | None = None) -> LearnedPrior:
        """Learn the distribution p(d) of the stars' distances, selection included.

        without: numbers of stars that do not count, such as those that repeat an earlier one.

        d² exp(−d/L), L of largest posterior under a log-normal prior around wanted.scale. From
        LEAST stars on dᵃ exp(−(d/D)ᵇ), a, b and D of largest posterior, times r(d), ln r a spline
        in ln d whose second differences are normal, with the variance of largest (Laplace)
        evidence. So is what classes of stars with similar errors differ by: faint stars are not
        where bright ones are. Where the sample was cut at a parallax over its error, each star's
        likelihood is over the probability that it would be in the sample.
        """
        without = np.empty(0, np.int64) if without is None else without
        parallax, error = self._rows[~np.isin(self._rows[:, 2], without), :2].T
        usable = parallax > -_STRANGE * error
        strange = int((~usable).sum())
        prior, cuts = wanted.stated, SampleCuts()
        if usable.any():
            cuts = SampleCuts.of(parallax[usable], error[usable])
            # Products with a matrix of a few cells are short: threads wait for each other, many
            # times as long where other processes want the cores.
            with threadpool_limits(1, "blas"):
                prior = _learned(parallax[usable], error[usable], prior, cuts)
        return LearnedPrior(prior, self._seen - len(without), len(parallax), strange, cuts)


@final
@dataclass(frozen=True, eq=False)
class _Stars:
    """likelihood (n, K): of parallaxes in cells of ln d, over its largest. seen (G, K): probability
    that one of a group of `number` (G,) stars with similar errors is in the sample, there."""

    likelihood: Array
    seen: Array
    number: Array

    @staticmethod
    def of(likelihood: Array, error: Array, cells: Array, cuts: SampleCuts) -> "_Stars":
        """cells (K + 1,): bounds of the true parallax in mas, descending."""
        groups = np.array_split(np.sort(error), min(len(error), _GROUPS))
        seen = cuts.seen(np.array([group.mean() for group in groups]), cells)
        return _Stars(likelihood, seen, np.array([float(len(group)) for group in groups]))

    def __len__(self) -> int:
        return len(self.likelihood)

    def log_probability(self, p: Array) -> float:
        """Return Σ_n ln (Σ_k L_nk p_k / Σ_k s_nk p_k) of a density p (K,)."""
        with np.errstate(divide="ignore"):  # of a density without a place for a star
            seen = float(self.number @ np.log(self.seen @ p))
            return float(np.log(self.likelihood @ p).sum()) - seen if seen > -np.inf else seen

    def gain(self, p: Array) -> Array:
        """Return the derivative of that (K,) in ln p_k."""
        stars, seen = self.likelihood @ p, self.seen @ p
        return p * (self.likelihood.T @ (1.0 / stars) - self.seen.T @ (self.number / seen))

    def curvature(self, p: Array) -> tuple[Array, Array]:
        """Return Σ_n (diag q_n − q_n q_nᵀ) (K, K) of q_nk ∝ s_nk p_k, and of q_nk ∝ L_nk p_k."""
        every = np.ones(len(self))
        return _spread(self.seen, p, self.number), _spread(self.likelihood, p, every)


def _spread(weights: Array, p: Array, number: Array) -> Array:
    """Return Σ_n m_n (diag q_n − q_n q_nᵀ) (K, K) of q_nk ∝ w_nk p_k, of weights (N, K)."""
    scaled = weights / (weights @ p)[:, None]
    scaled *= np.sqrt(number)[:, None]
    return np.diag(p * (np.sqrt(number) @ scaled)) - np.outer(p, p) * (scaled.T @ scaled)


def _learned(
    parallax: Array, error: Array, stated: ExponentialDensity, cuts: SampleCuts
) -> ExponentialDensity:
    bounds = _bounds(parallax, error, stated.distance_max)
    # Of what is hardly ever seen the sample says nothing: there r stays as it is.
    seen = cuts.seen(np.quantile(error, _QUANTILES), MAS_PC * np.exp(-bounds)).mean(0)
    bounds = bounds[: np.flatnonzero(seen > _RARE)[-1] + 2]
    t = 0.5 * (bounds[1:] + bounds[:-1])
    cells = MAS_PC * np.exp(-bounds)
    likelihood = _likelihood(parallax[:, None], error[:, None], cells)
    stars = _Stars.of(likelihood, error, cells, cuts)
    scale = _scale(stars, t, stated.scale)
    if len(parallax) < LEAST:
        return replace(stated, scale=scale)
    volume = 3.0 * t - np.exp(t) / scale
    common = _end_of_survey(stars, t, scale)
    common = common + _log_ratio(stars, common)
    limits = _limits(error)
    kind = np.searchsorted(limits, error)
    own = [kind == k for k in range(len(limits) + 1)]
    classes = (_Stars.of(likelihood[rows], error[rows], cells, cuts) for rows in own)
    values = [common + _log_ratio(each, common) for each in classes]
    table = tuple(tuple((_floored(row) - volume).tolist()) for row in values)
    ratio = SurveyRatio(float(t[0]), float(t[1] - t[0]), table, tuple(limits.tolist()))
    return replace(stated, scale=scale, ratio=ratio)


def _bounds(parallax: Array, error: Array, distance_max: float) -> Array:
    """Bound the cells of ln d, from the nearest of the stars on."""
    last = np.log(distance_max)
    nearest = max(_NEAREST, MAS_PC / float((parallax + (2.0 + _STRANGE) * error).max()))
    first = min(np.log(nearest), last - 1.0)
    return np.linspace(first, last, 1 + int(np.ceil((last - first) / _STEP)))


def _limits(error: Array) -> Array:
    """Return the errors between the classes."""
    classes = min(_CLASSES, len(error) // _FEWEST)
    parts = np.arange(1, classes) / max(classes, 1)
    limits = np.unique(np.quantile(error, parts, method="lower"))  # no class is empty
    return np.asarray(limits[limits < error.max()], np.float64)


def _likelihood(parallax: Array, error: Array, bounds: Array) -> Array:
    """Return ∫N(ϖ; x, σ) dx / Δx over every cell of the true parallax x, over its largest (n, K).

    Exact for a density that is constant in the cell, even for errors much below the cell.
    """
    z = (bounds - parallax) / error
    # Differences of whichever tail is the smaller.
    upper, lower = z[:, :-1], z[:, 1:]
    above = lower > 0.0
    mass = np.where(above, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
    density = mass / -np.diff(bounds)
    # A parallax far above all cells is that of the nearest.
    density[:, 0] += np.where(density.max(axis=1) > 0.0, 0.0, 1.0)
    return np.asarray(density / density.max(axis=1, keepdims=True), np.float64)


def _scale(stars: _Stars, t: Array, stated: float) -> float:
    """Find L of the largest posterior, to 1 %."""
    scales = np.exp(np.arange(t[0] - 1.0, t[-1], 0.01))
    if len(scales) == 0:
        return stated

    def log_posterior(scale: float) -> float:
        p = _normalised(3.0 * t - np.exp(t) / scale)
        off = np.log(scale / stated) / _SCALE_STD
        return stars.log_probability(p) - float(0.5 * off**2)

    low, high = 0, len(scales) - 1
    while high - low > 2:  # unimodal in the scale
        a, b = low + (high - low) // 3, high - (high - low) // 3
        if log_posterior(scales[a]) < log_posterior(scales[b]):
            low = a + (a == low)
        else:
            high = b - (b == high)
    return float(max(scales[low : high + 1], key=log_posterior))


def _end_of_survey(stars: _Stars, t: Array, scale: float) -> Array:
    """Return ln of d times dᵃ exp(−(d/D)ᵇ) (K,), with a, b and D of the largest posterior.

    A survey may end at once, which second differences of ln r take for roughness: fits then hold
    stars at the end for farther than they are.
    """
    # A soft end at the scale, and a hard one behind most stars.
    starts = ([0.0, 0.0, np.log(scale)], [0.0, 1.5, np.log(3.0 * scale)])
    bounds = [(None, None), (None, np.log(_STEEPEST)), (t[0] - 1.0, t[-1] + 3.0)]
    options = {"ftol": _SETTLED / (100.0 * len(stars))}
    ends = [
        minimize(_end_energy, x, (stars, t), jac=True, bounds=bounds, options=options)
        for x in starts
    ]
    return _density_to_the_end(min(ends, key=lambda end: float(end.fun)).x, t)[0]


def _density_to_the_end(x: Array, t: Array) -> tuple[Array, Array]:
    """Return (1 + a) t − exp(b (t − ln D)) (K,) at x = (ln a/2, ln b, ln D), and its derivatives
    in x (3, K)."""
    rise, steep = 2.0 * np.exp(x[0]), np.exp(x[1])
    away = steep * (t - x[2])
    fall = np.exp(np.minimum(away, _OVER))
    value = (1.0 + rise) * t - fall
    slope = np.stack([rise * t, -fall * away, fall * steep])
    top = int(value.argmax())
    slope[:, value < value[top] - _DEEPEST] = slope[:, top, None]
    return _floored(value), slope


def _end_energy(x: Array, stars: _Stars, t: Array) -> tuple[float, Array]:
    """Return −ln of the posterior of x, without constants, and its gradient (3,)."""
    value, slope = _density_to_the_end(x, t)
    p = _normalised(value)
    unlikely = np.array([x[0] / _RISE_STD**2, x[1] / _END_STD**2, 0.0])
    energy = float(0.5 * unlikely @ x) - stars.log_probability(p)
    return energy, unlikely - slope @ stars.gain(p)


def _log_ratio(stars: _Stars, base: Array) -> Array:
    """Return ln r (K,) at the roughness of the largest evidence."""
    difference = np.diff(np.eye(len(base)), n=2, axis=0)
    penalty = difference.T @ difference
    best, ratio, f = -np.inf, np.zeros_like(base), np.zeros_like(base)
    for weight in _ROUGHNESS:
        f, evidence = _fitted(stars, base, weight * penalty, f)
        evidence += 0.5 * len(difference) * np.log(weight)
        if evidence > best:
            best, ratio = evidence, f
    return ratio


def _fitted(stars: _Stars, base: Array, penalty: Array, f: Array) -> tuple[Array, float]:
    """Maximise Σ ln (Σ_k L_nk p_k / Σ_k s_nk p_k) − fᵀPf/2, p ∝ exp(base + f), over f; return f and
    ln of Laplace's integral, without the constants of P."""
    # The constant is free: any curvature holds it.
    penalty = penalty + 1e-6 * np.eye(len(base))

    def objective(f: Array) -> float:
        p = _normalised(base + f)
        return stars.log_probability(p) - float(0.5 * f @ penalty @ f)

    value = objective(f)
    for _ in range(_STEPS):
        p = _normalised(base + f)
        gradient = stars.gain(p) - penalty @ f
        complete, missing = stars.curvature(p)
        complete = complete + penalty
        # Where it is not concave, as much of the missing data's curvature as leaves it so.
        for part in (1.0, 0.9, 0.7, 0.0):
            try:
                factor = np.linalg.cholesky(complete - part * missing)
                break
            except np.linalg.LinAlgError:
                continue
        step = cho_solve((factor, True), gradient)
        length, gain = 1.0, -np.inf
        while length > 1e-6 and not (gain := objective(f + length * step) - value) >= 0.0:
            length *= 0.5
        if not gain > 0.0:
            break
        f, value = f + length * step, value + gain
        if gain < _SETTLED:
            break
    return f - f.mean(), value - float(np.log(np.diag(factor)).sum())


def _floored(log_density: Array) -> Array:
    """Lift to at most _DEEPEST below its maximum."""
    return np.asarray(np.maximum(log_density, log_density.max() - _DEEPEST), np.float64)


def _normalised(log_density: Array) -> Array:
    p = np.exp(log_density - log_density.max())
    return np.asarray(p / p.sum(), np.float64)


def _distribution(prior: ExponentialDensity) -> tuple[Array, Array]:
    """Return distances and their probabilities, over all classes, of as many stars each."""
    t = np.linspace(np.log(0.01 * _NEAREST), np.log(prior.distance_max), 4000)
    volume = 3.0 * t - np.exp(t) / prior.scale
    if prior.ratio is None:
        return np.exp(t), _normalised(volume)
    errors = np.array([*prior.ratio.bounds, np.inf])[:, None]
    each = [_normalised(volume + row) for row in prior.ratio.at(t[None, :], errors)[0]]
    return np.exp(t), np.mean(each, axis=0)
