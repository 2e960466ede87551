"""One point of Newton's method: solve, gradient and metric at one value of the parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from dustmap.gp import Batch, GPModel, Parameters
from dustmap.gp.features import DenseCovariance
from dustmap.inference import _state
from dustmap.inference.evidence import _evidence, _steps
from dustmap.inference.solve._grid_model import GridModel
from dustmap.linalg import AbstractOperator

#: Deviations (S, M_w) ↦ the prior draws (S, M_w) that they came from.
PriorDraws = Callable[[Tensor], Tensor]
#: Draws of a solution whose derivatives need none.
_NO_DRAWS = 2
#: Change of a log-parameter over which ∂ ln Var r hardly changes.
_NEARBY = 1.5


class PosteriorMoments(Protocol):
    """The part of a solution that Newton's method needs; `GlobalSolution` has it.

    eps_mean (M_w,); deviations (S, M_w), independent; mean_coefficients β (P,) at which eps_mean
    holds; preconditioner of Λ or None; covariance of the data where the solver has its matrix;
    block_steps: of the solver.
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
    def covariance(self) -> DenseCovariance | None: ...
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
        checkpointer: _state.AbstractCheckpointer = _state.NO_CHECKPOINTS,
    ) -> T:
        """The solution at sigma Σ (N,).

        start: an earlier one on the same torus. Each call must use the same random numbers, and
        fit the mean's coefficients where the mean is learned.
        """

    @abstractmethod
    def takes_matrix(self, model: GridModel) -> bool:
        """Whether solutions have the covariance of the data as a matrix, unless it is singular."""

    @abstractmethod
    def snapshot(self, solution: T) -> _state.State:
        """A solution without its model."""

    @abstractmethod
    def restored(self, model: GridModel, state: _state.State) -> T:
        """The solution of a snapshot, to the bit; model: as it was when that was found."""


class AbstractMaker(ABC):
    """Makes gridded models at one value of the parameters after the other."""

    @abstractmethod
    def build(self, model: GPModel) -> GridModel:
        """The model on a grid, with the graph of its parameters; its torus may be another one than
        before."""

    @abstractmethod
    def snapshot(self) -> _state.State:
        """The state of models beside their parameters, such as the torus."""

    @abstractmethod
    def restore(self, state: _state.State) -> None:
        """Go back to where `snapshot` was called: `build` then makes the model it made before."""


@final
@dataclass(frozen=True, eq=False)
class SolvedState:
    """A solution at θ (P,), with the maker's state that its model was made in."""

    theta: _state.ParameterVector
    maker: _state.State
    solution: _state.State


@final
@dataclass(frozen=True, eq=False)
class ResidualRates:
    """∂ ln Var r (Q, N) of the data, which changes slowly, as it was at θ (P,)."""

    theta: _state.ParameterVector
    values: Annotated[Tensor, _state.Layout("rates", "Q N")]


@final
@dataclass(frozen=True, eq=False)
class EvaluatedState:
    """The latest solution, that of the best point where it is another, and derivatives to reuse."""

    latest: SolvedState
    best: SolvedState | None
    rates: ResidualRates | None


@final
@dataclass(frozen=True, eq=False)
class Solved(Generic[T]):
    """A solution with its model, at θ (P,), the maker's state there, and derivatives to reuse."""

    theta: Tensor
    maker: _state.State
    model: GridModel
    solution: T
    rates: ResidualRates | None = None


@final
@dataclass(frozen=True, eq=False)
class Point(Generic[T]):
    """θ (P,), with gradient (P,), information (P, P) and the gradient's error (P, P) there.

    grid_error: median of Var r / σ² over the data. bend (P, P): C of the curvature L C Lᵀ, by
    exact gradients nearby, with L Lᵀ the information; None for the information itself.
    """

    solved: Annotated[Solved[T], _state.REBUILT]
    gradient: _state.ParameterVector
    information: Annotated[Tensor, _state.Layout("theta", "P P")]
    error: Annotated[Tensor, _state.Layout("theta", "P P")]
    grid_error: float
    bend: Annotated[Tensor | None, _state.Layout("theta", "P P")] = None

    @property
    def metric(self) -> Tensor:
        """The curvature (P, P) that steps go by."""
        if self.bend is None:
            return self.information
        root = torch.linalg.cholesky(self.information)
        metric: Tensor = root @ self.bend @ root.mT
        return metric

    def bent(self, bend: Tensor | None) -> "Point[T]":
        """The point with the bend of another; unchanged where the gradient is not exact."""
        return self if bool(self.error.any()) else replace(self, bend=bend)

    def after(self, before: "Point[T]") -> "Point[T]":
        """The point with the curvature that two exact gradients have along the step between."""
        if bool(self.error.any()) or bool(before.error.any()):
            return self
        step, change = self.theta - before.theta, before.gradient - self.gradient
        metric = _steps.secant_metric(self.bent(before.bend).metric, step, change)
        root = torch.linalg.cholesky(self.information)
        half = torch.linalg.solve_triangular(root, metric, upper=False)
        return self.bent(torch.linalg.solve_triangular(root, half.mT, upper=False))

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
@dataclass(frozen=True, eq=False)
class _Slopes:
    """Gradient (P,) and information (P, P) of the log evidence, the gradient's error (P, P), and
    ∂ ln Var r (P, N)."""

    gradient: Tensor
    information: Tensor
    error: Tensor
    of_log_residual: Tensor


@final
@dataclass(frozen=True, eq=False)
class Evaluator(Generic[T]):
    """Solves and differentiates at one value of the parameters after the other."""

    maker: AbstractMaker
    parameters: Parameters[GPModel]
    data: Batch
    solve: AbstractSolver[T]
    prior_draws: PriorDraws | None
    weights: Tensor | None

    def at(
        self,
        theta: Tensor,
        samples: int,
        before: Solved[T] | None,
        checkpointer: _state.AbstractCheckpointer,
    ) -> Point[T]:
        """One solve at θ (P,). before: the last one, to start from; checkpointer: of the solve."""
        leaf = theta.detach().clone().requires_grad_()
        data, weights = self.data, self.weights
        model = self.maker.build(self.parameters.build(leaf))
        one_pass = len(data) <= _evidence.data_per_pass(model)
        by_matrix = self.solve.takes_matrix(model)
        with torch.set_grad_enabled(one_pass and not by_matrix):
            noise = _steps.noise_variance(model, data, weights)
            residual = model.features.residual_variance(data.functional).double()
            sigma = noise + residual
        start, rates = (None, None) if before is None else (before.solution, before.rates)
        if start is not None and start.eps_mean.shape[0] != model.features.n_features:
            start = None
        made = self.maker.snapshot()
        few = _NO_DRAWS if by_matrix else samples
        solution = self.solve(model, sigma.detach(), few, start, checkpointer)
        if by_matrix and solution.covariance is None:
            solution = self.solve(model, sigma.detach(), samples, start, checkpointer)
        model = model.with_fitted_mean(solution.mean_coefficients)
        if rates is not None and float((rates.theta - theta).abs().max()) > _NEARBY:
            rates = None
        known = None if rates is None else rates.values
        if solution.covariance is None:
            slopes = self._by_draws(model, leaf, sigma, residual.detach(), solution, known)
        else:
            slopes = self._by_matrix(model, sigma, residual, solution.covariance)
        _, pull = self.parameters.log_prior(theta)
        information = _regular(slopes.information.cpu())
        rates = rates or ResidualRates(theta, slopes.of_log_residual)
        return Point(
            Solved(theta, made, model, solution, rates),
            slopes.gradient + pull,
            information + self.parameters.prior_precision(),
            slopes.error.cpu(),
            float((residual.detach() / noise.detach()).median()),
        )

    def _by_draws(
        self,
        model: GridModel,
        leaf: Tensor,
        sigma: Tensor,
        residual: Tensor,
        solution: T,
        rates: Tensor | None,
    ) -> _Slopes:
        """Slopes as averages over the deviations."""
        data, weights = self.data, self.weights
        draws = None if self.prior_draws is None else self.prior_draws(solution.deviations)
        moments = _evidence.Moments(solution.eps_mean, solution.deviations, draws)
        shared = sigma if sigma.requires_grad else None
        gradient = _evidence.gradient_values(model, leaf, data, moments, weights, shared)
        derivatives = _evidence.differentiate(
            model,
            data,
            moments,
            weights,
            residual_variance=residual,
            residual_rates=rates,
            without=self.parameters.without,
        )
        return _Slopes(
            gradient,
            derivatives.metric(solution.preconditioner),
            derivatives.monte_carlo_covariance,
            derivatives.of_log_residual,
        )

    @torch.no_grad()
    def _by_matrix(
        self, model: GridModel, sigma: Tensor, residual: Tensor, covariance: DenseCovariance
    ) -> _Slopes:
        """Slopes without draws."""
        data, weights, without = self.data, self.weights, self.parameters.without
        moved = _steps.moved_models(
            model, data, weights, residual, None, without, _steps.DENSE_SHIFT
        )
        derivatives = _steps.differentiate_dense(model, data, covariance, sigma, moved)
        information = derivatives.metric()
        exact = torch.zeros_like(information)
        gradient = derivatives.gradient.to(self.parameters.theta)
        return _Slopes(gradient, information, exact, derivatives.of_log_residual)

    def gp_at(self, theta: Tensor, solution: T) -> GPModel:
        """The model at theta, its mean with the coefficients of a solution where it is learned."""
        model = self.parameters.build(theta)
        if not model.mean.is_learned:
            return model
        return model.with_coefficients(solution.mean_coefficients)

    @property
    def like(self) -> dict[str, Tensor]:
        """The tensors whose devices and types stored ones have."""
        return {"theta": self.parameters.theta, "rates": self.data.y[:0].double()}

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of axes of stored tensors."""
        return {"P": len(self.parameters.theta), "N": len(self.data)}

    def snapshot(self, solved: Solved[T]) -> SolvedState:
        """A solution without its model."""
        return SolvedState(solved.theta, solved.maker, self.solve.snapshot(solved.solution))

    def restored(self, state: SolvedState) -> Solved[T]:
        """The solution of a state; leaves the maker there."""
        self.maker.restore(state.maker)
        model = self.maker.build(self.parameters.build(state.theta))
        solution = self.solve.restored(model, state.solution)
        model = model.with_fitted_mean(solution.mean_coefficients)
        return Solved(state.theta, self.maker.snapshot(), model, solution)


def _regular(information: Tensor) -> Tensor:
    """Finite steps along what the data say nothing about."""
    diagonal = information.diagonal()
    floor: Tensor = (1e-8 * diagonal.max()).clamp_min(1e-12) + 1e-6 * diagonal
    return information + torch.diag(floor)


def _root_diagonal(covariance: Tensor) -> Tensor:
    return covariance.diagonal().clamp_min(0.0).sqrt()
