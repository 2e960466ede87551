"""Places where stars of uncertain distances may be, against sums over distances."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, OutsidePolicy
from dustmap.gp.kernels import Matern32
from dustmap.inference import LogNormalPosterior, Unresolved
from dustmap.linalg import AbstractOperator
from dustmap.sky.observations import Observations, Stops, _segments, observe, sight_lines
from dustmap.sky.stars import (
    AbstractDistances,
    ExactDistances,
    ExponentialDensity,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
    StarTable,
)
from dustmap.sky.systems import system_named

Array = NDArray[np.float64]

GRID = RegularGrid.from_bounds((-40.0, -20.0, -40.0), (40.0, 420.0, 40.0), (5, 23, 5))
KERNEL = Matern32(60.0, 1.0, dim=3)
ERROR = 0.05


def posterior(samples: int = 12) -> LogNormalPosterior:
    """A cloud of 1 mag at 200 pc along y in thin dust, by draws that are not sure of it."""
    y = GRID.points()[:, 1]
    density = 2e-4 + 0.02 * torch.exp(-0.5 * ((y - 200.0) / 20.0) ** 2)
    generator = torch.Generator().manual_seed(0)
    off = 0.3 * torch.randn(samples, len(y), dtype=torch.float64, generator=generator)

    def rows(functional: AbstractFunctional) -> AbstractOperator:
        return interpolation(functional, GRID, dtype=torch.float64)

    lacking = Unresolved.of(KERNEL, GRID)
    return LogNormalPosterior(rows, density.log(), density.log() + off, unresolved=lacking)


def seen(distances: AbstractDistances, outside: OutsidePolicy) -> Observations:
    n = len(distances)
    some = np.full(n, 90.0), np.zeros(n), distances, np.full(n, 0.3), np.full(n, ERROR)
    return observe(StarTable(np.arange(n), *some, system_named("A_V")), GRID, outside)


PARALLAXES = ParallaxDistances(
    np.array([5.0, 4.0]),
    np.array([0.5, 1.2]),
    ExponentialDensity(500.0, 3_000.0),
)
KINDS: dict[str, AbstractDistances] = {
    "normal": GaussianDistances(np.array([180.0, 210.0]), np.array([20.0, 60.0])),
    "percentiles": PercentileDistances(*np.array([[170.0, 100.0], [190.0, 150.0], [230.0, 240.0]])),
    "parallax": PARALLAXES,
}


@pytest.mark.parametrize("kind", KINDS)
def test_places_have_the_survival_function_of_the_distances(kind: str) -> None:
    observed, stops = seen(KINDS[kind], OutsidePolicy.TRUNCATE), Stops.of_segments()
    assert observed.spread is not None
    expected = observed.spread.rays.weights.numpy()
    parts = (stops.before @ stops.probability).numpy()
    found = np.append(parts[0], parts[1:].reshape(expected.shape[1] - 1, -1).mean(1))
    # The box cuts a segment.
    whole = (observed.spread.rays.edges[:, 1:] < 420.0).numpy()
    np.testing.assert_allclose(
        np.broadcast_to(found, expected.shape)[whole], expected[whole], atol=0.01
    )


@pytest.mark.parametrize("kind", KINDS)
def test_measurements_are_as_likely_as_by_a_sum_over_distances(kind: str) -> None:
    """In front of the cloud, in it and behind it, with twice the variance between the nodes."""
    distances, map_ = KINDS[kind], posterior()
    observed, stops = seen(distances, OutsidePolicy.TRUNCATE), Stops.of_segments()
    index = torch.arange(len(observed))
    nodes, lacking = observed.extinctions_at(stops, index, map_)
    assert map_.unresolved is not None
    more = map_.unresolved.scaled(2.0).of_integrals(nodes.variance, lacking)
    mean, variance = nodes.mean.numpy(), (nodes.variance + more).numpy()

    levels = (np.arange(4000) + 0.5) / 4000
    d = distances.quantile(levels)
    where = np.full(d.size, 90.0), np.zeros(d.size), ExactDistances(d.ravel())
    rays = sight_lines(*where, GRID, OutsidePolicy.TRUNCATE).rays
    exact = replace(map_, unresolved=map_.unresolved.scaled(2.0)).predict(rays)
    each = exact.mean.numpy().reshape(d.shape), exact.variance.numpy().reshape(d.shape)
    y = np.linspace(-0.3, 2.5, 200)
    at_places = density(y, mean, variance) @ stops.probability.numpy()
    by_distance = density(y, *each).mean(-1)
    assert (by_distance.sum(0) * (y[1] - y[0])).min() > 0.97
    lost = (by_distance * np.log(by_distance / at_places)).sum(0) * (y[1] - y[0])
    assert np.abs(lost).max() < 0.005
    # One normal density of the same moments loses more.
    both = mean @ stops.probability.numpy()
    square = (variance + mean**2) @ stops.probability.numpy()
    normal = density(y, both[:, None], (square - both**2)[:, None])[..., 0]
    worse = (by_distance * np.log(by_distance / normal)).sum(0) * (y[1] - y[0])
    assert worse.max() > 10.0 * np.abs(lost).max()


def density(y: Array, mean: Array, variance: Array) -> Array:
    """p(y | A) (Y, N, K) of extinctions (Y,)."""
    v = variance + ERROR**2
    off = y[:, None, None] - mean
    return np.asarray(np.exp(-0.5 * off**2 / v) / np.sqrt(2.0 * np.pi * v))


def test_variance_between_the_nodes_is_that_of_stars_at_the_places() -> None:
    """By a map whose factor is three."""
    map_ = posterior()
    assert map_.unresolved is not None
    known, lacking = map_.unresolved, map_.unresolved.scaled(3.0)
    observed, stops = seen(KINDS["normal"], OutsidePolicy.TRUNCATE), Stops.of_segments()
    nodes, before = observed.extinctions_at(stops, torch.arange(2), map_)
    segments = _segments._cut(observed.batch.functional)  # type: ignore[arg-type]
    d = segments.edges[:, :1] + segments.edges.diff(dim=-1) @ stops.before
    where = np.full(d.numel(), 90.0), np.zeros(d.numel()), ExactDistances(d.flatten().numpy())
    rays = sight_lines(*where, GRID, OutsidePolicy.TRUNCATE).rays
    plain = replace(map_, unresolved=None).predict(rays)
    both = replace(map_, unresolved=lacking).predict(rays)
    # Half of a segment's dust is before its middle, but for the edge of the cloud of 1 mag.
    torch.testing.assert_close(nodes.mean.flatten(), plain.mean, rtol=0.02, atol=0.01)
    torch.testing.assert_close(nodes.variance.flatten(), plain.variance, rtol=0.15, atol=1e-4)
    more = 3.0 * known.of_integrals(nodes.variance, before)
    assert float(more.mean()) > 0.1 * float(nodes.variance.mean())
    expected = both.variance - plain.variance
    torch.testing.assert_close(more.flatten(), expected, rtol=0.1, atol=1e-4)
    none = observed.extinctions_at(stops, torch.arange(2), replace(map_, unresolved=None))[1]
    assert float(none.abs().max()) == 0.0


def test_segments_are_cut_without_going_back() -> None:
    """(b − a) + a is one rounding more than b, where the next segment has no length."""
    a, b = 166.78660508366167, 424.806813743271
    assert a + (b - a) > b
    edges = torch.tensor([[0.0, a, b, b]], dtype=torch.float64)
    unit = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    cut = _segments._cut(LineIntegrals(0.0 * unit, unit, edges, torch.ones(1, 3).double()))
    assert bool((cut.edges.diff() >= 0).all())
    assert set(edges[0].tolist()) <= set(cut.edges[0].tolist())


def test_no_stars_have_no_extinctions() -> None:
    observed, none = seen(KINDS["normal"], OutsidePolicy.TRUNCATE), torch.arange(0)
    nodes, lacking = observed.extinctions_at(Stops.of_segments(), none, posterior())
    assert nodes.mean.shape == lacking.shape == (0, len(Stops.of_segments().probability))
