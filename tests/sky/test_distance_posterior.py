"""Distances given extinctions: a single ray of known density, against quadrature over d."""

from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import cumulative_trapezoid, trapezoid
from scipy.special import ndtr

from dustmap.errors import UserError
from dustmap.sky.observations import distance_nodes, distance_posterior, smoothed
from dustmap.sky.stars import ExactDistances, ExponentialDensity, ParallaxDistances

Array: TypeAlias = NDArray[np.float64]

SCALE, FARTHEST = 400.0, 5000.0
ERROR, DOUBT = 0.08, 0.1


def extinction(d: Array) -> Array:
    """Thin dust, and a cloud of 0.8 mag at 320 pc, 15 pc deep."""
    return np.asarray(4e-4 * d + 0.8 * ndtr((d - 320.0) / 15.0))


def variance(d: Array) -> Array:
    """What a map leaves open, as a part of the extinction."""
    return np.asarray((DOUBT * extinction(d)) ** 2)


def log_normal_density(y: Array, mean: Array, var: Array) -> Array:
    total = ERROR**2 + var
    return np.asarray(-0.5 * ((y - mean) ** 2 / total + np.log(total)))


def brute(parallax: float, error: float, y: float) -> tuple[float, float, Array]:
    """Mean, deviation and percentiles by 200,000 places along the ray."""
    d = np.linspace(1.0, FARTHEST, 200_000)
    log_p = 2.0 * np.log(d) - d / SCALE - 0.5 * ((parallax - 1e3 / d) / error) ** 2
    log_p += log_normal_density(np.asarray(y), extinction(d), variance(d))
    p = np.exp(log_p - log_p.max())
    p /= trapezoid(p, d)
    mean = float(trapezoid(p * d, d))
    std = float(np.sqrt(trapezoid(p * (d - mean) ** 2, d)))
    below = np.concatenate([[0.0], cumulative_trapezoid(p, d)])
    return mean, std, np.interp([0.16, 0.5, 0.84], below, d)


@pytest.mark.parametrize("precision", [0.05, 0.15, 0.3])
def test_the_posterior_is_that_of_quadrature(precision: float) -> None:
    parallax = 1e3 / np.array([250.0, 310.0, 320.0, 340.0, 500.0])
    error = precision * parallax
    y = np.array([0.15, 0.5, 1.0, 0.1, 1.05])
    stars = ParallaxDistances(parallax, error, ExponentialDensity(SCALE, FARTHEST))
    nodes = distance_nodes(stars)
    found = distance_posterior(
        nodes,
        extinction(nodes)[None],
        variance(nodes),
        lambda mean, var: log_normal_density(y[:, None], mean, var),
    )
    levels = found.quantile(np.array([0.16, 0.5, 0.84]))
    for i in range(len(y)):
        mean, std, percentiles = brute(parallax[i], error[i], y[i])
        assert found.mean[i] == pytest.approx(mean, abs=0.01 * std)
        assert found.std[i] == pytest.approx(std, rel=0.01)
        np.testing.assert_allclose(levels[i], percentiles, atol=0.02 * std)


def test_draws_that_differ_make_a_mixture() -> None:
    """Of a cloud at one of three distances: the mean of the likelihoods, and not that of a mean."""
    parallax, error, y = 1e3 / 320.0, 0.9, 0.95
    numbers = np.array([parallax]), np.array([error])
    stars = ParallaxDistances(*numbers, ExponentialDensity(SCALE, FARTHEST))
    shifts = np.array([-90.0, 0.0, 110.0])
    nodes = distance_nodes(stars)
    draws = np.stack([extinction(nodes - shift) for shift in shifts])
    found = distance_posterior(
        nodes, draws, 0.0 * nodes, lambda mean, var: log_normal_density(np.asarray(y), mean, var)
    )
    d = np.linspace(1.0, FARTHEST, 200_000)
    prior = np.exp(2.0 * np.log(d) - d / SCALE - 0.5 * ((parallax - 1e3 / d) / error) ** 2)
    each = [np.exp(-0.5 * ((y - extinction(d - shift)) / ERROR) ** 2) for shift in shifts]
    p = prior * np.mean(each, axis=0)
    p /= trapezoid(p, d)
    mean = trapezoid(p * d, d)
    std = np.sqrt(trapezoid(p * (d - mean) ** 2, d))
    assert found.mean[0] == pytest.approx(mean, abs=0.01 * std)
    assert found.std[0] == pytest.approx(std, rel=0.01)


def test_smoothed_draws_keep_mean_and_variance() -> None:
    rng = np.random.default_rng(1)
    draws = rng.standard_normal((16, 5))
    mean, variance = rng.standard_normal(5), draws.var(0) + np.array([0.0, 0.1, 0.2, 1.0, 2.0])
    moved, rest = smoothed(draws, mean, variance)
    np.testing.assert_allclose(moved.mean(0), mean, atol=1e-12)
    np.testing.assert_allclose(moved.var(0) + rest, variance)
    assert (rest > 0.0).all()


def test_an_extinction_that_says_nothing_leaves_the_prior() -> None:
    parallax, error = np.array([[4.0], [1.0]])
    stars = ParallaxDistances(parallax, error, ExponentialDensity(SCALE, FARTHEST))
    nodes = distance_nodes(stars)
    none = np.zeros_like(nodes)
    found = distance_posterior(nodes, none[None], none, lambda mean, var: 0.0 * mean)
    p = np.array([0.05, 0.16, 0.5, 0.84, 0.95])
    np.testing.assert_allclose(found.quantile(p), stars.quantile(p), rtol=2e-3)


def test_known_distances_have_no_posterior() -> None:
    with pytest.raises(UserError, match="uncertain distances, got exact"):
        distance_nodes(ExactDistances(np.ones(2)))
