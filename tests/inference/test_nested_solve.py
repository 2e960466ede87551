"""The global engine's solve and evidence on nested grids, beside dense algebra."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GPModel, NestedPrior, Parameters, ZeroPoints
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import DenseCovariance, GroupedFeatures, NestedFeatures, takes_matrix
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import AbstractKernel, Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GlobalSettings,
    GridModel,
    GridSettings,
    ModelMaker,
    SolveSettings,
    at_the_nodes,
    explained_share,
    fit_global,
    solve_global,
)
from dustmap.inference.evidence._evidence import Moments, differentiate
from dustmap.inference.evidence._newton import keyed_prior_draws
from dustmap.inference.solve._data_space import solve_gridded
from tests.gp.level_cases import SIDES, grid_of, nested_of
from tests.inference.test_evidence import values_of

DOUBLE, NOISE = torch.float64, 0.1
KERNEL = Matern32(4.0, 0.8, dim=2)
NESTED = nested_of(2)
BASE = NestedPrior.of(KERNEL, NESTED)


def rays(count: int) -> LineIntegrals:
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(count, 2, generator=generator).to(DOUBLE)
    reach = 8.5 * torch.rand(count, 1, generator=generator).to(DOUBLE)
    return LineIntegrals.from_observer(reach * direction / direction.norm(dim=1, keepdim=True))


def features_at(kernel: AbstractKernel) -> NestedFeatures:
    return NestedFeatures(BASE.on_torus(kernel, BASE.torus_shape))


def problem(count: int = 60, learned: bool = False) -> tuple[GridModel, Batch]:
    features, functional = features_at(KERNEL), rays(count)
    generator = torch.Generator().manual_seed(5)
    white = torch.randn(2, features.n_features, generator=generator).to(DOUBLE)
    y = 0.3 * functional.moments()[:, 0] + features.operator(functional).matmul(white[0])
    y = y + NOISE * torch.randn(count, generator=generator).to(DOUBLE)
    model = GridModel(features, ConstantMean(0.3, learn=learned), GaussianLikelihood())
    return model, Batch(functional, y, torch.full_like(y, NOISE**2))


def log_evidence(kernel: AbstractKernel, data: Batch, mean: float = 0.3) -> float:
    rows = features_at(kernel).rows(data.functional)
    A = rows.phi @ rows.phi.mT + (rows.residual_variance + NOISE**2).diag()
    residual = data.y - mean * data.functional.moments()[:, 0]
    L = torch.linalg.cholesky(A)
    half = torch.linalg.solve_triangular(L, residual[:, None], upper=False)[:, 0]
    return float(-0.5 * half @ half - L.diagonal().log().sum())


def slopes(data: Batch) -> Tensor:
    """Central differences of the dense evidence in (ln ℓ, ln σ²)."""
    parameters, h = Parameters.of(KERNEL), 1e-4
    found = []
    for unit in torch.eye(2, dtype=DOUBLE):
        up, down = (parameters.build(parameters.theta + s * h * unit) for s in (1, -1))
        found.append((log_evidence(up, data) - log_evidence(down, data)) / (2 * h))
    return torch.tensor(found, dtype=DOUBLE)


def test_mean_and_draws_are_those_of_dense_algebra() -> None:
    model, data = problem()
    settings = SolveSettings(rtol=1e-8, samples=200, seed=1)
    solution = solve_global(model, data, settings)
    places = PointValues(torch.tensor([[0.3, 0.2], [4.0, 1.3], [-8.3, 7.1], [0.0, 0.0]]).to(DOUBLE))
    seen, asked = model.features.rows(data.functional), model.features.rows(places)
    A = seen.phi @ seen.phi.mT + (seen.residual_variance + NOISE**2).diag()
    gain = torch.linalg.solve(A, seen.phi @ asked.phi.mT).mT
    mean = 0.3 + gain @ (data.y - 0.3 * data.functional.moments()[:, 0])
    covariance = asked.phi @ asked.phi.mT - gain @ seen.phi @ asked.phi.mT
    covariance = covariance + asked.residual_variance.diag()
    posterior = solution.posterior
    torch.testing.assert_close(posterior.mean(places), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(posterior.covariance(places), covariance, rtol=0.3, atol=0.06)
    at_nodes = at_the_nodes(posterior)
    for answer, other in zip(
        vars(posterior.predict(places)).values(),
        vars(at_nodes.predict(places)).values(),
        strict=True,
    ):
        torch.testing.assert_close(answer, other, rtol=1e-9, atol=1e-9)
    there, nodes = at_nodes.at_nodes(), PointValues(NESTED.points())
    on_finest = slice(NESTED.places[1].start, None)
    own = posterior.predict(nodes)
    torch.testing.assert_close(there.mean[on_finest], own.mean[on_finest], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        there.variance[on_finest], own.variance[on_finest], rtol=1e-6, atol=1e-9
    )
    share = explained_share(posterior, 1)
    assert share.shape == (NESTED.size,)
    assert float(share.min()) >= 0.0
    assert float(share.max()) > 0.5


def test_groups_are_seen_beside_the_field_at_the_nodes() -> None:
    model, data = problem(40, learned=True)
    assert isinstance(data.functional, LineIntegrals)
    groups = torch.arange(40) % 2
    grouped = Batch(replace(data.functional, groups=groups), data.y + groups, data.noise_variance)
    features = GroupedFeatures(model.features, ZeroPoints(2, 1.0))
    model = GridModel(features, model.mean, model.likelihood)
    settings = SolveSettings(rtol=1e-6, samples=8, seed=1, fit_mean=True, shared_residuals=True)
    posterior = solve_global(model, grouped, settings).posterior
    moved = at_the_nodes(posterior)
    assert posterior.spread is not None
    for functional in (grouped.functional, data.functional):
        first, second = posterior.predict(functional), moved.predict(functional)
        torch.testing.assert_close(first.mean, second.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(first.variance, second.variance, rtol=1e-9, atol=1e-9)
    points, others = posterior.zero_points(), moved.zero_points()
    assert points is not None
    assert others is not None
    torch.testing.assert_close(points.mean, others.mean, rtol=1e-12, atol=0)
    assert 0.5 < float(points.mean[1] - points.mean[0]) < 1.5


def test_the_gradient_is_that_of_the_evidence() -> None:
    """By 64 draws, within four of their errors; held fixed in the field with less error."""
    model, data = problem()
    model = GridModel(model.features, model.mean, model.likelihood.fixed())
    solution = solve_global(model, data, SolveSettings(rtol=1e-8, samples=64, seed=1))
    expected, errors = slopes(data), []
    for draws in (None, keyed_prior_draws(1)(solution.deviations)):
        moments = Moments(solution.eps_mean, solution.deviations, draws)
        found = differentiate(model, data, moments)
        standard = found.monte_carlo_covariance.diagonal().sqrt()
        assert bool(((values_of(model, data, moments) - expected).abs() < 4 * standard).all())
        errors.append(standard[0])
    assert errors[1] < 0.5 * errors[0]


def test_the_matrix_of_few_data_is_that_of_their_rows() -> None:
    model, data = problem(50, learned=True)
    rows = model.features.rows(data.functional)
    sigma = rows.residual_variance + NOISE**2
    covariance = DenseCovariance.of(model.features, data.functional, sigma)
    assert covariance is not None
    A = rows.phi @ rows.phi.mT + sigma.diag()
    torch.testing.assert_close(covariance.factor @ covariance.factor.mT, A, rtol=1e-9, atol=1e-9)
    assert takes_matrix(model.features, data.functional, 2**30)
    settings = SolveSettings(rtol=1e-9, samples=4, seed=1, fit_mean=True)
    dense, iterated = (
        solve_gridded(model, data, s)
        for s in (settings, SolveSettings(**{**vars(settings), "by_matrix": False}))
    )
    torch.testing.assert_close(dense.deviations, iterated.deviations, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        dense.mean_coefficients, iterated.mean_coefficients, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("by_matrix", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_learned_lengths_are_those_of_one_fine_grid(by_matrix: bool) -> None:
    data = problem(150)[1]
    start = Matern32(2.5, 0.5, dim=2)
    model = GPModel(start, ConstantMean(0.3, learn=False), GaussianLikelihood(learn=False))
    settings = GlobalSettings(dtype=DOUBLE, samples=4, order=4, by_matrix=by_matrix, start_rows=0)
    fine = grid_of(SIDES[2][0], 2, 2)
    values, errors = [], []
    for grid in (NESTED, fine):
        fit = fit_global(model, data, grid, settings)
        assert fit.learned is not None
        assert fit.learned.status.value == "converged"
        values.append(torch.cat([p.value.flatten() for p in fit.gp.kernel.parameters()]))
        errors.append(torch.tensor(fit.learned.monte_carlo_errors))
        within = 0.1 * torch.tensor(fit.learned.standard_deviations)
    # Draws on other tori are others: none of it by matrices.
    within = within + 4.0 * (errors[0].square() + errors[1].square()).sqrt()
    assert bool(((values[0] - values[1]).abs() < within).all())


def test_a_maker_goes_back_to_where_it_was() -> None:
    maker = ModelMaker(NESTED, GridSettings(dtype=DOUBLE), ClosedForm())
    model, data = GPModel(KERNEL, ConstantMean(0.3), GaussianLikelihood()), problem()[1]
    maker.choose_order(model, data)
    built, state = maker.build(model), maker.snapshot()
    longer = GPModel(Matern32(8.0, dim=2), model.mean, model.likelihood)
    assert maker.build(longer).features.n_features > built.features.n_features
    maker.restore(state)
    again = maker.build(model)
    white = torch.ones(built.features.n_features, dtype=DOUBLE)
    first, second = (m.features.operator(data.functional).matmul(white) for m in (built, again))
    assert torch.equal(first, second)
    assert maker.ceilings(KERNEL)["length"] < 3.0
