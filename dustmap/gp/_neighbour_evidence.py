"""The evidence of point values from conditionals on near neighbours."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp._batch import Batch
from dustmap.gp._hyperparameters import HyperparameterFit
from dustmap.gp._lbfgs import gradient_at, maximise
from dustmap.gp._model import GPModel
from dustmap.gp._neighbour_precision import between, ordered_neighbours
from dustmap.gp._parameters import Parameters
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel

#: Conditionals evaluated at once.
_AT_ONCE = 2048


@final
@dataclass(frozen=True, eq=False)
class NeighbourEvidence:
    """ln p(y) ≈ Σ_n ln N(y_n; m_n + b_nᵀ (y_c(n) − m_c(n)), d_n), b_n and d_n of the neighbours.

    The log-density of the process whose precision `NeighbourPrecision` is; a random part of the
    sum, scaled up, has the same expectation at a fraction of the cost. Its maximum is that of the
    evidence up to what 30 neighbours leave out, whatever N.

    data: point values. before (R, m): neighbours of `rows` (R,), −1 where there is none.

    Reference: Vecchia (1988).
    """

    data: Batch
    rows: Tensor
    before: Tensor

    @staticmethod
    def of(
        kernel: AbstractKernel,
        data: Batch,
        *,
        neighbours: int = 30,
        max_rows: int | None = None,
        seed: int = 0,
    ) -> "NeighbourEvidence":
        """Neighbours in the metric of the kernel's present length scales; they then stay."""
        if not isinstance(data.functional, PointValues):
            raise TypeError(
                f"NeighbourEvidence is for point values, got {type(data.functional).__name__}: use "
                "learn_evidence, or ExactGP for few data"
            )
        order, before = ordered_neighbours(kernel, data.functional.x, neighbours, seed)
        n = len(data)
        chosen = torch.arange(n, device=order.device)
        if max_rows is not None and max_rows < n:
            generator = torch.Generator().manual_seed(seed + 1)
            chosen = torch.randperm(n, generator=generator)[:max_rows].to(order.device)
        near = before[chosen]
        return NeighbourEvidence(data, order[chosen], torch.where(near >= 0, order[near], -1))

    def log_evidence(self, model: GPModel) -> Tensor:
        """The sum (), differentiable in all parameters."""
        return torch.stack([self._part(model, part) for part in self._parts()]).sum()

    def gradient(self, parameters: Parameters[GPModel], theta: Tensor) -> tuple[float, Tensor]:
        """Value and gradient (P,) at θ (P,), in the memory of one part."""
        value, total = 0.0, torch.zeros_like(theta)
        for part in self._parts():

            def of_part(at: Tensor, part: slice = part) -> Tensor:
                return self._part(parameters.build(at), part)

            term, slope = gradient_at(theta, of_part)
            value, total = value + term, total + slope
        return value, total

    def _parts(self) -> list[slice]:
        return [slice(a, a + _AT_ONCE) for a in range(0, len(self.rows), _AT_ONCE)]

    def _part(self, model: GPModel, part: slice) -> Tensor:
        rows, before = self.rows[part], self.before[part]
        real = before >= 0
        everything = torch.cat([rows[:, None], before.clamp_min(0)], -1)
        seen = self.data[everything.flatten()]
        assert isinstance(seen.functional, PointValues)
        shape = everything.shape
        x = seen.functional.x.reshape(*shape, -1)
        noise = model.likelihood.noise_variance(seen).double().reshape(shape)
        r = (seen.y.double() - model.mean.values(seen.functional)).reshape(shape)
        d, expected = conditional(model.kernel, x, noise, r, real)
        z = (r[:, 0] - expected).square() / d
        scale = len(self.data) / len(self.rows)
        return -0.5 * scale * (z + d.log() + math.log(2.0 * math.pi)).sum()


def fit_neighbour_evidence(
    model: GPModel,
    data: Batch,
    *,
    max_rows: int = 10_000,
    max_steps: int = 40,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> HyperparameterFit:
    """Maximises the evidence of neighbours over kernel and noise by L-BFGS.

    The cost does not grow with the data but for finding the neighbours, and no data are left out
    of these: small scales and large ones are seen alike. The mean stays as it is; its coefficients
    are better found by generalised least squares in the solve that follows.

    max_rows: conditionals in the sum, a random part of all. tolerance: stop when the largest
    |gradient| per datum is below; that of a random part of 10⁴ has an error of about 1e-2.
    """
    parameters = Parameters.of(model, without=("mean",))
    parameters.require_some("kernel or likelihood")
    evidence = NeighbourEvidence.of(model.kernel, data, max_rows=max_rows, seed=seed)
    maximum = maximise(
        parameters,
        lambda theta: evidence.gradient(parameters, theta),
        n_data=len(data),
        max_steps=max_steps,
        tolerance=tolerance,
    )
    return HyperparameterFit.of(parameters, maximum, len(data))


def conditional(
    kernel: AbstractKernel, x: Tensor, noise: Tensor, r: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Variance and mean (R,) of the first of each line of values r (R, 1 + m) given the others."""
    near = x[:, 1:]
    A = between(kernel, near, near) * (real[:, :, None] & real[:, None])
    A = A + torch.diag_embed(torch.where(real, noise[:, 1:], 1.0))
    k = between(kernel, near, x[:, :1]).squeeze(-1) * real
    both = torch.stack([k, r[:, 1:] * real], -1)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(A), both, upper=False)
    explained, expected = (white[..., :1] * white).sum(-2).unbind(-1)
    return kernel.variance() + noise[:, 0] - explained, expected
