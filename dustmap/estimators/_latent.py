"""Latent functions behind labels: one for two classes, one against the rest for each of more."""

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dustmap.engines import (
    EngineFit,
    FreePointsEngine,
    FreePointSettings,
    GPModel,
    Problem,
    Watch,
    choose_start,
    evidence,
    random_part,
)
from dustmap.estimators._standardisation import Array, Standardisation
from dustmap.gp import Batch
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, StationaryKernel
from dustmap.gp.likelihoods import BernoulliLikelihood, BernoulliLink, GaussianLikelihood

LINKS = {"logit": BernoulliLink.LOGIT, "probit": BernoulliLink.PROBIT}
#: Variance of f at the start: what makes most probabilities neither ½ nor 0 or 1.
_START_VARIANCES = {BernoulliLink.LOGIT: 4.0, BernoulliLink.PROBIT: 1.5}
#: Rows that choose the length scale to start from.
_PROBE = 300
#: Inducing points of "auto": at least so many, and one for so many rows.
_LEAST_POINTS, _ROWS_PER_POINT = 100, 5


@final
@dataclass(frozen=True, eq=False)
class Latent:
    """A fitted latent function. report: plain values."""

    fit: EngineFit
    report: dict[str, Any]

    @property
    def elbo(self) -> float:
        """A lower bound of ln P(y)."""
        assert self.fit.evidence is not None
        return self.fit.evidence

    @property
    def kernel(self) -> AbstractKernel:
        """In standardised units."""
        return self.fit.model.kernel

    def log_odds(self, points: PointValues) -> Tensor:
        """ln P(y = 1) − ln P(y = 0) (N,), each averaged over f."""
        prediction = self.fit.posterior.predict(points)
        mean, variance = prediction.mean.double(), prediction.variance.double()
        likelihood, zero = self.fit.model.likelihood, torch.zeros_like(mean)
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
    model: GPModel,
    points: PointValues,
    targets: Tensor,
    settings: FreePointSettings,
    search_start: bool,
) -> Latent:
    """Fit f to targets (N,) of 0 and 1.

    search_start: of a named kernel, which starts at the length scale that is best for the labels
    ±1 taken as numbers with Gaussian noise.
    """
    if search_start:
        _choose_start(model, Batch(points, 2.0 * targets - 1.0), settings.seed)
    settings = replace(settings, most_points=auto_points(len(targets), settings.most_points))
    engine = FreePointsEngine(settings, collapsed=False)
    fit = engine.fit(Problem(model, Batch(points, targets)), Watch())
    return Latent(fit, {"n": len(targets), **fit.report})


def auto_points(n: int, most: int) -> int:
    """Inducing points for n labels, each of which says at most one bit.

    500 labels in 2, 5 and 10 columns: 100 points predict as well as 500, in a sixth of the time.
    """
    return min(most, max(_LEAST_POINTS, n // _ROWS_PER_POINT))


def _choose_start(model: GPModel, labels: Batch, seed: int) -> None:
    gaussian = replace(model, likelihood=GaussianLikelihood(jitter=0.5))
    probe = random_part(labels, _PROBE, seed)
    choose_start(gaussian, lambda: evidence(gaussian, probe))
    kernel, likelihood = model.kernel, model.likelihood
    assert isinstance(likelihood, BernoulliLikelihood)
    if isinstance(kernel, StationaryKernel) and kernel.log_variance.requires_grad:
        with torch.no_grad():
            kernel.log_variance.fill_(float(np.log(_START_VARIANCES[likelihood.link])))
