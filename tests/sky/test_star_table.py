"""What a star table accepts, and how tables are cut and joined."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.sky.stars import (
    ExactDistances,
    ExponentialDensity,
    FlatParallax,
    ParallaxDistances,
    PercentileDistances,
    StarTable,
    concatenate,
    thinned,
)
from dustmap.sky.systems import system_named


def stars(count: int = 4, system: str = "A_V", first: int = 0) -> StarTable:
    return StarTable(
        source_id=np.arange(first, first + count) + 2**60,
        l=np.linspace(0.0, 350.0, count),
        b=np.linspace(-90.0, 90.0, count),
        distances=ExactDistances(np.linspace(10.0, 40.0, count)),
        extinction=np.linspace(-0.1, 0.4, count),
        extinction_error=np.linspace(0.01, 0.04, count),
        system=system_named(system),
    )


def with_parallaxes(count: int, distance_max: float = 1e4) -> StarTable:
    parallax = np.linspace(-1.0, 5.0, count)
    prior = FlatParallax(distance_max)
    return replace(stars(count), distances=ParallaxDistances(parallax, 0.1 + 0 * parallax, prior))


def test_positions_are_at_the_median_distance() -> None:
    table = replace(stars(1), l=np.array([90.0]), b=np.array([0.0]))
    np.testing.assert_allclose(table.positions(), [[0.0, 10.0, 0.0]], atol=1e-12)
    spread = PercentileDistances(np.array([5.0]), np.array([20.0]), np.array([60.0]))
    uncertain = replace(table, distances=spread)
    np.testing.assert_allclose(uncertain.positions(), [[0.0, 20.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(uncertain.distance, [20.0])


@pytest.mark.parametrize("index", [np.array([2, 0]), np.array([True, False, True, False])])
def test_rows_are_picked_together(index: NDArray[Any]) -> None:
    table = with_parallaxes(4)
    some = table[index]
    assert len(some) == 2
    np.testing.assert_array_equal(some.source_id, table.source_id[index])
    np.testing.assert_array_equal(some.extinction, table.extinction[index])
    np.testing.assert_array_equal(some.distance, table.distance[index])
    assert some.system is table.system


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("l", np.nan, r"column l: 1 of 4 rows are not finite \(first at row 2, counted from 0\)"),
        ("b", 91.0, r"column b: 1 of 4 rows are not between -90 and 90 degrees"),
        ("extinction", np.inf, r"column extinction: 1 of 4 rows are not finite"),
        ("extinction_error", 0.0, r"column extinction_error: 1 of 4 rows are not > 0"),
        ("extinction_error", -1.0, r"correct or remove them"),
        ("extinction_error", 1e-30, r"are not between 1e-09 and 1e\+06 mag"),
        ("extinction", 1e300, r"column extinction: 1 of 4 rows are not between -1000 and 1000 mag"),
    ],
)
def test_impossible_values_are_refused(field: str, value: float, message: str) -> None:
    values = getattr(stars(), field).copy()
    values[2] = value
    with pytest.raises(ValueError, match=message):
        replace(stars(), **{field: values})


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_a_thinned_table_is_from_all_over(most: int) -> None:
    some = thinned(stars(), most)
    assert len(some) == {1: 1, 2: 2, 3: 2}.get(most, 4)
    assert some.source_id[0] == stars().source_id[0]


def test_negative_extinctions_are_data() -> None:
    assert stars().extinction[0] < 0


def test_columns_of_other_lengths_and_empty_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        replace(stars(), distances=ExactDistances(np.ones(3)))
    with pytest.raises(ValueError, match="no rows"):
        stars()[np.zeros(4, np.bool_)]


def test_tables_are_joined_in_order() -> None:
    for parts in ([stars(3), stars(2, first=3)], [with_parallaxes(3), with_parallaxes(2)]):
        both = concatenate(parts)
        assert len(both) == 5
        for name in ("source_id", "l", "b", "extinction", "extinction_error", "distance"):
            expected = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(getattr(both, name), expected)
    assert concatenate(parts[:1]) is parts[0]


def test_what_does_not_belong_together_is_not_joined() -> None:
    with pytest.raises(ValueError, match=r"A_G and A_V cannot be joined: convert"):
        concatenate([stars(), stars(system="A_G")])
    with pytest.raises(ValueError, match=r"two kinds cannot be joined: exact and parallax"):
        concatenate([stars(), with_parallaxes(2)])
    with pytest.raises(ValueError, match=r"10000\.0 and parallax flat-parallax 5000\.0"):
        concatenate([with_parallaxes(2), with_parallaxes(2, 5e3)])
    prior = ExponentialDensity(1e3, 1e4)
    other = replace(
        stars(2), distances=ParallaxDistances(np.array([1.0, 2.0]), np.array([0.1, 0.1]), prior)
    )
    with pytest.raises(ValueError, match="one prior"):
        concatenate([with_parallaxes(2), other])
    with pytest.raises(ValueError, match="no tables"):
        concatenate([])
