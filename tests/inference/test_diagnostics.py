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
    assert got.rmse == pytest.approx(math.sqrt(got.mse))
    assert got.chi2 == pytest.approx(sum(v**2 for v in z) / n)
    assert got.coverage68 == sum(abs(v) < 1 for v in z) / n
    assert got.coverage95 == sum(abs(v) < stats.norm.ppf(0.975) for v in z) / n
    assert got.loglike == pytest.approx(np.mean(stats.norm.logpdf(y, mean, std)))
    assert got.as_dict()["loglike"] == got.loglike
    np.testing.assert_allclose(diagnostics.pit(y, mean, variance), stats.norm.cdf(y, mean, std))


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
    assert diagnostics.crps(y, mean, variance) == pytest.approx(expected, rel=1e-6)


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
    pit = diagnostics.pit(y, mean, variance).sort().values
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
