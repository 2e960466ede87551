"""A sparse variational Gaussian process: how data see ε, what they say of it, and its posterior.

Rows of Φ are computed once when they fit in memory, else when needed. For Gaussian noise the
optimum has a closed form: S by one pass (S4) and m by conjugate gradients on Λ (S5). Coefficients
of the mean are fitted to its data, with their uncertainty.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from dustmap import gp, linalg
from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp.families import AbstractFamily, AbstractGaussian
from dustmap.gp.features import (
    AbstractFeatureMap,
    Features,
    JointResiduals,
    SolveSummary,
    chunks,
    warn_unconverged,
)
from dustmap.gp.functionals import AbstractFunctional, Sharded
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood
from dustmap.inference import _precision

#: What is counted while the covariance takes them up.
_ROWS = "rows"
#: Error of the mean in standard deviations of the posterior that is asked for, and the most
#: corrections.
_ERROR, _CORRECTIONS = 0.05, 6


@final
@dataclass(frozen=True, eq=False)
class VariationalModel(gp.AbstractParametric):
    """y_n ~ p(y_n | f_n), f_n = m_n + φ_nᵀ ε + r_n, ε ~ N(0, I), q(ε) in a structured family.

    features: Φ and Var r; mean: m; likelihood: p(y | f); family: the structure of S.
    """

    parts = ("features", "mean", "likelihood")

    features: AbstractFeatureMap
    mean: gp.AbstractMean
    likelihood: AbstractLikelihood
    family: AbstractFamily

    def __post_init__(self) -> None:
        if self.family.n_features != self.features.n_features:
            raise UserError(
                f"family has {self.family.n_features} variables but the feature map has "
                f"{self.features.n_features}: build the family for features.n_features"
            )

    def moments(
        self, state: AbstractGaussian, rows: Features, functional: AbstractFunctional
    ) -> gp.Prediction:
        """E f_n = m_n + φ_nᵀ m and Var f_n = φ_nᵀ S φ_n + Var r_n under q."""
        mean = self.mean.values(functional).to(rows.phi.dtype) + rows.phi @ state.mean
        return gp.Prediction(mean, state.quadratic(rows.phi) + rows.residual_variance)

    def expected_log_likelihood(
        self, state: AbstractGaussian, rows: Features, batch: gp.Batch
    ) -> Tensor:
        """Σ_n a_n (002, eq. 14) with the general residual variance; summed in float64."""
        return self.summed_log_prob(self.moments(state, rows, batch.functional), batch)

    def summed_log_prob(self, moments: gp.Prediction, batch: gp.Batch) -> Tensor:
        """Σ_n E ln p(y_n | f_n) for f_n of given moments, in float64."""
        terms = self.likelihood.expected_log_prob(
            batch.y, moments.mean, moments.variance, self.likelihood.noise_variance(batch)
        )
        return terms.double().sum()

    def moment_gradients(self, moments: gp.Prediction, batch: gp.Batch) -> tuple[Tensor, Tensor]:
        """g1 = ∂E_n/∂μ_n and g2 = ∂E_n/∂v_n (N,), E_n the expected log-likelihood."""
        noise = self.likelihood.noise_variance(batch)
        return self.likelihood.moment_gradients(batch.y, moments.mean, moments.variance, noise)


@final
class RowSource:
    """Rows φ_n of a functional under one value of the kernel.

    features: the map. functional: N data. memory: bytes the stored rows may take; when
    N · M_w · itemsize exceeds it, rows are recomputed chunk by chunk and Φ is matrix-free.

    Where ranks share the data each computes and keeps the rows of its own: `chunks` goes over
    these, and what is summed over them wants a `total`.
    """

    def __init__(
        self, features: AbstractFeatureMap, functional: AbstractFunctional, memory: int = 2**31
    ) -> None:
        self._features, self._functional = features, functional
        self._own = functional.local if isinstance(functional, Sharded) else functional
        self._world = functionals.world_of(functional)
        # As the rank with most data does, for all have to do alike.
        most = max(functional.counts) if isinstance(functional, Sharded) else len(functional)
        keep = most * features.n_features * features.dtype.itemsize <= memory
        #: All rows, if they are kept.
        self.stored = self._rows(self._own) if keep else None

    def __len__(self) -> int:
        return len(self._functional)

    def select(self, index: Tensor | slice) -> Features:
        """Rows of some data, of which a rank that shares them has those of its own."""
        if not isinstance(self._functional, Sharded):
            return self._of(index)
        if self.stored is None:
            return self._rows(self._functional[index].local)
        positions = torch.arange(len(self), device=self._functional.device)
        at = torch.full_like(positions, -1)
        at[self._functional.own] = positions[: len(self._own)]
        mine = at[index]
        return self.stored[mine[mine >= 0]]

    def chunks(self) -> Iterator[tuple[slice, Features]]:
        """All rows in order, or this rank's, a memory-bounded chunk at a time."""
        for part in chunks(max(1, len(self._own)), self._features.chunk):
            yield part, self._of(part)

    def own(self, values: Tensor) -> Tensor:
        """The part of values (N,) that belongs to the rows of `chunks`."""
        return values[functionals.own_rows(self._functional)]

    def total(self, part: Tensor) -> Tensor:
        """Σ over the ranks that share the data."""
        return self._world.total(part)

    def operator(self) -> linalg.AbstractOperator:
        """Φ (N, M_w): the stored rows, or the matrix-free product where that is cheaper."""
        stored = self.stored
        if stored is not None and not self._features.prefers_products:
            return functionals.operator_by_rows(
                self._functional, lambda _: linalg.DenseOperator(stored.phi)
            )
        return self._features.operator(self._functional)

    def _of(self, index: Tensor | slice) -> Features:
        if self.stored is not None:
            return self.stored[index]
        return self._rows(self._own[index])

    @torch.no_grad()
    def _rows(self, functional: AbstractFunctional) -> Features:
        return rows_of(self._features, functional)


def rows_of(features: AbstractFeatureMap, functional: AbstractFunctional) -> Features:
    """Rows of a functional, of which a rank may have none."""
    if len(functional) > 0:
        return features.rows(functional)
    none = torch.zeros(0, dtype=features.dtype, device=functional.device)
    return Features(none.new_zeros(0, features.n_features), none)


@final
@dataclass(frozen=True, eq=False)
class VariationalPosterior(gp.AbstractPosterior):
    """f_* = m_* + φ_*ᵀ ε + r_* with ε ~ q, and u_*ᵀ z for fitted coefficients of the mean.

    Residuals r of values at points are joint (`JointResiduals`); those of other functionals are
    taken as independent: an approximation for functionals closer together than the grid's spacing
    (stars of one beam, say).

    spread: of fitted coefficients, see `CoefficientSpread`; None where they are given.
    """

    model: VariationalModel
    state: AbstractGaussian
    spread: _precision.CoefficientSpread | None = None

    def predict(self, functional: AbstractFunctional) -> gp.Prediction:
        """Mean (N,) and variance (N,) of f."""
        means, variances, solves, clamped = [], [], SolveSummary(), 0
        with torch.no_grad():
            for part in chunks(len(functional), self.model.features.chunk):
                rows = self.model.features.rows(functional[part])
                moments = self.model.moments(self.state, rows, functional[part])
                means.append(moments.mean)
                u = self._trend(rows, functional[part])
                variances.append(moments.variance + u.square().sum(0))
                solves, clamped = solves.merged(rows.solves), clamped + rows.clamped
        _warn_once(solves)
        return gp.Prediction(torch.cat(means), torch.cat(variances), clamped)

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Cov f (N, N) = Φ S Φᵀ + uᵀu + Cov r."""
        with torch.no_grad():
            rows = self.model.features.rows(functional)
            _warn_once(rows.solves)
            u = self._trend(rows, functional)
            field = self.state.covariance_of(rows.phi, rows.phi) + u.mT @ u
            left = JointResiduals.of(self.model.features, functional, rows.residual_variance)
            return field + left.covariance().to(field)

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """`count` joint draws of f (count, N): the same ε for all chunks, residuals as joint as
        `JointResiduals` are."""
        with torch.no_grad():
            eps = self.state.sample(count, generator)
            directions = 0 if self.spread is None else len(self.spread.fields)
            z = linalg.standard_normal((count, directions), generator, eps)
            parts, variances = [], []
            for part in chunks(len(functional), self.model.features.chunk):
                rows = self.model.features.rows(functional[part])
                _warn_once(rows.solves)
                mean = self.model.mean.values(functional[part]).to(rows.phi.dtype)
                trend = z @ self._trend(rows, functional[part])
                parts.append(mean + eps @ rows.phi.mT + trend)
                variances.append(rows.residual_variance)
            field = torch.cat(parts, dim=-1)
            left = JointResiduals.of(self.model.features, functional, torch.cat(variances))
            return field + left.draws(count, generator).to(field)

    def _trend(self, rows: Features, functional: AbstractFunctional) -> Tensor:
        """u (K, N)."""
        if self.spread is None:
            return rows.phi.new_zeros(0, len(rows.phi))
        basis = self.model.mean.basis(functional)
        return self.spread.seen(basis, self.spread.fields @ rows.phi.mT)


def _warn_once(solves: SolveSummary) -> None:
    if solves.unconverged:
        warnings.warn(
            f"prediction: {solves.unconverged} of {solves.columns} rows of features missed the "
            f"tolerance of PCG after {solves.steps} steps, the worst at relative residual "
            f"{solves.residual:.1e}; their residual variance accounts for it, but raise max_steps "
            "of the features for sharper predictions",
            linalg.UnconvergedWarning,
            stacklevel=3,
        )


@final
@dataclass(frozen=True, eq=False)
class DirectSolution:
    """The optimal q of a structured family under Gaussian noise.

    state: m = Λ⁻¹ b and S_i = Λ_i⁻¹. solve: how CG on Λ ended. elbo: at that optimum. error: that
    of m which is left after corrections, in standard deviations by S.
    """

    state: AbstractGaussian
    solve: linalg.SolveResult
    elbo: float
    error: float


def solve_direct(
    model: VariationalModel,
    batch: gp.Batch,
    source: RowSource,
    *,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    progress: linalg.Progress = linalg.unwatched,
) -> DirectSolution:
    """The closed-form optimum (002, S4-S5), never holding a dense M_w × M_w matrix.

    The mean solves Λ m = b, Λ = I + Φᵀ Σ⁻¹ Φ, b = Φᵀ Σ⁻¹ (y − m_n), by CG with the family's own
    S as preconditioner. Of data that say much, a residual r small beside b is large beside what the
    posterior leaves open: corrections follow, of residuals that the data's own leave, until
    (rᵀ S r)^½ is below 0.05 or falls no more. With S = Λ⁻¹ that is the largest error of any
    functional in its standard deviations; with that of another family it is an estimate.

    Parameters
    ----------
    model, batch
    source : rows of the batch's functional
    rtol, max_steps, progress : of CG
    """
    if not isinstance(model.likelihood, GaussianLikelihood):
        raise TypeError(
            "solve_direct: expected a GaussianLikelihood, whose optimum has a closed form, got "
            f"{type(model.likelihood).__name__}: use fit_svi"
        )
    with torch.no_grad():
        weights = 1.0 / model.likelihood.noise_variance(batch)
        state = one_pass_covariance(model, source, weights, progress)
        phi = source.operator()
        left = (batch.y - model.mean.values(batch.functional)).double()
        solver = partial(
            linalg.pcg,
            _precision.PrecisionOperator(phi, weights),
            preconditioner=_precision.FamilyPreconditioner(state),
            max_steps=max_steps,
            progress=progress,
        )
        solve = solver(phi.rmatmul((weights * left).to(phi.dtype)), rtol=rtol)
        warn_unconverged(solve, "posterior mean")
        state, error = _corrected(state.with_mean(solve.x), phi, weights.double(), left, solver)
        return DirectSolution(state, solve, full_elbo(model, state, batch, source), error)


def _corrected(
    state: AbstractGaussian,
    phi: linalg.AbstractOperator,
    weights: Tensor,
    left: Tensor,
    solver: Callable[..., linalg.SolveResult],
) -> tuple[AbstractGaussian, float]:
    """Solve for what is left of b − Λ m = Φᵀ Σ⁻¹ (left − Φ m) − m, for left (N,) = y − m_n; return
    the error that remains, too."""
    best, least = state, math.inf
    for turn in range(_CORRECTIONS + 1):
        _, r = _unsolved(phi, weights, left, state.mean)
        square = float((r * state.apply_covariance(r)).sum(dtype=torch.float64))
        error = math.sqrt(max(0.0, square))
        if not error < least:
            break
        best, least = state, error
        if error <= _ERROR or turn == _CORRECTIONS:
            break
        # No more exact than what is asked for: a residual of rounding takes hundreds of steps.
        state = state.with_mean(state.mean + solver(r, rtol=max(1e-3, 0.3 * _ERROR / error)).x)
    return best, least


def _unsolved(
    phi: linalg.AbstractOperator, weights: Tensor, left: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Return p = Σ⁻¹ (left − Φ m) (N,), float64, and Φᵀ p − m (M_w,), which is b − Λ m."""
    p = weights * (left - phi.matmul(m).double())
    return p, phi.rmatmul(p.to(phi.dtype)) - m


def one_pass_covariance(
    model: VariationalModel,
    source: RowSource,
    weights: Tensor,
    progress: linalg.Progress = linalg.unwatched,
) -> AbstractGaussian:
    """S_i = (I + Σ_n w_n φ_{n,i} φ_{n,i}ᵀ)⁻¹ with m = 0: one pass over the rows (S4)."""
    if len(source) == 0:
        raise UserError("the data set is empty: at least one datum is needed")
    own, statistics = source.own(weights), None
    for part, rows in source.chunks():
        statistics = model.family.precision_statistics(rows.phi, own[part], statistics)
        progress(_ROWS, part.stop, len(own))
    assert statistics is not None
    mean = torch.zeros(model.family.n_features, dtype=model.features.dtype, device=weights.device)
    return model.family.posterior(mean, source.total(statistics))


def full_elbo(
    model: VariationalModel, state: AbstractGaussian, batch: gp.Batch, source: RowSource
) -> float:
    """The ELBO over all data, chunk by chunk."""
    own = gp.own_batch(batch)
    with torch.no_grad():
        terms = [
            model.expected_log_likelihood(state, rows, own[part]) for part, rows in source.chunks()
        ]
        return float(source.total(torch.stack(terms).sum())) - float(state.kl())


@torch.no_grad()
def unsettled(
    model: VariationalModel, state: AbstractGaussian, batch: gp.Batch, source: RowSource
) -> float:
    """(gᵀ S g / M_w)^½ of the gradient g = ΦᵀΣ⁻¹(y − m_n − Φ m) − m under Gaussian noise.

    0 at the optimum, and with S = Λ⁻¹ the root mean square error of m in its standard deviations,
    over all directions. One pass over the rows.
    """
    own, gradient = gp.own_batch(batch), torch.zeros_like(state.mean)
    weights = 1.0 / model.likelihood.noise_variance(own).double()
    for part, rows in source.chunks():
        left = (own[part].y - model.mean.values(own[part].functional)).double()
        left = weights[part] * (left - (rows.phi @ state.mean).double())
        gradient += left.to(rows.phi) @ rows.phi
    g = source.total(gradient) - state.mean
    square = float((g * state.apply_covariance(g)).sum(dtype=torch.float64))
    return math.sqrt(max(0.0, square) / model.family.n_features)


@torch.no_grad()
def mean_spread(
    model: VariationalModel,
    state: AbstractGaussian,
    batch: gp.Batch,
    source: RowSource,
    *,
    max_steps: int = 1000,
) -> _precision.CoefficientSpread | None:
    """The uncertainty of learned coefficients of the mean; None where these are fixed.

    Noise that is not Gaussian has no such closed form: None, too. Λ = I + Φᵀ Σ⁻¹ Φ with Σ the noise
    alone, by CG with the posterior's S as preconditioner.
    """
    if not (model.mean.is_learned and isinstance(model.likelihood, GaussianLikelihood)):
        return None
    weights = 1.0 / model.likelihood.noise_variance(batch).double()
    D = weights.sqrt()
    U, directions = gp.orthogonal_directions(D[:, None] * model.mean.basis(batch.functional))
    phi = source.operator()
    return _precision.coefficient_spread(
        phi,
        _precision.PrecisionOperator(phi, weights),
        D,
        U,
        directions,
        seed=0,
        count=0,
        preconditioner=_precision.FamilyPreconditioner(state),
        max_steps=max_steps,
    )


@torch.no_grad()
def fit_mean(
    model: VariationalModel,
    state: AbstractGaussian,
    batch: gp.Batch,
    source: RowSource,
    spread: _precision.CoefficientSpread,
) -> VariationalPosterior:
    """The posterior with coefficients at their generalised-least-squares values β̂, and q at them.

        β̂ = β + T z,   E ε = m + Eᵀ z,   z = Tᵀ Hᵀ p + E (Φᵀ p − m),   p = Σ⁻¹ (y − H β − Φ m)

    m: the mean of q = `state` at β, where Λ m = ΦᵀΣ⁻¹(y − H β), so that the last term vanishes:
    with it the error of z is the product of those of m and E.
    """
    assert isinstance(model.likelihood, GaussianLikelihood)
    H, beta = model.mean.basis(batch.functional), model.mean.coefficients().detach()
    weights = 1.0 / model.likelihood.noise_variance(batch).double()
    left = batch.y.double() - H @ beta
    p, r = _unsolved(source.operator(), weights, left, state.mean)
    z = spread.directions.mT @ (H.mT @ p) + (spread.fields @ r).double()
    mean = model.mean.with_coefficients(beta + spread.directions @ z)
    moved = state.with_mean(state.mean + z.to(state.mean) @ spread.fields)
    return VariationalPosterior(replace(model, mean=mean), moved, spread)
