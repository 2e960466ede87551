"""One point of Newton's method: solve, gradient and metric at one value of the parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from dustmap.gp import Batch, GPModel, Parameters
from dustmap.inference._state import (
    NO_CHECKPOINTS,
    REBUILT,
    AbstractCheckpointer,
    Layout,
    ParameterVector,
    State,
)
from dustmap.inference.evidence._evidence import (
    Derivatives,
    Moments,
    data_per_pass,
    differentiate,
    gradient_values,
    noise_variance,
)
from dustmap.inference.solve._grid_model import GridModel
from dustmap.linalg import AbstractOperator

#: Deviations (S, M_w) ↦ the prior draws (S, M_w) that they came from.
PriorDraws = Callable[[Tensor], Tensor]
#: Change of a log-parameter over which ∂ ln Var r hardly changes.
_NEARBY = 1.5


class PosteriorMoments(Protocol):
    """What a solve tells Newton's method; `GlobalSolution` is one.

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


class AbstractSolver(ABC, Generic[T]):
    """Solves for the posterior of some data, and takes and restores states of its solutions."""

    @abstractmethod
    def __call__(
        self,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        start: T | None,
        checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    ) -> T:
        """The solution at sigma Σ (N,).

        start: an earlier one on the same torus. Each call must use the same random numbers, and
        fit the mean's coefficients where the mean is learned.
        """

    @abstractmethod
    def snapshot(self, solution: T) -> State:
        """A solution without its model."""

    @abstractmethod
    def restored(self, model: GridModel, state: State) -> T:
        """The solution of a snapshot, to the bit; model: as it was when that was found."""


class AbstractMaker(ABC):
    """Makes gridded models at one value of the parameters after the other."""

    @abstractmethod
    def build(self, model: GPModel) -> GridModel:
        """The model on a grid, with the graph of its parameters; its torus may be another one than
        before."""

    @abstractmethod
    def snapshot(self) -> State:
        """What models have from the past beside the parameters, such as their torus."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Go back to where `snapshot` was called: `build` then makes the model it made before."""


@final
@dataclass(frozen=True, eq=False)
class SolvedState:
    """A solution at θ (P,), with the maker's state that its model was made in."""

    theta: ParameterVector
    maker: State
    solution: State


@final
@dataclass(frozen=True, eq=False)
class ResidualRates:
    """∂ ln Var r (Q, N) of the data, which changes slowly, as it was at θ (P,)."""

    theta: ParameterVector
    values: Annotated[Tensor, Layout("rates", "Q N")]


@final
@dataclass(frozen=True, eq=False)
class EvaluatorState:
    """The latest solution, that of the best point where it is another, and derivatives to reuse."""

    latest: SolvedState
    best: SolvedState | None
    rates: ResidualRates | None


@final
@dataclass(frozen=True, eq=False)
class Solved(Generic[T]):
    """A solution with its model, at θ (P,), and the maker's state there."""

    theta: Tensor
    maker: State
    model: GridModel
    solution: T


@final
@dataclass(frozen=True, eq=False)
class Point(Generic[T]):
    """θ (P,), with gradient (P,), information (P, P) and the gradient's error (P, P) there.

    grid_error: median of Var r / σ² over the data.
    """

    solved: Annotated[Solved[T], REBUILT]
    gradient: ParameterVector
    information: Annotated[Tensor, Layout("theta", "P P")]
    error: Annotated[Tensor, Layout("theta", "P P")]
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
        self._rates: ResidualRates | None = None

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
        latest = self._solve_at(theta, model, sigma.detach(), samples, checkpointer)
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

    @property
    def like(self) -> dict[str, Tensor]:
        """The tensors whose devices and types stored ones have."""
        return {"theta": self.parameters.theta, "rates": self._data.y[:0].double()}

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of axes of stored tensors."""
        return {"P": len(self.parameters.theta), "N": len(self._data)}

    def snapshot(self, best: Point[T]) -> EvaluatorState:
        """The state between two points, of which this is the best so far."""
        assert self._latest is not None
        other = None if best.solved is self._latest else self.solved_state(best.solved)
        return EvaluatorState(self.solved_state(self._latest), other, self._rates)

    def restore(self, state: EvaluatorState) -> Solved[T]:
        """Go back to where `snapshot` was called; the solution of the best point."""
        best = None if state.best is None else self.solved(state.best)
        self._latest, self._rates = self.solved(state.latest), state.rates
        return self._latest if best is None else best

    def solved_state(self, solved: Solved[T]) -> SolvedState:
        """A solution without its model."""
        return SolvedState(solved.theta, solved.maker, self._solve.snapshot(solved.solution))

    def solved(self, state: SolvedState) -> Solved[T]:
        """The solution of a state; leaves the maker there."""
        self._maker.restore(state.maker)
        model = self._maker.build(self.parameters.build(state.theta))
        solution = self._solve.restored(model, state.solution)
        model = model.with_fitted_mean(solution.mean_coefficients)
        return Solved(state.theta, self._maker.snapshot(), model, solution)

    def _solve_at(
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
        made = self._maker.snapshot()
        solution = self._solve(model, sigma, samples, start, checkpointer)
        model = model.with_fitted_mean(solution.mean_coefficients)
        self._latest = Solved(theta, made, model, solution)
        return self._latest

    def _derivatives(
        self, model: GridModel, moments: Moments, residual: Tensor, theta: Tensor
    ) -> Derivatives:
        """With ∂ ln Var r, which changes slowly, from parameters nearby if known there."""
        if self._rates is not None and float((self._rates.theta - theta).abs().max()) > _NEARBY:
            self._rates = None
        derivatives = differentiate(
            model,
            self._data,
            moments,
            self._weights,
            residual_variance=residual,
            residual_rates=None if self._rates is None else self._rates.values,
            without=self.parameters.without,
        )
        self._rates = self._rates or ResidualRates(theta, derivatives.of_log_residual)
        return derivatives


def _regular(information: Tensor) -> Tensor:
    """Finite steps along what the data say nothing about."""
    diagonal = information.diagonal()
    floor: Tensor = (1e-8 * diagonal.max()).clamp_min(1e-12) + 1e-6 * diagonal
    return information + torch.diag(floor)


def _root_diagonal(covariance: Tensor) -> Tensor:
    roots: Tensor = covariance.diagonal().clamp_min(0.0).sqrt()
    return roots
