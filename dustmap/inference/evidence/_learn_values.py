"""Settings and results of learning, and what it asks of solvers and makers of models."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar, final

from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import FitStatus, GPModel
from dustmap.inference._checkpoint import NO_CHECKPOINTS, AbstractCheckpointer
from dustmap.inference._state import REBUILT, State
from dustmap.inference.solve._grid_model import GridModel
from dustmap.linalg import AbstractOperator

#: A residual variance above this fraction of the noise makes the result depend on the grid.
_FINE_ENOUGH = 0.3
#: Deviations (S, M_w) ↦ the prior draws (S, M_w) that they came from.
PriorDraws = Callable[[Tensor], Tensor]


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
