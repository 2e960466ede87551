"""A Gaussian process with noise as one value: kernel, mean, likelihood."""

from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from dustmap.gp._means import AbstractMean
from dustmap.gp._parameters import AbstractParametric, Parameters
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood


@final
@dataclass(frozen=True, eq=False)
class GPModel(AbstractParametric):
    """ρ ~ GP(mean, kernel), y = functionals of ρ + noise of the likelihood.

    `Parameters.of(model)` has what is learned of it, and builds it at other values.
    """

    parts = ("kernel", "mean", "likelihood")

    kernel: AbstractKernel
    mean: AbstractMean
    likelihood: AbstractLikelihood

    @property
    def noise(self) -> GaussianLikelihood:
        """The likelihood of methods for Gaussian noise; a TypeError where it is another."""
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise TypeError(
                f"expected a GaussianLikelihood, got {type(self.likelihood).__name__}: use an "
                "engine of variational inference"
            )
        return self.likelihood

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the numbers that are learned of kernel and noise, kernel first."""
        return Parameters.of(self, without=("mean",)).names

    def with_coefficients(self, coefficients: Tensor) -> "GPModel":
        """With other coefficients β (P,) of the mean."""
        return replace(self, mean=self.mean.with_coefficients(coefficients))
