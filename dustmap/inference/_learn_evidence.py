"""Hyperparameters by climbing the evidence: few outer steps, each one global solve.

The evidence itself is never computed, only its gradient. Random numbers are the same in every step,
so the gradient is a smooth, deterministic function of the parameters, whose root is found by Newton
steps in log-parameters with the average information as metric, inside a trust radius.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

import torch
from torch import Tensor, nn

from dustmap.gp import Batch, FitStatus
from dustmap.inference._draws import GRID_STREAM
from dustmap.inference._evidence import data_per_pass, gradient_values
from dustmap.inference._grid_model import GridModel
from dustmap.inference._information import Moments, differentiate, joined, noise_variance
from dustmap.linalg import AbstractOperator, KeyedNormal

#: Log-parameters stay within this distance of their start: a factor of 1000 either way.
_LOG_RANGE = math.log(1e3)
#: A residual variance above this fraction of the noise makes the result depend on the grid.
_FINE_ENOUGH = 0.3
#: Change of a log-parameter over which ∂ ln Var r hardly changes.
_NEARBY = 1.5
#: Rejected trials in a row after which the climb has stagnated.
_PATIENCE = 4


class PosteriorMoments(Protocol):
    """What a solve tells the climb; `GlobalSolution` is one.

    eps_mean (M_w,); deviations (S, M_w), independent; mean_coefficients β (P,) at which eps_mean
    holds; preconditioner of Λ or None; block_steps: of the solver.
    """

    @property
    def eps_mean(self) -> Tensor: ...
    @property
    def deviations(self) -> Tensor: ...
    @property
    def mean_coefficients(self) -> Tensor: ...
    @property
    def preconditioner(self) -> AbstractOperator | None: ...
    @property
    def block_steps(self) -> int: ...


T = TypeVar("T", bound=PosteriorMoments)
#: (model, Σ (N,), samples, earlier solution on the same torus or None) ↦ solution. Each call must
#: use the same random numbers, and fit the mean's coefficients where the mean is learned.
Solve = Callable[[GridModel, Tensor, int, T | None], T]
#: Deviations (S, M_w) ↦ the prior draws (S, M_w) that they came from.
PriorDraws = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class LearnSettings:
    """How to climb.

    max_steps: solves at most. samples: deviations per solve, doubled (to at most `max_samples`)
        where their Monte Carlo error exceeds `accuracy` standard deviations of a parameter.
    tolerance: stop when the next step in every log-parameter is below it, or below half of the
        parameter's Monte Carlo error.
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
            raise ValueError(
                f"samples must be at least 2 and max_steps at least 1, got samples={self.samples}, "
                f"max_steps={self.max_steps}"
            )
        for name in ("accuracy", "tolerance", "largest_step", "prior_std"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")


@final
@dataclass(frozen=True)
class LearnStep:
    """One solve of the climb; P numbers each, of the parameters that climb.

    parameters: logs; gradient: of ln evidence + ln prior; errors: Monte Carlo, of the gradient;
    samples; solver_steps; n_features; accepted: whether the climb went on from here.
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
    """Where the climb ended.

    model, solution: at the final parameters. status. history: every solve.
    standard_deviations: of each log-parameter given the data, from the average information.
    monte_carlo_errors: what the finite number of deviations adds to that.
    grid_error: median of Var r / σ² over the data; see `depends_on_grid`.
    """

    model: GridModel
    solution: T
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
        text = f"learning {self.status.value} after {steps} solves: {self.status.remedy}"
        if not self.depends_on_grid:
            return text
        return (
            f"{text}; the result depends on the grid, whose median residual variance is "
            f"{self.grid_error:.2g} of the noise: use a finer grid (aim below {_FINE_ENOUGH:g})"
        )


def learn_evidence(
    build: Callable[[], GridModel],
    data: Batch,
    settings: LearnSettings,
    solve: Solve[T],
    *,
    prior_draws: PriorDraws | None = None,
    weights: Tensor | None = None,
    progress: Callable[[LearnStep], None] | None = None,
) -> LearnedModel[T]:
    """Maximises ln p(y | θ) over the learned parameters of kernel and likelihood, in place.

    All of them are logarithms. Coefficients of a learned mean take the values of each solution.

    build: the model at the kernel's present parameters; it may change the torus, and what solves
        can reuse is then dropped.
    prior_draws: without them the gradient in the length scale is many times noisier where the data
        determine the field well; `keyed_prior_draws` has those of `solve_global`.
    weights (N,): the noise variances are divided by them.
    """
    climb = _Climb(build, data, settings, solve, prior_draws, weights)
    steps = []
    for step in climb.steps():
        steps.append(step)
        if progress is not None:
            progress(step)
    return climb.result(tuple(steps))


def keyed_prior_draws(seed: int) -> PriorDraws:
    """The prior draws of `solve_global` with this seed."""

    def draws(deviations: Tensor) -> Tensor:
        normal, width = KeyedNormal(seed, GRID_STREAM), deviations.shape[1]
        rows = range(len(deviations))
        return torch.stack(
            [normal.draw(s, width, deviations.dtype, deviations.device) for s in rows]
        )

    return draws


@final
@dataclass(frozen=True, eq=False)
class _Point(Generic[T]):
    """θ (P,), with gradient (P,), information (P, P) and the gradient's error (P, P) there."""

    theta: Tensor
    gradient: Tensor
    information: Tensor
    error: Tensor
    model: GridModel
    solution: T

    @property
    def standard_deviations(self) -> Tensor:
        return _root_diagonal(torch.linalg.inv(self.information))

    @property
    def monte_carlo_errors(self) -> Tensor:
        inverse = torch.linalg.inv(self.information)
        return _root_diagonal(inverse @ self.error @ inverse)


@final
class _Climb(Generic[T]):
    """The state of one climb."""

    def __init__(
        self,
        build: Callable[[], GridModel],
        data: Batch,
        settings: LearnSettings,
        solve: Solve[T],
        prior_draws: PriorDraws | None,
        weights: Tensor | None,
    ) -> None:
        self._build, self._data, self._settings = build, data, settings
        self._solve, self._prior_draws, self._weights = solve, prior_draws, weights
        self._model = build()
        self._parameters = _climbing(self._model)
        self._origin = joined(self._parameters)
        self._samples = settings.samples
        self._latest: T | None = None
        self._rates: tuple[Tensor, Tensor] | None = None
        self._best: _Point[T] | None = None
        self._status = FitStatus.MAX_STEPS

    def steps(self) -> Iterator[LearnStep]:
        """One solve each, until the status is known."""
        radius, rejected = self._settings.largest_step, 0
        theta = self._origin
        for _ in range(self._settings.max_steps):
            point = self._evaluate(theta)
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
        self._load(point.theta)
        assign_mean(point.model, point.solution)
        if bool(((point.theta - self._origin).abs() > 0.999 * _LOG_RANGE).any()):
            self._status = FitStatus.AT_BOUND
        return LearnedModel(
            point.model,
            point.solution,
            self._status,
            history,
            tuple(point.standard_deviations.tolist()),
            tuple(point.monte_carlo_errors.tolist()),
            _grid_error(point.model, self._data),
        )

    def _evaluate(self, theta: Tensor) -> _Point[T]:
        self._load(theta)
        model = self._model = self._rebuilt()
        one_pass = len(self._data) <= data_per_pass(model)
        with torch.set_grad_enabled(one_pass):
            residual = model.features.residual_variance(self._data.functional).double()
            sigma = noise_variance(model, self._data, self._weights) + residual
        start = self._latest
        if start is not None and start.eps_mean.shape[0] != model.features.n_features:
            start = None
        solution = self._latest = self._solve(model, sigma.detach(), self._samples, start)
        assign_mean(model, solution)
        draws = None if self._prior_draws is None else self._prior_draws(solution.deviations)
        moments = Moments(solution.eps_mean, solution.deviations, draws)
        climbing = _mask(model)
        shared = sigma if one_pass else None
        values = gradient_values(model, self._data, moments, self._weights, shared)
        gradient = joined(values)[climbing]
        derivatives = differentiate(
            model,
            self._data,
            moments,
            self._weights,
            residual_variance=residual,
            residual_rates=self._known_rates(theta),
        )
        self._rates = self._rates or (theta, derivatives.of_log_residual)
        information = derivatives.metric(solution.preconditioner)
        error = derivatives.monte_carlo_covariance
        pair = torch.meshgrid(climbing, climbing, indexing="ij")
        width = len(theta)
        both = pair[0] & pair[1]
        return self._with_prior(
            _Point(
                theta,
                gradient,
                _regular(information[both].reshape(width, width)),
                error[both].reshape(width, width),
                model,
                solution,
            )
        )

    def _known_rates(self, theta: Tensor) -> Tensor | None:
        """∂ ln Var r, which changes slowly, if known from parameters nearby."""
        if self._rates is not None and float((self._rates[0] - theta).abs().max()) > _NEARBY:
            self._rates = None
        return None if self._rates is None else self._rates[1]

    def _with_prior(self, point: _Point[T]) -> _Point[T]:
        if self._settings.prior_std is None:
            return point
        precision = self._settings.prior_std**-2
        return _Point(
            point.theta,
            point.gradient - precision * (point.theta - self._origin),
            point.information + precision * torch.eye(len(point.theta)),
            point.error,
            point.model,
            point.solution,
        )

    def _next(self, base: _Point[T], radius: float) -> Tensor:
        theta = base.theta + bounded_step(self._free(base), base.information, radius)
        return theta.clamp(self._origin - _LOG_RANGE, self._origin + _LOG_RANGE)

    def _free(self, point: _Point[T]) -> Tensor:
        """The gradient without what points out of the range."""
        shift = point.theta - self._origin
        outward = (shift.abs() >= _LOG_RANGE) & (shift * point.gradient > 0)
        return torch.where(outward, 0.0, point.gradient)

    def _new_radius(self, radius: float, base: _Point[T], point: _Point[T]) -> float:
        step = point.theta - base.theta
        gain = 0.5 * float(step @ (base.gradient + point.gradient))
        promised = float(step @ base.gradient - 0.5 * step @ base.information @ step)
        if gain > 0.5 * promised:
            return min(2.0 * radius, self._settings.largest_step)
        return radius if gain > 0.25 * promised else 0.5 * radius

    def _finished(self, point: _Point[T]) -> bool:
        step = bounded_step(self._free(point), point.information, self._settings.largest_step)
        errors = point.monte_carlo_errors
        if bool((step.abs() > (0.5 * errors).clamp_min(self._settings.tolerance)).any()):
            return False
        coarse = errors > self._settings.accuracy * point.standard_deviations
        if bool(coarse.any()) and 2 * self._samples <= self._settings.max_samples:
            self._samples *= 2
            return False
        self._status = FitStatus.CONVERGED
        return True

    def _record(self, point: _Point[T], accepted: bool) -> LearnStep:
        return LearnStep(
            tuple(point.theta.tolist()),
            tuple(point.gradient.tolist()),
            tuple(point.error.diagonal().sqrt().tolist()),
            len(point.solution.deviations),
            point.solution.block_steps,
            point.model.features.n_features,
            accepted,
        )

    def _rebuilt(self) -> GridModel:
        model = self._build()
        if [id(p) for p in _climbing(model)] != [id(p) for p in self._parameters]:
            raise ValueError(
                "build() returned a model with other parameters than before: make it anew from the "
                "same kernel and likelihood"
            )
        return model

    @torch.no_grad()
    def _load(self, theta: Tensor) -> None:
        start = 0
        for p in self._parameters:
            p.copy_(theta[start : start + p.numel()].reshape(p.shape))
            start += p.numel()


def bounded_step(gradient: Tensor, information: Tensor, radius: float) -> Tensor:
    """The Newton step I⁻¹ g (P,), its too long components cut to the radius one by one.

    The others are solved for anew each time: one badly determined parameter then does not hold back
    the rest. gradient g (P,); information I (P, P), positive definite.
    """
    step = torch.zeros_like(gradient)
    free = torch.ones_like(gradient, dtype=torch.bool)
    while bool(free.any()):
        rest = gradient[free] - information[free][:, ~free] @ step[~free]
        step[free] = torch.linalg.solve(information[free][:, free], rest)
        if float(step.abs().max()) <= radius:
            break
        worst = int(torch.where(free, step.abs(), -1.0).argmax())
        step[worst] = math.copysign(radius, float(step[worst]))
        free[worst] = False
    return step


def _comparable(base: _Point[T], point: _Point[T]) -> bool:
    """Whether both gradients are of one function: equal random numbers on equal tori."""
    return base.solution.deviations.shape == point.solution.deviations.shape


def _fraction(base: _Point[T], point: _Point[T]) -> float:
    """1 for a step that climbed, else which fraction of it reaches the top along its line.

    By the trapezoid rule the gain is ½ sᵀ(g₀ + g₁); the slope vanishes at the secant's root.
    """
    step = point.theta - base.theta
    before, after = float(step @ base.gradient), float(step @ point.gradient)
    if before + after >= 0.0:
        return 1.0
    return min(max(before / (before - after), 0.1), 0.5)


def _climbing(model: GridModel) -> list[nn.Parameter]:
    """Learned parameters of kernel and likelihood, in the order of `GridModel.parameters`."""
    in_mean = {id(p) for p in model.mean.parameters()}
    parameters = [p for p in model.parameters() if id(p) not in in_mean]
    if not parameters:
        raise ValueError("nothing to learn: no parameter of kernel or likelihood requires grad")
    return parameters


def _mask(model: GridModel) -> Tensor:
    """Which numbers of all parameters climb."""
    in_mean = {id(p) for p in model.mean.parameters()}
    return torch.cat([torch.full((p.numel(),), id(p) not in in_mean) for p in model.parameters()])


def _regular(information: Tensor) -> Tensor:
    """Finite steps along what the data say nothing about."""
    diagonal = information.diagonal()
    floor: Tensor = (1e-8 * diagonal.max()).clamp_min(1e-12) + 1e-6 * diagonal
    return information + torch.diag(floor)


def _root_diagonal(covariance: Tensor) -> Tensor:
    roots: Tensor = covariance.diagonal().clamp_min(0.0).sqrt()
    return roots


def assign_mean(model: GridModel, solution: PosteriorMoments) -> None:
    """Gives a learned mean the coefficients of the solution, in place."""
    if any(p.requires_grad for p in model.mean.parameters()):
        model.mean.assign(solution.mean_coefficients)


def _grid_error(model: GridModel, data: Batch) -> float:
    with torch.no_grad():
        noise = model.likelihood.noise_variance(data)
        residual = model.features.residual_variance(data.functional)
        return float((residual.double() / noise.double()).median())
