"""The columns of a global solve, as many at a time as the memory allows, and its result."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch
from dustmap.gp.features import CellResiduals, DenseCovariance, LevelResiduals
from dustmap.inference import _state
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference.solve._grid_model import Draws, GridModel, MeanEstimate
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.linalg import AbstractOperator, AdaptiveBatch, Progress, SolveResult, block_pcg

#: The name of the states of a global solve.
SOLVE = "solve_global"
#: Vectors over the whitened field, and over the data, that one right-hand side needs.
_FIELD_VECTORS, _DATA_VECTORS = 12, 3
#: Columns of a block: more would share no more, and their k × k matrices cost k³ per step.
_WIDEST = 64
#: What is counted while they are solved for.
DRAWS = "draws"
#: What helps where even few columns are too many.
_ADVICE = "set a smaller --memory, fit.samples or box, or a larger grid.spacing"
#: Rounding errors above this part of the tolerance can keep a solve from it.
_ROUNDING_SHARE = 0.1


@final
@dataclass(frozen=True)
class SolveSettings:
    """Settings of `solve_global`.

    Attributes
    ----------
    rtol : residual of every column relative to the right-hand side of a draw
    max_steps : of CG
    samples, seed : pathwise draws S, and the seed of these, whatever the blocks
    rank : of the Nyström preconditioner; 0 for none, None to choose
    memory : bytes of the vectors solved for at once; what exceeds it is solved in several blocks
    fit_mean : also fit the coefficients of the prior mean by generalised least squares
    spread : bool
        Whether the posterior has the uncertainty of fitted coefficients, for one solve more per
        coefficient; learning, which holds them at their fitted values, does without.
    shared_residuals : bool
        Whether rays in one beam share their residuals in the draws, as they do (`CellResiduals`);
        the mean and Σ take them as independent all the same. Learning is of the model where they
        are.
    by_matrix : whether `solve_gridded` may take the covariance of few data as a matrix
    """

    rtol: float = 1e-3
    max_steps: int = 500
    samples: int = 32
    seed: int = 0
    rank: int | None = None
    memory: int = 2**33
    fit_mean: bool = False
    spread: bool = True
    shared_residuals: bool = False
    by_matrix: bool = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"samples must be at least 1, got {self.samples}")
        if not (self.rtol > 0 and self.max_steps >= 0 and self.memory > 0):
            raise UserError(
                "rtol and memory must be positive and max_steps not negative, got "
                f"rtol={self.rtol}, memory={self.memory}, max_steps={self.max_steps}"
            )
        if self.rank is not None and self.rank < 0:
            raise UserError(f"rank must be None or at least 0, got {self.rank}")


@final
@dataclass(frozen=True, eq=False)
class System:
    """The columns of the block: r + b_1 for the mean, then b_1, ..., b_S.

    r (M_w,): what the first approach to the mean has left. Its tolerance is relative to ‖b_1‖,
    whatever its own length, because it is solved for together with b_1; δ_1 is subtracted after.
    known: independent draws of an earlier solution, or None.
    """

    draws: Draws
    r: Tensor
    known: Tensor | None

    def __len__(self) -> int:
        return 1 + self.draws.count

    def together(self, memory: int) -> int:
        """Columns of one block: those whose vectors fit the memory, at least one."""
        n, width = self.draws.phi.shape
        numbers = _FIELD_VECTORS * width + _DATA_VECTORS * n
        return max(1, min(_WIDEST, memory // (numbers * self.r.dtype.itemsize)))

    def right_hand_sides(self, first: int, last: int) -> Tensor:
        """Columns first..last − 1, (k, M_w)."""
        if first > 0:
            return self.draws.right_hand_sides(first - 1, last - 1)
        b = self.draws.right_hand_sides(0, max(1, last - 1))
        return torch.cat([(self.r + b[0])[None], b[: last - 1]])

    def guesses(self, first: int, last: int) -> Tensor | None:
        """First guesses of the same columns, from the earlier solution if there is one."""
        if self.known is None:
            return None
        known = torch.cat([self.known[:1], self.known])[first:last]
        return torch.nn.functional.pad(known, (0, 0, 0, last - first - len(known)))


@final
@dataclass(frozen=True, eq=False)
class SolvedColumns:
    """x (k, M_w), with status, steps and residuals of each column, see `SolveResult`."""

    x: Annotated[Tensor, _state.Layout("field", "k M")]
    status: Annotated[Tensor, _state.Layout("field", "k", dtype=torch.int8)]
    steps: Annotated[Tensor, _state.Layout("field", "k", dtype=torch.int64)]
    residuals: Annotated[Tensor, _state.Layout("field", "k", dtype=torch.float64)]

    @staticmethod
    def of(solve: SolveResult, count: int | None = None) -> "SolvedColumns":
        """The first `count` columns of a solve, or all."""
        few = slice(count)
        return SolvedColumns(
            solve.x[few], solve.status[few], solve.steps[few], solve.residuals[few]
        )

    def written_to(self, room: SolveResult, first: int) -> int:
        """Fill the columns of a room from the first on; return the next."""
        last = first + len(self.x)
        room.x[first:last], room.status[first:last] = self.x, self.status
        room.steps[first:last], room.residuals[first:last] = self.steps, self.residuals
        return last


@final
@dataclass(frozen=True, eq=False)
class _Filled:
    """The columns solved for so far, in a solve of so many data."""

    data: int
    columns: SolvedColumns | None
    made: _state.NystromState | None


@final
@dataclass(frozen=True, eq=False)
class PartialSolve:
    """An unfinished global solve: the first approach to the mean, then one block after the other.

    preconditioner: of all columns; own: whether it was made here, and not by an earlier solve.
    room: for all columns, which blocks fill in place; the first `filled` of them are solved for.
    shared_residuals: whether the data share those of the draws.
    """

    mean: MeanEstimate
    preconditioner: Annotated[AbstractOperator | None, _state.REBUILT]
    own: bool
    shared_residuals: bool
    room: Annotated[SolveResult, _state.REBUILT]
    filled: int = 0

    def snapshot(self, n: int) -> _state.State:
        """All of it, for n data."""
        columns = SolvedColumns.of(self.room, self.filled) if self.filled else None
        made = _state.NystromState.of(self.preconditioner) if self.own else None
        return _state.state_of(SOLVE, self, _Filled(n, columns, made))

    @staticmethod
    def restored(
        reader: _state.StateReader,
        draws: Draws,
        room: SolveResult,
        earlier: AbstractOperator | None,
    ) -> "PartialSolve":
        """From a state, for such draws; room: to be filled; earlier: the preconditioner of an
        earlier solution, if that is used."""
        (count, width), like = room.x.shape, {"field": room.x, "space": room.x}
        n, shared = len(draws.sigma), draws.residuals is not None
        stored = reader.read(_Filled, like, M=width, d=width)
        reader.refuse_other("data", stored.data, n)
        values = reader.fields(PartialSolve, like, M=width)
        reader.refuse_other("shared_residuals", values["shared_residuals"], shared)
        made = None if stored.made is None else stored.made.operator()
        begun = PartialSolve(preconditioner=made if values["own"] else earlier, room=room, **values)
        if begun.filled > count:
            raise reader.refusal(f"{begun.filled} columns where this solve has {count}")
        if stored.columns is not None:
            stored.columns.written_to(room, 0)
        return begun


def blocks(
    A: AbstractOperator,
    system: System,
    begun: PartialSolve,
    settings: SolveSettings,
    progress: Progress,
) -> Iterator[PartialSolve]:
    """Yield the state after every block of columns, as many together as the memory allows.

    Where memory runs out all the same, the blocks get smaller.
    """
    count, state = len(system), begun

    def block(size: int) -> SolveResult:
        first, last = state.filled, min(state.filled + size, count)
        return block_pcg(
            A,
            system.right_hand_sides(first, last),
            preconditioner=state.preconditioner,
            x0=system.guesses(first, last),
            rtol=settings.rtol,
            max_steps=settings.max_steps,
            progress=progress,
        )

    most = min(count, system.together(settings.memory))
    at_once = AdaptiveBatch("columns solved together", most, _ADVICE)
    while state.filled < count:
        progress(DRAWS, state.filled, count)
        part = SolvedColumns.of(at_once.attempt(block))
        state = replace(state, filled=part.written_to(state.room, state.filled))
        del part
        yield state
    progress(DRAWS, count, count)


class AbstractSolution(ABC):
    """Posterior mean and draws, and how the columns that they came from were solved for."""

    posterior: PathwisePosterior
    solve: SolveResult

    @property
    def eps_mean(self) -> Tensor:
        """ε̂ (M_w,)."""
        return self.posterior.eps_mean

    @property
    def deviations(self) -> Tensor:
        """δ_s (S, M_w)."""
        return self.posterior.deviations

    @property
    def mean_coefficients(self) -> Tensor:
        """β (P,): fitted if so asked, else those of the model."""
        return self.posterior.coefficients

    @property
    def worst_residual(self) -> float:
        """Largest relative residual of any column."""
        return float(self.solve.residuals.max())

    @property
    def converged(self) -> bool:
        """Whether every column reached the tolerance; `message` says what to do if not."""
        return self.solve.converged

    @property
    @abstractmethod
    def block_steps(self) -> int:
        """Largest number of steps that were taken together."""

    @abstractmethod
    def message(self) -> str:
        """One sentence on how the solve ended."""


@final
@dataclass(frozen=True, eq=False)
class GlobalSolution(AbstractSolution):
    """Result of one global solve.

    Attributes
    ----------
    posterior : ε̂, the draws δ_s and β, ready for queries
    sigma : (N,), Σ
    solve : one column for the mean, then one per solved draw; residuals are relative to `scale`
    preconditioner : for the next solve
    scale : the length √tr Λ of a draw's right-hand side
    rounding : relative residual that the precision of the features leaves, about
    covariance : of the data, where it was factorised; not of a checkpoint or a fit
    """

    posterior: Annotated[PathwisePosterior, _state.REBUILT]
    sigma: Annotated[Tensor, _state.Layout("data", "N", any_dtype=True)]
    solve: Annotated[SolveResult, _state.REBUILT]
    preconditioner: Annotated[AbstractOperator | None, _state.REBUILT]
    scale: float
    rounding: float
    covariance: Annotated[DenseCovariance | None, _state.REBUILT] = None

    @property
    def block_steps(self) -> int:
        """Steps of the longest block; the mean's own are in `solve.steps[0]`."""
        return int(self.solve.steps[1:].max())

    def without_matrix(self) -> "GlobalSolution":
        """The solution without the covariance, which takes N² numbers."""
        return replace(self, covariance=None)

    def message(self) -> str:
        if not bool(self.solve.steps.any()) and self.converged:
            return f"solved without steps, by a matrix for {len(self.sigma):,} data"
        if self.converged or self.rounding < _ROUNDING_SHARE * self.solve.rtol:
            return self.solve.message()
        return (
            f"{self.solve.message()}; the noise is so small beside the field that rounding errors "
            f"of {self.solve.x.dtype} leave a relative residual of about {self.rounding:.0e}: use "
            "features in float64, a noise floor, or a larger rtol"
        )


@final
@dataclass(frozen=True, eq=False)
class _SolutionState:
    """Source of posterior, solve and preconditioner, beside the model."""

    columns: SolvedColumns
    rtol: float
    coefficients: Annotated[Tensor, _state.Layout("beta", "P")]
    spread: CoefficientSpread | None
    shared_residuals: bool
    made: _state.NystromState | None


def solution_state(solution: GlobalSolution) -> _state.State:
    """All of it but the model."""
    solve, posterior = solution.solve, solution.posterior
    stored = _SolutionState(
        SolvedColumns.of(solve),
        solve.rtol,
        posterior.coefficients,
        posterior.spread,
        posterior.residuals is not None,
        _state.NystromState.of(solution.preconditioner),
    )
    return _state.state_of(SOLVE, solution, stored, finished=True)


def restored_solution(
    model: GridModel,
    data: Batch,
    reader: _state.StateReader,
    residuals: CellResiduals | LevelResiduals | None = None,
) -> GlobalSolution:
    """The solution of these data that was found with this model, and residuals of its draws.

    An error if model or data have another size.
    """
    width, beta = model.features.n_features, model.mean.coefficients().detach()
    field = torch.zeros(0, dtype=model.features.dtype, device=data.y.device)
    like = {"field": field, "space": field, "beta": beta, "data": data.y}
    stored = reader.read(_SolutionState, like, M=width, d=width, P=len(beta))
    x = stored.columns.x
    reader.refuse_other("shared_residuals", stored.shared_residuals, residuals is not None)
    posterior = PathwisePosterior(
        model, stored.coefficients, x[0], x[1:], spread=stored.spread, residuals=residuals
    )
    return GlobalSolution(
        posterior=posterior,
        solve=SolveResult(**vars(stored.columns), rtol=stored.rtol),
        preconditioner=None if stored.made is None else stored.made.operator(),
        **reader.fields(GlobalSolution, like, N=len(data)),
    )
