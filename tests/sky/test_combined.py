"""Stars that the nodes cannot tell apart as one: what is kept, and what it costs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import OutsidePolicy
from dustmap.sky._coordinates import cartesian, galactic
from dustmap.sky.observations import observe
from dustmap.sky.stars import (
    AbstractDistances,
    ExactDistances,
    FlatParallax,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
    StarTable,
    combined,
    open_star_store,
    star_store,
)
from dustmap.sky.systems import system_named

Array = NDArray[np.float64]

#: A part of the sky with many stars to a cell.
NUMBER, NEAR, FAR, ERROR = 4000, 300.0, 420.0, 0.1
SPACING = np.full(NUMBER, 40.0)


def kinds(distance: Array) -> dict[str, AbstractDistances]:
    return {
        "exact": ExactDistances(distance),
        "gaussian": GaussianDistances(distance, 0.15 * distance),
        "percentile": PercentileDistances(0.9 * distance, distance, 1.15 * distance),
        "parallax": ParallaxDistances(1e3 / distance, 100.0 / distance, FlatParallax(1e4)),
    }


def sky(seed: int = 0, kind: str = "exact") -> StarTable:
    """Stars of every direction of a cone, with extinctions of a density linear in space."""
    rng = np.random.default_rng(seed)
    distance = rng.uniform(NEAR, FAR, NUMBER)
    l, b = rng.uniform(20.0, 50.0, NUMBER), rng.uniform(-10.0, 10.0, NUMBER)
    return StarTable(
        source_id=np.arange(NUMBER) + 7,
        l=l,
        b=b,
        distances=kinds(distance)[kind],
        extinction=column(l, b, distance),
        extinction_error=rng.uniform(0.5, 2.0, NUMBER) * ERROR,
        system=system_named("A_V"),
    )


def column(l: Array, b: Array, distance: Array) -> Array:
    """∫ρ ds of ρ = 10⁻³ (1 + x·g), exactly."""
    gradient = np.array([2e-3, -1e-3, 3e-3])
    return np.asarray(1e-3 * (distance + 0.5 * distance * (cartesian(l, b, distance) @ gradient)))


@pytest.mark.parametrize("kind", kinds(np.ones(1)))
def test_weights_and_weighted_extinctions_are_kept(kind: str) -> None:
    stars = sky(kind=kind)
    cells = combined(stars, SPACING)
    assert len(cells) < NUMBER / 5
    assert type(cells.distances) is type(stars.distances)
    for weight in (lambda t: 1.0, lambda t: t.extinction):
        before, after = (float(np.sum(weight(t) / t.extinction_error**2)) for t in (stars, cells))
        assert after == pytest.approx(before, rel=1e-9)
    assert set(cells.source_id) <= set(stars.source_id)
    assert cells.multiplicity is not None
    assert (cells.multiplicity >= 1.0).all()
    assert NUMBER / 2 < cells.multiplicity.sum() <= NUMBER


def test_what_is_lost_is_of_second_order_in_the_width() -> None:
    """The mean of extinctions is that of the mean star, but for the curvature of A in a cell."""
    stars = sky()
    errors = []
    for width in (1.0, 0.5, 0.25):
        cells = combined(stars, SPACING, width)
        assert cells.multiplicity is not None
        many = cells.multiplicity > 1.5
        there = column(cells.l, cells.b, cells.distances.median)
        errors.append(float(np.square(cells.extinction - there)[many].mean() ** 0.5))
    assert errors[0] < 0.002 * float(np.median(stars.extinction))
    # A quarter, but for cells of few stars; half would be of first order.
    assert errors[1] < errors[0] / 2.4
    assert errors[2] < errors[1] / 2.4


@pytest.mark.parametrize("width", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["exact", "gaussian", "parallax"])
def test_cells_are_no_wider_than_stated(width: float, kind: str) -> None:
    """The first star of a cell is no farther from the mean of all than the cell's diagonal."""
    stars = replace(sky(kind=kind), source_id=np.arange(NUMBER))
    cells = combined(stars, SPACING, width)
    places = cartesian(stars.l, stars.b, stars.distances.rough)
    error = stars.distances.depths()[1] / stars.distances.depth_per_pc
    at = cartesian(cells.l, cells.b, cells.distances.rough)
    most = width * np.maximum(40.0, error.max())
    apart = np.linalg.norm(places[cells.source_id] - at, axis=1)
    # Pixels are diamonds, whose diagonals are √2 of their width.
    assert apart.max() <= np.hypot(2.0**0.5 * width * 40.0, most)


def test_single_stars_stay_as_they_are() -> None:
    stars = sky()
    cells = combined(stars, np.full(NUMBER, 1e-3))
    assert len(cells) == NUMBER
    np.testing.assert_array_equal(cells.source_id, stars.source_id)
    for name in ("l", "b", "extinction", "extinction_error", "distance"):
        np.testing.assert_allclose(getattr(cells, name), getattr(stars, name), rtol=1e-9, atol=1e-9)
    assert cells.multiplicity is not None
    np.testing.assert_allclose(cells.multiplicity, 1.0, rtol=1e-12)


def test_groups_stay_apart() -> None:
    stars = sky()
    group = np.random.default_rng(1).integers(0, 2, NUMBER)
    cells = combined(replace(stars, groups=group), SPACING)
    assert cells.groups is not None
    for each in (0, 1):
        weight = float((stars.extinction_error[group == each] ** -2.0).sum())
        kept = float((cells.extinction_error[cells.groups == each] ** -2.0).sum())
        assert kept == pytest.approx(weight, rel=1e-9)


def test_means_of_means_are_means() -> None:
    """Cells that are combined once more keep weights and count their stars."""
    stars = sky(kind="gaussian")
    once = combined(stars, SPACING, 0.5)
    twice = combined(once, SPACING[: len(once)], 4.0)
    assert twice.multiplicity is not None
    whole = np.sum(stars.extinction_error**-2.0)
    assert np.sum(twice.extinction_error**-2.0) == pytest.approx(whole, rel=1e-9)
    assert twice.multiplicity.sum() <= NUMBER


def test_the_spread_of_distances_is_that_of_a_mean() -> None:
    """Var ȳ over independent distances of the members, by drawing them."""
    rng, many = np.random.default_rng(2), 40
    distance, sigma, rho = 300.0, 45.0, 1.2e-3
    l, b, _ = galactic(np.array([[1.0, 0.5, 0.1]]))
    error = rng.uniform(0.5, 2.0, many) * ERROR
    one = np.ones(many)
    stars = StarTable(
        source_id=np.arange(many),
        l=l * one,
        b=b * one,
        distances=GaussianDistances(distance * one, sigma * one),
        extinction=one,
        extinction_error=error,
        system=system_named("A_V"),
    )
    cells = combined(stars, 40.0 * one)
    grid = RegularGrid((-900.0,) * 3, (100.0,) * 3, (19,) * 3)
    spread = observe(cells, grid, OutsidePolicy.TRUNCATE).spread
    assert len(cells) == 1
    assert spread is not None
    weight = error**-2.0 / np.sum(error**-2.0)
    drawn = rng.normal(distance, sigma, (20_000, many)) * rho
    expected = float((drawn @ weight).var())
    assert float(spread.uniform(rho)) == pytest.approx(expected, rel=0.04)


def test_stores_keep_multiplicities(tmp_path: Path) -> None:
    cells = combined(sky(kind="parallax"), SPACING)
    with star_store(tmp_path / "cells.zarr") as store:
        store.append(cells[:100])
        store.append(cells[100:])
    read = open_star_store(tmp_path / "cells.zarr").read()
    assert read.multiplicity is not None
    np.testing.assert_array_equal(read.multiplicity, cells.multiplicity)
    np.testing.assert_array_equal(read[5:9].multiplicity, cells.multiplicity[5:9])  # type: ignore[index]


def test_distances_know_their_scale() -> None:
    """depth_per_pc is the slope of depth against distance, and rough ones are near the median."""
    distance = np.linspace(100.0, 1000.0, 10)
    for kind, distances in kinds(distance).items():
        np.testing.assert_allclose(distances.rough, distance, rtol=1e-12)
        farther = kinds(distance + 1e-3)[kind]
        slope = (farther.depths()[0] - distances.depths()[0]) / 1e-3
        np.testing.assert_allclose(distances.depth_per_pc, slope, rtol=1e-4)
