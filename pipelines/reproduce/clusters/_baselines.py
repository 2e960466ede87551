"""What a map of clusters has to beat: one density, a disc alone, and the nearest clusters.

Every baseline has an intrinsic scatter s like the map's: A_n ~ N(μ_n, σ_n² + s²), with the errors σ
of the catalog; what it learns, it learns by maximum likelihood from the clusters that the map has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.spatial import cKDTree

from dustmap.sky.stars import StarTable

Array: TypeAlias = NDArray[np.float64]

#: R₀ and z☉ in pc, as the map's own disc has them.
SUN_RADIUS, SUN_HEIGHT = 8178.0, 20.8
#: Points of the rule along a ray.
POINTS = 64
#: Numbers of neighbours to choose from, by leaving one out.
NEIGHBOURS = (1, 2, 3, 5, 8, 12, 20)
_LEAST_SCATTER = 1e-3


@final
@dataclass(frozen=True, eq=False)
class Guess:
    """Extinctions (N,) of a baseline, the scatter s, both in mag, and what else it learned."""

    name: str
    mean: Array
    scatter: float
    found: Mapping[str, float]


def baselines(train: StarTable, test: StarTable) -> list[Guess]:
    """All three, for the clusters of `test`."""
    return [constant(train, test), disc(train, test), neighbours(train, test)]


def constant(train: StarTable, test: StarTable) -> Guess:
    """A = ρ d."""
    rho, scatter = _likeliest(
        lambda p: math.exp(p[0]) * train.distance, train, np.array([math.log(1e-3)])
    )
    density = math.exp(rho[0])
    return Guess("constant density", density * test.distance, scatter, {"density": density})


def disc(train: StarTable, test: StarTable) -> Guess:
    """A = ρ₀ ∫ exp(−|z|/H − (R − R₀)/L) ds, its three numbers learned."""
    rays, others = _Rays.of(train), _Rays.of(test)
    start = np.array([math.log(1e-3), math.log(100.0), 1.0 / 3000.0 * SUN_RADIUS])
    at, scatter = _likeliest(rays.extinction, train, start)
    found = {
        "density": math.exp(at[0]),
        "height_pc": math.exp(at[1]),
        "length_pc": float(SUN_RADIUS / at[2]),
    }
    return Guess("exponential disc", others.extinction(at), scatter, found)


def neighbours(train: StarTable, test: StarTable) -> Guess:
    """The mean A of the k clusters nearest in space; k of the least error when one is left out."""
    tree = cKDTree(train.positions())
    _, near = tree.query(train.positions(), max(NEIGHBOURS) + 1)
    left_out = {k: train.extinction[near[:, 1 : k + 1]].mean(1) for k in NEIGHBOURS}
    best = min(NEIGHBOURS, key=lambda k: float(np.mean((train.extinction - left_out[k]) ** 2)))
    _, scatter = _likeliest(lambda _: left_out[best], train, np.empty(0))
    _, near = tree.query(test.positions(), [*range(1, best + 1)])
    mean = train.extinction[near].mean(1)
    return Guess("nearest clusters", mean, scatter, {"k": best})


@final
@dataclass(frozen=True, eq=False)
class _Rays:
    """|z| and R − R₀ (N, K) in pc at the points of the rule, with its weights (N, K) in pc."""

    height: Array
    outwards: Array
    weights: Array

    @classmethod
    def of(cls, stars: StarTable) -> "_Rays":
        nodes, weights = leggauss(POINTS)
        points = stars.positions()[:, None, :] * (0.5 * (nodes + 1.0))[:, None]
        radius = np.hypot(SUN_RADIUS - points[..., 0], points[..., 1])
        return cls(
            np.abs(points[..., 2] + SUN_HEIGHT),
            radius - SUN_RADIUS,
            0.5 * weights * stars.distance[:, None],
        )

    def extinction(self, p: Array) -> Array:
        """(N,) for p = ln ρ₀, ln H, R₀/L."""
        exponent = p[0] - self.height / math.exp(p[1]) - self.outwards * p[2] / SUN_RADIUS
        found: Array = (self.weights * np.exp(exponent)).sum(1)
        return found


def _likeliest(
    model: Callable[[Array], Array], stars: StarTable, start: Array
) -> tuple[Array, float]:
    """Parameters and scatter of the largest likelihood."""

    def loss(p: Array) -> float:
        variance = stars.extinction_error**2 + _LEAST_SCATTER**2 + math.exp(2.0 * p[-1])
        r = stars.extinction - model(p[:-1])
        return 0.5 * float(np.mean(r**2 / variance + np.log(variance)))

    found = minimize(
        loss,
        np.append(start, math.log(0.3)),
        method="Nelder-Mead",
        options={"maxiter": 4000, "xatol": 1e-5, "fatol": 1e-9, "adaptive": True},
    )
    return found.x[:-1], math.exp(found.x[-1])
