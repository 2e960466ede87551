"""Latent functions behind labels: one for two classes, one against the rest for each of more."""

import functools
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, StationaryKernel
from dustmap.gp.likelihoods import BernoulliLikelihood, BernoulliLink, GaussianLikelihood
from dustmap.regression import _learning
from dustmap.regression._learning import Prior
from dustmap.regression._scaling import Array, Standardisation
from dustmap.regression._svgp import AUTO_INDUCING, SVGPSettings, SVGPState, fit_svgp

LINKS = {"logit": BernoulliLink.LOGIT, "probit": BernoulliLink.PROBIT}
#: Variance of f at the start: what makes most probabilities neither ½ nor 0 or 1.
_START_VARIANCES = {BernoulliLink.LOGIT: 4.0, BernoulliLink.PROBIT: 1.5}
#: Rows that choose the length scale to start from.
_PROBE = 300
#: Inducing points of "auto": at least so many, and one for so many rows.
_LEAST_POINTS, _ROWS_PER_POINT = 100, 5


@final
@dataclass(frozen=True, eq=False)
class LatentPrior:
    """Kernel, mean and link of one latent function, in standardised units."""

    kernel: AbstractKernel
    mean: AbstractMean
    link: BernoulliLink


@final
@dataclass(frozen=True, eq=False)
class Latent:
    """A fitted latent function. report: plain values."""

    state: SVGPState
    elbo: float
    report: dict[str, Any]

    @property
    def kernel(self) -> AbstractKernel:
        """In standardised units."""
        return self.state.kernel

    def log_odds(self, points: PointValues) -> Tensor:
        """ln P(y = 1) − ln P(y = 0) (N,), each averaged over f."""
        prediction = self.state.posterior.predict(points)
        mean, variance = prediction.mean.double(), prediction.variance.double()
        likelihood, zero = self.state.posterior.model.likelihood, torch.zeros_like(mean)
        with torch.no_grad():
            one = likelihood.log_predictive_density(zero + 1.0, mean, variance, zero)
            return one - likelihood.log_predictive_density(zero, mean, variance, zero)


@final
@dataclass(frozen=True, eq=False)
class Classification:
    """Latent functions of inputs in the user's units."""

    scaling: Standardisation
    latents: tuple[Latent, ...]

    def log_odds(self, X: Array) -> Array:
        """Of each latent function, (N, number of them)."""
        points = self.scaling.points(X)
        columns = [latent.log_odds(points).numpy() for latent in self.latents]
        return np.stack(columns, axis=1)


def fit_latent(
    prior: LatentPrior,
    points: PointValues,
    targets: Tensor,
    settings: SVGPSettings,
    search_start: bool,
) -> Latent:
    """Fits f to targets (N,) of 0 and 1.

    search_start: of a named kernel, which starts at the length scale that is best for the labels
    ±1 taken as numbers with Gaussian noise.
    """
    if search_start:
        prior = _best_start(prior, Batch(points, 2.0 * targets - 1.0), settings.seed)
    likelihood = BernoulliLikelihood(prior.link)
    batch = Batch(points, targets)
    settings = replace(settings, most_points=_auto_points(len(batch)))
    fitted = fit_svgp(prior.kernel, prior.mean, likelihood, batch, settings)
    return Latent(fitted.state, fitted.elbo, {"n": len(batch)} | fitted.report)


def _auto_points(n: int) -> int:
    """Return the inducing points for n labels, each of which says at most one bit.

    500 labels in 2, 5 and 10 columns: 100 points predict as well as 500, in a sixth of the time.
    """
    return min(AUTO_INDUCING, max(_LEAST_POINTS, n // _ROWS_PER_POINT))


def _best_start(prior: LatentPrior, labels: Batch, seed: int) -> LatentPrior:
    noise = GaussianLikelihood(jitter=0.5)
    probe = _learning.random_part(labels, _PROBE, seed)
    gaussian = Prior(prior.kernel, prior.mean, noise)
    _learning.choose_start(gaussian, functools.partial(_learning.evidence, gaussian, probe))
    kernel = gaussian.kernel
    if isinstance(kernel, StationaryKernel) and kernel.amplitude.is_learned:
        log_variance = torch.tensor(_START_VARIANCES[prior.link]).log()
        kernel = kernel.with_value("variance", log_variance)
    return replace(prior, kernel=kernel)
