"""Errors of the parallaxes of van Leeuwen (2007), by comparison with those of Gaia DR3.

The copy of the catalogue has no errors. Of stars that Gaia measured, 20 to 100 times as precisely,
the difference ϖ_H − ϖ_G is the error of Hipparcos, up to an offset:

    σ² = (a² + b² 10^{0.4 (Hp − 8)}) exp(−2 c (sin²β − ½)),

a for attitude and calibration, b for photons, and c for the scanning law, which saw high ecliptic
latitudes β more often than the ecliptic.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import norm, t

Array: TypeAlias = NDArray[np.float64]
#: Degrees of freedom of the differences: binaries give them tails.
TAILS = 4.0
#: σ of the normal distribution with the quartiles of Student's t of unit scale.
_CORE = float(t.ppf(0.75, TAILS) / norm.ppf(0.75))


@final
@dataclass(frozen=True)
class ParallaxLaw:
    """σ in mas: a, b and c as above, and the offset ϖ_H − ϖ_G of the fit in mas."""

    a: float
    b: float
    c: float
    offset: float = 0.0

    def error(self, magnitude: Array, beta: Array) -> Array:
        """Return σ (N,) in mas at magnitudes Hp (N,) and ecliptic latitudes (N,) in degrees."""
        light = self.a**2 + self.b**2 * 10.0 ** (0.4 * (magnitude - 8.0))
        scans = np.exp(-2.0 * self.c * (np.sin(np.radians(beta)) ** 2 - 0.5))
        return np.asarray(np.sqrt(light * scans), np.float64)


def fit_parallax_law(magnitude: Array, beta: Array, difference: Array) -> ParallaxLaw:
    """Fit the law to differences of parallaxes by maximum likelihood, with Student's t.

    Parameters
    ----------
    magnitude
        Hp (N,).
    beta
        Ecliptic latitudes (N,) in degrees.
    difference
        ϖ_H − ϖ_G (N,) in mas.

    Returns
    -------
    ParallaxLaw
        Its σ is that of the core: half of the differences lie within 0.674 σ of the offset.
    """

    def loss(p: Array) -> float:
        law = ParallaxLaw(float(np.exp(p[0])), float(np.exp(p[1])), p[2], p[3])
        sigma = law.error(magnitude, beta)
        return float(-np.mean(t.logpdf((difference - law.offset) / sigma, TAILS) - np.log(sigma)))

    start = np.array([np.log(0.5), np.log(0.5), 0.0, 0.0])
    best = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 4000, "fatol": 1e-9}).x
    scale = _CORE * np.exp(best[:2])
    return ParallaxLaw(float(scale[0]), float(scale[1]), float(best[2]), float(best[3]))
