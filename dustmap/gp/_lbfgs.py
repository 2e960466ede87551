"""Maxima of functions of a model's parameters, by L-BFGS in bounded coordinates of order one."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dustmap.gp._parameters import Parameters

#: θ (P,) ↦ an objective and its gradient (P,).
Objective = Callable[[Tensor], tuple[float, Tensor]]
#: How far below the start a point is taken to be at which the model is refused: a wall from which
#: the line search turns back.
_WALL = 1e3


@final
class FitStatus(enum.Enum):
    """How the maximisation ended."""

    CONVERGED = "converged"
    MAX_STEPS = "max_steps"
    AT_BOUND = "at_bound"
    STAGNATED = "stagnated"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _WHAT_TO_DO[self]


_WHAT_TO_DO = {
    FitStatus.CONVERGED: "nothing to do",
    FitStatus.MAX_STEPS: "the gradient is not small yet: increase max_steps",
    FitStatus.AT_BOUND: (
        "a parameter moved by a factor of nearly 1000 from its start: the data may not constrain "
        "it; start elsewhere, fix it, or set prior_std"
    ),
    FitStatus.STAGNATED: (
        "the line search found no better point though the gradient is not small: loosen "
        "tolerance, or start elsewhere"
    ),
}


@final
@dataclass(frozen=True, eq=False)
class Maximum:
    """The end of L-BFGS, θ = theta (P,).

    history: (objective + ln prior) / N at every evaluation, the last being the end;
    largest_gradient: of that, in bounded coordinates, at the end; refused: evaluations at which
    the model was refused (K_uu not positive definite for too long a length scale, say) and the line
    search turned back.
    """

    theta: Tensor
    history: tuple[float, ...]
    status: FitStatus
    largest_gradient: float
    refused: int


def maximise(
    parameters: Parameters[Any],
    objective: Objective,
    *,
    n_data: int,
    max_steps: int,
    tolerance: float,
) -> Maximum:
    """L-BFGS with strong Wolfe line searches from `parameters.theta`, on objective + ln prior.

    objective: of θ; a ValueError of it, but at the start, is a wall. n_data: N, by which the sum
    is divided. tolerance: of the largest |gradient|, below which it stops. The objective is
    evaluated at the end once more.
    """
    search = _Search(parameters, objective, n_data)
    z = torch.zeros_like(parameters.theta, requires_grad=True)
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
        value, gradient = search.attempt(z.detach())
        z.grad = -gradient
        history.append(value)
        return -value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    end = z.detach()
    value, gradient = search.evaluate(end)
    largest = float(gradient.abs().max())
    finished = optimiser.state[z]["n_iter"] < max_steps and len(history) < 4 * max_steps
    if parameters.ends_at_bound(end):
        status = FitStatus.AT_BOUND
    elif largest <= tolerance:
        status = FitStatus.CONVERGED
    else:
        status = FitStatus.STAGNATED if finished else FitStatus.MAX_STEPS
    theta, _ = parameters.at_bounded(end)
    return Maximum(theta, (*history, value), status, largest, search.refused)


@final
class _Search:
    """The objective per datum as a function of bounded coordinates z."""

    def __init__(self, parameters: Parameters[Any], objective: Objective, n_data: int) -> None:
        self._parameters, self._objective, self._n = parameters, objective, n_data
        self._wall = math.nan
        self.refused = 0

    def evaluate(self, z: Tensor) -> tuple[float, Tensor]:
        """(objective + ln prior) / N at z and its gradient in z."""
        theta, slope = self._parameters.at_bounded(z)
        value, gradient = self._objective(theta)
        log_prior, pull = self._parameters.log_prior(theta)
        return (value + log_prior) / self._n, (gradient + pull) * slope / self._n

    def attempt(self, z: Tensor) -> tuple[float, Tensor]:
        """`evaluate`, or the wall where the model is refused; not at the start."""
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


def gradient_at(theta: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    """Value and gradient (P,) of a scalar function at θ (P,), by reverse mode."""
    leaf = theta.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient
