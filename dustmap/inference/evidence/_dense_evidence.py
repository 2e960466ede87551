"""Gradient and curvature of the evidence with the covariance of the data as a matrix: no draws."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.features import AbstractFeatureMap, LocalFeatures, dense_covariance, field_features
from dustmap.inference.evidence._evidence import noise_floor
from dustmap.inference.evidence._moved_models import MovedModel
from dustmap.inference.solve._dense_covariance import DenseCovariance
from dustmap.inference.solve._grid_model import GridModel

#: Change of a parameter in the forward differences.
DENSE_SHIFT = 1e-4
#: Spectra that differ by this part of the largest eigenvalue are multiples of one another.
_PROPORTIONAL = 1e-12


@final
@dataclass(frozen=True, eq=False)
class DenseDerivatives:
    """Derivatives of ln p(y | θ) in P parameters without Monte Carlo error.

        ∂_i ln p = tr(G ∂_iA)        G = ½ (α αᵀ − A⁻¹),  α = A⁻¹(y − m)

    gradient (P,). of_covariance (P, N) = ∂_iA α. of_log_sigma, of_log_residual (P, N), leverage
    (N,): see `Derivatives`. covariance: A.
    """

    gradient: Tensor
    of_covariance: Tensor
    of_log_sigma: Tensor
    of_log_residual: Tensor
    leverage: Tensor
    covariance: DenseCovariance

    def metric(self) -> Tensor:
        """½ (∂_iA α)ᵀ A⁻¹ (∂_jA α) (P, P) with the diagonal of `Derivatives.metric`."""
        information = 0.5 * self.of_covariance @ self.covariance.solve(self.of_covariance).mT
        information = 0.5 * (information + information.mT)
        return information + noise_floor(information, self.of_log_sigma, self.leverage)


@torch.no_grad()
def differentiate_dense(
    model: GridModel,
    data: Batch,
    covariance: DenseCovariance,
    sigma: Tensor,
    of_sigma: Callable[[Tensor], Tensor],
    moved: Iterable[MovedModel],
) -> DenseDerivatives:
    """Exact traces: of Σ by its graph, of the field by another covariance for every number of the
    kernel but those that only multiply it.

    Parameters
    ----------
    model, data
    covariance, sigma : A and Σ (N,) at θ
    of_sigma : w (N,) ↦ Σ_n w_n ∂_iΣ_n (P,)
    moved : the model with every number moved by `DENSE_SHIFT`
    """
    residual = data.y.double() - model.mean.values(data.functional)
    alpha = covariance.solve(residual[None])[0]
    G = covariance.inverse()
    leverage = 1.0 - sigma * G.diagonal()
    G = G.neg_().addr_(alpha, alpha).mul_(0.5)
    of_groups = covariance.groups @ (covariance.groups.mT @ alpha)
    here = _FieldProducts(
        residual - sigma * alpha - of_groups,
        0.5 * float(alpha @ residual - len(alpha))
        - float(G.diagonal() @ sigma)
        - float((G @ covariance.groups * covariance.groups).sum()),
    )
    gradient, seen, log_sigma, rates = of_sigma(G.diagonal()), [], [], []
    for i, there in enumerate(moved):
        change = here.change(model.features, there.model.features, data, G, alpha)
        gradient[i] += change.trace
        seen.append(change.seen + (there.sigma - sigma) / DENSE_SHIFT * alpha)
        log_sigma.append((there.sigma / sigma).log() / DENSE_SHIFT)
        rates.append(there.rate)
    return DenseDerivatives(
        gradient,
        torch.stack(seen),
        torch.stack(log_sigma),
        torch.stack(rates),
        leverage,
        covariance,
    )


@final
@dataclass(frozen=True, eq=False)
class _FieldProducts:
    """K α (N,) and tr(G K) of the field's covariance K = ΦΦᵀ, or their derivatives."""

    seen: Tensor
    trace: float

    def change(
        self,
        here: AbstractFeatureMap,
        there: AbstractFeatureMap,
        data: Batch,
        G: Tensor,
        alpha: Tensor,
    ) -> "_FieldProducts":
        """Derivatives by the features `DENSE_SHIFT` away from these."""
        if there is here:
            return _FieldProducts(torch.zeros_like(self.seen), 0.0)
        factor = _factor(here, there)
        if factor is not None:
            rate = math.log(factor) / DENSE_SHIFT
            return _FieldProducts(rate * self.seen, rate * self.trace)
        K = dense_covariance(there, data.functional)
        seen = (K @ alpha - self.seen) / DENSE_SHIFT
        trace = float(torch.dot(K.flatten(), G.flatten()))
        return _FieldProducts(seen, (trace - self.trace) / DENSE_SHIFT)


def _factor(here: AbstractFeatureMap, there: AbstractFeatureMap) -> float | None:
    """The number by which one prior's covariance is that of the other; None where it is not."""
    first, second = field_features(here), field_features(there)
    assert isinstance(first, LocalFeatures)
    assert isinstance(second, LocalFeatures)
    before, after = first.prior.spectrum, second.prior.spectrum
    factor = float(after.sum() / before.sum())
    apart = float((after - factor * before).abs().max())
    return factor if apart <= _PROPORTIONAL * float(after.max()) else None
