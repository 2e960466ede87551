"""Bubbles, the disc, and dust drawn from priors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dustmap.gp import ConstantMean, LinearMean, RegularGrid
from dustmap.gp.kernels import Matern32
from dustmap.sky.simulation import (
    Bubbles,
    Disc,
    GaussianDust,
    LogNormalDust,
    StructuredDust,
    Turbulence,
)
from dustmap.sky.simulation._dust import Shell

GRID = RegularGrid.from_bounds((-200, -180, -120), (200, 180, 120), (41, 37, 25))


def ball(radius: float, width: float) -> Shell:
    return Shell(np.zeros(3), radius, width, 0.1, np.zeros((3, 3)))


def test_the_wall_holds_what_the_cavity_has_lost() -> None:
    r = np.linspace(0.0, 200.0, 40_001)
    factor = ball(80.0, 8.0).factor(r[:, None] * np.array([0.6, 0.0, 0.8]))
    assert factor[0] == pytest.approx(0.1, rel=1e-6)
    assert factor[-1] == pytest.approx(1.0, rel=1e-6)
    assert 1.5 < factor.max() < 4.0
    assert abs(r[factor.argmax()] - 80.0) < 8.0
    assert np.trapezoid(factor * r**2, r) == pytest.approx(200.0**3 / 3, rel=1e-6)


def test_a_distorted_shell_has_the_radius_of_each_direction() -> None:
    shell = replace(ball(80.0, 2.0), shape=np.diag([0.2, -0.1, -0.1]))
    r = np.linspace(50.0, 120.0, 7001)
    for axis, expected in enumerate((96.0, 72.0, 72.0)):
        peak = r[shell.factor(r[:, None] * np.eye(3)[axis]).argmax()]
        assert peak == pytest.approx(expected, abs=2.0)


def test_bubbles_are_where_and_what_they_should_be() -> None:
    drawn = [Bubbles(others=4).draw(GRID, 20.8, np.random.default_rng(i)) for i in range(200)]
    local = [shells[0] for shells in drawn]
    assert all(108.0 <= shell.radius <= 132.0 for shell in local)
    assert np.std([shell.centre for shell in local]) == pytest.approx(15.0, rel=0.15)
    others = [shell for shells in drawn for shell in shells[1:]]
    radii = np.array([shell.radius for shell in others])
    assert radii.min() >= 30.0
    assert radii.max() <= 80.0
    assert np.median(radii) == pytest.approx(math.sqrt(30 * 80), rel=0.1)
    centres = np.array([shell.centre for shell in others])
    assert (np.abs(centres) <= np.array([200.0, 180.0, 120.0])).all()
    assert np.median(centres[:, 2]) == pytest.approx(-20.8, abs=8.0)


def test_there_may_be_no_bubbles() -> None:
    assert Bubbles(local_radius=0.0, others=0).draw(GRID, 20.8, np.random.default_rng(0)) == ()


def test_the_disc_falls_by_its_scales() -> None:
    disc = Disc(height=100.0, length=3000.0, sun_height=20.0)
    points = np.array([[0, 0, -20.0], [0, 0, 80.0], [0, 0, -120.0], [3000.0, 0, -20.0]])
    np.testing.assert_allclose(
        disc.factor(points), [1.0, math.exp(-1), math.exp(-1), math.e], rtol=1e-12
    )


def test_structured_dust_has_its_mean_and_is_positive() -> None:
    """Over many skies, in the plane and without bubbles: the plane density."""
    dust = StructuredDust(
        plane_density=2e-3,
        turbulence=Turbulence(0.5, 20.0),
        disc=Disc(height=1e9, length=1e9),
        bubbles=Bubbles(local_radius=0.0, others=0),
    )
    rho = np.stack([dust.density(GRID, seed) for seed in range(20)])
    assert rho.min() > 0.0
    assert rho.mean() == pytest.approx(2e-3, rel=0.03)
    assert np.log(rho).std() == pytest.approx(0.5, rel=0.03)


def test_structured_dust_is_the_product_of_its_parts() -> None:
    dust = StructuredDust()
    smooth = replace(dust, bubbles=Bubbles(local_radius=0.0, others=0))
    points = GRID.points().numpy().reshape(*GRID.shape, 3)
    factor = np.prod([shell.factor(points) for shell in dust.shells(GRID, 3)], axis=0)
    np.testing.assert_allclose(dust.density(GRID, 3), smooth.density(GRID, 3) * factor, rtol=1e-12)
    assert len(dust.shells(GRID, 3)) == 1 + dust.bubbles.others


def test_the_local_bubble_is_seen_from_the_sun() -> None:
    rho = np.stack([StructuredDust().density(GRID, seed) for seed in range(10)]).mean(0)
    distance = np.linalg.norm(GRID.points().numpy(), axis=1).reshape(GRID.shape)
    plane = np.abs(GRID.points().numpy()[:, 2].reshape(GRID.shape)) <= 20.0
    inside, wall = plane & (distance < 70), plane & (distance > 105) & (distance < 150)
    assert rho[wall].mean() > 5 * rho[inside].mean()


def test_a_draw_from_a_log_normal_prior_has_its_moments() -> None:
    dust = LogNormalDust(Matern32(20.0, 0.49, dim=3), ConstantMean(math.log(1e-3)))
    logs = np.log(np.stack([dust.density(GRID, seed) for seed in range(10)]))
    assert logs.std() == pytest.approx(0.7, rel=0.03)
    assert logs.mean() == pytest.approx(math.log(1e-3), abs=0.05)
    correlation = float(((logs[:, :-2] - logs.mean()) * (logs[:, 2:] - logs.mean())).mean())
    a = math.sqrt(3) * 2 * GRID.spacing[0] / 20.0
    assert correlation / logs.var() == pytest.approx((1 + a) * math.exp(-a), abs=0.03)


def test_a_draw_from_a_prior_follows_its_mean() -> None:
    slope = LinearMean([0.01, 0.0, 0.0], math.log(1e-3))
    logs = np.log(LogNormalDust(Matern32(20.0, 1e-6, dim=3), slope).density(GRID, 0))
    x = torch.linspace(-200, 200, 41, dtype=torch.float64).numpy()
    np.testing.assert_allclose(logs.mean((1, 2)), math.log(1e-3) + 0.01 * x, atol=1e-2)


def test_a_gaussian_prior_may_be_negative() -> None:
    dust = GaussianDust(Matern32(20.0, 1e-6, dim=3), ConstantMean(1e-3))
    rho = np.stack([dust.density(GRID, seed) for seed in range(5)])
    assert rho.mean() == pytest.approx(1e-3, rel=0.1)
    assert rho.std() == pytest.approx(1e-3, rel=0.05)
    assert rho.min() < 0.0


def test_impossible_dust_is_refused() -> None:
    with pytest.raises(ValueError, match=r"smallest must be at most largest = 80, got 90"):
        Bubbles(smallest=90.0)
    with pytest.raises(ValueError, match=r"remaining must be between 1e-06 and 1, got 0.0"):
        Bubbles(remaining=0.0)
    with pytest.raises(ValueError, match="plane_density must be positive"):
        StructuredDust(plane_density=-1.0)
    with pytest.raises(ValueError, match="height must be positive"):
        Disc(height=0.0)
