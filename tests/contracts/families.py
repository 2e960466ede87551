"""What the tests of the families share: shapes, regressions, fitted states."""

import math
from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor

from dustmap.gp.families import (
    AbstractFamily,
    AbstractGaussian,
    BlockFamily,
    FullRankFamily,
    KrylovFullRankFamily,
    LowRankDiagonalFamily,
    MeanFieldFamily,
)
from dustmap.linalg import TilePartition


def block_mask(shape: tuple[int, ...], tile: tuple[int, ...]) -> Tensor:
    """Whether two points of the grid lie in one tile, by integer division of their coordinates."""
    axes = [torch.arange(size) // t for size, t in zip(shape, tile, strict=True)]
    label = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(math.prod(shape), -1)
    return (label[:, None] == label[None, :]).all(-1)


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    family: AbstractFamily
    mask: Tensor


def block_case(shape: tuple[int, ...], tile: tuple[int, ...]) -> Case:
    family = BlockFamily(TilePartition(shape, tile))
    return Case(f"block-{shape}-{tile}", family, block_mask(shape, tile))


CASES = [
    Case("mean-field", MeanFieldFamily(11), torch.eye(11, dtype=torch.bool)),
    block_case((13,), (4,)),
    block_case((6,), (1,)),
    block_case((5, 6), (2, 4)),
    block_case((4, 6), (2, 3)),
    block_case((3, 4, 3), (2, 2, 2)),
    block_case((2, 3, 4), (2, 3, 4)),
    Case("full-rank", FullRankFamily(11), torch.ones(11, 11, dtype=torch.bool)),
    Case(
        "krylov",
        KrylovFullRankFamily(11, rank=3, rtol=1e-13),
        torch.ones(11, 11, dtype=torch.bool),
    ),
    # With as many directions as there are features it is the full family.
    Case("low-rank", LowRankDiagonalFamily(11, 11), torch.ones(11, 11, dtype=torch.bool)),
]


over_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@dataclass(frozen=True, eq=False)
class Regression:
    """y = Φ ε + noise: everything about it is known in closed form."""

    phi: Tensor
    y: Tensor
    noise: Tensor

    @property
    def precision(self) -> Tensor:
        """Λ = I + Φᵀ Σ⁻¹ Φ."""
        identity = torch.eye(self.phi.shape[1], dtype=self.phi.dtype)
        return identity + self.phi.T @ torch.diag(1 / self.noise) @ self.phi

    @property
    def b(self) -> Tensor:
        return self.phi.T @ (self.y / self.noise)

    def log_evidence(self) -> float:
        covariance = self.phi @ self.phi.T + torch.diag(self.noise)
        zero = torch.zeros_like(self.y)
        return float(stats.multivariate_normal.logpdf(self.y, zero, covariance))

    def elbo(self, m: Tensor, S: Tensor) -> Tensor:
        """Eq. 13-14 with no residual variance, for a dense S."""
        mu = self.phi @ m
        v = ((self.phi @ S) * self.phi).sum(-1)
        a = -0.5 * (2 * math.pi * self.noise).log() - ((self.y - mu) ** 2 + v) / (2 * self.noise)
        kl = 0.5 * (S.trace() + m @ m - torch.logdet(S) - len(m))
        return a.sum() - kl


def regression(n_features: int, n: int = 17, seed: int = 0) -> Regression:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Regression(0.6 * normal(n, n_features), normal(n), 0.2 + normal(n).square())


def dense_covariance(state: AbstractGaussian) -> Tensor:
    identity = torch.eye(len(state.mean), dtype=state.mean.dtype)
    return state.apply_covariance(identity)


def fitted(case: Case, dtype: torch.dtype = torch.float64) -> tuple[AbstractGaussian, Tensor]:
    """A state with some mean and the S of some data, and its dense precision."""
    data = regression(case.family.n_features)
    statistics = case.family.precision_statistics(data.phi.to(dtype), 1 / data.noise.to(dtype))
    mean = torch.linspace(-1, 1, case.family.n_features, dtype=dtype)
    identity = torch.eye(case.family.n_features, dtype=torch.float64)
    return case.family.posterior(mean, statistics), identity + case.mask * (
        data.precision - identity
    )
