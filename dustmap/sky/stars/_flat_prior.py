"""A prior that is flat in 1/d: closed forms."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtri_exp

from dustmap.sky.stars._distances import Array
from dustmap.sky.stars._parallax import MAS_PC, AbstractDistancePrior, check_scale


@final
@dataclass(frozen=True)
class FlatParallax(AbstractDistancePrior):
    """Flat in 1/d for d ≤ distance_max: the true parallax is N(ϖ, σ²) above a = 1/distance_max.

        P(D > d) = P(a < ϖ' < 1/d) / P(ϖ' > a) = 1 − Q((1/d − ϖ)/σ) / Q((a − ϖ)/σ)

    with Q = 1 − Φ, from logarithms of Q and their differences: no tail loses its digits.
    """

    distance_max: float

    def __post_init__(self) -> None:
        check_scale("distance_max", self.distance_max)

    def survival(self, parallax: Array, error: Array, d: Array) -> Array:
        least = MAS_PC / self.distance_max
        start = (least - parallax) / error
        with np.errstate(divide="ignore"):
            step = np.maximum(MAS_PC / d - least, 0.0) / error
        return np.asarray(-np.expm1(_log_tail_ratio(start, step)), np.float64)

    def quantile(self, parallax: Array, error: Array, p: Array) -> Array:
        least = MAS_PC / self.distance_max
        start = (least - parallax) / error
        # Q(x) = p Q(start); from the nearer of the two ends, ϖ and a.
        with np.errstate(divide="ignore"):
            log_p = np.log(p)[None, :]
            x = -ndtri_exp(log_p + log_ndtr(-start))
        step = _polished(start, np.maximum(x - start, 0.0), log_p)
        true = np.where(start > 0.0, least + error * step, parallax + error * x)
        d = MAS_PC / np.maximum(true, least)
        return np.asarray(np.minimum(d, self.distance_max), np.float64)

    def attributes(self) -> dict[str, Any]:
        return {"distance_prior": "flat-parallax", "distance_max_pc": self.distance_max}


def _polished(start: Array, step: Array, log_p: Array) -> Array:
    """Newton's steps to ln Q(start + step) − ln Q(start) = ln p where start > 0.

    Far out in the tail x − start has lost its digits: x is large and step is −ln p / x.
    """
    far = np.maximum(start, 0.0)
    for _ in range(3):
        hazard = np.sqrt(2.0 / np.pi) / erfcx((far + step) / np.sqrt(2.0))
        with np.errstate(invalid="ignore"):
            change = (_log_tail_ratio(far, step) - log_p) / hazard
        step = np.where(np.isfinite(change), np.maximum(step + change, 0.0), step)
    return step


def _log_tail_ratio(start: Array, step: Array) -> Array:
    """ln Q(start + step) − ln Q(start), step ≥ 0."""
    far = np.maximum(start, 0.0)
    # Q(x) = exp(−x²/2) erfcx(x/√2) / 2, whose large exponents cancel by hand.
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.log(erfcx((far + step) / np.sqrt(2.0)) / erfcx(far / np.sqrt(2.0)))
        beyond = np.where(np.isinf(step), -np.inf, scaled - 0.5 * step * (2.0 * far + step))
    near = log_ndtr(-start - step) - log_ndtr(-start)
    return np.asarray(np.where(start >= 0.0, beyond, near), np.float64)
