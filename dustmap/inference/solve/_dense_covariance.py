"""The covariance of few data as a matrix, and when that takes less than iterations."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.features import (
    DENSE_TABLE,
    AbstractFeatureMap,
    LocalFeatures,
    SideBySide,
    dense_covariance,
    field_features,
    has_dense_covariance,
    in_float64,
)
from dustmap.gp.functionals import AbstractFunctional
from dustmap.linalg import AbstractOperator

#: Data at most, and N³ per node of the grid: matrices take 2e-10 N³ seconds of a thread at every
#: step of learning, iterations with their preconditioner some 1e-3 per node in three dimensions.
_MOST, _CUBE_PER_NODE = 5000, 1e7
#: Matrices (N, N) in float64 at most: two factors of earlier points, and three of the present one
#: with the copy that LAPACK takes.
_MATRICES = 6


def suits_dense(n: int, nodes: int, memory: int) -> bool:
    """Whether matrices of N = n data take less time than iterations on a grid of M = `nodes`.

    N ≤ 5000, N³ ≤ 10⁷ M, and `dense_bytes` within `memory`.

    Examples
    --------
    >>> suits_dense(3600, 5103, 2**31), suits_dense(3600, 1000, 2**31)
    (True, False)
    """
    return n <= _MOST and n**3 <= _CUBE_PER_NODE * nodes and dense_bytes(n, nodes) <= memory


def dense_bytes(n: int, nodes: int) -> int:
    """Bytes of the matrices of N = n data and M = `nodes` while hyperparameters are learned.

    Examples
    --------
    >>> dense_bytes(3600, 5103) // 2**20
    733
    """
    return 8 * (_MATRICES - 2) * n**2 + factor_bytes(n, nodes)


def factor_bytes(n: int, nodes: int) -> int:
    """Bytes of a covariance of N = n data while it is made and factorised.

    Examples
    --------
    >>> factor_bytes(3600, 5103) // 2**20
    337
    """
    table = 8 * n * nodes
    return 8 * 2 * n**2 + (table if table <= DENSE_TABLE else 0)


def takes_matrix(features: AbstractFeatureMap, functional: AbstractFunctional, memory: int) -> bool:
    """Whether a solve of these data is by a matrix: `suits_dense`, local weights, not shared."""
    field = field_features(features)
    if not (isinstance(field, LocalFeatures) and has_dense_covariance(features, functional)):
        return False
    return suits_dense(len(functional), field.prior.grid.size, memory)


@final
@dataclass(frozen=True, eq=False)
class DenseCovariance:
    """A = ΦΦᵀ + Σ = L Lᵀ (N, N), float64.

    factor: L; phi (N, M_w): Φ; groups (N, G): its columns beside the field's, G = 0 for none.
    """

    factor: Tensor
    phi: AbstractOperator
    groups: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        features: AbstractFeatureMap, functional: AbstractFunctional, sigma: Tensor
    ) -> "DenseCovariance | None":
        """Factorise at Σ = diag(sigma) (N,); None where A is singular to float64."""
        features = in_float64(features)
        A, phi = dense_covariance(features, functional), features.operator(functional)
        groups = phi.right.to_dense() if isinstance(phi, SideBySide) else A.new_empty(len(A), 0)
        A.addmm_(groups, groups.mT)
        A.diagonal().add_(sigma.to(A))
        factor, info = torch.linalg.cholesky_ex(A)
        return None if int(info) != 0 else DenseCovariance(factor, phi, groups)

    def solve(self, v: Tensor) -> Tensor:
        """A⁻¹ v for rows v (k, N), float64."""
        half = torch.linalg.solve_triangular(self.factor, v.mT, upper=False)
        solved: Tensor = torch.linalg.solve_triangular(self.factor.mT, half, upper=True).mT
        return solved

    def residuals(self, z: Tensor, v: Tensor) -> Tensor:
        """‖v − A z‖ / ‖v‖ (k,) of z, v (k, N); 0 of v = 0."""
        left = (v - (z @ self.factor) @ self.factor.mT).norm(dim=-1)
        norm = v.norm(dim=-1)
        return torch.where(norm > 0, left / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)

    def inverse(self) -> Tensor:
        """A⁻¹ (N, N)."""
        inverse = torch.cholesky_inverse(self.factor)
        return inverse if inverse.is_contiguous() else inverse.mT
