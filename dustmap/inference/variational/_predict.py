"""Posterior of any functional under a structured q(ε), in chunks.

Coefficients of the mean are fitted to its data, with their uncertainty.
"""

import warnings
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractPosterior, Batch, Prediction, orthogonal_directions
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import Features, SolveSummary, chunks
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference._precision import (
    CoefficientSpread,
    FamilyPreconditioner,
    PrecisionOperator,
    coefficient_spread,
)
from dustmap.inference.variational._model import RowSource, VariationalModel
from dustmap.linalg import UnconvergedWarning, standard_normal


@final
@dataclass(frozen=True, eq=False)
class VariationalPosterior(AbstractPosterior):
    """f_* = m_* + φ_*ᵀ ε + r_* with ε ~ q, and u_*ᵀ z for fitted coefficients of the mean.

    Residuals r of different functionals are taken as independent: an approximation for functionals
    closer together than the grid's spacing (stars of one beam, say).

    spread: of fitted coefficients, see `CoefficientSpread`; None where they are given.
    """

    model: VariationalModel
    state: AbstractGaussian
    spread: CoefficientSpread | None = None

    def predict(self, functional: AbstractFunctional) -> Prediction:
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
        return Prediction(torch.cat(means), torch.cat(variances), clamped)

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Cov f (N, N) = Φ S Φᵀ + uᵀu + diag(Var r)."""
        with torch.no_grad():
            rows = self.model.features.rows(functional)
            _warn_once(rows.solves)
            u = self._trend(rows, functional)
            field = self.state.covariance_of(rows.phi, rows.phi) + u.mT @ u
            return field + torch.diag(rows.residual_variance)

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """`count` joint draws of f (count, N): the same ε for all chunks, independent residuals."""
        with torch.no_grad():
            eps = self.state.sample(count, generator)
            directions = 0 if self.spread is None else len(self.spread.fields)
            z = standard_normal((count, directions), generator, eps)
            parts = [
                self._draw(self.model.features.rows(functional[part]), functional[part], eps, z)
                for part in chunks(len(functional), self.model.features.chunk)
            ]
            field = torch.cat([drawn for drawn, _ in parts], dim=-1)
            spread = torch.cat([std for _, std in parts])
            return field + spread * standard_normal(field.shape, generator, field)

    def _draw(
        self, rows: Features, functional: AbstractFunctional, eps: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gridded part of the draws (count, n) and std of the residuals (n,)."""
        _warn_once(rows.solves)
        mean = self.model.mean.values(functional).to(rows.phi.dtype)
        drawn = mean + eps @ rows.phi.mT + z @ self._trend(rows, functional)
        return drawn, rows.residual_variance.sqrt()

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
            UnconvergedWarning,
            stacklevel=3,
        )


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
    if not (model.mean.is_learned and isinstance(model.likelihood, GaussianLikelihood)):
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
) -> VariationalPosterior:
    """The posterior with coefficients at their generalised-least-squares values β̂, and q at them.

        β̂ = β + T z,   E ε = m + Eᵀ z,   z = Tᵀ Hᵀ Σ⁻¹ (y − H β − Φ m)

    m: the mean of q = `state` at β, where Λ m = ΦᵀΣ⁻¹(y − H β).
    """
    assert isinstance(model.likelihood, GaussianLikelihood)
    H, beta = model.mean.basis(batch.functional), model.mean.coefficients().detach()
    weights = 1.0 / model.likelihood.noise_variance(batch).double()
    left = batch.y.double() - H @ beta - source.operator().matmul(state.mean).double()
    z = spread.directions.mT @ (H.mT @ (weights * left))
    mean = model.mean.with_coefficients(beta + spread.directions @ z)
    moved = state.with_mean(state.mean + z.to(state.mean) @ spread.fields)
    return VariationalPosterior(replace(model, mean=mean), moved, spread)
