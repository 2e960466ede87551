"""The covariance of few data as a matrix, and when that takes less than iterations."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.features import (
    AbstractFeatureMap,
    GroupedFeatures,
    LocalFeatures,
    SideBySide,
    dense_covariance,
    field_features,
    has_dense_covariance,
)
from dustmap.gp.functionals import AbstractFunctional

#: Data at most, and N³ per node of the grid. A factor, an inverse and two matrices take 1e-10 N³
#: seconds of a thread, iterations and their preconditioner some 1e-3 per node in three dimensions.
_MOST, _CUBE_PER_NODE = 5000, 1e7
#: Matrices (N, N) in float64 that learning holds at most: factor, inverse, weights and derivative.
_MATRICES = 5


def suits_dense(n: int, nodes: int, memory: int) -> bool:
    """Whether matrices of N = n data take less time than iterations on a grid of so many nodes.

    N ≤ 5000, N³ ≤ 10⁷ M, and five matrices in `memory` bytes.

    Examples
    --------
    >>> suits_dense(3600, 5103, 2**31), suits_dense(3600, 1000, 2**31)
    (True, False)
    """
    return n <= _MOST and n**3 <= _CUBE_PER_NODE * nodes and dense_bytes(n) <= memory


def dense_bytes(n: int) -> int:
    """Bytes of the matrices of N = n data."""
    return 8 * _MATRICES * n**2


@final
@dataclass(frozen=True, eq=False)
class DenseCovariance:
    """A = ΦΦᵀ + Σ = L Lᵀ (N, N), float64.

    factor: L; groups (N, G): columns of Φ beside the field's, G = 0 where there are none.
    """

    factor: Tensor
    groups: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        features: AbstractFeatureMap, functional: AbstractFunctional, sigma: Tensor
    ) -> "DenseCovariance | None":
        """Factorise at Σ = diag(sigma) (N,); None where A is singular to float64."""
        A = dense_covariance(features, functional)
        groups = _groups(features, functional).to(A)
        A.addmm_(groups, groups.mT)
        A.diagonal().add_(sigma.to(A))
        factor, info = torch.linalg.cholesky_ex(A)
        return None if int(info) != 0 else DenseCovariance(factor, groups)

    def solve(self, v: Tensor) -> Tensor:
        """A⁻¹ v for rows v (k, N), float64."""
        return torch.cholesky_solve(v.mT, self.factor).mT

    def residuals(self, z: Tensor, v: Tensor) -> Tensor:
        """‖v − A z‖ / ‖v‖ (k,) of z, v (k, N); 0 of v = 0."""
        left = (v - (z @ self.factor) @ self.factor.mT).norm(dim=-1)
        norm = v.norm(dim=-1)
        return torch.where(norm > 0, left / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)

    def inverse(self) -> Tensor:
        """A⁻¹ (N, N)."""
        return torch.cholesky_inverse(self.factor)


def _groups(features: AbstractFeatureMap, functional: AbstractFunctional) -> Tensor:
    """Columns (N, G) of zero points and scales."""
    if not isinstance(features, GroupedFeatures):
        return torch.zeros(len(functional), 0, dtype=torch.float64, device=functional.device)
    operator = features.operator(functional)
    assert isinstance(operator, SideBySide)
    return operator.right.to_dense()


def covariance_of(
    features: AbstractFeatureMap, functional: AbstractFunctional, sigma: Tensor, memory: int
) -> DenseCovariance | None:
    """The factor at Σ = diag(sigma) (N,) where `suits_dense` says so and there is one."""
    field = field_features(features)
    if not (isinstance(field, LocalFeatures) and has_dense_covariance(features, functional)):
        return None
    if not suits_dense(len(functional), field.prior.grid.size, memory):
        return None
    return DenseCovariance.of(features, functional, sigma)
