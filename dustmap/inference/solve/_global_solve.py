"""One block solve for all data: posterior mean, pathwise samples and the mean's coefficients."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap import linalg
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
from dustmap.inference import _precision
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, load_reader
from dustmap.inference.solve import _grid_model, _solution
from dustmap.inference.solve._grid_model import Draws, GridModel, MeanEstimate, MeanProfile
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.inference.solve._solution import SolveSettings

#: Rank of the preconditioner (of 0, 50, 100, 200, 400: 144, 67, 47, 24, 12 block steps for 3,000
#: rays), where the field has at least so many variables and ΦᵀΣ⁻¹Φ at least such a trace; and
#: vectors that building it holds per rank.
_RANK, _TINY, _EASY, _RANK_VECTORS = 200, 2000, 1e3, 4
#: Error of fitted coefficients, in their standard deviations.
_COEFFICIENT_ERROR = 0.05
#: Residuals that the draws share, if any.
_Residuals: TypeAlias = CellResiduals | LevelResiduals | None


@torch.no_grad()
def solve_global(
    model: GridModel,
    data: Batch,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
    start: _solution.GlobalSolution | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    progress: linalg.Progress = linalg.unwatched,
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
    A = _precision_of(model.features, data, phi, sigma)
    residuals = _grid_model.SharedResiduals.of(model.features, cells, data.functional)
    draws = Draws(phi, sigma, settings.seed, settings.samples, residuals)
    profile = MeanProfile.of(model, data, sigma, phi, settings.fit_mean)
    solve = _Solve(A, draws, profile, settings, start, progress)
    if reader is None:
        begun = solve.approached()
        checkpointer.save_if_due(partial(begun.snapshot, len(data)))
    else:
        begun = _solution.PartialSolve.restored(reader, draws, solve.room(), earlier)
    done, system = begun, _solution.System(draws, profile.residual(begun.mean.x), known)
    for done in _solution.blocks(A, system, begun, settings, progress):
        checkpointer.save_if_due(partial(done.snapshot, len(data)))
    solution = solve.solved(model, done, cells)
    checkpointer.finish(_solution.solution_state(solution))
    return solution


def _precision_of(
    features: AbstractFeatureMap, data: Batch, phi: linalg.AbstractOperator, sigma: Tensor
) -> linalg.AbstractOperator:
    """Λ, by G among the nodes where that has fewer entries than the rows of the data.

    Stencils of order p couple a node to (2p − 1)^D; rays couple those along them, which are many.
    In float64 alone: rounded to float32, G may have negative eigenvalues below −1.
    """
    weights = sigma.reciprocal()
    if isinstance(features, LocalFeatures) and isinstance(data.functional, PointValues):
        assert isinstance(phi, ProductOperator)
        rows, prior = phi.left, features.prior
        entries = prior.grid.size * math.prod([2 * features.order - 1] * prior.grid.dim)
        is_sparser = entries <= len(data) * features.cells.stencil.size
        if is_sparser and isinstance(rows, linalg.SparseOperator) and rows.dtype == torch.float64:
            return _precision.NodePrecision(rows, phi.right, weights)
    return _precision.PrecisionOperator(phi, weights)


def residual_cells(model: GridModel, settings: SolveSettings) -> _Residuals:
    """Return the residuals that the draws are to share."""
    if not settings.shared_residuals:
        return None
    return residual_draws(field_features(model.features), settings.seed, settings.samples)


@final
@dataclass(frozen=True, eq=False)
class _Solve:
    """Λ, the draws and the equation of the mean of one solve; start: an earlier solution."""

    A: linalg.AbstractOperator
    draws: Draws
    profile: MeanProfile
    settings: SolveSettings
    start: _solution.GlobalSolution | None
    progress: linalg.Progress

    def room(self) -> linalg.SolveResult:
        """Room for the mean and the draws."""
        A = self.A
        x = torch.empty(1 + self.draws.count, A.shape[0], dtype=A.dtype, device=A.device)
        return linalg.SolveResult.into(x, self.settings.rtol)

    def approached(self) -> _solution.PartialSolve:
        """The preconditioner, and the mean to a residual of the length of a draw's right-hand
        side."""
        A, draws, start, T = self.A, self.draws, self.start, self._preconditioner()
        x = start.eps_mean if start else torch.zeros(A.shape[0], dtype=A.dtype, device=A.device)
        own = start is None or T is not start.preconditioner
        mean, shared = self._refined(x, draws.length, T), draws.residuals is not None
        return _solution.PartialSolve(mean, T, own, shared, self.room())

    def solved(
        self, model: GridModel, done: _solution.PartialSolve, cells: _Residuals
    ) -> _solution.GlobalSolution:
        """The mean within its tolerance beside the draws, which share the residuals of cells, and
        the uncertainty of its coefficients."""
        profile, draws, T, solve = self.profile, self.draws, done.preconditioner, done.room
        mean = self._finished(done.mean, solve, T)
        eps_mean = solve.x[0].copy_(mean.x)
        solve.status[0], solve.steps[0] = mean.status.value, mean.steps
        solve.residuals[0] = mean.residual / draws.length
        spread = self._spread(T)
        beta = profile.fitted_coefficients(eps_mean)
        return _solution.GlobalSolution(
            PathwisePosterior(model, beta, eps_mean, solve.x[1:], spread=spread, residuals=cells),
            draws.sigma,
            solve,
            T,
            draws.length,
            self._rounding(),
        )

    def _refined(self, x: Tensor, goal: float, T: linalg.AbstractOperator | None) -> MeanEstimate:
        return self.profile.refined(x, goal, T, self.settings.max_steps, self.progress)

    def _finished(
        self, mean: MeanEstimate, solve: linalg.SolveResult, T: linalg.AbstractOperator | None
    ) -> MeanEstimate:
        """ε̂ with the block's solution, and within the tolerance.

        With β free, one direction of ε barely held by the data carries the error of β̂: there the
        tolerance of the draws would not do (it left 0.08 to 0.24 standard deviations of β̂), and
        ‖r‖ itself, a bound of that error, is to be small.
        """
        x = mean.x + solve.x[0] - solve.x[1]
        if not float(self.profile.residual(x).norm()) < mean.residual:
            x = mean.x
        wanted = self.settings.rtol * self.draws.length
        goal = min(wanted, _COEFFICIENT_ERROR) if self.profile.is_fitted else wanted
        done = self._refined(x, goal, T)
        status = linalg.SolveStatus.CONVERGED if done.residual <= wanted else done.status
        return replace(done, status=status, steps=done.steps + mean.steps + int(solve.steps[0]))

    def _spread(self, T: linalg.AbstractOperator | None) -> _precision.CoefficientSpread | None:
        """The uncertainty of fitted coefficients; None where none was fitted."""
        profile, settings = self.profile, self.settings
        if not (profile.is_fitted and settings.spread):
            return None
        return _precision.coefficient_spread(
            profile.phi,
            self.A,
            profile.D,
            profile.U,
            profile.directions,
            seed=settings.seed,
            count=settings.samples,
            preconditioner=T,
            max_steps=settings.max_steps,
            progress=self.progress,
        )

    def _rounding(self) -> float:
        """Relative residual that rounding errors of Φx leave: precision × signal-to-noise ratio."""
        phi, length = self.draws.phi, self.draws.length
        n, width = phi.shape
        prior = max(0.0, length**2 - width) / n
        ratio = math.sqrt(max(prior, float(self.profile.target.square().mean())))
        return float(torch.finfo(phi.dtype).eps) * ratio

    def _preconditioner(self) -> linalg.AbstractOperator | None:
        """Take the preconditioner of the earlier solve, else make one of the rank asked for."""
        settings, start = self.settings, self.start
        rank = self._chosen_rank() if settings.rank is None else settings.rank
        if rank == 0:
            return None
        if start is not None and start.preconditioner is not None:
            return start.preconditioner
        return linalg.nystrom(self.A, rank, seed=settings.seed, progress=self.progress)

    def _chosen_rank(self) -> int:
        """Choose a rank; 0 where CG is quick: √(tr Λ) steps, or M_w over the width of a block."""
        width, itemsize = self.A.shape[0], self.A.dtype.itemsize
        if width < _TINY or self.draws.length**2 < width + _EASY:
            return 0
        return min(_RANK, self.settings.memory // (_RANK_VECTORS * width * itemsize))


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
    start: _solution.GlobalSolution | None, phi: linalg.AbstractOperator
) -> tuple[linalg.AbstractOperator | None, Tensor | None]:
    """Preconditioner and independent draws of an earlier solution, of the same grid."""
    if start is None:
        return None, None
    if start.eps_mean.shape[0] != phi.shape[1] or start.eps_mean.dtype != phi.dtype:
        raise UserError(
            f"start has {start.eps_mean.shape[0]} variables in {start.eps_mean.dtype}, the model "
            f"{phi.shape[1]} in {phi.dtype}: warm starts need the same grid, torus and dtype"
        )
    return start.preconditioner, start.posterior.deviations
