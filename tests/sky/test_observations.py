"""Stars become weighted line integrals, and uncertain distances a variance."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap.gp import ConstantMean, ExactGP, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, Stratified
from dustmap.gp.kernels import Matern32
from dustmap.inference import LogNormalPosterior
from dustmap.sky.observations import (
    Moments,
    Observations,
    _segments,
    observe,
    predict_extinction,
    sight_lines,
)
from dustmap.sky.stars import (
    AbstractDistances,
    ExactDistances,
    ExponentialDensity,
    FlatParallax,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
    StarTable,
)
from dustmap.sky.systems import system_named
from tests.sky.radial import Radial, constant, dense_moments, falling, waves

Array = NDArray[np.float64]

GRID = RegularGrid.from_bounds((-50.0, -50.0, -50.0), (50.0, 50.0, 50.0), (3, 3, 3))
WIDE = RegularGrid.from_bounds((-2e4, -2e4, -2e4), (2e4, 2e4, 2e4), (3, 3, 3))
FAR = np.array([50.0, 300.0, 1000.0])
# Parallaxes of S/N 100, 10, 3 and 1, of zero, and a negative one.
PARALLAX, ERROR = np.array([5, 2, 1, 0.5, 0, -0.3]), np.array([0.05, 0.2, 0.3, 0.5, 0.3, 0.3])
KINDS: dict[str, AbstractDistances] = {
    "gauss-1%": GaussianDistances(FAR, 0.01 * FAR),
    "gauss-10%": GaussianDistances(FAR, 0.1 * FAR),
    "gauss-30%": GaussianDistances(FAR, 0.3 * FAR),
    "percentiles": PercentileDistances(0.8 * FAR, FAR, 1.4 * FAR),
    "flat": ParallaxDistances(PARALLAX, ERROR, FlatParallax(5e3)),
    "exponential": ParallaxDistances(PARALLAX, ERROR, ExponentialDensity(500.0, 5e3)),
}


def stars_at(distances: AbstractDistances) -> StarTable:
    count = len(distances)
    return StarTable(
        source_id=np.arange(count),
        l=np.full(count, 90.0),
        b=np.zeros(count),
        distances=distances,
        extinction=np.linspace(0.1, 0.4, count),
        extinction_error=np.linspace(0.01, 0.04, count),
        system=system_named("A_V"),
    )


def stars(*distances: float) -> StarTable:
    return stars_at(ExactDistances(np.array(distances)))


def rays_of(observed: Observations) -> LineIntegrals:
    rays = observed.batch.functional
    assert isinstance(rays, LineIntegrals)
    return rays


def test_a_star_observes_the_integral_from_the_sun() -> None:
    observed = observe(stars(20.0, 40.0), GRID, OutsidePolicy.ERROR)
    rays = rays_of(observed)
    # ∫ (1, x, y, z) ds along +Y to d: (d, 0, d²/2, 0)
    expected = torch.tensor([[20.0, 0, 200.0, 0], [40.0, 0, 800.0, 0]], dtype=torch.float64)
    torch.testing.assert_close(rays.moments(), expected, atol=1e-9, rtol=1e-12)
    noise = observed.batch.noise_variance
    assert noise is not None
    np.testing.assert_allclose(noise.numpy(), [0.01**2, 0.04**2])
    np.testing.assert_allclose(observed.batch.y.numpy(), [0.1, 0.4])


def test_a_known_distance_is_one_segment_of_weight_one() -> None:
    table = stars(20.0, 40.0)
    observed = observe(table, GRID, OutsidePolicy.ERROR)
    plain = LineIntegrals.from_observer(torch.from_numpy(table.positions()))
    for name in ("origin", "direction", "edges", "weights", "keys"):
        assert torch.equal(getattr(rays_of(observed), name), getattr(plain, name))
    assert observed.spread is None
    assert observed.cut == 0


def test_a_star_outside_the_box_is_truncated_dropped_or_an_error() -> None:
    table = stars(20.0, 80.0, 40.0)
    truncated = observe(table, GRID, OutsidePolicy.TRUNCATE)
    assert (truncated.counts.truncated, truncated.counts.dropped) == (1, 0)
    assert rays_of(truncated).moments()[1, 0] == pytest.approx(50.0)
    dropped = observe(table, GRID, OutsidePolicy.DROP)
    assert (dropped.counts.truncated, dropped.counts.dropped) == (0, 1)
    np.testing.assert_array_equal(dropped.rows, [0, 2])
    np.testing.assert_allclose(dropped.batch.y.numpy(), table.extinction[[0, 2]])
    with pytest.raises(ValueError, match="1 of 3 rays leave the box"):
        observe(table, GRID, OutsidePolicy.ERROR)


def test_a_box_that_no_star_is_seen_through_is_refused() -> None:
    away = RegularGrid.from_bounds((100.0, 100.0, 100.0), (150.0, 150.0, 150.0), (3, 3, 3))
    for distances in (ExactDistances(FAR[:2]), GaussianDistances(FAR[:2], 0.1 * FAR[:2])):
        table = replace(stars_at(distances), l=np.full(2, 200.0), b=np.full(2, 10.0))
        with pytest.raises(ValueError, match=r"none of the 2 stars .*grid"):
            observe(table, away, OutsidePolicy.TRUNCATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["exact", "gauss"])
def test_measurements_take_the_dtype_and_rays_stay_exact(dtype: torch.dtype, kind: str) -> None:
    d = np.array([20.0, 30.0])
    distances = ExactDistances(d) if kind == "exact" else GaussianDistances(d, 0.1 * d)
    observed = observe(stars_at(distances), GRID, OutsidePolicy.TRUNCATE, dtype)
    assert observed.batch.y.dtype == observed.error_variance.dtype == dtype
    assert rays_of(observed).edges.dtype == torch.float64
    again = observed.with_added(noise(torch.ones(2, dtype=torch.float64)))
    assert again.batch.noise_variance is not None
    assert again.batch.noise_variance.dtype == dtype


@pytest.mark.parametrize("column", [constant, falling, waves])
@pytest.mark.parametrize("kind", KINDS)
def test_weighted_rays_are_the_mean_extinction(kind: str, column: Callable[[Array], Array]) -> None:
    """∫ρ sf ds to 1 % for densities that are smooth over a segment."""
    table = stars_at(KINDS[kind])
    observed = observe(table, WIDE, OutsidePolicy.ERROR)
    found = Radial(column).predict(rays_of(observed)).mean
    mean, _ = dense_moments(table.distances, column)
    tolerance = 1e-4 if column is constant else 1e-2
    np.testing.assert_allclose(found.numpy(), mean, rtol=tolerance)
    assert observed.cut == 0


@pytest.mark.parametrize("column", [constant, falling, waves])
@pytest.mark.parametrize("kind", KINDS)
def test_added_variance_is_the_double_integral(kind: str, column: Callable[[Array], Array]) -> None:
    """V = 2∫ρ A sf ds − (∫ρ sf ds)², to 5 % where ρ changes along a segment."""
    table = stars_at(KINDS[kind])
    spread = observe(table, WIDE, OutsidePolicy.ERROR).spread
    assert spread is not None
    found = spread.added_variance(Radial(column), samples=1).numpy()
    _, variance = dense_moments(table.distances, column)
    np.testing.assert_allclose(found, variance, rtol=2e-3 if column is constant else 5e-2)


@pytest.mark.parametrize("kind", ["gauss-30%", "percentiles", "flat", "exponential"])
def test_stars_at_drawn_distances_have_that_mean_and_variance(kind: str) -> None:
    """The point of it all, without an integral: draw distances, look at their extinctions."""
    distances = KINDS[kind]
    rng = np.random.default_rng(5)
    A = falling(distances.quantile(rng.uniform(size=40_000)))
    lines = sight_lines(
        np.zeros(len(distances)), np.zeros(len(distances)), distances, WIDE, OutsidePolicy.ERROR
    )
    found = predict_extinction(Radial(falling), lines, samples=1)
    error = A.std(1) / np.sqrt(A.shape[1])
    np.testing.assert_array_less(abs(found.mean.numpy() - A.mean(1)), 5 * error + 1e-2 * A.mean(1))
    np.testing.assert_allclose(found.variance.numpy(), A.var(1), rtol=0.06)


def test_posterior_and_distances_both_make_up_the_variance() -> None:
    """Var A = Var_ρ E_d A + E_ρ Var_d A over draws of ρ and of d."""
    scales = (0.6, 0.9, 1.0, 1.5)
    distances = KINDS["gauss-10%"]
    posterior = Radial(waves, scales)
    lines = sight_lines(np.zeros(3), np.zeros(3), distances, WIDE, OutsidePolicy.ERROR)
    found = predict_extinction(posterior, lines, samples=4)
    p = (np.arange(4000) + 0.5) / 4000
    A = np.array(scales)[:, None, None] * waves(distances.quantile(p))
    np.testing.assert_allclose(found.mean.numpy(), A.mean((0, 2)), rtol=5e-3)
    np.testing.assert_allclose(found.variance.numpy(), A.var((0, 2)), rtol=2e-2)
    # known distances: the posterior's variance alone
    known = sight_lines(np.zeros(3), np.zeros(3), ExactDistances(FAR), WIDE, OutsidePolicy.ERROR)
    plain = predict_extinction(posterior, known)
    torch.testing.assert_close(plain.variance, posterior.predict(known.rays).variance)


def test_uniform_dust_spreads_by_density_times_error() -> None:
    d = np.full(3, 1000.0)
    sigma = np.array([1e-3, 1.0, 200.0])
    spread = observe(stars_at(GaussianDistances(d, sigma)), WIDE, OutsidePolicy.ERROR).spread
    assert spread is not None
    expected = (2e-3 * sigma) ** 2
    np.testing.assert_allclose(spread.uniform(2e-3).numpy(), expected, rtol=2e-3)
    each = spread.uniform(torch.tensor([1e-3, 2e-3, 3e-3], dtype=torch.float64))
    np.testing.assert_allclose(each.numpy(), (np.array([1, 2, 3]) * 1e-3 * sigma) ** 2, rtol=2e-3)
    found = spread.added_variance(Radial(lambda s: 2e-3 * s), samples=1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-3)


def test_an_empty_foreground_adds_nothing() -> None:
    """Dust that all lies in front of the star: whatever its distance, the same extinction."""
    distances = GaussianDistances(FAR[2:], 0.05 * FAR[2:])
    spread = observe(stars_at(distances), WIDE, OutsidePolicy.ERROR).spread
    assert spread is not None
    wall = Radial(lambda s: np.clip((s - 100.0) / 50.0, 0.0, 1.0))
    assert float(spread.added_variance(wall, samples=1)) < 1e-5
    # and a wall at the star, seen or not: p (1 − p) with p = ½, less what is smeared over segments
    at_star = Radial(lambda s: np.clip((s - 999.0) / 2.0, 0.0, 1.0))
    assert float(spread.added_variance(at_star, samples=1)) == pytest.approx(0.25, rel=0.25)


@pytest.mark.parametrize("kind", ["gauss-30%", "flat"])
def test_dust_ends_at_the_box(kind: str) -> None:
    """A(<d) = A(<face) for stars beyond: mean and variance of the clipped distance."""
    distances = KINDS[kind]
    box = RegularGrid.from_bounds((-400.0,) * 3, (400.0,) * 3, (3, 3, 3))
    observed = observe(stars_at(distances), box, OutsidePolicy.TRUNCATE)
    assert observed.spread is not None
    assert observed.counts.truncated > 0
    assert float(rays_of(observed).edges.max()) <= 400.0
    mean, variance = dense_moments(distances, waves, far=400.0)
    found = Radial(waves).predict(rays_of(observed)).mean
    np.testing.assert_allclose(found.numpy(), mean, rtol=1e-2)
    added = observed.spread.added_variance(Radial(waves), samples=1)
    # in the front segment dust is taken as uniform: good to 3 % of the extinction
    allowed = 5e-2 * variance + (3e-2 * mean) ** 2
    np.testing.assert_array_less(abs(added.numpy() - variance), allowed)


def test_a_little_weight_outside_is_truncated_under_every_policy() -> None:
    """4 σ of a star at 40 ± 2 pc lie within 50 pc; a star at 48 ± 2 pc loses more than 1e-3."""
    inside = stars_at(GaussianDistances(np.array([40.0]), np.array([2.0])))
    for policy in OutsidePolicy:
        observed = observe(inside, GRID, policy)
        assert len(observed) == 1
        assert observed.counts.dropped == 0
    # a tail too faint to matter must not stay outside either: engines refuse what is there
    faint = observe(stars_at(GaussianDistances(np.array([42.5]), np.array([2.0]))), GRID, policy)
    assert faint.counts.truncated == 1
    assert float(rays_of(faint).edges.max()) == pytest.approx(50.0)
    across = stars_at(GaussianDistances(np.array([40.0, 48.0]), np.array([2.0, 2.0])))
    with pytest.raises(ValueError, match="1 of 2 rays leave the box"):
        observe(across, GRID, OutsidePolicy.ERROR)
    dropped = observe(across, GRID, OutsidePolicy.DROP)
    np.testing.assert_array_equal(dropped.rows, [0])
    assert dropped.counts.dropped == 1
    assert dropped.spread is not None
    assert len(dropped.spread) == 1


def test_random_rules_know_a_ray_by_its_row() -> None:
    d = np.array([20.0, 80.0, 40.0])
    table = stars_at(GaussianDistances(d, 0.05 * d))
    dropped = rays_of(observe(table, GRID, OutsidePolicy.DROP))
    np.testing.assert_array_equal(dropped.keys.numpy(), [0, 2])
    rule = Stratified(8, seed=1)
    everywhere = rays_of(observe(table, WIDE, OutsidePolicy.ERROR)).measure(rule)
    torch.testing.assert_close(dropped.measure(rule).points, everywhere.points[[0, 2]])


def test_what_is_lost_beyond_the_last_edge_is_counted() -> None:
    """A tail so heavy that 1e-5 of the stars hold more than a thousandth of the mean."""
    heavy = PercentileDistances(
        np.array([90.0, 5.0]), np.array([100.0] * 2), np.array([110.0, 2e3])
    )
    observed = observe(stars_at(heavy), WIDE, OutsidePolicy.TRUNCATE)
    assert observed.cut == 1


def noise(variance: torch.Tensor) -> Moments:
    none = torch.zeros_like(variance)
    return Moments(none, variance, none, none)


def test_added_noise_replaces_what_was_added_before() -> None:
    observed = observe(stars(20.0, 40.0), GRID, OutsidePolicy.ERROR)
    twice = observed.with_added(noise(torch.ones(2)))
    twice = twice.with_added(noise(torch.full((2,), 0.5)))
    assert twice.batch.noise_variance is not None
    np.testing.assert_allclose(twice.batch.noise_variance.numpy(), [0.5001, 0.5016])
    np.testing.assert_array_equal(twice.error_variance.numpy(), observed.error_variance.numpy())


def linear_posterior(count: int) -> tuple[LogNormalPosterior, RegularGrid]:
    """ρ = 1e-3 (2 + y/500 pc), the same in every sample: multilinear, so exact between nodes."""
    grid = RegularGrid.from_bounds((-100.0, -100.0, -100.0), (100.0, 900.0, 100.0), (3, 11, 3))
    y = grid.points()[:, 1]
    log_density = (1e-3 * (2.0 + y / 500.0)).log()

    def rows(functional: LineIntegrals) -> object:
        return interpolation(functional, grid, dtype=torch.float64)

    samples = log_density.expand(count, -1).clone()
    return LogNormalPosterior(rows, log_density, samples), grid  # type: ignore[arg-type]


def test_samples_of_a_positive_field_say_the_same() -> None:
    posterior, grid = linear_posterior(4)
    d = np.array([100.0, 400.0, 850.0])
    distances = GaussianDistances(d, 0.1 * d)
    observed = observe(stars_at(distances), grid, OutsidePolicy.TRUNCATE)
    assert observed.spread is not None

    def column(s: Array) -> Array:
        return np.asarray(1e-3 * (2.0 * s + s**2 / 1000.0))

    mean, variance = dense_moments(distances, column, far=900.0)
    predicted = posterior.predict(rays_of(observed)).mean
    np.testing.assert_allclose(predicted.numpy(), mean, rtol=2e-3)
    # more than the four that are stored: all of them
    found = observed.spread.added_variance(posterior, samples=8)
    np.testing.assert_allclose(found.numpy(), variance, rtol=1e-2)


def test_dense_posteriors_are_drawn_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact Gaussian process that knows its field well gives V of that field."""
    monkeypatch.setattr(_segments, "_DENSE", 32)
    grid = RegularGrid.from_bounds((-100.0, -10.0, -100.0), (100.0, 900.0, 100.0), (3, 3, 3))
    d = np.linspace(150.0, 800.0, 3)
    table = stars_at(GaussianDistances(d, 0.08 * d))
    observed = observe(table, grid, OutsidePolicy.TRUNCATE)
    assert observed.spread is not None
    knots = torch.linspace(0.0, 900.0, 31, dtype=torch.float64)
    nodes = torch.stack([0 * knots, knots, 0 * knots], dim=-1)
    data = LineIntegrals.segment(nodes[:-1], nodes[1:])
    y = torch.from_numpy(np.diff(waves(knots.numpy())))
    gp = ExactGP(Matern32(200.0, 1e-6, dim=3), ConstantMean(1e-3, learn=False))
    posterior = gp.condition(data, y, torch.full_like(y, 1e-7))
    found = observed.spread.added_variance(posterior, samples=3)
    _, variance = dense_moments(table.distances, waves, far=900.0)
    np.testing.assert_allclose(found.numpy(), variance, rtol=0.1)
    assert torch.equal(found, observed.spread.added_variance(posterior, samples=3))
