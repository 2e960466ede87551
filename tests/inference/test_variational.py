"""Variational inference against theory: exact posteriors, bounds, stability, learning."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, ExactGP, GridPrior, Parameters, RegularGrid
from dustmap.gp.families import FullRankFamily, MeanFieldFamily
from dustmap.gp.features import HIPFeatures
from dustmap.gp.functionals import (
    PointValues,
)
from dustmap.gp.kernels import Matern52
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    RowSource,
    StepSchedule,
    SVISettings,
    VariationalModel,
    VariationalPosterior,
    fit_svi,
    solve_direct,
    svi,
)
from dustmap.linalg import UnconvergedWarning
from tests.combinations import covering
from tests.inference.gridded import some_functionals
from tests.inference.variational_cases import Problem, families, make_problem

SHAPES = [(12,), (5, 4), (4, 3, 3)]


@pytest.mark.parametrize("name", ["hip", "hip-dense", "torus", "cholesky"])
@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_direct_solution_is_the_exact_posterior(
    name: str, shape: tuple[int, ...]
) -> None:
    problem = make_problem(shape, name)
    phi, residual, sigma2 = problem.dense()
    solution = solve_direct(
        problem.model(families(problem)["full"]), problem.batch, problem.source, rtol=1e-12
    )
    Lambda = torch.eye(phi.shape[1], dtype=torch.float64) + phi.mT @ (phi / sigma2[:, None])
    S = torch.linalg.inv(Lambda)
    torch.testing.assert_close(
        solution.state.mean, S @ phi.mT @ (residual / sigma2), atol=1e-8, rtol=0
    )
    probe = torch.eye(phi.shape[1], dtype=torch.float64)
    torch.testing.assert_close(solution.state.apply_covariance(probe), S, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_unit_natural_step_of_the_full_family_is_exact(shape: tuple[int, ...]) -> None:
    problem = make_problem(shape, noise=50.0)
    model = problem.model(families(problem)["full"])
    settings = SVISettings(
        batch_size=1000, epochs=1, schedule=StepSchedule(1.0), safety=1.0, one_pass=False
    )
    state = fit_svi(
        model, problem.batch, problem.source, settings, torch.Generator().manual_seed(0)
    )
    assert state.taken.length_mean == 1.0
    solution = solve_direct(model, problem.batch, problem.source, rtol=1e-12)
    torch.testing.assert_close(state.posterior.mean, solution.state.mean, atol=1e-9, rtol=0)


def log_evidence(problem: Problem) -> float:
    """ln N(y; m, ΦΦᵀ + diag Var r + Σ), the evidence of the gridded model's prior."""
    phi, residual, sigma2 = problem.dense()
    rows = problem.features.rows(problem.batch.functional)
    K = phi @ phi.mT + torch.diag(rows.residual_variance.detach() + sigma2)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(residual)).double(), K)
    return float(normal.log_prob(residual))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("family", "shape"), covering(["mean-field", "block", "full"], SHAPES))
def test_the_bound_is_below_the_evidence_and_tighter_with_structure(
    family: str, shape: tuple[int, ...]
) -> None:
    problem = make_problem(shape)
    values = {
        name: solve_direct(problem.model(member), problem.batch, problem.source, rtol=1e-12).elbo
        for name, member in families(problem).items()
    }
    assert values[family] <= log_evidence(problem)
    assert values["mean-field"] <= values["block"] + 1e-9 <= values["full"] + 2e-9


def test_the_bound_is_tight_when_data_sit_on_the_inducing_points() -> None:
    grid = RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), (5, 4))
    functional = PointValues(grid.points())
    y = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    prior = GridPrior.padded(Matern52(0.4, dim=2), grid)
    problem = Problem(
        HIPFeatures(prior, rtol=1e-13, max_steps=500),
        Batch(functional, y, torch.full_like(y, 0.1)),
    )
    solution = solve_direct(
        problem.model(families(problem)["full"]), problem.batch, problem.source, rtol=1e-12
    )
    # Images of the wrapped kernel below 1e-7 are left out of K_fu but not of K_uu.
    assert solution.elbo == pytest.approx(log_evidence(problem), abs=1e-5)


@pytest.mark.parametrize("family", ["mean-field", "block", "full"])
@pytest.mark.parametrize("noise", [0.05, 1e-3])
def test_full_batch_natural_gradients_never_lose_what_they_gained(
    family: str, noise: float
) -> None:
    problem = make_problem((5, 4), noise=noise)
    model = problem.model(families(problem)[family])
    settings = SVISettings(
        batch_size=1000, epochs=25, schedule=StepSchedule(1.0, power=0.0), safety=0.9
    )
    generator = torch.Generator().manual_seed(0)
    trace = [s.taken.elbo for s in svi(model, problem.batch, problem.source, settings, generator)]
    slack = 1e-9 * abs(trace[0])
    assert all(b >= a - slack for a, b in itertools.pairwise(trace))
    optimum = solve_direct(model, problem.batch, problem.source, rtol=1e-7).elbo
    assert trace[-1] <= optimum + 1e-5 * abs(optimum)
    assert trace[-1] > trace[0]


def test_early_stop_restores_the_hyperparameters_of_the_state_it_returns() -> None:
    problem = make_problem((5, 4), "hip-dense")
    model = problem.model(families(problem)["mean-field"])
    scores = iter([3.0, 2.0, 1.0, 0.0])
    settings = SVISettings(batch_size=16, epochs=9, patience=2, learning_rate=0.1)
    best = fit_svi(
        model,
        problem.batch,
        problem.source,
        settings,
        torch.Generator().manual_seed(0),
        score=lambda state: next(scores),
    )
    assert best.epoch == 1
    assert best.theta is not None
    assert torch.equal(Parameters.of(best.model).theta, best.theta)
    features = best.model.features
    assert isinstance(features, HIPFeatures)
    fresh = features.prior.with_kernel(features.prior.kernel)
    torch.testing.assert_close(features.prior.lags, fresh.lags)


@pytest.mark.parametrize("shape", [(33,), (17, 17), (13, 13, 13)])
def test_a_fine_grid_gives_the_exact_gaussian_process(shape: tuple[int, ...]) -> None:
    dim = len(shape)
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, shape)
    kernel = Matern52(0.6, 1.2, dim=dim)
    prior = GridPrior.padded(kernel, grid)
    features = HIPFeatures(prior)
    functional = some_functionals(dim, 8, seed=dim)
    y = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = torch.full_like(y, 0.1)
    mean = ConstantMean(0.2)
    new = some_functionals(dim, 5, seed=77)
    exact = ExactGP(kernel, mean, wrapping=prior.wrapping)
    expected = exact.condition(functional, y, noise).predict(new)
    phi = features.rows(functional).phi.detach()
    family = FullRankFamily(features.n_features) if dim < 3 else None
    rows = features.rows(new)
    if family is not None:
        model = VariationalModel(features, mean, GaussianLikelihood(), family)
        batch = Batch(functional, y, noise)
        source = RowSource(features, functional)
        found = VariationalPosterior(model, solve_direct(model, batch, source).state).predict(new)
        m, variance = found.mean, found.variance
    else:
        # The same posterior by the N × N side, where M_w² numbers are too many.
        gram = torch.linalg.inv(phi @ phi.mT + torch.diag(noise))
        cross = rows.phi.detach() @ phi.mT
        residual = y - mean.values(functional).detach()
        m = mean.values(new).detach() + cross @ gram @ residual
        variance = (rows.phi.square().sum(-1) - ((cross @ gram) * cross).sum(-1)).detach()
        variance = variance + rows.residual_variance.detach()
    std = expected.std
    assert float(((m - expected.mean).abs() / std).max()) < 0.05
    assert float((variance.sqrt() / std - 1).abs().max()) < 0.05


@pytest.mark.slow
def test_learning_finds_the_scale_of_a_simulated_field() -> None:
    generator = torch.Generator().manual_seed(4)
    grid = RegularGrid.from_bounds((0.0,), (10.0,), (80,))
    x = 10 * torch.rand(400, 1, dtype=torch.float64, generator=generator)
    truth = Matern52(1.0, 2.0, dim=1)
    K = truth(x[:, None] - x[None]).detach() + 1e-10 * torch.eye(400).double()
    noise = 0.1 * torch.randn(400, dtype=torch.float64, generator=generator)
    y = (
        torch.linalg.cholesky(K) @ torch.randn(400, dtype=torch.float64, generator=generator)
        + noise
    )
    kernel = Matern52(0.4, 0.5, dim=1)
    prior = GridPrior.padded(kernel, grid, padding=8.0)
    features = HIPFeatures(prior, rtol=1e-8, max_steps=500)
    model = VariationalModel(
        features,
        ConstantMean(0.0),
        GaussianLikelihood(jitter=0.3),
        FullRankFamily(features.n_features),
    )
    batch = Batch(PointValues(x), y)
    settings = SVISettings(
        batch_size=400, epochs=150, schedule=StepSchedule(1.0, power=0.0), learning_rate=0.03
    )
    source = RowSource(features, batch.functional)
    before = solve_direct(model, batch, source).elbo
    last = fit_svi(model, batch, source, settings, generator)
    learned = RowSource(last.model.features, batch.functional)
    assert solve_direct(last.model, batch, learned).elbo > before + 50
    assert isinstance(last.model.features, HIPFeatures)
    (term,) = last.model.features.prior.kernel.terms()
    assert float(term.lengthscale) == pytest.approx(1.0, rel=0.35)
    likelihood = last.model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    assert likelihood.log_jitter is not None
    assert math.exp(float(likelihood.log_jitter)) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("family", ["mean-field", "block", "full"])
def test_predictions_match_dense_algebra_and_samples(family: str) -> None:
    problem = make_problem((5, 4), noise=0.3)
    model = problem.model(families(problem)[family])
    state = solve_direct(model, problem.batch, problem.source, rtol=1e-12).state
    posterior = VariationalPosterior(model, state)
    new = some_functionals(2, 3, seed=99)
    rows = problem.features.rows(new)
    phi = rows.phi.detach()
    S = state.apply_covariance(torch.eye(phi.shape[1]).double())
    covariance = phi @ S @ phi.mT + torch.diag(rows.residual_variance.detach())
    prediction = posterior.predict(new)
    mean = ConstantMean(0.2).values(new).detach() + phi @ state.mean
    torch.testing.assert_close(prediction.mean, mean, atol=1e-9, rtol=0)
    torch.testing.assert_close(prediction.variance, covariance.diagonal(), atol=1e-9, rtol=0)
    torch.testing.assert_close(posterior.covariance(new), covariance, atol=1e-9, rtol=0)
    draws = posterior.sample(new, 20_000, torch.Generator().manual_seed(1))
    spread = covariance.diagonal().sqrt()
    assert bool(((draws.mean(0) - mean).abs() < 5 * spread / math.sqrt(20_000)).all())
    error = (draws.mT.cov() - covariance).abs() / (spread[:, None] * spread[None])
    assert float(error.max()) < 5 * math.sqrt(2 / 20_000)


def test_prediction_warns_once_of_unconverged_rows() -> None:
    problem = make_problem((5, 4))
    model = problem.model(families(problem)["mean-field"])
    state = solve_direct(model, problem.batch, problem.source).state
    assert isinstance(problem.features, HIPFeatures)
    short = replace(problem.features, max_steps=1)
    posterior = VariationalPosterior(replace(model, features=short), state)
    with pytest.warns(UnconvergedWarning, match=r"missed the tolerance .* residual \d") as caught:
        posterior.predict(some_functionals(2, 5, seed=3))
    assert len(caught) == 1


def test_family_must_fit_the_features() -> None:
    problem = make_problem((5, 4))
    with pytest.raises(ValueError, match="family has 3 variables"):
        problem.model(MeanFieldFamily(3))
