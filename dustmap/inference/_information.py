"""How sharply the evidence determines its parameters: average information, and Monte Carlo error.

A backward pass gives one derivative in all parameters. What is asked for here is many derivatives
(of every datum, of every deviation) in few parameters: forward differences, one set of products per
parameter and no graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import Batch
from dustmap.inference._grid_model import GridModel
from dustmap.inference._precision import PrecisionOperator
from dustmap.linalg import AbstractOperator, pcg

#: Change of a parameter in the forward differences.
_SHIFT = {torch.float32: 1e-2, torch.float64: 1e-4}
#: Accuracy of the solves behind the information, whose error enters it squared.
_RTOL = 1e-3


@final
@dataclass(frozen=True, eq=False)
class Derivatives:
    """Derivatives in all P numbers of the parameters, at θ; zero in those of the mean.

    of_covariance (P, N) = ∂_iA α, with A = ΦΦᵀ + Σ and α = A⁻¹(y − m).
    of_deviations (S, P) = ∂_i of −½ ‖Φ_θ δ_s‖²_{Σ⁻¹}: their scatter is that of the gradient.
    phi, sigma (N,): Φ and Σ at θ.
    """

    of_covariance: Tensor
    of_deviations: Tensor
    phi: AbstractOperator
    sigma: Tensor

    @property
    def monte_carlo_covariance(self) -> Tensor:
        """Covariance (P, P) of the gradient's average over the deviations."""
        count = len(self.of_deviations)
        centred = self.of_deviations - self.of_deviations.mean(0)
        return centred.mT @ centred / (count * (count - 1))

    def average_information(
        self, preconditioner: AbstractOperator | None = None, max_steps: int = 200
    ) -> Tensor:
        """½ (∂_iA α)ᵀ A⁻¹ (∂_jA α) (P, P), the mean of observed and expected information.

        The metric of a Newton step up the evidence (Gilmour, Thompson and Cullis 1995). One solve
        with Λ of P columns: for x_i = Λ⁻¹ΦᵀΣ⁻¹q_i the form

            q_iᵀ A⁻¹ q_j = (q_i − Φx_i)ᵀ Σ⁻¹ (q_j − Φx_j) + x_iᵀ x_j

        has an error of second order in that of x.
        """
        q = self.of_covariance
        A = PrecisionOperator(self.phi, self.sigma.reciprocal())
        right = self.phi.rmatmul((q / self.sigma).to(self.phi.dtype))
        solve = pcg(A, right, preconditioner=preconditioner, rtol=_RTOL, max_steps=max_steps)
        rest = (q - self.phi.matmul(solve.x).double()) / self.sigma.sqrt()
        x = solve.x.double()
        return 0.5 * (rest @ rest.mT + x @ x.mT)


@torch.no_grad()
def differentiate(
    model: GridModel,
    data: Batch,
    eps_mean: Tensor,
    deviations: Tensor,
    weights: Tensor | None = None,
) -> Derivatives:
    """Forward differences at posterior mean (M_w,) and deviations (S, M_w) of ε.

    The parameters are moved in place, one at a time, and set back.
    """
    present = model.rebuilt()
    phi = present.features.operator(data.functional)
    sigma = total_variance(present, data, weights)
    seen = phi.matmul(eps_mean.to(phi.dtype)).double()
    alpha = (data.y.double() - present.mean.values(data.functional) - seen) / sigma
    probe = _Probe(alpha, deviations.to(phi.dtype))
    here = probe.applied(phi, sigma)
    covariances, quadratics = [], []
    parameters = list(model.parameters())
    in_kernel = {id(p) for p in model.features.parameters()}
    in_mean = {id(p) for p in model.mean.parameters()}
    step = _SHIFT[phi.dtype]
    for parameter in _shifted(parameters, step):
        there = here
        if id(parameter) in in_kernel:
            moved = model.rebuilt()
            shifted_phi = moved.features.operator(data.functional)
            there = probe.applied(shifted_phi, total_variance(moved, data, weights))
        elif id(parameter) not in in_mean:
            there = probe.applied(phi, total_variance(present, data, weights))
        covariances.append((there[0] - here[0]) / step)
        quadratics.append((there[1] - here[1]) / step)
    return Derivatives(torch.stack(covariances), torch.stack(quadratics, -1), phi, sigma)


@final
@dataclass(frozen=True, eq=False)
class _Probe:
    """alpha (N,) and deviations (S, M_w), held fixed while the parameters move."""

    alpha: Tensor
    deviations: Tensor

    def applied(self, phi: AbstractOperator, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """A α (N,) and −½ ‖Φ δ_s‖²_{Σ⁻¹} (S,), float64."""
        back = phi.rmatmul(self.alpha.to(phi.dtype))
        seen = phi.matmul(torch.cat([back[None], self.deviations])).double()
        return seen[0] + sigma * self.alpha, -0.5 * (seen[1:].square() / sigma).sum(-1)


def total_variance(model: GridModel, data: Batch, weights: Tensor | None = None) -> Tensor:
    """Diagonal of Σ (N,) = σ_n²/τ_n + Var r, float64, differentiable; weights (N,) = τ."""
    noise = model.likelihood.noise_variance(data).double()
    if weights is not None:
        noise = noise / weights.double()
    return noise + model.features.residual_variance(data.functional).double()


def split_like(flat: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    """A vector (P,) cut into one tensor per parameter, of its shape."""
    parts = torch.split(flat, [p.numel() for p in parameters])
    return tuple(part.reshape(p.shape) for part, p in zip(parts, parameters, strict=True))


def joined(values: Sequence[Tensor]) -> Tensor:
    """One vector (P,) of all numbers of the tensors, float64, without a graph."""
    return torch.cat([value.detach().double().reshape(-1) for value in values])


def _shifted(parameters: Sequence[nn.Parameter], step: float) -> Iterator[nn.Parameter]:
    """Each number of the parameters moved by `step` in turn, and set back."""
    for parameter in parameters:
        flat = parameter.data.view(-1)
        for i in range(len(flat)):
            before = flat[i].clone()
            flat[i] += step
            try:
                yield parameter
            finally:
                flat[i] = before
