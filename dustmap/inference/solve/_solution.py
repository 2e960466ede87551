"""The result of one global solve: as a value, as arrays, and back at the same model."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._checkpoint import (
    State,
    StateReader,
    kept_preconditioner,
    restored_preconditioner,
    state,
)
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference.solve._blocks import SOLVE, restored_result
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

    posterior: PathwisePosterior
    sigma: Tensor
    solve: SolveResult
    preconditioner: AbstractOperator | None
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


def kept_solution(solution: GlobalSolution) -> State:
    """All of it but the model."""
    solve, posterior = solution.solve, solution.posterior
    spread = posterior.spread
    return state(
        SOLVE,
        {
            "rtol": solve.rtol,
            "quadratic_form": solution.quadratic_form,
            "scale": solution.scale,
            "rounding": solution.rounding,
            "spread_error": 0.0 if spread is None else spread.error,
        },
        {
            "x": solve.x,
            "status": solve.status,
            "steps": solve.steps,
            "residuals": solve.residuals,
            "coefficients": posterior.coefficients,
            "sigma": solution.sigma,
            **({} if spread is None else spread.tensors()),
        },
        {"preconditioner": kept_preconditioner(solution.preconditioner)},
        finished=True,
    )


def restored_solution(model: GridModel, data: Batch, reader: StateReader) -> GlobalSolution:
    """The solution of these data that was found with this model.

    An error if model or data have another size.
    """
    width, y = model.features.n_features, data.y
    like = torch.zeros(0, dtype=model.features.dtype, device=y.device)
    solve = restored_result(reader, width, like, reader.number("rtol"))
    beta = model.mean.coefficients().detach()
    coefficients = reader.array("coefficients", beta, len(beta))
    deviations = solve.x[1:]
    spread = _spread(reader, beta, solve.x, len(deviations))
    return GlobalSolution(
        PathwisePosterior(model, coefficients, solve.x[0], deviations, spread=spread),
        reader.real("sigma", y, len(y)),
        solve,
        restored_preconditioner(reader, "preconditioner", width, like),
        reader.number("quadratic_form"),
        reader.number("scale"),
        reader.number("rounding"),
    )


def _spread(
    reader: StateReader, beta: Tensor, fields: Tensor, count: int
) -> CoefficientSpread | None:
    """None where there is none: of coefficients that were given, or of an earlier version."""
    if not reader.has("spread_fields"):
        return None
    return CoefficientSpread(
        reader.array("spread_directions", beta, len(beta), None),
        reader.array("spread_fields", fields, None, fields.shape[1]),
        reader.array("spread_draws", beta, count, None),
        reader.number("spread_error"),
    )
