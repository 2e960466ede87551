"""The pathwise posterior against the exact posterior of the gridded model."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ExactGP, GridPrior, LinearMean, RegularGrid
from dustmap.gp.features import LocalFeatures, TorusFeatures
from dustmap.gp.functionals import AbstractFunctional, PointValues, Stacked
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GridModel,
    PathwisePosterior,
    SolveSettings,
    field_at_nodes,
    solve_global,
)
from tests.inference.gridded import (
    CASES,
    SHAPES,
    DenseSolution,
    some_data,
    some_functionals,
    some_model,
)

COUNT = 300
TIGHT = SolveSettings(rtol=1e-8, samples=4)


def solved(
    model: GridModel, settings: SolveSettings, n: int = 10
) -> tuple[Batch, PathwisePosterior]:
    dim = len(model.mean.coefficients()) - 1
    data = some_data(some_functionals(dim, n, 1))
    return data, solve_global(model, data, settings).posterior


def exact(model: GridModel, data: Batch, at: AbstractFunctional) -> tuple[Tensor, Tensor]:
    """Mean (N,) and covariance (N, N) of f by matrices, float64."""
    dense = DenseSolution.of(model, data)
    with torch.no_grad():
        phi = model.features.operator(at).to_dense().double()
        mean = model.mean.values(at) + phi @ dense.eps_mean
        residual = model.features.residual_variance(at).double()
    covariance = phi @ torch.linalg.solve(dense.precision, phi.mT) + torch.diag(residual)
    return mean, covariance


def points_and_rays(dim: int, n: int, seed: int) -> AbstractFunctional:
    """Without derivatives, of which the grid explains a Matérn-3/2 field's only slowly."""
    parts = some_functionals(dim, n, seed)
    assert isinstance(parts, Stacked)
    return Stacked((parts.parts[0], parts.parts[2]))


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_prediction_is_that_of_the_gridded_model(shape: tuple[int, ...], name: str) -> None:
    model = some_model(shape, name)
    data, posterior = solved(model, replace(TIGHT, samples=COUNT))
    at = some_functionals(len(shape), 12, 5)
    mean, covariance = exact(model, data, at)
    prediction = posterior.predict(at)
    torch.testing.assert_close(prediction.mean, mean, atol=1e-6, rtol=0)
    # S times the sampled part of a variance over its expectation is χ² of S degrees of freedom:
    # 6 standard deviations in one of 36 are a false alarm once in some 10⁷.
    residual = model.features.residual_variance(at).detach()
    ratio = (prediction.variance - residual) / (covariance.diagonal() - residual)
    assert float((ratio - 1).abs().max()) < 6 * math.sqrt(2 / COUNT)
    assert posterior.monte_carlo_error == math.sqrt(0.5 / COUNT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_covariance_is_that_of_the_gridded_model(dtype: torch.dtype) -> None:
    model = some_model((5, 4), "torus", dtype)
    data, posterior = solved(model, replace(TIGHT, rtol=1e-4, samples=COUNT))
    at = some_functionals(2, 8, 5)
    _, C = exact(model, data, at)
    found = posterior.covariance(at)
    assert found.dtype == dtype
    d = C.diagonal()
    spread = ((C.square() + d[:, None] * d[None, :]) / COUNT).sqrt()
    assert float(((found.double() - C) / spread).abs().max()) < 6
    torch.testing.assert_close(found.diagonal(), posterior.predict(at).variance)


@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_by_fft_are_predictions_at_nodes(shape: tuple[int, ...]) -> None:
    model = some_model(shape)
    _, posterior = solved(model, TIGHT)
    assert isinstance(model.features, TorusFeatures)
    at = posterior.predict(PointValues(model.features.prior.grid.points()))
    nodes = posterior.at_nodes()
    torch.testing.assert_close(nodes.mean, at.mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(nodes.variance, at.variance, atol=1e-5, rtol=0)
    chunked = replace(posterior, memory=1).at_nodes()
    torch.testing.assert_close(chunked.variance, nodes.variance)
    fields = field_at_nodes(model.features.prior, posterior.deviations)
    torch.testing.assert_close(fields.square().mean(0), nodes.variance)


def test_nodes_need_a_grid() -> None:
    _, posterior = solved(some_model((5, 4), "cholesky"), TIGHT)
    with pytest.raises(TypeError, match="features of a GridPrior, got CholeskyFeatures"):
        posterior.at_nodes()


def test_chunks_change_nothing() -> None:
    _, posterior = solved(some_model((5, 4), "cholesky"), TIGHT)
    at = some_functionals(2, 3, 5)
    for memory in (1, 700):
        chunked = replace(posterior, memory=memory)
        torch.testing.assert_close(chunked.predict(at).mean, posterior.predict(at).mean)
        variances = (p.predict(at).variance for p in (chunked, posterior))
        torch.testing.assert_close(*variances, atol=1e-6, rtol=1e-6)
        covariances = (p.covariance(at) for p in (chunked, posterior))
        torch.testing.assert_close(*covariances, atol=1e-6, rtol=1e-6)
        draws = [p.sample(at, 3, torch.Generator().manual_seed(0)) for p in (chunked, posterior)]
        torch.testing.assert_close(*draws, atol=1e-5, rtol=0)


def test_samples_are_the_stored_draws_with_fresh_residuals() -> None:
    model = some_model((5, 4))
    _, posterior = solved(model, replace(TIGHT, samples=COUNT))
    at = some_functionals(2, 6, 5)
    phi = model.features.operator(at).to_dense()
    with torch.no_grad():
        field = model.mean.values(at) + (posterior.eps_mean + posterior.deviations) @ phi.mT
        residual = model.features.residual_variance(at)
    draws = posterior.sample(at, COUNT, torch.Generator().manual_seed(0))
    z = (draws - field) / residual.sqrt()
    # χ² of as many degrees of freedom as numbers: |z| > 5 once in 1.7 million.
    assert abs(float(z.square().sum()) - z.numel()) < 5 * math.sqrt(2 * z.numel())
    few = posterior.sample(at, 3, torch.Generator().manual_seed(1))
    assert float(((few - field[:3]) / residual.sqrt()).abs().max()) < 6
    with pytest.raises(ValueError, match="raise `samples`"):
        posterior.sample(at, COUNT + 1, torch.Generator())


def test_percentiles_are_those_of_a_normal_distribution() -> None:
    _, posterior = solved(some_model((5, 4)), TIGHT)
    at = some_functionals(2, 6, 5)
    q = torch.tensor([0.158655254, 0.5, 0.841344746], dtype=torch.float64)
    low, middle, high = posterior.percentiles(at, q)
    prediction = posterior.predict(at)
    torch.testing.assert_close(middle, prediction.mean)
    torch.testing.assert_close(high - middle, prediction.std, rtol=1e-6, atol=0)
    torch.testing.assert_close(middle - low, prediction.std, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="probabilities in"):
        posterior.percentiles(at, torch.tensor([16.0, 84.0]))


def test_the_fitted_mean_is_part_of_the_posterior() -> None:
    model = some_model((5, 4))
    data = some_data(some_functionals(2, 10, 1))
    solution = solve_global(model, data, replace(TIGHT, rtol=1e-10, fit_mean=True))
    at = some_functionals(2, 6, 5)
    fitted = solution.posterior.predict(at).mean
    model = replace(model, mean=model.mean.with_coefficients(solution.mean_coefficients))
    torch.testing.assert_close(fitted, exact(model, data, at)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("dim", "cells"), [(1, (8, 32)), pytest.param(2, (6, 16), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", [TorusFeatures, LocalFeatures])
def test_refining_the_grid_gives_the_exact_posterior(
    dim: int, cells: tuple[int, int], kind: type[TorusFeatures] | type[LocalFeatures]
) -> None:
    data = some_data(points_and_rays(dim, 12, 1))
    assert data.noise_variance is not None
    at = points_and_rays(dim, 10, 5)
    errors = []
    for m in cells:
        grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, (m,) * dim)
        prior = GridPrior.padded(Matern32(0.4, 1.2, dim=dim), grid)
        mean = LinearMean([0.1] * dim, 0.5)
        model = GridModel(kind(prior), mean, GaussianLikelihood())
        posterior = solve_global(model, data, replace(TIGHT, samples=COUNT)).posterior
        gp = ExactGP(prior.kernel, mean, wrapping=prior.wrapping)
        truth = gp.condition(data.functional, data.y, data.noise_variance).predict(at)
        found = posterior.predict(at)
        errors.append(float(((found.mean - truth.mean) / truth.std).abs().max()))
        ratio = found.std / truth.std
    assert errors[1] < 0.25 * errors[0]
    assert errors[1] < 0.1
    # The Monte Carlo error of 30 standard deviations, and 2 % for the grid.
    assert float((ratio - 1).abs().max()) < 0.02 + 6 * math.sqrt(0.5 / COUNT)
