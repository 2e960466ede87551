"""The optimum in closed form for Gaussian noise: S by one pass (S4), m by CG on Λ (S5)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch, own_batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import warn_unconverged
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference._precision import FamilyPreconditioner, PrecisionOperator
from dustmap.inference.variational._model import VariationalModel
from dustmap.inference.variational._source import RowSource
from dustmap.linalg import Progress, SolveResult, pcg, unwatched

#: What is counted while the covariance takes them up.
_ROWS = "rows"


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
    S as preconditioner; `start` (M_w,) warm-starts it.
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
        raise ValueError("the data set is empty: at least one datum is needed")
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
