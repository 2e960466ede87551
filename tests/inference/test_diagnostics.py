"""Scores against slow definitions, and on data that are calibrated by construction."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from dustmap.inference import _diagnostics as diagnostics


def calibrated(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """y ~ N(mean, variance) with as many different means and variances."""
    generator = torch.Generator().manual_seed(seed)
    white, mean, log_std = torch.randn((3, n), generator=generator, dtype=torch.float64)
    return mean + log_std.exp() * white, mean, (2 * log_std).exp()


def test_scores_against_their_definitions() -> None:
    y, mean, variance = calibrated(7)
    got = diagnostics.scores(y, mean, variance)
    error = [float(a - b) for a, b in zip(y, mean, strict=True)]
    std = [math.sqrt(float(v)) for v in variance]
    z = [e / s for e, s in zip(error, std, strict=True)]
    n = len(y)
    assert got.n == n
    assert got.mae == pytest.approx(sum(abs(e) for e in error) / n)
    assert got.mse == pytest.approx(sum(e**2 for e in error) / n)
    assert got.robust_scatter == pytest.approx(1.4826 * stats.median_abs_deviation(error), rel=1e-5)
    assert got.rmse == pytest.approx(math.sqrt(got.mse))
    assert got.chi2 == pytest.approx(sum(v**2 for v in z) / n)
    assert got.coverage68 == sum(abs(v) < 1 for v in z) / n
    assert got.coverage95 == sum(abs(v) < stats.norm.ppf(0.975) for v in z) / n
    assert got.loglike == pytest.approx(np.mean(stats.norm.logpdf(y, mean, std)))
    assert got.as_dict()["loglike"] == got.loglike
    pit = diagnostics.scores_of_normal(y, mean, variance).pit
    np.testing.assert_allclose(pit, stats.norm.cdf(y, mean, std))


def test_wild_data_rule_rmse_and_not_the_robust_scatter() -> None:
    y, mean, variance = calibrated(20_000)
    y, variance = mean + (y - mean) / variance.sqrt(), torch.ones_like(variance)
    y[::100] += 100.0
    got = diagnostics.scores(y, mean, variance)
    assert got.rmse > 9.0
    assert got.robust_scatter == pytest.approx(1.0, abs=0.03)
    even = diagnostics.scores(torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.zeros(4), torch.ones(4))
    assert even.robust_scatter == pytest.approx(1.4826 * 1.0, rel=1e-4)  # of |r − 1.5|: 0.5 to 2.5


def test_crps_against_its_integral() -> None:
    y, mean, variance = calibrated(5)

    def definition(value: float, mu: float, sigma: float) -> float:
        # ∫ [F(t) − 1(t ≥ y)]² dt
        def below(t: float) -> float:
            return float(stats.norm.cdf(t, mu, sigma) ** 2)

        def above(t: float) -> float:
            return float(stats.norm.sf(t, mu, sigma) ** 2)

        left: float = integrate.quad(below, mu - 40 * sigma, value, limit=200)[0]
        right: float = integrate.quad(above, value, mu + 40 * sigma, limit=200)[0]
        return left + right

    rows = zip(y.tolist(), mean.tolist(), variance.sqrt().tolist(), strict=True)
    expected = np.mean([definition(*row) for row in rows])
    assert diagnostics.scores(y, mean, variance).crps == pytest.approx(expected, rel=1e-6)


def test_calibrated_data_score_as_calibrated() -> None:
    n = 40_000
    y, mean, variance = calibrated(n, seed=1)
    got = diagnostics.scores(y, mean, variance)
    assert abs(got.chi2 - 1) < 5 * math.sqrt(2 / n)
    for fraction, level in ((got.coverage68, math.erf(math.sqrt(0.5))), (got.coverage95, 0.95)):
        assert abs(fraction - level) < 5 * math.sqrt(level * (1 - level) / n)
    entropy = float(0.5 * (2 * math.pi * math.e * variance).log().mean())
    assert abs(got.loglike + entropy) < 5 * math.sqrt(0.5 / n)
    # Kolmogorov-Smirnov distance of the PIT from uniform.
    pit = diagnostics.scores_of_normal(y, mean, variance).pit.sort().values
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert float((pit - uniform).abs().max()) < 2.5 / math.sqrt(n)


def test_every_proper_score_prefers_the_truth() -> None:
    y, mean, variance = calibrated(20_000, seed=2)
    truth = diagnostics.scores(y, mean, variance)
    for factor in (0.25, 4.0):
        wrong = diagnostics.scores(y, mean, factor * variance)
        assert truth.loglike > wrong.loglike
        assert truth.crps < wrong.crps
        assert (wrong.chi2 > 1.5) == (factor < 1)
        assert (wrong.coverage68 < 0.6) == (factor < 1)


def student_t(n: int, nu: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = f + s t_ν with f ~ N(mean, variance), as many means, variances and widths s²."""
    rng = np.random.default_rng(seed)
    mean, variance, width2 = (torch.from_numpy(rng.chisquare(3, n)) for _ in range(3))
    noise = torch.from_numpy(rng.standard_t(nu, n)) * width2.sqrt()
    white = torch.from_numpy(rng.standard_normal(n))
    return mean + variance.sqrt() * white + noise, mean, variance, width2


@pytest.mark.parametrize("nu", [1.0, 2.5, 30.0])
def test_student_t_data_score_as_calibrated(nu: float) -> None:
    n = 2000
    y, mean, variance, width2 = student_t(n, nu)
    found = diagnostics.scores_of_student_t(y, mean, variance, width2, nu)
    alone = diagnostics.log_density_of_student_t(y, mean, variance, width2, nu)
    torch.testing.assert_close(alone, found.log_density)
    got = found.scores()
    assert abs(got.chi2 - 1) < 5 * math.sqrt(2 / n)
    for fraction, level in ((got.coverage68, math.erf(math.sqrt(0.5))), (got.coverage95, 0.95)):
        assert abs(fraction - level) < 5 * math.sqrt(level * (1 - level) / n)
    assert float(stats.kstest(found.pit, "uniform").pvalue) > 1e-3
    # A normal density of like width says that good predictions are bad.
    like = stats.t.ppf(stats.norm.cdf(1), nu)
    normal = diagnostics.scores(y, mean, variance + like**2 * width2)
    assert nu > 10 or (got.loglike > normal.loglike and normal.chi2 > 1.5)


@pytest.mark.parametrize("nu", [1.0, 4.0, 30.0])
def test_student_t_scores_against_integrals_of_their_distribution(nu: float) -> None:
    """The density of f + s t_ν tabulated on a fine grid, and summed."""
    variance, width2 = 0.4, 0.25
    t = np.linspace(-14.0, 14.0, 4001)
    f, w = np.polynomial.hermite_e.hermegauss(180)
    x = np.sinh(t)
    noise = x[:, None] - math.sqrt(variance) * f
    density = stats.t.pdf(noise, nu, scale=math.sqrt(width2)) @ w / math.sqrt(2 * math.pi)
    cdf = integrate.cumulative_simpson(density * np.cosh(t), x=t, initial=0.0)
    cdf += 0.5 - cdf[2000]
    for i in (2000, 2100, 1400, 3200):
        y = x[i]
        at, mean, v, w2 = torch.tensor([[y], [0.0], [variance], [width2]], dtype=torch.float64)
        got = diagnostics.scores_of_student_t(at, mean, v, w2, nu)
        assert float(got.log_density) == pytest.approx(math.log(density[i]), abs=1e-7)
        assert float(got.pit) == pytest.approx(cdf[i], abs=2e-6)
        below = integrate.simpson((cdf**2 * np.cosh(t))[: i + 1], x=t[: i + 1])
        above = integrate.simpson(((1.0 - cdf) ** 2 * np.cosh(t))[i:], x=t[i:])
        assert float(got.crps) == pytest.approx(below + above, rel=1e-3)
    # The tail of a normal score is the tail of the distribution, beyond where 1 − P rounds to 0.
    far = torch.tensor([1e8], dtype=torch.float64)
    got = diagnostics.scores_of_student_t(far, 0 * far, 0 * far + variance, 0 * far + width2, 4.0)
    tail = stats.t.logsf(1e8 / math.sqrt(width2), 4.0)
    assert stats.norm.logsf(float(got.normal)) == pytest.approx(tail, rel=1e-6)


@pytest.mark.parametrize("nu", [None, 1.05, 2.5, 30.0])
def test_mixtures_against_integrals_of_their_distribution(nu: float | None) -> None:
    """Of places with 0.1, 0.5 and 1.4 mag, of which one has y; and of a y beyond all of them."""
    places, spreads, p, width2 = [0.1, 0.5, 1.4], [0.01, 0.02, 0.09], [0.5, 0.2, 0.3], 0.0049
    y = torch.tensor([0.12, 0.9, 3.0, -0.2], dtype=torch.float64)
    mean, variance = (torch.tensor(v, dtype=torch.float64).expand(4, 3) for v in (places, spreads))
    flat = y.repeat_interleave(3), mean.flatten(), variance.flatten()
    widths = torch.full_like(variance, width2)
    if nu is None:
        each = diagnostics.scores_of_normal(flat[0], flat[1], flat[2] + width2)
    else:
        each = diagnostics.scores_of_student_t(*flat, widths.flatten(), nu)
    found = diagnostics.scores_of_mixture(each, mean, variance, widths, torch.tensor(p), nu)

    t = np.linspace(-14.0, 14.0, 4_001)
    x = 0.5 + 0.1 * np.sinh(t)
    f = np.linspace(-7.0, 7.0, 501)
    w = stats.norm.pdf(f) * (f[1] - f[0])
    density = np.zeros_like(x)
    for place, spread, share in zip(places, spreads, p, strict=True):
        if nu is None:
            density += share * stats.norm.pdf(x, place, math.sqrt(spread + width2))
        else:
            noise = x[:, None] - place - math.sqrt(spread) * f
            part = stats.t.pdf(noise, nu, scale=math.sqrt(width2)) @ w
            density += share * part
    cdf = integrate.cumulative_simpson(density * 0.1 * np.cosh(t), x=t, initial=0.0)
    for n, value in enumerate(y.tolist()):
        at = np.interp(value, x, np.arange(len(x)))
        assert float(found.residual[n]) == pytest.approx(value - np.dot(p, places))
        assert float(found.pit[n]) == pytest.approx(np.interp(value, x, cdf), abs=1e-4)
        log_density = np.interp(at, np.arange(len(x)), np.log(np.maximum(density, 1e-300)))
        assert float(found.log_density[n]) == pytest.approx(log_density, abs=1e-3)
        step = np.concatenate([x[x < value], [value, value], x[x >= value]])
        side = np.concatenate([np.zeros((x < value).sum() + 1), np.ones((x >= value).sum() + 1)])
        crps = integrate.trapezoid((np.interp(step, x, cdf) - side) ** 2, step)
        assert float(found.crps[n]) == pytest.approx(crps, rel=1e-4 if nu is None else 3e-3)


def test_float32_is_scored_in_float64() -> None:
    y, mean, variance = calibrated(1000)
    single = diagnostics.scores(y.float() + 1e3, mean.float() + 1e3, variance.float())
    assert single.chi2 == pytest.approx(diagnostics.scores(y, mean, variance).chi2, rel=1e-3)


def test_what_cannot_be_scored_is_refused() -> None:
    y, mean, variance = calibrated(4)
    with pytest.raises(ValueError, match="same shape"):
        diagnostics.scores(y, mean[:3], variance)
    with pytest.raises(ValueError, match="same shape"):
        diagnostics.scores(y[:0], mean[:0], variance[:0])
    with pytest.raises(ValueError, match="mean must be finite"):
        diagnostics.scores(y, mean / 0, variance)
    with pytest.raises(ValueError, match="variance must be positive"):
        diagnostics.scores(y, mean, 0 * variance)
