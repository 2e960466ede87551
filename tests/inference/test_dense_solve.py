"""Solves by the covariance of the data as a matrix, against dense algebra and iterations."""

from dataclasses import replace

import pytest
import torch

from dustmap.errors import UserError
from dustmap.gp import Batch, ConstantMean, LinearMean, ZeroPoints
from dustmap.gp.features import (
    DenseCovariance,
    GroupedFeatures,
    LocalFeatures,
    dense_bytes,
    suits_dense,
    takes_matrix,
)
from dustmap.gp.functionals import LineIntegrals
from dustmap.inference import GlobalSolution, GridModel, SolveSettings, solve_global
from dustmap.inference.solve._data_space import solve_dense, solve_gridded
from tests.combinations import covering
from tests.inference.gridded import SHAPES, DenseSolution, some_data, some_model

TIGHT = SolveSettings(rtol=1e-10, samples=5, seed=2, max_steps=2000)
DTYPES = [torch.float64, torch.float32]


def rays(dim: int, n: int = 20) -> LineIntegrals:
    generator = torch.Generator().manual_seed(4)
    ends = torch.rand(n, dim, dtype=torch.float64, generator=generator)
    return LineIntegrals.from_observer(ends, observer=torch.full((dim,), 0.4).double())


def dense(model: GridModel, data: Batch, settings: SolveSettings) -> GlobalSolution:
    covariance = DenseCovariance.of(model.features, data.functional, model.sigma(data).detach())
    assert covariance is not None
    return solve_dense(model, data, covariance, settings)


@pytest.mark.parametrize(("dtype", "shape"), covering(DTYPES, SHAPES))
def test_the_mean_is_that_of_dense_algebra(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model, data = some_model(shape, "local", dtype), some_data(rays(len(shape)))
    solution, expected = dense(model, data, TIGHT), DenseSolution.of(model, data)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert solution.eps_mean.dtype == dtype
    apart = solution.eps_mean.double() - expected.eps_mean
    assert float(apart.norm()) < tolerance * float(expected.eps_mean.norm())
    assert solution.converged
    assert solution.worst_residual < 1e-12
    assert "by a matrix" in solution.message()


@pytest.mark.parametrize(("dtype", "shape"), covering(DTYPES, SHAPES))
def test_draws_are_those_of_iterations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    data = some_data(rays(len(shape)))
    here = dense(some_model(shape, "local", dtype), data, TIGHT).deviations.double()
    there = solve_global(some_model(shape, "local"), data, TIGHT).deviations
    tolerance = 1e-6 if dtype == torch.float64 else 1e-4
    assert float((here - there).norm()) < tolerance * float(there.norm())


def test_draws_have_the_posterior_covariance() -> None:
    """4,000 draws seen by 20 data: variances ±2.2 % each, so 5 of these for the largest."""
    model, data = some_model((5, 4), "local"), some_data(rays(2))
    deviations = dense(model, data, replace(TIGHT, samples=4000)).deviations
    expected = DenseSolution.of(model, data)
    variance = (expected.phi @ torch.linalg.solve(expected.precision, expected.phi.mT)).diagonal()
    seen = (deviations @ expected.phi.mT).square().mean(0)
    assert float((seen / variance - 1.0).abs().max()) < 5.0 * (2.0 / 4000) ** 0.5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mean", [ConstantMean(0.2), LinearMean([0.1, 0.2], 0.5)])
def test_fitted_means_with_their_spread(mean: ConstantMean | LinearMean, shared: bool) -> None:
    model, data = some_model((5, 4), "local", mean=mean), some_data(rays(2))
    settings = replace(TIGHT, fit_mean=True, shared_residuals=shared)
    here, there = dense(model, data, settings), solve_global(model, data, settings)
    apart = here.mean_coefficients - there.mean_coefficients
    assert float(apart.abs().max()) < 1e-5
    assert float((here.eps_mean - there.eps_mean).abs().max()) < 1e-5
    assert float((here.deviations - there.deviations).abs().max()) < 1e-5
    H, V = mean.basis(data.functional), DenseSolution.of(model, data).V
    spread = here.posterior.spread
    assert spread is not None
    expected = torch.linalg.inv(H.mT @ torch.linalg.solve(V, H))
    torch.testing.assert_close(spread.directions @ spread.directions.mT, expected)
    one, other = (s.posterior.predict(rays(2, 7)) for s in (here, there))
    assert float((one.mean - other.mean).abs().max()) < 1e-5
    # The spread of iterations has an error of 3 % of the standard deviation, twice in variances.
    torch.testing.assert_close(one.variance, other.variance, rtol=0.06, atol=0.0)


def test_zero_points_of_groups() -> None:
    plain, functional = some_model((5, 4), "local"), rays(2)
    functional = replace(functional, groups=torch.arange(20) % 3)
    assert isinstance(plain.features, LocalFeatures)
    model = replace(plain, features=GroupedFeatures(plain.features, ZeroPoints(3, 0.5)))
    data = some_data(functional)
    here, there = dense(model, data, TIGHT), solve_global(model, data, TIGHT)
    torch.testing.assert_close(here.eps_mean, there.eps_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(here.deviations, there.deviations, rtol=1e-6, atol=1e-7)


def test_few_draws_at_a_time_change_nothing() -> None:
    model, data = some_model((5, 4), "local"), some_data(rays(2))
    some, one = (dense(model, data, replace(TIGHT, memory=m)) for m in (2**30, 1))
    torch.testing.assert_close(some.deviations, one.deviations, rtol=1e-12, atol=1e-12)


def test_matrices_are_for_few_data_on_many_nodes() -> None:
    assert suits_dense(1000, 200, 2**30)
    assert not suits_dense(1000, 50, 2**30)
    assert not suits_dense(5001, 10**4, 2**40)
    assert suits_dense(900, 10**4, 2**30)
    assert not suits_dense(900, 10**4 + 1, 2**30)
    assert not suits_dense(1000, 200, dense_bytes(1000, 200) - 1)
    assert takes_matrix(some_model((5, 4), "local").features, rays(2), 2**30)
    assert not takes_matrix(some_model((5, 4), "hip").features, rays(2), 2**30)


def test_the_rule_chooses_and_settings_forbid() -> None:
    model, data = some_model((5, 4), "local"), some_data(rays(2))
    assert solve_gridded(model, data, TIGHT).covariance is not None
    assert solve_gridded(model, data, replace(TIGHT, by_matrix=False)).covariance is None
    assert solve_gridded(model, data, replace(TIGHT, memory=2)).covariance is None


def test_a_factor_is_taken_over_where_model_and_noise_are_the_same() -> None:
    model, data = some_model((5, 4), "local"), some_data(rays(2))
    first, more = solve_gridded(model, data, TIGHT), replace(TIGHT, samples=9)
    afresh, again = (solve_gridded(model, data, more, start=s) for s in (None, first))
    assert again.covariance is first.covariance
    assert torch.equal(again.deviations, afresh.deviations)
    assert torch.equal(again.eps_mean, afresh.eps_mean)
    other = solve_gridded(model, data, more, sigma=2.0 * model.sigma(data), start=first)
    assert other.covariance is not first.covariance


@pytest.mark.parametrize("grouped", [False, True])
def test_noise_of_its_own_changes_no_bit_of_a_solve_from_another_one(grouped: bool) -> None:
    """Nor does a start of other data, as many, of the same model."""
    model, functional = some_model((5, 4), "local"), rays(2)
    if grouped:
        functional = replace(functional, groups=torch.arange(20) % 3)
        assert isinstance(model.features, LocalFeatures)
        model = replace(model, features=GroupedFeatures(model.features, ZeroPoints(3, 0.5)))
    data = some_data(functional)
    start = dense(model, data, TIGHT)
    others = some_data(replace(functional, edges=0.7 * functional.edges))
    sigma = model.sigma(data).detach() * torch.linspace(0.5, 3.0, 20).double()
    for these in (data, others):
        alone, after = (
            solve_gridded(model, these, TIGHT, sigma=sigma, start=before)
            for before in (None, start)
        )
        assert torch.equal(alone.deviations, after.deviations)
        assert torch.equal(alone.eps_mean, after.eps_mean)


def test_singular_covariances_are_left_to_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = some_model((5, 4), "local"), some_data(rays(2))
    monkeypatch.setattr(DenseCovariance, "of", staticmethod(lambda *_: None))
    solution = solve_gridded(model, data, TIGHT)
    assert solution.covariance is None
    assert solution.converged


def test_variances_must_be_positive() -> None:
    model, data = some_model((5, 4), "local"), some_data(rays(2))
    with pytest.raises(UserError, match="sigma must be positive and finite"):
        solve_gridded(model, data, TIGHT, sigma=torch.zeros(20, dtype=torch.float64))
