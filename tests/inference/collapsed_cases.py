"""What the tests of collapsed objectives share: dense formulas, data and models."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    DTC,
    FITC,
    SGPR,
    AbstractCollapsedObjective,
    CollapsedSolution,
    RowSource,
    VariationalModel,
    solve_collapsed,
)

SHAPES = [(12,), (5, 4), (3, 3, 3)]


NAMES = ["hip", "hip-dense", "torus", "cholesky"]


OBJECTIVES = [SGPR(), DTC(), FITC()]


over_shapes = pytest.mark.parametrize("shape", SHAPES)


over_objectives = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)


def log_normal(residual: Tensor, covariance: Tensor) -> Tensor:
    """ln N(r; 0, C)."""
    solved: Tensor = torch.linalg.solve(covariance, residual)
    constant = len(residual) * math.log(2 * math.pi)
    misfit: Tensor = residual @ solved
    return -0.5 * (misfit + torch.logdet(covariance) + constant)


def dense_value(model: VariationalModel, batch: Batch, objective: object) -> Tensor:
    """L by N × N matrices, as the papers write it."""
    likelihood = model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    rows = model.features.rows(batch.functional)
    noise = likelihood.noise_variance(batch)
    residual = batch.y - model.mean.values(batch.functional)
    Q = rows.phi @ rows.phi.mT
    left = rows.residual_variance
    if isinstance(objective, FITC):
        return log_normal(residual, Q + torch.diag(left + noise))
    value = log_normal(residual, Q + torch.diag(noise))
    return value - 0.5 * (left / noise).sum() if isinstance(objective, SGPR) else value


def solved(
    model: VariationalModel, batch: Batch, objective: AbstractCollapsedObjective | None = None
) -> CollapsedSolution:
    return solve_collapsed(model, batch, RowSource(model.features, batch.functional), objective)


def points_batch(dim: int, n: int = 25, noise: float = 0.05) -> Batch:
    generator = torch.Generator().manual_seed(dim)
    x = torch.rand(n, dim, generator=generator, dtype=torch.float64)
    y = (5 * x).sin().sum(-1) + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    sigma2 = noise * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    return Batch(PointValues(x), y, sigma2)


def free_model(
    points: Tensor, device: str = "cpu", *, learn_points: bool = False
) -> VariationalModel:
    at = torch.device(device)
    kernel = Matern32(0.4, 1.2, dim=points.shape[1]).to(at)
    mean, likelihood = ConstantMean(0.2).to(at), GaussianLikelihood(1.1, 0.1).to(at)
    family = FullRankFamily(len(points))
    features = CholeskyFeatures(kernel, points, learn_points=learn_points)
    return VariationalModel(features, mean, likelihood, family)
