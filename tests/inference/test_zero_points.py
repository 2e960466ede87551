"""Zero points of groups of data, against dense linear algebra."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.engines import EvidenceSettings, ExactEngine, ExactSettings, Problem, Watch
from dustmap.errors import UserError
from dustmap.gp import (
    Batch,
    ConstantMean,
    GPModel,
    GridPrior,
    Parameters,
    RegularGrid,
    ZeroPoints,
)
from dustmap.gp.features import GroupedFeatures, LocalFeatures, field_features, interpolation
from dustmap.gp.functionals import LineIntegrals, PointValues, groups_of, without_groups
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GridModel,
    LogNormalModel,
    MGVISettings,
    SolveSettings,
    fit_mgvi,
    solve_global,
)
from dustmap.inference.evidence._evidence import Moments, gradient_values
from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from tests.combinations import covering
from tests.inference.gridded import energy_gradient

STD = 0.3
NODES = {1: (12,), 2: (6, 5), 3: (4, 4, 3)}
COUNT = 3
SHARES = (0.5, 0.3, 0.2)
PRIORS = {
    "independent": ZeroPoints(COUNT, STD),
    "relative": ZeroPoints(COUNT, STD, shares=SHARES),
}


def rays(dim: int, n: int, seed: int, groups: bool = True) -> LineIntegrals:
    """n segments in the unit cube, of groups 0, 1, 2 by turns."""
    generator = torch.Generator().manual_seed(seed)
    start, end = torch.rand(2, n, dim, dtype=torch.float64, generator=generator)
    segments = LineIntegrals.segment(start, end)
    return replace(segments, groups=torch.arange(n) % COUNT) if groups else segments


def covariance_of(points: ZeroPoints) -> Tensor:
    """Cov b (G, G), by the definition."""
    one = torch.eye(COUNT, dtype=torch.float64)
    if not points.shares:
        return points.std**2 * one
    w = torch.tensor(points.shares, dtype=torch.float64)
    common = torch.ones(COUNT, dtype=torch.float64)[:, None] * w
    root = points.std * (one - common)
    covariance: Tensor = root @ root.mT
    return covariance


def grouped_model(
    dim: int, learn_mean: bool = True, points: ZeroPoints = PRIORS["independent"]
) -> GridModel:
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, NODES[dim])
    prior = GridPrior.padded(Matern32(0.4, 1.2, dim=dim), grid, dtype=torch.float64, padding=1.0)
    features = GroupedFeatures(LocalFeatures(prior), points)
    return GridModel(features, ConstantMean(0.5, learn=learn_mean), GaussianLikelihood(scale=1.2))


def observed(dim: int, n: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(5)
    functional = rays(dim, n, 1)
    y = 0.4 + 0.3 * torch.randn(n, dtype=torch.float64, generator=generator)
    y = y + torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64)[torch.arange(n) % COUNT]
    return Batch(functional, y, 0.01 * (0.5 + torch.rand(n, dtype=torch.float64)))


class Dense:
    """y ~ N(H β, Φ Φᵀ + G B Gᵀ + Σ), B = Cov b, β flat or known, every matrix written out."""

    def __init__(self, model: GridModel, data: Batch) -> None:
        assert isinstance(model.features, GroupedFeatures)
        self.model, self.field = model, model.features.inner
        self.phi = self.field.operator(without_groups(data.functional)).to_dense()
        self.G = torch.zeros(len(data), COUNT, dtype=torch.float64)
        self.G[torch.arange(len(data)), torch.arange(len(data)) % COUNT] = 1.0
        self.sigma = model.likelihood.noise_variance(data).detach()
        self.sigma = self.sigma + self.field.residual_variance(data.functional).detach()
        self.B = covariance_of(model.features.zero_points)
        V = self.phi @ self.phi.mT + self.G @ self.B @ self.G.mT + torch.diag(self.sigma)
        self.inverse = torch.linalg.inv(V)
        self.H = model.mean.basis(data.functional)
        self.beta = model.mean.coefficients().detach()
        self.spread = torch.zeros(1, 1, dtype=torch.float64)
        if model.mean.is_learned:
            self.spread = torch.linalg.inv(self.H.mT @ self.inverse @ self.H)
            self.beta = self.spread @ self.H.mT @ self.inverse @ data.y
        self.residual = data.y - self.H @ self.beta

    def posterior(self, H: Tensor, cross: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of quantities of mean H β, covariance `cross` with y and `prior`."""
        gain = cross @ self.inverse
        u = H - gain @ self.H
        return (
            H @ self.beta + gain @ self.residual,
            prior - gain @ cross.mT + u @ self.spread @ u.mT,
        )


@pytest.mark.parametrize(
    ("learn_mean", "dim", "prior"), covering([False, True], [1, 2, 3], [*PRIORS])
)
def test_field_and_zero_points_have_the_dense_posterior(
    dim: int, learn_mean: bool, prior: str
) -> None:
    model, data = grouped_model(dim, learn_mean, PRIORS[prior]), observed(dim)
    dense = Dense(model, data)
    solution = solve_global(model, data, SolveSettings(rtol=1e-9, samples=600, fit_mean=learn_mean))
    posterior = solution.posterior
    none = torch.zeros(COUNT, 1, dtype=torch.float64)
    mean, covariance = dense.posterior(none, dense.B @ dense.G.mT, dense.B)
    found = posterior.zero_points()
    assert found is not None
    torch.testing.assert_close(found.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std, covariance.diagonal().sqrt(), atol=0, rtol=0.13)

    other = rays(dim, 9, 2)
    phi = dense.field.operator(without_groups(other)).to_dense()
    H, left = model.mean.basis(other), dense.field.residual_variance(other).detach()
    cross, own = phi @ dense.phi.mT, phi @ phi.mT + torch.diag(left)
    mean, covariance = dense.posterior(H, cross, own)
    true = posterior.predict(without_groups(other))
    torch.testing.assert_close(true.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(true.std, covariance.diagonal().sqrt(), atol=0, rtol=0.13)
    G = dense.G[: len(other)]
    mean, covariance = dense.posterior(
        H, cross + G @ dense.B @ dense.G.mT, own + G @ dense.B @ G.mT
    )
    measured = posterior.predict(other)
    torch.testing.assert_close(measured.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(measured.std, covariance.diagonal().sqrt(), atol=0, rtol=0.13)

    strange = replace(other, groups=torch.full((len(other),), -1))
    unknown = posterior.predict(strange)
    torch.testing.assert_close(unknown.mean, true.mean)
    torch.testing.assert_close(unknown.variance, true.variance + STD**2)
    nodes = field_features(model.features).prior.grid.points()  # type: ignore[attr-defined]
    at_nodes = posterior.at_nodes()
    torch.testing.assert_close(at_nodes.mean, posterior.predict(PointValues(nodes)).mean)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_evidence_has_its_dense_gradient(dim: int) -> None:
    """At moments that are exact: deviations √K times the columns of Λ^{-1/2}, and prior draws √K
    times those of I, K of each."""
    model, data = grouped_model(dim), observed(dim)
    parameters = Parameters.of(model, without=("mean",))
    theta = parameters.theta.requires_grad_()
    there = parameters.build(theta)
    phi = there.features.rows(data.functional).phi
    sigma = there.sigma(data)
    residual = data.y - model.mean.values(data.functional).detach()
    V = phi @ phi.mT + torch.diag(sigma)
    log_evidence = -0.5 * (residual @ torch.linalg.solve(V, residual) + torch.logdet(V))
    expected = torch.autograd.grad(log_evidence, theta)[0]
    phi, sigma = phi.detach(), sigma.detach()
    K = phi.shape[1]
    precision = torch.eye(K, dtype=torch.float64) + phi.mT @ (phi / sigma[:, None])
    mean = torch.linalg.solve(precision, phi.mT @ (residual / sigma))
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    draws = K**0.5 * torch.eye(K, dtype=torch.float64)
    for prior_draws in (None, draws):
        moments = Moments(mean, K**0.5 * root.mT, prior_draws)
        leaf = theta.detach().clone().requires_grad_()
        fresh = parameters.build(leaf)
        found = gradient_values(fresh, leaf, data, moments)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def log_normal_model(
    dim: int, variance: float, points: ZeroPoints = PRIORS["independent"]
) -> LogNormalModel:
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, NODES[dim])
    prior = GridPrior.padded(
        Matern32(0.4, variance, dim=dim).fixed(), grid, dtype=torch.float64, padding=1.0
    )

    def rows(functional):  # type: ignore[no-untyped-def]
        return interpolation(functional, grid, dtype=torch.float64)

    return LogNormalModel(prior, ConstantMean(0.0), GaussianLikelihood(), rows, 0.02, points)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_log_normal_energy_has_its_gradient_and_metric(dim: int) -> None:
    model = log_normal_model(dim, 1.0, PRIORS["relative"])
    problem = LogNormalProblem.of(model, observed(dim))
    generator = torch.Generator().manual_seed(0)
    xi = 0.5 * torch.randn(problem.n_latent, generator=generator, dtype=torch.float64)
    delta = 0.3 * torch.randn(2, len(xi), generator=generator, dtype=torch.float64)
    at = Iterate.at(problem, xi, torch.cat([delta, -delta]))
    gradient, step = energy_gradient(at), 1e-6
    for place in [0, len(xi) // 2, *range(len(xi) - COUNT - 1, len(xi))]:
        shift = torch.zeros_like(xi)
        shift[place] = step
        up, down = (Iterate.at(problem, xi + sign * shift, at.deviations) for sign in (1.0, -1.0))
        slope = (up.energy - down.energy) / (2 * step)
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-5, abs=1e-5)
    eye = torch.eye(len(xi), dtype=torch.float64)
    J = at.tangent.matmul(eye).mT
    z = torch.eye(len(problem.y), dtype=torch.float64)
    torch.testing.assert_close(at.tangent.rmatmul(z), J)
    root = problem.noise.rsqrt()[:, None]
    torch.testing.assert_close(at.tangent.gram().to_dense(), z + root * (J @ J.mT) * root.mT)


def test_a_nearly_linear_log_normal_field_has_the_dense_zero_points() -> None:
    model = log_normal_model(2, 0.02**2)
    grid, data = model.prior.lattice, observed(2, 60)
    data = replace(data, noise_variance=torch.full_like(data.y, 0.02**2))
    problem, one = LogNormalProblem.of(model, data), torch.ones(grid.size, dtype=torch.float64)
    flat, generator = problem.rows.matmul(one), torch.Generator().manual_seed(3)
    eye = torch.eye(problem.n_latent, dtype=torch.float64)
    J = problem.tangent(one, eye[0, -COUNT:]).matmul(eye).mT
    white = torch.randn(len(eye) + len(flat), generator=generator, dtype=torch.float64)
    y = flat + J @ white[: len(eye)] + 0.02 * white[len(eye) :]
    data = replace(data, y=y)
    precision = eye + J.mT @ (J / problem.noise[:, None])
    mean = STD * torch.linalg.solve(precision, J.mT @ ((y - flat) / problem.noise))[-COUNT:]
    std = STD * torch.linalg.inv(precision).diagonal().sqrt()[-COUNT:]
    for curved in (False, True):
        fit = fit_mgvi(model, data, MGVISettings(samples=100, curved=curved, residual=1e-3))
        found = fit.posterior.zero_points()
        assert found is not None
        assert float(((found.mean - mean) / std).abs().max()) < 0.15
        torch.testing.assert_close(found.std, std, rtol=0.3, atol=0)
        own, true = (
            fit.posterior.predict(f) for f in (data.functional, without_groups(data.functional))
        )
        torch.testing.assert_close(own.mean - true.mean, found.mean[torch.arange(60) % COUNT])
        strange = replace(data.functional, groups=torch.full((60,), COUNT))  # type: ignore[type-var]
        unknown = fit.posterior.predict(strange)
        torch.testing.assert_close(unknown.variance, true.variance + STD**2)


def test_shares_are_the_precisions_of_groups() -> None:
    data = observed(2, 31)
    assert data.noise_variance is not None
    points = ZeroPoints.of(data.functional, STD, variance=data.noise_variance)
    assert points is not None
    precision = data.noise_variance.reciprocal()
    w = torch.stack([precision[torch.arange(31) % COUNT == g].sum() for g in range(COUNT)])
    w = w / w.sum()
    torch.testing.assert_close(torch.tensor(points.shares, dtype=torch.float64), w)
    root = points.offsets(torch.eye(COUNT, dtype=torch.float64)).mT
    torch.testing.assert_close(root @ root.mT, covariance_of(points))
    torch.testing.assert_close(w @ root, torch.zeros_like(w))
    columns = points.columns(data.functional, w)
    torch.testing.assert_close(columns.to_dense(), root[torch.arange(31) % COUNT])
    eye = torch.eye(31, dtype=torch.float64)
    torch.testing.assert_close(columns.rmatmul(eye), columns.to_dense())


def test_groups_follow_their_rays_and_are_checked() -> None:
    some = rays(2, 6, 0)
    groups = groups_of(some[torch.tensor([4, 1])])
    assert groups is not None
    assert groups.tolist() == [1, 1]
    assert groups_of(without_groups(some)) is None
    assert groups_of(PointValues(some.origin)) is None
    assert ZeroPoints.of(some, 0.1) == ZeroPoints(3, 0.1)
    assert ZeroPoints.of(without_groups(some), 0.1) is None
    with pytest.raises(UserError, match=r"int64 \(6,\)"):
        replace(some, groups=torch.zeros(6))
    with pytest.raises(UserError, match="positive std"):
        ZeroPoints(2, 0.0)
    with pytest.raises(UserError, match="as many shares, or none, got 1"):
        ZeroPoints(2, 0.1, shares=(1.0,))


def test_engines_of_dense_covariances_refuse_zero_points() -> None:
    functional = rays(3, 12, 0)
    y = torch.ones(12, dtype=torch.float64)
    model = GPModel(
        Matern32(0.4, 1.0, dim=3), ConstantMean(0.0), GaussianLikelihood(), ZeroPoints(3, 0.1)
    )
    engine = ExactEngine(ExactSettings(EvidenceSettings(rows=12, max_steps=2), 2**30))
    with pytest.raises(UserError, match="zero points of groups are for line integrals"):
        engine.fit(Problem(model, Batch(functional, y, 0.01 * y)), Watch())
