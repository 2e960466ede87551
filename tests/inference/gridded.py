"""Small gridded problems with their dense solution, shared by the tests of the global engine."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch, GridPrior, LinearMean, RegularGrid
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    HIPFeatures,
    LocalFeatures,
    TorusFeatures,
)
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel
from dustmap.inference.lognormal._lognormal_energy import Iterate

SHAPES = [(12,), (5, 4), (4, 3, 3)]
MAPS = ["torus", "hip", "cholesky", "local"]
#: Axes up to which a map takes less than seconds.
QUICK = {"torus": 3, "hip": 2, "cholesky": 3, "local": 1}
#: Every map on every shape.
CASES = [
    pytest.param(s, m, marks=[pytest.mark.slow] if len(s) > QUICK[m] else [])
    for s in SHAPES
    for m in MAPS
]


def some_functionals(dim: int, n: int, seed: int) -> AbstractFunctional:
    """n point values, n derivatives and n rays in the unit cube."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(n, dim, dtype=torch.float64, generator=generator)

    direction = draw() + 0.1
    direction = direction / direction.norm(dim=-1, keepdim=True)
    return Stacked(
        (PointValues(draw()), Derivatives(draw(), direction), LineIntegrals.segment(draw(), draw()))
    )


def feature_map(
    shape: tuple[int, ...], name: str, dtype: torch.dtype = torch.float64
) -> AbstractFeatureMap:
    """Features of a grid on the unit cube; Matérn-3/2, ℓ = 0.4, variance 1.2."""
    dim = len(shape)
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, shape)
    kernel = Matern32(0.4, 1.2, dim=dim)
    if name == "cholesky":
        return CholeskyFeatures(kernel, grid, rows_dtype=dtype)
    prior = GridPrior.padded(kernel, grid, dtype=dtype)
    maps: dict[str, AbstractFeatureMap] = {"torus": TorusFeatures(prior), "hip": HIPFeatures(prior)}
    return maps[name] if name in maps else LocalFeatures(prior)


@dataclass(frozen=True, eq=False)
class DenseSolution:
    """The posterior of ε by matrices, with Λ and V = ΦΦᵀ + Σ; float64."""

    phi: Tensor
    sigma: Tensor
    residual: Tensor
    eps_mean: Tensor
    precision: Tensor

    @staticmethod
    def of(model: GridModel, data: Batch) -> "DenseSolution":
        with torch.no_grad():
            phi = model.features.operator(data.functional).to_dense().double()
            sigma = model.sigma(data).double()
            residual = data.y.double() - model.mean.values(data.functional)
        V = phi @ phi.mT + torch.diag(sigma)
        precision = torch.eye(phi.shape[1], dtype=phi.dtype) + phi.mT @ (phi / sigma[:, None])
        eps_mean = phi.mT @ torch.linalg.solve(V, residual)
        return DenseSolution(phi, sigma, residual, eps_mean, precision)

    @property
    def V(self) -> Tensor:
        return self.phi @ self.phi.mT + torch.diag(self.sigma)


def some_data(functional: AbstractFunctional, noise: float = 0.05, seed: int = 7) -> Batch:
    """Numbers around 2 of the magnitude of the prior, with unequal noise."""
    generator = torch.Generator().manual_seed(seed)
    y = 2.0 + torch.randn(len(functional), dtype=torch.float64, generator=generator)
    spread = 0.5 + torch.rand(len(functional), dtype=torch.float64, generator=generator)
    return Batch(functional, y, noise * spread)


def some_model(
    shape: tuple[int, ...],
    name: str = "torus",
    dtype: torch.dtype = torch.float64,
    mean: AbstractMean | None = None,
) -> GridModel:
    return GridModel(
        feature_map(shape, name, dtype),
        LinearMean([0.1] * len(shape), 0.5) if mean is None else mean,
        GaussianLikelihood(),
    )


def energy_gradient(at: Iterate) -> Tensor:
    """∂E/∂ξ (n,) = ξ − a − mean_s J_sᵀ Σ⁻¹ (t − f_s) of a log-normal energy."""
    problem, pull = at.problem, torch.zeros_like(at.xi)
    for density, seen, residual, delta in zip(
        at.densities, at.seen, at.residuals, at.deviations, strict=True
    ):
        c = (at.xi + delta)[problem.root.n_field :]
        pull += problem.tangent(density, c, seen).rmatmul(residual / problem.noise)
    return at.xi - pull / len(at.deviations)
