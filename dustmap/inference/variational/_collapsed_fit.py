"""Hyperparameters of a collapsed bound, by L-BFGS on its exact gradient."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import Batch, FitStatus, own_batch
from dustmap.gp.functionals import world_of
from dustmap.inference.variational._collapsed import (
    AbstractCollapsedObjective,
    CollapsedSolution,
    collapsed_gradient,
)
from dustmap.inference.variational._model import VariationalModel

#: Logarithms stay within this distance of their start: a factor of 1000 either way.
_LOG_RANGE = math.log(1e3)
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
    z = torch.zeros_like(climb.origin, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [z],
        max_iter=max_steps,
        max_eval=4 * max_steps,
        history_size=20,
        tolerance_grad=tolerance,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )
    history: list[float] = []

    def closure() -> float:
        value, gradient = climb.attempt(z.detach())
        z.grad = -gradient
        history.append(value)
        return -value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    end, refused = z.detach(), climb.refused
    value, gradient = climb.evaluate(end)
    largest = float(gradient.abs().max())
    finished = optimiser.state[z]["n_iter"] < max_steps and len(history) < 4 * max_steps
    return CollapsedFit(
        model=model.rebuilt(),
        solution=climb.solution,
        objective=(*history, value),
        status=climb.status(end, largest <= tolerance, finished),
        largest_gradient=largest,
        refused=refused,
    )


@final
class _Climb:
    """The objective per datum as a function of one vector z (P,) with parameters of order one.

    Logarithms are origin + B tanh(z/B), so that no line search can leave the range B; inducing
    points and the mean's coefficients are origin + scale z, with scale their spacing and their
    effect on y.
    """

    solution: CollapsedSolution

    def __init__(
        self,
        model: VariationalModel,
        batch: Batch,
        objective: AbstractCollapsedObjective | None,
        prior_std: float | None,
    ) -> None:
        self.parameters = tuple(model.parameters())
        if not self.parameters:
            raise ValueError("nothing to learn: no parameter of the model requires grad")
        self.model, self.batch, self.objective = model, batch, objective
        self.prior_std, self.refused, self._wall = prior_std, 0, math.nan
        self.origin = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        linear = _linear_scales(model, batch)
        logs = [torch.full((p.numel(),), id(p) not in linear) for p in self.parameters]
        self.is_log = torch.cat(logs).to(self.origin.device)
        scales = [linear.get(id(p), torch.ones_like(p)) for p in self.parameters]
        self.scale = torch.cat([scale.detach().reshape(-1) for scale in scales]).to(self.origin)

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
        slope = self._load(z)
        found = collapsed_gradient(self.model, self.batch, self.objective)
        self.solution = found.solution
        gradient = torch.cat([part.reshape(-1) for part in found.gradient])
        log_prior, pull = self._log_prior()
        n = len(self.batch)
        return (found.solution.value + log_prior) / n, (gradient + pull) * slope / n

    def status(self, z: Tensor, flat: bool, finished: bool) -> FitStatus:
        """How it ended."""
        # tanh has used up 95 % of the range at 1.8 B.
        if bool((self.is_log & (z.abs() > 1.8 * _LOG_RANGE)).any()):
            return FitStatus.AT_BOUND
        if flat:
            return FitStatus.CONVERGED
        return FitStatus.STAGNATED if finished else FitStatus.MAX_STEPS

    @torch.no_grad()
    def _load(self, z: Tensor) -> Tensor:
        """Sets the parameters to those of z; returns dθ/dz (P,)."""
        squashed = torch.tanh(z / _LOG_RANGE)
        theta = self.origin + torch.where(self.is_log, _LOG_RANGE * squashed, self.scale * z)
        sizes = [p.numel() for p in self.parameters]
        for p, value in zip(self.parameters, torch.split(theta, sizes), strict=True):
            p.copy_(value.reshape(p.shape))
        return torch.where(self.is_log, 1.0 - squashed.square(), self.scale)

    def _log_prior(self) -> tuple[float, Tensor]:
        """ln prior of the parameters up to a constant, and its gradient (P,)."""
        if self.prior_std is None:
            return 0.0, torch.zeros_like(self.origin)
        theta = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        deviation = (theta - self.origin) / self.prior_std * self.is_log
        return -0.5 * float(deviation.square().sum()), -deviation / self.prior_std


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
