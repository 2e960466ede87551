"""Residuals of values at points beside K_** − ΦΦᵀ, and the posteriors that have them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dustmap import HIPGPRegressor
from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    HIPFeatures,
    JointResiduals,
    LocalFeatures,
    TorusFeatures,
)
from dustmap.gp.functionals import Derivatives, PointValues
from dustmap.gp.kernels import Matern12, Matern32

#: Largest error of an entry over the prior variance, by type: of distant images of the kernel by
#: polynomials, in float64. Local weights are not those of the whole grid.
ROUNDING = {torch.float32: 2e-5, torch.float64: 2e-6}
LOCAL = 0.02


def features_of(name: str, dim: int, dtype: torch.dtype) -> AbstractFeatureMap:
    grid = RegularGrid((0.0,) * dim, (1.0,) * dim, (6, 5, 4)[:dim])
    kernel = Matern12(1.5, 2.0, dim=dim)
    if name == "cholesky":
        return CholeskyFeatures(kernel, grid, rows_dtype=dtype)
    prior = GridPrior.padded(kernel, grid, dtype=dtype)
    if name == "hip":
        return HIPFeatures(prior)
    return TorusFeatures(prior) if name == "torus" else LocalFeatures(prior)


def some_places(dim: int, n: int) -> Tensor:
    uniform = torch.rand(n, dim, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    places = 0.3 + 2.4 * uniform
    places[-1] = places[0]
    return places


def residuals_at(features: AbstractFeatureMap, x: Tensor) -> JointResiduals:
    points = PointValues(x)
    return JointResiduals.of(features, points, features.residual_variance(points))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", ["cholesky", "hip", "torus", "local"])
def test_they_are_what_the_features_leave_of_the_prior(
    name: str, dim: int, dtype: torch.dtype
) -> None:
    features, x = features_of(name, dim, dtype), some_places(dim, 12)
    phi = features.rows(PointValues(x)).phi.double()
    prior = features.prior_covariance(PointValues(x))
    assert prior is not None
    expected = (prior - phi @ phi.mT).detach()
    found = residuals_at(features, x).covariance()
    bound = LOCAL if name == "local" else ROUNDING[dtype]
    assert float((found - expected).abs().max()) < bound * 1.5
    variance = features.residual_variance(PointValues(x)).double()
    torch.testing.assert_close(found.diagonal(), variance, rtol=1e-5, atol=1e-6)
    assert float(torch.linalg.eigvalsh(found).min()) > -1e-12


def test_draws_have_their_covariance() -> None:
    features, count = features_of("hip", 2, torch.float64), 40_000
    residuals = residuals_at(features, some_places(2, 6))
    draws = residuals.draws(count, torch.Generator().manual_seed(1))
    covariance, std = residuals.covariance(), residuals.covariance().diagonal().sqrt()
    error = (draws.mT @ draws / count - covariance) / (std[:, None] * std)
    assert float(error.abs().max()) < 5 * (2 / count) ** 0.5
    torch.testing.assert_close(draws[:, 0], draws[:, -1])  # one place


def test_of_more_than_a_matrix_is_for_only_those_of_one_place_are_joint() -> None:
    features = features_of("hip", 1, torch.float64)
    x = torch.linspace(0.1, 4.9, 2100, dtype=torch.float64)[:, None]
    x = torch.cat([x, x[:3]])
    residuals = residuals_at(features, x)
    assert residuals.root.shape == (2100,)
    draws = residuals.draws(2, torch.Generator().manual_seed(1))
    torch.testing.assert_close(draws[:, :3], draws[:, -3:], rtol=0, atol=0)
    variance = features.residual_variance(PointValues(x))
    torch.testing.assert_close(residuals.covariance().diagonal(), variance)


def test_those_of_other_functionals_are_independent() -> None:
    grid = RegularGrid((0.0,), (1.0,), (6,))
    features = HIPFeatures(GridPrior.padded(Matern32(1.5, 2.0, dim=1), grid))
    slopes = Derivatives.partial(some_places(1, 4), 0)
    variance = features.residual_variance(slopes)
    found = JointResiduals.of(features, slopes, variance).covariance()
    torch.testing.assert_close(found, torch.diag(variance.double()))


@pytest.mark.parametrize(
    "arguments",
    [
        {"engine": "hip", "grid": RegularGrid((0.0,), (0.5,), (21,))},
        {"engine": "global", "grid": RegularGrid((0.0,), (0.5,), (21,)), "samples": 512},
        {"engine": "sgpr", "inducing": 20},
        {"engine": "svgp", "inducing": 20},
    ],
    ids=lambda arguments: str(arguments["engine"]),
)
def test_differences_between_near_rows_are_those_of_the_exact_engine(
    arguments: dict[str, object],
) -> None:
    """Far below the spacing, where independent residuals make them far too wide."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 10.0, (60, 1)), axis=0)
    y = np.sin(X[:, 0]) + 0.3 * rng.standard_normal(60)
    at = np.array([[4.05], [4.08], [7.3], [7.3], [5.2], [5.22]])
    stds = []
    for each in ({"engine": "exact"}, arguments):
        model = HIPGPRegressor(Matern12(1.0, 3.0, dim=1), noise=0.3, learn=False, **each).fit(X, y)
        _, C = model.predict(at, return_cov=True)
        by_covariance = [C[i, i] + C[i + 1, i + 1] - 2 * C[i, i + 1] for i in (0, 2, 4)]
        draws = model.sample_y(at, 500, random_state=0)
        apart = (draws[::2] - draws[1::2]).std(axis=1)
        np.testing.assert_allclose(
            apart, np.sqrt(np.maximum(by_covariance, 0)), rtol=0.2, atol=2e-3
        )
        stds.append(apart)
    np.testing.assert_allclose(stds[1], stds[0], rtol=0.25, atol=2e-3)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_what_rounding_leaves_at_nodes_is_not_drawn_jointly(dim: int) -> None:
    """A solve for weights may leave some 1e-16 of the variance of 2."""
    grid = RegularGrid((-0.7,) * dim, (0.1,) * dim, (6, 5, 4)[:dim])
    features = LocalFeatures(GridPrior.padded(Matern32(0.3, 2.0, dim=dim), grid))
    nodes = PointValues(grid.points())
    left = JointResiduals.of(features, nodes, torch.full((grid.size,), 4e-16))
    assert left.root.tolist() == pytest.approx([2e-8] * grid.size)
    assert residuals_at(features, grid.points()).root.ndim == 1
    assert residuals_at(features, grid.points()[:4] + 0.05).root.ndim == 2
