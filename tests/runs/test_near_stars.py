"""Stars near the Sun as judges, before a fit and after it, by skies of no model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from astropy.table import Table
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import chi2, norm

from dustmap.config import ModelConfig, from_mapping, load
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.reports import Report
from dustmap.runs.stars._near_stars import (
    NearDust,
    Residuals,
    _at_the_sun,
    _zero_check,
    near_residuals,
    weighted_median,
)
from dustmap.sky.stars import ExactDistances, StarTable
from dustmap.sky.systems import system_named

Array: TypeAlias = NDArray[np.float64]
Density: TypeAlias = Callable[[Array], Array]

HEIGHT, DENSITY, ERROR = 100.0, 8e-4, 0.05
MODEL = ModelConfig(disc_height=HEIGHT, disc_length=1e5)
#: Gaussian clouds: centre and width in pc, density in mag/pc.
CLOUDS = (
    ((120.0, 40.0, 10.0), 15.0, 0.02),
    ((-80.0, 120.0, -30.0), 15.0, 0.015),
    ((-150.0, -60.0, 20.0), 15.0, 0.025),
    ((60.0, -160.0, -10.0), 15.0, 0.015),
)
CONFIG = """
[data]
catalog = "stars.fits"
system = "A_V"
refit = false
[grid]
size = [600, 600, 400]
spacing = 25
[model]
kernel = "matern32"
[fit]
samples = 8
[export]
formats = []
figures = []
"""


def disc(x: Array) -> Array:
    """An exponential disc (...), as smooth as can be, at places (..., 3)."""
    return np.asarray(DENSITY * np.exp(-np.abs(x[..., 2]) / HEIGHT))


def cloudy(x: Array) -> Array:
    """The disc, with clouds that are not near."""
    rho = disc(x)
    for centre, width, peak in CLOUDS:
        rho = rho + peak * np.exp(-((x - centre) ** 2).sum(-1) / (2.0 * width**2))
    return rho


def hollow(x: Array) -> Array:
    """The disc, with a tenth of its dust around the Sun."""
    return np.where(np.linalg.norm(x, axis=-1) < 90.0, 0.1, 1.0) * disc(x)


def shell(x: Array) -> Array:
    """A shell around a place beside the Sun, and next to nothing elsewhere."""
    r = np.linalg.norm(x - [50.0, 0.0, 0.0], axis=-1)
    return np.where((r > 100.0) & (r < 130.0), 5e-3, 2e-4)


def stars(
    rho: Density, count: int, seed: int, error: float = ERROR, most: float = 400.0
) -> StarTable:
    """Stars evenly in a ball, but fewer far from the plane, behind ∫ρ ds by quadrature."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-most, most, (12 * count, 3))
    seen = rng.uniform(size=len(x)) < np.exp(-np.abs(x[:, 2]) / 200.0)
    x = x[seen & (np.linalg.norm(x, axis=1) < most)][:count]
    d, part = np.linalg.norm(x, axis=1), (np.arange(200) + 0.5) / 200
    dust = d * rho(x[:, None] * part[:, None]).mean(1)
    l, b = np.degrees(np.arctan2(x[:, 1], x[:, 0])) % 360.0, np.degrees(np.arcsin(x[:, 2] / d))
    measured, errors = dust + error * rng.standard_normal(count), np.full(count, error)
    where = ExactDistances(d)
    return StarTable(np.arange(count), l, b, where, measured, errors, system_named("A_V"))


@pytest.mark.parametrize("seed", range(4))
def test_a_cavity_is_taken_where_the_near_stars_have_one(seed: int) -> None:
    for rho, open_to_a_disc in ((disc, True), (cloudy, True), (hollow, False)):
        found = NearDust.of(MODEL, stars(rho, 2_500, seed))
        assert found is not None
        assert (found.odds > 2.0) == open_to_a_disc, (rho.__name__, found)


def test_the_dust_nearby_is_as_uncertain_as_it_is_said_to_be() -> None:
    found = [NearDust.of(MODEL, stars(disc, 1_000, seed, most=250.0)) for seed in range(60)]
    z = np.array([(near.factor - 1.0) / near.error for near in found if near is not None])
    assert len(z) == 60
    assert abs(z.mean()) < 4.0 / np.sqrt(60)
    assert 0.7 < z.std() < 1.3


def test_outliers_do_not_speak_for_a_cavity() -> None:
    sky = stars(disc, 2_500, 0)
    wild = sky.extinction.copy()
    wild[np.argsort(sky.distance)[::7]] = 50.0
    before = NearDust.of(MODEL, sky)
    after = NearDust.of(MODEL, StarTable(**{**vars(sky), "extinction": wild}))
    assert before is not None
    assert after is not None
    assert abs(after.factor - before.factor) < 1.5 * before.error


def test_nobody_is_asked_where_nobody_knows() -> None:
    sky = stars(disc, 500, 0)
    assert NearDust.of(MODEL, sky[sky.distance > 120.0]) is None
    assert NearDust.of(MODEL, sky[sky.distance < 90.0]) is None
    alone = sky[np.array([0])]
    assert NearDust.of(MODEL, alone) is None
    empty = StarTable(**{**vars(sky), "extinction": -np.abs(sky.extinction)})
    assert NearDust.of(MODEL, empty) is None


@pytest.mark.parametrize(("factor", "error"), [(1.1, 0.2), (0.1, 0.05), (0.5, 0.1), (1.0, 5.0)])
def test_odds_are_those_of_two_distributions(factor: float, error: float) -> None:
    def marginal(mean: float, std: float) -> float:
        value, _ = quad(
            lambda s: norm.pdf(factor, np.exp(s), error) * norm.pdf(s, mean, std),
            -9.0,
            4.0,
            limit=400,
        )
        return float(value)

    wanted = marginal(0.0, 0.5) / marginal(-1.0, 1.5)
    assert NearDust(10, factor, error).odds == pytest.approx(wanted, rel=0.01)


def test_weighted_medians() -> None:
    values = np.random.default_rng(0).standard_normal(101)
    assert weighted_median(values, np.ones(101)) == np.median(values)
    weights = np.random.default_rng(1).integers(1, 5, 101)
    repeated = np.repeat(values, weights)
    wanted = np.quantile(repeated, 0.5, method="inverted_cdf")
    assert weighted_median(values, weights.astype(float)) == wanted


@pytest.mark.parametrize("n", [20, 100, 1_000])
def test_residuals_are_judged_by_their_distributions(n: int) -> None:
    for level in (0.95, 0.999, 0.99999):
        mean_square = chi2.ppf(level, n) / n
        worst = Residuals(100.0, n, float(mean_square), 0.0).worst
        wanted = norm.ppf(level) if mean_square > 1.25 else 0.0
        assert worst == pytest.approx(wanted, abs=0.05)
    assert Residuals(100.0, n, 1.0, -5.0).worst == (5.0 if n < 400 else 0.0)  # a small shift
    assert Residuals(100.0, n, 1.0, -9.0).worst == 9.0


def test_the_nearest_stars_come_first() -> None:
    rng = np.random.default_rng(2)
    distance, z = rng.uniform(0.0, 300.0, 500), rng.standard_normal(500)
    z[distance < 60.0] += 3.0
    found = near_residuals(distance, z)
    assert [residuals.stars for residuals in found[:4]] == [20, 30, 45, 68]
    assert found[0].within == np.sort(distance)[19]
    assert found[1].total > 10.0
    assert near_residuals(distance[:19], z[:19]) == ()


def finished(folder: Path, sky: StarTable, *settings: str) -> tuple[StarMap, Report]:
    columns = ("l", "b", "distance", "extinction", "extinction_error")
    table = Table({name: getattr(sky, name) for name in columns})
    table.write(folder / "stars.fits", overwrite=True)
    (folder / "run.toml").write_text(CONFIG)
    config = load(folder / "run.toml", settings)
    report = execute_run(prepare(config), folder / "run", config, True, Stage.EVALUATE)
    found = open_run(folder / "run")
    assert isinstance(found, StarMap)
    return found, report


def residual_check(report: Report) -> float:
    (value,) = (
        check.value for check in report.checks if check.name.startswith("residuals of near")
    )
    return float(value)


def test_a_map_that_blurs_the_dust_nearby_fails_a_check(tmp_path: Path) -> None:
    """Most stars are behind the shell, and see the same dust: a smooth one, they say."""
    _, report = finished(tmp_path, stars(shell, 1_500, 1), "grid.spacing=40")
    assert residual_check(report) > 4.0
    assert max(report.sections["near_residuals"]["chi2"]) > 1.25


def test_a_zero_point_below_no_dust_is_named(tmp_path: Path) -> None:
    """A shorter length cannot help there: no density is negative."""
    sky = stars(hollow, 1_000, 1)
    _, report = finished(
        tmp_path, replace(sky, extinction=sky.extinction - 0.06), "grid.spacing=40"
    )
    (failed,) = (c for c in report.checks if c.name.startswith("residuals of near"))
    assert not failed.passed
    assert "zero point of the extinctions" in failed.advice
    assert "model.std" not in failed.advice


@pytest.mark.parametrize("zero", [0.0, 0.05])
def test_a_zero_point_that_passes_for_dust_around_the_sun_is_named(zero: float) -> None:
    """The intercept of near stars, a tenth of which are wild."""
    rng = np.random.default_rng(4)
    distance = 90.0 * rng.random(500) ** (1 / 3)
    y = zero + 1e-3 * distance + 0.03 * rng.standard_normal(500)
    y[::10] += rng.uniform(-1.0, 2.0, 50)
    config = from_mapping({"data": {"catalog": "stars.fits"}})
    check = _zero_check(config, distance, y)
    assert check.passed == (zero == 0.0)
    at, error = _at_the_sun(distance, y)
    assert abs(at - zero) < 3.0 * error < 0.06
    assert 'model.group_zero = "prior"' in check.advice


def test_intercepts_are_as_uncertain_as_they_are_said_to_be() -> None:
    rng = np.random.default_rng(5)
    distance = rng.uniform(10.0, 90.0, 100)
    found = [
        _at_the_sun(distance, 2e-3 * distance + 0.03 * rng.standard_normal(100)) for _ in range(300)
    ]
    scatter = np.std([at for at, _ in found])
    assert 0.9 < scatter / np.mean([error for _, error in found]) < 1.15


@pytest.mark.slow
def test_what_the_check_advises_makes_it_pass(tmp_path: Path) -> None:
    advised = "model.length=50", "model.std=1", 'model.learn=["mean","noise"]'
    _, report = finished(tmp_path, stars(shell, 1_500, 1), *advised)
    assert residual_check(report) < 4.0


def near_ratio(found: StarMap, rho: Density) -> float:
    """The mean extinction at 60 pc over the true one, over directions."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 3))
    x *= 60.0 / np.linalg.norm(x, axis=1)[:, None]
    part = (np.arange(200) + 0.5) / 200
    truth = 60.0 * rho(x[:, None] * part[:, None]).mean(1)
    return float(found.at(x)["extinction_mean"].mean() / truth.mean())


@pytest.mark.slow
def test_smooth_dust_near_the_sun_stays_where_it_is(tmp_path: Path) -> None:
    """With a cavity in the mean, whatever the stars say, the map has 0.91 of it there: less than
    without, and less than 0.7 where ξ̄ did not follow its samples so far. With nodes around the box
    it has 1.02, and 0.76 with the cavity, which then is learned from more."""
    sky = stars(cloudy, 2_500, 1)
    usual = "model.kernel=auto", "fit.samples=32"
    for around in ("auto", "none"):
        found, report = finished(tmp_path, sky, *usual, f"grid.around={around}")
        assert report.sections["mean_choice"]["name"] == "disc"
        assert 0.8 < near_ratio(found, cloudy) < 1.2
    hole, _ = finished(tmp_path, sky, *usual, "grid.around=none", "model.mean=bubble")
    assert 0.8 < near_ratio(hole, cloudy) < near_ratio(found, cloudy)


@pytest.mark.parametrize(
    ("settings", "says", "not_said"),
    [
        ((), "name their column in data.groups", "group_zero"),
        (("data.groups=survey",), 'model.group_zero = "prior"', "name their column"),
        (("data.groups=survey", "model.group_zero=prior"), "and subtract it", "group_zero"),
    ],
)
def test_advice_on_zero_points_is_what_is_left_to_do(
    settings: tuple[str, ...], says: str, not_said: str
) -> None:
    config = from_mapping({"data": {"catalog": "stars.fits"}}, settings)
    advice = Residuals(60.0, 100, 1.2, -6.0).advice(-0.012, 0.002, config)
    assert "-0.012 ± 0.002 mag, less than no dust at all explains" in advice
    assert says in advice
    assert not_said not in advice
