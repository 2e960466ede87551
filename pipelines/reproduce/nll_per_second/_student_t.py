"""Kernel, width and degrees of freedom of Student-t noise from near neighbours."""

from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch, NeighbourEvidence
from dustmap.gp._neighbour_evidence import conditional
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import StationaryKernel
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
        self, kernel: StationaryKernel, data: Batch, weights: Tensor, conditionals: int
    ) -> None:
        found = NeighbourEvidence.of(kernel, data, max_rows=conditionals, seed=SEED)
        everything = torch.cat([found.rows[:, None], found.before.clamp_min(0)], -1)
        self._real = found.before >= 0
        self._shape = everything.shape
        self._seen, self._tau = data[everything.flatten()], weights[everything].double()

    def mean(
        self, kernel: StationaryKernel, mean: AbstractMean, likelihood: StudentTLikelihood
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
    kernel: StationaryKernel,
    mean: AbstractMean,
    likelihood: StudentTLikelihood,
    data: Batch,
    weights: Tensor,
    conditionals: int,
) -> None:
    """Maximises the density of neighbours over kernel, width and ν, in place, by L-BFGS."""
    parameters = [*kernel.parameters(), *likelihood.parameters()]
    density = NeighbourDensity(kernel, data, weights, conditionals)
    optimiser = torch.optim.LBFGS(
        parameters,
        max_iter=_STEPS,
        tolerance_grad=_TOLERANCE,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -density.mean(kernel, mean, likelihood)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    optimiser.zero_grad()
