"""Kernel, width and degrees of freedom of Student-t noise from near neighbours."""

from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch, NeighbourEvidence, Parameters
from dustmap.gp._neighbours import conditional
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import StudentTLikelihood
from pipelines.reproduce.ciq._problem import SEED

_STEPS, _TOLERANCE = 25, 1e-3


@final
class NeighbourDensity:
    """Σ_n ln ∫ p(y_n | f) N(f; μ_n, v_n) df, μ_n and v_n of f at n given the data before it.

    The neighbours' noise is Gaussian, of variance s²/τ with the weights τ that solves have found;
    that of datum n itself is Student-t. The sum over a random part of the data is what
    `NeighbourEvidence` is for Gaussian noise.
    """

    def __init__(
        self, kernel: AbstractKernel, data: Batch, weights: Tensor, conditionals: int
    ) -> None:
        found = NeighbourEvidence.of(kernel, data, max_rows=conditionals, seed=SEED)
        everything = torch.cat([found.rows[:, None], found.before.clamp_min(0)], -1)
        self._real = found.before >= 0
        self._shape = everything.shape
        self._seen, self._tau = data[everything.flatten()], weights[everything].double()

    def mean(
        self, kernel: AbstractKernel, mean: AbstractMean, likelihood: StudentTLikelihood
    ) -> Tensor:
        """Per datum, differentiable in all parameters."""
        points = self._seen.functional
        assert isinstance(points, PointValues)
        r = (self._seen.y.double() - mean.values(points)).reshape(self._shape)
        width = likelihood.noise_variance(self._seen).double().reshape(self._shape)
        noise = torch.cat([torch.zeros_like(width[:, :1]), (width / self._tau)[:, 1:]], -1)
        x = points.x.reshape(*self._shape, -1)
        variance, expected = conditional(kernel, x, noise, r, self._real)
        density = likelihood.log_predictive_density(r[:, 0], expected, variance, width[:, 0])
        return density.mean()


def learn(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: StudentTLikelihood,
    data: Batch,
    weights: Tensor,
    conditionals: int,
) -> tuple[AbstractKernel, StudentTLikelihood]:
    """Kernel, width and ν of largest density of neighbours, by L-BFGS."""
    of_kernel, of_noise = Parameters.of(kernel), Parameters.of(likelihood)
    leaves = [p.theta.clone().requires_grad_() for p in (of_kernel, of_noise)]
    density = NeighbourDensity(kernel, data, weights, conditionals)
    optimiser = torch.optim.LBFGS(
        leaves,
        max_iter=_STEPS,
        tolerance_grad=_TOLERANCE,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -density.mean(of_kernel.build(leaves[0]), mean, of_noise.build(leaves[1]))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return of_kernel.build(leaves[0].detach()), of_noise.build(leaves[1].detach())
