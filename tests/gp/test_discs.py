"""Means of a disc against formulas and integrals done elsewhere."""

import math

import pytest
import scipy.integrate
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractMean, ConstantMean, DiscMean, LinearMean, LogDiscMean
from dustmap.gp.functionals import Derivatives, LineIntegrals, PointValues, Stacked

HEIGHT, LENGTH = 100.0, 3000.0


def places(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand((count, 3), generator=generator, dtype=torch.float64) - 0.5
    return unit * torch.tensor([3000.0, 3000.0, 800.0], dtype=torch.float64)


def by_hand(point: list[float]) -> float:
    """The Sun is 20.8 pc above the plane and 8178 pc from the centre, which is at +X."""
    x, y, z = point
    radius = math.sqrt((8178.0 - x) ** 2 + y**2)
    return math.exp(-abs(z + 20.8) / HEIGHT - (radius - 8178.0) / LENGTH)


def test_the_disc_at_points() -> None:
    x = places(20)
    expected = torch.tensor([by_hand(p) for p in x.tolist()], dtype=torch.float64)
    mean, log_mean = DiscMean(0.003, HEIGHT, LENGTH), LogDiscMean(-6.0, HEIGHT, LENGTH)
    torch.testing.assert_close(mean.values(PointValues(x)), 0.003 * expected)
    torch.testing.assert_close(log_mean.values(PointValues(x)), expected.log() - 6.0)
    plane = PointValues(torch.tensor([[0.0, 0.0, -20.8]], dtype=torch.float64))
    assert float(mean.values(plane).detach()) == pytest.approx(0.003)


@pytest.mark.parametrize(("moved", "beta"), [(20.8, [1.0, -1.0]), (-20.8, [-1.0, -1.0])])
def test_a_disc_whose_plane_is_elsewhere(moved: float, beta: list[float]) -> None:
    """The plane at Z = −20.8 + `moved`, to rounding; beyond both kinks without the tent, too."""
    x = places(20)
    start = LogDiscMean(-6.0, HEIGHT, LENGTH)
    assert start.coefficients().tolist() == [-6.0, -1.0, -1.0, 0.0, 0.0]
    all_of_it = start.coefficients().detach()
    mean = start.with_coefficients(torch.cat([all_of_it[:3], all_of_it.new_tensor(beta)]))
    apart = x - x.new_tensor([0.0, 0.0, moved])
    expected = torch.tensor([by_hand(p) for p in apart.tolist()], dtype=torch.float64)
    torch.testing.assert_close(mean.values(PointValues(x)), expected.log() - 6.0)
    assert mean.plane(mean.coefficients()) == pytest.approx(-20.8 + moved, abs=1e-9)
    half = start.with_scales(80.0, 2500.0, -20.8 + 0.5 * moved, None)
    far = PointValues(x.new_tensor([[0.0, 0.0, 150.0], [0.0, 0.0, -150.0]]))
    above, below = half.values(far).tolist()
    assert above == pytest.approx(-6.0 - (170.8 - 0.5 * moved) / 80.0)
    assert below == pytest.approx(-6.0 - (129.2 + 0.5 * moved) / 80.0)
    coefficients = half.coefficients()
    assert half.scales(coefficients) == pytest.approx((80.0, 2500.0))
    assert half.plane(coefficients) == pytest.approx(-20.8 + 0.5 * moved)


def test_a_cavity_around_the_sun() -> None:
    """β₅ c(r/r_c) + β₆ c(r/2r_c), c(x) = 1/(1 + x⁶): all at the Sun, none far away."""
    x, beta = places(20), torch.tensor([-6.0, -1.0, -1.0, 0.0, 0.0, -1.5, -1.0]).double()
    disc, mean = LogDiscMean(-6.0, HEIGHT, LENGTH), LogDiscMean(-6.0, HEIGHT, LENGTH, cavity=80.0)
    assert mean.coefficients().tolist() == [-6.0, -1.0, -1.0, 0.0, 0.0, -0.5, -0.5]
    mean = mean.with_coefficients(beta)
    r = x.norm(dim=1)
    depth = -1.5 / (1.0 + (r / 80.0) ** 6) - 1.0 / (1.0 + (r / 160.0) ** 6)
    values = mean.values(PointValues(x)) - disc.values(PointValues(x))
    torch.testing.assert_close(values, depth, rtol=1e-12, atol=1e-12)
    near = PointValues(torch.tensor([[0.0, 0.0, 0.0], [80.0, 0.0, 0.0]], dtype=torch.float64))
    gap = (mean.values(near) - disc.values(near)).tolist()
    assert gap == pytest.approx([-2.5, -0.75 - 1.0 / (1.0 + 2.0**-6)])
    assert mean.scales(mean.coefficients()) == pytest.approx((HEIGHT, LENGTH))
    assert mean.depth(mean.coefficients()) == pytest.approx(math.exp(-2.5))
    assert disc.depth(disc.coefficients()) is None
    half = 1.5 / math.sqrt(2.0)
    stds = mean.prior_stds(mean.basis(near), 2.0).tolist()
    assert stds == pytest.approx([2.0, 1.0, 1.0, 1.0, 1.0, half, half])
    told = disc.with_scales(80.0, 2500.0, -20.8, 0.1), mean.with_scales(80.0, 2500.0, None, 0.1)
    assert [each.depth(each.coefficients()) for each in told] == [None, pytest.approx(0.1)]
    with pytest.raises(UserError, match="for values at points"):
        mean.basis(LineIntegrals.from_observer(x))
    with pytest.raises(UserError, match="positive radius"):
        LogDiscMean(-6.0, HEIGHT, LENGTH, cavity=0.0)


def test_line_integrals_through_the_plane() -> None:
    """Segments are cut at the kink in the plane; stacked rays are those that stand alone."""
    ends = places(12, seed=1)
    rays, mean = LineIntegrals.from_observer(ends), DiscMean(1.0, HEIGHT, LENGTH)
    found = mean.values(rays).detach()
    stacked = Stacked((PointValues(ends), rays))[torch.arange(23, 11, -1)]
    assert torch.equal(mean.values(stacked).detach().flip(0), found)
    for end, value in zip(ends, found, strict=True):
        length, unit = float(end.norm()), (end / end.norm())
        kink = -20.8 / float(unit[2])
        expected, _ = scipy.integrate.quad(
            lambda s, unit=unit: by_hand((s * unit).tolist()),
            0.0,
            length,
            points=[kink] if 0.0 < kink < length else None,
        )
        assert float(value) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("heights", "tolerance"), [(20.0, 1e-13), (50.0, 1e-7), (100.0, 3e-4)])
def test_long_segments_towards_the_pole(heights: float, tolerance: float) -> None:
    """∫₀^s exp(−(z☉ + s')/H) ds' = H exp(−z☉/H) (1 − exp(−s/H))."""
    end = torch.tensor([[0.0, 0.0, heights * HEIGHT]], dtype=torch.float64)
    found = DiscMean(1.0, HEIGHT, LENGTH).values(LineIntegrals.from_observer(end)).detach()
    expected = HEIGHT * math.exp(-20.8 / HEIGHT) * -math.expm1(-heights)
    assert float(found) == pytest.approx(expected, rel=tolerance)


def test_many_rays_are_those_of_few() -> None:
    rays, points = LineIntegrals.from_observer(places(9000)), PointValues(places(9000))
    disc, log_disc = DiscMean(1.0, HEIGHT, LENGTH), LogDiscMean(0.0, HEIGHT, LENGTH)
    torch.testing.assert_close(disc.basis(rays)[8190:8200], disc.basis(rays[slice(8190, 8200)]))
    torch.testing.assert_close(
        log_disc.basis(points)[8190:], log_disc.basis(points[slice(8190, None)])
    )


def test_scales_follow_the_coefficients() -> None:
    mean = LogDiscMean(-6.0, HEIGHT, LENGTH)
    assert mean.scales(mean.coefficients()) == pytest.approx((HEIGHT, LENGTH))
    mean = mean.with_coefficients(torch.tensor([-5.0, -2.0, 0.5, 0.0, 0.0]).double())
    assert mean.scales(mean.coefficients()) == pytest.approx((50.0, -6000.0))
    disc = DiscMean(1.0, HEIGHT, LENGTH, learn=False)
    disc = disc.with_coefficients(torch.tensor([0.2], dtype=torch.float64))
    assert disc.coefficients().tolist() == [0.2]
    assert not disc.is_learned


@pytest.mark.parametrize(
    "mean",
    [ConstantMean(), LinearMean([0.0] * 3), DiscMean(1.0, HEIGHT, LENGTH)],
    ids=lambda mean: type(mean).__name__,
)
def test_priors_let_every_coefficient_have_the_same_effect(mean: AbstractMean) -> None:
    basis = mean.basis(PointValues(places(50)))
    effect = (basis * mean.prior_stds(basis, 2.0)).square().mean(0).sqrt()
    torch.testing.assert_close(effect, torch.full_like(effect, 2.0))


def test_priors_of_a_disc_are_those_of_its_scales() -> None:
    mean = LogDiscMean(-6.0, HEIGHT, LENGTH)
    basis = mean.basis(PointValues(places(5)))
    assert mean.prior_stds(basis, 2.0).tolist() == [2.0, 1.0, 1.0, 1.0, 1.0]


def test_what_a_disc_cannot_be() -> None:
    mean = DiscMean(1.0, HEIGHT, LENGTH)
    with pytest.raises(ValueError, match="3 dimensions, got 2"):
        mean.basis(PointValues(torch.zeros(1, 2, dtype=torch.float64)))
    up = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="no derivatives"):
        mean.basis(Derivatives(torch.zeros_like(up), up))
    with pytest.raises(ValueError, match="must be positive"):
        LogDiscMean(0.0, 0.0, LENGTH)
