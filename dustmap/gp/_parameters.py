"""Parameters of a model as a value: names, an unconstrained vector θ, and models built from it.

Kernels, means, likelihoods, feature maps and models are immutable and know their `Parameter`s.
`Parameters.of(model)` gathers what is learned into one vector θ; `build(θ)` is the model there,
whose tensors carry the graph of θ. Gradients, differences and optimisers all go through `build`.
`maximise` finds maxima of functions of θ by L-BFGS in bounded coordinates of order one.
"""

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._lbfgs import minimise
from dustmap.linalg import AT_MOST, Progress, unwatched

#: Logarithms stay within this distance of their start: a factor of 1000 either way.
LOG_RANGE = math.log(1e3)
#: θ (P,) ↦ an objective and its gradient (P,).
Objective = Callable[[Tensor], tuple[float, Tensor]]
#: How far below the start a point is taken to be at which the model is refused: a wall from which
#: the line search turns back.
_WALL = 1e3
#: Its steps, as progress counts them.
_CLIMB = f"steps of L-BFGS{AT_MOST}"


@final
@dataclass(frozen=True, eq=False)
class Parameter:
    """One tensor (...) of a model: its name in reports, its unconstrained value, whether that is a
    logarithm, and whether it is learned.
    """

    name: str
    value: Tensor
    is_log: bool
    is_learned: bool = True

    @staticmethod
    def log(name: str, value: float | Sequence[float], *, learn: bool = True) -> "Parameter":
        """Return the logarithm of positive numbers, float64."""
        return Parameter(name, torch.tensor(value, dtype=torch.float64).log(), True, learn)

    @staticmethod
    def linear(name: str, value: float | Sequence[float], *, learn: bool = True) -> "Parameter":
        """Return numbers as they are, float64."""
        return Parameter(name, torch.tensor(value, dtype=torch.float64), False, learn)

    def at(self, value: Tensor) -> "Parameter":
        """The same parameter at another value."""
        return replace(self, value=value)

    def reshaped(self, value: Tensor) -> "Parameter":
        """The same parameter at another value of any shape, or at one number for all of its own, in
        its own shape and dtype."""
        every = value.to(self.value).flatten().expand(self.value.numel())
        return self.at(every.reshape(self.value.shape))

    def indexed(self, index: int) -> "Parameter":
        """The same as one of several of a name: length[0], length[1], ..."""
        stem, bracket, rest = self.name.partition("[")
        return replace(self, name=f"{stem}[{index}]{bracket}{rest}")

    def is_one_of(self, names: Collection[str]) -> bool:
        """Whether its name is among `names`, with its index or without."""
        return self.name in names or self.name.partition("[")[0] in names


class AbstractParametric:
    """An immutable value with parameters, which can be built anew with other ones.

    parts: the fields of a dataclass whose parameters are its own, one after the other; what has
    parameters that are in no field overrides both methods.
    """

    parts: ClassVar[tuple[str, ...]] = ()

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters, learned or not, in a fixed order."""
        return tuple(p for name in self.parts for p in getattr(self, name).parameters())

    def with_parameters(self, parameters: Sequence[Parameter]) -> Self:
        """The same with other values of its parameters, in their order."""
        changed, start = dict[str, AbstractParametric](), 0
        for name in self.parts:
            part = getattr(self, name)
            stop = start + len(part.parameters())
            changed[name] = part.with_parameters(parameters[start:stop])
            start = stop
        own: Any = self
        return replace(own, **changed) if changed else self

    @property
    def is_learned(self) -> bool:
        """Whether any parameter is learned."""
        return any(p.is_learned for p in self.parameters())

    def learning(self, *names: str) -> Self:
        """The same where the parameters of these names are learned, and no others."""
        own = self.parameters()
        for name in names:
            if not any(p.is_one_of((name,)) for p in own):
                known = ", ".join(p.name for p in own) or "none"
                raise UserError(f'parameter "{name}" is unknown: expected some of {known}')
        return self._mapped(lambda p: replace(p, is_learned=p.is_one_of(names)))

    def holding(self, *names: str) -> Self:
        """The same where the parameters of these names are not learned."""
        return self._mapped(
            lambda p: replace(p, is_learned=p.is_learned and not p.is_one_of(names))
        )

    def fixed(self) -> Self:
        """The same where nothing is learned."""
        return self.learning()

    def with_value(self, name: str, value: Tensor) -> Self:
        """The same with another unconstrained value of the parameters of a name, or one number."""
        return self._mapped(lambda p: p.reshaped(value) if p.is_one_of((name,)) else p)

    def detached(self) -> Self:
        """The same values without their graph."""
        return self._mapped(lambda p: p.at(p.value.detach()))

    def to(self, device: torch.device | str) -> Self:
        """The same with its parameters on a device."""
        return self._mapped(lambda p: p.at(p.value.to(device)))

    def _mapped(self, function: Callable[[Parameter], Parameter]) -> Self:
        return self.with_parameters([function(p) for p in self.parameters()])


M = TypeVar("M", bound=AbstractParametric)


@final
@dataclass(frozen=True, eq=False)
class Parameters(Generic[M]):
    """The learned parameters of a model as one vector θ (P,) on the CPU, float64.

    model: θ is where it is; names, is_log, scale (P,): of every number, scale being what a step
    of one is to those that are no logarithms. lower, upper (P,): bounds of θ. Priors are normal,
    ln N(θ; centre, prior_std²) of the logarithms, or None for flat.
    """

    model: M
    names: tuple[str, ...]
    theta: Tensor
    is_log: Tensor
    scale: Tensor
    lower: Tensor
    upper: Tensor
    centre: Tensor
    prior_std: float | None = None
    without: tuple[str, ...] = ()

    @staticmethod
    def of(
        model: M,
        *,
        without: Sequence[str] = (),
        scales: Mapping[str, Tensor] | None = None,
        prior_std: float | None = None,
    ) -> "Parameters[M]":
        """Return what `model` learns, but for parameters of the names in `without`.

        scales: of parameters that are no logarithms, by their names, of their shapes.
        """
        learned = [p for p in model.parameters() if p.is_learned and not p.is_one_of(without)]
        numbers = [p for p in learned for _ in range(p.value.numel())]
        theta = _joined([p.value for p in learned])
        ones = [(scales or {}).get(p.name, torch.ones_like(p.value)) for p in learned]
        is_log = torch.tensor([p.is_log for p in numbers], dtype=torch.bool)
        reach = torch.where(is_log, LOG_RANGE, math.inf).to(theta)
        return Parameters(
            model,
            tuple(p.name for p in numbers),
            theta,
            is_log,
            _joined(ones),
            theta - reach,
            theta + reach,
            theta,
            prior_std,
            tuple(without),
        )

    def __len__(self) -> int:
        return len(self.theta)

    def require_some(self, owner: str) -> None:
        """Raise unless anything is learned."""
        if len(self) == 0:
            raise UserError(
                f"nothing to learn: no parameter of {owner} is learned; see `learning(names)`"
            )

    def build(self, theta: Tensor) -> M:
        """The model at θ (P,), with its graph; parameters that are not learned stay."""
        values, start = [], 0
        for p in self.model.parameters():
            if not p.is_learned or p.is_one_of(self.without):
                values.append(p)
                continue
            values.append(p.reshaped(theta[start : start + p.value.numel()]))
            start += p.value.numel()
        return self.model.with_parameters(values)

    def at_bounded(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """θ and dθ/dz (P,) at bounded coordinates z (P,), zero at the start.

        Logarithms are θ₀ + B tanh(z/B), so that no line search can leave the range B; all others
        are θ₀ + scale z.
        """
        squashed = torch.tanh(z / LOG_RANGE)
        theta = self.theta + torch.where(self.is_log, LOG_RANGE * squashed, self.scale * z)
        return theta, torch.where(self.is_log, 1.0 - squashed.square(), self.scale)

    def at_bound(self, theta: Tensor) -> Tensor:
        """Which logarithms (P,) have used up 94 % of their range at θ (P,)."""
        return self.is_log & ((theta - self.theta).abs() > 0.94 * LOG_RANGE)

    def log_prior(self, theta: Tensor) -> tuple[float, Tensor]:
        """ln N(θ; centre, std²) of the logarithms up to a constant, and its gradient (P,)."""
        if self.prior_std is None:
            return 0.0, torch.zeros_like(self.theta)
        deviation = (theta - self.centre) / self.prior_std * self.is_log
        return -0.5 * float(deviation.square().sum()), -deviation / self.prior_std

    def prior_precision(self) -> Tensor:
        """Minus the second derivative of `log_prior`, (P, P)."""
        if self.prior_std is None:
            return torch.zeros(len(self), len(self), dtype=self.theta.dtype)
        return torch.diag(self.is_log.to(self.theta) / self.prior_std**2)

    def limited(
        self, ceilings: Mapping[str, float], floors: Mapping[str, float]
    ) -> "Parameters[M]":
        """Add bounds by the names of parameters; the start stays within them."""
        high = self._by_name(ceilings, math.inf).maximum(self.theta)
        low = self._by_name(floors, -math.inf).minimum(self.theta)
        return replace(self, lower=self.lower.maximum(low), upper=self.upper.minimum(high))

    def held(self, theta: Tensor, gradient: Tensor) -> Tensor:
        """Which parameters (P,) are at a bound that the gradient (P,) leads across at θ (P,)."""
        above = (theta >= self.upper) & (gradient > 0)
        return above | ((theta <= self.lower) & (gradient < 0))

    def inside(self, theta: Tensor) -> Tensor:
        """θ (P,) within its bounds."""
        return theta.clamp(self.lower, self.upper)

    def _by_name(self, limits: Mapping[str, float], otherwise: float) -> Tensor:
        bounds = [limits.get(n, limits.get(n.partition("[")[0], otherwise)) for n in self.names]
        return torch.tensor(bounds, dtype=self.theta.dtype)


def _joined(values: Sequence[Tensor]) -> Tensor:
    if not values:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([v.detach().double().reshape(-1).cpu() for v in values])


@final
class FitStatus(enum.Enum):
    """The end of a maximisation."""

    CONVERGED = "converged"
    MAX_STEPS = "max_steps"
    AT_BOUND = "at_bound"
    STAGNATED = "stagnated"

    @property
    def remedy(self) -> str:
        """Advice to the caller."""
        return _WHAT_TO_DO[self]


_WHAT_TO_DO = {
    FitStatus.CONVERGED: "nothing to do",
    FitStatus.MAX_STEPS: "the gradient is not small yet: increase max_steps",
    FitStatus.AT_BOUND: (
        "a parameter moved by a factor of nearly 1000 from its start: the data may not constrain "
        "it; start elsewhere, or fix it"
    ),
    FitStatus.STAGNATED: (
        "the line search found no better point though the gradient is not small: start elsewhere"
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
    progress: Progress = unwatched,
) -> Maximum:
    """L-BFGS with strong Wolfe line searches from `parameters.theta` (P,), on objective + ln prior.

    objective: of θ; a ValueError of it, but at the start, is a wall. n_data: N, by which the sum
    is divided. tolerance: of the largest |gradient|, below which it stops. progress: of its steps.
    The objective is evaluated at the end once more.
    """
    history, refused = list[float](), list[Tensor]()

    def evaluate(z: Tensor) -> tuple[float, Tensor]:
        theta, slope = parameters.at_bounded(z)
        value, gradient = objective(theta)
        log_prior, pull = parameters.log_prior(theta)
        return (value + log_prior) / n_data, (gradient + pull) * slope / n_data

    def cost(z: Tensor) -> tuple[float, Tensor]:
        try:
            value, gradient = evaluate(z)
        except ValueError:
            if not history:
                raise
            refused.append(z)
            value, gradient = history[0] - _WALL * (1.0 + abs(history[0])), torch.zeros_like(z)
        history.append(value)
        return -value, -gradient

    lowest = minimise(
        cost,
        torch.zeros_like(parameters.theta),
        max_steps=max_steps,
        max_evaluations=4 * max_steps,
        tolerance=tolerance,
        on_step=lambda steps: progress(_CLIMB, steps - 1, max_steps),
    )
    progress(_CLIMB, max_steps, max_steps)
    value, gradient = evaluate(lowest.x)
    largest = float(gradient.abs().max())
    finished = lowest.steps < max_steps and lowest.evaluations < 4 * max_steps
    theta, _ = parameters.at_bounded(lowest.x)
    if bool(parameters.at_bound(theta).any()):
        status = FitStatus.AT_BOUND
    elif largest <= tolerance:
        status = FitStatus.CONVERGED
    else:
        status = FitStatus.STAGNATED if finished else FitStatus.MAX_STEPS
    return Maximum(theta, (*history, value), status, largest, len(refused))


def gradient_at(theta: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    """Value and gradient (P,) of a scalar function at θ (P,), by reverse mode."""
    leaf = theta.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient
