"""Where simulated stars are, how bright, and what is measured of them."""

import math

import numpy as np
import pytest

from dustmap.gp import RegularGrid
from dustmap.sky.simulation import Measurements, Population

CUBE = RegularGrid.from_bounds((-500,) * 3, (500,) * 3, (11,) * 3)
EVERYWHERE = Population(limit=40.0, height=1e9, length=1e9)


def test_stars_fall_off_from_the_plane() -> None:
    population = Population(limit=40.0, height=100.0, length=1e9, sun_height=50.0)
    found = population.candidates(CUBE, np.random.default_rng(0), 200_000)
    height = np.abs(found.positions[:, 2] + 50.0)
    inside = height[height < 450.0]
    # The mean of an exponential of scale 100, cut at 450.
    expected = 100.0 * (1 - 4.5 * math.exp(-4.5) / (1 - math.exp(-4.5)))
    assert inside.mean() == pytest.approx(expected, rel=0.02)


def test_without_a_limit_and_a_disc_stars_are_everywhere_alike() -> None:
    found = EVERYWHERE.candidates(CUBE, np.random.default_rng(0), 50_000)
    assert len(found.positions) > 0.99 * 50_000
    assert np.abs(found.positions.mean(0)).max() < 5.0
    assert np.abs(found.positions).max() <= 500.0


def test_absolute_magnitudes_follow_their_slope() -> None:
    found = EVERYWHERE.candidates(CUBE, np.random.default_rng(1), 100_000)
    distance = np.linalg.norm(found.positions, axis=-1)
    absolute = found.magnitude - 5 * np.log10(distance / 10)
    assert absolute.min() >= -1.0
    assert absolute.max() <= 12.0
    counts, _ = np.histogram(absolute, bins=[2.0, 3.0, 10.0, 11.0])
    assert math.log10(counts[2] / counts[0]) == pytest.approx(0.15 * 8, abs=0.06)


def test_a_limit_of_brightness_leaves_the_near_and_the_luminous() -> None:
    bright = Population(limit=12.0, height=1e9, length=1e9)
    near = bright.candidates(CUBE, np.random.default_rng(2), 200_000)
    every = EVERYWHERE.candidates(CUBE, np.random.default_rng(2), 200_000)
    assert near.magnitude.max() <= 12.0
    distances = [np.linalg.norm(found.positions, axis=-1) for found in (near, every)]
    assert np.median(distances[0]) < np.median(distances[1])
    # A candidate is one that the whole population has, too, with a magnitude below the limit.
    share = len(near.positions) / len(every.positions)
    assert share == pytest.approx(float((every.magnitude <= 12.0).mean()), rel=0.03)


def test_errors_grow_with_magnitude() -> None:
    errors = Measurements(error=0.03)
    g = np.array([8.0, 13.0, 15.0, 17.0])
    parallax = errors.parallax_error(g)
    assert parallax[0] == parallax[1] < parallax[2] < parallax[3]
    # Gaia's third release at G = 15 and 17: some 0.03 and 0.08 mas.
    np.testing.assert_allclose(parallax[2:], [0.0295, 0.079], rtol=0.03)
    extinction = errors.extinction_error(g)
    assert extinction[2] == pytest.approx(0.03)
    assert (np.diff(extinction) > 0).all()


def test_errors_describe_the_noise() -> None:
    n = 40_000
    distance, extinction = np.full(n, 200.0), np.full(n, 0.4)
    magnitude = np.random.default_rng(0).uniform(10, 17, n)
    measurements = Measurements(outliers=0.0)
    found = measurements.measure(distance, extinction, magnitude, np.random.default_rng(1))
    for off in (
        (found["extinction"] - 0.4) / found["extinction_error"],
        (found["parallax"] - 5.0) / found["parallax_error"],
    ):
        assert off.mean() == pytest.approx(0.0, abs=5 / math.sqrt(n))
        assert off.std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * n))
    spread = np.log(found["extinction_error"] / measurements.extinction_error(magnitude))
    assert spread.std() == pytest.approx(0.3, rel=0.03)
    assert not found["outlier"].any()


def test_outliers_are_as_many_and_as_far_off_as_stated() -> None:
    n = 40_000
    ones = np.ones(n)
    measurements = Measurements(outliers=0.05, outlier_size=10.0)
    found = measurements.measure(100 * ones, ones, 15 * ones, np.random.default_rng(1))
    assert found["outlier"].mean() == pytest.approx(0.05, abs=5 * math.sqrt(0.05 / n))
    off = (found["extinction"] - 1.0) / found["extinction_error"]
    assert off[found["outlier"]].std() == pytest.approx(math.sqrt(101), rel=0.1)
    assert off[~found["outlier"]].std() == pytest.approx(1.0, rel=0.03)


def test_impossible_stars_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outliers must be between 0 and 0.5, got 0.7"):
        Measurements(outliers=0.7)
    with pytest.raises(ValueError, match=r"error must be positive and finite, got -1"):
        Measurements(error=-1.0)
    with pytest.raises(ValueError, match="faintest must be between -1 and inf, got -2"):
        Population(faintest=-2.0)
