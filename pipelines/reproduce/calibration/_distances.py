"""What distances claim: of stars that a magnitude limit has chosen, by their parallaxes alone."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.stars import FlatParallax, ParallaxDistances, ParallaxSample, ToLearn
from pipelines.reproduce.calibration._case import Claim

Array = NDArray[np.float64]

REACH, ERROR = 1000.0, 0.3
FLAT = FlatParallax(10_000.0)
_STEPS = np.linspace(0.0, 6000.0, 1201)


def claims(quick: bool) -> Sequence[Claim]:
    """Mean distances by what the posteriors say, and whether these hold the true ones.

    `before` is the default of release 0.1, flat in parallax, on the same stars.
    """
    found = []
    for limited in (True,) if quick else (False, True):
        d, parallax, error = _survey(500 if quick else 4000, limited)
        case = f"parallaxes to 30 %, {'limited in magnitude' if limited else 'all to 1 kpc'}"
        flat = _scores(d, ParallaxDistances(parallax, error, FLAT))
        sample = ParallaxSample()
        sample.add(ParallaxDistances(parallax, error, FLAT))
        learned = sample.learned(ToLearn()).prior
        now = _scores(d, ParallaxDistances(parallax, error, learned))
        slack = 3.0 / math.sqrt(len(d))
        found += [
            Claim(case, "worst bias of a fifth", 0.0, now[0], flat[0], -0.08, 0.08),
            Claim(case, "coverage of 68 %", 0.683, now[1], flat[1], 0.68 - slack, 0.68 + slack),
            Claim(case, "mean of P(> true d)", 0.5, now[2], flat[2], 0.5 - slack, 0.5 + slack),
        ]
    return found


def _survey(n: int, limited: bool) -> tuple[Array, Array, Array]:
    """Stars uniform in volume; brighter than a limit behind dust of 1.5 mag/kpc."""
    rng = np.random.default_rng(7)
    d = REACH * rng.uniform(size=40 * n) ** (1 / 3)
    if limited:
        absolute = np.log10(1 + rng.uniform(size=len(d)) * (10**1.95 - 1)) / 0.15 - 1
        d = d[absolute + 5 * np.log10(d / 10) + 1.5e-3 * d < 15.0]
    d = d[:n]
    assert len(d) == n
    error = np.full(n, ERROR * float(np.median(1000.0 / d)))
    return d, 1000.0 / d + error * rng.standard_normal(n), error


def _scores(d: Array, distances: ParallaxDistances) -> tuple[float, float, float]:
    """Of fifths in the posterior median the worst relative bias of the mean, with its sign; the
    share of stars within the central 68 %; the mean of P(> true d)."""
    survival = distances.survival(np.tile(_STEPS, (len(d), 1)))
    expected: Array = np.asarray(np.trapezoid(survival, _STEPS, axis=1))
    fifths = np.array_split(np.argsort(distances.median), 5)
    biases = [float(expected[i].mean() / d[i].mean() - 1.0) for i in fifths]
    beyond = distances.survival(d[:, None])[:, 0]
    inside = float((np.abs(beyond - 0.5) < 0.3413).mean())
    return max(biases, key=abs), inside, float(beyond.mean())
