"""Kernels: profiles, derivatives, spectral densities, parameters, refusals."""

import math
from collections.abc import Callable

import pytest
import scipy.integrate
import scipy.special
import torch
from torch import Tensor

from dustmap.gp.covariances import ClosedForm
from dustmap.gp.functionals import Derivatives
from dustmap.gp.kernels import (
    AbstractProfile,
    Matern,
    Matern12,
    Matern12Profile,
    Matern32,
    Matern32Profile,
    Matern52,
    Matern52Profile,
    MaternProfile,
    ScaledKernel,
    SquaredExponential,
    SquaredExponentialProfile,
    StationaryKernel,
    SumKernel,
)
from tests.contracts.kernels import kernel_derivative, radial_fourier, textbook
from tests.gp.parameters import traced

PROFILES: list[AbstractProfile] = [
    Matern12Profile(),
    Matern32Profile(),
    Matern52Profile(),
    SquaredExponentialProfile(),
]
SMOOTH = PROFILES[1:]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_value_matches_the_textbook(profile: AbstractProfile) -> None:
    r = torch.tensor([1e-6, 0.03, 0.7, 2.0, 9.0], dtype=torch.float64)
    expected = [textbook(profile.name, v) for v in r.tolist()]
    assert profile.value(r).tolist() == pytest.approx(expected, rel=1e-10)
    assert profile.value(torch.zeros(1)).item() == 1.0


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_slope_and_curvature_are_derivatives(profile: AbstractProfile) -> None:
    r = torch.linspace(0.05, 4, 40, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(profile.value(r).sum(), r)
    (second,) = torch.autograd.grad(profile.slope(r).sum(), r)
    torch.testing.assert_close(profile.slope(r), first / r, rtol=1e-12, atol=0)
    torch.testing.assert_close(profile.curvature(r), second / r, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_spectral_density_is_the_fourier_transform(profile: AbstractProfile, dim: int) -> None:
    s = [0.0, 0.4, 1.3, 3.0]
    expected = [radial_fourier(profile, v, dim) for v in s]
    computed = profile.spectral_density(torch.tensor(s, dtype=torch.float64), dim)
    assert computed.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@pytest.mark.parametrize("t", [1e-6, 1e-3, 0.05, 0.3, 0.57, 0.58, 1.0, 4.0, 30.0])
def test_second_antiderivative_keeps_relative_accuracy(profile: AbstractProfile, t: float) -> None:
    nodes, weights = scipy.special.roots_legendre(200)
    u = torch.tensor(0.5 * t * (nodes + 1), dtype=torch.float64)
    w = torch.tensor(0.5 * t * weights, dtype=torch.float64)
    expected = (w * (t - u) * profile.value(u)).sum().item()
    computed = profile.second_antiderivative(torch.tensor([t, -t], dtype=torch.float64))
    assert computed.tolist() == pytest.approx([expected, expected], rel=3e-13, abs=0)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_second_antiderivative_at_zero_and_gradient(profile: AbstractProfile) -> None:
    assert profile.second_antiderivative(torch.zeros(2)).tolist() == [0.0, 0.0]
    t = torch.tensor([1e-4, 0.2, 0.9, 2.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(profile.second_antiderivative, (t,))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@pytest.mark.parametrize("tolerance", [1e-3, 1e-7, 1e-12])
def test_cutoff_is_where_the_profile_falls_below(
    profile: AbstractProfile, tolerance: float
) -> None:
    edge = torch.tensor(profile.cutoff(tolerance), dtype=torch.float64)
    assert profile.value(edge).item() == pytest.approx(tolerance, rel=1e-9)


def integral_along_track(value: Callable[[Tensor], Tensor], b: float, t: float) -> float:
    """∫_0^t f(√(b² + τ²)) dτ by adaptive quadrature from the kink at τ = 0."""

    def at(tau: float) -> float:
        return value(torch.tensor(math.hypot(b, tau), dtype=torch.float64)).item()

    return float(scipy.integrate.quad(at, 0, t, epsabs=1e-12, epsrel=1e-12, limit=400)[0])


TRACKS = [(0.0, 0.3), (1e-7, 2.0), (1e-3, 1e-3), (0.04, 5.0), (0.5, 0.2), (1.3, 9.0), (3.0, 40.0)]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_track_integrals_match_quadrature_and_are_odd(profile: AbstractProfile) -> None:
    b, t = torch.tensor(TRACKS, dtype=torch.float64).unbind(-1)
    expected = [integral_along_track(profile.value, *track) for track in TRACKS]
    computed = profile.track_integral(b.square(), t)
    assert computed.tolist() == pytest.approx(expected, abs=1e-8)
    assert torch.equal(profile.track_integral(b.square(), -t), -computed)
    assert profile.track_integral(b.square(), 0 * t).abs().max() == 0


@pytest.mark.parametrize("profile", SMOOTH, ids=lambda p: p.name)
def test_slope_track_integrals_match_quadrature(profile: AbstractProfile) -> None:
    b, t = torch.tensor(TRACKS, dtype=torch.float64).unbind(-1)
    expected = [integral_along_track(profile.slope, *track) for track in TRACKS]
    computed = profile.slope_track_integral(b.square(), t)
    assert computed.tolist() == pytest.approx(expected, abs=3e-8)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_track_integrals_are_differentiable(profile: AbstractProfile) -> None:
    b_squared = torch.tensor([0.01, 0.3, 2.0, 9.0], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.2, -0.7, 3.0, -5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(profile.track_integral, (b_squared, t), atol=2e-6)
    on_track = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    value = profile.track_integral(on_track, torch.tensor([0.5, 0.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), on_track)
    assert bool(torch.isfinite(gradient).all())


def test_no_slope_integral_of_matern12() -> None:
    with pytest.raises(ValueError, match="matern12"):
        Matern12Profile().slope_track_integral(torch.zeros(1), torch.zeros(1))


def test_derivatives_at_zero_displacement_are_finite() -> None:
    zero, a = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[0.6, 0.8]]).double()
    for make, curvature in ((Matern32, 3.0), (Matern52, 5 / 3), (SquaredExponential, 1.0)):
        kernel, (length, _) = traced(make(2.0, 1.0, 2))
        variance = kernel_derivative(kernel, zero, a, a)
        assert variance.item() == pytest.approx(curvature / 4)
        gradient = torch.autograd.grad(variance.sum(), length)[0]
        assert gradient.item() == pytest.approx(-2 * curvature / 4)
        assert kernel_derivative(kernel, zero, a).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [Matern12, Matern32, Matern52, SquaredExponential])
def test_places_whose_squares_are_no_numbers_are_independent(
    make: Callable[..., StationaryKernel], dtype: torch.dtype
) -> None:
    far = torch.tensor([[0.5, torch.finfo(dtype).max / 4], [1e30, -1e30]], dtype=dtype)
    kernel, a = make(1.0, 1.0, 2), torch.tensor([[0.6, 0.8]], dtype=dtype)
    assert kernel(far).tolist() == [0.0, 0.0]
    if kernel.terms()[0].profile.derivatives:
        near = torch.tensor([[0.5, 1e3]], dtype=dtype)
        assert kernel_derivative(kernel, near, a).item() == 0.0


def test_sum_and_scaling_act_on_values() -> None:
    a, b = Matern12(1.0, 2.0, 2), Matern32([1.0, 3.0], 0.5)
    dx = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close((a + b)(dx), a(dx) + b(dx))
    torch.testing.assert_close((3.0 * a)(dx), 3 * a(dx))
    assert isinstance(a + b, SumKernel)
    assert isinstance(a * 2.0, ScaledKernel)
    assert len((2.0 * (a + b)).parameters()) == 5
    assert (a + b).variance().item() == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengthscale": 0.0, "dim": 2}, "lengthscale must be positive"),
        ({"lengthscale": [1.0, -1.0]}, "lengthscale must be positive"),
        ({"lengthscale": float("nan"), "dim": 1}, "lengthscale must be positive"),
        ({"lengthscale": 1.0, "variance": 0.0, "dim": 1}, "variance must be positive"),
        ({"lengthscale": 1.0, "variance": float("inf"), "dim": 1}, "variance must be positive"),
        ({"lengthscale": 1.0}, "dim is missing"),
        ({"lengthscale": [1.0, 2.0], "dim": 3}, "one number or one per axis"),
        ({"lengthscale": 1.0, "dim": 0}, "dim must be at least 1"),
    ],
)
def test_bad_parameters_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Matern32(**arguments)  # type: ignore[arg-type]


def test_dimension_mismatch_and_bad_factor_are_refused() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        Matern32(1.0, dim=2) + Matern32(1.0, dim=3)
    with pytest.raises(ValueError, match="factor must be positive"):
        Matern32(1.0, dim=2) * 0.0


def test_derivative_of_matern12_is_refused_by_name() -> None:
    kernel = Matern12(1.0, dim=2) + Matern32(1.0, dim=2)
    dx = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"(?s)Derivatives.*matern12"):
        kernel_derivative(kernel, dx, dx)
    with pytest.raises(ValueError, match=r"(?s)Derivatives.*matern12"):
        kernel_derivative(kernel, dx, dx, dx)


@pytest.mark.parametrize("nu", [0.03, 1 / 3, 0.8, 1.01, 1.05, 1.2, 1.6, 2.3])
def test_profiles_of_any_smoothness_near_zero(nu: float) -> None:
    """F_j(z) = 2^(1-ν)/Γ(ν) z^(ν-j) K_(ν-j)(z), scipy's, down to where products are round-off."""
    r = torch.logspace(-12, 0.5, 200, dtype=torch.float64)
    z = math.sqrt(2 * nu) * r.numpy()
    factor = 2 ** (1 - nu) / scipy.special.gamma(nu)
    for order, values in enumerate((MaternProfile(nu).value(r), MaternProfile(nu).slope(r))):
        bessel = factor * z ** (nu - order) * scipy.special.kv(abs(nu - order), z)
        expected = torch.from_numpy((-2 * nu) ** order * bessel)
        torch.testing.assert_close(values, expected, rtol=1e-11, atol=0.0)


@pytest.mark.parametrize("nu", [1.05, 1.1, 1.3, 1.5, 2.0])
def test_slopes_of_a_field_have_their_variance(nu: float) -> None:
    """Var ∂ρ/∂x = ν/(ν − 1) σ²/ℓ², and as much between places next to each other."""
    kernel = Matern(nu, 2.0, 3.0, dim=1)
    x, along = torch.tensor([[0.0], [1e-30]]).double(), torch.ones(2, 1).double()
    slopes, covariances = Derivatives(x, along), ClosedForm()
    expected = torch.full((2,), nu / (nu - 1) * 3.0 / 4.0, dtype=torch.float64)
    torch.testing.assert_close(covariances.variance(kernel, slopes), expected, rtol=1e-9, atol=0.0)
    between = covariances.between(kernel, slopes, slopes)[0, 1]
    assert 0.99 < float(between / expected[0]) < 1.0 + 1e-12


def test_profiles_compare_by_type() -> None:
    assert Matern32Profile() == Matern32Profile()
    assert len({Matern32Profile(), Matern32Profile(), Matern52Profile()}) == 2
