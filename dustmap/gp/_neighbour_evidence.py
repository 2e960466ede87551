"""The evidence of point values from conditionals on near neighbours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._batch import Batch
from dustmap.gp._hyperparameters import FitStatus, HyperparameterFit
from dustmap.gp._means import AbstractMean
from dustmap.gp._neighbour_precision import between, ordered_neighbours
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import GaussianLikelihood

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

    def log_evidence(
        self, kernel: AbstractKernel, mean: AbstractMean, likelihood: GaussianLikelihood
    ) -> Tensor:
        """The sum (), differentiable in all parameters."""
        parts = [self._part(kernel, mean, likelihood, p) for p in self._parts()]
        return torch.stack(parts).sum()

    def gradient(
        self,
        kernel: AbstractKernel,
        mean: AbstractMean,
        likelihood: GaussianLikelihood,
        parameters: Sequence[nn.Parameter],
    ) -> tuple[float, tuple[Tensor, ...]]:
        """Value and gradient in the parameters, in the memory of one part."""
        value, total = 0.0, [torch.zeros_like(p) for p in parameters]
        for part in self._parts():
            term = self._part(kernel, mean, likelihood, part)
            value += float(term.detach())
            found = torch.autograd.grad(term, list(parameters))
            total = [t + g for t, g in zip(total, found, strict=True)]
        return value, tuple(total)

    def _parts(self) -> list[slice]:
        return [slice(a, a + _AT_ONCE) for a in range(0, len(self.rows), _AT_ONCE)]

    def _part(
        self,
        kernel: AbstractKernel,
        mean: AbstractMean,
        likelihood: GaussianLikelihood,
        part: slice,
    ) -> Tensor:
        rows, before = self.rows[part], self.before[part]
        real = before >= 0
        everything = torch.cat([rows[:, None], before.clamp_min(0)], -1)
        seen = self.data[everything.flatten()]
        assert isinstance(seen.functional, PointValues)
        shape = everything.shape
        x = seen.functional.x.reshape(*shape, -1)
        noise = likelihood.noise_variance(seen).double().reshape(shape)
        r = (seen.y.double() - mean.values(seen.functional)).reshape(shape)
        d, expected = conditional(kernel, x, noise, r, real)
        z = (r[:, 0] - expected).square() / d
        scale = len(self.data) / len(self.rows)
        return -0.5 * scale * (z + d.log() + math.log(2.0 * math.pi)).sum()


def fit_neighbour_evidence(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: GaussianLikelihood,
    data: Batch,
    *,
    max_rows: int = 10_000,
    max_steps: int = 40,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> HyperparameterFit:
    """Maximises the evidence of neighbours over kernel and noise, in place, by L-BFGS.

    The cost does not grow with the data but for finding the neighbours, and no data are left out
    of these: small scales and large ones are seen alike. The mean stays as it is; its coefficients
    are better found by generalised least squares in the solve that follows.

    max_rows: conditionals in the sum, a random part of all. tolerance: stop when the largest
    |gradient| per datum is below; that of a random part of 10⁴ has an error of about 1e-2.
    """
    learned = (*kernel.parameters(), *likelihood.parameters())
    parameters = [p for p in learned if p.requires_grad]
    if not parameters:
        raise ValueError("nothing to learn: no parameter of kernel or likelihood requires grad")
    evidence = NeighbourEvidence.of(kernel, data, max_rows=max_rows, seed=seed)
    optimiser = torch.optim.LBFGS(
        parameters,
        max_iter=max_steps,
        tolerance_grad=tolerance,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )
    history: list[float] = []
    largest = math.inf

    def closure() -> float:
        nonlocal largest
        value, gradient = evidence.gradient(kernel, mean, likelihood, parameters)
        for parameter, slope in zip(parameters, gradient, strict=True):
            parameter.grad = -slope / len(data)
        largest = max(float(slope.abs().max()) for slope in gradient) / len(data)
        history.append(value / len(data))
        return -history[-1]

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    closure()
    for parameter in parameters:
        parameter.grad = None
    flat = largest <= tolerance
    status = FitStatus.CONVERGED if flat else FitStatus.MAX_STEPS
    return HyperparameterFit(
        log_evidence=history[-1] * len(data),
        objective=tuple(history),
        status=status,
        largest_gradient=largest,
        n_data=len(data),
    )


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
