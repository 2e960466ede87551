"""Distances from parallaxes: the likelihood N(ϖ; 1/d, σ) times a declared prior of d."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.stars._checks import check_finite, check_positive
from dustmap.sky.stars._distances import AbstractDistances, Array

#: Parallax in mas times distance in pc.
MAS_PC = 1000.0


class AbstractDistancePrior(ABC):
    """A prior density of the distance d on (0, distance_max], in pc.

    Parallaxes ϖ and errors σ (n, 1) in mas; they may be zero or negative.
    """

    @abstractmethod
    def survival(self, parallax: Array, error: Array, d: Array) -> Array:
        """P(distance > d | ϖ, σ) at d (n, K) or (1, K), 0 ≤ d: (n, K)."""

    @abstractmethod
    def quantile(self, parallax: Array, error: Array, p: Array) -> Array:
        """The distances with P(distance ≤ d | ϖ, σ) = p at p (K,): (n, K)."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """Name and numbers, as a star store has them."""


@final
@dataclass(frozen=True, eq=False)
class ParallaxDistances(AbstractDistances):
    """Distances given parallax ± error (N,) in mas and a prior. A parallax is never inverted.

    p(d | ϖ) ∝ prior(d) exp(−(ϖ − 1/d)² / 2σ²): parallaxes of zero and below are data as any other.
    """

    parallax: Array
    error: Array
    prior: AbstractDistancePrior

    def __post_init__(self) -> None:
        self.check()
        check_finite({"parallax_mas": self.parallax})
        check_positive({"parallax_error_mas": self.error})

    def __len__(self) -> int:
        return len(self.parallax)

    def __getitem__(self, index: NDArray[Any] | slice) -> "ParallaxDistances":
        return ParallaxDistances(self.parallax[index], self.error[index], self.prior)

    def survival(self, d: Array) -> Array:
        return self.prior.survival(self.parallax[:, None], self.error[:, None], np.maximum(d, 0.0))

    def quantile(self, p: Array) -> Array:
        return self.prior.quantile(self.parallax[:, None], self.error[:, None], p)

    @property
    def median(self) -> Array:
        return self.quantile(np.array([0.5]))[:, 0]

    @property
    def depth(self) -> Array:
        return -self.parallax

    @property
    def exact(self) -> bool:
        return False

    def columns(self) -> dict[str, Array]:
        return {"parallax_mas": self.parallax, "parallax_error_mas": self.error}


def check_scale(name: str, value: float) -> None:
    if not 0.0 < value < np.inf:
        raise ValueError(f"{name} must be positive and finite, in pc, got {value}")
