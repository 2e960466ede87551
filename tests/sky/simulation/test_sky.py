"""Whole skies: seeded, positive, selected by brightness."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.interpolate import RegularGridInterpolator

from dustmap.gp import ConstantMean
from dustmap.gp.kernels import Matern32
from dustmap.sky.simulation import (
    LogNormalDust,
    Measurements,
    Population,
    SimulatedSky,
    SkyModel,
    StructuredDust,
    column_density,
    simulate,
)
from dustmap.sky.systems import system_named

SMALL = SkyModel(size=(120.0, 100.0, 60.0), spacing=10.0)
DUSTY = replace(SMALL, dust=StructuredDust(plane_density=0.05))


def columns(sky: SimulatedSky) -> dict[str, np.ndarray]:
    stars = sky.stars
    return {
        "l": stars.l,
        "b": stars.b,
        "extinction": stars.extinction,
        "extinction_error": stars.extinction_error,
        "true_distance": sky.true_distance,
        "true_extinction": sky.true_extinction,
        "magnitude": sky.magnitude,
        **stars.distances.columns(),
    }


def test_the_same_seed_gives_the_same_sky() -> None:
    first, again, other = (simulate(SMALL, 50, seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.truth.mean, again.truth.mean)
    for name, values in columns(first).items():
        np.testing.assert_array_equal(values, columns(again)[name])
        assert not np.array_equal(values, columns(other)[name])


def test_more_stars_are_the_same_stars_and_more_behind_the_same_dust() -> None:
    few, many = simulate(SMALL, 20, 1), simulate(SMALL, 9_000, 1)
    np.testing.assert_array_equal(few.truth.mean, many.truth.mean)
    for name, values in columns(few).items():
        np.testing.assert_array_equal(values, columns(many)[name][:20])
    assert len(np.unique(many.true_distance)) == len(many) == 9_000


def test_other_errors_leave_dust_and_stars_as_they_are() -> None:
    one = simulate(SMALL, 50, 1)
    other = simulate(replace(SMALL, measurements=Measurements(error=0.1, outliers=0.2)), 50, 1)
    np.testing.assert_array_equal(one.true_extinction, other.true_extinction)
    ratio = other.stars.extinction_error / one.stars.extinction_error
    np.testing.assert_allclose(ratio, 0.1 / 0.03)


def test_true_extinctions_are_line_integrals_of_the_truth() -> None:
    sky = simulate(SMALL, 20, seed=2)
    density = RegularGridInterpolator(sky.truth.axes(), sky.truth.mean.transpose(2, 1, 0))
    places = sky.at_true_distances().positions()
    for position, extinction in zip(places, sky.true_extinction, strict=True):
        at = np.linspace(0, 1, 20_001)[:, None] * position
        reference = np.trapezoid(density(at), dx=float(np.linalg.norm(position)) / 20_000)
        assert extinction == pytest.approx(reference, rel=1e-4)


def test_distances_directions_and_the_box_agree() -> None:
    sky = simulate(SMALL, 500, seed=6)
    places = sky.at_true_distances().positions()
    np.testing.assert_allclose(np.linalg.norm(places, axis=1), sky.true_distance)
    assert (np.abs(places) <= np.array(SMALL.size) / 2 + 1e-9).all()
    assert sky.truth.grid.upper == pytest.approx((60.0, 50.0, 30.0))
    # Parallaxes are near those of the true distances: the prior moves them little so near.
    assert np.median(sky.stars.distance / sky.true_distance) == pytest.approx(1.0, abs=0.01)


def test_a_box_need_not_be_centred_on_the_sun() -> None:
    model = replace(SMALL, center=(50.0, 0.0, -10.0))
    sky = simulate(model, 200, seed=0)
    places = sky.at_true_distances().positions()
    assert places[:, 0].min() >= -10.0 - 1e-9
    assert places[:, 0].max() > 60.0
    assert sky.truth.grid.lower == pytest.approx((-10.0, -50.0, -40.0))


def test_dust_hides_stars() -> None:
    """Those that are left lie nearer and behind less dust than all there are."""
    faint = replace(DUSTY, population=Population(limit=13.0))
    every = replace(DUSTY, population=Population(limit=30.0))
    seen, all_stars = simulate(faint, 2000, 3), simulate(every, 2000, 3)
    assert seen.magnitude.max() <= 13.0
    assert seen.true_extinction.mean() < 0.9 * all_stars.true_extinction.mean()
    # The selection is by the magnitude behind the dust, in the band of the limit.
    clear = replace(faint, dust=StructuredDust(plane_density=1e-9))
    assert seen.true_distance.mean() < simulate(clear, 2000, 3).true_distance.mean()


def test_extinction_dims_by_the_factor_of_its_system() -> None:
    visual = replace(DUSTY, population=Population(limit=30.0))
    custom = replace(visual, system=system_named("custom:mine"))
    a, b = simulate(visual, 100, 0), simulate(custom, 100, 0)
    np.testing.assert_array_equal(a.true_extinction, b.true_extinction)
    assert custom.dimming() == 1.0
    assert 0.7 < visual.dimming() < 0.95
    undimmed = a.magnitude - visual.dimming() * a.true_extinction
    np.testing.assert_allclose(undimmed, b.magnitude - b.true_extinction, rtol=1e-9)


def test_a_sky_from_a_prior() -> None:
    dust = LogNormalDust(Matern32(30.0, 1.0, dim=3), ConstantMean(math.log(2e-3)))
    sky = simulate(replace(SMALL, dust=dust), 30, seed=0)
    density = dust.density(SMALL.grid(), 0)
    np.testing.assert_allclose(sky.truth.mean.transpose(2, 1, 0), density, rtol=1e-6)
    places = sky.at_true_distances().positions()
    np.testing.assert_allclose(
        sky.true_extinction, column_density(SMALL.grid(), density, places), rtol=1e-6
    )


def test_nothing_is_negative_but_measured_extinctions() -> None:
    sky = simulate(SkyModel(), 2000, seed=0)
    assert sky.truth.mean.min() > 0.0
    assert sky.true_extinction.min() > 0.0
    assert sky.stars.extinction.min() < 0.0


def test_impossible_skies_are_refused() -> None:
    with pytest.raises(ValueError, match="stars must be at least 1"):
        simulate(SMALL, 0, seed=0)
    with pytest.raises(ValueError, match="seed must not be negative"):
        simulate(SMALL, 1, seed=-1)
    with pytest.raises(ValueError, match="size must be at least spacing"):
        SkyModel(size=(5.0, 100.0, 100.0))
    with pytest.raises(ValueError, match="the Sun must be in the box"):
        SkyModel(center=(300.0, 0.0, 0.0))
    night = replace(SMALL, dust=StructuredDust(plane_density=1e4), population=Population(limit=0.0))
    with pytest.raises(ValueError, match="holds a star brighter than the limit 0"):
        simulate(night, 1, seed=0)
