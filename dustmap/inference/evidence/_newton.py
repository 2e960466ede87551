"""Hyperparameters by Newton steps on the evidence: few of them, each one global solve.

The evidence itself is never computed, only its gradient. Random numbers are the same in every step,
so the gradient is a smooth, deterministic function of the parameters, whose root is found by Newton
steps in log-parameters with the average information as metric, inside a trust radius.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Generic, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, FitStatus, GPModel, Parameters
from dustmap.inference._state import (
    NO_CHECKPOINTS,
    REBUILT,
    AbstractCheckpointer,
    ParameterVector,
    PartOfWhole,
    State,
    StateReader,
    load_reader,
    state_of,
)
from dustmap.inference.evidence._newton_point import (
    AbstractMaker,
    AbstractSolver,
    Evaluator,
    EvaluatorState,
    Point,
    PriorDraws,
    SolvedState,
    T,
)
from dustmap.inference.solve._grid_model import GRID_STREAM, GridModel
from dustmap.linalg import KeyedNormal

#: A residual variance above this fraction of the noise makes the result depend on the grid.
_FINE_ENOUGH = 0.3
#: Larger steps are taken whatever their Monte Carlo error.
_SMALL = 0.2
#: Rejected trials in a row after which the iteration has stagnated.
_PATIENCE = 4
#: The name of the states of the iteration.
_NEWTON = "learn_evidence"


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


@final
@dataclass(frozen=True, eq=False)
class TrustRegion:
    """A bound `radius` ≤ `largest` of the components of steps, and the last step that was taken.

    step Δθ (P,), with the gradient (P,) where it started and the gain in the objective that it
    promised; None before there is one.
    """

    largest: float
    radius: float
    step: ParameterVector | None = None
    gradient: ParameterVector | None = None
    promised: float = 0.0

    @staticmethod
    def of(largest: float) -> "TrustRegion":
        """As wide as it gets."""
        return TrustRegion(largest, largest)

    def within(self, radius: float) -> "TrustRegion":
        """Of another radius, without a step to judge."""
        return TrustRegion(self.largest, radius)

    def after(self, step: Tensor, gradient: Tensor, information: Tensor) -> "TrustRegion":
        """With a step (P,) that was taken from where these were found."""
        promised = float(step @ gradient - 0.5 * step @ information @ step)
        return replace(self, step=step, gradient=gradient, promised=promised)

    def radius_at(self, gradient: Tensor) -> float:
        """Twice the radius after a step that gained what it promised, half of it after one that
        did not; by the trapezoid rule the gain is ½ sᵀ(g₀ + g)."""
        if self.step is None or self.gradient is None:
            return self.radius
        gain = 0.5 * float(self.step @ (self.gradient + gradient))
        if gain > 0.5 * self.promised:
            return min(2.0 * self.radius, self.largest)
        return self.radius if gain > 0.25 * self.promised else 0.5 * self.radius

    def turns_back(self, delta: Tensor) -> bool:
        """Whether Δθ (P,) leads back where the last step came from."""
        return self.step is not None and float(delta @ self.step) < 0.0

    @property
    def half_a_step(self) -> float:
        """Half of the last step's largest component."""
        return math.inf if self.step is None else 0.5 * float(self.step.abs().max())


@final
@dataclass(frozen=True)
class LearnSettings:
    """How to maximise the evidence.

    max_steps: solves at most. samples: deviations per solve, doubled (to at most `max_samples`)
        where their Monte Carlo error exceeds `accuracy` standard deviations of a parameter. Data
        sets that are fitted with the same seed share that error: it does not average out over them.
    tolerance: stop when the next step in every log-parameter is below it, or below half of the
        parameter's Monte Carlo error if that is small.
    largest_step: of a log-parameter. prior_std: if given, every log-parameter gets a normal prior
        of this width around its start.
    """

    max_steps: int = 20
    samples: int = 16
    max_samples: int = 64
    accuracy: float = 0.5
    tolerance: float = 1e-3
    largest_step: float = 1.0
    prior_std: float | None = None

    def __post_init__(self) -> None:
        if self.samples < 2 or self.max_steps < 1:
            raise UserError(
                f"samples must be at least 2 and max_steps at least 1, got samples={self.samples}, "
                f"max_steps={self.max_steps}"
            )
        for name in ("accuracy", "tolerance", "largest_step", "prior_std"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be positive and finite, got {value}")


@final
@dataclass(frozen=True)
class LearnStep:
    """One solve on the way; P numbers each, of the parameters that are learned.

    parameters: logs; gradient: of ln evidence + ln prior; errors: Monte Carlo, of the gradient;
    samples; solver_steps; n_features; accepted: whether the next step started here.
    """

    parameters: tuple[float, ...]
    gradient: tuple[float, ...]
    errors: tuple[float, ...]
    samples: int
    solver_steps: int
    n_features: int
    accepted: bool


@final
@dataclass(frozen=True, eq=False)
class LearnedModel(Generic[T]):
    """Where Newton's steps ended.

    gp: the fitted kernel, mean and noise; model, solution: on the grid, at these. status. history:
    every solve.
    standard_deviations: of each log-parameter given the data, from the average information.
    monte_carlo_errors: what the finite number of deviations adds to that.
    grid_error: median of Var r / σ² over the data; see `depends_on_grid`.
    """

    gp: Annotated[GPModel, REBUILT]
    model: Annotated[GridModel, REBUILT]
    solution: Annotated[T, REBUILT]
    status: FitStatus
    history: tuple[LearnStep, ...]
    standard_deviations: tuple[float, ...]
    monte_carlo_errors: tuple[float, ...]
    grid_error: float

    @property
    def depends_on_grid(self) -> bool:
        """Whether Var r is so large that another grid would give other parameters."""
        return self.grid_error > _FINE_ENOUGH

    @property
    def parameters(self) -> tuple[float, ...]:
        """Final logs, those of the last accepted step."""
        return next(step.parameters for step in reversed(self.history) if step.accepted)

    def message(self) -> str:
        """One or two sentences on how it ended."""
        steps = len(self.history)
        text = f"learning {self.status.value} after {steps} solves"
        if not self.depends_on_grid:
            return f"{text}: {self.status.remedy}"
        return (
            f"{text}; the result depends on the grid, whose median residual variance is "
            f"{self.grid_error:.2g} of the noise: use a finer grid (aim below {_FINE_ENOUGH:g})"
        )


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
