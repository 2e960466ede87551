"""Scores of predictions under any likelihood against data that were held out."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch, Prediction
from dustmap.gp.likelihoods import AbstractLikelihood

#: Data whose quadrature is done at a time.
_CHUNK = 2**16


@final
@dataclass(frozen=True)
class HeldOut:
    """n data, their mean log-density under the predictions, and the error of the mean.

    loglike: mean_n ln ∫ p(y_n | f) N(f; μ_n, v_n) df. rmse: root mean square of y_n − E[y_n],
    in the units of y; for classes 0 and 1 it is the root of the Brier score.
    """

    n: int
    loglike: float
    rmse: float


@torch.no_grad()
def held_out(likelihood: AbstractLikelihood, prediction: Prediction, batch: Batch) -> HeldOut:
    """Scores of the latent moments (N,) that `prediction` has of a batch of N data."""
    if len(batch) == 0 or prediction.mean.shape != batch.y.shape:
        raise ValueError(
            f"expected predictions of the same N > 0 data, got {tuple(prediction.mean.shape)} "
            f"predictions of {len(batch)} data: predict(batch.functional) makes them"
        )
    columns = (batch.y, prediction.mean, prediction.variance, likelihood.noise_variance(batch))
    loglike = square = torch.zeros((), dtype=torch.float64, device=batch.y.device)
    for y, *moments in zip(*(torch.split(c, _CHUNK) for c in columns), strict=True):
        density = likelihood.log_predictive_density(y, *moments)
        mean, _ = likelihood.predictive_moments(*moments)
        loglike = loglike + density.double().sum()
        square = square + (y.double() - mean.double()).square().sum()
    n = len(batch)
    return HeldOut(n, float(loglike) / n, math.sqrt(float(square) / n))


def misclassified(y: Tensor, probability: Tensor) -> float:
    """Share of classes y (N,), 0 or 1, that were given a probability of y = 1 (N,) on the other
    side of ½."""
    return float(((probability > 0.5) != (y > 0.5)).double().mean())
