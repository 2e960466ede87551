"""A posterior with what is open of its hyperparameters, from posteriors at several of them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._batch import AbstractPosterior, Prediction
from dustmap.gp.functionals import AbstractFunctional


@final
@dataclass(frozen=True, eq=False)
class MixturePosterior(AbstractPosterior):
    """Σ_k w_k ½ [N(m + d_k, C_k) + N(m − d_k, C_k)], d_k = m_k − m: as wide as the posteriors
    N(m_k, C_k) are around the mean m of the centre, and with that mean.

        E f_* = m      Cov f_* = Σ w_k (C_k + d_k d_kᵀ)

    centre: the posterior at the maximum of the evidence; parts: the K others; weights w (K,) ≥ 0,
    of sum 1.

    Examples
    --------
    >>> from dustmap.gp import ConstantMean, ExactGP
    >>> from dustmap.gp.functionals import PointValues
    >>> from dustmap.gp.kernels import Matern32
    >>> x = torch.tensor([[0.0], [1.0]]).double()
    >>> y, noise = torch.tensor([0.0, 1.0]).double(), torch.full((2,), 0.01).double()
    >>> centre, short, long = (
    ...     ExactGP(Matern32(length, dim=1), ConstantMean(0.0)).condition(PointValues(x), y, noise)
    ...     for length in (1.0, 0.5, 2.0)
    ... )
    >>> mixture = MixturePosterior(centre, (short, long), torch.tensor([0.5, 0.5]).double())
    >>> at = PointValues(torch.tensor([[0.5]]).double())
    >>> m, one, other = (each.predict(at) for each in (centre, short, long))
    >>> squares = [end.variance + (end.mean - m.mean) ** 2 for end in (one, other)]
    >>> torch.allclose(mixture.predict(at).variance, 0.5 * (squares[0] + squares[1]))
    True
    """

    centre: AbstractPosterior
    parts: tuple[AbstractPosterior, ...]
    weights: Tensor

    def __post_init__(self) -> None:
        if len(self.parts) == 0 or self.weights.shape != (len(self.parts),):
            raise UserError(
                f"a mixture needs one weight for each of its posteriors, got {len(self.parts)} "
                f"posteriors and weights of shape {tuple(self.weights.shape)}"
            )

    @torch.no_grad()
    def predict(self, functional: AbstractFunctional) -> Prediction:
        """m and Σ w_k (v_k + d_k²)."""
        centre = self.centre.predict(functional)
        variance, clamped = torch.zeros_like(centre.variance), centre.clamped
        for weight, part in zip(self.weights.tolist(), self.parts, strict=True):
            end = part.predict(functional)
            variance += weight * (end.variance + (end.mean - centre.mean).square())
            clamped = max(clamped, end.clamped)
        return Prediction(centre.mean, variance, clamped)

    @torch.no_grad()
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Σ w_k (C_k + d_k d_kᵀ)."""
        mean = self.centre.predict(functional).mean
        whole = mean.new_zeros(len(mean), len(mean))
        for weight, part in zip(self.weights.tolist(), self.parts, strict=True):
            away = part.predict(functional).mean - mean
            whole += weight * part.covariance(functional).addr_(away, away)
        return whole

    @torch.no_grad()
    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """Joint draws, each of a posterior that is drawn by its weight, on either side of m."""
        mean = self.centre.predict(functional).mean
        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        draws = mean.new_empty(count, len(mean))
        for k in sorted(set(which.tolist())):
            own, part = (which == k).nonzero().squeeze(-1), self.parts[k]
            away = part.predict(functional).mean - mean
            crossed = torch.randint(2, (len(own), 1), generator=generator).to(mean)
            drawn = part.sample(functional, len(own), generator)
            draws[own] = drawn - 2.0 * crossed * away
        return draws
