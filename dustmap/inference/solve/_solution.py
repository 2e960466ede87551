"""What one global solve found."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

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


def paired(draws: Tensor, antithetic: bool) -> Tensor:
    """The draws, each followed by its negative if antithetic."""
    if not antithetic:
        return draws
    return torch.stack([draws, -draws], dim=1).flatten(0, 1)
