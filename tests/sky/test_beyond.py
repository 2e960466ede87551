"""Dust beyond the box: moments of the prior along the rest of a ray, against dense references."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap.gp import ConstantMean, LogDiscMean, RegularGrid
from dustmap.gp.functionals import OutsidePolicy, PointValues
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
)
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.sky.observations import Observations, PriorDust, observe
from dustmap.sky.observations._sight_lines import crowding
from dustmap.sky.stars import (
    AbstractDistances,
    ExactDistances,
    GaussianDistances,
    StarTable,
    combined,
)
from dustmap.sky.systems import system_named

Array = NDArray[np.float64]

BOX = RegularGrid.from_bounds((-50.0, -50.0, -50.0), (50.0, 50.0, 50.0), (5, 5, 5))
KERNELS: dict[str, AbstractKernel] = {
    "matern12": Matern12(40.0, 0.64, dim=3),
    "matern32": Matern32(40.0, 0.64, dim=3),
    "matern52": Matern52(40.0, 0.64, dim=3),
    "squared-exponential": SquaredExponential(40.0, 0.64, dim=3),
}


def dust(kernel: AbstractKernel, *, lognormal: bool) -> PriorDust:
    mean = ConstantMean(np.log(2e-3) if lognormal else 2e-3)
    return PriorDust(kernel, mean, lognormal)


def table(distances: AbstractDistances, l: float = 90.0, b: float = 0.0) -> StarTable:
    count = len(distances)
    return StarTable(
        source_id=np.arange(count),
        l=np.full(count, l),
        b=np.full(count, b),
        distances=distances,
        extinction=np.full(count, 0.3),
        extinction_error=np.full(count, 0.02),
        system=system_named("A_V"),
    )


def seen(stars: StarTable, grid: RegularGrid = BOX) -> Observations:
    return observe(stars, grid, OutsidePolicy.PRIOR)


def outside(observed: Observations, prior: PriorDust) -> tuple[Array, Array]:
    assert observed.beyond is not None
    mean, variance = observed.beyond.moments(prior)
    return mean.numpy(), variance.numpy()


@pytest.mark.parametrize("lognormal", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_pairs_are_the_double_integral(name: str, lognormal: bool) -> None:
    kernel = KERNELS[name]
    prior = dust(kernel, lognormal=lognormal)
    part = (np.arange(300) + 0.5) / 300

    for a, b, c, d in ((0.0, 3.0, 0.0, 3.0), (10.0, 60.0, 30.0, 200.0), (0.0, 9.0, 150.0, 170.0)):
        apart = (a + (b - a) * part[:, None]) - (c + (d - c) * part)
        dx = torch.from_numpy(np.stack([apart, 0 * apart, 0 * apart], axis=-1))
        k = kernel(dx).detach().numpy()
        exact = (np.expm1(k) if lognormal else k).mean() * (b - a) * (d - c)
        g = prior.pairs(torch.tensor([b - c, a - d, a - c, b - d], dtype=torch.float64).abs())
        found = float(g[0] + g[1] - g[2] - g[3])
        assert found == pytest.approx(exact, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("lognormal", [True, False])
@pytest.mark.parametrize("distances", ["exact", "uncertain", "leaking", "a disc"])
def test_moments_are_those_of_draws_of_dust_and_distance(distances: str, lognormal: bool) -> None:
    """Reference: draws of the density at places 2.5 pc apart, and of the star's distance."""
    kernel = KERNELS["matern32"]
    prior, b = dust(kernel, lognormal=lognormal), 0.0
    if distances == "a disc":
        if not lognormal:
            pytest.skip("the disc of a Gaussian density differs by its mean alone")
        b, prior = 30.0, replace(prior, mean=LogDiscMean(np.log(2e-3), 80.0, 3000.0))
    known: AbstractDistances = {
        "exact": ExactDistances(np.array([240.0])),
        "a disc": ExactDistances(np.array([240.0])),
        "uncertain": GaussianDistances(np.array([150.0]), np.array([40.0])),
        "leaking": GaussianDistances(np.array([40.0]), np.array([8.0])),
    }[distances]
    observed = seen(table(known, b=b))
    mean, variance = outside(observed, prior)
    face = float(50.0 / np.cos(np.radians(b)))

    rng = np.random.default_rng(0)
    s = np.arange(1.25, 400.0, 2.5)
    places = np.stack([0 * s, s * np.cos(np.radians(b)), s * np.sin(np.radians(b))], -1)
    dx = torch.from_numpy(places[:, None] - places[None])
    k = kernel(dx).detach().numpy() + 1e-9 * np.eye(len(s))
    m = prior.mean.values(PointValues(torch.from_numpy(places))).detach().numpy()
    field = m + rng.standard_normal((20_000, len(s))) @ np.linalg.cholesky(k).T
    rho = np.exp(field) if lognormal else field
    d = known.quantile(rng.uniform(size=len(rho)))[0]
    low, high = s - 1.25, s + 1.25
    length = np.clip(np.minimum(high, d[:, None]) - np.maximum(low, face), 0.0, None)
    a = (rho * length).sum(1)
    assert mean[0] == pytest.approx(a.mean(), abs=5 * a.std() / np.sqrt(len(a)) + 0.01 * a.mean())
    fourth = ((a - a.mean()) ** 4).mean()
    error = np.sqrt((fourth - a.var() ** 2) / len(a))
    assert variance[0] == pytest.approx(a.var(), abs=5 * error + 0.02 * a.var())


def test_stars_within_the_box_have_nothing_beyond() -> None:
    observed = seen(table(ExactDistances(np.array([10.0, 50.0]))))
    mean, variance = outside(observed, dust(KERNELS["matern12"], lognormal=True))
    assert observed.exact
    assert (mean == 0).all()
    assert (variance == 0).all()


def test_the_way_to_a_box_that_is_far_away_is_dust_too() -> None:
    away = RegularGrid.from_bounds((-50.0, 100.0, -50.0), (50.0, 200.0, 50.0), (5, 5, 5))
    observed = seen(table(ExactDistances(np.array([150.0, 260.0]))), away)
    prior = dust(KERNELS["matern32"], lognormal=False)
    mean, variance = outside(observed, prior)
    np.testing.assert_allclose(mean, 2e-3 * np.array([100.0, 160.0]), rtol=1e-6)
    # The star behind sees both parts, which hardly correlate across the box.
    alone = outside(seen(table(ExactDistances(np.array([110.0]))), BOX), prior)[1]
    assert variance[1] > variance[0] + 0.9 * alone[0]


def test_what_is_expected_alone_is_the_mean_of_the_moments() -> None:
    distances = GaussianDistances(np.array([300.0, 90.0, 700.0]), np.array([30.0, 20.0, 70.0]))
    observed = seen(table(distances))
    prior = dust(Matern32(60.0, 1.0, dim=3), lognormal=True)
    alone = observed.expected(prior)
    assert bool((alone > 0.0).any())
    assert torch.equal(alone, observed.parts_beyond(prior)[0])


def test_expected_dust_is_taken_from_what_was_measured_and_its_variance_is_noise() -> None:
    observed = seen(table(ExactDistances(np.array([30.0, 250.0]))))
    added = observed.uniform(2e-3, dust(KERNELS["matern32"], lognormal=True))
    after = observed.with_added(added)
    noise = after.batch.noise_variance
    assert noise is not None
    np.testing.assert_allclose(after.expected_beyond.numpy(), added.mean.numpy())
    np.testing.assert_allclose(noise.numpy(), 0.02**2 + added.variance.numpy())
    assert added.mean[0] == added.variance[0] == 0
    assert after.counts_at_the_box() == {
        "rays_that_leave_the_box": 1,
        "stars_beyond_the_box": 1,
        "stars_dropped_outside_the_box": 0,
    }


def test_stars_beyond_the_box_are_those_of_such_a_median_distance() -> None:
    """Also where all rays leave it, since no distance is certain, and whatever the policy."""
    distances = GaussianDistances(np.array([5.0, 40.0, 250.0]), np.array([1.0, 20.0, 20.0]))
    for policy in (OutsidePolicy.PRIOR, OutsidePolicy.TRUNCATE, OutsidePolicy.DROP):
        counts = observe(table(distances), BOX, policy).counts_at_the_box()
        assert counts["stars_beyond_the_box"] == 1


def test_noise_grows_with_what_has_been_taken_for_the_dust_beyond() -> None:
    observed = seen(table(ExactDistances(np.array([30.0, 250.0]))))
    after = observed.with_added(observed.uniform(2e-3, dust(KERNELS["matern32"], lognormal=True)))
    batch = replace(after.batch, response=torch.full_like(after.batch.y, 0.1))
    noise, whole = batch.noise_variance, 0.1 + after.expected_beyond
    assert noise is not None
    found = GaussianLikelihood(relative=0.2).noise_variance(batch)
    torch.testing.assert_close(found, noise + 0.04 * whole.square())


def test_measurements_are_so_many_times_the_dust_beyond() -> None:
    observed = seen(table(GaussianDistances(np.array([150.0]), np.array([40.0]))))
    prior = dust(KERNELS["matern32"], lognormal=False)
    once = observed.uniform(2e-3, prior)
    twice = once.times(torch.tensor([2.0]).double())
    torch.testing.assert_close(twice.mean, 2.0 * once.mean)
    torch.testing.assert_close(twice.variance, 4.0 * once.variance)
    torch.testing.assert_close(twice.shared, 4.0 * once.shared)


def test_the_part_of_the_noise_that_stars_share() -> None:
    """Of 40 behind the same dust most; of one alone, and of one in the box, none."""
    prior = dust(KERNELS["matern12"], lognormal=True)
    far = table(ExactDistances(np.append(np.full(40, 250.0), 30.0)))
    observed = seen(far)
    noisy = observed.with_added(observed.uniform(2e-3, prior))
    every = torch.arange(41)
    assert observed.shared_part(every) == 0.0
    assert noisy.shared_part(every[:-1]) > 0.9
    assert noisy.shared_part(every[-1:]) == 0.0
    assert noisy.shared_part(every) == pytest.approx(40 / 41 * noisy.shared_part(every[:-1]))


def test_an_uncertain_level_adds_to_the_variance() -> None:
    observed = seen(table(ExactDistances(np.array([250.0]))))
    prior = dust(KERNELS["matern32"], lognormal=True)
    mean, variance = outside(observed, prior)
    shifted, wide = outside(observed, replace(prior, level=1.5, level_std=0.3))
    assert shifted == pytest.approx(1.5 * mean)
    assert wide == pytest.approx(1.5**2 * variance + (0.3 * mean) ** 2)


@pytest.mark.parametrize("count", [60, 300])
def test_crowding_makes_independent_noise_that_claims_no_more(count: int) -> None:
    """Against the dense covariance of all stars' dust beyond the box, by points along the rays."""
    rng = np.random.default_rng(1)
    direction = rng.standard_normal((count, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    path = rng.uniform(20.0, 200.0, count)
    face = np.full(count, 60.0)
    prior = dust(KERNELS["matern32"], lognormal=True)
    tracks = np.concatenate([direction, face[:, None], path[:, None]], axis=1)
    found = crowding(torch.from_numpy(tracks), prior).numpy()

    node, weight = np.polynomial.legendre.leggauss(12)
    s = 60.0 + 0.5 * path[:, None] * (node + 1)
    points = (direction[:, None] * s[..., None]).reshape(-1, 3)
    w = (0.5 * path[:, None] * weight).ravel()
    covariance = np.zeros((count, count))
    apart = torch.from_numpy(points)
    for row in range(count):
        mine = slice(12 * row, 12 * row + 12)
        c = KERNELS["matern32"](apart[mine, None] - apart[None]).detach().expm1().numpy()
        covariance[row] = (w[mine, None] * c * w).reshape(12, count, 12).sum((0, 2))
    v = covariance.diagonal()
    exact = (covariance / np.sqrt(v[:, None] * v)).sum(1)
    ratio = found / exact
    assert 0.6 < np.median(ratio) < 1.5
    assert np.quantile(ratio, 0.05) > 0.35
    # Noise of V n bounds the correlated one in all directions but a few, and those by little.
    bound = covariance / np.sqrt(np.outer(v * found, v * found))
    assert np.linalg.eigvalsh(bound).max() < 2.0


@pytest.mark.parametrize(("clusters", "each"), [(2, 5), (8, 8), (4, 15), (4, 30), (1, 40)])
def test_stars_of_clusters_are_crowded_by_those_of_their_own(clusters: int, each: int) -> None:
    """Within a cluster all see the same dust beyond the box, and other clusters see other dust."""
    rng = np.random.default_rng(2)
    centre = rng.standard_normal((clusters, 3))
    centre /= np.linalg.norm(centre, axis=1, keepdims=True)
    direction = np.repeat(centre, each, 0) + 2e-3 * rng.standard_normal((clusters * each, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    tracks = np.concatenate([direction, np.full((len(direction), 2), (60.0, 200.0))], axis=1)
    found = crowding(torch.from_numpy(tracks), dust(KERNELS["matern32"], lognormal=True))
    s = 60.0 + 200.0 * (np.arange(100) + 0.5) / 100
    points = torch.from_numpy(centre[:, None] * s[:, None]).reshape(-1, 3)
    c = KERNELS["matern32"](points[:, None] - points).detach().expm1().numpy()
    covariance = c.reshape(clusters, 100, clusters, 100).mean((1, 3))
    v = covariance.diagonal()
    exact = each * (covariance / np.sqrt(v[:, None] * v)).sum(1)
    ratio = found.numpy().reshape(clusters, each) / exact[:, None]
    assert 0.8 < ratio.min() <= ratio.max() < 1.1


def test_many_stars_are_crowded_as_their_density_says() -> None:
    """Of more than are counted around, and of more in a ring than are counted."""
    rng = np.random.default_rng(3)
    direction = rng.standard_normal((50_000, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    path = rng.uniform(500.0, 550.0, len(direction))
    tracks = np.concatenate([direction, np.full((len(direction), 1), 400.0), path[:, None]], axis=1)
    prior = dust(KERNELS["matern32"], lognormal=True)
    found = crowding(torch.from_numpy(tracks), prior).numpy()
    t = np.linspace(0.0, 400.0, 4001)
    dx = torch.from_numpy(np.stack([t, 0 * t, 0 * t], axis=-1))
    c = KERNELS["matern32"](dx).detach().expm1().numpy()
    area = 2.0 * np.pi * np.trapezoid(c * t, t) / c[0]
    expected = len(direction) / (4.0 * np.pi) * area / (400.0 * (400.0 + path))
    assert np.median(found / expected) == pytest.approx(1.0, abs=0.05)
    assert np.quantile(np.abs(found / expected - 1.0), 0.95) < 0.3


@pytest.mark.parametrize("each", [1, 16])
@pytest.mark.parametrize(
    ("box", "distance", "error"),
    [
        ((100.0, 200.0), 150.0, 20.0),  # a box that the Sun is outside of
        ((100.0, 200.0), 190.0, 30.0),
        ((100.0, 200.0), 110.0, 20.0),
        ((-50.0, 50.0), 60.0, 20.0),
        ((-50.0, 50.0), 150.0, 20.0),
    ],
)
def test_distances_add_the_variance_of_uniform_dust(
    box: tuple[float, float], distance: float, error: float, each: int
) -> None:
    """ρ² Var d, of which a mean of stars has a part; no star is nearer than the Sun."""
    grid = RegularGrid.from_bounds((-50.0, box[0], -50.0), (50.0, box[1], 50.0), (5, 5, 5))
    stars = table(GaussianDistances(np.full(each, distance), np.full(each, error)))
    if each > 1:
        stars = combined(stars, np.full(each, 20.0))
        assert len(stars) == 1
    known = PriorDust(Matern32(40.0, 1e-12, dim=3), ConstantMean(2e-3), lognormal=False)
    added = seen(stars, grid).uniform(2e-3, known)
    # Of segments in which a star may end, a fraction of their lengths.
    assert float(added.variance) == pytest.approx((2e-3 * error) ** 2 / each, rel=0.02)


def test_a_lone_star_is_not_crowded() -> None:
    prior = dust(KERNELS["matern32"], lognormal=True)
    one = torch.tensor([[1.0, 0.0, 0.0, 60.0, 100.0]], dtype=torch.float64)
    assert crowding(one, prior).tolist() == [1.0]
    none = torch.zeros(3, 5, dtype=torch.float64)
    assert crowding(none, prior).tolist() == [1.0, 1.0, 1.0]
