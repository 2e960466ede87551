"""One natural-gradient step on a minibatch (002, S11-S12), for any likelihood."""

from dataclasses import dataclass
from typing import final

import torch

from dustmap.gp import Batch
from dustmap.gp.families import (
    AbstractDivergence,
    AbstractGaussian,
    FullRankFamily,
    KrylovFullRankFamily,
)
from dustmap.gp.features import Features
from dustmap.inference._precision import batch_stability
from dustmap.inference.variational._model import VariationalModel
from dustmap.inference.variational._non_concave import rising_step, step_weights

#: Families that hold every S.
_UNCUT = (FullRankFamily, KrylovFullRankFamily)


@final
@dataclass(frozen=True)
class StepLengths:
    """Lengths of one natural step: of S, the cap of the mean's, and its share of the bound."""

    covariance: float
    mean: float
    safety: float


@final
@dataclass(frozen=True, eq=False)
class NaturalStep:
    """One natural-gradient step and what it measured on its minibatch before stepping.

    fit: scale Σ_n E ln p(y_n | f_n); divergence: of the q before. negative: weights below 0, where
    ln p(y|f) bends upwards; share: of them in the step of S; halvings: of the mean's step, for an
    ELBO that would have fallen.
    """

    posterior: AbstractGaussian
    fit: float
    divergence: AbstractDivergence
    stability: float
    length_mean: float
    negative: int = 0
    share: float = 1.0
    halvings: int = 0

    @property
    def elbo(self) -> float:
        """On the minibatch, of the q before; computed from the divergence when it is asked for."""
        return self.fit - self.divergence.value()


@torch.no_grad()
def natural_step(
    model: VariationalModel,
    posterior: AbstractGaussian,
    rows: Features,
    batch: Batch,
    scale: float,
    lengths: StepLengths,
) -> NaturalStep:
    """S11-S12 on a minibatch of weight `scale` = N / n, for any likelihood.

    Λ̂ = I + scale Σ_n (−2 g2_n) φ_n φ_nᵀ and g = scale Σ_n g1_n φ_n − m, with (g1, g2) the
    derivatives of E ln p(y_n | f_n) in mean and variance of f_n. S steps first; the mean's step
    is then capped at safety · 2 / λ_max(S' Λ̂): beyond 2 / λ_max the iteration diverges. For what
    is not concave see `step_weights`, for what is not quadratic `rising_step`.
    """
    moments = model.moments(posterior, rows, batch.functional)
    g1, g2 = model.moment_gradients(moments, batch)
    taken = step_weights(posterior, rows.phi, -2.0 * scale * g2, lengths.covariance)
    weights = taken.weights
    statistics = model.family.precision_statistics(rows.phi, weights)
    ahead = model.family.natural_step(
        posterior, torch.zeros_like(posterior.mean), statistics, 0.0, lengths.covariance
    )
    if isinstance(model.family, _UNCUT) and lengths.covariance > 0:
        # S'⁻¹ = (1 − l) S⁻¹ + l Λ̂ ≥ l Λ̂ without any cut to a structure: no eigenvalue is needed.
        stability = 1.0 / lengths.covariance
    else:
        stability = batch_stability(ahead, rows.phi, weights)
    length = min(lengths.mean, lengths.safety * 2.0 / stability)
    gradient = scale * (g1.to(rows.phi.dtype) @ rows.phi) - posterior.mean
    fit = model.summed_log_prob(moments, batch)
    direction = length * ahead.apply_covariance(gradient)
    moved = rising_step(model, ahead, direction, moments, fit, rows.phi, batch, scale)
    return NaturalStep(
        moved.posterior,
        float(scale * fit),
        posterior.divergence(),
        stability,
        length,
        taken.negative,
        taken.share,
        moved.halvings,
    )
