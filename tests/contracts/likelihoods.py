"""Likelihoods with formulas of their own, and their integrals over q(f) by adaptive quadrature."""

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import integrate, special
from torch import Tensor

from dustmap.gp.likelihoods import (
    AbstractLikelihood,
    BernoulliLikelihood,
    BernoulliLink,
    GaussianLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)


@dataclass(frozen=True, eq=False)
class Case:
    """One datum of a likelihood: ln p(y | f) as a function of a number f, and where it bends."""

    make: Callable[[], AbstractLikelihood]
    y: float
    noise: float
    log_prob: Callable[[float], float]
    bends: tuple[float, ...]

    def data(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """y and noise_variance for every mean (N,)."""
        return torch.full_like(mean, self.y), torch.full_like(mean, self.noise)

    def integral(self, function: Callable[[float], float], mean: float, variance: float) -> float:
        """E[function(f)] under f ~ N(mean, variance), piece by piece."""
        std = math.sqrt(variance)

        def integrand(f: float) -> float:
            z = (f - mean) / std
            return function(f) * math.exp(-0.5 * z * z) / (std * math.sqrt(2.0 * math.pi))

        reach = 30.0 * std
        inner = [b for b in self.bends if abs(b - mean) < reach]
        # The bulk of p(y|f) N(f) is somewhere between the mean and where p(y|f) is largest.
        edges = sorted(
            {mean + k * std for k in (-30, -13, -6, -3, -1, 0, 1, 3, 6, 13, 30)} | {*inner}
        )
        return _piecewise(integrand, edges)

    def expected(self, mean: float, variance: float) -> tuple[float, float, float]:
        """E, ∂E/∂μ and ∂E/∂v by derivatives of N(f; μ, v), not of ln p, which they differ from in
        the value at the mean only to lose fewer digits."""
        level = self.log_prob(mean)

        def beside(f: float) -> float:
            return self.log_prob(f) - level

        def first(f: float) -> float:
            return beside(f) * (f - mean) / variance

        def second(f: float) -> float:
            return 0.5 * beside(f) * ((f - mean) ** 2 / variance - 1.0) / variance

        values = (self.integral(g, mean, variance) for g in (beside, first, second))
        return (level + next(values), next(values), next(values))

    def log_predictive(self, mean: float, variance: float) -> float:
        """ln E p(y | f)."""
        std = math.sqrt(variance)
        constant = -0.5 * math.log(2.0 * math.pi * variance)

        def log_joint(f: float) -> float:
            return self.log_prob(f) - 0.5 * ((f - mean) / std) ** 2 + constant

        ends = [mean - 30 * std, mean + 30 * std, *self.bends]
        places = np.concatenate([np.linspace(min(ends), max(ends), 4001), ends])
        places = np.concatenate([places, mean + std * np.linspace(-30, 30, 4001)])
        top = float(places[int(np.argmax([log_joint(float(f)) for f in places]))])
        peak = log_joint(top)
        near = {top + k * std for k in (-13, -6, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 6, 13)}
        inner = {b for b in self.bends if abs(b - top) < 30 * std}
        total = _piecewise(lambda f: math.exp(log_joint(f) - peak), sorted({*near, *inner}))
        return peak + math.log(total)


def _piecewise(integrand: Callable[[float], float], edges: list[float]) -> float:
    total = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", integrate.IntegrationWarning)
        for low, high in itertools.pairwise(edges):
            part, _ = integrate.quad(integrand, low, high, epsabs=1e-15, epsrel=1e-12, limit=200)
            total += part
    return total


def student_t(y: float, dof: float, scale: float) -> Case:
    a2 = dof * scale**2
    peak = math.lgamma(0.5 * (dof + 1)) - math.lgamma(0.5 * dof) - 0.5 * math.log(math.pi * a2)

    def log_prob(f: float) -> float:
        return peak - 0.5 * (dof + 1) * math.log1p((y - f) ** 2 / a2)

    bends = tuple(y + k * scale * math.sqrt(dof) for k in (-100, -20, -5, -1, 0, 1, 5, 20, 100))
    return Case(lambda: StudentTLikelihood(dof, scale), y, scale**2, log_prob, bends)


def bernoulli(y: float, link: BernoulliLink) -> Case:
    sign = 2.0 * y - 1.0

    def logit(f: float) -> float:
        return float(-np.logaddexp(0.0, -sign * f))

    def probit(f: float) -> float:
        return float(special.log_ndtr(sign * f))

    log_prob = logit if link is BernoulliLink.LOGIT else probit
    bends = (-20.0, -5.0, -1.0, 0.0, 1.0, 5.0, 20.0)
    return Case(lambda: BernoulliLikelihood(link), y, 0.0, log_prob, bends)


def poisson(y: float) -> Case:
    def log_prob(f: float) -> float:
        return y * f - math.exp(min(f, 700.0)) - math.lgamma(y + 1)

    place, width = math.log(y + 0.5), 1.0 / math.sqrt(y + 1.0)
    bends = tuple(place + k * width for k in (-30, -10, -3, 0, 3, 10))
    return Case(PoissonLikelihood, y, 0.0, log_prob, bends)


def gaussian(y: float, noise: float) -> Case:
    constant = -0.5 * math.log(2.0 * math.pi * noise)

    def log_prob(f: float) -> float:
        return constant - 0.5 * (y - f) ** 2 / noise

    bends = tuple(y + k * math.sqrt(noise) for k in (-10, -3, -1, 0, 1, 3, 10))
    return Case(GaussianLikelihood, y, noise, log_prob, bends)


CASES: dict[str, Case] = {
    "gaussian": gaussian(0.3, 0.5),
    "gaussian-narrow": gaussian(0.3, 0.01),
    "logit-0": bernoulli(0.0, BernoulliLink.LOGIT),
    "logit-1": bernoulli(1.0, BernoulliLink.LOGIT),
    "probit-0": bernoulli(0.0, BernoulliLink.PROBIT),
    "probit-1": bernoulli(1.0, BernoulliLink.PROBIT),
    "poisson-0": poisson(0.0),
    "poisson-7": poisson(7.0),
    "student-wide": student_t(0.3, 4.0, 2.0),
    "student-narrow": student_t(0.3, 2.5, 0.05),
    "student-normal": student_t(0.3, 1e6, 0.5),
}
