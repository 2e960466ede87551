"""Hyperparameters by Newton steps on the evidence: few of them, each one global solve.

The evidence itself is never computed, only its gradient. Random numbers are the same in every step,
so the gradient is a smooth, deterministic function of the parameters, whose root is found by Newton
steps in log-parameters with the average information as metric, inside a trust radius.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, final

import torch
from torch import Tensor

from dustmap.gp import Batch, FitStatus, GPModel, Parameters
from dustmap.inference._checkpoint import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    PartOfWhole,
    load_reader,
)
from dustmap.inference._newton import TrustRegion, bounded_step
from dustmap.inference._state import ParameterVector, State, StateReader, state_of
from dustmap.inference.evidence._learn_values import (
    AbstractMaker,
    AbstractSolver,
    LearnedModel,
    LearnSettings,
    LearnStep,
    PriorDraws,
    T,
)
from dustmap.inference.evidence._newton_point import (
    Evaluator,
    EvaluatorState,
    Point,
    SolvedState,
)
from dustmap.inference.solve._grid_model import GRID_STREAM
from dustmap.linalg import KeyedNormal

#: Larger steps are taken whatever their Monte Carlo error.
_SMALL = 0.2
#: Rejected trials in a row after which the iteration has stagnated.
_PATIENCE = 4


#: The name of the states of the iteration.
_NEWTON = "learn_evidence"


@final
@dataclass(eq=False)
class _Iteration:
    """θ (P,) of the next solve and its samples; radius of the trust region; rejected: trials in a
    row; status: where the iteration is over; history: every solve."""

    theta: ParameterVector
    radius: float
    samples: int
    rejected: int = 0
    status: FitStatus = FitStatus.MAX_STEPS
    is_over: bool = False
    history: list[LearnStep] = field(default_factory=list)


@final
@dataclass(frozen=True, eq=False)
class _Best:
    """The solution of a result, and the maker's state after the last solve."""

    solved: SolvedState
    maker: State


@final
class _Newton(Generic[T]):
    """The state of the iteration."""

    def __init__(
        self,
        evaluator: Evaluator[T],
        maker: AbstractMaker,
        settings: LearnSettings,
        floor: Tensor,
        checkpointer: AbstractCheckpointer,
    ) -> None:
        self._settings, self._maker, self._checkpointer = settings, maker, checkpointer
        self._evaluator, self._floor = evaluator, floor
        parameters = evaluator.parameters
        self._origin, self._low, self._high = parameters.theta, parameters.lower, parameters.upper
        self._at = _Iteration(self._origin, settings.largest_step, settings.samples)
        self._best: Point[T] | None = None

    def learned(self, progress: Callable[[LearnStep], None] | None) -> LearnedModel[T]:
        """One solve after the other, until the status is known; from where the checkpointer is."""
        reader = load_reader(self._checkpointer, _NEWTON)
        if reader is not None:
            if reader.finished:
                return self._restored_result(reader)
            self._restore(reader)
        while not self._at.is_over and len(self._at.history) < self._settings.max_steps:
            self._step(progress)
            self._checkpointer.save_if_due(self._snapshot)
        return self._result()

    def _step(self, progress: Callable[[LearnStep], None] | None) -> None:
        """One solve, and where it leads."""
        theta, base = self._at.theta, self._best
        point, fraction = self._point(theta), 1.0
        if base is not None and _comparable(base, point):
            fraction = _fraction(base, point)
        accepted = base is None or fraction >= 1.0
        if base is None or accepted:
            self._at.rejected = 0
            if base is not None:
                self._at.radius = self._new_radius(base, point)
            self._best = base = point
        else:
            self._at.rejected += 1
            self._at.radius = fraction * float((theta - base.theta).abs().max())
        step = self._record(point, accepted)
        self._at.history.append(step)
        if progress is not None:
            progress(step)
        if accepted:
            self._at.is_over = self._finished(point)
        elif self._at.rejected >= _PATIENCE or self._at.radius < self._settings.tolerance:
            self._at.status, self._at.is_over = FitStatus.STAGNATED, True
        if not self._at.is_over:
            self._at.theta = self._next(base, self._at.radius)

    def _result(self) -> LearnedModel[T]:
        """The best point."""
        point = self._best
        assert point is not None
        down = torch.where(self._low > self._floor, point.theta - self._low, torch.inf)
        room = torch.minimum(down, self._high - point.theta)
        if bool((room < 1e-3).any()):
            self._at.status = FitStatus.AT_BOUND
        learned = LearnedModel(
            self._evaluator.gp_at(point.theta, point.solution),
            point.model.detached(),
            point.solution,
            self._at.status,
            tuple(self._at.history),
            tuple(point.standard_deviations.tolist()),
            tuple(point.monte_carlo_errors.tolist()),
            point.grid_error,
        )
        best = _Best(self._evaluator.solved_state(point.solved), self._maker.snapshot())
        self._checkpointer.finish(state_of(_NEWTON, learned, best, finished=True))
        return learned

    def _snapshot(self) -> State:
        assert self._best is not None
        return state_of(_NEWTON, self._at, self._best, self._evaluator.snapshot(self._best))

    def _restore(self, reader: StateReader) -> None:
        like, sizes = self._evaluator.like, self._evaluator.sizes
        self._at = reader.read(_Iteration, like, **sizes)
        solved = self._evaluator.restore(reader.read(EvaluatorState, like, **sizes))
        self._best = Point(solved=solved, **reader.fields(Point, like, **sizes))

    def _restored_result(self, reader: StateReader) -> LearnedModel[T]:
        """What `_result` gave, with the maker as it left it."""
        stored = reader.read(_Best, self._evaluator.like, **self._evaluator.sizes)
        best = self._evaluator.solved(stored.solved)
        self._maker.restore(stored.maker)
        gp = self._evaluator.gp_at(best.theta, best.solution)
        fields = reader.fields(LearnedModel)
        return LearnedModel(gp=gp, model=best.model, solution=best.solution, **fields)

    def _point(self, theta: Tensor) -> Point[T]:
        checkpointer = PartOfWhole(self._checkpointer.child("solve"), len(self._at.history))
        return self._evaluator.at(theta, self._at.samples, checkpointer)

    def _next(self, base: Point[T], radius: float) -> Tensor:
        theta = base.theta + bounded_step(base.gradient, base.information, radius, self._held(base))
        return theta.clamp(self._low, self._high)

    def _held(self, point: Point[T]) -> Tensor:
        """Which parameters (P,) are at a limit that the gradient leads across."""
        above = (point.theta >= self._high) & (point.gradient > 0)
        return above | ((point.theta <= self._low) & (point.gradient < 0))

    def _new_radius(self, base: Point[T], point: Point[T]) -> float:
        region = TrustRegion(self._settings.largest_step, self._at.radius)
        taken = region.after(point.theta - base.theta, base.gradient, base.information)
        return taken.radius_at(point.gradient)

    def _finished(self, point: Point[T]) -> bool:
        held = self._held(point)
        largest = self._settings.largest_step
        step = bounded_step(point.gradient, point.information, largest, held)
        errors = point.monte_carlo_errors
        allowed = (0.5 * errors).clamp_max(_SMALL).clamp_min(self._settings.tolerance)
        if bool((step.abs() > allowed).any()):
            return False
        coarse = ~held & (errors > self._settings.accuracy * point.standard_deviations)
        if bool(coarse.any()) and 2 * self._at.samples <= self._settings.max_samples:
            self._at.samples *= 2
            return False
        self._at.status = FitStatus.CONVERGED
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


def _comparable(base: Point[T], point: Point[T]) -> bool:
    """Whether both gradients are of one function: equal random numbers on equal tori."""
    return base.solution.deviations.shape == point.solution.deviations.shape


def _fraction(base: Point[T], point: Point[T]) -> float:
    """1 for a step up, else which fraction of it reaches the top along its line.

    By the trapezoid rule the gain is ½ sᵀ(g₀ + g₁); the slope vanishes at the secant's root.
    """
    step = point.theta - base.theta
    before, after = float(step @ base.gradient), float(step @ point.gradient)
    if before + after >= 0.0:
        return 1.0
    return min(max(before / (before - after), 0.1), 0.5)


def learn_evidence(
    maker: AbstractMaker,
    model: GPModel,
    data: Batch,
    settings: LearnSettings,
    solve: AbstractSolver[T],
    *,
    prior_draws: PriorDraws | None = None,
    weights: Tensor | None = None,
    ceilings: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
    progress: Callable[[LearnStep], None] | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
) -> LearnedModel[T]:
    """Maximises ln p(y | θ) over what `model` learns of kernel and likelihood, all logarithms.

    Coefficients of a learned mean take the values of each solution. The fitted model is in the
    result.

    maker: of the gridded model; it may change the torus, and what solves can reuse is then dropped.
    prior_draws: without them the gradient in the length scale is many times noisier where the data
        determine the field well; `keyed_prior_draws` has those of `solve_global`.
    weights (N,): the noise variances are divided by them.
    ceilings: the largest log-parameters, by their names; where the iteration ends there, it says
        so. floors: the least ones; what ends there is next to nothing, and that is no fault.
    checkpointer: saves a state after every step, and inside the solves; progress is called with
        new steps only.
    """
    start = Parameters.of(model, without=("mean",), prior_std=settings.prior_std)
    start.require_some("kernel or likelihood")
    parameters = start.limited(ceilings or {}, floors or {})
    floor = replace(start, lower=torch.full_like(start.theta, -torch.inf)).limited({}, floors or {})
    evaluator = Evaluator(maker, parameters, data, solve, prior_draws, weights)
    return _Newton(evaluator, maker, settings, floor.lower, checkpointer).learned(progress)


def keyed_prior_draws(seed: int) -> PriorDraws:
    """The prior draws of `solve_global` with this seed."""

    def draws(deviations: Tensor) -> Tensor:
        normal, width = KeyedNormal(seed, GRID_STREAM), deviations.shape[1]
        rows = range(len(deviations))
        return torch.stack(
            [normal.draw(s, width, deviations.dtype, deviations.device) for s in rows]
        )

    return draws
