"""Extinctions of maps in one dimension, from stars with parallaxes, against the truth."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.sky.stars import AbstractDistancePrior, FlatParallax
from tests.sky.latent import Sky, learned_of, line

pytestmark = pytest.mark.slow

Array = NDArray[np.float64]
PLACES = np.array([200.0, 400.0, 600.0, 800.0])
FLAT = FlatParallax(10_000.0)


def answers(sky: Sky, prior: AbstractDistancePrior) -> tuple[Array, Array, Array]:
    """True A(<d) at the places, and its mean and standard deviation of a fit."""
    scene, ahead = sky.scene, np.ones((len(PLACES), 1))
    draws = sky.fitted(sky.under(prior), 32).log_samples.double().exp().numpy()
    found = draws @ scene.rows(ahead, PLACES[:, None])[:, 0].T
    return scene.extinction(sky.white, ahead, PLACES), found.mean(0), found.std(0, ddof=1)


@pytest.mark.parametrize(("fraction", "least"), [(0.05, 0.62), (0.2, 0.6), (0.3, 0.6)])
def test_extinctions_have_the_errors_they_state(fraction: float, least: float) -> None:
    """Of as many skies as make the coverage certain to 0.03, 300 stars of a survey of 2,000 each.

    The prior knows nothing of the survey but the 2,000 parallaxes. With errors of 20 and 30 % some
    0.61 and 0.63 are reached. At 20 % it is no more with the prior that the stars were drawn from:
    32 samples know a standard deviation to a sixth, which costs 0.02, and what a distance adds to
    the errors is taken as normal.
    """
    inside, off = [], []
    for seed in range(100):
        sky = Sky.draw(line(), seed, 300, fraction, survey=2000)
        true, mean, std = answers(sky, learned_of(sky.survey).prior)
        inside.append(np.abs(mean - true) < std)
        off.append(mean / true - 1.0)
    each = np.mean(inside, axis=1)
    assert each.std(ddof=1) / np.sqrt(len(each)) <= 0.03
    assert least <= each.mean() <= 0.74
    error = np.std(off, axis=0, ddof=1) / np.sqrt(len(off))
    np.testing.assert_array_less(np.abs(np.mean(off, axis=0)), 3.0 * error + 0.02)


@pytest.mark.parametrize("fraction", [0.2, 0.3])
def test_a_prior_flat_in_parallax_is_biased(fraction: float) -> None:
    off = []
    for seed in range(3):
        sky = Sky.draw(line(), seed, 300, fraction)
        true, mean, _ = answers(sky, FLAT)
        off.append(mean / true - 1.0)
    assert np.mean(off, axis=0).max() > 0.06
