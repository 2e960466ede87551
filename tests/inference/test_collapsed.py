"""Collapsed objectives against dense N × N formulas, the ELBO and the exact Gaussian process."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import final

import pytest
import torch
from torch import Tensor, nn

from dustmap.gp import Batch, ConstantMean, ExactGP, FitStatus, GridPrior, RegularGrid
from dustmap.gp.families import FullRankFamily, MeanFieldFamily
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, HIPFeatures, TorusFeatures
from dustmap.gp.functionals import PointValues, Sharded
from dustmap.gp.kernels import Matern32, SquaredExponential
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    DTC,
    FITC,
    SGPR,
    AbstractCollapsedObjective,
    CollapsedSolution,
    RowSource,
    VariationalModel,
    VariationalPosterior,
    collapsed_gradient,
    fit_collapsed,
    full_elbo,
    natural_step,
    solve_collapsed,
    solve_direct,
)
from dustmap.inference.variational._natural_step import StepLengths
from dustmap.linalg import AbstractWorld
from tests.cuda.pretended import pretended_gpu
from tests.inference.variational_cases import functionals, make_problem

SHAPES = [(12,), (5, 4), (3, 3, 3)]
NAMES = ["hip", "hip-dense", "torus", "cholesky"]
OBJECTIVES = [SGPR(), DTC(), FITC()]

over_shapes = pytest.mark.parametrize("shape", SHAPES)
over_objectives = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)


def log_normal(residual: Tensor, covariance: Tensor) -> Tensor:
    """ln N(r; 0, C)."""
    solved: Tensor = torch.linalg.solve(covariance, residual)
    constant = len(residual) * math.log(2 * math.pi)
    misfit: Tensor = residual @ solved
    return -0.5 * (misfit + torch.logdet(covariance) + constant)


def dense_value(model: VariationalModel, batch: Batch, objective: object) -> Tensor:
    """L by N × N matrices, as the papers write it."""
    likelihood = model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    rows = model.rebuilt().features.rows(batch.functional)
    noise = likelihood.noise_variance(batch)
    residual = batch.y - model.mean.values(batch.functional)
    Q = rows.phi @ rows.phi.mT
    left = rows.residual_variance
    if isinstance(objective, FITC):
        return log_normal(residual, Q + torch.diag(left + noise))
    value = log_normal(residual, Q + torch.diag(noise))
    return value - 0.5 * (left / noise).sum() if isinstance(objective, SGPR) else value


def solved(
    model: VariationalModel, batch: Batch, objective: AbstractCollapsedObjective | None = None
) -> CollapsedSolution:
    return solve_collapsed(model, batch, RowSource(model.features, batch.functional), objective)


def points_batch(dim: int, n: int = 25, noise: float = 0.05) -> Batch:
    generator = torch.Generator().manual_seed(dim)
    x = torch.rand(n, dim, generator=generator, dtype=torch.float64)
    y = (5 * x).sin().sum(-1) + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    sigma2 = noise * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    return Batch(PointValues(x), y, sigma2)


def free_model(points: Tensor, device: str = "cpu") -> VariationalModel:
    kernel = Matern32(0.4, 1.2, dim=points.shape[1]).to(device)
    mean, likelihood = ConstantMean(0.2).to(device), GaussianLikelihood(1.1, 0.1).to(device)
    family = FullRankFamily(len(points))
    return VariationalModel(CholeskyFeatures(kernel, points), mean, likelihood, family)


@over_objectives
@over_shapes
@pytest.mark.parametrize("name", NAMES)
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


@over_shapes
@pytest.mark.parametrize("name", NAMES)
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
    new = functionals(dim, 4, seed=9)
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
    new = functionals(len(shape), 3, seed=6)
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
    new = functionals(dim, 4, seed=5)
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


@over_objectives
@pytest.mark.parametrize("name", ["hip-dense", "torus", "cholesky"])
@over_shapes
def test_gradients_are_those_of_dense_formulas(
    name: str, shape: tuple[int, ...], objective: AbstractCollapsedObjective
) -> None:
    problem = make_problem(shape, name)
    family = FullRankFamily(problem.features.n_features)
    likelihood = GaussianLikelihood(1.1, 0.1)
    model = VariationalModel(problem.features, ConstantMean(0.2), likelihood, family)
    found = collapsed_gradient(model, problem.batch, objective)
    parameters = list(model.parameters())
    assert len(parameters) == 5
    expected = torch.autograd.grad(dense_value(model, problem.batch, objective), parameters)
    torch.testing.assert_close(found.gradient, expected, rtol=1e-7, atol=1e-7)
    assert found.solution.value == pytest.approx(
        solved(model.rebuilt(), problem.batch, objective).value, rel=1e-12
    )


@over_objectives
@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gradients_with_inducing_points_are_finite_differences(
    dim: int, chunk: int, objective: AbstractCollapsedObjective
) -> None:
    batch = points_batch(dim)
    x = torch.rand(6, dim, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    model = free_model(nn.Parameter(x))
    assert isinstance(model.features, CholeskyFeatures)
    object.__setattr__(model.features, "memory", chunk * 8 * 8 * 6)
    assert model.features.rebuilt().chunk == chunk
    gradient = collapsed_gradient(model, batch, objective).gradient
    parameters = list(model.parameters())
    assert any(p.shape == x.shape for p in parameters)
    step = 1e-5
    for p, slope in zip(parameters, gradient, strict=True):
        differences = []
        for i in range(p.numel()):
            ends = []
            for sign in (1.0, -2.0):
                p.data.view(-1)[i] += sign * step
                ends.append(solved(model.rebuilt(), batch, objective).value)
            p.data.view(-1)[i] += step
            differences.append((ends[0] - ends[1]) / (2 * step))
        numeric = torch.tensor(differences, dtype=torch.float64).reshape(p.shape)
        torch.testing.assert_close(slope, numeric, rtol=1e-6, atol=1e-6)


def test_chunks_of_rows_change_nothing() -> None:
    problem = make_problem((5, 4), "cholesky")
    model = problem.model(FullRankFamily(20))
    whole, gradient = solved(model, problem.batch), collapsed_gradient(model, problem.batch)
    assert isinstance(problem.features, CholeskyFeatures)
    object.__setattr__(problem.features, "memory", 4 * 8 * 8 * 20)
    source = RowSource(problem.features, problem.batch.functional, memory=0)
    assert source.stored is None
    parts = solve_collapsed(model, problem.batch, source)
    assert parts.value == pytest.approx(whole.value, rel=1e-13)
    torch.testing.assert_close(parts.state.mean, whole.state.mean, rtol=1e-10, atol=1e-10)
    again = collapsed_gradient(model, problem.batch)
    torch.testing.assert_close(again.gradient, gradient.gradient, rtol=1e-9, atol=1e-9)


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


def test_learning_reaches_what_the_exact_process_learns() -> None:
    generator = torch.Generator().manual_seed(2)
    x = 6 * torch.rand(150, 1, dtype=torch.float64, generator=generator)
    truth = SquaredExponential(0.8, 1.5, dim=1)
    K = truth(x[:, None] - x[None]).detach() + 1e-9 * torch.eye(150).double()
    white, noise = torch.randn(2, 150, dtype=torch.float64, generator=generator)
    y = 1.0 + torch.linalg.cholesky(K) @ white + 0.2 * noise
    batch = Batch(PointValues(x), y)
    points = nn.Parameter(6 * torch.rand(12, 1, dtype=torch.float64, generator=generator))
    kernel = SquaredExponential(2.0, 0.5, dim=1)
    features = CholeskyFeatures(kernel, points, nugget=1e-8)
    model = VariationalModel(
        features, ConstantMean(0.0), GaussianLikelihood(jitter=0.6), FullRankFamily(12)
    )
    before = solved(model, batch).value
    fit = fit_collapsed(model, batch, max_steps=80, tolerance=1e-4)
    assert fit.status in (FitStatus.CONVERGED, FitStatus.MAX_STEPS)
    assert fit.solution.value > before + 50
    assert fit.solution.value == pytest.approx(solved(fit.model, batch).value, rel=1e-10)
    assert fit.objective[-1] == pytest.approx(fit.solution.value / 150)
    likelihood = model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    assert likelihood.log_jitter is not None
    assert math.exp(float(likelihood.log_jitter.detach())) == pytest.approx(0.2, rel=0.2)
    assert float(kernel.lengthscale.detach()) == pytest.approx(0.8, rel=0.3)
    gp = ExactGP(kernel, model.mean)
    exact = gp.log_evidence(batch.functional, y, likelihood.noise_variance(batch))
    assert fit.solution.value <= float(exact.detach()) + 1e-6
    assert fit.solution.value == pytest.approx(float(exact.detach()), abs=2.0)


def test_a_refused_step_is_counted_and_turned_back_from() -> None:
    # Five equal data: the evidence wants ever longer length scales, K_uu then has no factor.
    x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    batch = Batch(PointValues(x), 1.0 + 0.01 * x[:, 0])
    kernel = SquaredExponential(0.1, 1.0, dim=1)
    model = VariationalModel(
        CholeskyFeatures(kernel, x),
        ConstantMean(0.0, learn=False),
        GaussianLikelihood(jitter=0.05, learn=False),
        FullRankFamily(12),
    )
    start = solved(model, batch).value
    fit = fit_collapsed(model, batch, max_steps=30)
    assert fit.refused > 0
    assert fit.solution.value > start
    assert float(kernel.lengthscale.detach()) > 0.1


def test_a_prior_holds_what_data_leave_open() -> None:
    batch = points_batch(1)
    free, held = (
        free_model(torch.linspace(0, 1, 6, dtype=torch.float64)[:, None]) for _ in range(2)
    )
    fit_collapsed(free, batch, max_steps=40)
    fit = fit_collapsed(held, batch, max_steps=40, prior_std=1e-3)
    start = free_model(torch.zeros(1, 1, dtype=torch.float64))
    for a, b, c in zip(
        held.features.parameters(),
        start.features.parameters(),
        free.features.parameters(),
        strict=True,
    ):
        assert float((a - b).abs().detach()) < 0.02
        assert float((c - b).abs().detach()) > 0.05
    assert fit.objective[-1] * len(batch) <= fit.solution.value


def test_the_noise_of_fitc_gives_way_to_its_residuals() -> None:
    # Few inducing points: Var r stands in for the noise, which is then learned too small.
    x = torch.linspace(0, 4, 80, dtype=torch.float64)[:, None]
    generator = torch.Generator().manual_seed(1)
    y = (3 * x[:, 0]).sin() + 0.3 * torch.randn(80, generator=generator, dtype=torch.float64)
    learned = []
    for objective in (SGPR(), FITC()):
        model = VariationalModel(
            CholeskyFeatures(Matern32(0.7, 1.0, dim=1), x[5::16]),
            ConstantMean(learn=False),
            GaussianLikelihood(jitter=0.3),
            FullRankFamily(5),
        )
        fit = fit_collapsed(model, Batch(PointValues(x), y), objective, max_steps=60)
        likelihood = fit.model.likelihood
        assert isinstance(likelihood, GaussianLikelihood)
        assert likelihood.log_jitter is not None
        learned.append(math.exp(float(likelihood.log_jitter.detach())))
    assert learned[0] > 0.29
    assert learned[1] < 0.8 * learned[0]


@final
class Twins(AbstractWorld):
    """Two ranks that have the same data."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 2

    def total(self, part: Tensor) -> Tensor:
        return 2 * part

    def gathered(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return torch.cat([part, part], dim=-1)


@over_objectives
def test_ranks_sum_over_their_data(objective: AbstractCollapsedObjective) -> None:
    batch = points_batch(2)
    assert isinstance(batch.functional, PointValues)
    assert batch.noise_variance is not None
    x = batch.functional.x
    y, noise = (torch.cat([v, v]) for v in (batch.y, batch.noise_variance))
    alone = Batch(PointValues(torch.cat([x, x])), y, noise)
    shared = Batch(Sharded(batch.functional, (len(x), len(x)), Twins()), y, noise)
    points = nn.Parameter(x[:5].clone())
    models = free_model(points), free_model(points)
    values = [solved(m, b, objective).value for m, b in zip(models, (alone, shared), strict=True)]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    expected = collapsed_gradient(models[0], alone, objective)
    found = collapsed_gradient(models[1], shared, objective)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-8, atol=1e-8)
    fits = [
        fit_collapsed(m, b, objective, max_steps=3)
        for m, b in zip((free_model(x[:5]), free_model(x[:5])), (alone, shared), strict=True)
    ]
    assert fits[0].solution.value == pytest.approx(fits[1].solution.value, rel=1e-8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@over_objectives
def test_devices_are_those_of_the_data(objective: AbstractCollapsedObjective) -> None:
    batch = points_batch(2)
    assert isinstance(batch.functional, PointValues)
    assert batch.noise_variance is not None
    expected = solved(free_model(batch.functional.x[:6]), batch, objective)
    with pretended_gpu():
        data = (batch.functional.x, batch.y, batch.noise_variance)
        x, y, noise = (v.clone().to("cuda") for v in data)
        moved = Batch(PointValues(x), y, noise)
        model = free_model(x[:6], device="cuda")
        found = solved(model, moved, objective)
        assert found.state.mean.is_cuda
        gradient = collapsed_gradient(model, moved, objective).gradient
        assert all(part.is_cuda for part in gradient)
    assert found.value == pytest.approx(expected.value)


def test_other_models_are_refused() -> None:
    batch = points_batch(1)
    points = torch.linspace(0, 1, 4, dtype=torch.float64)[:, None]
    model = free_model(points)

    class Other(nn.Module):
        pass

    wrong: Callable[..., VariationalModel] = VariationalModel
    features, mean, likelihood = model.features, model.mean, model.likelihood
    with pytest.raises(ValueError, match="needs a GaussianLikelihood, got Other"):
        collapsed_gradient(wrong(features, mean, Other(), model.family), batch)
    with pytest.raises(ValueError, match="FullRankFamily, got MeanFieldFamily"):
        solved(VariationalModel(features, mean, likelihood, MeanFieldFamily(4)), batch)
    with pytest.raises(ValueError, match="the data set is empty"):
        solved(model, batch[:0])
    for p in (*features.parameters(), *mean.parameters(), *likelihood.parameters()):
        p.requires_grad_(False)
    assert collapsed_gradient(model, batch).gradient == ()
    with pytest.raises(ValueError, match="nothing to learn"):
        fit_collapsed(model, batch)
