"""Gradient and curvature of the evidence with the covariance of the data as a matrix: no draws."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.features import dense_covariance, in_float64
from dustmap.inference.evidence._evidence import noise_floor
from dustmap.inference.evidence._moved_models import MovedModel
from dustmap.inference.solve._dense_covariance import DenseCovariance
from dustmap.inference.solve._grid_model import GridModel

#: Change of a parameter in the forward differences.
DENSE_SHIFT = 1e-4


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

    def average_information(self) -> Tensor:
        """½ (∂_iA α)ᵀ A⁻¹ (∂_jA α) (P, P), see `Derivatives.average_information`."""
        information = 0.5 * self.of_covariance @ self.covariance.solve(self.of_covariance).mT
        return 0.5 * (information + information.mT)

    def metric(self) -> Tensor:
        """The average information with the diagonal of `Derivatives.metric`."""
        information = self.average_information()
        return information + noise_floor(information, self.of_log_sigma, self.leverage)


@torch.no_grad()
def differentiate_dense(
    model: GridModel,
    data: Batch,
    covariance: DenseCovariance,
    sigma: Tensor,
    moved: Iterable[MovedModel],
) -> DenseDerivatives:
    """Forward differences of A: one more matrix for every number of the kernel but those that only
    multiply it, none for those of the noise.

    Parameters
    ----------
    model, data
    covariance, sigma : A and Σ (N,) at θ
    moved : the model with every number moved by `DENSE_SHIFT`
    """
    residual = data.y.double() - model.mean.values(data.functional)
    alpha = covariance.solve(residual[None])[0]
    G = covariance.inverse()
    leverage = 1.0 - sigma * G.diagonal()
    G = G.neg_().addr_(alpha, alpha).mul_(0.5)
    here = _FieldProducts.of(covariance, sigma, residual, alpha, G)
    traces, seen, log_sigma, rates = [], [], [], []
    for there in moved:
        change = here.change(there, data, G, alpha)
        log_sigma.append((there.sigma / sigma).log() / DENSE_SHIFT)
        of_sigma = sigma * log_sigma[-1]
        traces.append(change.trace + float(G.diagonal() @ of_sigma))
        seen.append(change.seen + of_sigma * alpha)
        rates.append(there.rate)
    return DenseDerivatives(
        torch.tensor(traces, dtype=torch.float64),
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

    @staticmethod
    def of(
        covariance: DenseCovariance, sigma: Tensor, residual: Tensor, alpha: Tensor, G: Tensor
    ) -> "_FieldProducts":
        """By K = A − Σ − C Cᵀ, C the columns of groups, and A α = residual (N,)."""
        C = covariance.groups
        trace = 0.5 * float(alpha @ residual - len(alpha))  # tr(G A)
        trace -= float(G.diagonal() @ sigma) + float((G @ C * C).sum())
        return _FieldProducts(residual - sigma * alpha - C @ (C.mT @ alpha), trace)

    def change(self, there: MovedModel, data: Batch, G: Tensor, alpha: Tensor) -> "_FieldProducts":
        """Derivatives by the model `DENSE_SHIFT` away."""
        if there.factor is not None:
            rate = math.log(there.factor) / DENSE_SHIFT
            return _FieldProducts(rate * self.seen, rate * self.trace)
        K = dense_covariance(in_float64(there.model.features), data.functional)
        seen = (K @ alpha - self.seen) / DENSE_SHIFT
        trace = float(torch.dot(K.view(-1), G.view(-1)))
        return _FieldProducts(seen, (trace - self.trace) / DENSE_SHIFT)
