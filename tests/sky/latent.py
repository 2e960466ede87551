"""Stars with parallaxes behind dust in one or two dimensions, and its exact posterior.

    ln ρ ~ GP at the nodes, multilinear in between     d_n ~ d² for d < REACH
    ϖ_n ~ N(1/d_n, σ_ϖ²)                               y_n ~ N(A_n(d_n), σ²),  A_n(d) = ∫₀^d ρ

The posterior of the field is that of Hamiltonian Monte Carlo with every star's distance summed out
on a grid: slow and without approximation but for the grid and the number of draws.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import LogNormalModel, LogNormalPosterior, MGVISettings, fit_mgvi
from dustmap.sky.observations import DistanceSpread
from dustmap.sky.observations._segments import quantiles_of, segments_of
from dustmap.sky.stars import (
    AbstractDistancePrior,
    AbstractDistances,
    ExponentialDensity,
    LearnedPrior,
    ParallaxDistances,
    ParallaxSample,
    ToLearn,
)

Array = NDArray[np.float64]
#: Steps of a ray of the references.
FINE = 800


@dataclass(frozen=True)
class Scene:
    """The grid, Matérn-3/2 prior of ln ρ, and noise. reach: of the stars, in pc.

    The Sun is at the origin.
    """

    grid: RegularGrid
    length: float
    std: float
    median: float
    noise: float
    reach: float

    @property
    def nodes(self) -> Array:
        return np.asarray(self.grid.points().numpy())

    @functools.cached_property
    def root(self) -> Array:
        """Cholesky factor of the covariance of ln ρ at the nodes (M, M)."""
        apart = np.linalg.norm(self.nodes[:, None] - self.nodes, axis=-1)
        r = np.sqrt(3.0) * apart / self.length
        covariance = self.std**2 * (1 + r) * np.exp(-r)
        return np.linalg.cholesky(covariance + 1e-9 * np.eye(len(covariance)))

    def density(self, white: Array) -> Array:
        """ρ (..., M) of whitened fields (..., M)."""
        return np.asarray(self.median * np.exp(white @ self.root.T))

    def rows(self, direction: Array, d: Array) -> Array:
        """A_n(d_nk) = rows ρ: (N, K, M), by the midpoint rule along every ray."""
        step = self.reach / FINE
        s = step * (np.arange(FINE) + 0.5)
        out = np.empty((*d.shape, self.grid.size))
        units, ray = np.unique(direction, axis=0, return_inverse=True)
        for k, unit in enumerate(units):
            hats = np.ones((FINE, self.grid.size))
            for axis, h in enumerate(self.grid.spacing):
                apart = np.abs(s[:, None] * unit[axis] - self.nodes[:, axis])
                hats *= np.maximum(0.0, 1.0 - apart / h)
            total = np.concatenate([np.zeros((1, self.grid.size)), step * np.cumsum(hats, axis=0)])
            place = np.clip(d[ray == k] / step, 0.0, FINE - 1e-9)
            cell = place.astype(int)
            u = (place - cell)[..., None]
            out[ray == k] = (1 - u) * total[cell] + u * total[cell + 1]
        return out

    def extinction(self, white: Array, direction: Array, d: Array) -> Array:
        """A_n(d_n) of whitened fields (..., M): (..., N)."""
        return np.asarray(self.density(white) @ self.rows(direction, d[:, None])[:, 0].T)


def line(nodes: int = 41) -> Scene:
    grid = RegularGrid.from_bounds([0.0], [1000.0], [nodes])
    return Scene(grid, 150.0, 0.8, 1e-3, 0.03, 1000.0)


def square() -> Scene:
    grid = RegularGrid.from_bounds([-500.0, -500.0], [500.0, 500.0], [12, 12])
    return Scene(grid, 250.0, 0.8, 2e-3, 0.03, 500.0)


@dataclass(frozen=True)
class Sky:
    """white (M,): the field of the truth; direction (N, D) and y (N,) of the stars behind the dust;
    d, parallax, error (N' >= N,): theirs and those of others of the survey."""

    scene: Scene
    white: Array
    direction: Array
    d: Array
    parallax: Array
    error: Array
    y: Array

    @staticmethod
    def draw(scene: Scene, seed: int, n: int, fraction: float, survey: int = 0) -> "Sky":
        """n stars, of max(n, survey) whose parallaxes are known, uniform in a ball.

        fraction: error / parallax at the median distance.
        """
        rng = np.random.default_rng(seed)
        white = rng.standard_normal(scene.grid.size)
        d = scene.reach * rng.uniform(size=max(n, survey)) ** (1 / 3)
        direction = np.ones((n, 1))
        if scene.grid.dim == 2:
            angle = 2 * np.pi * rng.uniform(size=n)
            direction = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        error = np.full(len(d), fraction * 1000.0 / (scene.reach * 0.5 ** (1 / 3)))
        parallax = 1000.0 / d + error * rng.standard_normal(len(d))
        y = scene.extinction(white, direction, d[:n]) + scene.noise * rng.standard_normal(n)
        return Sky(scene, white, direction, d, parallax, error, y)

    @property
    def survey(self) -> ParallaxDistances:
        """All distances, under the prior that they were drawn from."""
        prior = ExponentialDensity(1e9, self.scene.reach)
        return ParallaxDistances(self.parallax, self.error, prior)

    def under(self, prior: AbstractDistancePrior) -> ParallaxDistances:
        """The distances of the stars behind the dust."""
        n = len(self.y)
        return ParallaxDistances(self.parallax[:n], self.error[:n], prior)

    def fitted(self, distances: AbstractDistances, samples: int = 16) -> LogNormalPosterior:
        """The package's fit with hyperparameters known, the spread of distances refreshed once."""
        scene, n = self.scene, len(self.y)
        segments = segments_of(quantiles_of(distances), far=np.full(n, scene.reach))
        edges, mean, variance = map(
            torch.from_numpy, (segments.edges, segments.mean, segments.variance)
        )
        direction = torch.from_numpy(self.direction)
        rays = LineIntegrals(0 * direction, direction, edges, mean, torch.arange(n))
        seen, y = DistanceSpread(rays, variance), torch.from_numpy(self.y)
        added = seen.uniform(float(y.sum() / rays.moments()[:, 0].sum()))
        for _ in range(2):
            dim = scene.grid.dim
            kernel = Matern32(scene.length, scene.std**2, dim=dim).fixed()
            model = LogNormalModel(
                GridPrior.padded(kernel, scene.grid, padding=3.0, dtype=torch.float64),
                ConstantMean(math.log(scene.median), learn=False),
                GaussianLikelihood(),
                functools.partial(interpolation, grid=scene.grid, dtype=torch.float64),
            )
            data = Batch(rays, y, scene.noise**2 + added)
            posterior = fit_mgvi(model, data, MGVISettings(samples=samples)).posterior
            added = seen.added_variance(posterior, 16)
        return posterior


@np.errstate(over="ignore", invalid="ignore")  # steps that are too long are not taken
def exact(sky: Sky, seed: int = 0, draws: int = 200, chains: int = 8, nodes: int = 160) -> Array:
    """Draws of ρ at the nodes (draws, chains, M) from its exact posterior."""
    target = _Target.of(sky, nodes)
    rng = np.random.default_rng(seed)
    curvature = target.curvature(sky.white)
    # u = Fᵀ z with F Fᵀ the curvature, so that the posterior of u is nearly round.
    factor = np.linalg.inv(np.linalg.cholesky(curvature)).T
    state = sky.white @ np.linalg.inv(factor).T + 0.5 * rng.standard_normal((chains, len(factor)))
    step, steps = 0.25, 7
    pilot, kept = list[Array](), list[Array]()
    value, slope = target(state, factor)
    for turn in range(2 * draws):
        # Where few stars are, the posterior is wider than its curvature says.
        if turn == draws // 2:
            z = np.concatenate(pilot[draws // 4 :])
            wider = np.linalg.cholesky(0.5 * np.cov(z.T) + 0.5 * factor @ factor.T)
            state = np.asarray(np.linalg.solve(wider, factor @ state.T).T, np.float64)
            factor = np.asarray(wider, np.float64)
            value, slope = target(state, factor)
        push = rng.standard_normal(state.shape)
        length = step * rng.uniform(0.7, 1.1)
        u, v, g, p = state, value, slope, push
        for _ in range(steps):
            p = p + 0.5 * length * g
            u = u + length * p
            v, g = target(u, factor)
            p = p + 0.5 * length * g
        gain = v - value - 0.5 * (np.square(p) - np.square(push)).sum(1)
        taken = np.log(rng.uniform(size=chains)) < np.nan_to_num(gain, nan=-np.inf)
        state, slope = (np.where(taken[:, None], a, b) for a, b in ((u, state), (g, slope)))
        value = np.where(taken, v, value)
        if turn < draws:  # steps are tuned before any draw is kept
            step *= math.exp(0.1 * (np.mean(taken) - 0.8))
            pilot.append(state @ factor.T)
        else:
            kept.append(state @ factor.T)
    return sky.scene.density(np.stack(kept))


@dataclass(frozen=True)
class _Target:
    """ln p(z, y, ϖ) of whitened fields z. rows (N K, M): A at the distances of every star's grid;
    log_weight (N, K): ln p(d_k | ϖ_n)."""

    sky: Sky
    rows: Array
    log_weight: Array

    @staticmethod
    def of(sky: Sky, nodes: int) -> "_Target":
        reach = sky.scene.reach
        fine = reach * (np.arange(20_000) + 0.5) / 20_000
        d, log_weight = np.empty((2, len(sky.y), nodes))
        for n in range(len(sky.y)):

            def log_p(d: Array, x: float = sky.parallax[n], e: float = sky.error[n]) -> Array:
                return np.asarray(2 * np.log(d) - 0.5 * ((x - 1000.0 / d) / e) ** 2)

            p = log_p(fine)
            within = fine[p > p.max() - 18.0]
            first, last = max(within[0] - 0.05, 0.01), min(within[-1] + 0.05, reach)
            ends = np.linspace(first, last, nodes + 1)
            d[n] = 0.5 * (ends[1:] + ends[:-1])
            log_weight[n] = log_p(d[n])
        rows = sky.scene.rows(sky.direction, d).reshape(-1, sky.scene.grid.size)
        log_weight -= np.log(np.exp(log_weight - log_weight.max(1, keepdims=True)).sum(1))[:, None]
        return _Target(sky, rows, log_weight - log_weight.max(1, keepdims=True))

    def __call__(self, u: Array, factor: Array) -> tuple[Array, Array]:
        """The logarithm (C,) and its gradient by u (C, M), z = factor u."""
        scene, z = self.sky.scene, u @ factor.T
        rho = scene.density(z)
        a = (rho @ self.rows.T).reshape(len(u), *self.log_weight.shape)
        off = self.sky.y[:, None] - a
        each = self.log_weight - 0.5 * (off / scene.noise) ** 2
        highest = each.max(-1, keepdims=True)
        share = np.exp(each - highest)
        total = share.sum(-1, keepdims=True)
        value = (np.log(total) + highest).sum((1, 2)) - 0.5 * np.square(z).sum(1)
        pull = (share / total * off / scene.noise**2).reshape(len(u), -1) @ self.rows
        return value, ((pull * rho) @ scene.root - z) @ factor

    def curvature(self, z: Array) -> Array:
        """That of the stars' expected extinctions at z, with their variance over the distances."""
        p = np.exp(self.log_weight)[..., None]
        p /= p.sum(1, keepdims=True)
        jacobian = self.rows * self.sky.scene.density(z) @ self.sky.scene.root
        a = (self.rows @ self.sky.scene.density(z)).reshape(self.log_weight.shape)
        mean = (p * jacobian.reshape(*self.log_weight.shape, -1)).sum(1)
        p = p[..., 0]
        variance = (p * a**2).sum(1) - (p * a).sum(1) ** 2 + self.sky.scene.noise**2
        return np.asarray(np.eye(len(z)) + (mean / variance[:, None]).T @ mean)


def learned_of(distances: ParallaxDistances, wanted: ToLearn | None = None) -> LearnedPrior:
    """The distribution of these stars' distances, learned from their parallaxes."""
    sample = ParallaxSample()
    sample.add(distances)
    return sample.learned(wanted or ToLearn())
