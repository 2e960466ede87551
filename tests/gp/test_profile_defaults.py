"""A profile needs `value` alone: its numerical defaults against quadrature and closed forms."""

import itertools
import math
from dataclasses import dataclass
from typing import final

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import torch
from torch import Tensor

from dustmap import HIPGPRegressor
from dustmap.gp import Batch, ConstantMean, ExactGP, GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm, Quadrature
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import (
    KERNELS,
    AbstractProfile,
    Matern12Profile,
    Matern32,
    Matern32Profile,
    SquaredExponential,
    SquaredExponentialProfile,
    StationaryKernel,
    kernel_named,
)
from dustmap.gp.kernels._radial import fourier_transform


@final
@dataclass(frozen=True)
class RationalQuadratic(AbstractProfile):
    """k(r) = (1 + r²/2α)^−α: smooth, with the tails of a power."""

    alpha: float = 6.0
    name = "rational-quadratic"
    derivatives = 1_000

    def value(self, r: Tensor) -> Tensor:
        return (1 + r.square() / (2 * self.alpha)).pow(-self.alpha)


@final
class HyperbolicSecant(AbstractProfile):
    """k(r) = 1 / cosh r, whose transform in 1-D is π / cosh(π s / 2)."""

    name = "hyperbolic-secant"
    derivatives = 1_000

    def value(self, r: Tensor) -> Tensor:
        return torch.exp(-r) * 2 / (1 + torch.exp(-2 * r))


@final
class PlainMatern32(AbstractProfile):
    """The value of a Matérn-3/2, and nothing else."""

    name = "plain-matern32"
    derivatives = 1

    def value(self, r: Tensor) -> Tensor:
        return Matern32Profile().value(r)


@final
class PlainGaussian(AbstractProfile):
    """The value of a squared exponential, and nothing else."""

    name = "plain-gaussian"
    derivatives = 1_000

    def value(self, r: Tensor) -> Tensor:
        return SquaredExponentialProfile().value(r)


TOYS = [RationalQuadratic(), HyperbolicSecant()]
PAIRS = [
    (PlainMatern32(), Matern32Profile()),
    (PlainGaussian(), SquaredExponentialProfile()),
]
toys = pytest.mark.parametrize("profile", TOYS, ids=lambda p: p.name)
pairs = pytest.mark.parametrize(("plain", "closed"), PAIRS, ids=lambda p: p.name)


def at(profile: AbstractProfile, r: float) -> float:
    return float(profile.value(torch.tensor(r, dtype=torch.float64)))


def radial_fourier(profile: AbstractProfile, s: float, dim: int) -> float:
    """∫ k(|x|) cos(s x_1) dx by adaptive quadrature of its radial form."""

    def radial(r: float) -> float:
        k = at(profile, r)
        if dim == 1:
            return 2 * k * math.cos(s * r)
        if dim == 2:
            return float(2 * math.pi * r * k * scipy.special.j0(s * r))
        return 4 * math.pi * r * r * k * float(scipy.special.spherical_jn(0, s * r))

    ends = [0.0, 5.0, 15.0, 40.0, 100.0]
    pieces = [
        scipy.integrate.quad(radial, a, b, limit=200, epsabs=1e-12)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return float(sum(pieces))


@toys
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_spectral_density_is_the_fourier_transform(profile: AbstractProfile, dim: int) -> None:
    s = [0.0, 0.3, 1.1, 2.5]
    expected = [radial_fourier(profile, v, dim) for v in s]
    computed = profile.spectral_density(torch.tensor(s, dtype=torch.float64), dim)
    assert computed.tolist() == pytest.approx(expected, rel=1e-8, abs=1e-9 * expected[0])


def test_spectral_density_of_the_secant() -> None:
    s = torch.linspace(0, 6, 25, dtype=torch.float64)
    expected = math.pi / torch.cosh(math.pi * s / 2)
    computed = HyperbolicSecant().spectral_density(s, 1)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)


@toys
def test_slope_and_curvature_are_derivatives(profile: AbstractProfile) -> None:
    r = torch.linspace(0.05, 4, 40, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(profile.value(r).sum(), r)
    torch.testing.assert_close(profile.slope(r), first / r, rtol=1e-12, atol=0)
    (second,) = torch.autograd.grad(profile.slope(r).sum(), r)
    torch.testing.assert_close(profile.curvature(r), second / r, rtol=1e-11, atol=1e-14)
    h, zero = 1e-4, torch.zeros(1, dtype=torch.float64)
    bend = 2 * (at(profile, h) - 1) / h**2  # k''(0) = lim k'(r) / r
    assert float(profile.slope(zero)) == pytest.approx(bend, rel=1e-6)


@toys
@pytest.mark.parametrize("t", [1e-5, 0.04, 0.9, 5.0, 60.0])
def test_second_antiderivative_is_the_double_integral(profile: AbstractProfile, t: float) -> None:
    ends = [0.0, *[e for e in (1.0, 5.0, 20.0) if e < t], t]
    pieces = [
        scipy.integrate.quad(lambda u: (t - u) * at(profile, u), a, b, epsabs=0, epsrel=1e-12)[0]
        for a, b in itertools.pairwise(ends)
    ]
    computed = profile.second_antiderivative(torch.tensor([t, -t], dtype=torch.float64))
    assert computed.tolist() == pytest.approx([sum(pieces)] * 2, rel=1e-10)


@toys
def test_track_integrals_match_quadrature(profile: AbstractProfile) -> None:
    b = torch.tensor([0.0, 0.02, 0.5, 2.0], dtype=torch.float64)
    t = torch.tensor([0.3, 1.5, 4.0, 0.7], dtype=torch.float64)
    for f, computed in (
        (profile.value, profile.track_integral(b.square(), t)),
        (profile.slope, profile.slope_track_integral(b.square(), t)),
    ):
        expected = [
            scipy.integrate.quad(
                lambda u, x=x, f=f: float(f(torch.tensor(math.hypot(x, u), dtype=torch.float64))),
                0,
                end,
                epsabs=1e-12,
            )[0]
            for x, end in zip(b.tolist(), t.tolist(), strict=True)
        ]
        assert computed.tolist() == pytest.approx(expected, abs=2e-7)


@toys
@pytest.mark.parametrize("tolerance", [0.5, 1e-7, 1e-18])
def test_cutoff_is_where_the_profile_falls_below(
    profile: AbstractProfile, tolerance: float
) -> None:
    assert at(profile, profile.cutoff(tolerance)) == pytest.approx(tolerance, rel=1e-6)


def test_a_profile_that_does_not_fall_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rational-quadratic must fall below"):
        RationalQuadratic(alpha=0.01).cutoff(1e-12)


@pairs
def test_defaults_agree_with_closed_forms(plain: AbstractProfile, closed: AbstractProfile) -> None:
    r = torch.linspace(1e-3, 6, 50, dtype=torch.float64)
    torch.testing.assert_close(plain.slope(r), closed.slope(r), rtol=1e-10, atol=1e-14)
    curved = (plain.curvature(r) - closed.curvature(r)) * r.square()
    assert float(curved.abs().max()) < 1e-10
    t = torch.tensor([0.0, 1e-6, 0.1, 1.0, 9.0, 50.0], dtype=torch.float64)
    torch.testing.assert_close(
        plain.second_antiderivative(t), closed.second_antiderivative(t), rtol=1e-12, atol=0
    )
    s = torch.linspace(0, 8, 60, dtype=torch.float64)
    for dim in (1, 2, 3):
        expected = closed.spectral_density(s, dim)
        error = (plain.spectral_density(s, dim) - expected).abs().max()
        assert float(error) < 1e-11 * float(expected[0])
    b2, along = torch.rand(2, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name in ("track_integral", "slope_track_integral"):
        error = getattr(plain, name)(b2, 4 * along) - getattr(closed, name)(b2, 4 * along)
        assert float(error.abs().max()) < 2e-7
    assert plain.cutoff(1e-9) == pytest.approx(closed.cutoff(1e-9), rel=1e-9)


@toys
def test_spectral_density_and_antiderivative_are_differentiable(profile: AbstractProfile) -> None:
    x = torch.tensor([0.4, 1.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: profile.spectral_density(s, 3), (x,))
    assert torch.autograd.gradcheck(profile.second_antiderivative, (x,))


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_grid_prior_of_a_toy_profile(dim: int) -> None:
    """R Rᵀ = K_uu and nothing is clamped; the wrapped covariance is the kernel's."""
    kernel = StationaryKernel(HyperbolicSecant(), 0.3, 1.4, dim=dim)
    grid = RegularGrid((0.0,) * dim, (0.25,) * dim, (5,) * dim)
    prior = GridPrior.padded(kernel, grid, padding=60.0 if dim == 1 else 12.0)
    R = prior.root().to_dense()
    torch.testing.assert_close(R @ R.mT, prior.dense_covariance(), rtol=0, atol=1e-12)
    assert prior.report.clamped == 0
    x = torch.cartesian_prod(*grid.axes(torch.device("cpu"))).reshape(-1, dim)
    plain = kernel(x[:, None] - x[None])
    assert float((prior.dense_covariance() - plain).detach().abs().max()) < 5e-5


def test_rays_of_a_toy_profile_agree_with_quadrature() -> None:
    kernel = StationaryKernel(RationalQuadratic(), (0.4, 0.6, 0.5), 2.0)
    ends = torch.tensor([[0.9, 0.2, 0.1], [0.3, -0.8, 0.4]], dtype=torch.float64)
    rays = LineIntegrals.from_observer(ends)
    points = PointValues(torch.tensor([[0.2, 0.1, 0.0], [0.5, -0.5, 0.3]], dtype=torch.float64))
    fine = Quadrature(60)
    for other in (rays, points):
        closed = ClosedForm().between(kernel, rays, other, None, dtype=torch.float64)
        exact = fine.between(kernel, rays, other, None, dtype=torch.float64)
        torch.testing.assert_close(closed, exact, rtol=1e-6, atol=1e-7)


def test_the_exact_process_of_a_toy_profile_is_a_normal_density() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(12, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(12, dtype=torch.float64, generator=generator)
    noise = torch.full((12,), 0.1, dtype=torch.float64)
    kernel = StationaryKernel(RationalQuadratic(), 0.5, 1.3, dim=2)
    batch = Batch(PointValues(x), y, noise)
    gp = ExactGP(kernel, ConstantMean(0.2))
    value = gp.log_evidence(batch.functional, batch.y, noise)
    r = torch.cdist(x, x) / 0.5
    K = 1.3 * (1 + r.square() / 12).pow(-6) + torch.diag(noise)
    normal = torch.distributions.MultivariateNormal(torch.full((12,), 0.2).double(), K)
    assert float(value.detach()) == pytest.approx(float(normal.log_prob(y)), rel=1e-9)  # type: ignore[no-untyped-call]


def test_kernels_by_name() -> None:
    assert list(KERNELS) == ["matern13", "matern12", "matern32", "matern52", "squared-exponential"]
    kernel = kernel_named("matern32", 0.3, 2.0, dim=2)
    dx = torch.rand(5, 2, dtype=torch.float64)
    assert torch.equal(kernel(dx), Matern32(0.3, 2.0, dim=2)(dx))
    smooth = kernel_named("squared-exponential", [0.3, 0.4])
    assert torch.equal(smooth(dx), SquaredExponential([0.3, 0.4])(dx))
    with pytest.raises(ValueError, match="expected one of matern13"):
        kernel_named("matern42", 1.0, dim=1)


@pytest.mark.parametrize(
    ("closed", "dim", "decades"),
    [
        pytest.param(Matern12Profile(), 1, 6, marks=pytest.mark.slow),
        pytest.param(Matern32Profile(), 2, 2, marks=pytest.mark.slow),
        (Matern12Profile(), 3, 2),
    ],
)
def test_many_frequencies_are_read_off_a_table_with_a_tail(
    closed: AbstractProfile, dim: int, decades: int
) -> None:
    """Beyond s = 512 a table has 50 times the nodes of one that ends at 100: one does."""
    s = torch.cat([torch.zeros(1), torch.logspace(-3, decades, 6000)]).double()
    found = fourier_transform(closed.value, s, dim, closed.cutoff(1e-16))
    expected = closed.spectral_density(s, dim)
    assert float((found - expected).abs().max() / expected[0]) < 2e-9
    few = torch.cat([torch.zeros(1), torch.logspace(-3, 6, 60)]).double()
    one = fourier_transform(closed.value, few, dim, closed.cutoff(1e-16))
    apart = one - closed.spectral_density(few, dim)
    assert float(apart.abs().max() / expected[0]) < 1e-11


def test_a_profile_of_one_method_fits_on_an_automatic_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(150, 1, generator=generator, dtype=torch.float64).numpy()
    y = np.sin(6.0 * X[:, 0]) + 0.05 * np.random.default_rng(0).standard_normal(150)
    kernel = StationaryKernel(HyperbolicSecant(), [0.3])
    for engine in ("hip", "global"):
        model = HIPGPRegressor(kernel, engine=engine, samples=4, n_learn=100).fit(X, y)
        assert model.score(X, y) > 0.99
