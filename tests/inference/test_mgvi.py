"""Positive fields: the model's promises, derivatives, the linear regime, calibration."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import (
    AbstractLatticePrior,
    AbstractMean,
    Batch,
    ConstantMean,
    GridPrior,
    LinearMean,
    NestedGrids,
    NestedPrior,
    RegularGrid,
)
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues, Stacked
from dustmap.gp.kernels import ProjectedKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    LogNormalModel,
    LogNormalPosterior,
    MGVISettings,
    MGVIStatus,
    fit_mgvi,
    typical_log_density,
)
from dustmap.inference.evidence._steps import TrustRegion
from dustmap.inference.lognormal._lognormal_descent import (
    Accuracy,
    Steps,
    descend,
    gauss_newton,
    line_search,
)
from dustmap.inference.lognormal._lognormal_energy import Iterate, draws_at_once
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_hyper import evidence_step, learned_from
from dustmap.inference.lognormal._mgvi_samples import DrawSolver, Perturbations, metric_draws
from dustmap.linalg import AbstractOperator, KeptNumbers
from tests.inference.gridded import energy_gradient


def box(dim: int, nodes: int) -> RegularGrid:
    return RegularGrid.from_bounds((-0.5,) * dim, (0.5,) * dim, (nodes,) * dim)


def nested_box(dim: int, nodes: int) -> NestedGrids:
    """The box of so many nodes, and half of it with twice as many."""
    outer, cells = box(dim, nodes), (nodes - 1) // 4
    half = cells * outer.spacing[0]
    inner = RegularGrid.from_bounds((-half,) * dim, (half,) * dim, (4 * cells + 1,) * dim)
    return NestedGrids((outer, inner))


def positions(count: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dim, generator=generator, dtype=torch.float64) - 0.5


def model_of(
    grid: RegularGrid | NestedGrids,
    *,
    length: float = 0.3,
    variance: float = 1.0,
    mean: AbstractMean | None = None,
    likelihood: GaussianLikelihood | None = None,
    dtype: torch.dtype = torch.float64,
    learn: bool = True,
    name: str = "matern32",
) -> LogNormalModel:
    kernel = kernel_named(name, length, variance, dim=grid.dim)
    kernel = kernel if learn else kernel.fixed()

    def rows(functional: AbstractFunctional) -> AbstractOperator:
        return interpolation(functional, grid, dtype=dtype)

    prior: AbstractLatticePrior
    if isinstance(grid, NestedGrids):
        prior = NestedPrior.of(kernel, grid, padding=3.0, dtype=dtype)
    else:
        prior = GridPrior.padded(kernel, grid, padding=3.0, dtype=dtype)
    return LogNormalModel(
        prior, mean or ConstantMean(0.0), likelihood or GaussianLikelihood(), rows
    )


def draw_truth(model: LogNormalModel, seed: int) -> Tensor:
    """A log-density (M,) from the model's prior."""
    generator = torch.Generator().manual_seed(1000 + seed)
    white = torch.randn(model.prior.n_white, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        field: Tensor = model.prior.root().matmul(white.to(model.prior.dtype))
    return model.log_mean() + field


def observe(model: LogNormalModel, truth: Tensor, where: Tensor, noise: float, seed: int) -> Batch:
    """Line integrals to `where` with noise of that fraction of their median."""
    rays = LineIntegrals.from_observer(where)
    f = model.interpolation(rays).matmul(truth.exp()).double()
    sigma = noise * float(f.median())
    generator = torch.Generator().manual_seed(seed)
    y = f + sigma * torch.randn(len(f), generator=generator, dtype=torch.float64)
    return Batch(rays, y, torch.full_like(y, sigma**2))


def small_problem(seed: int = 0, dim: int = 2, stars: int = 40) -> LogNormalProblem:
    model = model_of(box(dim, 9))
    data = observe(model, draw_truth(model, seed), positions(stars, dim, seed), 0.1, seed)
    return LogNormalProblem.of(model, data)


def iterate_of(problem: LogNormalProblem, seed: int, pairs: int) -> Iterate:
    generator = torch.Generator().manual_seed(seed)
    n = problem.n_latent
    xi = 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    delta = 0.3 * torch.randn(pairs, n, generator=generator, dtype=torch.float64)
    return Iterate.at(problem, xi, torch.cat([delta, -delta]) if pairs else None)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_log_density_integrates_to_density_times_length(
    dim: int, dtype: torch.dtype
) -> None:
    model = model_of(box(dim, 7), mean=ConstantMean(1.3), dtype=dtype)
    x = positions(30, dim, 0)
    problem = LogNormalProblem.of(model, observe(model, model.log_mean(), x, 0.1, 0))
    xi = torch.zeros(problem.n_latent, dtype=dtype)
    found = Iterate.at(problem, xi).responses[0].double()
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, math.exp(1.3) * x.norm(dim=-1), rtol=rounding, atol=0.0)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_no_weight_is_negative_and_point_weights_sum_to_one(dim: int) -> None:
    model = model_of(box(dim, 6))
    functional = Stacked(
        (PointValues(positions(20, dim, 1)), LineIntegrals.from_observer(positions(20, dim, 2)))
    )
    L = model.interpolation(functional).to_dense()
    assert float(L.min()) >= 0.0
    torch.testing.assert_close(L[:20].sum(-1), torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize("pairs", [0, 2])
def test_the_gradient_is_that_of_the_energy(pairs: int) -> None:
    iterate = iterate_of(small_problem(), 3, pairs)
    gradient = energy_gradient(iterate)
    step = 1e-5 * torch.randn(
        len(gradient), generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    ends = [
        Iterate.at(
            iterate.problem,
            iterate.xi + sign * step,
            iterate.deviations if pairs else None,
        ).energy
        for sign in (1, -1)
    ]
    assert ends[0] - ends[1] == pytest.approx(2 * float(gradient @ step), rel=1e-6)


def test_jacobian_and_its_transpose() -> None:
    problem = small_problem()
    iterate = iterate_of(problem, 5, 0)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(problem.n_latent, generator=generator, dtype=torch.float64)
    v = torch.randn(len(problem.y), generator=generator, dtype=torch.float64)
    Jx = iterate.tangent.matmul(x)
    ends = [Iterate.at(problem, iterate.xi + step * x).responses[0] for step in (1e-5, -1e-5)]
    torch.testing.assert_close(Jx, (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-8)
    JTv = iterate.tangent.rmatmul(v)
    torch.testing.assert_close(Jx @ v, x @ JTv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_metric_is_symmetric_positive_definite_and_matches_its_parts(
    dtype: torch.dtype,
) -> None:
    model = model_of(box(2, 7), dtype=dtype)
    data = observe(model, draw_truth(model, 0), positions(25, 2, 0), 0.1, 0)
    problem = LogNormalProblem.of(model, data)
    density = draw_truth(model, 1).exp()
    tangent = problem.tangent(density, density[:0])
    A = tangent.gram().to_dense().double()
    rounding = 1e-4 if dtype == torch.float32 else 1e-10
    scale = float(A.diagonal().max())
    assert float((A - A.mT).abs().max()) < rounding * scale
    assert float(torch.linalg.eigvalsh(0.5 * (A + A.mT))[0]) > 1 - rounding * scale
    J = tangent.matmul(torch.eye(problem.n_latent, dtype=dtype)).double().mT
    W = problem.noise.double().rsqrt()
    expected = torch.eye(25, dtype=torch.float64) + (W[:, None] * J) @ (W[:, None] * J).mT
    assert float((A - expected).abs().max()) < 10 * rounding * scale


def solver_of(count: int) -> DrawSolver:
    return DrawSolver(1e-4, 500, draws_at_once(count))


def test_metric_draws_have_the_covariance_of_the_inverse_metric() -> None:
    problem = small_problem(dim=1, stars=15)
    iterate = iterate_of(problem, 7, 0)
    draws, solve = metric_draws(iterate, Perturbations.of(problem, 0, range(800)), solver_of(800))
    assert solve.converged
    eye = torch.eye(problem.n_latent, dtype=torch.float64)
    J = iterate.tangent.matmul(eye).mT
    expected = torch.linalg.inv(eye + J.mT @ (J / problem.noise[:, None]))
    T = problem.root.matmul(eye).mT
    found = (T @ draws.mT).square().mean(-1)
    torch.testing.assert_close(found, (T @ expected @ T.mT).diagonal(), rtol=0.25, atol=1e-3)


def test_numbers_of_a_sample_depend_on_its_index_alone() -> None:
    problem = small_problem()
    both = Perturbations.of(problem, 3, range(2))
    second = Perturbations.of(problem, 3, range(1, 2))
    assert torch.equal(both.white[1], second.white[0])
    assert torch.equal(both.noise[1], second.noise[0])
    assert not torch.equal(both.noise[0], Perturbations.of(problem, 4, range(1)).noise[0])


@pytest.mark.parametrize("most", [0, 2**10, 2**20])
def test_numbers_are_the_same_whether_they_are_kept_or_not(most: int) -> None:
    problem, kept = small_problem(), KeptNumbers(most)
    plain = Perturbations.of(problem, 3, range(4))
    for _ in range(2):
        again = Perturbations.of(problem, 3, range(4), kept=kept)
        assert torch.equal(again.white, plain.white)
        assert torch.equal(again.noise, plain.noise)
    like = problem.y
    assert torch.equal(kept.draw(3, 101, 0, 5, like), plain.white[0, :5])
    assert len(kept.draw(3, 101, 0, 9999, like)) == 9999


def test_descent_reaches_the_mode() -> None:
    problem = small_problem()
    xi = torch.zeros(problem.n_latent, dtype=torch.float64)
    start = Iterate.at(problem, xi)
    accuracy = Accuracy(residual=1e-8, decrease=1e-10, steps=50)
    found, _ = descend(start, torch.zeros_like(problem.y), accuracy)
    assert found.iterate.energy < start.energy
    assert float(energy_gradient(found.iterate).norm()) < 1e-4


@pytest.mark.parametrize("name", ["matern32", "matern32+matern12"])
def test_the_gradient_of_the_evidence_is_that_of_the_linearised_model(name: str) -> None:
    likelihood = GaussianLikelihood(scale=1.2, jitter=0.02, relative=0.1)
    model = model_of(box(1, 12), likelihood=likelihood, name=name)
    prior = model.prior.on_torus(
        ProjectedKernel.of(model.prior.kernel, 0.4), model.prior.torus_shape
    )
    model = replace(model, prior=prior)
    data = observe(model, draw_truth(model, 0), positions(30, 1, 0), 0.1, 0)
    problem = LogNormalProblem.of(model, data)
    xi = torch.zeros(problem.n_latent, dtype=torch.float64)
    mode, z = descend(
        Iterate.at(problem, xi),
        torch.zeros_like(problem.y),
        Accuracy(residual=1e-9, decrease=1e-12, steps=50),
    )
    iterate, theta = mode.iterate, problem.theta
    pseudo = iterate.residuals[0] + iterate.tangent.matmul(iterate.xi)

    def log_evidence(shift: Tensor) -> Tensor:
        moved = problem.at(theta + shift)
        tangent = moved.tangent(iterate.density, iterate.c)
        J = tangent.matmul(torch.eye(moved.n_latent, dtype=torch.float64)).mT
        C = torch.diag(moved.noise) + J @ J.mT
        value: Tensor = -0.5 * (pseudo @ torch.linalg.solve(C, pseudo) + torch.logdet(C))
        return value

    draws = metric_draws(iterate, Perturbations.of(problem, 0, range(600)), solver_of(600))[1].x
    learned, trust = learned_from(model, None, 10.0, 3.0), TrustRegion.of(1.0)
    step = evidence_step(iterate, z, draws, learned, Accuracy(), None, trust)
    assert len(theta) == 6 + 2 * name.count("+")
    for place in range(len(theta)):
        shift = torch.zeros_like(theta)
        shift[place] = 1e-4
        slope = float(log_evidence(shift) - log_evidence(-shift)) / 2e-4
        allowed = 4 * float(step.error[place]) + 1e-3
        assert float(step.gradient[place]) == pytest.approx(slope, abs=allowed)
    assert float(step.error.max()) < 1.0
    assert float(torch.linalg.eigvalsh(step.information)[0]) > 0


def nearly_linear(
    stars: int, error: float, mean: AbstractMean | None = None, reach: float = 1.0
) -> tuple[LogNormalModel, Batch, Tensor, Tensor, Tensor]:
    """A model, its data, mean and variance of the exact posterior at the nodes, and the variance
    before the data; a mean that is learned varies as the field does."""
    grid, std = box(2, 9), 0.02
    mean = mean or ConstantMean(0.0, learn=False)
    model = replace(model_of(grid, variance=std**2, mean=mean, learn=False), mean_std=std)
    data = observe(model, draw_truth(model, 0), reach * positions(stars, 2, 0), error, 0)
    problem = LogNormalProblem.of(model, data)
    eye = torch.eye(problem.n_latent, dtype=torch.float64)
    J = problem.tangent(torch.ones(grid.size, dtype=torch.float64), eye[0, :0]).matmul(eye).mT
    flat = problem.rows.matmul(torch.ones(grid.size, dtype=torch.float64))
    precision = eye + J.mT @ (J / problem.noise[:, None])
    centre = torch.linalg.solve(precision, J.mT @ ((problem.y - flat) / problem.noise))
    T = problem.root.matmul(eye).mT
    variance = (T @ torch.linalg.inv(precision) @ T.mT).diagonal()
    return model, data, T @ centre, variance, T.square().sum(1)


def test_a_nearly_linear_problem_has_the_gaussian_solution() -> None:
    model, data, mean, variance, _ = nearly_linear(60, 0.005)
    std_exact = variance.sqrt()
    for curved in (False, True):
        solution = fit_mgvi(model, data, MGVISettings(samples=100, curved=curved, residual=1e-3))
        assert solution.status is MGVIStatus.CONVERGED
        distance = (solution.posterior.log_density - mean).abs() / std_exact
        assert float(distance.max()) < 0.1
        found = solution.posterior.node_log_moments()[1]
        assert float((found / std_exact).median()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("reach", "mean", "gain"), [(1.0, None, 0.5), (0.3, LinearMean((0.0, 0.0)), 1.1)]
)
def test_variances_at_nodes_are_corrected_for_the_draws_of_the_prior(
    reach: float, mean: AbstractMean | None, gain: float
) -> None:
    """Most where data say little, and nowhere much worse than those of the samples. What a learned
    mean leaves uncertain, at the second far more than the field is, stays in them."""
    model, data, _, exact, prior = nearly_linear(15, 0.01, mean, reach)
    share = 1.0 - exact / prior
    little, much = share < share.quantile(0.15), share > 0.7
    assert float(share.min()) < 0.6
    assert int(much.sum()) > 4
    sampled, known = [], []
    for seed in range(6):
        found = fit_mgvi(model, data, MGVISettings(samples=16, seed=seed, curved=False)).posterior
        sampled.append((found.log_samples.var(0, correction=0) / exact).log())
        known.append((found.node_log_variance / exact).log())
    off = [torch.stack(each).square().mean(0) for each in (sampled, known)]
    before, after = (each[little].mean().sqrt() for each in off)
    assert float(after) < gain * float(before)
    mean_before, mean_after = (
        float(torch.stack(each)[:, little].mean()) for each in (sampled, known)
    )
    assert mean_after > mean_before - 0.1
    before, after = (each[much].mean().sqrt() for each in off)
    assert float(after) < 1.15 * float(before)


@pytest.mark.parametrize("curved", [False, True])
def test_samples_come_in_pairs_one_after_the_other(curved: bool) -> None:
    model = model_of(box(2, 8))
    data = observe(model, draw_truth(model, 5), positions(50, 2, 5), 0.05, 5)
    solution = fit_mgvi(model, data, MGVISettings(samples=8, curved=curved))
    plus, minus = solution.deviations[::2], solution.deviations[1::2]
    apart = (plus + minus).norm(dim=-1) / (plus - minus).norm(dim=-1)
    assert float(apart.max()) < (0.3 if curved else 1e-12)
    assert float((plus[:-1] + minus[1:]).norm()) > 0.5 * float(plus[:-1].norm())
    posterior = solution.posterior
    logs = posterior.log_samples - posterior.log_density
    rest = (logs[::2] + logs[1::2]).norm(dim=-1) / (logs[::2] - logs[1::2]).norm(dim=-1)
    assert float(rest.max()) < (0.3 if curved else 1e-5)


def test_nothing_is_negative_and_percentiles_ascend() -> None:
    model = model_of(box(2, 10))
    data = observe(model, draw_truth(model, 2), positions(80, 2, 2), 0.05, 2)
    posterior = fit_mgvi(model, data, MGVISettings(samples=16)).posterior
    for functional in (
        PointValues(positions(50, 2, 3)),
        LineIntegrals.from_observer(positions(50, 2, 4)),
    ):
        prediction = posterior.predict(functional)
        assert float(prediction.mean.min()) > 0
        assert float(prediction.variance.min()) > 0
        q = torch.tensor([0.025, 0.16, 0.5, 0.84, 0.975], dtype=torch.float64)
        found = posterior.percentiles(functional, q)
        assert float(found.min()) > 0
        assert float(found.diff(dim=0).min()) > 0
        torch.testing.assert_close(found[2], posterior.log_moments(functional)[0].exp())
        draws = posterior.sample(functional, 16, torch.Generator())
        assert float(draws.min()) > 0
        torch.testing.assert_close(draws.mean(0), prediction.mean)
        torch.testing.assert_close(posterior.covariance(functional).diagonal(), prediction.variance)


def test_a_ray_of_no_length_has_no_extinction() -> None:
    model = model_of(box(2, 5))
    posterior = LogNormalPosterior(
        model.interpolation, model.log_mean(), model.log_mean().expand(4, -1)
    )
    ray = LineIntegrals.from_observer(torch.zeros(1, 2, dtype=torch.float64))
    q = torch.tensor([0.16, 0.84], dtype=torch.float64)
    assert float(posterior.percentiles(ray, q).abs().max()) == 0.0
    assert float(posterior.predict(ray).mean) == 0.0


def test_a_seed_gives_the_same_fit_and_another_seed_another() -> None:
    found = []
    for seed in (0, 0, 1):
        model = model_of(box(2, 8))
        data = observe(model, draw_truth(model, 5), positions(50, 2, 5), 0.05, 5)
        settings = MGVISettings(samples=8, draws=4, rounds=2, seed=seed)
        solution = fit_mgvi(model, data, settings)
        found.append(solution.posterior.log_samples)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_torus_is_enlarged_when_the_length_scale_outgrows_it() -> None:
    truth = model_of(box(2, 16), length=0.5)
    data = observe(truth, draw_truth(truth, 0), positions(300, 2, 0), 0.02, 0)
    model = model_of(box(2, 16), length=0.03)
    solution = fit_mgvi(model, data, MGVISettings(samples=8))
    assert solution.model.prior.n_white > model.prior.n_white
    assert solution.model.prior.report.wrap_error < 0.2
    assert len(solution.xi) == solution.model.prior.n_white + 1


def test_hyperparameters_come_back_from_a_poor_start() -> None:
    truth = model_of(box(2, 24), length=0.25)
    data = observe(truth, draw_truth(truth, 1), positions(400, 2, 1), 0.05, 1)
    likelihood = GaussianLikelihood(scale=2.0)
    model = model_of(
        box(2, 24),
        length=0.1,
        variance=0.3,
        likelihood=likelihood,
        mean=ConstantMean(typical_log_density(data)),
    )
    solution = fit_mgvi(model, data, MGVISettings(samples=8))
    length, variance, scale = (math.exp(p) for p in solution.history[-1].parameters)
    assert solution.status is MGVIStatus.CONVERGED
    assert 0.25 / 1.6 < length < 0.25 * 1.6
    assert 0.3 < variance < 3.0
    assert scale == pytest.approx(1.0, abs=0.1)
    assert solution.history[-1].misfit == pytest.approx(scale, abs=0.3)


@pytest.mark.parametrize(("scale", "jitter"), [(0.8, 0.05), (1.0, 0.0)])
def test_scale_and_jitter_are_found_apart(scale: float, jitter: float) -> None:
    """Errors over a factor of 20; the evidence's own error of both is some 5 %."""
    truth = model_of(box(2, 20), length=0.3)
    rays = LineIntegrals.from_observer(positions(500, 2, 3))
    f = truth.interpolation(rays).matmul(draw_truth(truth, 3).exp())
    generator = torch.Generator().manual_seed(8)
    u, white = torch.rand(500, generator=generator), torch.randn(500, generator=generator)
    sigma = 0.01 * (3.0 * u.double()).exp()
    noise = (scale**2 * sigma.square() + jitter**2).sqrt()
    data = Batch(rays, f + noise * white.double(), sigma.square())
    likelihood = GaussianLikelihood(scale=1.5, jitter=0.1 * float(sigma.median()))
    solution = fit_mgvi(
        model_of(box(2, 20), length=0.2, likelihood=likelihood), data, MGVISettings(samples=4)
    )
    assert solution.status is MGVIStatus.CONVERGED
    found_scale, found_jitter = (math.exp(p) for p in solution.history[-1].parameters[2:])
    assert found_scale == pytest.approx(scale, rel=0.15)
    if jitter > 0:
        assert found_jitter == pytest.approx(jitter, rel=0.15)
    else:
        assert found_jitter < 0.3 * float(sigma.median())


def test_priors_stay_where_they_are_told_to() -> None:
    data = observe(
        model_of(box(2, 8)), draw_truth(model_of(box(2, 8)), 5), positions(5, 2, 5), 2, 5
    )
    found = []
    for origin in (None, torch.tensor([0.0, 3.0], dtype=torch.float64)):
        solution = fit_mgvi(
            model_of(box(2, 8)), data, MGVISettings(samples=4, prior_std=0.1), origin=origin
        )
        found.append(solution.history[-1].parameters[1])
    assert found[0] == pytest.approx(0.0, abs=0.3)
    assert found[1] == pytest.approx(3.0, abs=0.5)
    with pytest.raises(ValueError, match="origin must have shape"):
        fit_mgvi(model_of(box(2, 8)), data, origin=torch.zeros(3))


def test_the_learned_mean_is_told() -> None:
    flat = model_of(box(2, 8), variance=1e-4, learn=False)
    truth = torch.full((flat.prior.lattice.size,), 0.7, dtype=torch.float64)
    solution = fit_mgvi(flat, observe(flat, truth, positions(60, 2, 1), 0.02, 1), MGVISettings())
    assert float(solution.coefficients) == pytest.approx(0.7, abs=0.03)
    fixed = model_of(box(2, 8), mean=ConstantMean(0.4, learn=False))
    assert float(fixed.coefficients(torch.zeros(fixed.prior.n_white))) == pytest.approx(0.4)


def test_what_cannot_be_fitted_says_why() -> None:
    model = model_of(box(2, 6))
    data = observe(model, draw_truth(model, 0), positions(10, 2, 0), 0.1, 0)
    with pytest.raises(ValueError, match="positive sum"):
        typical_log_density(Batch(data.functional, -data.y, data.noise_variance))
    # Noise alone is no field, and not data of the wrong sign.
    assert data.noise_variance is not None
    none = 0.1 * data.noise_variance.sqrt() * torch.linspace(-1.0, 0.9, len(data)).double()
    faint = typical_log_density(Batch(data.functional, none, data.noise_variance))
    assert faint < typical_log_density(data) - 1.0
    with pytest.raises(ValueError, match="even"):
        MGVISettings(samples=7)
    other = LogNormalModel(
        model_of(box(2, 5)).prior, ConstantMean(0.0), GaussianLikelihood(), model.interpolation
    )
    with pytest.raises(ValueError, match="interpolation"):
        LogNormalProblem.of(other, data)
    hopeless = Batch(data.functional, data.y * 1e3, data.noise_variance)
    stiff = model_of(box(2, 6), variance=1e-4, mean=ConstantMean(0.0, learn=False), learn=False)
    solution = fit_mgvi(stiff, hopeless, MGVISettings(samples=4))
    assert solution.status is MGVIStatus.MISFIT
    assert "noise scale" in solution.message()


def test_a_datum_says_nothing_of_places_far_away_however_few_the_samples() -> None:
    """The share that is explained, by samples and the draws of the prior that they come from."""
    grid = box(2, 25)
    place = torch.tensor([[-0.4, -0.4]], dtype=torch.float64)
    away = (grid.points() - place).norm(dim=1)
    data = Batch(
        PointValues(place),
        torch.tensor([2.0], dtype=torch.float64),
        torch.tensor([0.01], dtype=torch.float64),
    )
    dominated, naive, here = [], [], []
    for seed in range(5):
        mean = ConstantMean(0.0, learn=False)
        model = model_of(grid, length=0.1, learn=False, mean=mean)
        found = fit_mgvi(model, data, MGVISettings(samples=8, seed=seed)).posterior
        assert found.explained is not None
        width2 = found.log_samples.var(0, correction=0)
        variance = model.prior.node_variance(width2)
        assert float(found.explained[away > 0.6].max()) < 0.01
        far = found.node_log_moments()[1][away > 0.6].square()
        torch.testing.assert_close(far, variance[away > 0.6], rtol=0.01, atol=0.0)
        here.append(float(found.explained[away < 0.03]))
        dominated.append(float((found.explained > 0.5).double().mean()))
        naive.append(float((width2 < 0.5).double().mean()))
    assert sorted(here)[2] > 0.7
    assert sum(naive) / 5 > 0.2
    assert sum(dominated) / 5 < 0.04


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_steps_that_shrink_linearly_are_extrapolated_to_where_they_end(dim: int) -> None:
    """g = B (x* − x) has D unknown directions, which D + 1 points and their steps tell."""
    generator = torch.Generator().manual_seed(dim)
    end, x = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    B = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    B = 0.4 * torch.eye(dim, dtype=torch.float64) + 0.05 * (B @ B.mT)
    steps = Steps().joined(x, B @ (end - x))
    assert steps.extrapolated() is None
    for _ in range(dim):
        x = x + steps.steps[-1]
        steps = steps.joined(x, B @ (end - x))
    further = steps.extrapolated()
    assert further is not None
    # The ridge is a millionth of the largest change.
    torch.testing.assert_close(x + further, end, rtol=0.0, atol=1e-2 * float(steps.steps[0].norm()))
    assert float((x + further - end).norm()) < 0.1 * float((x + steps.steps[-1] - end).norm())


def observed_start(seed: int) -> tuple[Iterate, torch.Tensor]:
    """ξ = 0 of 60 places in a plane, of a density that varies by factors; and zero multipliers."""
    truth = model_of(box(2, 6), variance=4.0, name="matern12")
    data = observe(truth, draw_truth(truth, seed), positions(60, 2, seed), 0.02, seed)
    problem = LogNormalProblem.of(truth, data)
    xi = torch.zeros(problem.n_latent, dtype=torch.float64)
    start = Iterate.at(problem, xi)
    return start, torch.zeros_like(problem.y)


def test_a_descent_extrapolates_to_the_same_mode_in_fewer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accuracy = Accuracy(residual=1e-4, decrease=1e-6, steps=200, cg_steps=1000)
    starts = [observed_start(seed) for seed in range(7, 13)]
    found = [descend(*start, accuracy)[0] for start in starts]
    monkeypatch.setattr(Steps, "extrapolated", lambda self: None)
    plain = [descend(*start, accuracy)[0] for start in starts]
    assert sum(one.steps for one in found) < 0.95 * sum(one.steps for one in plain)
    for one, other in zip(found, plain, strict=True):
        assert one.iterate.energy == pytest.approx(other.iterate.energy, abs=1e-4)


def test_a_line_search_is_lower_than_a_step_and_half_of_it() -> None:
    """Gauss-Newton leaves the curvature of the response out, and overshoots or falls short."""
    shorter = 0
    for seed in range(1, 5):
        iterate, z = observed_start(seed)
        for _ in range(8):
            solve, step = gauss_newton(iterate, z, 1e-6, max_steps=1000)
            lowest = line_search(iterate, step)
            assert lowest is not None
            torch.testing.assert_close(iterate.problem.root.matmul(step.xi), step.field)
            energies = [iterate.moved(step, t).energy for t in (1.0, 0.5)]
            reach = float(step.field.abs().max())
            assert lowest.energy < iterate.energy
            if reach < 1.0:
                assert lowest.energy <= min(energies)
                shorter += lowest.energy < energies[0]
            iterate, z = lowest, solve.x
    assert shorter > 0
