"""Distributions of distances against their densities, integrated on dense grids."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import norm

from dustmap.sky.stars import (
    AbstractDistancePrior,
    AbstractDistances,
    ExactDistances,
    ExponentialDensity,
    FlatParallax,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
)

Array = NDArray[np.float64]

P = np.array([1e-6, 1e-3, 0.01, 0.16, 0.5, 0.84, 0.99, 0.999, 1 - 1e-5])
FLAT, EXPONENTIAL = FlatParallax(10_000.0), ExponentialDensity(1350.0, 10_000.0)

# Parallax and error in mas: clear, poor, zero, negative; S/N of 1000, 10⁶ and -50; at the cut.
CASES = [
    (10.0, 0.01),
    (10.0, 1.0),
    (1.0, 0.3),
    (100.0, 10.0),
    (0.0, 0.1),
    (0.0, 5.0),
    (-1.0, 0.1),
    (-5.0, 0.1),
    (100.0, 0.1),
    (100.0, 1e-4),
    (0.1001, 0.001),
    (0.05, 0.01),
]


def one(parallax: float, error: float, prior: AbstractDistancePrior) -> ParallaxDistances:
    return ParallaxDistances(np.array([parallax]), np.array([error]), prior)


def log_prior(prior: AbstractDistancePrior, d: Array) -> Array:
    """Of d: flat in 1/d is d⁻²."""
    if isinstance(prior, ExponentialDensity):
        return np.asarray(2 * np.log(d) - d / prior.scale)
    return np.asarray(-2 * np.log(d))


def dense_survival(parallax: float, error: float, prior: AbstractDistancePrior, d: Array) -> Array:
    """P(distance > d) by the trapezoid rule over 1/d, on nodes that crowd where the mass is."""
    least = 1e3 / 10_000.0
    highest = max(parallax, least) + 14 * error
    steps = np.concatenate([np.linspace(0, 1, 300_001), np.geomspace(1e-12, 1, 300_001)])
    near = parallax + error * np.linspace(-10, 10, 100_001)
    x = np.concatenate([least + (highest - least) * steps, near[near > least]])
    # far beyond the likelihood's peak the prior may still count: points even in ln d
    x = np.unique(np.concatenate([x, np.geomspace(least, highest, 300_001), 1e3 / d]))
    log_p = log_prior(prior, 1e3 / x) - 2 * np.log(x) - 0.5 * ((parallax - x) / error) ** 2
    p = np.exp(log_p - log_p.max())
    below = np.concatenate([[0.0], np.cumsum(0.5 * (p[1:] + p[:-1]) * np.diff(x))])
    return np.asarray(1 - np.interp(1e3 / d, x, below[-1] - below) / below[-1])


@pytest.mark.parametrize("prior", [FLAT, EXPONENTIAL], ids=["flat", "exponential"])
@pytest.mark.parametrize(("parallax", "error"), CASES)
def test_parallaxes_follow_their_posterior(
    parallax: float, error: float, prior: AbstractDistancePrior
) -> None:
    distances = one(parallax, error, prior)
    d = distances.quantile(P)
    assert np.all(np.diff(d) > 0)
    assert d[0, -1] <= 10_000.0
    np.testing.assert_allclose(
        dense_survival(parallax, error, prior, d[0]), 1 - P, atol=2e-6, rtol=0
    )
    np.testing.assert_allclose(distances.survival(d)[0], 1 - P, atol=1e-9, rtol=0)


def test_far_tails_keep_their_digits() -> None:
    """Q-ratios against quadrature, where Φ alone would be 0 or 1: relative, not absolute."""
    for parallax, error in ((-30.0, 1.0), (-3.0, 0.02), (50.0, 1.0)):
        for d in (25.0, 100.0, 2000.0, 9999.0):
            found = float(one(parallax, error, FLAT).survival(np.array([[d]]))[0, 0])
            shift = max(parallax, 0.1)

            def density(x: float, w: float = parallax, s: float = error, m: float = shift) -> float:
                return float(np.exp(((m - w) ** 2 - (x - w) ** 2) / (2 * s**2)))

            def mass(low: float, high: float, m: float = shift, s: float = error) -> float:
                points = [x for x in (m, m + s) if low < x < high]
                return float(quad(density, low, high, points=points or None, epsabs=0)[0])

            top = shift + 12 * error
            near, far = mass(min(1e3 / d, top), top), mass(0.1, min(1e3 / d, top))
            assert found == pytest.approx(far / (far + near), rel=1e-7)


def test_a_sharp_parallax_is_a_normal_distance_and_a_negative_one_lies_far() -> None:
    sharp = one(10.0, 0.001, FLAT).quantile(norm.cdf(np.array([-1.0, 0.0, 1.0])))[0]
    np.testing.assert_allclose(sharp, [99.99, 100.0, 100.01], rtol=1e-6)
    # the likelihood rises to the cut: an exponential in 1/d of rate |w|/s² above the least
    negative = one(-100.0, 1.0, FLAT)
    d = np.array([[5_000.0, 9_000.0]])
    expected = -np.expm1(-(1e3 / d - 0.1) * 100.1)
    np.testing.assert_allclose(negative.survival(d), expected, rtol=1e-4)


def test_the_median_of_a_parallax_is_no_inverse() -> None:
    """With volume in the prior a poor parallax means a distance beyond 1/w."""
    poor = one(1.0, 0.3, EXPONENTIAL)
    assert poor.median[0] > 1200.0
    assert not poor.exact
    assert np.isfinite(one(0.0, 1.0, EXPONENTIAL).median).all()


def test_a_table_of_many_stars_is_that_of_each() -> None:
    rng = np.random.default_rng(3)
    parallax, error = rng.uniform(-1, 10, 2500), rng.uniform(0.01, 1, 2500)
    every = ParallaxDistances(parallax, error, EXPONENTIAL)
    some = np.array([0, 1, 2047, 2048, 2499])
    np.testing.assert_array_equal(every.quantile(P)[some], every[some].quantile(P))


@pytest.mark.parametrize("distance_max", [300.0, 1e4, 1e6])
@pytest.mark.parametrize("scale", [None, 50.0, 1350.0, 1e5])
def test_no_parallax_is_too_strange(distance_max: float, scale: float | None) -> None:
    """S/N from −10⁴ to 10⁴ and errors from 0.1 µas to 10 mas, at probabilities near 0 and 1."""
    rng = np.random.default_rng(1)
    error = 10 ** rng.uniform(-4, 1, 1000)
    parallax = error * rng.choice([-1, 0, 1], 1000) * 10 ** rng.uniform(-2, 4, 1000)
    prior = FlatParallax(distance_max) if scale is None else ExponentialDensity(scale, distance_max)
    distances = ParallaxDistances(parallax, error, prior)
    p = np.array([1e-12, 1e-6, 0.01, 0.5, 0.99, 1 - 1e-6, 1 - 1e-12])
    d = distances.quantile(p)
    assert np.isfinite(d).all()
    assert (d > 0).all()
    assert (d <= distance_max).all()
    assert (np.diff(d, axis=1) >= 0).all()
    np.testing.assert_allclose(distances.survival(d), np.tile(1 - p, (1000, 1)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("mean", "error"), [(100.0, 1.0), (100.0, 60.0), (10.0, 1000.0)])
def test_a_normal_distance_is_cut_at_the_sun(mean: float, error: float) -> None:
    distances = GaussianDistances(np.array([mean]), np.array([error]))
    d = distances.quantile(P)
    assert (d > 0).all()
    kept = norm.sf(-mean / error)
    expected = norm.sf((d - mean) / error) / kept
    np.testing.assert_allclose(distances.survival(d), expected, rtol=1e-10)
    np.testing.assert_allclose(distances.survival(d)[0], 1 - P, rtol=1e-9)
    np.testing.assert_array_equal(distances.survival(np.array([[-1.0, 0.0]])), 1.0)


def test_percentiles_are_met_and_z_is_linear_in_ln_d() -> None:
    distances = PercentileDistances(np.array([90.0]), np.array([100.0]), np.array([150.0]))
    triple = np.array([0.16, 0.5, 0.84])
    np.testing.assert_allclose(distances.quantile(triple), [[90.0, 100.0, 150.0]], rtol=1e-12)
    z = np.array([-4.0, -2.0, -0.5, 0.5, 2.0, 4.0])
    slope = np.where(z < 0, np.log(100 / 90), np.log(1.5)) / norm.ppf(0.84)
    np.testing.assert_allclose(
        distances.quantile(norm.cdf(z))[0], 100.0 * np.exp(z * slope), rtol=1e-10
    )
    d = distances.quantile(P)
    np.testing.assert_allclose(distances.survival(d)[0], 1 - P, rtol=1e-9)
    np.testing.assert_array_equal(distances.survival(np.array([[0.0]])), 1.0)


def test_a_known_distance_is_a_step() -> None:
    distances = ExactDistances(np.array([10.0, 20.0]))
    np.testing.assert_array_equal(
        distances.survival(np.array([[5.0, 10.0, 15.0]])), [[1, 0, 0], [1, 1, 1]]
    )
    np.testing.assert_array_equal(distances.quantile(P)[:, 0], [10.0, 20.0])
    assert distances.exact


KINDS: list[AbstractDistances] = [
    ExactDistances(np.array([1.0, 2.0, 3.0])),
    GaussianDistances(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3])),
    PercentileDistances(np.array([1.0, 2.0]), np.array([2.0, 3.0]), np.array([3.0, 5.0])),
    ParallaxDistances(np.array([-1.0, 0.0, 3.0]), np.array([0.1, 0.2, 0.3]), FLAT),
    ParallaxDistances(np.array([-1.0, 0.0, 3.0]), np.array([0.1, 0.2, 0.3]), EXPONENTIAL),
]


@pytest.mark.parametrize("distances", KINDS, ids=lambda d: type(d).__name__)
def test_every_kind_is_picked_by_rows_and_monotone(distances: AbstractDistances) -> None:
    d = np.geomspace(0.1, 2e4, 50)[None, :]
    survival = distances.survival(d)
    assert survival.shape == (len(distances), 50)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert ((survival >= 0) & (survival <= 1)).all()
    last = distances[np.array([len(distances) - 1])]
    assert len(last) == 1
    np.testing.assert_array_equal(last.survival(d)[0], survival[-1])
    assert len(distances[np.arange(len(distances)) == 0]) == 1
    np.testing.assert_allclose(distances.median, distances.quantile(np.array([0.5]))[:, 0])
    for name, unit in distances.units.items():
        assert name.endswith(f"_{unit}")
        assert unit in ("pc", "mas")


def test_impossible_numbers_are_refused_by_column_and_row() -> None:
    good, nan = np.array([1.0, 2.0]), np.array([1.0, np.nan])
    with pytest.raises(ValueError, match=r"distance_pc: 1 of 2 rows are not > 0 \(first at row 1"):
        ExactDistances(np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"distance_error_pc: 1 of 2 rows are not > 0"):
        GaussianDistances(good, np.array([-1.0, 1.0]))
    with pytest.raises(ValueError, match=r"parallax_mas: 1 of 2 rows are not finite"):
        ParallaxDistances(nan, good, FLAT)
    with pytest.raises(ValueError, match=r"parallax_error_mas: 2 of 2 rows are not > 0"):
        ParallaxDistances(good, np.zeros(2), FLAT)
    with pytest.raises(ValueError, match=r"distance_p16_pc: 2 of 2 rows are not below"):
        PercentileDistances(good, good, 2 * good)
    with pytest.raises(ValueError, match=r"distance_p84_pc: 1 of 2 rows are not above"):
        PercentileDistances(0.5 * good, good, np.array([2.0, 2.0]))
    with pytest.raises(ValueError, match=r"one length"):
        GaussianDistances(good, np.ones(3))
    for bad in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="distance_max must be positive"):
            FlatParallax(bad)
        with pytest.raises(ValueError, match="scale must be positive"):
            ExponentialDensity(bad, 1e4)
