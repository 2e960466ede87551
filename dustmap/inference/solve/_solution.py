"""The result of one global solve: as a value, as arrays, and back at the same model."""

from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._checkpoint import NystromState
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference._state import REBUILT, Layout, State, StateReader, state_of
from dustmap.inference.solve._blocks import SOLVE, SolvedColumns
from dustmap.inference.solve._grid_model import GridModel
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.linalg import AbstractOperator, SolveResult

#: Rounding errors above this part of the tolerance can keep a solve from it.
_ROUNDING_SHARE = 0.1


@final
@dataclass(frozen=True, eq=False)
class GlobalSolution:
    """What one global solve found.

    posterior: ε̂, the draws δ_s and β, ready for queries. sigma (N,): Σ.
    solve: one column for the mean, then one per solved draw; residuals are relative to `scale`,
        the length √tr Λ of a draw's right-hand side.
    preconditioner: for the next solve.
    quadratic_form: (y − Hβ)ᵀ (ΦΦᵀ + Σ)⁻¹ (y − Hβ).
    rounding: relative residual that the precision of the features leaves, about.
    """

    posterior: Annotated[PathwisePosterior, REBUILT]
    sigma: Annotated[Tensor, Layout("data", "N", any_dtype=True)]
    solve: Annotated[SolveResult, REBUILT]
    preconditioner: Annotated[AbstractOperator | None, REBUILT]
    quadratic_form: float
    scale: float
    rounding: float

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
    def mean_error(self) -> float:
        """Bound of the error of E f for every functional f, β̂ included, in posterior std of f.

        |ℓᵀe| ≤ ‖e‖_A · std(ℓ) and ‖e‖_A ≤ ‖r‖, because no eigenvalue of the precision A is below 1.
        Most functionals see far less of the residual r of the mean.
        """
        return float(self.solve.residuals[0]) * self.scale

    @property
    def block_steps(self) -> int:
        """Steps of the longest block; the mean's own are in `solve.steps[0]`."""
        return int(self.solve.steps[1:].max())

    @property
    def converged(self) -> bool:
        """Whether every column reached the tolerance; `message` says what to do if not."""
        return self.solve.converged

    def message(self) -> str:
        """One sentence on how the solve ended."""
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
    """What posterior, solve and preconditioner are rebuilt from, beside the model."""

    columns: SolvedColumns
    rtol: float
    coefficients: Annotated[Tensor, Layout("beta", "P")]
    spread: CoefficientSpread | None
    made: NystromState | None


def solution_state(solution: GlobalSolution) -> State:
    """All of it but the model."""
    solve, posterior = solution.solve, solution.posterior
    stored = _SolutionState(
        SolvedColumns.of(solve),
        solve.rtol,
        posterior.coefficients,
        posterior.spread,
        NystromState.of(solution.preconditioner),
    )
    return state_of(SOLVE, solution, stored, finished=True)


def restored_solution(model: GridModel, data: Batch, reader: StateReader) -> GlobalSolution:
    """The solution of these data that was found with this model.

    An error if model or data have another size.
    """
    width, beta = model.features.n_features, model.mean.coefficients().detach()
    field = torch.zeros(0, dtype=model.features.dtype, device=data.y.device)
    like = {"field": field, "space": field, "beta": beta, "data": data.y}
    stored = reader.read(_SolutionState, like, M=width, d=width, P=len(beta))
    x = stored.columns.x
    posterior = PathwisePosterior(model, stored.coefficients, x[0], x[1:], spread=stored.spread)
    return GlobalSolution(
        posterior=posterior,
        solve=stored.columns.result(stored.rtol),
        preconditioner=None if stored.made is None else stored.made.operator(),
        **reader.fields(GlobalSolution, like, N=len(data)),
    )
