"""Σ of a gridded model, and the model with one of its learned numbers after the other moved."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch
from torch import Tensor

from dustmap.gp import AbstractParametric, Batch, Parameters
from dustmap.inference.solve._grid_model import GridModel

M = TypeVar("M", bound=AbstractParametric)


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
    """The model with one number moved: Σ (N,) there, and ∂ ln Var r (N,)."""

    model: GridModel
    sigma: Tensor
    rate: Tensor


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
        rate = torch.zeros_like(residual_variance)
        if moved.features is not model.features:
            if residual_rates is None:
                there = moved.features.residual_variance(data.functional).double()
                both = (residual_variance > 0) & (there > 0)
                rate = torch.where(both, (there / residual_variance).log(), 0.0) / step
            else:
                rate = residual_rates[i]
        residual = residual_variance * (step * rate).exp()
        yield MovedModel(moved, noise_variance(moved, data, weights) + residual, rate)
