"""A sparse variational Gaussian process: how data see ε, and what they say of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor, nn

from dustmap.gp import AbstractMean, Batch
from dustmap.gp.families import AbstractFamily, AbstractGaussian
from dustmap.gp.features import AbstractFeatureMap, Features
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.likelihoods import AbstractLikelihood


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Mean (N,) and variance (N,) of the latent f under q."""

    mean: Tensor
    variance: Tensor


@final
@dataclass(frozen=True, eq=False)
class VariationalModel:
    """y_n ~ p(y_n | f_n), f_n = m_n + φ_nᵀ ε + r_n, ε ~ N(0, I), q(ε) in a structured family.

    features: Φ and Var r; mean: m; likelihood: p(y | f); family: the structure of S.
    """

    features: AbstractFeatureMap
    mean: AbstractMean
    likelihood: AbstractLikelihood
    family: AbstractFamily

    def __post_init__(self) -> None:
        if self.family.n_features != self.features.n_features:
            raise ValueError(
                f"family has {self.family.n_features} variables but the feature map has "
                f"{self.features.n_features}: build the family for features.n_features"
            )

    def rebuilt(self) -> "VariationalModel":
        """The model at the kernel's present parameters."""
        return replace(self, features=self.features.rebuilt())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Trainable hyperparameters of kernel, mean and likelihood."""
        for owner in (self.features, self.mean, self.likelihood):
            yield from (p for p in owner.parameters() if p.requires_grad)

    def moments(
        self, state: AbstractGaussian, rows: Features, functional: AbstractFunctional
    ) -> Moments:
        """E f_n = m_n + φ_nᵀ m and Var f_n = φ_nᵀ S φ_n + Var r_n under q."""
        mean = self.mean.values(functional).to(rows.phi.dtype) + rows.phi @ state.mean
        return Moments(mean, state.quadratic(rows.phi) + rows.residual_variance)

    def expected_log_likelihood(
        self, state: AbstractGaussian, rows: Features, batch: Batch
    ) -> Tensor:
        """Σ_n a_n (002, eq. 14) with the general residual variance; summed in float64."""
        return self.summed_log_prob(self.moments(state, rows, batch.functional), batch)

    def summed_log_prob(self, moments: Moments, batch: Batch) -> Tensor:
        """Σ_n E ln p(y_n | f_n) for f_n of given moments, in float64."""
        terms = self.likelihood.expected_log_prob(
            batch.y, moments.mean, moments.variance, self.likelihood.noise_variance(batch)
        )
        return terms.double().sum()

    def moment_gradients(self, moments: Moments, batch: Batch) -> tuple[Tensor, Tensor]:
        """g1 = ∂E_n/∂μ_n and g2 = ∂E_n/∂v_n (N,), E_n the expected log-likelihood."""
        noise = self.likelihood.noise_variance(batch)
        return self.likelihood.moment_gradients(batch.y, moments.mean, moments.variance, noise)

    def elbo(
        self, state: AbstractGaussian, rows: Features, batch: Batch, scale: float = 1.0
    ) -> Tensor:
        """scale · Σ_n a_n − KL[q ‖ N(0, I)] (002, eq. 13); scale = N / |batch| for minibatches."""
        return scale * self.expected_log_likelihood(state, rows, batch) - state.kl()
