"""Hyperparameters of a collapsed bound, by L-BFGS on its exact gradient."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import Batch, Coordinates, FitStatus, ascend, own_batch
from dustmap.gp.functionals import world_of
from dustmap.inference.variational._collapsed import (
    AbstractCollapsedObjective,
    CollapsedSolution,
    collapsed_gradient,
)
from dustmap.inference.variational._model import VariationalModel

#: How far below the start a point is taken to be at which the model is refused, per datum: a wall
#: from which the line search turns back.
_WALL = 1e3


@final
@dataclass(frozen=True, eq=False)
class CollapsedFit:
    """What `fit_collapsed` did.

    model: with features of the parameters at the end; solution: q and L there; objective: L plus
    log prior per datum at every evaluation, the last being the end; status; largest_gradient: of
    that objective at the end; refused: evaluations at which the model was refused (K_uu not
    positive definite for too long a length scale, say) and the line search turned back.
    """

    model: VariationalModel
    solution: CollapsedSolution
    objective: tuple[float, ...]
    status: FitStatus
    largest_gradient: float
    refused: int


def fit_collapsed(
    model: VariationalModel,
    batch: Batch,
    objective: AbstractCollapsedObjective | None = None,
    *,
    max_steps: int = 100,
    tolerance: float = 1e-5,
    prior_std: float | None = None,
) -> CollapsedFit:
    """Maximises the collapsed bound over `model.parameters()`, in place, by L-BFGS.

    Kernel, mean, noise and inducing points are learned, each unless it does not require grad.

    objective: SGPR unless another is given; others are no bounds, see this module's neighbour.
    tolerance: stop when the largest |gradient| of the objective per datum is below.
    prior_std: if given, every log-parameter gets a normal prior of this width around its start.
    """
    climb = _Climb(model, batch, objective, prior_std)
    ascent = ascend(
        climb.coordinates,
        climb.attempt,
        climb.evaluate,
        max_steps=max_steps,
        tolerance=tolerance,
    )
    return CollapsedFit(
        model=model.rebuilt(),
        solution=climb.solution,
        objective=ascent.history,
        status=ascent.status,
        largest_gradient=ascent.largest_gradient,
        refused=climb.refused,
    )


@final
class _Climb:
    """The objective per datum as a function of the coordinates of what is learned.

    Inducing points and the mean's coefficients are no logarithms: their spacing and their effect
    on y are what a step of one is to them.
    """

    solution: CollapsedSolution

    def __init__(
        self,
        model: VariationalModel,
        batch: Batch,
        objective: AbstractCollapsedObjective | None,
        prior_std: float | None,
    ) -> None:
        parameters = tuple(model.parameters())
        if not parameters:
            raise ValueError("nothing to learn: no parameter of the model requires grad")
        self.model, self.batch, self.objective = model, batch, objective
        self.prior_std, self.refused, self._wall = prior_std, 0, math.nan
        linear = _linear_scales(model, batch)
        self.coordinates = Coordinates.at_present(
            parameters,
            [id(p) not in linear for p in parameters],
            [linear.get(id(p), torch.ones_like(p)) for p in parameters],
        )

    def attempt(self, z: Tensor) -> tuple[float, Tensor]:
        """`evaluate`, or a wall where the model is refused; not at the start."""
        try:
            value, gradient = self.evaluate(z)
        except ValueError:
            if math.isnan(self._wall):
                raise
            self.refused += 1
            return self._wall, torch.zeros_like(z)
        if math.isnan(self._wall):
            self._wall = value - _WALL * (1.0 + abs(value))
        return value, gradient

    def evaluate(self, z: Tensor) -> tuple[float, Tensor]:
        """(L + ln prior) / N at z and its gradient in z."""
        slope = self.coordinates.load(z)
        found = collapsed_gradient(self.model, self.batch, self.objective)
        self.solution = found.solution
        gradient = torch.cat([part.reshape(-1) for part in found.gradient])
        log_prior, pull = self.coordinates.log_prior(self.prior_std)
        n = len(self.batch)
        return (found.solution.value + log_prior) / n, (gradient + pull) * slope / n


def _linear_scales(model: VariationalModel, batch: Batch) -> dict[int, Tensor]:
    """What a step of one is to parameters that are no logarithms, by their id.

    Of the features these are the matrices (M, D) of inducing points.
    """
    scales = {id(p): _spacing(p) for p in model.features.parameters() if p.ndim == 2}
    own, total = own_batch(batch), world_of(batch.functional).total
    effect = total(model.mean.basis(own.functional).square().sum(0)) / len(batch)
    tiny = torch.finfo(torch.float64).tiny
    spread = batch.y.double().square().mean().sqrt() + tiny
    sizes, start = spread / effect.sqrt().clamp_min(tiny), 0
    for p in model.mean.parameters():
        scales[id(p)] = sizes[start : start + p.numel()].reshape(p.shape)
        start += p.numel()
    return scales


def _spacing(points: nn.Parameter) -> Tensor:
    """About the distance between neighbours of inducing points along each axis (M, D)."""
    count, dim = points.shape
    widths: Tensor = points.detach().amax(0) - points.detach().amin(0)
    widths = torch.where(widths > 0, widths, torch.ones_like(widths))
    spacing: Tensor = widths / count ** (1.0 / dim)
    return spacing.expand(count, dim)
