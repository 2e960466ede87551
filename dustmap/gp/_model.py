"""A Gaussian process with noise as one value: kernel, mean, likelihood."""

from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from dustmap.gp._means import AbstractMean
from dustmap.gp._parameters import AbstractParametric
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import GaussianLikelihood


@final
@dataclass(frozen=True, eq=False)
class GPModel(AbstractParametric):
    """ρ ~ GP(mean, kernel), y = functionals of ρ + noise of the likelihood.

    `Parameters.of(model)` has what is learned of it, and builds it at other values.
    """

    parts = ("kernel", "mean", "likelihood")

    kernel: AbstractKernel
    mean: AbstractMean
    likelihood: GaussianLikelihood

    def with_coefficients(self, coefficients: Tensor) -> "GPModel":
        """With other coefficients β (P,) of the mean."""
        return replace(self, mean=self.mean.with_coefficients(coefficients))
