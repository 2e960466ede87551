"""Distances of stars in a catalog with a magnitude limit, behind known dust: a single cloud.

Stars are dwarfs and giants, of constant density in space as far as 400 pc, so that neither their
luminosity function nor their distances are of a form that the package knows.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtr

from dustmap.errors import UserError
from dustmap.sky.observations import SelectionWeights, classes_of, common_distances
from dustmap.sky.stars import (
    WEIGHT_SCORES,
    ExactDistances,
    GaussianDistances,
    LuminosityFunction,
    ParallaxDistances,
    SeenPart,
    ToLearn,
    WeightedDistances,
    distance_modulus,
    weight_nodes,
    well_known,
)
from tests.sky.latent import learned_of

Array = NDArray[np.float64]

MAS_PC = 1000.0
LIMIT, DIMMING, FARTHEST = 13.0, 0.8, 400.0
#: Of dwarfs and giants: parts, means and deviations of the absolute magnitudes.
TYPES = ((0.97, 6.0, 2.0), (0.03, 0.5, 0.7))
#: The cloud, in two of five directions: where it is and how wide, in pc, and its depth in mag.
WHERE, WIDTH, DEPTH = 150.0, 8.0, 4.0


def brighter(magnitude: Array) -> Array:
    """The true part of the stars that are brighter than an absolute magnitude."""
    return np.asarray(sum(p * ndtr((magnitude - mean) / std) for p, mean, std in TYPES))


def dust(distance: Array, cloudy: NDArray[np.bool_]) -> Array:
    """Extinctions at distances (N, K) in pc, of stars that look at the cloud or do not (N,)."""
    return np.where(cloudy[:, None], DEPTH * ndtr((distance - WHERE) / WIDTH), 0.0)


@dataclass(frozen=True, eq=False)
class Catalog:
    """Stars within the limit, in random order."""

    true: Array
    magnitude: Array
    cloudy: NDArray[np.bool_]
    distances: ParallaxDistances

    def modulus(self, distance: Array) -> Array:
        return distance_modulus(distance) + DIMMING * dust(distance, self.cloudy)


def catalog(number: int, seed: int, of_magnitude: bool = False) -> Catalog:
    """Draw so many stars, with parallaxes to 20 % at the cloud, or to 5 to 45 % by magnitude."""
    rng = np.random.default_rng(seed)
    d = FARTHEST * rng.uniform(size=number) ** (1.0 / 3.0)
    kind = (rng.uniform(size=number) > TYPES[0][0]).astype(np.int64)
    _, mean, std = np.array(TYPES).T
    absolute = mean[kind] + std[kind] * rng.standard_normal(number)
    cloudy = rng.uniform(size=number) < 0.4
    magnitude = absolute + distance_modulus(d) + DIMMING * dust(d[:, None], cloudy)[:, 0]
    seen = magnitude <= LIMIT
    d, magnitude, cloudy = d[seen], magnitude[seen], cloudy[seen]
    error = np.full(len(d), 0.2 * MAS_PC / WHERE)
    if of_magnitude:
        error *= np.clip(0.25 + (magnitude - 8.0) / 3.0, 0.25, 2.25)
    parallax = MAS_PC / d + error * rng.standard_normal(len(d))
    stated = ParallaxDistances(parallax, error, ToLearn().stated)
    prior = learned_of(stated, ToLearn(200.0, 2000.0)).prior
    return Catalog(d, magnitude, cloudy, ParallaxDistances(parallax, error, prior))


@cache
def weighted(of_magnitude: bool) -> tuple[Catalog, WeightedDistances]:
    """Stars of a catalog that may be around the cloud by their parallaxes, and their weighted
    distances."""
    stars = catalog(36_000, 1, of_magnitude)
    near = well_known(stars.distances)
    at = stars.distances[near].median
    x = distance_modulus(at) + DIMMING * dust(at[:, None], stars.cloudy[near])[:, 0]
    luminosity = LuminosityFunction.of(stars.magnitude[near] - x, LIMIT - x)
    kind, kinds = classes_of(stars.distances)
    assert kinds == (8 if of_magnitude else 1)
    seen = SeenPart.of(luminosity, LIMIT, stars.magnitude, kind, kinds)
    sample = stars.distances[:1500]
    places = common_distances(sample)
    every = np.repeat(places[None, :], len(sample), axis=0)
    draws = dust(every, stars.cloudy[:1500])[None]
    weights = SelectionWeights.of(seen, DIMMING, sample, places, draws)
    far = MAS_PC / stars.distances.parallax
    rows = np.flatnonzero(stars.cloudy & (far > 0.7 * WHERE) & (far < 1.7 * WHERE))
    own = stars.distances[rows]
    nodes = weight_nodes(own)
    behind = dust(nodes, stars.cloudy[rows])
    found = WeightedDistances(own, weights.log_weights(nodes, behind[None], kind[rows]))
    some = Catalog(stars.true[rows], stars.magnitude[rows], stars.cloudy[rows], own)
    return some, found


def test_weighted_distances_are_those_of_brute_force() -> None:
    """Probabilities to be nearer than the cloud and its ends, means of their errors: beside sums
    over distances with the true density of stars and the true luminosity function, both of which
    are learned from the catalog here."""
    stars, found = weighted(False)
    d = np.arange(0.25, FARTHEST, 0.5)
    every = np.repeat(d[None, :], len(stars.true), axis=0)
    misfit = (stars.distances.parallax[:, None] - MAS_PC / d) / stars.distances.error[:, None]
    modulus = distance_modulus(every) + DIMMING * dust(every, stars.cloudy)
    density = d**2 * brighter(LIMIT - modulus) * np.exp(-0.5 * misfit**2)
    below = density.cumsum(1) / density.sum(1, keepdims=True)
    for place in (0.8 * WHERE, WHERE, 1.2 * WHERE):
        exact = below[:, np.searchsorted(d, place) - 1]
        near, alone = (
            np.abs(1.0 - each.survival(np.array([[place]]))[:, 0] - exact).mean()
            for each in (found, stars.distances)
        )
        assert near < 0.01 < 0.02 < alone


@pytest.mark.parametrize("of_magnitude", [False, True])
def test_weighted_distances_are_calibrated(of_magnitude: bool) -> None:
    """Where the prior of the whole catalog alone is not; with errors of all stars alike, or of
    faint ones larger, which a learned prior has classes for."""
    stars, found = weighted(of_magnitude)
    inside, mean = dict[str, float](), dict[str, float]()
    for name, each in (("weighted", found), ("alone", stars.distances)):
        below = 1.0 - each.survival(stars.true[:, None])[:, 0]
        inside[name], mean[name] = float((np.abs(below - 0.5) < 0.34).mean()), float(below.mean())
    assert 0.64 < inside["weighted"] < 0.72
    assert not 0.64 < inside["alone"] < 0.72
    assert abs(mean["weighted"] - 0.5) < 0.03
    assert mean["alone"] < 0.45


@pytest.mark.parametrize(("number", "tolerance"), [(25, 0.15), (100, 0.06), (3000, 0.02)])
def test_luminosity_functions_are_those_of_truncated_samples(number: int, tolerance: float) -> None:
    """Of normal magnitudes that are seen up to limits of 2 to 10, the means over samples."""
    rng, ends, found = np.random.default_rng(0), np.array([4.0, 6.5]), list[Array]()
    for _ in range(max(4, 6000 // number)):
        absolute = 6.0 + 2.0 * rng.standard_normal(20 * number)
        limit = rng.uniform(2.0, 10.0, len(absolute))
        seen = np.flatnonzero(absolute <= limit)[:number]
        found.append(LuminosityFunction.of(absolute[seen], limit[seen]).log_below(ends))
    exact = np.log(ndtr((ends - 6.0) / 2.0))
    assert np.diff(np.mean(found, axis=0)) == pytest.approx(np.diff(exact), abs=tolerance)


def test_few_stars_have_no_luminosity_function() -> None:
    ten = np.arange(10.0)
    with pytest.raises(UserError, match="20 stars within the magnitude limit, got 10"):
        LuminosityFunction.of(np.append(ten, 99.0), np.full(11, 50.0))
    with pytest.raises(UserError, match="different magnitudes"):
        LuminosityFunction.of(np.ones(30), np.full(30, 2.0))


def test_weights_are_quadrature() -> None:
    """Of a normal distance and steep weights: probabilities and quantiles, and no weights leave
    them as they are."""
    stars = GaussianDistances(np.array([150.0, 100.0]), np.array([30.0, 5.0]))
    z = np.linspace(-6.0, 6.0, 200_001)
    for steep in (0.0, 5.0, 40.0):
        nodes = weight_nodes(stars)
        log_weight = -steep * ndtr((nodes - 120.0) / 5.0)
        found = WeightedDistances(stars, log_weight)
        p = np.array([0.01, 0.16, 0.5, 0.84, 0.99])
        for row in range(2):
            height = np.interp(z, WEIGHT_SCORES, log_weight[row]) - 0.5 * z**2
            below = np.exp(height - height.max()).cumsum()
            exact = stars[row : row + 1].quantile(ndtr(np.interp(p, below / below[-1], z)))
            one = found[np.array([row])]
            np.testing.assert_allclose(one.quantile(p), exact, rtol=2e-4)
            np.testing.assert_allclose(one.survival(exact), 1.0 - p[None], atol=1e-3)
    near = WeightedDistances(GaussianDistances(*np.full((2, 1), 10.0)), np.zeros((1, 33)))
    np.testing.assert_allclose(near.quantile(p), near.base.quantile(p), rtol=1e-3)
    with pytest.raises(UserError, match="exact"):
        WeightedDistances(ExactDistances(np.array([1.0])), np.zeros((1, len(WEIGHT_SCORES))))
    with pytest.raises(UserError, match=r"finite \(2, 33\)"):
        WeightedDistances(stars, np.zeros((2, 3)))
