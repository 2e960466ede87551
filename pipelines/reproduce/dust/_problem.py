"""The dust map of section 5.5: stars, their split, and the exact posterior to compare with."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ExactGP, GridPrior, Prediction, RegularGrid
from dustmap.gp.covariances import ClosedForm, MonteCarlo
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, HIPFeatures
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from pipelines.reproduce._experiment import Request

#: Integral of the file's `density` times this is its extinction (data set's own description).
DENSITY_TO_EXTINCTION = 5.01
BOX = ((-0.25, -0.25, -0.05), (0.25, 0.25, 0.05))
#: Kernel variance of largest exact evidence on 10^{-4, -3.5, ..., -1} at each length scale (kpc).
VARIANCES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
#: Stratified random points per star for K_fu and k_ff, as in the paper.
MONTE_CARLO = 20


@final
@dataclass(frozen=True, eq=False)
class Stars:
    """Training data, and held-out stars with noisy extinction y, its σ, and true density there."""

    train: Batch
    test: LineIntegrals
    y: Tensor
    sigma: Tensor
    positions: Tensor
    density: Tensor


@final
@dataclass(frozen=True, eq=False)
class Exact:
    """The dense exact posterior at the variance of largest evidence for one length scale."""

    length: float
    variance: float
    log_evidence: float
    prediction: Prediction


def load(request: Request) -> Stars:
    """4,000 simulated stars, split 80/20 by a seeded permutation."""
    table = np.genfromtxt(request.file("ananke_train.csv"), delimiter=",", names=True)
    count = 600 if request.quick else len(table)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:count]
    train, test = order[: int(0.8 * count)], order[int(0.8 * count) :]
    x = torch.tensor(np.stack([table["x"], table["y"], table["z"]], axis=-1))
    y, sigma = torch.tensor(table["extinction"]), torch.tensor(table["extinction_error"])
    density = DENSITY_TO_EXTINCTION * torch.tensor(table["density"])
    rays = LineIntegrals.from_observer(x)
    batch = Batch(rays[train], y[train], sigma[train] ** 2)
    return Stars(batch, rays[test], y[test], sigma[test], x[test], density[test])


def exact_posterior(stars: Stars, length: float) -> Exact:
    """The covariances are computed once; the evidence is then profiled over the variance."""
    gp = ExactGP(Matern32(length, 1.0, dim=3), ConstantMean(0.0, learn=False), ClosedForm())
    rays, y, noise = stars.train.functional, stars.train.y, stars.train.noise_variance
    assert noise is not None
    with torch.no_grad():
        K_ff, K_sf = gp.covariance(rays), gp.between(stars.test, rays)
        k_ss = gp.variance(stars.test)
    best: tuple[float, float, Tensor, Tensor] | None = None
    for variance in VARIANCES:
        L = torch.linalg.cholesky(variance * K_ff + torch.diag(noise))
        white = torch.linalg.solve_triangular(L, y[:, None], upper=False)
        evidence = -0.5 * float(white.square().sum()) - float(L.diagonal().log().sum())
        if best is None or evidence > best[0]:
            best = (evidence, variance, L, white)
    assert best is not None
    evidence, variance, L, white = best
    V = torch.linalg.solve_triangular(L, variance * K_sf.mT, upper=False)
    prediction = Prediction((V.mT @ white).squeeze(-1), variance * k_ss - V.square().sum(0))
    evidence -= 0.5 * len(y) * math.log(2 * math.pi)
    return Exact(length, variance, evidence, prediction)


def grid(shape: tuple[int, ...]) -> RegularGrid:
    """Inducing points over the whole box."""
    return RegularGrid.from_bounds(*BOX, shape)


def hip_features(exact: Exact, shape: tuple[int, ...], padding: float = 4.0) -> HIPFeatures:
    """Monte Carlo K_fu and k_ff, whitened by the rectangular root, float32."""
    kernel = Matern32(exact.length, exact.variance, dim=3)
    prior = GridPrior.padded(kernel, grid(shape), padding=padding, dtype=torch.float32)
    return HIPFeatures(prior, MonteCarlo(MONTE_CARLO, seed=0))


def svgp_features(exact: Exact, shape: tuple[int, ...]) -> CholeskyFeatures:
    """The same inducing points and covariances, whitened by Cholesky, float32."""
    kernel = Matern32(exact.length, exact.variance, dim=3)
    return CholeskyFeatures(
        kernel, grid(shape), MonteCarlo(MONTE_CARLO, seed=0), rows_dtype=torch.float32
    )


def white_shape(features: AbstractFeatureMap, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The grid on which the whitened variables lie: the torus for HIP."""
    return features.prior.torus_shape if isinstance(features, HIPFeatures) else shape


def plane(step: int) -> PointValues:
    """step × step points of the plane z = 0."""
    line = torch.linspace(-0.25, 0.25, step, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return PointValues(torch.stack([x, y, torch.zeros_like(x)], dim=-1).reshape(-1, 3))
