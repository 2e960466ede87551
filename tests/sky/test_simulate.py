"""Simulated skies: seeded, positive, and with the extinction that their density integrates to."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.interpolate import RegularGridInterpolator

from dustmap.gp import RegularGrid
from dustmap.sky import SkyModel, simulate
from dustmap.sky._simulate import column_density

SMALL = SkyModel(size=(120.0, 100.0, 60.0), spacing=10.0)


def test_the_same_seed_gives_the_same_sky() -> None:
    stars, truth = simulate(SMALL, 50, seed=4)
    again, truth_again = simulate(SMALL, 50, seed=4)
    np.testing.assert_array_equal(stars.extinction, again.extinction)
    np.testing.assert_array_equal(truth.mean, truth_again.mean)
    other, _ = simulate(SMALL, 50, seed=5)
    assert not np.array_equal(stars.extinction, other.extinction)


def test_more_stars_see_the_same_dust() -> None:
    np.testing.assert_array_equal(simulate(SMALL, 5, 1)[1].mean, simulate(SMALL, 50, 1)[1].mean)


def test_extinctions_are_line_integrals_of_the_truth() -> None:
    stars, truth = simulate(replace(SMALL, error=1e-9), 20, seed=2)
    density = RegularGridInterpolator(truth.axes(), truth.mean.transpose(2, 1, 0))
    for position, extinction in zip(stars.positions(), stars.extinction, strict=True):
        at = np.linspace(0, 1, 20_001)[:, None] * position
        reference = np.trapezoid(density(at), dx=float(np.linalg.norm(position)) / 20_000)
        assert extinction == pytest.approx(reference, rel=1e-3)


def test_a_constant_density_integrates_to_density_times_distance() -> None:
    grid = RegularGrid((-50, -50, -50), (10, 10, 10), (11, 11, 11))
    positions = np.array([[30.0, 0.0, 0.0], [0.0, -40.0, 20.0], [50.0, 50.0, 50.0]])
    columns = column_density(grid, np.full(grid.shape, 0.002), positions)
    np.testing.assert_allclose(columns, 0.002 * np.linalg.norm(positions, axis=-1), rtol=1e-12)


def test_column_densities_agree_with_an_adaptive_integral() -> None:
    grid = RegularGrid((-50, -50, -50), (10, 10, 10), (11, 11, 11))
    x, _, _ = np.meshgrid(*(axis.numpy() for axis in grid.axes()), indexing="ij")
    expected, _ = quad(lambda s: 0.001 + 1e-5 * (0.6 * s), 0.0, 50.0)
    columns = column_density(grid, 0.001 + 1e-5 * x, np.array([[30.0, 40.0, 0.0]]))
    np.testing.assert_allclose(columns, expected, rtol=1e-12)


def test_the_density_is_positive_with_the_wanted_mean_and_contrast() -> None:
    model = SkyModel(size=(600.0, 600.0, 600.0), spacing=20.0, length=20.0, contrast=0.5)
    _, truth = simulate(model, 1, seed=0)
    assert truth.mean.min() > 0.0
    assert truth.mean.mean() == pytest.approx(model.mean_density, rel=0.05)
    assert np.log(truth.mean).std() == pytest.approx(0.5, rel=0.05)


def test_errors_describe_the_noise() -> None:
    model = replace(SMALL, error=0.05)
    noisy, _ = simulate(model, 4000, seed=3)
    clean, _ = simulate(replace(model, error=1e-12), 4000, seed=3)
    scaled = (noisy.extinction - clean.extinction) / noisy.extinction_error
    assert scaled.std() == pytest.approx(1.0, abs=5 / np.sqrt(2 * 4000))
    assert noisy.extinction_error.min() >= 0.025
    assert noisy.extinction_error.max() <= 0.1


def test_stars_lie_in_the_box() -> None:
    stars, truth = simulate(SMALL, 500, seed=6)
    inside = np.abs(stars.positions()) <= np.array(SMALL.size) / 2 + 1e-9
    assert inside.all()
    assert truth.grid.upper == pytest.approx((60.0, 50.0, 30.0))


def test_impossible_skies_are_refused() -> None:
    with pytest.raises(ValueError, match="stars must be at least 1"):
        simulate(SMALL, 0, seed=0)
    with pytest.raises(ValueError, match="error must be positive, got -1"):
        SkyModel(error=-1.0)
    with pytest.raises(ValueError, match="size must be at least spacing"):
        SkyModel(size=(5.0, 100.0, 100.0))
