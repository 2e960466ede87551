"""The gradient of the log evidence from posterior moments of ε: Fisher's identity, split."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import Batch
from dustmap.gp.features import chunks
from dustmap.inference._grid_model import GridModel
from dustmap.inference._information import differentiate, split_like, total_variance


@final
@dataclass(frozen=True, eq=False)
class EvidenceGradient:
    """∂ ln p(y | θ), one tensor per parameter, in the order of `GridModel.parameters`.

    values; standard_errors: of the Monte Carlo average over the deviations (the posterior mean is
    known without error, and so is the gradient in the prior mean).
    """

    values: tuple[Tensor, ...]
    standard_errors: tuple[Tensor, ...]


def evidence_gradient(
    model: GridModel,
    data: Batch,
    eps_mean: Tensor,
    deviations: Tensor,
    weights: Tensor | None = None,
) -> EvidenceGradient:
    """∂ ln p(y | θ) = E_{ε|y}[∂_θ ln N(y; m_θ + Φ_θ ε, Σ_θ)], since ε's prior has no θ.

    With mean m̂ and deviations δ_s of the posterior that is the derivative of

        −½ ‖y − m_θ − Φ_θ m̂‖²_{Σ⁻¹} − ½ mean_s ‖Φ_θ δ_s‖²_{Σ⁻¹} − ½ ln |Σ_θ|

    at fixed m̂ and δ_s: through the weights, √λ, Var r, noise and mean; no solve is differentiated.
    Taking mean and deviations apart leaves out their product, which is zero on average and would
    drown the rest.

    eps_mean (M_w,) = m̂; deviations (S, M_w) ~ N(0, Λ⁻¹), independent; weights (N,): the noise
    variances are divided by them. The standard errors are the scatter of the single deviations.
    """
    values = gradient_values(model, data, eps_mean, deviations, weights)
    derivatives = differentiate(model, data, eps_mean, deviations, weights)
    errors = derivatives.monte_carlo_covariance.diagonal().sqrt()
    return EvidenceGradient(values, split_like(errors, list(model.parameters())))


def gradient_values(
    model: GridModel,
    data: Batch,
    eps_mean: Tensor,
    deviations: Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The values of `evidence_gradient` alone; data go by chunks, a backward pass for each."""
    parameters = _check(model, data, eps_mean, deviations, weights)
    eps = torch.cat([eps_mean[None], deviations]).to(model.features.dtype)
    with torch.enable_grad():
        present = model.rebuilt()
        total = [torch.zeros_like(p) for p in parameters]
        for part in chunks(len(data), model.features.chunk):
            tau = None if weights is None else weights[part]
            objective = _expected_log_density(present, data[part], eps, tau)
            # What the chunks share (spectrum, tables) must outlive the first of them.
            gradients = torch.autograd.grad(
                objective, parameters, retain_graph=True, allow_unused=True
            )
            total = [t if g is None else t + g for t, g in zip(total, gradients, strict=True)]
    return tuple(total)


def _expected_log_density(
    model: GridModel, data: Batch, eps: Tensor, weights: Tensor | None
) -> Tensor:
    """The objective of `evidence_gradient` up to a constant, for eps (1 + S, M_w) = m̂, δ_s."""
    sigma = total_variance(model, data, weights)
    seen = model.features.products(data.functional, eps).double()
    residual = data.y.double() - model.mean.values(data.functional) - seen[0]
    square = residual.square() + seen[1:].square().mean(0)
    return -0.5 * (square / sigma + sigma.log()).sum()


def _check(
    model: GridModel, data: Batch, eps_mean: Tensor, deviations: Tensor, weights: Tensor | None
) -> list[nn.Parameter]:
    width = model.features.n_features
    if eps_mean.shape != (width,):
        raise ValueError(
            f"eps_mean must have shape ({width},), the features' M_w, got {tuple(eps_mean.shape)}: "
            "solve again after a change of the grid or the torus"
        )
    if deviations.ndim != 2 or deviations.shape[1] != width or len(deviations) < 2:
        raise ValueError(
            f"deviations must be two or more rows of {width} numbers (S, M_w), got shape "
            f"{tuple(deviations.shape)}: draw at least two samples with this model"
        )
    if weights is not None and weights.shape != (len(data),):
        raise ValueError(
            f"weights must have shape ({len(data)},), one per datum, got {tuple(weights.shape)}"
        )
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError("nothing to learn: no parameter of the model requires grad")
    return parameters
