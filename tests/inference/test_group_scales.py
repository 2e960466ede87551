"""Scales of groups of data, y = (1 + s_g) f + b_g + noise, against dense algebra."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import (
    Batch,
    ConstantMean,
    GPModel,
    GridPrior,
    Parameters,
    RegularGrid,
    ZeroPoints,
    variance_of_pairs,
)
from dustmap.gp.features import GroupedFeatures, LocalFeatures, interpolation
from dustmap.gp.functionals import (
    LineIntegrals,
    PointValues,
    Sharded,
    responses_of,
    with_responses,
    without_groups,
)
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GlobalSettings,
    GridModel,
    LogNormalModel,
    MGVISettings,
    SolveSettings,
    fit_mgvi,
    fit_with_scales,
    solve_global,
)
from dustmap.inference.evidence._evidence import Moments, gradient_values
from dustmap.inference.lognormal._lognormal_descent import Accuracy, descend
from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.linalg import Alone
from tests.inference.gridded import energy_gradient
from tests.inference.test_zero_points import COUNT, NODES, STD, rays

SCALE = 0.2
POINTS = ZeroPoints(COUNT, STD, SCALE)
TRUE_SCALES = torch.tensor([0.1, 0.0, -0.1], dtype=torch.float64)


def groups_matrix(n: int) -> Tensor:
    """G (n, COUNT) of groups by turns."""
    return torch.eye(COUNT, dtype=torch.float64)[torch.arange(n) % COUNT]


def box(dim: int) -> RegularGrid:
    return RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, NODES[dim])


def observed(dim: int, n: int = 24) -> Batch:
    """Rays with responses near their length, and measurements of no model."""
    generator = torch.Generator().manual_seed(5)
    functional = rays(dim, n, 1)
    length = (functional.edges[:, 1] - functional.edges[:, 0]).double()
    y, white, spread = torch.randn(3, n, dtype=torch.float64, generator=generator)
    functional = replace(functional, responses=length * (1.0 + 0.2 * white))
    return Batch(functional, 0.4 + 0.3 * y, 0.01 * (1.0 + 0.3 * spread.abs()))


def grid_model(dim: int) -> GridModel:
    prior = GridPrior.padded(Matern32(0.4, 1.2, dim=dim), box(dim), dtype=torch.float64, padding=1)
    features = GroupedFeatures(LocalFeatures(prior), POINTS)
    return GridModel(features, ConstantMean(0.5), GaussianLikelihood(scale=1.2))


class Dense:
    """y ~ N(H β, Φ Φᵀ + τ² G Gᵀ + κ² F G Gᵀ F + Σ), F = diag(f̄), β flat, all written out."""

    def __init__(self, model: GridModel, data: Batch, responses: Tensor) -> None:
        assert isinstance(model.features, GroupedFeatures)
        self.field, self.std = model.features.inner, model.features.zero_points.std
        self.centring = torch.eye(COUNT, dtype=torch.float64)
        if model.features.zero_points.centred:
            self.centring -= 1.0 / COUNT
        self.phi = self.field.operator(without_groups(data.functional)).to_dense()
        self.G, self.responses = groups_matrix(len(data)), responses
        sigma = model.likelihood.noise_variance(data).detach()
        sigma = sigma + self.field.residual_variance(data.functional).detach()
        V = self.phi @ self.phi.mT + self.of_groups(self) + torch.diag(sigma)
        self.inverse, self.H = torch.linalg.inv(V), model.mean.basis(data.functional)
        self.spread = torch.linalg.inv(self.H.mT @ self.inverse @ self.H)
        self.beta = self.spread @ self.H.mT @ self.inverse @ data.y
        self.residual = data.y - self.H @ self.beta

    def of_groups(self, other: "Dense", responses: Tensor | None = None) -> Tensor:
        """Covariance of what groups add to other measurements (K, N), of responses (K,)."""
        f = self.responses if responses is None else responses
        G = groups_matrix(len(f))
        scaled = (f[:, None] * G @ self.centring) @ (other.responses[:, None] * other.G).mT
        return self.std**2 * G @ other.G.mT + SCALE**2 * scaled

    def posterior(self, H: Tensor, cross: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of quantities of mean H β, covariance `cross` with y and
        `prior`."""
        gain = cross @ self.inverse
        u = H - gain @ self.H
        covariance = prior - gain @ cross.mT + u @ self.spread @ u.mT
        return H @ self.beta + gain @ self.residual, covariance.diagonal().sqrt()

    def scales(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (COUNT,) of s."""
        cross = SCALE**2 * (self.responses[:, None] * self.G @ self.centring).mT
        prior = SCALE**2 * self.centring
        return self.posterior(torch.zeros(COUNT, 1, dtype=torch.float64), cross, prior)

    def fitted(self) -> Tensor:
        """Posterior mean (N,) of the field's part of the data."""
        prior = self.phi @ self.phi.mT
        return self.posterior(self.H, prior, prior)[0]


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_field_zero_points_and_scales_have_the_dense_posterior(dim: int) -> None:
    model, data = grid_model(dim), observed(dim)
    responses = responses_of(data.functional)
    assert responses is not None
    dense = Dense(model, data, responses)
    settings = SolveSettings(rtol=1e-9, samples=600, fit_mean=True)
    posterior = solve_global(model, data, settings).posterior
    found, points = posterior.scales(), posterior.zero_points()
    assert found is not None
    assert points is not None
    mean, std = dense.scales()
    torch.testing.assert_close(found.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std, std, atol=0, rtol=0.13)
    eye = STD**2 * torch.eye(COUNT, dtype=torch.float64)
    none = torch.zeros(COUNT, 1, dtype=torch.float64)
    mean, std = dense.posterior(none, STD**2 * dense.G.mT, eye)
    torch.testing.assert_close(points.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(points.std, std, atol=0, rtol=0.13)

    other = rays(dim, 9, 2)
    phi = dense.field.operator(without_groups(other)).to_dense()
    H, left = model.mean.basis(other), dense.field.residual_variance(other).detach()
    cross, prior = phi @ dense.phi.mT, phi @ phi.mT + torch.diag(left)
    true, measured = posterior.predict(without_groups(other)), posterior.predict(other)
    mean, std = dense.posterior(H, cross, prior)
    torch.testing.assert_close(true.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(true.std, std, atol=0, rtol=0.13)
    # Measurements are linearised about the mean of the field that they see.
    f, G = true.mean, groups_matrix(len(other))
    own = STD**2 * G @ G.mT + SCALE**2 * (f[:, None] * G) @ (f[:, None] * G).mT
    mean, std = dense.posterior(H, cross + dense.of_groups(dense, f), prior + own)
    torch.testing.assert_close(measured.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(measured.std, std, atol=0, rtol=0.13)
    drawn = posterior.sample(other, 600, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.std(0), std, atol=0, rtol=0.2)

    strange = posterior.predict(replace(other, groups=torch.full((9,), -1)))
    torch.testing.assert_close(strange.mean, true.mean)
    added = STD**2 + SCALE**2 * f.square()
    torch.testing.assert_close(strange.variance, true.variance + added)


def test_the_evidence_has_its_dense_gradient() -> None:
    """At moments that are exact: deviations √K times the columns of Λ^{-1/2}."""
    model, data = grid_model(2), observed(2)
    parameters = Parameters.of(model, without=("mean",))
    theta = parameters.theta.requires_grad_()
    there = parameters.build(theta)
    phi, sigma = there.features.rows(data.functional).phi, there.sigma(data)
    residual = data.y - model.mean.values(data.functional).detach()
    V = phi @ phi.mT + torch.diag(sigma)
    log_evidence = -0.5 * (residual @ torch.linalg.solve(V, residual) + torch.logdet(V))
    expected = torch.autograd.grad(log_evidence, theta)[0]
    phi, sigma = phi.detach(), sigma.detach()
    K = phi.shape[1]
    assert there.features.n_features == K
    torch.testing.assert_close(there.features.operator(data.functional).to_dense(), phi)
    precision = torch.eye(K, dtype=torch.float64) + phi.mT @ (phi / sigma[:, None])
    mean = torch.linalg.solve(precision, phi.mT @ (residual / sigma))
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    leaf = theta.detach().clone().requires_grad_()
    found = gradient_values(parameters.build(leaf), leaf, data, Moments(mean, K**0.5 * root.mT))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def scaled_sky(density: Tensor, grid: RegularGrid, n: int, noise: float, seed: int) -> Batch:
    """Measurements of a density at the nodes by groups of TRUE_SCALES and no zero points."""
    functional = rays(grid.dim, n, seed)
    f = interpolation(without_groups(functional), grid, dtype=torch.float64).matmul(density)
    generator = torch.Generator().manual_seed(seed)
    error = noise * torch.randn(n, dtype=torch.float64, generator=generator)
    y = (1.0 + groups_matrix(n) @ TRUE_SCALES) * f + error
    return Batch(functional, y, torch.full_like(y, noise**2))


def wave(grid: RegularGrid) -> Tensor:
    """A density (M,) between 0.6 and 1.4."""
    x = grid.points()
    return 1.0 + 0.4 * torch.sin(5.0 * x[:, 0]) * torch.cos(4.0 * x[:, -1])


def test_the_scales_of_a_gaussian_fit_are_those_of_its_fixed_point() -> None:
    grid = box(2)
    data = scaled_sky(wave(grid), grid, 90, 0.01, 1)
    model = GPModel(
        Matern32(0.6, 0.3, dim=2).fixed(),
        ConstantMean(0.1),
        GaussianLikelihood().fixed(),
        ZeroPoints(COUNT, 1e-3, SCALE),
    )
    # The matrices take residuals as independent.
    settings = GlobalSettings(
        samples=200, rtol=1e-9, order=4, dtype=torch.float64, shared_residuals=False
    )
    fit = fit_with_scales(model, data, grid, settings)
    assert 2 <= len(fit.scale_shifts) <= 4
    assert fit.scale_shifts[-1] < 0.1 < fit.scale_shifts[0]
    assert fit.report["scale_shifts_over_the_noise"] == list(fit.scale_shifts)

    features = fit.model.features
    assert isinstance(features, GroupedFeatures)
    centred = replace(features, zero_points=replace(features.zero_points, centred=True))
    gridded = GridModel(centred, fit.gp.mean, fit.gp.noise)
    responses = torch.ones_like(data.y)
    for _ in range(12):
        dense = Dense(gridded, data, responses)
        responses = dense.fitted()
    found, posterior = fit.posterior.scales(), fit.posterior
    assert found is not None
    mean, std = dense.scales()
    assert float(((found.mean - mean) / std).abs().max()) < 0.1
    common = SCALE / COUNT**0.5
    torch.testing.assert_close(found.std, (std.square() + common**2).sqrt(), rtol=0.05, atol=0)
    assert float(found.mean.mean()) == pytest.approx(0.0, abs=1e-6)
    fitted = posterior.mean(without_groups(data.functional))
    torch.testing.assert_close(fitted, responses, atol=0.002, rtol=0)

    assert float(((found.mean - TRUE_SCALES) / found.std).abs().max()) < 3.0
    apart = found.mean - found.mean[1]
    assert float((apart - TRUE_SCALES).abs().max()) < 0.02
    # The map is free of them; a measurement is not.
    other = rays(2, 30, 7)
    truth = interpolation(without_groups(other), grid, dtype=torch.float64).matmul(wave(grid))
    true, measured = posterior.predict(without_groups(other)), posterior.predict(other)
    assert float((true.mean - truth).abs().max()) < 0.05
    G = groups_matrix(30)
    gains = 1.0 + G @ found.mean
    torch.testing.assert_close(measured.mean, gains * true.mean, atol=2e-3, rtol=0)
    # What all scales have in common makes the map uncertain, and no measurement of a group.
    phi = dense.field.operator(without_groups(other)).to_dense()
    left = dense.field.residual_variance(other).detach()
    prior, cross = phi @ phi.mT + torch.diag(left), phi @ dense.phi.mT
    H, f = gridded.mean.basis(other), true.mean
    std = dense.posterior(H, cross, prior)[1]
    expected = (std.square() + (common * f).square()).sqrt()
    torch.testing.assert_close(true.std, expected, rtol=0.02, atol=0)
    of_groups, FG = dense.of_groups(dense, f), f[:, None] * G
    own = 1e-6 * G @ G.mT + SCALE**2 * FG @ dense.centring @ FG.mT
    std = dense.posterior(H, cross + of_groups, prior + own)[1]
    torch.testing.assert_close(measured.std, std, rtol=0.2, atol=0)
    strange = posterior.predict(replace(other, groups=torch.full((30,), COUNT)))
    added = 1e-6 + SCALE**2 * f.square()
    torch.testing.assert_close(strange.variance, true.variance + added)
    covariance = posterior.covariance(without_groups(other))
    torch.testing.assert_close(covariance.diagonal(), true.variance)
    drawn = posterior.sample(other, 200, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.std(0), measured.std, rtol=0.3, atol=0)
    drawn = posterior.sample(without_groups(other), 200, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.std(0), true.std, rtol=0.2, atol=0)


def log_normal_model(dim: int, variance: float, std: float = STD) -> LogNormalModel:
    grid = box(dim)
    kernel = Matern32(0.6, variance, dim=dim).fixed()
    prior = GridPrior.padded(kernel, grid, dtype=torch.float64, padding=1.0)

    def rows(functional):  # type: ignore[no-untyped-def]
        return interpolation(functional, grid, dtype=torch.float64)

    points = ZeroPoints(COUNT, std, SCALE)
    noise = GaussianLikelihood().fixed()
    return LogNormalModel(prior, ConstantMean(0.0), noise, rows, 0.3, points)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_log_normal_energy_has_its_gradient_and_metric(dim: int) -> None:
    problem = LogNormalProblem.of(log_normal_model(dim, 1.0), observed(dim))
    generator = torch.Generator().manual_seed(0)
    xi = 0.5 * torch.randn(problem.n_latent, generator=generator, dtype=torch.float64)
    delta = 0.3 * torch.randn(2, len(xi), generator=generator, dtype=torch.float64)
    at = Iterate.at(problem, xi, torch.cat([delta, -delta]))
    gradient, step = energy_gradient(at), 1e-6
    for place in [0, len(xi) // 2, *range(len(xi) - 2 * COUNT - 1, len(xi))]:
        shift = torch.zeros_like(xi)
        shift[place] = step
        up, down = (Iterate.at(problem, xi + sign * shift, at.deviations) for sign in (1.0, -1.0))
        slope = (up.energy - down.energy) / (2 * step)
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-5, abs=1e-5)

    bare = Iterate.at(problem, xi)
    eye, one = (torch.eye(n, dtype=torch.float64) for n in (len(xi), len(problem.y)))
    J = bare.tangent.matmul(eye).mT
    ends = [
        Iterate.at(problem, xi + sign * step * eye[place]).responses[0]
        for place in range(0, len(xi), 7)
        for sign in (1.0, -1.0)
    ]
    slopes = torch.stack([up - down for up, down in zip(ends[::2], ends[1::2], strict=True)])
    torch.testing.assert_close(J[:, ::7], slopes.mT / (2 * step), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bare.tangent.rmatmul(one), J)
    root = problem.noise.rsqrt()[:, None]
    torch.testing.assert_close(bare.tangent.gram().to_dense(), one + root * (J @ J.mT) * root.mT)


def independent_mode(problem: LogNormalProblem) -> Tensor:
    """ξ of least energy by quasi-Newton steps on dense matrices, with automatic derivatives."""
    eye = torch.eye(problem.n_latent, dtype=torch.float64)
    T, L, G = problem.root.matmul(eye).mT, problem.rows.to_dense(), groups_matrix(len(problem.y))
    points = problem.model.zero_points
    assert points is not None

    def energy(values: np.ndarray) -> tuple[float, np.ndarray]:
        xi = torch.from_numpy(values).requires_grad_()
        c, c_scale = xi[-2 * COUNT : -COUNT], xi[-COUNT:]
        f = L @ (problem.log_mean + T @ xi).exp()
        f = (1.0 + points.scale_std * G @ c_scale) * f + points.std * G @ c
        E = 0.5 * ((problem.y - f).square() / problem.noise).sum() + 0.5 * xi.square().sum()
        return float(E.detach()), torch.autograd.grad(E, xi)[0].numpy()

    start = np.zeros(problem.n_latent)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-7}
    return torch.from_numpy(minimize(energy, start, jac=True, method="L-BFGS-B", options=options).x)


def test_the_log_normal_mode_is_that_of_an_independent_optimiser() -> None:
    model = log_normal_model(2, 0.5)
    problem = LogNormalProblem.of(model, scaled_sky(wave(box(2)), box(2), 60, 0.02, 3))
    xi = torch.zeros(problem.n_latent, dtype=torch.float64)
    start = Iterate.at(problem, xi)
    accuracy = Accuracy(residual=1e-8, decrease=1e-12, steps=50)
    mode = descend(start, torch.zeros_like(problem.y), accuracy)[0].iterate
    torch.testing.assert_close(mode.xi, independent_mode(problem), atol=1e-4, rtol=0)


@pytest.mark.parametrize("curved", [False, True])
def test_log_normal_scales_are_recovered_within_their_errors(curved: bool) -> None:
    grid = box(2)
    data = scaled_sky(wave(grid), grid, 90, 0.02, 1)
    model = log_normal_model(2, 0.3, std=1e-3)
    fit = fit_mgvi(model, data, MGVISettings(samples=60, curved=curved))
    posterior, found = fit.posterior, fit.posterior.scales()
    assert found is not None
    assert float(((found.mean - TRUE_SCALES) / found.std).abs().max()) < 3.0
    apart = found.mean - found.mean[1]
    assert float((apart - TRUE_SCALES).abs().max()) < 0.03
    # Linearised at the mode, the scales have the errors of dense algebra.
    problem = LogNormalProblem.of(model, data)
    at = Iterate.at(problem, fit.xi)
    J = at.tangent.matmul(torch.eye(problem.n_latent, dtype=torch.float64)).mT
    metric = torch.eye(problem.n_latent, dtype=torch.float64) + J.mT @ (J / problem.noise[:, None])
    std = SCALE * torch.linalg.inv(metric).diagonal()[-COUNT:].sqrt()
    torch.testing.assert_close(found.std, std, rtol=0.35, atol=0)

    other = rays(2, 12, 7)
    true, measured = posterior.predict(without_groups(other)), posterior.predict(other)
    generator = torch.Generator().manual_seed(0)
    assert posterior.groups is not None
    white = posterior.groups.white
    b, s = white[:, :COUNT], white[:, COUNT:]
    G, f = groups_matrix(12), posterior.sample(without_groups(other), 60, generator)
    drawn = (1.0 + SCALE * s @ G.mT) * f + 1e-3 * b @ G.mT
    torch.testing.assert_close(measured.mean, drawn.mean(0))
    torch.testing.assert_close(measured.variance, variance_of_pairs(drawn))
    truth = interpolation(without_groups(other), grid, dtype=torch.float64).matmul(wave(grid))
    error = measured.mean - (1.0 + G @ TRUE_SCALES) * truth
    assert float(error.abs().max()) < 0.05
    # The common scale is known to its prior alone, and measurements far better than the field.
    assert float((measured.std / true.std).median()) < 0.5
    strange = posterior.predict(replace(other, groups=torch.full((12,), COUNT)))
    torch.testing.assert_close(strange.mean, true.mean)
    added = 1e-3**2 + SCALE**2 * (true.mean.square() + true.variance)
    torch.testing.assert_close(strange.variance, true.variance + added)


def test_scales_and_responses_are_checked() -> None:
    some = rays(2, 6, 0)
    assert ZeroPoints.of(some, 0.1, 0.2) == ZeroPoints(3, 0.1, 0.2)
    assert (ZeroPoints(3, 0.1, 0.2).n_variables, ZeroPoints(3, 0.1).n_variables) == (6, 3)
    for scale in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match="scale_std: expected at least 0"):
            ZeroPoints(2, 0.1, scale)
    with pytest.raises(UserError, match=r"responses must be \(6,\)"):
        replace(some, responses=torch.zeros(5))
    features = grid_model(2).features
    with pytest.raises(UserError, match="fit by inference"):
        features.operator(some)
    assert features.operator(without_groups(some)).shape[1] == features.n_features
    assert features.operator(PointValues(some.origin)).shape[1] == features.n_features


def test_a_fit_with_scales_needs_some() -> None:
    data, kernel = observed(2), Matern32(0.6, 0.3, dim=2).fixed()
    for points in (None, ZeroPoints(COUNT, 0.1)):
        model = GPModel(kernel, ConstantMean(0.1), GaussianLikelihood(), points)
        with pytest.raises(UserError, match="needs zero points with scale_std > 0"):
            fit_with_scales(model, data, box(2))


def test_responses_follow_their_rays() -> None:
    some, f = rays(2, 6, 0), torch.arange(6.0, dtype=torch.float64)
    order = torch.tensor([4, 1, 3])
    picked = responses_of(with_responses(some, f)[order])
    assert picked is not None
    assert picked.tolist() == [4.0, 1.0, 3.0]
    assert responses_of(without_groups(with_responses(some, f))) is None
    shared = Sharded.of(some, Alone())[order]
    assert isinstance(shared.local, LineIntegrals)
    found = responses_of(with_responses(shared, f[:3]))
    assert found is not None
    assert found.tolist() == [0.0, 1.0, 2.0]
