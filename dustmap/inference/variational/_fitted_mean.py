"""Coefficients of the mean fitted to the data of a structured posterior, and their uncertainty."""

import torch

from dustmap.gp import Batch, orthogonal_directions
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference._coefficients import CoefficientSpread, coefficient_spread
from dustmap.inference._precision import FamilyPreconditioner, PrecisionOperator
from dustmap.inference.variational._model import VariationalModel
from dustmap.inference.variational._source import RowSource


@torch.no_grad()
def mean_spread(
    model: VariationalModel,
    state: AbstractGaussian,
    batch: Batch,
    source: RowSource,
    *,
    max_steps: int = 1000,
) -> CoefficientSpread | None:
    """What learned coefficients of the mean leave open; None where they are given.

    Noise that is not Gaussian has no such closed form: None, too. Λ = I + Φᵀ Σ⁻¹ Φ with Σ the noise
    alone, by CG with the posterior's S as preconditioner.
    """
    fitted = any(p.requires_grad for p in model.mean.parameters())
    if not (fitted and isinstance(model.likelihood, GaussianLikelihood)):
        return None
    weights = 1.0 / model.likelihood.noise_variance(batch).double()
    D = weights.sqrt()
    U, directions = orthogonal_directions(D[:, None] * model.mean.basis(batch.functional))
    phi = source.operator()
    return coefficient_spread(
        phi,
        PrecisionOperator(phi, weights),
        D,
        U,
        directions,
        seed=0,
        count=0,
        preconditioner=FamilyPreconditioner(state),
        max_steps=max_steps,
    )


@torch.no_grad()
def fit_mean(
    model: VariationalModel,
    state: AbstractGaussian,
    batch: Batch,
    source: RowSource,
    spread: CoefficientSpread,
) -> AbstractGaussian:
    """Sets the coefficients to their generalised-least-squares values β̂, in place; q at them.

        β̂ = β + T z,   E ε = m + Eᵀ z,   z = Tᵀ Hᵀ Σ⁻¹ (y − H β − Φ m)

    m: the mean of q = `state` at β, where Λ m = ΦᵀΣ⁻¹(y − H β).
    """
    assert isinstance(model.likelihood, GaussianLikelihood)
    H, beta = model.mean.basis(batch.functional), model.mean.coefficients().detach()
    weights = 1.0 / model.likelihood.noise_variance(batch).double()
    left = batch.y.double() - H @ beta - source.operator().matmul(state.mean).double()
    z = spread.directions.mT @ (H.mT @ (weights * left))
    model.mean.assign(beta + spread.directions @ z)
    return state.with_mean(state.mean + z.to(state.mean) @ spread.fields)
