"""How well the posteriors of simulated skies are calibrated."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import t
from torch import Tensor

from pipelines.reproduce._experiment import Value
from pipelines.reproduce.skies._problem import Fitted

#: Half of the probability of the central interval, ±1σ of a normal distribution.
_HALF = 0.5 * float(ndtr(1.0) - ndtr(-1.0))


def scores(fitted: Fitted, edges: Sequence[float]) -> dict[str, Value]:
    """Coverage of the 68 % interval, and what else is goal or context; lists are by distance.

    Intervals of extinctions are central ones of the mixture over the samples; those of the
    density lie between its 16th and 84th percentile.
    """
    noisy, true = _noisy(fitted), _noise_free(fitted)
    density, truth = _density(fitted), _truth(fitted)
    mean, std = (m.double().numpy() for m in fitted.solution.posterior.node_log_moments())
    z = (np.log(truth) - mean) / std
    length, deviation = fitted.hyperparameters
    shells = _shells(fitted, edges)
    return {
        "extinction_coverage68": _central(noisy),
        "extinction_true_coverage68": _central(true),
        "extinction_chi2": _chi2(fitted),
        "extinction_rmse": _rmse(fitted),
        "density_coverage68": _inside(z),
        "density_coverage68_by_distance": [_inside(z[shell]) for shell in shells],
        "density_correlation_by_distance": [
            _correlation(np.log(truth[s]), mean[s]) for s in shells
        ],
        "density_correlation": _correlation(np.log(truth), mean),
        "density_least": float(density.min()),
        "length": length,
        "std": deviation,
        "noise_scale": fitted.noise,
        "nu": fitted.nu if math.isfinite(fitted.nu) else None,
        "status": fitted.solution.status.value,
    }


def probabilities(fitted: Fitted) -> NDArray[np.float64]:
    """P(y' ≤ y) (K,) of the held-out extinctions: uniform where predictions are calibrated."""
    return _noisy(fitted)


def _noisy(fitted: Fitted) -> NDArray[np.float64]:
    draws = fitted.draws(fitted.held.functional)
    above = (fitted.held.y - draws) / _sigma(fitted)
    # Of ν degrees of freedom, a normal distribution for an infinite ν.
    return np.asarray(t.cdf(above.numpy(), fitted.nu).mean(0))


def _noise_free(fitted: Fitted) -> NDArray[np.float64]:
    """Of the true extinctions at the true distances, from the moments of their logarithm."""
    logs = fitted.draws(fitted.true_rays).log()
    truth = torch.from_numpy(fitted.sky.true_extinction)[fitted.held_rows].log()
    return np.asarray(torch.special.ndtr((truth - logs.mean(0)) / logs.std(0)).numpy())


def _sigma(fitted: Fitted) -> Tensor:
    variance = fitted.held.noise_variance
    assert variance is not None
    return fitted.noise * variance.sqrt()


def _chi2(fitted: Fitted) -> float:
    draws = fitted.draws(fitted.held.functional)
    # That of a normal distribution whose ±1σ holds as much: for ν ≤ 2 there is no other.
    width = float(t.ppf(0.5 + _HALF, fitted.nu))
    variance = draws.var(0) + (width * _sigma(fitted)).square()
    return float(((fitted.held.y - draws.mean(0)).square() / variance).mean())


def _rmse(fitted: Fitted) -> float:
    truth = torch.from_numpy(fitted.sky.true_extinction)[fitted.held_rows]
    return float((fitted.draws(fitted.true_rays).mean(0) - truth).square().mean().sqrt())


def _density(fitted: Fitted) -> NDArray[np.float64]:
    return np.asarray(fitted.solution.posterior.log_samples.exp().numpy(), np.float64)


def _truth(fitted: Fitted) -> NDArray[np.float64]:
    """ρ (M,) at the nodes, in the C order of (x, y, z)."""
    return np.asarray(fitted.truth.mean.transpose(2, 1, 0).ravel(), np.float64)


def _shells(fitted: Fitted, edges: Sequence[float]) -> list[NDArray[np.bool_]]:
    """Which nodes (M,) are between two distances from the Sun."""
    distance = fitted.grid.points().norm(dim=1).numpy()
    inside = [distance < edge for edge in edges]
    return [np.asarray(far & ~near) for near, far in itertools.pairwise(inside)]


def _central(probability: NDArray[np.float64]) -> float:
    return float((np.abs(probability - 0.5) < _HALF).mean())


def _inside(z: NDArray[np.float64]) -> float:
    return float((np.abs(z) < 1.0).mean())


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.corrcoef(a, b)[0, 1])
