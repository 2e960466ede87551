"""One block solve for all data: posterior mean, pathwise samples and the mean's coefficients."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch
from dustmap.gp.features import (
    AbstractFeatureMap,
    CellResiduals,
    LevelResiduals,
    LocalFeatures,
    ProductOperator,
    field_features,
    residual_draws,
)
from dustmap.gp.functionals import PointValues
from dustmap.inference._precision import (
    CoefficientSpread,
    NodePrecision,
    PrecisionOperator,
    coefficient_spread,
)
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, load_reader
from dustmap.inference.solve import _solution
from dustmap.inference.solve._grid_model import (
    Draws,
    GridModel,
    MeanEstimate,
    MeanProfile,
    SharedResiduals,
)
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.linalg import (
    AbstractOperator,
    Progress,
    SolveResult,
    SolveStatus,
    SparseOperator,
    nystrom,
    unwatched,
)

#: Rank of the preconditioner (of 0, 50, 100, 200, 400: 144, 67, 47, 24, 12 block steps for 3,000
#: rays), where the field has at least so many variables and ΦᵀΣ⁻¹Φ at least such a trace; and
#: vectors that building it holds per rank.
_RANK, _TINY, _EASY, _RANK_VECTORS = 200, 2000, 1e3, 4
#: Error of fitted coefficients, in their standard deviations.
_COEFFICIENT_ERROR = 0.05


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


@torch.no_grad()
def solve_global(
    model: GridModel,
    data: Batch,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
    start: _solution.GlobalSolution | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    progress: Progress = unwatched,
) -> _solution.GlobalSolution:
    """Posterior mean ε̂ and exact draws ε̂ + δ_s of the gridded model, all in one block solve.

        Λ ε̂ = ΦᵀΣ⁻¹(y − Hβ)        Λ δ_s = ε₀ + ΦᵀΣ^{-1/2} ξ        Λ = I + ΦᵀΣ⁻¹Φ

    with ε₀, ξ ~ N(0, I): the right-hand side b_s of δ_s has covariance Λ, so δ_s ~ N(0, Λ⁻¹). It
    is Matheron's δ = ε₀ − Λ⁻¹ΦᵀΣ⁻¹(Φε₀ + η) at η = −Σ^{1/2}ξ, without the product Φε₀ and without
    its difference of large numbers where the data are informative: with 3,000 rays at 5 % noise
    in float32 that right-hand side is 800 times longer than b_s, and the error that rounding
    leaves 300 times larger. The number at position i of draw s depends on (seed, s, i) only.

    With `settings.shared_residuals` ξ has the residuals of rays as one beam shares them, and δ_s is
    the error of the same mean in such data (`Draws`).

    ΦᵀΣ⁻¹(y − Hβ) is far longer than b_s, so a relative residual that suits the draws says little
    about the mean (1e-3 left errors of 0.8 posterior standard deviations with 3,000 rays). All
    tolerances are therefore in units of ‖b‖ = √tr Λ, the length of a b_s: the mean is first brought
    to a residual of that length, and the block solves for what remains.

    Nothing is raised when a column misses the tolerance: see `GlobalSolution.message`.

    Parameters
    ----------
    model, data, settings
    sigma : (N,), Σ, if not the model's own
    start : an earlier solution of the same grid: first guess of every column, and preconditioner
    checkpointer : saves a state after the first approach to the mean and after every block
    progress : is called with draws and steps of CG
    """
    reader, cells = load_reader(checkpointer, _solution.SOLVE), residual_cells(model, settings)
    if reader is not None and reader.finished:
        return _solution.restored_solution(model, data, reader, cells)
    sigma = checked(model, data, sigma)
    phi = model.features.operator(data.functional)
    earlier, known = _of_start(start, phi)
    A = _precision(model.features, data, phi, sigma)
    residuals = SharedResiduals.of(model.features, cells, data.functional)
    draws = Draws(phi, sigma, settings.seed, settings.samples, residuals)
    profile = MeanProfile.of(model, data, sigma, phi, settings.fit_mean)
    if reader is None:
        begun = _approached(A, draws, profile, settings, start, progress)
        checkpointer.save_if_due(partial(begun.snapshot, len(data)))
    else:
        begun = _solution.PartialSolve.restored(reader, draws, _columns(A, draws), earlier)
    done = begun
    for done in _solution.blocks(
        A,
        _solution.System(draws, profile.residual(begun.mean.x), known),
        begun,
        rtol=settings.rtol,
        max_steps=settings.max_steps,
        memory=settings.memory,
        progress=progress,
    ):
        checkpointer.save_if_due(partial(done.snapshot, len(data)))
    solution = _solved(model, A, draws, profile, done, settings, progress)
    solution = replace(solution, posterior=replace(solution.posterior, residuals=cells))
    checkpointer.finish(_solution.solution_state(solution))
    return solution


def _precision(
    features: AbstractFeatureMap, data: Batch, phi: AbstractOperator, sigma: Tensor
) -> AbstractOperator:
    """Λ, by G among the nodes where that has fewer entries than the rows of the data.

    Stencils of order p couple a node to (2p − 1)^D; rays couple those along them, which are many.
    In float64 alone: rounded to float32, G may have negative eigenvalues below −1.
    """
    weights = sigma.reciprocal()
    if isinstance(features, LocalFeatures) and isinstance(data.functional, PointValues):
        assert isinstance(phi, ProductOperator)
        rows, prior = phi.left, features.prior
        entries = prior.grid.size * math.prod([2 * features.order - 1] * prior.grid.dim)
        is_stored = isinstance(rows, SparseOperator) and rows.dtype == torch.float64
        if is_stored and entries <= len(data) * features.stencil.size:
            assert isinstance(rows, SparseOperator)
            return NodePrecision(rows, phi.right, weights)
    return PrecisionOperator(phi, weights)


def residual_cells(
    model: GridModel, settings: SolveSettings
) -> CellResiduals | LevelResiduals | None:
    """Return the residuals that the draws are to share."""
    if not settings.shared_residuals:
        return None
    return residual_draws(field_features(model.features), settings.seed, settings.samples)


def _solved(
    model: GridModel,
    A: AbstractOperator,
    draws: Draws,
    profile: MeanProfile,
    done: _solution.PartialSolve,
    settings: SolveSettings,
    progress: Progress,
) -> _solution.GlobalSolution:
    """The mean within its tolerance beside the draws, and the uncertainty of its coefficients."""
    solve, T = done.result(settings.rtol), done.preconditioner
    mean = _finished(done.mean, profile, draws, solve, T, settings, progress)
    solve = _with_mean(solve, mean, draws.length)
    spread = _spread(A, profile, T, settings, progress)
    eps_mean = solve.x[0]
    beta = profile.fitted_coefficients(eps_mean)
    return _solution.GlobalSolution(
        PathwisePosterior(model, beta, eps_mean, solve.x[1:], spread=spread),
        draws.sigma,
        solve,
        T,
        profile.quadratic_form(eps_mean),
        draws.length,
        _rounding(profile, draws),
    )


def _approached(
    A: AbstractOperator,
    draws: Draws,
    profile: MeanProfile,
    settings: SolveSettings,
    start: _solution.GlobalSolution | None,
    progress: Progress,
) -> _solution.PartialSolve:
    """The preconditioner, and the mean to a residual of the length of a draw's right-hand side."""
    T = _preconditioner(A, draws, settings, start, progress)
    x = start.eps_mean if start else torch.zeros(A.shape[0], dtype=A.dtype, device=A.device)
    mean = profile.refined(x, draws.length, T, settings.max_steps, progress)
    own = start is None or T is not start.preconditioner
    shared = draws.residuals is not None
    return _solution.PartialSolve(mean, T, own, shared, _columns(A, draws))


def _columns(A: AbstractOperator, draws: Draws) -> Tensor:
    """Room for the mean and the draws, (1 + S, M_w)."""
    return torch.empty(1 + draws.count, A.shape[0], dtype=A.dtype, device=A.device)


def _finished(
    mean: MeanEstimate,
    profile: MeanProfile,
    draws: Draws,
    solve: SolveResult,
    preconditioner: AbstractOperator | None,
    settings: SolveSettings,
    progress: Progress,
) -> MeanEstimate:
    """ε̂ with the block's solution, and within the tolerance.

    With β free, one direction of ε barely held by the data carries the error of β̂: there the
    tolerance of the draws would not do (it left 0.08 to 0.24 standard deviations of β̂), and the
    bound `mean_error` itself is what is asked for.
    """
    x = mean.x + solve.x[0] - solve.x[1]
    if not float(profile.residual(x).norm()) < mean.residual:
        x = mean.x
    wanted = settings.rtol * draws.length
    goal = min(wanted, _COEFFICIENT_ERROR) if profile.is_fitted else wanted
    done = profile.refined(x, goal, preconditioner, settings.max_steps, progress)
    status = SolveStatus.CONVERGED if done.residual <= wanted else done.status
    return replace(done, status=status, steps=done.steps + mean.steps + int(solve.steps[0]))


def _with_mean(solve: SolveResult, mean: MeanEstimate, length: float) -> SolveResult:
    """`solve` with the mean itself in its first column."""
    status, steps, residuals = solve.status.clone(), solve.steps.clone(), solve.residuals.clone()
    solve.x[0] = mean.x
    status[0], steps[0], residuals[0] = mean.status.value, mean.steps, mean.residual / length
    return SolveResult(solve.x, status, steps, residuals, solve.rtol)


def _spread(
    A: AbstractOperator,
    profile: MeanProfile,
    preconditioner: AbstractOperator | None,
    settings: SolveSettings,
    progress: Progress,
) -> CoefficientSpread | None:
    """The uncertainty of fitted coefficients; None where none was fitted."""
    if not (profile.is_fitted and settings.spread):
        return None
    return coefficient_spread(
        profile.phi,
        A,
        profile.D,
        profile.U,
        profile.directions,
        seed=settings.seed,
        count=settings.samples,
        preconditioner=preconditioner,
        max_steps=settings.max_steps,
        progress=progress,
    )


def _rounding(profile: MeanProfile, draws: Draws) -> float:
    """Relative residual that rounding errors of Φx leave: precision × signal-to-noise ratio."""
    n, width = draws.phi.shape
    prior = max(0.0, draws.length**2 - width) / n
    ratio = math.sqrt(max(prior, float(profile.target.square().mean())))
    return float(torch.finfo(draws.phi.dtype).eps) * ratio


def _preconditioner(
    A: AbstractOperator,
    draws: Draws,
    settings: SolveSettings,
    start: _solution.GlobalSolution | None,
    progress: Progress,
) -> AbstractOperator | None:
    """Take the preconditioner of the earlier solve, else make one of the rank asked for."""
    rank = _chosen_rank(A, draws, settings.memory) if settings.rank is None else settings.rank
    if rank == 0:
        return None
    if start is not None and start.preconditioner is not None:
        return start.preconditioner
    return nystrom(A, rank, seed=settings.seed, progress=progress)


def _chosen_rank(A: AbstractOperator, draws: Draws, memory: int) -> int:
    """Choose a rank; None where CG is quick: √(tr Λ) steps, or M_w over the width of a block."""
    width = A.shape[0]
    if width < _TINY or draws.length**2 < width + _EASY:
        return 0
    return min(_RANK, memory // (_RANK_VECTORS * width * A.dtype.itemsize))


def checked(model: GridModel, data: Batch, sigma: Tensor | None) -> Tensor:
    """Return Σ (N,), the model's own by default; refuse no data and variances that are none."""
    if len(data) == 0:
        raise UserError("data is empty: a solve needs at least one datum")
    sigma = model.sigma(data) if sigma is None else sigma
    if sigma.shape != (len(data),):
        raise UserError(
            f"sigma must have shape ({len(data)},), one variance per datum, got "
            f"{tuple(sigma.shape)}"
        )
    good = (sigma > 0) & sigma.isfinite()
    if not bool(good.all()):
        raise UserError(
            f"sigma must be positive and finite: {int((~good).sum())} of {len(sigma)} values are "
            "not; give every datum a noise variance, or drop it"
        )
    return sigma.detach()


def _of_start(
    start: _solution.GlobalSolution | None, phi: AbstractOperator
) -> tuple[AbstractOperator | None, Tensor | None]:
    """Preconditioner and independent draws of an earlier solution, of the same grid."""
    if start is None:
        return None, None
    if start.eps_mean.shape[0] != phi.shape[1] or start.eps_mean.dtype != phi.dtype:
        raise UserError(
            f"start has {start.eps_mean.shape[0]} variables in {start.eps_mean.dtype}, the model "
            f"{phi.shape[1]} in {phi.dtype}: warm starts need the same grid, torus and dtype"
        )
    return start.preconditioner, start.posterior.deviations
