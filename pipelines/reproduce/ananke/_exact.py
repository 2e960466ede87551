"""The dense exact Gaussian process at its own evidence optimum: what `ananke` is measured by."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import ConstantMean, ExactGP, Prediction
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.kernels import Matern32
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ananke._sky import Sky
from pipelines.reproduce.dust._problem import Exact

#: Length scales (kpc) and variances where the search begins; it may leave them.
LENGTHS = tuple(0.08 * 2 ** (k / 2) for k in range(5))
VARIANCES = tuple(10 ** (-4 + k / 2) for k in range(5))
#: Parabolic steps after the grid, in log ℓ and, for each ℓ, in log variance.
STEPS = 2
#: Covariance matrices kept: those of the grid of length scales, and of the last steps.
_KEPT = 8


@final
class Correlations:
    """Covariances (N, N) of all functionals under a Matérn-3/2 prior of unit variance.

    `at` computes them once per length scale, however many skies ask; `seconds` tells what each
    took, so that every sky can be charged for what it used.
    """

    def __init__(self, functional: AbstractFunctional) -> None:
        self._functional = functional
        self._seconds: dict[float, float] = {}
        self.at: Callable[[float], Tensor] = functools.lru_cache(_KEPT)(self._compute)

    def seconds(self, length: float) -> float:
        """What the matrix at this length scale took."""
        return self._seconds[length]

    def _compute(self, length: float) -> Tensor:
        gp = ExactGP(Matern32(length, 1.0, dim=3), ConstantMean(0.0, learn=False))
        found, self._seconds[length] = stopwatch(lambda: gp.covariance(self._functional))
        return found


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """The exact posterior of the held-out extinctions, and the seconds of the whole search."""

    exact: Exact
    seconds: float


def reference(sky: Sky, correlations: Correlations, lengths: Sequence[float]) -> Reference:
    """The largest log evidence over length scale and variance, and the posterior there.

    Covariances of unit variance are computed once per ℓ, and the variance is profiled.
    """
    variances: dict[float, float] = {}
    seconds: dict[float, float] = {}

    def profile(log_length: float) -> float:
        length = math.exp(log_length)
        K = correlations.at(length)[sky.train][:, sky.train]
        (log_variance, evidence), spent = stopwatch(lambda: best_variance(sky, K))
        variances[log_length] = math.exp(log_variance)
        seconds[log_length] = spent + correlations.seconds(length)
        return evidence

    best, evidence = maximise(profile, [math.log(length) for length in lengths], STEPS)
    length, variance = math.exp(best), variances[best]
    prediction, spent = stopwatch(lambda: posterior(sky, correlations.at(length), variance))
    return Reference(Exact(length, variance, evidence, prediction), spent + sum(seconds.values()))


def best_variance(sky: Sky, correlation: Tensor) -> tuple[float, float]:
    """The log variance of largest log evidence, and that evidence, for `correlation` (n, n)."""
    start = [math.log(variance) for variance in VARIANCES]
    return maximise(lambda log: log_evidence(sky, correlation, math.exp(log)), start, STEPS)


def log_evidence(sky: Sky, correlation: Tensor, variance: float) -> float:
    """ln N(y; 0, v K + diag(σ²)) of the training data."""
    L, white = _factor(sky, correlation, variance)
    constant = 0.5 * len(white) * math.log(2.0 * math.pi)
    return -0.5 * float(white.square().sum()) - float(L.diagonal().log().sum()) - constant


def posterior(sky: Sky, correlation: Tensor, variance: float) -> Prediction:
    """Held-out extinctions given the training data; correlation (N, N) of all stars."""
    K, K_sf = correlation[sky.train][:, sky.train], correlation[sky.test][:, sky.train]
    L, white = _factor(sky, K, variance)
    V = torch.linalg.solve_triangular(L, variance * K_sf.mT, upper=False)
    k_ss = variance * correlation.diagonal()[sky.test]
    return Prediction((V.mT @ white).squeeze(-1), k_ss - V.square().sum(0))


def _factor(sky: Sky, correlation: Tensor, variance: float) -> tuple[Tensor, Tensor]:
    """L (n, n) with L Lᵀ = v K + diag(σ²), and L⁻¹ y (n, 1)."""
    covariance = variance * correlation
    covariance.diagonal().add_(sky.catalog.sigma[sky.train].square())
    L = torch.linalg.cholesky(covariance)
    return L, torch.linalg.solve_triangular(L, sky.y[sky.train][:, None], upper=False)


def maximise(
    objective: Callable[[float], float], points: Sequence[float], steps: int
) -> tuple[float, float]:
    """Where a smooth function of one number is largest, and its value there.

    points: ascending, evaluated first. Then `steps` vertices of the parabola through the best
    point and its neighbours, or steps outwards where the best point is the last on its side.
    """
    found = {x: objective(x) for x in points}
    for _ in range(steps):
        x = _next_point(found)
        found[x] = objective(x)
    best = max(found, key=lambda x: found[x])
    return best, found[best]


def _next_point(found: dict[float, float]) -> float:
    xs = sorted(found)
    best = max(range(len(xs)), key=lambda i: found[xs[i]])
    if best == 0:
        return 2 * xs[0] - xs[1]
    if best == len(xs) - 1:
        return 2 * xs[-1] - xs[-2]
    a, b, c = xs[best - 1 : best + 2]
    left, right = (b - a) * (found[b] - found[c]), (b - c) * (found[b] - found[a])
    return b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
