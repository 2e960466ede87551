"""A Gaussian model of data on a grid, for engines that only take products of Φ."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import AbstractMean, Batch
from dustmap.gp.features import AbstractFeatureMap
from dustmap.gp.likelihoods import GaussianLikelihood


@final
@dataclass(frozen=True, eq=False)
class GridModel:
    """y = H β + Φ ε + r + noise with ε ~ N(0, I); Σ = diag(noise + Var r).

    features: Φ and Var r; mean: H β; likelihood: the variance of the noise. The residuals r of
    data along one beam are correlated; taking them as independent is this model's approximation.
    """

    features: AbstractFeatureMap
    mean: AbstractMean
    likelihood: GaussianLikelihood

    def rebuilt(self) -> "GridModel":
        """The model at the kernel's present parameters, with their graph."""
        return replace(self, features=self.features.rebuilt())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Trainable hyperparameters of kernel, mean and likelihood."""
        for owner in (self.features, self.mean, self.likelihood):
            yield from (p for p in owner.parameters() if p.requires_grad)

    def sigma(self, data: Batch) -> Tensor:
        """Diagonal of Σ (N,): variance of the noise plus Var r, differentiable."""
        noise = self.likelihood.noise_variance(data)
        return noise + self.features.residual_variance(data.functional).to(noise.dtype)

    @torch.no_grad()
    def residual(self, data: Batch) -> Tensor:
        """y − H β (N,), in the dtype of the features."""
        return (data.y.double() - self.mean.values(data.functional)).to(self.features.dtype)
