"""One point of Newton's method: solve, gradient and metric at one value of the parameters."""

from dataclasses import dataclass
from typing import Generic, final

import torch
from torch import Tensor

from dustmap.gp import Batch, GPModel, Parameters
from dustmap.inference._checkpoint import AbstractCheckpointer, Plain, State, StateReader, state
from dustmap.inference.evidence._evidence import data_per_pass, gradient_values
from dustmap.inference.evidence._information import (
    Derivatives,
    Moments,
    differentiate,
    noise_variance,
)
from dustmap.inference.evidence._learn_values import (
    AbstractMaker,
    AbstractSolver,
    PriorDraws,
    T,
)
from dustmap.inference.solve._grid_model import GridModel

#: Change of a log-parameter over which ∂ ln Var r hardly changes.
_NEARBY = 1.5
#: What states of evaluators and points are called.
_EVALUATOR, _POINT, _SOLVED = "evaluator", "point", "solution"


@final
@dataclass(frozen=True, eq=False)
class Solved(Generic[T]):
    """A solution with its model, at θ (P,) and what the maker had chosen there."""

    theta: Tensor
    choices: Plain
    model: GridModel
    solution: T


@final
@dataclass(frozen=True, eq=False)
class Point(Generic[T]):
    """θ (P,), with gradient (P,), information (P, P) and the gradient's error (P, P) there.

    grid_error: median of Var r / σ² over the data.
    """

    solved: Solved[T]
    gradient: Tensor
    information: Tensor
    error: Tensor
    grid_error: float

    @property
    def theta(self) -> Tensor:
        return self.solved.theta

    @property
    def model(self) -> GridModel:
        return self.solved.model

    @property
    def solution(self) -> T:
        return self.solved.solution

    @property
    def standard_deviations(self) -> Tensor:
        return _root_diagonal(torch.linalg.inv(self.information))

    @property
    def monte_carlo_errors(self) -> Tensor:
        inverse = torch.linalg.inv(self.information)
        return _root_diagonal(inverse @ self.error @ inverse)


@final
class Evaluator(Generic[T]):
    """Solves at one value of the parameters after the other, and reuses what it can."""

    def __init__(
        self,
        maker: AbstractMaker,
        parameters: Parameters[GPModel],
        data: Batch,
        solve: AbstractSolver[T],
        prior_draws: PriorDraws | None,
        weights: Tensor | None,
    ) -> None:
        self._maker, self._data, self._solve = maker, data, solve
        self._prior_draws, self._weights = prior_draws, weights
        self.parameters = parameters
        self._latest: Solved[T] | None = None
        self._rates: tuple[Tensor, Tensor] | None = None

    def at(self, theta: Tensor, samples: int, checkpointer: AbstractCheckpointer) -> Point[T]:
        """One solve at theta. checkpointer: of the solve."""
        leaf = theta.detach().clone().requires_grad_()
        data, weights = self._data, self._weights
        model = self._maker.build(self.parameters.build(leaf))
        one_pass = len(data) <= data_per_pass(model)
        with torch.set_grad_enabled(one_pass):
            noise = noise_variance(model, data, weights)
            residual = model.features.residual_variance(data.functional).double()
            sigma = noise + residual
        latest = self._solved(theta, model, sigma.detach(), samples, checkpointer)
        model, solution = latest.model, latest.solution
        draws = None if self._prior_draws is None else self._prior_draws(solution.deviations)
        moments = Moments(solution.eps_mean, solution.deviations, draws)
        shared = sigma if one_pass else None
        gradient = gradient_values(model, leaf, data, moments, weights, shared)
        derivatives = self._derivatives(model, moments, residual.detach(), theta)
        _, pull = self.parameters.log_prior(theta)
        information = _regular(derivatives.metric(solution.preconditioner).cpu())
        return Point(
            latest,
            gradient + pull,
            information + self.parameters.prior_precision(),
            derivatives.monte_carlo_covariance.cpu(),
            float((residual.detach() / noise.detach()).median()),
        )

    def gp_at(self, theta: Tensor, solution: T) -> GPModel:
        """The model at theta, its mean with the coefficients of a solution where it is learned."""
        model = self.parameters.build(theta)
        if not model.mean.is_learned:
            return model
        return model.with_coefficients(solution.mean_coefficients)

    def kept_point(self, point: Point[T]) -> State:
        """A point; its solution only where that is not the latest."""
        arrays = {
            "gradient": point.gradient,
            "information": point.information,
            "error": point.error,
        }
        is_latest = point.solved is self._latest
        solved = None if is_latest else self.kept_solved(point.solved)
        return state(_POINT, {"grid_error": point.grid_error}, arrays, {_SOLVED: solved})

    def restored_point(self, reader: StateReader, name: str) -> Point[T]:
        """The point kept under this name, after `restore`."""
        like, there = self.parameters.theta, self._latest
        part, n = reader.part(name, _POINT), len(like)
        if part.has(_SOLVED):
            there = self.restored_solved(part)
            if self._latest is not None:
                self._maker.restore(self._latest.choices)
        assert there is not None
        return Point(
            there,
            part.array("gradient", like, n),
            part.array("information", like, n, n),
            part.array("error", like, n, n),
            part.number("grid_error"),
        )

    def snapshot(self) -> State:
        """The latest solution, and what derivatives there are to reuse."""
        theta, rates = (None, None) if self._rates is None else self._rates
        latest = None if self._latest is None else self.kept_solved(self._latest)
        return state(_EVALUATOR, {}, {"theta": theta, "rates": rates}, {_SOLVED: latest})

    def restore(self, reader: StateReader) -> None:
        """Goes back to where `kept` was called."""
        theta = self.parameters.theta
        wide = self._data.y[:0].double()
        self._latest = self.restored_solved(reader)
        if reader.has("rates"):
            rates = reader.array("rates", wide, None, len(self._data))
            self._rates = reader.array("theta", theta, len(theta)), rates

    def kept_solved(self, solved: Solved[T]) -> State:
        """Where it is, and the solution."""
        values, arrays = {"choices": solved.choices}, {"theta": solved.theta}
        return state(_SOLVED, values, arrays, {"found": self._solve.snapshot(solved.solution)})

    def restored_solved(self, reader: StateReader) -> Solved[T]:
        """The solution kept in this state; leaves the maker there."""
        part, like = reader.part(_SOLVED, _SOLVED), self.parameters.theta
        theta, choices = part.array("theta", like, len(like)), part.value("choices")
        self._maker.restore(choices)
        model = self._maker.build(self.parameters.build(theta))
        solution = self._solve.restored(model, part.inside("found"))
        model = model.with_fitted_mean(solution.mean_coefficients)
        return Solved(theta, self._maker.snapshot(), model, solution)

    def _solved(
        self,
        theta: Tensor,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        checkpointer: AbstractCheckpointer,
    ) -> Solved[T]:
        start = None if self._latest is None else self._latest.solution
        if start is not None and start.eps_mean.shape[0] != model.features.n_features:
            start = None
        choices = self._maker.snapshot()
        solution = self._solve(model, sigma, samples, start, checkpointer)
        model = model.with_fitted_mean(solution.mean_coefficients)
        self._latest = Solved(theta, choices, model, solution)
        return self._latest

    def _derivatives(
        self, model: GridModel, moments: Moments, residual: Tensor, theta: Tensor
    ) -> Derivatives:
        """With ∂ ln Var r, which changes slowly, from parameters nearby if known there."""
        if self._rates is not None and float((self._rates[0] - theta).abs().max()) > _NEARBY:
            self._rates = None
        derivatives = differentiate(
            model,
            self._data,
            moments,
            self._weights,
            residual_variance=residual,
            residual_rates=None if self._rates is None else self._rates[1],
            without=self.parameters.without,
        )
        self._rates = self._rates or (theta, derivatives.of_log_residual)
        return derivatives


def _regular(information: Tensor) -> Tensor:
    """Finite steps along what the data say nothing about."""
    diagonal = information.diagonal()
    floor: Tensor = (1e-8 * diagonal.max()).clamp_min(1e-12) + 1e-6 * diagonal
    return information + torch.diag(floor)


def _root_diagonal(covariance: Tensor) -> Tensor:
    roots: Tensor = covariance.diagonal().clamp_min(0.0).sqrt()
    return roots
