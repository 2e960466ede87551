"""Scores of predictions y_n ~ N(μ_n, v_n) against what was measured.

All functions take y (N,), mean (N,) and, where it matters, variance (N,): the variance of y
itself, noise included, unless y is a noise-free truth.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

#: Half-widths, in standard deviations, of the central 68.27 % (±1σ) and 95 % intervals.
_ONE_SIGMA = 1.0
_HALF_95 = 1.959963984540054


def mae(y: Tensor, mean: Tensor) -> float:
    """Mean absolute error."""
    return float((y.double() - mean.double()).abs().mean())


def mse(y: Tensor, mean: Tensor) -> float:
    """Mean squared error."""
    return float((y.double() - mean.double()).square().mean())


def rmse(y: Tensor, mean: Tensor) -> float:
    """Root mean squared error."""
    return math.sqrt(mse(y, mean))


def loglike(y: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Mean log-density of a datum, mean_n ln N(y_n; μ_n, v_n)."""
    v = variance.double()
    z = standardised(y, mean, variance)
    return float(-0.5 * ((2.0 * math.pi * v).log() + z.square()).mean())


def chi2(y: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Mean of (y_n − μ_n)² / v_n: 1 when calibrated, above when overconfident."""
    return float(standardised(y, mean, variance).square().mean())


def coverage(y: Tensor, mean: Tensor, variance: Tensor, half_width: float) -> float:
    """Fraction of data within `half_width` standard deviations of their mean."""
    inside = standardised(y, mean, variance).abs() <= half_width
    return float(inside.double().mean())


def pit(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Probability integral transform Φ((y_n − μ_n)/√v_n) (N,): uniform when calibrated."""
    transform: Tensor = torch.special.ndtr(standardised(y, mean, variance))
    return transform


def crps(y: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Mean continuous ranked probability score of a Gaussian, in the units of y.

    √v [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − μ)/√v (Gneiting and Raftery 2007, eq. 21).
    """
    z = standardised(y, mean, variance)
    density = (-0.5 * z.square()).exp() / math.sqrt(2.0 * math.pi)
    per_sigma = z * (2.0 * torch.special.ndtr(z) - 1.0) + 2.0 * density - 1.0 / math.sqrt(math.pi)
    return float((variance.double().sqrt() * per_sigma).mean())


def standardised(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """z_n = (y_n − μ_n)/√v_n (N,), float64."""
    return (y.double() - mean.double()) / variance.double().sqrt()


@final
@dataclass(frozen=True)
class Scores:
    """All scores of one set of predictions; see the functions of the same names."""

    n: int
    mae: float
    mse: float
    rmse: float
    loglike: float
    chi2: float
    coverage68: float
    coverage95: float
    crps: float

    def as_dict(self) -> dict[str, float]:
        """Plain numbers by name, for reports."""
        return dataclasses.asdict(self)


def scores(y: Tensor, mean: Tensor, variance: Tensor) -> Scores:
    """Every score of predictions N(mean (N,), variance (N,)) of y (N,)."""
    _check(y, mean, variance)
    return Scores(
        n=len(y),
        mae=mae(y, mean),
        mse=mse(y, mean),
        rmse=rmse(y, mean),
        loglike=loglike(y, mean, variance),
        chi2=chi2(y, mean, variance),
        coverage68=coverage(y, mean, variance, _ONE_SIGMA),
        coverage95=coverage(y, mean, variance, _HALF_95),
        crps=crps(y, mean, variance),
    )


def _check(y: Tensor, mean: Tensor, variance: Tensor) -> None:
    if not (y.ndim == 1 and len(y) > 0 and y.shape == mean.shape == variance.shape):
        raise ValueError(
            f"y, mean and variance must all have the same shape (N,), N > 0, got "
            f"{tuple(y.shape)}, {tuple(mean.shape)}, {tuple(variance.shape)}"
        )
    for name, value in (("y", y), ("mean", mean), ("variance", variance)):
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} must be finite to be scored: drop NaN and infinity first")
    if not bool((variance > 0).all()):
        raise ValueError("variance must be positive: add the noise variance to the latent one")
