"""The global solve in the space of the data: by a factor of their covariance, or by PCG."""

from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp import Batch, NeighbourPrecision
from dustmap.gp.features import (
    AbstractFeatureMap,
    DenseCovariance,
    KrigingFeatures,
    LocalFeatures,
    ProductOperator,
    field_features,
    takes_matrix,
)
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, load_reader
from dustmap.inference.solve import _grid_model, _solution
from dustmap.inference.solve._global_solve import checked, residual_cells, solve_global
from dustmap.inference.solve._grid_model import Draws, GridModel, MeanProfile
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.inference.solve._solution import AbstractSolution, SolveSettings
from dustmap.linalg import AbstractOperator

#: Vectors of the torus in float64 that a draw takes while it is made, and draws made together.
DRAW_VECTORS, DRAWS_TOGETHER = 6, 8
#: The residual is brought below that many times `rtol` standard deviations of the noise.
_NOISES = 10.0


class DataCovariance(Protocol):
    """A = ΦΦᵀ + Σ (N, N) with a factor of it, and phi (N, M_w): Φ; float64."""

    @property
    def phi(self) -> AbstractOperator: ...

    def solve(self, v: Tensor) -> Tensor:
        """A⁻¹ v for rows v (k, N)."""

    def residuals(self, z: Tensor, v: Tensor) -> Tensor:
        """Residuals (k,) of z, v (k, N), relative to v or to the noise."""


@torch.no_grad()
def solve_dense(
    model: GridModel,
    data: Batch,
    covariance: DataCovariance,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
    progress: linalg.Progress = linalg.unwatched,
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
    # generalised least squares along the directions of H that the data determine
    target, basis = profile.target / profile.D, (profile.U / profile.D[:, None]).mT
    right = torch.cat([target[None], basis])
    solved = covariance.solve(right)
    X, gram = solved[1:], basis @ solved[1:].mT
    change = torch.linalg.solve(gram, X @ target)
    alpha = solved[0] - change @ X
    beta, spread = profile.coefficients + profile.directions @ change, None
    if profile.is_fitted and settings.spread:
        fields = phi.rmatmul(X).to(model.features.dtype)
        spread = CoefficientSpread.of_gram(
            gram, profile.directions, fields, settings.seed, settings.samples
        )
    shared = _grid_model.SharedResiduals.of(model.features, cells, data.functional)
    if shared is not None:
        shared = replace(shared, variance=shared.variance.to(phi.dtype))
    draws = Draws(phi, sigma, settings.seed, settings.samples, shared)
    x = torch.empty(1 + draws.count, phi.shape[1], dtype=model.features.dtype, device=phi.device)
    x[0] = phi.rmatmul(alpha)
    together = max(1, min(DRAWS_TOGETHER, settings.memory // (8 * DRAW_VECTORS * phi.shape[1])))
    solve = linalg.SolveResult.into(x, settings.rtol)
    solve.residuals[0] = covariance.residuals(solved, right).max()
    solve.residuals[1:] = _deviations(x[1:], covariance, draws, together, progress)
    solve.status[~(solve.residuals <= solve.rtol)] = linalg.SolveStatus.STAGNATED.value
    return _solution.GlobalSolution(
        posterior=PathwisePosterior(model, beta, x[0], x[1:], spread=spread, residuals=cells),
        sigma=sigma,
        solve=solve,
        preconditioner=None,
        scale=draws.length,
        rounding=0.0,
        covariance=covariance if isinstance(covariance, DenseCovariance) else None,
    )


def _deviations(
    out: Tensor, covariance: DataCovariance, draws: Draws, together: int, progress: linalg.Progress
) -> Tensor:
    """Write δ_s to out (S, M_w), some at a time but for one solve of all; residuals (S,)."""
    phi, parts = covariance.phi, list(linalg.chunks(draws.count, together))
    seen = torch.empty(draws.count, phi.shape[0], dtype=phi.dtype, device=phi.device)
    for part in parts:
        progress(_solution.DRAWS, part.start // 2, draws.count)
        eps, errors = draws.white(_grid_model.GRID_STREAM, part), draws.weighted_errors(part)
        seen[part] = phi.matmul(eps) - draws.sigma.to(phi.dtype) * errors
        out[part] = eps
    z = covariance.solve(seen)
    for part in parts:
        progress(_solution.DRAWS, (draws.count + part.start) // 2, draws.count)
        out[part] = out[part].to(phi.dtype) - phi.rmatmul(z[part])
    progress(_solution.DRAWS, draws.count, draws.count)
    return covariance.residuals(z, seen)


@torch.no_grad()
def solve_gridded(
    model: GridModel,
    data: Batch,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
    start: _solution.GlobalSolution | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    progress: linalg.Progress = linalg.unwatched,
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
        covariance = _known(start, features, functional, sigma) or DenseCovariance.of(
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
    start: _solution.GlobalSolution | None,
    features: AbstractFeatureMap,
    functional: AbstractFunctional,
    sigma: Tensor,
) -> DenseCovariance | None:
    """That of an earlier solution, if it has these features, and this Σ or these very data."""
    if start is None or start.covariance is None:
        return None
    before, here = (field_features(f) for f in (start.posterior.model.features, features))
    assert isinstance(before, KrigingFeatures)
    assert isinstance(here, KrigingFeatures)
    if before.order != here.order or before.prior.torus_shape != here.prior.torus_shape:
        return None
    pairs = zip(before.prior.circulants, here.prior.circulants, strict=True)
    same = all(torch.equal(first, second) for (first, _), (second, _) in pairs)
    if not same:
        return None
    equal = torch.equal(start.sigma, sigma)
    return start.covariance if equal else start.covariance.at(functional, sigma)


@final
@dataclass(frozen=True, eq=False)
class DataSpaceSolution(AbstractSolution):
    """Result of one solve in data space.

    Attributes
    ----------
    posterior : ε̂, the draws δ_s and β
    sigma : (N,)
    solve : columns (D A D)⁻¹ of D(y − Hβ₀), of the directions U of D H where β was fitted, and of
        the draws, (k, N), with D = Σ^{-1/2}
    preconditioner, covariance : None: A is preconditioned here, not Λ, and has no matrix
    """

    posterior: PathwisePosterior
    sigma: Tensor
    solve: linalg.SolveResult
    preconditioner: AbstractOperator | None = None
    covariance: DenseCovariance | None = None

    @property
    def block_steps(self) -> int:
        return int(self.solve.steps.max())

    def message(self) -> str:
        return self.solve.message()


@torch.no_grad()
def solve_in_data_space(
    model: GridModel,
    data: Batch,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
) -> DataSpaceSolution:
    """Posterior mean ε̂ and draws δ_s as `solve_global` gives them, by solves with A = ΦΦᵀ + Σ.

        ε̂ = Φᵀ A⁻¹ (y − Hβ)        δ_s = ε₀ − Φᵀ A⁻¹ (Φ ε₀ − Σ^{1/2} ξ)

    A = W C Wᵀ + Σ takes one pair of transforms where Λ takes two, and is preconditioned by
    `NeighbourPrecision`: tens of steps where Λ needs many hundreds. With 88,456 point values on
    grid nodes, Matérn-1/2 and noise of 1/40 of the field's std: 20 steps against more than 500.
    For point values and N of the order of M_w or less; the draws of one seed are those of
    `solve_global`.

    A is solved between D = Σ^{-1/2}, so that data of little noise count for what they say.

    settings: rtol is relative to the noise: residuals of D A D are brought below 10 rtol of data,
    or below rtol of the right-hand side where that is smaller. rank is not used.
    sigma (N,): Σ, if not the model's own.
    """
    system = _System.of(model, data, sigma)
    profile = MeanProfile.of(model, data, system.sigma, system.phi, settings.fit_mean)
    target, H = profile.target, profile.U.mT
    draws = Draws(system.phi, system.sigma, settings.seed, settings.samples)
    every = slice(0, draws.count)
    eps = draws.white(_grid_model.GRID_STREAM, every)
    D = profile.D.to(eps.dtype)
    seen = D * system.phi.matmul(eps) - draws.white(_grid_model.DATA_STREAM, every)
    b = torch.cat([torch.cat([target[None], H]).to(seen.dtype), seen])
    solve = linalg.pcg(
        _Scaled(system.covariance, D),
        b,
        preconditioner=_Scaled(_precision(model, data, system), system.sigma.sqrt().to(D)),
        rtol=_tolerance(b, settings),
        max_steps=settings.max_steps,
    )
    alpha, X, drawn = solve.x[0].double(), solve.x[1 : 1 + len(H)].double(), solve.x[1 + len(H) :]
    beta, spread, gram = profile.coefficients, None, X @ H.mT
    if profile.is_fitted:
        change = torch.linalg.solve(gram, X @ target)
        beta, alpha = beta + profile.directions @ change, alpha - change @ X
    if profile.is_fitted and settings.spread:
        fields = system.phi.rmatmul((profile.D * X).to(seen.dtype))
        seed, count = settings.seed, settings.samples
        spread = CoefficientSpread.of_gram(gram, profile.directions, fields, seed, count)
    eps_mean = system.phi.rmatmul((profile.D * alpha).to(seen.dtype))
    deviations = eps - system.phi.rmatmul(D * drawn)
    return DataSpaceSolution(
        PathwisePosterior(model, beta.detach(), eps_mean, deviations, spread=spread),
        system.sigma,
        solve,
    )


@final
@dataclass(frozen=True, eq=False)
class _System:
    """Φ, Σ (N,), and A = W C Wᵀ + Σ."""

    phi: AbstractOperator
    sigma: Tensor
    covariance: AbstractOperator

    @staticmethod
    def of(model: GridModel, data: Batch, sigma: Tensor | None) -> "_System":
        features = model.features
        if not isinstance(features, LocalFeatures) or not isinstance(data.functional, PointValues):
            raise TypeError(
                "solve_in_data_space is for point values seen by LocalFeatures, got "
                f"{type(data.functional).__name__} and {type(features).__name__}: use solve_global"
            )
        W = features.weights(data.functional)
        sigma = checked(model, data, sigma)
        C = features.prior.torus_root(1.0)
        phi = ProductOperator(W, features.prior.torus_root(0.5))
        return _System(phi, sigma, _DataCovariance(W, C, sigma))


@final
class _DataCovariance(linalg.AbstractSymmetric):
    """A = W C Wᵀ + diag(Σ) (N, N)."""

    def __init__(self, W: AbstractOperator, C: AbstractOperator, sigma: Tensor) -> None:
        self._W, self._C, self._sigma = W, C, sigma.to(W.dtype)

    def _made_of(self) -> Tensor:
        return self._sigma

    def matmul(self, x: Tensor) -> Tensor:
        return self._W.matmul(self._C.matmul(self._W.rmatmul(x))) + self._sigma * x


@final
class _Scaled(linalg.AbstractSymmetric):
    """diag(d) A diag(d) (N, N)."""

    def __init__(self, A: AbstractOperator, d: Tensor) -> None:
        self._A, self._d = A, d

    def _made_of(self) -> Tensor:
        return self._d

    def matmul(self, x: Tensor) -> Tensor:
        return self._d * self._A.matmul(self._d * x)


def _precision(model: GridModel, data: Batch, system: _System) -> NeighbourPrecision:
    """Return the precision for the noise alone: what Var r adds to Σ is part of the kernel."""
    assert isinstance(model.features, LocalFeatures)
    assert isinstance(data.functional, PointValues)
    residual = model.features.residual_variance(data.functional).to(system.sigma)
    noise = torch.maximum(system.sigma - residual, 0.1 * system.sigma)
    kernel = model.features.prior.kernel
    return NeighbourPrecision.of(kernel, data.functional.x, noise, dtype=system.phi.dtype)


def _tolerance(b: Tensor, settings: SolveSettings) -> float:
    """One relative tolerance for all columns (k, N), which are in units of the noise."""
    longest = float(b.double().square().mean(-1).max().sqrt())
    return settings.rtol * min(1.0, _NOISES / max(longest, 1e-300))
