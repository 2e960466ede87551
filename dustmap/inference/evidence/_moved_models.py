"""Σ of a gridded model, and the model with one of its learned numbers after the other moved."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch
from torch import Tensor

from dustmap.gp import AbstractParametric, Batch, Parameters
from dustmap.gp.features import AbstractFeatureMap, LocalFeatures, field_features
from dustmap.inference.solve._grid_model import GridModel

M = TypeVar("M", bound=AbstractParametric)
#: Spectra that differ by this part of the largest eigenvalue are multiples of one another.
_PROPORTIONAL = 1e-12


def noise_variance(model: GridModel, data: Batch, weights: Tensor | None = None) -> Tensor:
    """σ_n²/τ_n (N,), float64, differentiable; weights (N,) = τ."""
    noise = model.likelihood.noise_variance(data).double()
    return noise if weights is None else noise / weights.double()


def total_variance(model: GridModel, data: Batch, weights: Tensor | None = None) -> Tensor:
    """Diagonal of Σ (N,) = σ_n²/τ_n + Var r, float64, differentiable."""
    residual_variance = model.features.residual_variance(data.functional)
    return noise_variance(model, data, weights) + residual_variance.double()


def _shifted(model: GridModel, without: Sequence[str], step: float) -> Iterator[GridModel]:
    """The model with each learned number moved by `step` in turn; the same features where these
    do not depend on it."""
    for part in ("features", "mean", "likelihood"):
        for moved in shifted(Parameters.of(getattr(model, part), without=without), step):
            yield replace(model, **{part: moved})


def shifted(parameters: Parameters[M], step: float) -> Iterator[M]:
    """The value with each of its learned numbers moved by `step` in turn."""
    for unit in torch.eye(len(parameters), dtype=parameters.theta.dtype):
        yield parameters.build(parameters.theta + step * unit)


@final
@dataclass(frozen=True, eq=False)
class MovedModel:
    """The model with one number moved: Σ (N,) there, and ∂ ln Var r (N,).

    factor: by which the field's covariance is multiplied, where that is all; None where it is not.
    """

    model: GridModel
    sigma: Tensor
    rate: Tensor
    factor: float | None


def moved_models(
    model: GridModel,
    data: Batch,
    weights: Tensor | None,
    residual_variance: Tensor,
    residual_rates: Tensor | None,
    without: Sequence[str],
    step: float,
) -> Iterator[MovedModel]:
    """Move every learned number by `step` in turn.

    residual_variance (N,): Var r at the model; residual_rates (P, N): ∂_i ln Var r, where known.
    """
    for i, moved in enumerate(_shifted(model, without, step)):
        rate, factor = torch.zeros_like(residual_variance), _factor(model.features, moved.features)
        if moved.features is not model.features:
            if factor is not None:
                rate = torch.full_like(rate, math.log(factor) / step)
            elif residual_rates is None:
                there = moved.features.residual_variance(data.functional).double()
                both = (residual_variance > 0) & (there > 0)
                rate = torch.where(both, (there / residual_variance).log(), 0.0) / step
            else:
                rate = residual_rates[i]
        residual = residual_variance * (step * rate).exp()
        yield MovedModel(moved, noise_variance(moved, data, weights) + residual, rate, factor)


def _factor(here: AbstractFeatureMap, there: AbstractFeatureMap) -> float | None:
    """The number by which one covariance of the field is the other, where local weights say so."""
    if here is there:
        return 1.0
    first, second = field_features(here), field_features(there)
    if not (isinstance(first, LocalFeatures) and isinstance(second, LocalFeatures)):
        return None
    before, after = first.prior.spectrum, second.prior.spectrum
    factor = float(after.sum() / before.sum())
    apart = float((after - factor * before).abs().max())
    return factor if apart <= _PROPORTIONAL * float(after.max()) else None
