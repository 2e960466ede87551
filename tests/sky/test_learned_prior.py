"""Distance priors that are learned from parallaxes, against the distances that stars were made
with, and against quadrature."""

import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from dustmap.sky.observations._segments import quantiles_of, segments_of
from dustmap.sky.stars import (
    AbstractDistancePrior,
    ExponentialDensity,
    FlatParallax,
    ParallaxDistances,
    ParallaxSample,
    ToLearn,
    _learned_prior,
)
from dustmap.sky.stars._learned_prior import LEAST, MOST, SampleCuts, _Stars
from dustmap.sky.stars._priors import SurveyRatio, prior_from
from tests.combinations import covering
from tests.sky.latent import learned_of

Array = NDArray[np.float64]
FLAT = FlatParallax(10_000.0)


def column(d: Array) -> Array:
    """A(<d) of a density with a cloud at 300 and one at 700 pc."""
    clouds = [0.5 * a * (1 + np.tanh((d - c) / w)) for c, a, w in ((300, 0.6, 30), (700, 1, 50))]
    return np.asarray(5e-4 * d + sum(clouds))


class Survey:
    """n stars uniform in the volume to 1 kpc, with median relative errors of the parallax; those
    that are brighter than a limit, dimmed by the dust, with errors that grow with magnitude."""

    def __init__(self, n: int, fraction: float, limited: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        tries = 30 * n if limited else n
        d = 1000.0 * rng.uniform(size=tries) ** (1 / 3)
        if limited:
            absolute = np.log10(1 + rng.uniform(size=tries) * (10**1.95 - 1)) / 0.15 - 1
            magnitude = absolute + 5 * np.log10(d / 10) + column(d)
            seen = np.flatnonzero(magnitude < 15.0)[:n]
            d, error = d[seen], 10 ** (0.2 * (np.clip(magnitude[seen], 10.0, None) - 15.0))
        else:
            error = np.ones(n)
        assert len(d) == n
        self.d = d
        self.error = error * fraction / np.median(error * d / 1000.0)
        self.parallax = 1000.0 / d + self.error * rng.standard_normal(n)

    def under(self, prior: AbstractDistancePrior) -> ParallaxDistances:
        return ParallaxDistances(self.parallax, self.error, prior)

    def learned(self) -> ParallaxDistances:
        return self.under(learned_of(self.under(FLAT)).prior)


CASES = covering((0.05, 0.2, 0.3), (False, True))


def residuals(distances: ParallaxDistances, d: Array) -> tuple[Array, Array]:
    """Part of the mean extinction by which stars behind others, in fifths of their median distance,
    have more than ∫ρ sf; and its error."""
    segments = segments_of(quantiles_of(distances), far=np.full(len(d), 1500.0))
    between = np.diff(column(segments.edges), axis=1)
    expected = column(segments.edges[:, 0]) + (between * segments.mean).sum(1)
    off, order = column(d) - expected, np.argsort(distances.median)
    fifths = np.array_split(order, 5)
    mean = np.array([expected[i].mean() for i in fifths])
    return (
        np.array([off[i].mean() for i in fifths]) / mean,
        np.array([off[i].std() / np.sqrt(len(i)) for i in fifths]) / mean,
    )


@pytest.mark.parametrize(("fraction", "limited"), CASES)
def test_extinctions_at_the_true_distances_are_those_expected(
    fraction: float, limited: bool
) -> None:
    """E(A | ϖ) = ∫ρ sf holds of every prior that is the distribution of the stars: no fit is in it.

    Flat in 1/d it is not.
    """
    survey = Survey(2000, fraction, limited)
    off, error = residuals(survey.learned(), survey.d)
    np.testing.assert_array_less(np.abs(off), 3.5 * error + 0.03)
    if fraction > 0.1:
        flat, error = residuals(survey.under(FLAT), survey.d)
        assert np.abs(flat).max() > 0.1
        assert np.abs(flat).max() > 2.5 * np.abs(off).max()


@pytest.mark.parametrize(("fraction", "limited"), CASES)
def test_posteriors_hold_the_true_distances(fraction: float, limited: bool) -> None:
    """Of several surveys: the prior of one is known as well as its stars tell."""
    surveys = [Survey(2000, fraction, limited, seed=seed) for seed in range(1, 5)]
    p = np.concatenate([each.learned().survival(each.d[:, None])[:, 0] for each in surveys])
    faint = np.concatenate([each.error >= np.median(each.error) for each in surveys])
    for some in (np.full(len(p), True), faint):
        assert p[some].mean() == pytest.approx(0.5, abs=0.03)
        inside = np.abs(p[some] - 0.5) < 0.3413
        assert inside.mean() == pytest.approx(0.683, abs=0.035)


def test_errors_that_follow_the_distance_are_no_trap() -> None:
    """Errors of a fifth of every parallax say where the star is: one prior for all would err."""
    rng = np.random.default_rng(2)
    d = 1000.0 * rng.uniform(size=2000) ** (1 / 3)
    error = 0.2 * 1000.0 / d
    distances = ParallaxDistances(1000.0 / d + error * rng.standard_normal(2000), error, FLAT)
    learned = ParallaxDistances(distances.parallax, error, learned_of(distances).prior)
    off = np.log(learned.median / d)
    for some in np.array_split(np.argsort(d), 4):
        assert off[some].mean() == pytest.approx(0.0, abs=0.06)


@pytest.mark.parametrize("repeated", [[800], [1, 799], [799, 1], [300, 500], [10] * 80])
def test_errors_may_repeat(repeated: list[int]) -> None:
    survey = Survey(800, 0.2, limited=False)
    survey.error = np.repeat(0.2 + 0.01 * np.arange(len(repeated)), repeated)
    distances = survey.learned()
    assert isinstance(distances.prior, ExponentialDensity)
    assert distances.prior.ratio is not None
    assert len(distances.prior.ratio.values) <= len(repeated)
    assert np.isfinite(distances.median).all()


def test_few_stars_have_the_scale_of_most_likelihood() -> None:
    """By quadrature over distances, with the guess as a prior of the scale."""
    rng = np.random.default_rng(3)
    n = 60
    assert n < LEAST
    d, error = rng.gamma(3.0, 150.0, n), np.full(n, 0.3)
    parallax = 1000.0 / d + error * rng.standard_normal(n)
    found = learned_of(ParallaxDistances(parallax, error, FLAT))
    assert found.prior.ratio is None
    nodes = np.linspace(1.0, 10_000.0, 10_000)
    each = np.exp(-0.5 * ((parallax[:, None] - 1000.0 / nodes) / error[:, None]) ** 2)

    def log_posterior(scale: float) -> float:
        p = nodes**2 * np.exp(-nodes / scale)
        return float(np.log(each @ (p / p.sum())).sum() - 0.5 * np.log(scale / 1350.0) ** 2)

    best = max(np.geomspace(80.0, 300.0, 100), key=log_posterior)
    assert found.prior.scale == pytest.approx(best, rel=0.02)
    one = learned_of(ParallaxDistances(np.array([-1.0]), np.array([5.0]), FLAT))
    assert one.prior.scale == pytest.approx(1350.0, rel=0.5)


@pytest.mark.parametrize("cuts", [SampleCuts(), SampleCuts(3.0)])
@pytest.mark.parametrize("x", [(0.2, 0.1, 0.5), (-0.3, 3.6, -0.2), (0.1, 2.5, 1.5)])
def test_the_end_of_a_survey_is_fitted_by_its_gradient(
    x: tuple[float, ...], cuts: SampleCuts
) -> None:
    """Also where the density is lifted, which the steep ends are."""
    rng = np.random.default_rng(5)
    t, at = np.linspace(-2.0, 2.0, 60), np.array(x)
    likelihood = np.exp(-0.5 * ((t - rng.uniform(-1.0, 1.0, (40, 1))) / 0.3) ** 2)
    cells = 1e3 * np.exp(-np.append(t - 0.5 * (t[1] - t[0]), t[-1] + 0.5 * (t[1] - t[0])))
    stars = _Stars.of(likelihood, rng.uniform(20.0, 400.0, 40), cells, cuts)
    _, gradient = _learned_prior._end_energy(at, stars, t)
    steps = 1e-5 * np.eye(3)
    ends = [[_learned_prior._end_energy(at + d, stars, t)[0] for d in (s, -s)] for s in steps]
    np.testing.assert_allclose(gradient, np.array(ends) @ [0.5e5, -0.5e5], rtol=1e-5, atol=1e-5)
    base = _learned_prior._end_of_survey(stars, t, 1.0)
    found = -stars.log_probability(np.exp(base) / np.exp(base).sum())
    assert found < _learned_prior._end_energy(at, stars, t)[0]


def test_a_density_of_cut_samples_by_its_derivatives() -> None:
    """Σ_n ln (L p)_n / (s p)_n in f, p ∝ exp f, by finite differences of it and of its gain."""
    rng = np.random.default_rng(2)
    bounds, error = np.log(np.linspace(200.0, 3000.0, 31)), rng.uniform(0.05, 0.4, 200)
    t = 0.5 * (bounds[1:] + bounds[:-1])
    likelihood = np.exp(-0.5 * ((1e3 * np.exp(-t) - rng.uniform(0.5, 3.0, (200, 1))) / 0.3) ** 2)
    stars, f = (
        _Stars.of(likelihood, error, 1e3 * np.exp(-bounds), SampleCuts(4.0)),
        rng.normal(size=30),
    )

    def density(f: Array) -> Array:
        return np.asarray(np.exp(f) / np.exp(f).sum())

    steps = 1e-5 * np.eye(30)
    ends = np.array([[stars.log_probability(density(f + s * d)) for s in (1, -1)] for d in steps])
    np.testing.assert_allclose(stars.gain(density(f)), ends @ [5e4, -5e4], atol=1e-4)
    gains = np.array([[stars.gain(density(f + s * d)) for s in (1, -1)] for d in steps])
    complete, missing = stars.curvature(density(f))
    np.testing.assert_allclose(missing - complete, (gains[:, 0] - gains[:, 1]) * 5e4, atol=1e-4)


def test_the_probability_to_be_seen_is_its_mean_over_a_cell() -> None:
    cells, error = np.array([4.0, 1.2, 0.9, 0.4, 0.1]), np.array([0.02, 0.2])
    found = SampleCuts(5.0).seen(error, cells)
    for row, sigma in zip(found, error, strict=True):
        for mean, above, below in zip(row, cells, cells[1:], strict=False):
            x = np.linspace(below, above, 20_001)
            assert mean == pytest.approx(norm.cdf(x / sigma - 5.0).mean(), abs=1e-4)
    assert (SampleCuts().seen(error, cells) == 1.0).all()


def surveyed(n: int, seed: int = 1) -> tuple[Array, Array, Array]:
    """Distances, parallaxes and errors of faint stars that are farther than bright ones."""
    rng = np.random.default_rng(seed)
    d = rng.gamma(3.0, 600.0, n)
    error = 0.03 * np.exp(0.6 * np.log(d / 500.0) + rng.normal(0.0, 0.4, n)).clip(0.5, 20.0)
    return d, 1e3 / d + error * rng.standard_normal(n), error


@pytest.mark.parametrize("limit", [-np.inf, 5.0, 10.0])
def test_samples_that_were_cut_before_have_the_distribution_of_all(limit: float) -> None:
    """Stars next to a cut are where they are, and not nearer, whoever has cut."""
    d, parallax, error = surveyed(30_000)
    kept = parallax > limit * error
    sample = ParallaxDistances(parallax[kept], error[kept], FLAT)
    found = learned_of(sample)
    assert found.cuts.over_error == pytest.approx(limit, rel=0.01)
    under = replace(sample, prior=found.prior)
    low, middle, high = under.quantile(np.array([0.16, 0.5, 0.84])).T
    over = parallax[kept] / error[kept]
    near, true = over < np.quantile(over, 0.1), d[kept]
    inside = (low < true) & (true < high)
    assert inside[near].mean() == pytest.approx(0.68, abs=0.05)
    assert np.median((middle / true)[near]) == pytest.approx(1.0, abs=0.02)
    everywhere = found.as_dict()["distance_p50_pc"]
    assert everywhere == pytest.approx(np.median(d), rel=0.35)


@pytest.mark.parametrize("least", [1.0, 2.0])
def test_cuts_of_the_parallax_itself_leave_what_is_learned_as_it_was(least: float) -> None:
    """Nobody knows what is beyond: the distribution ends with the sample."""
    d, parallax, error = surveyed(30_000)
    kept = parallax > least
    found = learned_of(ParallaxDistances(parallax[kept], error[kept], FLAT))
    assert found.cuts == SampleCuts()
    assert found.as_dict()["distance_p50_pc"] == pytest.approx(np.median(d[kept]), rel=0.1)


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_members_of_a_cluster_are_no_cut_sample(spread: float) -> None:
    rng = np.random.default_rng(0)
    parallax = 7.3 + spread * rng.standard_normal(300) + 0.5 * rng.standard_normal(300)
    found = learned_of(ParallaxDistances(parallax, np.full(300, 0.5), FLAT))
    assert found.cuts == SampleCuts()
    assert found.as_dict()["distance_p50_pc"] == pytest.approx(1e3 / 7.3, rel=0.1)


def test_posteriors_under_a_ratio_are_those_of_quadrature() -> None:
    t = np.arange(np.log(20.0), np.log(5000.0), 0.1)
    rows = (np.sin(2.0 * t), -0.5 * (t - 6.0) ** 2)
    table = tuple(tuple(row.tolist()) for row in rows)
    prior = ExponentialDensity(400.0, 10_000.0, SurveyRatio(float(t[0]), 0.1, table, (0.5,)))
    d = np.geomspace(0.5, 10_000.0, 400_001)
    p = np.array([0.001, 0.16, 0.5, 0.84, 0.999])
    for parallax, error in ((10.0, 0.01), (3.0, 0.4), (1.0, 0.6), (-0.5, 0.5), (0.0, 30.0)):
        row = rows[int(error > 0.5)]
        ln_r = np.interp(np.log(d), t, row)
        log_p = 3 * np.log(d) - d / 400 + ln_r - 0.5 * ((parallax - 1000 / d) / error) ** 2
        mass = np.exp(log_p - log_p.max())
        above = 1.0 - (np.cumsum(mass) - 0.5 * mass) / mass.sum()
        distances = ParallaxDistances(np.array([parallax]), np.array([error]), prior)
        q = distances.quantile(p)
        # Linear between nodes 0.1 apart in the reference, cubic in the prior.
        np.testing.assert_allclose(np.interp(q[0], d, above), 1 - p, atol=2e-3)
        np.testing.assert_allclose(distances.survival(q)[0], 1 - p, atol=1e-6)


def test_strange_parallaxes_are_counted_and_do_no_harm() -> None:
    survey = Survey(2000, 0.1, limited=False)
    usual = learned_of(survey.under(FLAT)).as_dict()
    for name, q in (("distance_p16_pc", 0.16), ("distance_p50_pc", 0.5), ("distance_p84_pc", 0.84)):
        assert usual[name] == pytest.approx(np.quantile(survey.d, q), rel=0.03)
    assert (usual["stars_used"], usual["stars_too_negative"]) == (2000, 0)
    survey.parallax[:20] = -9999.0
    survey.parallax[20:40], survey.error[20:40] = 1e6, 1e-7
    survey.error[40:60] = 1e-9
    survey.error[60:80] = 1e6
    found = learned_of(survey.under(FLAT))
    told = found.as_dict()
    assert told["stars_too_negative"] == 20
    assert told["distance_p50_pc"] == pytest.approx(usual["distance_p50_pc"], rel=0.03)
    assert np.isfinite(survey.under(found.prior).quantile(np.array([0.01, 0.5, 0.99]))).all()
    alone = learned_of(ParallaxDistances(np.full(5, -99.0), np.full(5, 0.1), FLAT))
    assert alone.prior == ToLearn().stated
    assert alone.strange == 5


def test_a_catalog_of_any_size_is_learned_from_evenly() -> None:
    """Parts of any length make one sample, all over the stars and of bounded size."""
    n = 2 * MOST + 12_345
    parallax = np.arange(n, dtype=np.float64)
    distances = ParallaxDistances(parallax, np.ones(n), FLAT)
    samples = []
    for parts in (1, 7, 500):
        sample = ParallaxSample()
        for part in np.array_split(np.arange(n), parts):
            sample.add(distances[part])
        assert len(sample) == n
        samples.append(sample._rows[:, 0])
    for kept in samples:
        np.testing.assert_array_equal(kept, samples[0])
    assert MOST / 2 < len(samples[0]) <= MOST
    assert np.ptp(np.diff(samples[0])) == 0.0
    assert samples[0][-1] > n - 10


def test_stars_that_repeat_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prior is that of the others alone, also where the sample is every so many of all."""
    survey = Survey(900, 0.3, limited=True).under(FLAT)
    twice = np.arange(1, 900, 3)
    sample = ParallaxSample()
    sample.add(survey)
    found = sample.learned(ToLearn(), twice)
    assert found == learned_of(survey[np.delete(np.arange(900), twice)])
    assert (found.stars, found.used) == (600, 600)
    monkeypatch.setattr("dustmap.sky.stars._learned_prior.MOST", 500)
    few = ParallaxSample()
    few.add(survey)
    others = np.setdiff1d(np.arange(0, 900, 2), twice)
    assert few.learned(ToLearn(), twice).prior == learned_of(survey[others]).prior
    assert few.learned(ToLearn(), twice).stars == 600


def test_what_was_learned_is_kept_to_the_bit() -> None:
    prior = learned_of(Survey(600, 0.3, limited=True).under(FLAT)).prior
    assert prior.ratio is not None
    assert len(prior.ratio.values) > 1
    assert prior_from(json.loads(json.dumps(prior.attributes()))) == prior
