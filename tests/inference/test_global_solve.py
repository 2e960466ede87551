"""The global solve against dense linear algebra."""

import math
from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, LinearMean
from dustmap.gp._means import generalised_least_squares
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import Derivatives, PointValues
from dustmap.inference import (
    GlobalSolution,
    GridModel,
    RowSource,
    SolveSettings,
    VariationalModel,
    solve_direct,
    solve_global,
)
from dustmap.inference.solve._grid_model import DATA_STREAM, GRID_STREAM
from dustmap.linalg import KeyedNormal, NystromPreconditioner
from tests.inference.gridded import (
    CASES,
    SHAPES,
    DenseSolution,
    some_data,
    some_functionals,
    some_model,
)

TIGHT = SolveSettings(rtol=1e-10, samples=4)


def mean_error(solution: GlobalSolution) -> float:
    """Bound of the error of E f for every functional f, β̂ included, in posterior std of f.

    |ℓᵀe| ≤ ‖e‖_A · std(ℓ) and ‖e‖_A ≤ ‖r‖, because no eigenvalue of the precision A is below 1.
    """
    return float(solution.solve.residuals[0]) * solution.scale


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_mean_is_that_of_the_dense_gridded_model(shape: tuple[int, ...], name: str) -> None:
    model = some_model(shape, name)
    data = some_data(some_functionals(len(shape), 10, 1))
    dense = DenseSolution.of(model, data)
    solution = solve_global(model, data, TIGHT)
    torch.testing.assert_close(solution.eps_mean, dense.eps_mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(solution.sigma, dense.sigma)
    assert solution.converged
    assert solution.worst_residual <= 1e-10
    error = dense.phi @ (solution.eps_mean - dense.eps_mean)
    std = (dense.phi @ torch.linalg.solve(dense.precision, dense.phi.mT)).diagonal().sqrt()
    assert float((error / std).abs().max()) <= mean_error(solution)


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_is_that_of_the_direct_solution(shape: tuple[int, ...]) -> None:
    model = some_model(shape)
    data = some_data(some_functionals(len(shape), 10, 1))
    variational = VariationalModel(
        model.features, model.mean, model.likelihood, FullRankFamily(model.features.n_features)
    )
    source = RowSource(model.features, data.functional)
    direct = solve_direct(variational, data, source, rtol=1e-12)
    # The direct solution takes the noise for Σ.
    solution = solve_global(model, data, TIGHT, sigma=data.noise_variance)
    torch.testing.assert_close(solution.eps_mean, direct.state.mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_posterior_covariance(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = some_model(shape, "local" if len(shape) == 1 else "torus", dtype)
    data = some_data(some_functionals(len(shape), 10, 1))
    count = 400
    settings = SolveSettings(rtol=1e-4, samples=count)
    deviations = solve_global(model, data, settings).deviations
    assert deviations.dtype == dtype
    L = torch.linalg.cholesky(DenseSolution.of(model, data).precision)
    white = deviations.double() @ L
    # Each of these is normal to a good approximation: |z| > 5 is a false alarm once in 1.7 million.
    size = white.numel()
    z_length = (float(white.square().sum()) - size) / math.sqrt(2 * size)
    assert abs(z_length) < 5
    gram = white.mT @ white / math.sqrt(count)
    pairs = torch.triu_indices(len(gram), len(gram), offset=1)
    off = gram[pairs[0], pairs[1]].square()
    z_pairs = (float(off.sum()) - len(off)) / math.sqrt(2 * len(off))
    assert abs(z_pairs) < 5
    z_mean = (float((white.sum(0) / math.sqrt(count)).square().sum()) - len(L)) / math.sqrt(
        2 * len(L)
    )
    assert abs(z_mean) < 5


def test_draws_come_from_noise_keyed_by_position() -> None:
    model = some_model((5, 4))
    data = some_data(some_functionals(2, 10, 1))
    dense = DenseSolution.of(model, data)
    deviations = solve_global(model, data, replace(TIGHT, seed=3)).deviations
    for s, delta in enumerate(deviations):
        eps0 = KeyedNormal(3, GRID_STREAM).draw(s, model.features.n_features)
        xi = KeyedNormal(3, DATA_STREAM).draw(s, len(data))
        b = eps0 + dense.phi.mT @ (xi / dense.sigma.sqrt())
        torch.testing.assert_close(dense.precision @ delta, b, atol=1e-7, rtol=0)


@pytest.mark.parametrize("fit_mean", [False, True])
def test_blocks_change_nothing(fit_mean: bool) -> None:
    model = some_model((5, 4))
    data = some_data(some_functionals(2, 10, 1))
    settings = SolveSettings(rtol=1e-10, samples=7, fit_mean=fit_mean)
    whole = solve_global(model, data, settings)
    vectors = 8 * (12 * model.features.n_features + 3 * len(data))
    for columns in (1, 2, 3, 5):
        parts = solve_global(model, data, replace(settings, memory=columns * vectors))
        torch.testing.assert_close(parts.deviations, whole.deviations, atol=1e-8, rtol=0)
        torch.testing.assert_close(parts.eps_mean, whole.eps_mean, atol=1e-7, rtol=0)
        torch.testing.assert_close(
            parts.mean_coefficients, whole.mean_coefficients, atol=1e-7, rtol=0
        )


def test_draws_do_not_depend_on_how_many_there_are() -> None:
    model = some_model((5, 4))
    data = some_data(some_functionals(2, 10, 1))
    few, many = (solve_global(model, data, replace(TIGHT, samples=s)) for s in (3, 9))
    torch.testing.assert_close(few.deviations, many.deviations[:3], atol=1e-8, rtol=0)
    other = solve_global(model, data, replace(TIGHT, seed=1))
    assert float((other.deviations[:3] - few.deviations).abs().max()) > 0.1


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_fitted_mean_is_generalised_least_squares(shape: tuple[int, ...], name: str) -> None:
    model = some_model(shape, name)
    data = some_data(some_functionals(len(shape), 10, 1))
    dense = DenseSolution.of(model, data)
    H = model.mean.basis(data.functional)
    beta = generalised_least_squares(H, data.y, torch.linalg.cholesky(dense.V))
    before = model.mean.coefficients().detach().clone()
    solution = solve_global(model, data, replace(TIGHT, fit_mean=True))
    torch.testing.assert_close(solution.mean_coefficients, beta, atol=1e-6, rtol=0)
    assert bool((model.mean.coefficients() == before).all())
    alpha = torch.linalg.solve(dense.V, data.y - H @ beta)
    torch.testing.assert_close(solution.eps_mean, dense.phi.mT @ alpha, atol=1e-6, rtol=0)
    model = replace(model, mean=model.mean.with_coefficients(beta))
    given = solve_global(model, data, TIGHT)
    torch.testing.assert_close(given.eps_mean, solution.eps_mean, atol=1e-6, rtol=0)


def test_fitted_mean_in_float32_of_data_far_from_zero() -> None:
    model = some_model((5, 4), "local", torch.float32, ConstantMean(0.0))
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(200, 2, dtype=torch.float64, generator=generator)
    data = some_data(PointValues(x), noise=1e-3)
    data = Batch(data.functional, data.y + 1e4, data.noise_variance)
    dense = DenseSolution.of(model, data)
    H = model.mean.basis(data.functional)
    beta = generalised_least_squares(H, data.y, torch.linalg.cholesky(dense.V))
    solution = solve_global(model, data, SolveSettings(samples=2, fit_mean=True))
    assert solution.converged, solution.message()
    std = float((H.mT @ torch.linalg.solve(dense.V, H)).rsqrt())
    assert mean_error(solution) < 0.05
    assert abs(float(solution.mean_coefficients - beta)) < 0.05 * std


def test_coefficients_that_the_data_do_not_determine_stay() -> None:
    model = some_model((12,), mean=LinearMean([0.3], 4.0))
    x = torch.linspace(0.1, 0.9, 6, dtype=torch.float64)[:, None]
    data = some_data(Derivatives(x, torch.ones_like(x)))
    solution = solve_global(model, data, replace(TIGHT, fit_mean=True))
    assert float(solution.mean_coefficients[0]) == 4.0
    assert abs(float(solution.mean_coefficients[1]) - 0.3) > 1e-3


def test_the_mean_is_accurate_in_units_of_the_posterior() -> None:
    """With a large signal-to-noise ratio a relative residual of Φᵀy would say nothing."""
    model = some_model((12, 12), "local", torch.float32)
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(600, 2, dtype=torch.float64, generator=generator)
    data = some_data(PointValues(x), noise=1e-4)
    dense = DenseSolution.of(model, data)
    solution = solve_global(model, data, SolveSettings(rtol=1e-2, samples=8))
    assert solution.converged, solution.message()
    root = torch.linalg.inv(torch.linalg.cholesky(dense.precision))
    nodes = model.features.operator(PointValues(x[:200])).to_dense().double()
    std = (nodes @ root.mT).norm(dim=-1)
    error = nodes @ (solution.eps_mean.double() - dense.eps_mean)
    assert float((error / std).square().mean().sqrt()) < 0.1


def test_noise_too_small_for_float32_is_reported() -> None:
    data = some_data(some_functionals(2, 10, 1), noise=1e-14)
    settings = SolveSettings(rtol=1e-6, samples=2, max_steps=100)
    sigma = data.noise_variance
    solution = solve_global(some_model((5, 4), dtype=torch.float32), data, settings, sigma=sigma)
    assert not solution.converged
    assert "float64" in solution.message()
    assert "noise" in solution.message()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fit_mean", [False, True])
def test_one_datum(shape: tuple[int, ...], fit_mean: bool) -> None:
    model = some_model(shape)
    data = some_data(PointValues(torch.full((1, len(shape)), 0.4, dtype=torch.float64)))
    solution = solve_global(model, data, replace(TIGHT, fit_mean=fit_mean))
    assert solution.converged
    expected = DenseSolution.of(model, data).eps_mean
    if fit_mean:
        # One number is explained by the mean alone.
        expected = torch.zeros_like(expected)
    torch.testing.assert_close(solution.eps_mean, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("fit_mean", [False, True])
def test_a_warm_start_takes_fewer_steps(fit_mean: bool) -> None:
    model = some_model((5, 4))
    data = some_data(some_functionals(2, 10, 1))
    settings = SolveSettings(rtol=1e-6, samples=4, fit_mean=fit_mean)
    cold = solve_global(model, data, settings)
    again = solve_global(model, data, settings, start=cold)
    assert again.block_steps <= 2
    changed = cold.sigma * 1.02
    warm = solve_global(model, data, settings, sigma=changed, start=cold)
    fresh = solve_global(model, data, settings, sigma=changed)
    assert int(warm.solve.steps.sum()) < 0.8 * int(fresh.solve.steps.sum())
    torch.testing.assert_close(warm.eps_mean, fresh.eps_mean, atol=1e-3, rtol=0)
    more = solve_global(model, data, replace(settings, samples=6), start=cold)
    torch.testing.assert_close(more.deviations[:4], cold.deviations, atol=1e-4, rtol=0)


def test_a_preconditioner_changes_the_steps_only() -> None:
    model = some_model((24, 24), "torus")
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(150, 2, dtype=torch.float64, generator=generator)
    data = some_data(PointValues(x), noise=1e-3)
    settings = SolveSettings(rtol=1e-6, samples=2, rank=0)
    plain = solve_global(model, data, settings)
    assert plain.preconditioner is None
    for rank in (60, None):
        found = solve_global(model, data, replace(settings, rank=rank))
        assert isinstance(found.preconditioner, NystromPreconditioner)
        assert 60 <= found.preconditioner.rank <= (rank or 200)
        assert found.block_steps < 0.6 * plain.block_steps
        torch.testing.assert_close(found.eps_mean, plain.eps_mean, atol=1e-3, rtol=0)
        torch.testing.assert_close(found.deviations, plain.deviations, atol=1e-3, rtol=0)
        again = solve_global(model, data, replace(settings, rank=rank), start=found)
        assert again.preconditioner is found.preconditioner
    small = solve_global(model, data, replace(settings, rank=None, memory=10**6))
    assert isinstance(small.preconditioner, NystromPreconditioner)
    assert small.preconditioner.rank < 20


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="samples must be at least 1"):
        SolveSettings(samples=0)
    with pytest.raises(ValueError, match="rtol and memory"):
        SolveSettings(rtol=0.0)
    with pytest.raises(ValueError, match="rank"):
        SolveSettings(rank=-1)
    model = some_model((5, 4))
    data = some_data(some_functionals(2, 4, 1))
    with pytest.raises(ValueError, match="one variance per datum"):
        solve_global(model, data, TIGHT, sigma=torch.ones(3, dtype=torch.float64))
    sigma = torch.ones(12, dtype=torch.float64)
    sigma[3] = 0.0
    with pytest.raises(ValueError, match="positive and finite: 1 of 12"):
        solve_global(model, data, TIGHT, sigma=sigma)
    start = solve_global(model, data, TIGHT)
    with pytest.raises(ValueError, match="same grid, torus and dtype"):
        solve_global(some_model((6, 5)), data, TIGHT, start=start)


def test_free_inducing_points_are_as_good_as_a_grid() -> None:
    points = torch.rand(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    base = some_model((5, 4), "cholesky")
    assert isinstance(base.features, CholeskyFeatures)
    model = GridModel(CholeskyFeatures(base.features.kernel, points), base.mean, base.likelihood)
    data = some_data(some_functionals(2, 6, 1))
    solution = solve_global(model, data, TIGHT)
    expected = DenseSolution.of(model, data).eps_mean
    torch.testing.assert_close(solution.eps_mean, expected, atol=1e-6, rtol=0)
