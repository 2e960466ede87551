"""The global solve by a Cholesky factor of the covariance of the data, where these are few."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.features import in_float64
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, load_reader
from dustmap.inference.solve import _solution
from dustmap.inference.solve._dense_covariance import DenseCovariance, covariance_of
from dustmap.inference.solve._global_solve import (
    SolveSettings,
    checked,
    residual_cells,
    solve_global,
)
from dustmap.inference.solve._grid_model import Draws, GridModel, MeanProfile, SharedResiduals
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.linalg import AbstractOperator, Progress, SolveResult, SolveStatus, chunks, unwatched

#: Vectors of the torus in float64 that a draw takes while it is made, and draws made together.
DRAW_VECTORS, DRAWS_TOGETHER = 6, 8


@torch.no_grad()
def solve_dense(
    model: GridModel,
    data: Batch,
    covariance: DenseCovariance,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
    progress: Progress = unwatched,
) -> _solution.GlobalSolution:
    """Posterior mean ε̂ and the draws of `solve_global` by the factor of A = ΦΦᵀ + Σ.

        ε̂ = ΦᵀA⁻¹(y − Hβ)        δ_s = ε₀ − ΦᵀA⁻¹(Φε₀ − Σ^{1/2}ξ)

    All products in float64; mean and draws are rounded to the dtype of the features. Residuals of
    the solution are ‖v − A z‖ / ‖v‖ in the space of the data; no step is counted.

    Parameters
    ----------
    model, data
    covariance : at sigma
    settings : rtol, max_steps and rank are not used
    sigma : (N,), Σ, if not the model's own
    progress : is called with draws
    """
    sigma, cells = checked(model, data, sigma), residual_cells(model, settings)
    phi = in_float64(model.features).operator(data.functional)
    profile = MeanProfile.of(model, data, sigma, phi, settings.fit_mean)
    mean = _Mean.of(profile, covariance, settings)
    rounded = model.features.operator(data.functional)
    shared = SharedResiduals.of(model.features, cells, data.functional)
    draws = Draws(rounded, sigma, settings.seed, settings.samples, shared)
    x = torch.empty(1 + draws.count, phi.shape[1], dtype=rounded.dtype, device=phi.device)
    x[0] = phi.rmatmul(mean.alpha)
    residuals = x.new_zeros(len(x), dtype=torch.float64)
    residuals[0] = mean.residual
    together = max(1, min(DRAWS_TOGETHER, settings.memory // (8 * DRAW_VECTORS * phi.shape[1])))
    for part in chunks(draws.count, together):
        progress(_solution.DRAWS, part.start, draws.count)
        rows = slice(1 + part.start, 1 + part.stop)
        x[rows], residuals[rows] = _deviations(phi, covariance, draws, part)
    progress(_solution.DRAWS, draws.count, draws.count)
    return _solution.GlobalSolution(
        posterior=PathwisePosterior(
            model, mean.coefficients, x[0], x[1:], spread=mean.spread, residuals=cells
        ),
        sigma=sigma,
        solve=_direct(x, residuals, settings.rtol),
        preconditioner=None,
        quadratic_form=mean.quadratic_form,
        scale=draws.length,
        rounding=0.0,
        covariance=covariance,
    )


def _direct(x: Tensor, residuals: Tensor, rtol: float) -> SolveResult:
    """The verdict of a solve without steps."""
    ended = torch.where(residuals <= rtol, SolveStatus.CONVERGED.value, SolveStatus.STAGNATED.value)
    steps = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return SolveResult(x, ended.to(torch.int8), steps, residuals, rtol)


def _deviations(
    phi: AbstractOperator, covariance: DenseCovariance, draws: Draws, part: slice
) -> tuple[Tensor, Tensor]:
    """δ_s (k, M_w) and residuals (k,) of some draws."""
    eps = draws.prior(part.start, part.stop).to(phi.dtype)
    noise = draws.weighted_errors(part.start, part.stop).to(phi.dtype)
    seen = phi.matmul(eps).sub_(draws.sigma.to(phi.dtype) * noise)
    z = covariance.solve(seen)
    return eps.sub_(phi.rmatmul(z)), covariance.residuals(z, seen)


@final
@dataclass(frozen=True, eq=False)
class _Mean:
    """α = A⁻¹(y − Hβ̂) (N,), β̂ (P,), their quadratic form, spread, and residual of the solve."""

    alpha: Tensor
    coefficients: Tensor
    quadratic_form: float
    spread: CoefficientSpread | None
    residual: float

    @staticmethod
    def of(profile: MeanProfile, covariance: DenseCovariance, settings: SolveSettings) -> "_Mean":
        """Generalised least squares along the directions of H that the data determine."""
        target, basis = profile.target / profile.D, (profile.U / profile.D[:, None]).mT
        right = torch.cat([target[None], basis])
        solved = covariance.solve(right)
        residual = float(covariance.residuals(solved, right).max())
        X, gram = solved[1:], basis @ solved[1:].mT
        change = torch.linalg.solve(gram, X @ target)
        alpha, left = solved[0] - change @ X, target - change @ basis
        spread = None
        if profile.is_fitted and settings.spread:
            fields = profile.phi.rmatmul(X)
            spread = CoefficientSpread.of_gram(
                gram, profile.directions, fields, settings.seed, settings.samples
            )
        beta = profile.coefficients + profile.directions @ change
        return _Mean(alpha, beta, float(left @ alpha), spread, residual)


@torch.no_grad()
def solve_gridded(
    model: GridModel,
    data: Batch,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
    start: _solution.GlobalSolution | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    progress: Progress = unwatched,
) -> _solution.GlobalSolution:
    """`solve_dense` where `suits_dense` says so, else `solve_global`, whose states it goes on from.

    Parameters
    ----------
    model, data, settings, sigma, start, checkpointer, progress : see `solve_global`; a solve by
        the factor takes seconds and saves its end alone
    """
    if load_reader(checkpointer, _solution.SOLVE) is None:
        sigma = checked(model, data, sigma)
        covariance = covariance_of(model.features, data.functional, sigma, settings.memory)
        if covariance is not None:
            solution = solve_dense(
                model, data, covariance, settings, sigma=sigma, progress=progress
            )
            checkpointer.finish(_solution.solution_state(solution))
            return solution
    return solve_global(
        model,
        data,
        settings,
        sigma=sigma,
        start=start,
        checkpointer=checkpointer,
        progress=progress,
    )
