"""Newton steps up the evidence inside a trust radius, without a value of the evidence."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, final

import torch
from torch import Tensor

from dustmap.gp import Batch, FitStatus
from dustmap.inference.evidence._climb_point import Evaluator, Point, assign_mean, with_prior
from dustmap.inference.evidence._learn_values import (
    LearnedModel,
    LearnSettings,
    LearnStep,
    PriorDraws,
    Solve,
    T,
)
from dustmap.inference.solve._grid_model import GridModel

#: Log-parameters stay within this distance of their start, a factor of 1000 either way, and below
#: their ceilings.
_LOG_RANGE = math.log(1e3)
#: Larger steps are taken whatever their Monte Carlo error.
_SMALL = 0.2
#: Rejected trials in a row after which the climb has stagnated.
_PATIENCE = 4


@final
class Climb(Generic[T]):
    """The state of one climb."""

    def __init__(
        self,
        build: Callable[[], GridModel],
        data: Batch,
        settings: LearnSettings,
        solve: Solve[T],
        prior_draws: PriorDraws | None,
        weights: Tensor | None,
        ceilings: Mapping[int, float],
        floors: Mapping[int, float],
    ) -> None:
        self._settings = settings
        self._evaluator = Evaluator(build, data, solve, prior_draws, weights)
        self._origin = self._evaluator.present()
        self._floor = self._evaluator.limits(floors, -math.inf).minimum(self._origin)
        self._low = (self._origin - _LOG_RANGE).maximum(self._floor)
        ceiling = self._evaluator.limits(ceilings, math.inf).maximum(self._origin)
        self._high = (self._origin + _LOG_RANGE).minimum(ceiling)
        self._samples = settings.samples
        self._best: Point[T] | None = None
        self._status = FitStatus.MAX_STEPS

    def steps(self) -> Iterator[LearnStep]:
        """One solve each, until the status is known."""
        radius, rejected = self._settings.largest_step, 0
        theta = self._origin
        for _ in range(self._settings.max_steps):
            point = self._point(theta)
            base, fraction = self._best, 1.0
            if base is not None and _comparable(base, point):
                fraction = _fraction(base, point)
            if base is None or fraction >= 1.0:
                rejected = 0
                if base is not None:
                    radius = self._new_radius(radius, base, point)
                self._best = base = point
                yield self._record(point, accepted=True)
                if self._finished(point):
                    return
            else:
                rejected += 1
                radius = fraction * float((theta - base.theta).abs().max())
                yield self._record(point, accepted=False)
                if rejected >= _PATIENCE or radius < self._settings.tolerance:
                    self._status = FitStatus.STAGNATED
                    return
            theta = self._next(base, radius)

    def result(self, history: tuple[LearnStep, ...]) -> LearnedModel[T]:
        """The best point; its parameters are put back."""
        point = self._best
        assert point is not None
        self._evaluator.load(point.theta)
        assign_mean(point.model, point.solution)
        down = torch.where(self._low > self._floor, point.theta - self._low, torch.inf)
        room = torch.minimum(down, self._high - point.theta)
        if bool((room < 1e-3).any()):
            self._status = FitStatus.AT_BOUND
        return LearnedModel(
            point.model,
            point.solution,
            self._status,
            history,
            tuple(point.standard_deviations.tolist()),
            tuple(point.monte_carlo_errors.tolist()),
            point.grid_error,
        )

    def _point(self, theta: Tensor) -> Point[T]:
        point = self._evaluator.at(theta, self._samples)
        std = self._settings.prior_std
        return point if std is None else with_prior(point, self._origin, std)

    def _next(self, base: Point[T], radius: float) -> Tensor:
        theta = base.theta + bounded_step(base.gradient, base.information, radius, self._held(base))
        return theta.clamp(self._low, self._high)

    def _held(self, point: Point[T]) -> Tensor:
        """Which parameters (P,) are at a limit that the gradient leads across."""
        above = (point.theta >= self._high) & (point.gradient > 0)
        return above | ((point.theta <= self._low) & (point.gradient < 0))

    def _new_radius(self, radius: float, base: Point[T], point: Point[T]) -> float:
        step = point.theta - base.theta
        gain = 0.5 * float(step @ (base.gradient + point.gradient))
        promised = float(step @ base.gradient - 0.5 * step @ base.information @ step)
        if gain > 0.5 * promised:
            return min(2.0 * radius, self._settings.largest_step)
        return radius if gain > 0.25 * promised else 0.5 * radius

    def _finished(self, point: Point[T]) -> bool:
        held = self._held(point)
        largest = self._settings.largest_step
        step = bounded_step(point.gradient, point.information, largest, held)
        errors = point.monte_carlo_errors
        allowed = (0.5 * errors).clamp_max(_SMALL).clamp_min(self._settings.tolerance)
        if bool((step.abs() > allowed).any()):
            return False
        coarse = ~held & (errors > self._settings.accuracy * point.standard_deviations)
        if bool(coarse.any()) and 2 * self._samples <= self._settings.max_samples:
            self._samples *= 2
            return False
        self._status = FitStatus.CONVERGED
        return True

    def _record(self, point: Point[T], accepted: bool) -> LearnStep:
        return LearnStep(
            tuple(point.theta.tolist()),
            tuple(point.gradient.tolist()),
            tuple(point.error.diagonal().sqrt().tolist()),
            len(point.solution.deviations),
            point.solution.block_steps,
            point.model.features.n_features,
            accepted,
        )


def bounded_step(
    gradient: Tensor, information: Tensor, radius: float, held: Tensor | None = None
) -> Tensor:
    """The Newton step I⁻¹ g (P,), its too long components cut to the radius one by one.

    The others are solved for anew each time: one badly determined parameter then does not hold back
    the rest. gradient g (P,); information I (P, P), positive definite; held (P,): what stays.
    """
    step = torch.zeros_like(gradient)
    free = torch.ones_like(gradient, dtype=torch.bool) if held is None else ~held
    while bool(free.any()):
        rest = gradient[free] - information[free][:, ~free] @ step[~free]
        step[free] = torch.linalg.solve(information[free][:, free], rest)
        if float(step.abs().max()) <= radius:
            break
        worst = int(torch.where(free, step.abs(), -1.0).argmax())
        step[worst] = math.copysign(radius, float(step[worst]))
        free[worst] = False
    return step


def _comparable(base: Point[T], point: Point[T]) -> bool:
    """Whether both gradients are of one function: equal random numbers on equal tori."""
    return base.solution.deviations.shape == point.solution.deviations.shape


def _fraction(base: Point[T], point: Point[T]) -> float:
    """1 for a step that climbed, else which fraction of it reaches the top along its line.

    By the trapezoid rule the gain is ½ sᵀ(g₀ + g₁); the slope vanishes at the secant's root.
    """
    step = point.theta - base.theta
    before, after = float(step @ base.gradient), float(step @ point.gradient)
    if before + after >= 0.0:
        return 1.0
    return min(max(before / (before - after), 0.1), 0.5)
