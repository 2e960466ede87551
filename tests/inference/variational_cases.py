"""What the tests of variational inference share: problems and families."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.families import AbstractFamily, BlockFamily, FullRankFamily, MeanFieldFamily
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, HIPFeatures, TorusFeatures
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    RowSource,
    VariationalModel,
)
from dustmap.linalg import TilePartition
from tests.inference.gridded import some_functionals


@dataclass(frozen=True, eq=False)
class Problem:
    """A small data set with its feature map."""

    features: AbstractFeatureMap
    batch: Batch

    @property
    def source(self) -> RowSource:
        return RowSource(self.features, self.batch.functional)

    def model(self, family: AbstractFamily, mean: float = 0.2) -> VariationalModel:
        return VariationalModel(self.features, ConstantMean(mean), GaussianLikelihood(), family)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Φ (N, M_w), y − m_n (N,), Σ (N,) as matrices."""
        phi = self.features.rows(self.batch.functional).phi.detach()
        mean = ConstantMean(0.2).values(self.batch.functional).detach()
        assert self.batch.noise_variance is not None
        return phi, self.batch.y - mean, self.batch.noise_variance


def make_problem(shape: tuple[int, ...], name: str = "hip", noise: float = 0.05) -> Problem:
    dim = len(shape)
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, shape)
    kernel = Matern32(0.4, 1.2, dim=dim)
    prior = GridPrior.padded(kernel, grid)
    maps: dict[str, AbstractFeatureMap] = {
        "hip": HIPFeatures(prior, rtol=1e-12, max_steps=500, dense_below=0),
        "hip-dense": HIPFeatures(prior),
        "torus": TorusFeatures(prior),
        "cholesky": CholeskyFeatures(kernel, grid),
    }
    functional = some_functionals(dim, 10, dim)
    generator = torch.Generator().manual_seed(7)
    y = torch.randn(len(functional), dtype=torch.float64, generator=generator)
    sigma2 = noise * (0.5 + torch.rand(len(y), dtype=torch.float64, generator=generator))
    return Problem(maps[name], Batch(functional, y, sigma2))


def families(problem: Problem) -> dict[str, AbstractFamily]:
    features = problem.features
    shape: tuple[int, ...] = (features.n_features,)
    if isinstance(features, HIPFeatures | TorusFeatures):
        shape = features.prior.torus_shape
    return {
        "mean-field": MeanFieldFamily(features.n_features),
        "block": BlockFamily(TilePartition(shape, (3, 2, 2)[: len(shape)])),
        "full": FullRankFamily(features.n_features),
    }
