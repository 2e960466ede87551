"""Collapsed objectives against dense N × N formulas, the ELBO and the exact Gaussian process."""

import itertools

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, ExactGP, GridPrior, Parameters, RegularGrid
from dustmap.gp.families import FullRankFamily, MeanFieldFamily
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, HIPFeatures, TorusFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood, PoissonLikelihood
from dustmap.inference import (
    DTC,
    FITC,
    AbstractCollapsedObjective,
    VariationalModel,
    VariationalPosterior,
    collapsed_gradient,
    fit_collapsed,
    full_elbo,
    natural_step,
    solve_direct,
)
from dustmap.inference.variational._natural_step import StepLengths
from tests.combinations import covering
from tests.inference.collapsed_cases import (
    NAMES,
    OBJECTIVES,
    SHAPES,
    dense_value,
    free_model,
    over_objectives,
    over_shapes,
    points_batch,
    solved,
)
from tests.inference.gridded import some_functionals
from tests.inference.variational_cases import make_problem


@pytest.mark.parametrize(
    ("objective", "shape", "name"), covering(OBJECTIVES, SHAPES, NAMES, together=2)
)
def test_values_and_q_are_those_of_dense_formulas(
    name: str, shape: tuple[int, ...], objective: AbstractCollapsedObjective
) -> None:
    problem = make_problem(shape, name)
    model = problem.model(FullRankFamily(problem.features.n_features))
    solution = solved(model, problem.batch, objective)
    expected = float(dense_value(model, problem.batch, objective).detach())
    assert solution.value == pytest.approx(expected, rel=1e-10)
    phi, residual, noise = problem.dense()
    left = problem.features.rows(problem.batch.functional).residual_variance.detach()
    spread = noise + left if isinstance(objective, FITC) else noise
    Lambda = torch.eye(phi.shape[1], dtype=torch.float64) + phi.mT @ (phi / spread[:, None])
    S = torch.linalg.inv(Lambda)
    probe = torch.eye(phi.shape[1], dtype=torch.float64)
    torch.testing.assert_close(solution.state.apply_covariance(probe), S, atol=1e-9, rtol=0)
    mean = S @ phi.mT @ (residual / spread)
    torch.testing.assert_close(solution.state.mean, mean, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("shape", "name"), covering(SHAPES, NAMES))
def test_the_bound_is_the_elbo_of_its_q_and_below_the_evidence(
    name: str, shape: tuple[int, ...]
) -> None:
    problem = make_problem(shape, name)
    model = problem.model(FullRankFamily(problem.features.n_features))
    solution = solved(model, problem.batch)
    elbo = full_elbo(model, solution.state, problem.batch, problem.source)
    assert solution.value == pytest.approx(elbo, rel=1e-10)
    direct = solve_direct(model, problem.batch, problem.source, rtol=1e-12)
    assert solution.value == pytest.approx(direct.elbo, rel=1e-10)
    features = problem.features
    wrapping = (
        features.prior.wrapping if isinstance(features, HIPFeatures | TorusFeatures) else None
    )
    gp = ExactGP(Matern32(0.4, 1.2, dim=len(shape)), ConstantMean(0.2), wrapping=wrapping)
    assert problem.batch.noise_variance is not None
    exact = gp.log_evidence(problem.batch.functional, problem.batch.y, problem.batch.noise_variance)
    assert solution.value < float(exact.detach())
    dtc = solved(model, problem.batch, DTC()).value
    assert dtc > solution.value


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_inducing_points_at_the_data_give_the_evidence(dim: int) -> None:
    batch = points_batch(dim)
    assert isinstance(batch.functional, PointValues)
    model = free_model(batch.functional.x)
    likelihood = model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    gp = ExactGP(Matern32(0.4, 1.2, dim=dim), ConstantMean(0.2))
    noise = likelihood.noise_variance(batch).detach()
    exact = float(gp.log_evidence(batch.functional, batch.y, noise).detach())
    for objective in OBJECTIVES:
        assert solved(model, batch, objective).value == pytest.approx(exact, abs=1e-7)
    new = some_functionals(dim, 4, seed=9)
    found = VariationalPosterior(model, solved(model, batch).state).predict(new)
    expected = gp.condition(batch.functional, batch.y, noise).predict(new)
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.variance, expected.variance, atol=1e-7, rtol=0)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_bound_rises_with_every_inducing_point(dim: int) -> None:
    batch = points_batch(dim)
    generator = torch.Generator().manual_seed(4)
    points = torch.rand(30, dim, generator=generator, dtype=torch.float64)
    values = [solved(free_model(points[:m]), batch).value for m in (1, 2, 4, 8, 15, 16, 30)]
    assert all(b > a for a, b in itertools.pairwise(values))


@over_shapes
@pytest.mark.parametrize("start", [0.0, 3.0])
def test_one_unit_natural_step_from_anywhere_gives_the_same_q(
    shape: tuple[int, ...], start: float
) -> None:
    problem = make_problem(shape, "cholesky")
    n = problem.features.n_features
    model = problem.model(FullRankFamily(n))
    solution = solved(model, problem.batch)
    rows = problem.features.rows(problem.batch.functional).detached()
    # Any S: of data that are others than these.
    random = torch.randn(9, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    other = model.family.precision_statistics(random, torch.ones(9).double())
    state = model.family.posterior(torch.full((n,), start).double(), start * other)
    step = natural_step(model, state, rows, problem.batch, 1.0, StepLengths(1.0, 1.0, 1.0))
    assert step.length_mean == 1.0
    torch.testing.assert_close(step.posterior.mean, solution.state.mean, atol=1e-10, rtol=0)
    probe = torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(
        step.posterior.apply_covariance(probe), solution.state.apply_covariance(probe)
    )


@over_objectives
@over_shapes
def test_predictions_are_those_of_dense_formulas(
    shape: tuple[int, ...], objective: AbstractCollapsedObjective
) -> None:
    problem = make_problem(shape, "cholesky")
    model = problem.model(FullRankFamily(problem.features.n_features))
    new = some_functionals(len(shape), 3, seed=6)
    state = solved(model, problem.batch, objective).state
    found = VariationalPosterior(model, state).predict(new)
    phi, residual, noise = problem.dense()
    rows, at = problem.features.rows(problem.batch.functional), problem.features.rows(new)
    left = rows.residual_variance.detach() if isinstance(objective, FITC) else 0.0 * noise
    inverse = torch.linalg.inv(phi @ phi.mT + torch.diag(noise + left))
    Q = at.phi.detach() @ phi.mT
    k = (at.phi.square().sum(-1) + at.residual_variance).detach()
    mean = model.mean.values(new).detach() + Q @ inverse @ residual
    torch.testing.assert_close(found.mean, mean, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.variance, k - ((Q @ inverse) * Q).sum(-1), atol=1e-9, rtol=0)


@over_objectives
@over_shapes
def test_whitenings_of_the_same_points_agree(
    shape: tuple[int, ...], objective: AbstractCollapsedObjective
) -> None:
    dim = len(shape)
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, shape)
    kernel = Matern32(0.4, 1.2, dim=dim)
    prior = GridPrior.padded(kernel, grid)
    maps: list[AbstractFeatureMap] = [
        HIPFeatures(prior, rtol=1e-12, max_steps=500, dense_below=0),
        CholeskyFeatures(kernel, grid, wrapping=prior.wrapping),
    ]
    batch = make_problem(shape).batch
    new = some_functionals(dim, 4, seed=5)
    values, predictions = [], []
    for features in maps:
        family = FullRankFamily(features.n_features)
        model = VariationalModel(features, ConstantMean(0.2), GaussianLikelihood(), family)
        solution = solved(model, batch, objective)
        values.append(solution.value)
        predictions.append(VariationalPosterior(model, solution.state).predict(new))
    # Images of the wrapped kernel below 1e-7 are left out of K_fu: that over σ² of 30 data.
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    a, b = predictions
    torch.testing.assert_close(a.mean, b.mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(a.variance, b.variance, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_float32_rows_and_small_noise(dim: int) -> None:
    batch = points_batch(dim, noise=1e-6)
    points = torch.rand(8, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kernel = Matern32(0.4, 1.2, dim=dim)
    values, states = [], []
    for dtype in (torch.float32, torch.float64):
        features = CholeskyFeatures(kernel, points, rows_dtype=dtype)
        model = VariationalModel(
            features, ConstantMean(0.2), GaussianLikelihood(), FullRankFamily(8)
        )
        assert batch.noise_variance is not None
        cast = Batch(batch.functional, batch.y.to(dtype), batch.noise_variance.to(dtype))
        solution = solved(model, cast, DTC())
        assert solution.state.mean.dtype == dtype
        values.append(solution.value)
        states.append(solution.state.mean.double())
        if dtype == torch.float64:
            expected = float(dense_value(model, batch, DTC()).detach())
            assert solution.value == pytest.approx(expected, rel=1e-8)
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    torch.testing.assert_close(states[0], states[1], rtol=1e-3, atol=1e-3)


def test_other_models_are_refused() -> None:
    batch = points_batch(1)
    points = torch.linspace(0, 1, 4, dtype=torch.float64)[:, None]
    model = free_model(points)

    features, mean, likelihood = model.features, model.mean, model.likelihood
    with pytest.raises(ValueError, match="needs a GaussianLikelihood, got PoissonLikelihood"):
        solved(VariationalModel(features, mean, PoissonLikelihood(), model.family), batch)
    with pytest.raises(ValueError, match="FullRankFamily, got MeanFieldFamily"):
        solved(VariationalModel(features, mean, likelihood, MeanFieldFamily(4)), batch)
    with pytest.raises(ValueError, match="the data set is empty"):
        solved(model, batch[:0])
    parameters = Parameters.of(model.fixed())
    assert collapsed_gradient(parameters, parameters.theta, batch).gradient.shape == (0,)
    with pytest.raises(ValueError, match="nothing to learn"):
        fit_collapsed(model.fixed(), batch)
