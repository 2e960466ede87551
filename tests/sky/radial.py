"""A density that depends on the distance alone, with its integrals: a posterior without a fit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.gp import AbstractPosterior, Prediction
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals
from dustmap.sky.stars import AbstractDistances

Array = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Radial(AbstractPosterior):
    """ρ_s(x) = scale_s · ρ(|x|): `column` is ∫₀^d ρ, `scales` (S,) the draws."""

    column: Callable[[Array], Array]
    scales: tuple[float, ...] = (1.0,)

    def _integrals(self, functional: AbstractFunctional) -> Tensor:
        assert isinstance(functional, LineIntegrals)
        assert not functional.origin.any()
        column = torch.from_numpy(self.column(functional.edges.numpy()))
        return (functional.weights * column.diff(dim=-1)).sum(-1)

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        drawn = torch.tensor(self.scales, dtype=torch.float64)[:count, None]
        return drawn * self._integrals(functional)

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        f = self._integrals(functional)
        return torch.outer(f, f) * float(np.var(self.scales))

    def predict(self, functional: AbstractFunctional) -> Prediction:
        f = self._integrals(functional)
        return Prediction(f * float(np.mean(self.scales)), self.covariance(functional).diagonal())


def constant(d: Array) -> Array:
    return 1e-3 * d


def falling(d: Array) -> Array:
    """ρ = 2e-3 exp(−d / 800 pc)."""
    return np.asarray(1.6 * -np.expm1(-d / 800.0))


def waves(d: Array) -> Array:
    """ρ = 1e-3 (1 + 0.8 cos(d / 100 pc)): clouds of some 300 pc."""
    return np.asarray(1e-3 * (d + 80.0 * np.sin(d / 100.0)))


def dense_moments(
    distances: AbstractDistances, column: Callable[[Array], Array], far: float = np.inf
) -> tuple[Array, Array]:
    """∫ρ sf ds and 2∫ρ A sf ds − (∫ρ sf ds)² (N,), by the midpoint rule on 40,000 steps."""
    low, high = distances.quantile(np.array([1e-10, 1 - 1e-8])).T
    near = np.linspace(0.0, 1.0, 2_000, endpoint=False) * low[:, None]
    within = low[:, None] * (high / low)[:, None] ** np.linspace(0.0, 1.0, 40_001)
    s = np.minimum(np.concatenate([near, within], axis=1), far)
    A = column(s)
    mass = np.diff(A) * distances.survival(0.5 * (s[:, 1:] + s[:, :-1]))
    mean = mass.sum(1)
    return mean, 2 * (mass * 0.5 * (A[:, 1:] + A[:, :-1])).sum(1) - mean**2
