"""The global solve by a Cholesky factor of the covariance of the data, where these are few."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.features import AbstractFeatureMap, LocalFeatures, field_features
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, load_reader
from dustmap.inference.solve import _solution
from dustmap.inference.solve._dense_covariance import DenseCovariance, takes_matrix
from dustmap.inference.solve._global_solve import (
    SolveSettings,
    checked,
    residual_cells,
    solve_global,
)
from dustmap.inference.solve._grid_model import Draws, GridModel, MeanProfile, SharedResiduals
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.linalg import Progress, SolveResult, SolveStatus, chunks, unwatched

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
    phi = covariance.phi
    profile = MeanProfile.of(model, data, sigma, phi, settings.fit_mean)
    mean = _Mean.of(profile, covariance, settings, model.features.dtype)
    shared = SharedResiduals.of(model.features, cells, data.functional)
    if shared is not None:
        shared = replace(shared, variance=shared.variance.to(phi.dtype))
    draws = Draws(phi, sigma, settings.seed, settings.samples, shared)
    x = torch.empty(1 + draws.count, phi.shape[1], dtype=model.features.dtype, device=phi.device)
    x[0] = phi.rmatmul(mean.alpha)
    together = max(1, min(DRAWS_TOGETHER, settings.memory // (8 * DRAW_VECTORS * phi.shape[1])))
    residuals = _deviations(x[1:], covariance, draws, together, progress)
    residuals = torch.cat([residuals.new_full((1,), mean.residual), residuals])
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
    out: Tensor, covariance: DenseCovariance, draws: Draws, together: int, progress: Progress
) -> Tensor:
    """Write δ_s to out (S, M_w), some at a time but for one solve of all; residuals (S,)."""
    phi, parts = covariance.phi, list(chunks(draws.count, together))
    seen = torch.empty(draws.count, phi.shape[0], dtype=phi.dtype, device=phi.device)
    for part in parts:
        progress(_solution.DRAWS, part.start // 2, draws.count)
        eps, errors = draws.prior(part), draws.weighted_errors(part)
        seen[part] = phi.matmul(eps) - draws.sigma.to(phi.dtype) * errors
        out[part] = eps
    z = covariance.solve(seen)
    for part in parts:
        progress(_solution.DRAWS, (draws.count + part.start) // 2, draws.count)
        out[part] = out[part].to(phi.dtype) - phi.rmatmul(z[part])
    progress(_solution.DRAWS, draws.count, draws.count)
    return covariance.residuals(z, seen)


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
    def of(
        profile: MeanProfile,
        covariance: DenseCovariance,
        settings: SolveSettings,
        dtype: torch.dtype,
    ) -> "_Mean":
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
            fields = profile.phi.rmatmul(X).to(dtype)
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
    """`solve_dense` where `takes_matrix` says so, else `solve_global`, and on from its states.

    Parameters
    ----------
    model, data, settings, sigma, start, checkpointer, progress : see `solve_global`; a solve by
        a matrix takes its factor from `start`, of the same data, where the model is the same, and
        saves its end alone
    """
    features, functional = model.features, data.functional
    by_matrix = settings.by_matrix and takes_matrix(features, functional, settings.memory)
    if by_matrix and load_reader(checkpointer, _solution.SOLVE) is None:
        sigma = checked(model, data, sigma)
        covariance = _known(start, features, sigma) or DenseCovariance.of(
            features, functional, sigma
        )
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


def _known(
    start: _solution.GlobalSolution | None, features: AbstractFeatureMap, sigma: Tensor
) -> DenseCovariance | None:
    """The factor of an earlier solution of the same data, if it is that of these features and Σ."""
    if start is None or start.covariance is None or not torch.equal(start.sigma, sigma):
        return None
    before, here = (field_features(f) for f in (start.posterior.model.features, features))
    assert isinstance(before, LocalFeatures)
    assert isinstance(here, LocalFeatures)
    if before.order != here.order or before.prior.torus_shape != here.prior.torus_shape:
        return None
    same = torch.equal(before.prior.spectrum, here.prior.spectrum)
    return start.covariance if same else None
