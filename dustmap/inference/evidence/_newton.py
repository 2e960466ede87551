"""Hyperparameters by Newton steps on the evidence: few of them, each one global solve.

The evidence itself is never computed, only its gradient. Random numbers are the same in every step,
so the gradient is a smooth, deterministic function of the parameters, whose root is found by Newton
steps in log-parameters with the average information as metric, inside a trust radius.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Generic, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, FitStatus, GPModel, ParameterErrors, Parameters
from dustmap.inference import _state
from dustmap.inference.evidence import _newton_point, _steps
from dustmap.inference.evidence._newton_point import Evaluator, Point, Solved, T
from dustmap.inference.solve._grid_model import GRID_STREAM, GridModel
from dustmap.linalg import KeyedNormal

#: A residual variance above this fraction of the noise makes the result depend on the grid.
_FINE_ENOUGH = 0.3
#: Larger steps are taken whatever their Monte Carlo error.
_SMALL = 0.2
#: Steps s of fewer standard deviations, and ½ gᵀs of half its square, 0.005 nats, are not taken.
_AT_REST = 0.1
#: Rejected trials in a row after which the iteration has stagnated.
_PATIENCE = 4
#: Distance from a bound within which a parameter is at it.
_AT_BOUND = 1e-3
#: The name of the states of the iteration.
_NEWTON = "learn_evidence"
#: Deviations of a solve, and numbers of all of them up to which there are more: with 16 for 150
#: rays lengths came out up to a posterior standard deviation too short.
_SAMPLES, _FEW_NUMBERS = 16, 2**14


@final
@dataclass(frozen=True)
class LearnSettings:
    """Settings of `learn_evidence`.

    Attributes
    ----------
    max_steps, samples, max_samples : most solves, deviations of each, and how far these double;
        without a number 16, and more of few data
    accuracy : float
        Largest Monte Carlo error of a parameter, in its standard deviations: data sets that are
        fitted with the same seed share it.
    tolerance : float
        Stop when the next step in every log-parameter is below it, or below half of the parameter's
        Monte Carlo error if that is small; of exact gradients, below a tenth of its standard
        deviation.
    largest_step : of a log-parameter
    prior_std : width of a normal prior of every log-parameter around its start; None for a flat one
    """

    max_steps: int = 20
    samples: int | None = None
    max_samples: int = 64
    accuracy: float = 0.5
    tolerance: float = 1e-3
    largest_step: float = 1.0
    prior_std: float | None = None

    def __post_init__(self) -> None:
        if (self.samples is not None and self.samples < 2) or self.max_steps < 1:
            raise UserError(
                f"samples must be at least 2 and max_steps at least 1, got samples={self.samples}, "
                f"max_steps={self.max_steps}"
            )
        for name in ("accuracy", "tolerance", "largest_step", "prior_std"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be positive and finite, got {value}")

    def first_samples(self, n: int) -> int:
        """Return how many deviations the solves of n data have at first.

        Examples
        --------
        >>> [LearnSettings().first_samples(n) for n in (100, 400, 4000)]
        [64, 32, 16]
        """
        if self.samples is not None:
            return self.samples
        samples = _SAMPLES
        while 2 * samples <= self.max_samples and 2 * samples * n <= _FEW_NUMBERS:
            samples *= 2
        return samples


@final
@dataclass(frozen=True)
class LearnStep:
    """One solve on the way; P numbers each, of the parameters that are learned.

    Attributes
    ----------
    parameters : logarithms
    gradient : of ln evidence + ln prior
    samples, solver_steps, n_features
    accepted : whether the next step started here
    """

    parameters: tuple[float, ...]
    gradient: tuple[float, ...]
    samples: int
    solver_steps: int
    n_features: int
    accepted: bool


@final
@dataclass(frozen=True, eq=False)
class LearnedModel(Generic[T]):
    """Result of `learn_evidence`.

    Attributes
    ----------
    gp : the fitted kernel, mean and noise
    model, solution : on the grid, at these
    status, history : how it ended, and every solve
    standard_deviations : of each log-parameter given the data, from the average information
    monte_carlo_errors : what the finite number of deviations adds to that
    grid_error : median of Var r / σ² over the data; see `depends_on_grid`
    errors : covariance of the log-parameters given the data, and which of them are at a bound
    bend : (P, P) or None
        C of the curvature L C Lᵀ of the log evidence, L Lᵀ being the average information.
    """

    gp: Annotated[GPModel, _state.REBUILT]
    model: Annotated[GridModel, _state.REBUILT]
    solution: Annotated[T, _state.REBUILT]
    status: FitStatus
    history: tuple[LearnStep, ...]
    standard_deviations: tuple[float, ...]
    monte_carlo_errors: tuple[float, ...]
    grid_error: float
    errors: ParameterErrors | None = None
    bend: Annotated[Tensor | None, _state.Layout("theta", "P P")] = None

    @property
    def depends_on_grid(self) -> bool:
        """Whether Var r is so large that another grid would give other parameters."""
        return self.grid_error > _FINE_ENOUGH

    @property
    def parameters(self) -> tuple[float, ...]:
        """Final logs, those of the last accepted step."""
        return next(step.parameters for step in reversed(self.history) if step.accepted)

    @property
    def nats(self) -> float:
        """½ Δᵀ I Δ of the whole change of the logs, each in its standard deviations."""
        pairs = zip(self.history[0].parameters, self.parameters, strict=True)
        changes = zip(pairs, self.standard_deviations, strict=True)
        return 0.5 * sum(((there - here) / std) ** 2 for (here, there), std in changes)

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
@dataclass(frozen=True, eq=False)
class _State(Generic[T]):
    """State after a solve: θ (P,) and samples of the next one; rejected trials in a row; best: the
    last accepted point; latest: the last solution; is_over: whether the status is final."""

    theta: _state.ParameterVector
    radius: float
    samples: int
    rejected: int = 0
    status: FitStatus = FitStatus.MAX_STEPS
    is_over: bool = False
    history: tuple[LearnStep, ...] = ()
    best: Annotated[Point[T] | None, _state.REBUILT] = None
    latest: Annotated[Solved[T] | None, _state.REBUILT] = None


@final
@dataclass(frozen=True, eq=False)
class _Result:
    """The solution of a result, and the maker's state after the last solve."""

    solved: _newton_point.SolvedState
    maker: _state.State


@final
@dataclass(frozen=True, eq=False)
class _Newton(Generic[T]):
    """Newton's method on one evidence.

    floor (P,): lower limits that are no fault to end at. bend (P, P): of the first point.
    """

    evaluator: Evaluator[T]
    settings: LearnSettings
    floor: Tensor
    checkpointer: _state.AbstractCheckpointer
    bend: Tensor | None

    def states(self, state: _State[T]) -> Iterator[_State[T]]:
        """Yield the state after every solve that follows."""
        while not state.is_over and len(state.history) < self.settings.max_steps:
            state = self._next(state)
            yield state

    def _next(self, state: _State[T]) -> _State[T]:
        """Solve at θ, accept or reject the point, and choose the next θ."""
        base, settings = state.best, self.settings
        checkpointer = _state.PartOfWhole(self.checkpointer.child("solve"), len(state.history))
        point = self.evaluator.at(state.theta, state.samples, state.latest, checkpointer)
        fraction = 1.0 if base is None else _fraction(base, point)
        accepted = fraction >= 1.0
        history = *state.history, _record(point, accepted)
        state = replace(state, latest=point.solved, history=history)
        if accepted:
            radius = state.radius if base is None else self._radius(state.radius, base, point)
            point = point.bent(self.bend) if base is None else point.after(base)
            state = self._judged(replace(state, best=point, radius=radius, rejected=0), point)
        elif base is not None:
            radius = fraction * float((state.theta - base.theta).abs().max())
            state = replace(state, radius=radius, rejected=state.rejected + 1)
            if state.rejected >= _PATIENCE or radius < settings.tolerance:
                state = replace(state, status=FitStatus.STAGNATED, is_over=True)
        best = state.best
        if state.is_over or best is None:
            return state
        limits = self.evaluator.parameters
        held = limits.held(best.theta, best.gradient)
        step = _steps.bounded_step(best.gradient, best.metric, state.radius, held)
        return replace(state, theta=limits.inside(best.theta + step))

    def _radius(self, radius: float, base: Point[T], point: Point[T]) -> float:
        """Radius of the trust region after an accepted step."""
        region = _steps.TrustRegion(self.settings.largest_step, radius)
        taken = region.after(point.theta - base.theta, base.gradient, base.metric)
        return taken.radius_at(point.gradient)

    def _judged(self, state: _State[T], point: Point[T]) -> _State[T]:
        """Stop at the optimum, or double the samples where these are too few to tell."""
        settings, limits = self.settings, self.evaluator.parameters
        held = limits.held(point.theta, point.gradient)
        step = _steps.bounded_step(point.gradient, point.metric, settings.largest_step, held)
        errors = point.monte_carlo_errors
        allowed = (0.5 * errors).clamp_max(_SMALL).clamp_min(settings.tolerance)
        if not bool(errors.any()):
            allowed = allowed.maximum(_AT_REST * point.standard_deviations)
            # Where data say little of a parameter its standard deviations are long steps.
            if float(point.gradient @ step) > _AT_REST**2:
                return state
        if bool((step.abs() > allowed).any()):
            return state
        coarse = ~held & (errors > settings.accuracy * point.standard_deviations)
        if bool(coarse.any()) and 2 * state.samples <= settings.max_samples:
            return replace(state, samples=2 * state.samples)
        return replace(state, status=FitStatus.CONVERGED, is_over=True)

    def result(self, state: _State[T]) -> LearnedModel[T]:
        """Save and return the best point."""
        point, status, limits = state.best, state.status, self.evaluator.parameters
        assert point is not None
        high = limits.upper - point.theta < _AT_BOUND
        low = point.theta - limits.lower < _AT_BOUND
        if bool((high | (low & (limits.lower > self.floor))).any()):
            status = FitStatus.AT_BOUND
        learned = LearnedModel(
            self.evaluator.gp_at(point.theta, point.solution),
            point.model.detached(),
            point.solution,
            status,
            state.history,
            tuple(point.standard_deviations.tolist()),
            tuple(point.monte_carlo_errors.tolist()),
            point.grid_error,
            ParameterErrors.of_information(limits.names, point.information, high | low),
            point.bend,
        )
        stored = _Result(self.evaluator.snapshot(point.solved), self.evaluator.maker.snapshot())
        self.checkpointer.finish(_state.state_of(_NEWTON, learned, stored, finished=True))
        return learned

    def restored_result(self, reader: _state.StateReader) -> LearnedModel[T]:
        """The result of a finished computation, with the maker as it was left."""
        stored = reader.read(_Result, self.evaluator.like, **self.evaluator.sizes)
        best = self.evaluator.restored(stored.solved)
        self.evaluator.maker.restore(stored.maker)
        gp = self.evaluator.gp_at(best.theta, best.solution)
        fields = reader.fields(LearnedModel, self.evaluator.like, **self.evaluator.sizes)
        return LearnedModel(gp=gp, model=best.model, solution=best.solution, **fields)

    def snapshot(self, state: _State[T]) -> _state.State:
        """All of a state."""
        best, latest, taken = state.best, state.latest, self.evaluator.snapshot
        assert best is not None
        assert latest is not None
        other = None if best.solved is latest else taken(best.solved)
        stored = _newton_point.EvaluatedState(taken(latest), other, latest.rates)
        return _state.state_of(_NEWTON, state, best, stored)

    def restored(self, reader: _state.StateReader) -> _State[T]:
        """The state of a snapshot."""
        like, sizes = self.evaluator.like, self.evaluator.sizes
        stored = reader.read(_newton_point.EvaluatedState, like, **sizes)
        best = None if stored.best is None else self.evaluator.restored(stored.best)
        latest = replace(self.evaluator.restored(stored.latest), rates=stored.rates)
        point = Point(solved=best or latest, **reader.fields(Point, like, **sizes))
        return _State(best=point, latest=latest, **reader.fields(_State, like, **sizes))


def _record(point: Point[T], accepted: bool) -> LearnStep:
    return LearnStep(
        tuple(point.theta.tolist()),
        tuple(point.gradient.tolist()),
        len(point.solution.deviations),
        point.solution.block_steps,
        point.model.features.n_features,
        accepted,
    )


def _fraction(base: Point[T], point: Point[T]) -> float:
    """1 for a step up, else which fraction of it reaches the top along its line.

    By the trapezoid rule the gain is ½ sᵀ(g₀ + g₁); the slope vanishes at the secant's root. Only
    with equal random numbers on equal tori are both gradients of one function; else 1.
    """
    if base.solution.deviations.shape != point.solution.deviations.shape:
        return 1.0
    step = point.theta - base.theta
    before, after = float(step @ base.gradient), float(step @ point.gradient)
    if before + after >= 0.0:
        return 1.0
    return min(max(before / (before - after), 0.1), 0.5)


def learn_evidence(
    maker: _newton_point.AbstractMaker,
    model: GPModel,
    data: Batch,
    settings: LearnSettings,
    solve: _newton_point.AbstractSolver[T],
    *,
    prior_draws: _newton_point.PriorDraws | None = None,
    weights: Tensor | None = None,
    ceilings: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
    bend: Tensor | None = None,
    progress: Callable[[LearnStep], None] | None = None,
    checkpointer: _state.AbstractCheckpointer = _state.NO_CHECKPOINTS,
) -> LearnedModel[T]:
    """Maximise ln p(y | θ) over what `model` learns of kernel and likelihood, all logarithms.

    Coefficients of a learned mean take the values of each solution.

    Parameters
    ----------
    maker : of the gridded model; where it changes the torus, solves start without a guess
    model, data, settings
    solve : for the posterior at one θ
    prior_draws : those of the solves, without which the gradient in the length is far noisier
    weights : (N,), which the noise variances are divided by
    ceilings, floors : largest and least log-parameters by name; an end at a ceiling is reported
    bend : (P, P), of a `LearnedModel` of like data; with exact gradients the steps start by it
    progress : is called with new steps
    checkpointer : saves a state after every step, and inside the solves
    """
    learned = Parameters.of(model, without=("mean",), prior_std=settings.prior_std)
    learned.require_some("kernel or likelihood")
    limited = learned.limited(ceilings or {}, floors or {})
    unbounded = replace(learned, lower=torch.full_like(learned.theta, -torch.inf))
    floor = unbounded.limited({}, floors or {}).lower
    evaluator = Evaluator(maker, limited, data, solve, prior_draws, weights)
    newton = _Newton(evaluator, settings, floor, checkpointer, bend)
    reader = _state.load_reader(checkpointer, _NEWTON)
    if reader is not None and reader.finished:
        return newton.restored_result(reader)
    first = _State[T](limited.theta, settings.largest_step, settings.first_samples(len(data)))
    state = start = first if reader is None else newton.restored(reader)
    for state in newton.states(start):
        if progress is not None:
            progress(state.history[-1])
        checkpointer.save_if_due(partial(newton.snapshot, state))
    return newton.result(state)


def keyed_prior_draws(seed: int) -> _newton_point.PriorDraws:
    """The prior draws of `solve_global` with this seed."""

    def draws(deviations: Tensor) -> Tensor:
        normal, width = KeyedNormal(seed, GRID_STREAM), deviations.shape[1]
        rows = range(len(deviations))
        return torch.stack(
            [normal.draw(s, width, deviations.dtype, deviations.device) for s in rows]
        )

    return draws
