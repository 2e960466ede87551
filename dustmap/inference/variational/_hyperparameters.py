"""Hyperparameters of q(ε): by Adam on the ELBO, and by L-BFGS on a collapsed bound.

Adam alternates with natural steps (002, appendix B.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import Batch, Coordinates, FitStatus, ascend, own_batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import Features
from dustmap.gp.functionals import AbstractFunctional, world_of
from dustmap.inference._journal import Kept, Reading, state
from dustmap.inference.variational._collapsed import (
    AbstractCollapsedObjective,
    CollapsedSolution,
    collapsed_gradient,
)
from dustmap.inference.variational._model import VariationalModel

#: What the state of a learner is called, and what Adam has of each parameter.
_ADAM, _AVERAGES = "adam", ("step", "exp_avg", "exp_avg_sq")
#: How far below the start a point is taken to be at which the model is refused, per datum: a wall
#: from which the line search turns back.
_WALL = 1e3


@final
class HyperparameterLearner:
    """Adam on kernel, mean and noise at fixed q(ε), through the exact gradient of the features.

    learning_rate 0 makes it inactive. `model` always has features of the present parameters.
    """

    def __init__(self, model: VariationalModel, learning_rate: float) -> None:
        self._parameters = list(model.parameters())
        self.active = learning_rate > 0 and len(self._parameters) > 0
        self.model = model.rebuilt() if self.active else model
        self._adam = torch.optim.Adam(self._parameters, lr=learning_rate) if self.active else None

    def rows(self, functional: AbstractFunctional) -> Features:
        """Rows of a minibatch at the present parameters, with their graph."""
        return self.model.features.rows(functional)

    def snapshot(self) -> tuple[Tensor, ...]:
        """Copies of the present parameters, to restore them with `restored`; () when inactive."""
        return tuple(p.detach().clone() for p in self._parameters) if self.active else ()

    def step(
        self, posterior: AbstractGaussian, rows: Features, batch: Batch, scale: float, rate: float
    ) -> None:
        """One Adam step of this rate down the minibatch's −ELBO / N; nothing when inactive."""
        if self._adam is None:
            return
        self._adam.param_groups[0]["lr"] = rate
        self._adam.zero_grad()
        # Without the divergence of q, which knows nothing of the hyperparameters.
        loss = -self.model.expected_log_likelihood(posterior, rows, batch) / len(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        self.model = self.model.rebuilt()

    def kept(self) -> Kept | None:
        """Parameters and Adam's averages, None when inactive."""
        if self._adam is None:
            return None
        averages = self._adam.state_dict()["state"]
        arrays = {f"parameter_{i}": p for i, p in enumerate(self._parameters)}
        arrays |= {f"{name}_{i}": averages[i][name] for i in averages for name in _AVERAGES}
        return state(_ADAM, {}, arrays)

    def restore(self, reading: Reading, name: str) -> None:
        """Goes back to where `kept` was called, which gave the part of this name."""
        if reading.has(name) != self.active:
            told = "no learning of hyperparameters" if self.active else "learned hyperparameters"
            raise reading.refusal(told)
        if self._adam is None:
            return
        part, averages = reading.part(name, _ADAM), dict[int, dict[str, Tensor]]()
        with torch.no_grad():
            for i, p in enumerate(self._parameters):
                p.copy_(part.array(f"parameter_{i}", p, *p.shape))
                if part.has(f"step_{i}"):
                    averages[i] = {"step": part.array(f"step_{i}", torch.zeros(()))}
                    for average in _AVERAGES[1:]:
                        averages[i][average] = part.array(f"{average}_{i}", p, *p.shape)
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": averages, "param_groups": groups})
        self.model = self.model.rebuilt()


@torch.no_grad()
def restored(model: VariationalModel, values: Sequence[Tensor]) -> VariationalModel:
    """The model with its parameters set back to `values` of a `snapshot`, in place."""
    if not values:
        return model
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
    return model.rebuilt()


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
