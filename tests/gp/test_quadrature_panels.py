"""Quadrature along rays of up to 200 length scales, against closed forms."""

import itertools
import math

import pytest
import torch
from scipy.integrate import quad

from dustmap.gp.covariances import Quadrature
from dustmap.gp.functionals import LineIntegrals, SpacedGaussLegendre
from dustmap.gp.kernels import Matern12, Matern32, Matern52, SquaredExponential, StationaryKernel
from tests.combinations import covering

LENGTH, VARIANCE = 0.7, 1.3
#: Of k_ff and K_fu, relative; a Matérn-1/2 has a kink where two points meet.
LIMITS = {Matern12: 1e-3, Matern32: 1e-4, Matern52: 1e-4, SquaredExponential: 1e-4}


def correlation(make: type, r: float) -> float:
    if make is SquaredExponential:
        return math.exp(-0.5 * r * r)
    a = {Matern12: 1.0, Matern32: math.sqrt(3.0), Matern52: math.sqrt(5.0)}[make] * r
    return {Matern12: 1.0, Matern32: 1.0 + a, Matern52: 1.0 + a + a * a / 3.0}[make] * math.exp(-a)


def variance_of_integral(make: type, d: float) -> float:
    """2 ∫₀^d (d − t) k(t) dt for d in units of ℓ, in closed form."""
    if make is SquaredExponential:
        whole = math.sqrt(2.0 * math.pi) * math.erf(d / math.sqrt(2.0))
        return d * whole + 2.0 * math.expm1(-0.5 * d * d)
    a = {Matern12: 1.0, Matern32: math.sqrt(3.0), Matern52: math.sqrt(5.0)}[make]
    e = math.exp(-a * d)
    # ∫₀^d tⁿ e^{−at} dt for n = 0 to 3, by recurrence
    moments = [-math.expm1(-a * d) / a]
    for n in range(1, 4):
        moments.append((n * moments[-1] - d**n * e) / a)
    polynomial = {Matern12: [1.0], Matern32: [1.0, a], Matern52: [1.0, a, a * a / 3.0]}[make]
    terms = [c * (d * moments[n] - moments[n + 1]) for n, c in enumerate(polynomial)]
    return 2.0 * sum(terms)


def kernel_of(make: type) -> StationaryKernel:
    made: StationaryKernel = make(LENGTH, VARIANCE, dim=2)
    return made


def ray(d: float) -> LineIntegrals:
    end = d * LENGTH * torch.tensor([[0.8, 0.6]], dtype=torch.float64)
    return LineIntegrals.from_observer(end)


@pytest.mark.parametrize(("d", "make"), covering([0.1, 1.0, 10.0, 40.0, 200.0], list(LIMITS)))
def test_variances_of_rays_are_those_of_the_closed_form(make: type, d: float) -> None:
    found = float(Quadrature(32).variance(kernel_of(make), ray(d)).detach())
    expected = VARIANCE * LENGTH**2 * variance_of_integral(make, d)
    assert found == pytest.approx(expected, rel=LIMITS[make], abs=1e-9 * d * VARIANCE)


@pytest.mark.parametrize(("d", "make"), covering([0.1, 1.0, 10.0, 40.0, 200.0], list(LIMITS)))
def test_covariances_with_points_are_those_of_adaptive_quadrature(make: type, d: float) -> None:
    """Points on the ray and 0.3 ℓ beside it."""
    for fraction, aside in ((0.0, 0.0), (0.37, 0.0), (0.5, 0.3), (1.0, 0.0)):
        along = fraction * d
        z = LENGTH * (
            along * torch.tensor([0.8, 0.6], dtype=torch.float64)
            + aside * torch.tensor([-0.6, 0.8], dtype=torch.float64)
        )

        def k(t: float, along: float = along, aside: float = aside) -> float:
            return correlation(make, math.hypot(t - along, aside))

        breaks = sorted({0.0, max(0.0, along - 12), along, min(d, along + 12), d})
        pieces = [
            quad(k, a, b, epsabs=1e-12, epsrel=1e-10, limit=200)[0]
            for a, b in itertools.pairwise(breaks)
        ]
        found = float(Quadrature(32).cross(kernel_of(make), ray(d), z[None]).detach())
        expected = VARIANCE * LENGTH * sum(pieces)
        assert found == pytest.approx(expected, rel=LIMITS[make])


def test_nodes_of_a_ray_do_not_depend_on_its_company() -> None:
    rule = SpacedGaussLegendre(4, 0.5)
    edges = torch.tensor([[0.0, 0.4, 1.3], [0.0, 2.0, 9.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 0.5], [2.0, 0.1]], dtype=torch.float64)
    keys = torch.arange(2)
    s, v = rule.nodes(edges, weights, keys)
    alone, alone_v = rule.nodes(edges[:1], weights[:1], keys[:1])
    used = v[0] > 0
    torch.testing.assert_close(s[0][used], alone[0][alone_v[0] > 0], rtol=0, atol=0)
    torch.testing.assert_close(v.sum(-1), (weights * edges.diff(dim=-1)).sum(-1))
    assert float(s.amax(-1)[0]) <= 1.3
    assert int(used.sum()) == 4 * (1 + 2)
