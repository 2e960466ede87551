"""Hyperparameters of q(ε): by Adam on the ELBO, and by L-BFGS on a collapsed bound.

Adam alternates with natural steps (002, appendix B.2).
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch, FitStatus, Parameters, maximise, own_batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import Features
from dustmap.gp.functionals import AbstractFunctional, world_of
from dustmap.inference._state import ParameterVector
from dustmap.inference.variational._collapsed import (
    AbstractCollapsedObjective,
    CollapsedGradient,
    CollapsedSolution,
    collapsed_gradient,
)
from dustmap.inference.variational._model import VariationalModel


@final
@dataclass(frozen=True, eq=False)
class Adam:
    """The averages of Kingma & Ba (2015) after `steps` gradients: of g (P,), and of g² (P,)."""

    mean: ParameterVector
    square: ParameterVector
    steps: int = 0

    #: Decay of the two averages, and what keeps the denominator from 0.
    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8

    def updated(self, gradient: Tensor) -> "Adam":
        """With one more gradient (P,)."""
        return Adam(
            self.mean + (1.0 - self.BETA_1) * (gradient - self.mean),
            self.BETA_2 * self.square + (1.0 - self.BETA_2) * gradient.square(),
            self.steps + 1,
        )

    def step(self, rate: float) -> Tensor:
        """The step (P,) down the gradient."""
        mean = self.mean / (1.0 - self.BETA_1**self.steps)
        square = self.square / (1.0 - self.BETA_2**self.steps)
        return -rate * mean / (square.sqrt() + self.EPSILON)


@final
@dataclass(frozen=True, eq=False)
class LearnerState:
    """θ (P,), and the averages of its gradients."""

    theta: ParameterVector
    adam: Adam


@final
class HyperparameterLearner:
    """Adam on kernel, mean and noise at fixed q(ε), through the exact gradient of the features.

    learning_rate 0 makes it inactive. theta (P,): where it is; `model`: built from it, with its
    graph where active.
    """

    def __init__(self, model: VariationalModel, learning_rate: float) -> None:
        self.parameters = Parameters.of(model)
        self.active = learning_rate > 0 and len(self.parameters) > 0
        zeros = torch.zeros_like(self.parameters.theta)
        self.theta, self.model, self._adam = self.parameters.theta, model, Adam(zeros, zeros)
        if self.active:
            self._move_to(self.theta)

    def rows(self, functional: AbstractFunctional) -> Features:
        """Rows of a minibatch at the present parameters, with their graph."""
        return self.model.features.rows(functional)

    def step(
        self, posterior: AbstractGaussian, rows: Features, batch: Batch, scale: float, rate: float
    ) -> None:
        """One Adam step of this rate down the minibatch's −ELBO / N; nothing when inactive."""
        if not self.active:
            return
        # Without the divergence of q, which knows nothing of the hyperparameters.
        loss = -self.model.expected_log_likelihood(posterior, rows, batch) / len(batch)
        (gradient,) = torch.autograd.grad(loss, self.theta)
        self._adam = self._adam.updated(gradient)
        self._move_to(self.theta.detach() + self._adam.step(rate))

    def at(self, theta: Tensor) -> VariationalModel:
        """The model at θ (P,), without a graph; the one it started from when inactive."""
        return self.parameters.build(theta.detach()) if self.active else self.model

    def snapshot(self) -> LearnerState | None:
        """Parameters and Adam's averages, None when inactive."""
        return LearnerState(self.theta, self._adam) if self.active else None

    def restore(self, state: LearnerState | None) -> None:
        """Go back to where `snapshot` was called."""
        if state is not None:
            self._adam = state.adam
            self._move_to(state.theta)

    def _move_to(self, theta: Tensor) -> None:
        self.theta = theta.detach().clone().requires_grad_()
        self.model = self.parameters.build(self.theta)


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
    """Maximises the collapsed bound over what the model learns, by L-BFGS.

    Kernel, mean, noise and inducing points are learned, each where it says so. Inducing points and
    the mean's coefficients are no logarithms: their spacing and their effect on y are what a step
    of one is to them.

    objective: SGPR unless another is given; others are no bounds, see this module's neighbour.
    tolerance: stop when the largest |gradient| of the objective per datum is below.
    prior_std: if given, every log-parameter gets a normal prior of this width around its start.
    """
    parameters = Parameters.of(model, scales=_linear_scales(model, batch), prior_std=prior_std)
    parameters.require_some("the model")
    found: list[CollapsedGradient] = []

    def value_and_gradient(theta: Tensor) -> tuple[float, Tensor]:
        found[:] = [collapsed_gradient(parameters, theta, batch, objective)]
        return found[0].solution.value, found[0].gradient

    maximum = maximise(
        parameters,
        value_and_gradient,
        n_data=len(batch),
        max_steps=max_steps,
        tolerance=tolerance,
    )
    return CollapsedFit(
        model=parameters.build(maximum.theta),
        solution=found[0].solution,
        objective=maximum.history,
        status=maximum.status,
        largest_gradient=maximum.largest_gradient,
        refused=maximum.refused,
    )


def _linear_scales(model: VariationalModel, batch: Batch) -> dict[str, Tensor]:
    """What a step of one is to parameters that are no logarithms, by their names."""
    own, total = own_batch(batch), world_of(batch.functional).total
    effect = total(model.mean.basis(own.functional).square().sum(0)) / len(batch)
    tiny = torch.finfo(torch.float64).tiny
    spread = batch.y.double().square().mean().sqrt() + tiny
    points = (p for p in model.features.parameters() if p.name == "inducing")
    return {
        "mean": spread / effect.sqrt().clamp_min(tiny),
        **{p.name: _spacing(p.value) for p in points},
    }


def _spacing(points: Tensor) -> Tensor:
    """About the distance between neighbours of inducing points along each axis (M, D)."""
    count, dim = points.shape
    widths: Tensor = points.amax(0) - points.amin(0)
    widths = torch.where(widths > 0, widths, torch.ones_like(widths))
    spacing: Tensor = widths / count ** (1.0 / dim)
    return spacing.expand(count, dim)
