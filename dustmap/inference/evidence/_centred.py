"""The field held fixed instead of its whitened form: derivatives of λ taken out of the products."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import GridPrior
from dustmap.gp.features import AbstractFeatureMap
from dustmap.inference.solve._on_grid import prior_of
from dustmap.linalg import CirculantOperator


@final
@dataclass(frozen=True, eq=False)
class Recolouring:
    """C_θ^{-1/2} C^{1/2}: white variables at θ of the field that has white variables ε here.

    spectrum: λ of C at the present parameters, without graph; torus_shape: its torus.
    """

    spectrum: Tensor
    torus_shape: tuple[int, ...]

    @staticmethod
    def at(features: AbstractFeatureMap) -> "Recolouring":
        """At the features' present value."""
        prior = _prior_of(features)
        return Recolouring(prior.spectrum.detach(), prior.torus_shape)

    def applied(self, features: AbstractFeatureMap, eps: Tensor) -> Tensor:
        """ε_θ = C_θ^{-1/2} C^{1/2} ε for eps (k, M_w) and features at θ; carries no graph."""
        ratio = (self.spectrum / _prior_of(features).spectrum.detach()).sqrt()
        return CirculantOperator(ratio.to(eps.dtype), self.torus_shape).matmul(eps)

    def log_spectrum(self, features: AbstractFeatureMap, power: Tensor) -> Tensor:
        """Σ_k p_k ln λ_θ,k, differentiable; power p in the half-spectrum layout of `power`."""
        return (power * _prior_of(features).spectrum.log()).sum()

    def log_rate(self, features: AbstractFeatureMap) -> Tensor:
        """ln λ_θ − ln λ, in the half-spectrum layout."""
        return _prior_of(features).spectrum.detach().log() - self.spectrum.log()

    def power(self, a: Tensor, b: Tensor) -> Tensor:
        """p_k with Σ_k p_k = aᵀb for fields a, b (M_w,), float64: where in k the product arises."""
        axes = tuple(range(-len(self.torus_shape), 0))
        left = torch.fft.rfftn(a.reshape(self.torus_shape), dim=axes)
        right = left if b is a else torch.fft.rfftn(b.reshape(self.torus_shape), dim=axes)
        product = (
            left.real.double() * right.real.double() + left.imag.double() * right.imag.double()
        )
        power: Tensor = product * (self._multiplicity().to(product) / a.numel())
        return power

    def _multiplicity(self) -> Tensor:
        length = self.torus_shape[-1]
        count = torch.full((length // 2 + 1,), 2.0, dtype=torch.float64)
        count[0] = 1.0
        if length % 2 == 0:
            count[-1] = 1.0
        return count


def _prior_of(features: AbstractFeatureMap) -> GridPrior:
    return prior_of(features, "recolouring of prior_draws", "leave prior_draws out")
