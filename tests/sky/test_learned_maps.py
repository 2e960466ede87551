"""Extinctions of maps in one dimension, from stars with parallaxes, against the truth."""

import functools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import LogNormalModel, LogNormalPosterior, MGVISettings, fit_mgvi
from dustmap.sky.observations import DistanceSpread
from dustmap.sky.observations._segments import segments_of
from dustmap.sky.stars import (
    AbstractDistancePrior,
    AbstractDistances,
    FlatParallax,
    ParallaxDistances,
    learn_prior,
)

pytestmark = pytest.mark.slow

Array = NDArray[np.float64]
GRID = RegularGrid.from_bounds([0.0], [1000.0], [41])
NODES = GRID.points()[:, 0].numpy()
LENGTH, STD, MEDIAN = 150.0, 0.8, 1e-3
NOISE = 0.03
PLACES = np.array([200.0, 400.0, 600.0, 800.0])
FLAT = FlatParallax(10_000.0)


def truth(rng: np.random.Generator) -> Array:
    """A density at the nodes, from the prior."""
    r = np.sqrt(3.0) * np.abs(NODES[:, None] - NODES) / LENGTH
    covariance = STD**2 * (1 + r) * np.exp(-r) + 1e-9 * np.eye(len(NODES))
    white = rng.standard_normal(len(NODES))
    return np.asarray(MEDIAN * np.exp(np.linalg.cholesky(covariance) @ white))


def column(rho: Array, d: Array) -> Array:
    """A(<d) of a density that is linear between the nodes."""
    fine = np.linspace(0.0, 1000.0, 20_001)
    density = np.interp(fine, NODES, rho)
    steps = 0.5 * (density[1:] + density[:-1]) * np.diff(fine)
    return np.asarray(np.interp(d, fine, np.concatenate([[0.0], np.cumsum(steps)])))


def spread(distances: AbstractDistances) -> DistanceSpread:
    n = len(distances)
    segments = segments_of(distances, far=np.full(n, 1000.0))
    edges, mean, variance = map(
        torch.from_numpy, (segments.edges, segments.mean, segments.variance)
    )
    ones = torch.ones(n, 1, dtype=torch.float64)
    return DistanceSpread(LineIntegrals(0 * ones, ones, edges, mean, torch.arange(n)), variance)


def fitted(distances: AbstractDistances, extinction: Array) -> LogNormalPosterior:
    """With hyperparameters known, and the spread of the distances refreshed once."""
    seen, y = spread(distances), torch.from_numpy(extinction)
    added = seen.uniform(float(y.sum() / seen.rays.moments()[:, 0].sum()))
    for _ in range(2):
        kernel = Matern32(LENGTH, STD**2, dim=1).requires_grad_(False)
        model = LogNormalModel(
            GridPrior.padded(kernel, GRID, padding=3.0, dtype=torch.float64),
            ConstantMean(math.log(MEDIAN), learn=False),
            GaussianLikelihood(),
            functools.partial(interpolation, grid=GRID, dtype=torch.float64),
        )
        data = Batch(seen.rays, y, NOISE**2 + added)
        posterior = fit_mgvi(model, data, MGVISettings(samples=16)).posterior
        added = seen.added_variance(posterior, 16)
    return posterior


def extinctions(posterior: LogNormalPosterior) -> tuple[Array, Array]:
    """Mean and standard deviation of A(<d) at the places."""
    edges = np.stack([np.zeros_like(PLACES), PLACES], axis=1)
    ones = torch.ones(len(PLACES), 1, dtype=torch.float64)
    keys = torch.arange(len(PLACES))
    rays = LineIntegrals(0 * ones, ones, torch.from_numpy(edges), ones, keys)
    draws = posterior.sample(rays, posterior.n_samples, torch.Generator()).double().numpy()
    return draws.mean(0), draws.std(0, ddof=1)


def sky(seed: int, fraction: float) -> tuple[Array, ParallaxDistances, Array]:
    """A density, 10,000 stars of a survey uniform in the volume, and extinctions of 300 of them."""
    rng = np.random.default_rng(seed)
    rho = truth(rng)
    d = 1000.0 * rng.uniform(size=10_000) ** (1 / 3)
    error = np.full(len(d), fraction * np.median(1000.0 / d))
    parallax = 1000.0 / d + error * rng.standard_normal(len(d))
    y = column(rho, d[:300]) + NOISE * rng.standard_normal(300)
    return rho, ParallaxDistances(parallax, error, FLAT), y


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.3])
def test_extinctions_are_not_biased_by_the_prior_that_was_learned(fraction: float) -> None:
    off, inside, flat = [], [], []
    for seed in range(3):
        rho, survey, y = sky(seed, fraction)
        expected = column(rho, PLACES)

        def under(
            prior: AbstractDistancePrior, s: ParallaxDistances = survey, y: Array = y
        ) -> tuple[Array, Array]:
            return extinctions(fitted(ParallaxDistances(s.parallax[:300], s.error[:300], prior), y))

        mean, std = under(learn_prior(survey).prior)
        off.append(mean / expected - 1.0)
        inside.append(np.abs(mean - expected) < std)
        if fraction > 0.1:
            flat.append(under(FLAT)[0] / expected - 1.0)
    error = np.std(off, axis=0, ddof=1) / np.sqrt(len(off))
    np.testing.assert_array_less(np.abs(np.mean(off, axis=0)), 3.0 * error + 0.02)
    # Twelve values that depend on one another.
    assert 0.4 <= np.mean(inside) <= 0.95
    if fraction > 0.1:
        assert np.mean(flat, axis=0).max() > 0.06
