"""The gradient of the log evidence from posterior moments of ε: Fisher's identity, split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, Parameters
from dustmap.gp.features import LocalFeatures, chunks
from dustmap.inference.evidence._information import (
    Moments,
    Recolouring,
    differentiate,
    total_variance,
)
from dustmap.inference.solve._grid_model import GridModel

#: Data in one backward pass through features that hold no rows.
_PER_PASS = 2**20


@final
@dataclass(frozen=True, eq=False)
class EvidenceGradient:
    """∂ ln p(y | θ) (P,), in the order of `Parameters.of(model)`.

    names; values; standard_errors: of the Monte Carlo average over the deviations (the posterior
    mean is known without error, and so is the gradient in the prior mean).
    """

    names: tuple[str, ...]
    values: Tensor
    standard_errors: Tensor


def evidence_gradient(
    model: GridModel,
    data: Batch,
    eps_mean: Tensor,
    deviations: Tensor,
    weights: Tensor | None = None,
    prior_draws: Tensor | None = None,
) -> EvidenceGradient:
    """∂ ln p(y | θ) = E_{ε|y}[∂_θ ln N(y; m_θ + Φ_θ ε, Σ_θ)], since ε's prior has no θ.

    With mean m̂ and deviations δ_s of the posterior that is the derivative of

        −½ ‖y − m_θ − Φ_θ m̂‖²_{Σ⁻¹} − ½ mean_s ‖Φ_θ δ_s‖²_{Σ⁻¹} − ½ ln |Σ_θ|

    at fixed m̂ and δ_s: through the weights, √λ, Var r, noise and mean; no solve is differentiated.
    Taking mean and deviations apart leaves out their product, which is zero on average and would
    drown the rest.

    Where the data determine the field well that is still noisy in the length scale. Given the
    draws of the prior ε₀_s that δ_s = Λ⁻¹(ε₀_s + ΦᵀΣ^{-1/2} ξ_s) came from, the same identity is
    used with the field u = C^{1/2} ε fixed instead, and ln|C_θ| written as an average over ε₀_s:

        the above at m̂_θ = C_θ^{-1/2} C^{1/2} m̂ and δ_θ,s = C_θ^{-1/2} C^{1/2} δ_s,
        + ½ ⟨ln λ_θ, |m̂_k|² + mean_s (|δ_s,k|² − |ε₀_s,k|²)⟩

    Modes k that the data do not reach have δ_s = ε₀_s and drop out.

    eps_mean (M_w,) = m̂; deviations (S, M_w) ~ N(0, Λ⁻¹), independent; weights (N,): the noise
    variances are divided by them; prior_draws (S, M_w) = ε₀_s, for features of a `GridPrior`. The
    standard errors are the scatter of the single deviations.
    """
    moments = Moments(eps_mean, deviations, prior_draws)
    parameters = Parameters.of(model)
    parameters.require_some("the model")
    leaf = parameters.theta.clone().requires_grad_()
    values = gradient_values(parameters.build(leaf), leaf, data, moments, weights)
    errors = differentiate(model, data, moments, weights).monte_carlo_covariance.diagonal().sqrt()
    return EvidenceGradient(parameters.names, values, errors)


def gradient_values(
    model: GridModel,
    theta: Tensor,
    data: Batch,
    moments: Moments,
    weights: Tensor | None = None,
    sigma: Tensor | None = None,
) -> Tensor:
    """The values (P,) of `evidence_gradient` alone; data go by chunks, a backward pass for each.

    theta (P,): the leaf whose graph `model` carries. sigma (N,): Σ with that graph, where known.
    """
    _check(model, data, moments, weights)
    eps = torch.cat([moments.eps_mean[None], moments.deviations]).to(model.features.dtype)
    inputs: list[Tensor] = [theta]
    if moments.prior_draws is not None:
        inputs.append(eps.requires_grad_())
    with torch.enable_grad():
        total = [torch.zeros_like(p) for p in inputs]
        for part in chunks(len(data), data_per_pass(model)):
            batch, tau = data[part], None if weights is None else weights[part]
            variance = total_variance(model, batch, tau) if sigma is None else sigma[part]
            objective = _expected_log_density(model, batch, eps, variance)
            # What the chunks share (spectrum, tables) must outlive the first of them.
            total = _added(total, objective, inputs)
        if moments.prior_draws is not None:
            recolouring = Recolouring.at(model.features)
            power = _centring_power(recolouring, moments, moments.prior_draws, eps, total.pop())
            objective = recolouring.log_spectrum(model.features, power)
            total = _added(total, objective, [theta])
    return total[0]


def data_per_pass(model: GridModel) -> int:
    """Data in one backward pass: as many as the features hold rows, if their graph holds rows."""
    if isinstance(model.features, LocalFeatures):
        return _PER_PASS
    return model.features.chunk


def _added(total: list[Tensor], objective: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    if not objective.requires_grad:  # a kernel that is not learned
        return total
    gradients = torch.autograd.grad(objective, inputs, retain_graph=True, materialize_grads=True)
    return [t + g for t, g in zip(total, gradients, strict=True)]


@torch.no_grad()
def _centring_power(
    recolouring: Recolouring, moments: Moments, prior_draws: Tensor, eps: Tensor, slope: Tensor
) -> Tensor:
    """What multiplies ∂ ln λ_k when the field is held fixed: ½ (|m̂|² + ... ) − ½ ε · ∂/∂ε.

    slope (1 + S, M_w): derivative of the data's part in eps, to which ∂ε_θ = −½ ε ∂ ln λ applies.
    """
    count = len(moments.deviations)
    total = recolouring.power(moments.eps_mean, moments.eps_mean)
    for delta, draw in zip(moments.deviations, prior_draws, strict=True):
        total += (recolouring.power(delta, delta) - recolouring.power(draw, draw)) / count
    for value, derivative in zip(eps.detach(), slope, strict=True):
        total -= recolouring.power(value, derivative)
    return 0.5 * total


def _expected_log_density(model: GridModel, data: Batch, eps: Tensor, sigma: Tensor) -> Tensor:
    """The objective of `evidence_gradient` up to a constant, for eps (1 + S, M_w) = m̂, δ_s."""
    seen = model.features.products(data.functional, eps).double()
    residual = data.y.double() - model.mean.values(data.functional) - seen[0]
    square = residual.square() + seen[1:].square().mean(0)
    return -0.5 * (square / sigma + sigma.log()).sum()


def _check(model: GridModel, data: Batch, moments: Moments, weights: Tensor | None) -> None:
    moments.check(model.features.n_features)
    if weights is not None and weights.shape != (len(data),):
        raise UserError(
            f"weights must have shape ({len(data)},), one per datum, got {tuple(weights.shape)}"
        )
