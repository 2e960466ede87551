"""Fits with all data at once: the optimum in closed form for Gaussian noise, natural steps else.

For Gaussian noise S comes by one pass (S4) and m by conjugate gradients on Λ (S5).
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, own_batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import warn_unconverged
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference._precision import FamilyPreconditioner, PrecisionOperator
from dustmap.inference.variational._model import RowSource, VariationalModel
from dustmap.linalg import Progress, SolveResult, pcg, unwatched

#: What is counted while the covariance takes them up.
_ROWS = "rows"
#: Relative change of the precision that is rounding.
_SAME = 1e-5


@final
@dataclass(frozen=True, eq=False)
class DirectSolution:
    """The optimal q of a structured family under Gaussian noise.

    state: m = Λ⁻¹ b and S_i = Λ_i⁻¹. solve: how CG on Λ ended. elbo: at that optimum.
    """

    state: AbstractGaussian
    solve: SolveResult
    elbo: float


def solve_direct(
    model: VariationalModel,
    batch: Batch,
    source: RowSource,
    *,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    start: Tensor | None = None,
    progress: Progress = unwatched,
) -> DirectSolution:
    """The closed-form optimum (002, S4-S5), never holding a dense M_w × M_w matrix.

    The mean solves Λ m = b, Λ = I + Φᵀ Σ⁻¹ Φ, b = Φᵀ Σ⁻¹ (y − m_n), by CG with the family's own
    S as preconditioner.

    Parameters
    ----------
    model, batch
    source : rows of the batch's functional
    rtol, max_steps, progress : of CG
    start : (M_w,), the first guess of m
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
        target = weights * (batch.y - model.mean.values(batch.functional))
        solve = pcg(
            PrecisionOperator(phi, weights),
            phi.rmatmul(target.to(phi.dtype)),
            preconditioner=FamilyPreconditioner(state),
            x0=start,
            rtol=rtol,
            max_steps=max_steps,
            progress=progress,
        )
        warn_unconverged(solve, "posterior mean")
        state = state.with_mean(solve.x)
        return DirectSolution(state, solve, full_elbo(model, state, batch, source))


def one_pass_covariance(
    model: VariationalModel,
    source: RowSource,
    weights: Tensor,
    progress: Progress = unwatched,
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
    model: VariationalModel, state: AbstractGaussian, batch: Batch, source: RowSource
) -> float:
    """The ELBO over all data, chunk by chunk."""
    own = own_batch(batch)
    with torch.no_grad():
        terms = [
            model.expected_log_likelihood(state, rows, own[part]) for part, rows in source.chunks()
        ]
        return float(source.total(torch.stack(terms).sum())) - float(state.kl())


@final
@dataclass(frozen=True, eq=False)
class SettledFit:
    """q(ε) with the ELBO of all data, passes over the data made, and whether it rose no more."""

    posterior: AbstractGaussian
    elbo: float
    passes: int
    converged: bool


def settle(
    model: VariationalModel,
    posterior: AbstractGaussian,
    batch: Batch,
    source: RowSource,
    *,
    max_passes: int = 10,
    tolerance: float = 1e-4,
) -> SettledFit:
    """Steps S11-S12 with all data at fixed hyperparameters, until the ELBO rises no more.

    Gaussian noise and the full family: the first step of length 1 is the optimum (S4-S5), which the
    pass that finds its ELBO shows. Other likelihoods: Newton-like steps; one that lowers the ELBO
    is taken back and the length halved.

    Parameters
    ----------
    model, posterior, batch, source
    max_passes : over the data
    tolerance : of the ELBO, per datum
    """
    at, length, passes, converged = _Sweep.of(model, posterior, batch, source), 1.0, 1, False
    while passes < max_passes and not converged:
        try:
            tried = _Sweep.of(model, at.moved(model, length), batch, source)
        except ValueError:  # moments so far off that the next precision is not positive definite
            length, passes = 0.5 * length, passes + 1
            continue
        passes += 1
        gained, still = tried.elbo - at.elbo, tolerance * len(batch)
        converged = abs(gained) < still or (length == 1.0 and tried.rests(at, still))
        if gained >= 0:
            at = tried
        else:
            length, converged = 0.5 * length, abs(gained) < still
    return SettledFit(at.posterior, at.elbo, passes, converged)


@final
@dataclass(frozen=True, eq=False)
class _Sweep:
    """One pass over the data at q: the ELBO, Λ̂ − I, and the gradient in m."""

    posterior: AbstractGaussian
    elbo: float
    statistics: Tensor
    gradient: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        model: VariationalModel, posterior: AbstractGaussian, batch: Batch, source: RowSource
    ) -> "_Sweep":
        own = own_batch(batch)
        statistics = model.family.zero_statistics(posterior.mean.device)
        gradient = torch.zeros_like(posterior.mean)
        fit = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for part, rows in source.chunks():
            moments = model.moments(posterior, rows, own[part].functional)
            g1, g2 = model.moment_gradients(moments, own[part])
            model.family.precision_statistics(rows.phi, -2.0 * g2, statistics)
            gradient += g1.to(rows.phi.dtype) @ rows.phi
            fit += model.summed_log_prob(moments, own[part])
        return _Sweep(
            posterior,
            float(source.total(fit)) - float(posterior.kl()),
            source.total(statistics),
            source.total(gradient) - posterior.mean,
        )

    def rests(self, before: "_Sweep", still: float) -> bool:
        """Whether another full step would gain next to nothing: S⁻¹ stays what the step from
        `before` has made it, and the decrement of the mean, ½ gᵀ S g, is small."""
        change, size = (self.statistics - before.statistics).abs().max(), before.statistics.abs()
        decrement = 0.5 * float(self.posterior.quadratic(self.gradient[None]))
        return float(change) <= _SAME * float(size.max()) and decrement < still

    def moved(self, model: VariationalModel, length: float) -> AbstractGaussian:
        """One natural step from here."""
        return model.family.natural_step(
            self.posterior, self.gradient, self.statistics, length, length
        )
