"""Slow, obvious covariances of weighted rays, in numpy and scipy."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.integrate
import scipy.special
from numpy.typing import NDArray

from dustmap.gp.functionals import LineIntegrals

Array = NDArray[np.float64]
Correlation = Callable[[float], float]


def kolmogorov(r: float) -> float:
    """Matérn-1/3 by the modified Bessel function."""
    z = math.sqrt(2 / 3) * r
    if z < 1e-30:
        return 1.0
    return float(2 ** (2 / 3) / math.gamma(1 / 3) * z ** (1 / 3) * scipy.special.kv(1 / 3, z))


CORRELATIONS: dict[str, Correlation] = {
    "matern13": kolmogorov,
    "matern12": lambda r: math.exp(-r),
    "matern32": lambda r: (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r),
    "matern52": lambda r: (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r),
    "squared-exponential": lambda r: math.exp(-r * r / 2),
}


def integral_with_kink(f: Callable[[float], float], a: float, b: float, kink: float) -> float:
    """∫_a^b f by adaptive quadrature on either side of the kink."""
    ends = [a, min(max(kink, a), b), b]
    pieces = [
        scipy.integrate.quad(f, p, q, epsabs=1e-11, epsrel=1e-10, limit=200)[0]
        for p, q in itertools.pairwise(ends)
        if q > p
    ]
    return float(sum(pieces))


def ray_point(
    k: Correlation, ell: Sequence[float], rays: LineIntegrals, n: int, point: Array
) -> float:
    """∫ w(s) k(|(o + s ω - z) / ℓ|) ds of one ray, split at the closest approach."""
    o, w = rays.origin[n].numpy() / ell, rays.direction[n].numpy() / ell
    away = point / ell - o
    pace = float(np.linalg.norm(w))
    foot = float(away @ w) / pace**2
    nearest = float(np.linalg.norm(away - foot * w))
    total = 0.0
    for j, weight in enumerate(rays.weights[n].tolist()):
        a, b = rays.edges[n, j : j + 2].tolist()
        part = integral_with_kink(lambda s: k(math.hypot(nearest, pace * (s - foot))), a, b, foot)
        total += weight * part
    return total


def ray_pair(
    k: Correlation,
    ell: Sequence[float],
    rays: tuple[LineIntegrals, int],
    others: tuple[LineIntegrals, int],
    nodes: int = 12,
) -> float:
    """∬ w w' k ds ds': `ray_point` under a composite rule graded towards both ends."""
    g, n = others
    x, weight = np.polynomial.legendre.leggauss(nodes)
    cuts = [0.0, *(2.0**-i for i in range(12, 0, -1)), *(1 - 2.0**-i for i in range(2, 13)), 1.0]
    total = 0.0
    for j, w in enumerate(g.weights[n].tolist()):
        a, b = g.edges[n, j : j + 2].tolist()
        for p, q in itertools.pairwise(cuts):
            s = a + (b - a) * (p + (q - p) * (x + 1) / 2)
            points = g.origin[n].numpy() + s[:, None] * g.direction[n].numpy()
            values = [ray_point(k, ell, *rays, point) for point in points]
            total += w * (b - a) * (q - p) / 2 * float(weight @ np.array(values))
    return total


def ray_variance(k: Correlation, ell: Sequence[float], rays: LineIntegrals, n: int) -> float:
    """∬ w(s) w(s') k(|s - s'| |ω/ℓ|) ds ds' through the autocorrelation of w."""
    pace = float(np.linalg.norm(rays.direction[n].numpy() / ell))
    edges, weights = rays.edges[n].tolist(), rays.weights[n].tolist()

    def overlap(lag: float) -> float:
        """∫ w(s) w(s + lag) ds of the step function w."""
        total = 0.0
        for i, j in itertools.product(range(len(weights)), repeat=2):
            low = max(edges[i], edges[j] - lag)
            high = min(edges[i + 1], edges[j + 1] - lag)
            total += weights[i] * weights[j] * max(0.0, high - low)
        return total

    breaks = sorted({0.0, *(abs(a - b) for a, b in itertools.combinations(edges, 2))})
    pieces = [
        scipy.integrate.quad(lambda u: overlap(u) * k(u * pace), p, q, epsabs=1e-14)[0]
        for p, q in itertools.pairwise(breaks)
        if q > p
    ]
    return 2 * float(sum(pieces))
