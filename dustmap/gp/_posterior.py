"""What every posterior of the field answers, whatever engine found it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.functionals import AbstractFunctional


@final
@dataclass(frozen=True, eq=False)
class Prediction:
    """Marginal posterior of latent f_n (without noise): mean (N,), variance (N,) ≥ 0.

    clamped: how many variances round-off had made negative and were set to 0.
    """

    mean: Tensor
    variance: Tensor
    clamped: int = 0

    @property
    def std(self) -> Tensor:
        """Standard deviation (N,)."""
        return self.variance.sqrt()


class AbstractPosterior(ABC):
    """The posterior Gaussian process given data, queried through any functional, in chunks."""

    @abstractmethod
    def predict(self, functional: AbstractFunctional) -> Prediction:
        """Mean and variance of f_n for each of the N functionals."""

    @abstractmethod
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Joint covariance (N, N)."""

    @abstractmethod
    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """`count` joint draws, (count, N)."""
