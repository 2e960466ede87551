"""Fitted coefficients of the mean in gridded posteriors, beside dense universal kriging.

The reference inverts A = ΦΦᵀ + Σ by matrices: it knows neither Λ nor the directions of the solver.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch, ConstantMean, LinearMean
from dustmap.gp.features import LocalFeatures, TorusFeatures
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference import (
    GridModel,
    PathwisePosterior,
    SolveSettings,
    solve_global,
    solve_in_data_space,
)
from tests.combinations import covering
from tests.inference.gridded import SHAPES, some_data, some_functionals, some_model

TIGHT = SolveSettings(rtol=1e-8, samples=4, fit_mean=True)
COUNT = 400


def universal_kriging(
    model: GridModel, data: Batch, at: AbstractFunctional
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (N,), covariance (N, N), and what of it the coefficients add, under a flat prior."""
    with torch.no_grad():
        phi, phi_at = (
            model.features.operator(f).to_dense().double() for f in (data.functional, at)
        )
        H, h = model.mean.basis(data.functional), model.mean.basis(at)
        A = phi @ phi.mT + torch.diag(model.sigma(data).double())
        residual = torch.diag(model.features.residual_variance(at).double())
    k = phi @ phi_at.mT
    V = torch.linalg.inv(H.mT @ torch.linalg.solve(A, H))
    beta = V @ H.mT @ torch.linalg.solve(A, data.y)
    u = h - k.mT @ torch.linalg.solve(A, H)
    mean = h @ beta + k.mT @ torch.linalg.solve(A, data.y - H @ beta)
    added = u @ V @ u.mT
    simple = phi_at @ phi_at.mT + residual - k.mT @ torch.linalg.solve(A, k)
    return mean, simple + added, added


def mean_of(dim: int, linear: bool) -> AbstractMean:
    return LinearMean([0.0] * dim) if linear else ConstantMean()


def added_variance(posterior: PathwisePosterior, at: AbstractFunctional) -> Tensor:
    """What the coefficients add to the variances."""
    given = replace(posterior, spread=None)
    return (posterior.predict(at).variance - given.predict(at).variance).double()


def points(dim: int, n: int, seed: int) -> PointValues:
    generator = torch.Generator().manual_seed(seed)
    return PointValues(torch.rand(n, dim, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize(
    ("shape", "linear", "dtype"),
    covering(SHAPES, [False, True], [torch.float32, torch.float64], together=2),
)
def test_variances_have_those_of_the_coefficients(
    shape: tuple[int, ...], linear: bool, dtype: torch.dtype
) -> None:
    dim = len(shape)
    model = some_model(shape, dtype=dtype, mean=mean_of(dim, linear))
    data, at = some_data(some_functionals(dim, 10, 1)), some_functionals(dim, 8, 5)
    settings = TIGHT if dtype == torch.float64 else replace(TIGHT, rtol=1e-4)
    posterior = solve_global(model, data, settings).posterior
    mean, C, added = universal_kriging(model, data, at)
    std = C.diagonal().sqrt()
    # What is asked for is an error of 3 % of the standard deviations that they add.
    u, expected = added_variance(posterior, at).clamp_min(0).sqrt(), added.diagonal().sqrt()
    assert float(((u - expected).abs() / std).max()) < 0.03
    assert float(((posterior.predict(at).mean.double() - mean).abs() / std).max()) < 0.05


def test_a_mean_that_is_held_adds_no_variance() -> None:
    model = some_model((5, 4), mean=mean_of(2, True))
    data = some_data(some_functionals(2, 6, 1))
    assert solve_global(model, data, replace(TIGHT, fit_mean=False)).posterior.spread is None


@pytest.mark.parametrize("linear", [False, True])
def test_draws_have_the_covariance_of_universal_kriging(linear: bool) -> None:
    model = some_model((5, 4), mean=mean_of(2, linear))
    data, at = some_data(some_functionals(2, 6, 1)), some_functionals(2, 6, 5)
    settings = replace(TIGHT, samples=COUNT)
    posterior = solve_global(model, data, settings).posterior
    mean, C, _ = universal_kriging(model, data, at)
    spread = ((C.square() + C.diagonal()[:, None] * C.diagonal()[None, :]) / COUNT).sqrt()
    draws = posterior.sample(at, COUNT, torch.Generator().manual_seed(0)) - mean
    found = draws.mT @ draws / COUNT
    assert float(((found - C) / spread).abs().max()) < 6
    whole = posterior.covariance(at)
    assert float(((whole - C) / spread).abs().max()) < 6
    torch.testing.assert_close(whole.diagonal(), posterior.predict(at).variance)


def test_nodes_have_the_variances_of_the_coefficients() -> None:
    model = some_model((5, 4), mean=mean_of(2, True))
    posterior = solve_global(model, some_data(some_functionals(2, 6, 1)), TIGHT).posterior
    assert isinstance(model.features, TorusFeatures)
    at = posterior.predict(PointValues(model.features.prior.grid.points()))
    torch.testing.assert_close(posterior.at_nodes().variance, at.variance, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("linear", [False, True])
def test_both_spaces_know_the_same(dim: int, linear: bool) -> None:
    model = some_model((12,) * dim, "local", mean=mean_of(dim, linear))
    assert isinstance(model.features, LocalFeatures)
    data, at = some_data(points(dim, 30, 1)), points(dim, 20, 2)
    field = solve_global(model, data, TIGHT).posterior
    here = solve_in_data_space(model, data, TIGHT).posterior
    _, C, added = universal_kriging(model, data, at)
    u, v = (added_variance(posterior, at).clamp_min(0.0).sqrt() for posterior in (field, here))
    assert float(((u - v).abs() / C.diagonal().sqrt()).max()) < 0.03
    torch.testing.assert_close(added_variance(here, at), added.diagonal(), rtol=1e-3, atol=1e-6)


def test_coefficients_that_the_field_imitates() -> None:
    """A field far longer than the box hardly leaves anything of a constant to the data."""
    model = some_model((12,), "local", mean=ConstantMean())
    data, at = some_data(points(1, 800, 1), noise=1e-4), points(1, 5, 2)
    posterior = solve_global(model, data, replace(TIGHT, rtol=1e-3)).posterior
    assert posterior.spread is not None
    assert posterior.spread.error < 0.03
    _, C, added = universal_kriging(model, data, at)
    u = added_variance(posterior, at).clamp_min(0).sqrt()
    assert float(((u - added.diagonal().sqrt()).abs() / C.diagonal().sqrt()).max()) < 0.03
    variance = float(posterior.spread.directions.square().sum())
    with torch.no_grad():
        phi = model.features.operator(data.functional).to_dense()
        H = model.mean.basis(data.functional)
        A = phi @ phi.mT + torch.diag(model.sigma(data))
    assert variance == pytest.approx(float(1 / (H.mT @ torch.linalg.solve(A, H))), rel=0.01)
