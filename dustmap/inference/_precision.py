"""Λ = I + Φᵀ W Φ and bounds on its spectrum."""

from typing import final

import torch
from torch import Tensor

from dustmap.gp.families import AbstractGaussian
from dustmap.linalg import AbstractOperator, standard_normal


@final
class PrecisionOperator(AbstractOperator):
    """Λ = I + Φᵀ diag(w) Φ (M_w, M_w), the posterior precision of ε for Gaussian noise (S3).

    phi (N, M_w): an operator; weights (N,) = 1/σ_n².
    """

    def __init__(self, phi: AbstractOperator, weights: Tensor) -> None:
        self._phi, self._weights = phi, weights.to(phi.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self._phi.shape[1], self._phi.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._phi.dtype

    @property
    def device(self) -> torch.device:
        return self._phi.device

    def matmul(self, x: Tensor) -> Tensor:
        return x + self._phi.rmatmul(self._weights * self._phi.matmul(x))

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)


@final
class FamilyPreconditioner(AbstractOperator):
    """S (M_w, M_w) of a structured posterior, the Jacobi preconditioner of Λ in its structure."""

    def __init__(self, state: AbstractGaussian) -> None:
        self._state = state

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._state.mean), len(self._state.mean)

    @property
    def dtype(self) -> torch.dtype:
        return self._state.mean.dtype

    @property
    def device(self) -> torch.device:
        return self._state.mean.device

    def matmul(self, x: Tensor) -> Tensor:
        return self._state.apply_covariance(x)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)


def batch_stability(state: AbstractGaussian, phi: Tensor, weights: Tensor) -> float:
    """Upper bound of λ_max(S Λ_b) for Λ_b = I + φᵀ diag(w) φ, from one Gram matrix.

    λ_max(S Λ_b) ≤ λ_max(S) + λ_max(W^{1/2} φ S φᵀ W^{1/2}) ≤ 1 + λ_max(n × n Gram matrix), since
    S ≤ I. The natural step of the mean is a contraction iff its length is below 2 over this.
    phi (n, M_w), weights (n,) ≥ 0, already scaled by N/n.
    """
    scaled = weights.clamp_min(0).sqrt().to(phi.dtype).unsqueeze(-1) * phi
    whitened = state.covariance_of(scaled, scaled)
    return 1.0 + float(torch.linalg.eigvalsh(whitened.double())[-1])


def power_stability(
    state: AbstractGaussian,
    precision: PrecisionOperator,
    generator: torch.Generator,
    steps: int = 30,
) -> float:
    """λ_max(S Λ) by power iteration on the similar symmetric S^{1/2} Λ S^{1/2} (all data).

    Converges from below; the factor 1.05 covers what 30 steps leave.
    """
    v = standard_normal(precision.shape[:1], generator, state.mean)
    for _ in range(steps):
        v = v / v.norm()
        v = state.apply_covariance(precision.matmul(v))
    return 1.05 * float(v.norm())
