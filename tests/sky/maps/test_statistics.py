"""Moments of samples that come in pairs about a centre."""

import math

import pytest
import torch

from dustmap.gp import log_normal_variance, variance_of_pairs
from dustmap.sky.maps import MapRequest
from dustmap.sky.maps._quantities import (
    log_moments,
    normal_quantile,
    percentiles,
    statistics,
    statistics_of_integrals,
)


def pairs(count: int, places: int) -> torch.Tensor:
    """exp(1 + 0.5 x), x in pairs +x, −x of standard normal numbers, (count, places)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((count + 1) // 2, places, generator=generator, dtype=torch.float64)
    return (1.0 + 0.5 * torch.stack([x, -x], dim=1).flatten(0, 1)[:count]).exp()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 11, 12])
def test_the_variance_of_pairs_has_no_bias(count: int) -> None:
    places = 40_000
    mean, width = log_moments(pairs(count, places))
    assert float(mean.mean()) == pytest.approx(1.0, abs=0.01)
    # of ⌈count/2⌉ independent squares, each with a relative error of √2
    error = 0.25 * (2.0 / (count // 2) / places) ** 0.5
    assert float(width.square().mean()) == pytest.approx(0.25, abs=4 * error)


def test_pairs_have_their_centre_for_median() -> None:
    draws = pairs(6, 10)
    low, median, high = percentiles(draws, (0.16, 0.5, 0.84), positive=True)
    torch.testing.assert_close(median, torch.full_like(median, torch.e))
    torch.testing.assert_close(high / median, median / low)
    width = draws[::2].log().sub(1.0).square().mean(0).sqrt()
    torch.testing.assert_close(high, (1.0 + normal_quantile(0.84) * width).exp())


def test_one_sample_has_no_width() -> None:
    assert float(log_moments(pairs(1, 5))[1].max()) == 0.0


@pytest.mark.parametrize(("tau", "least"), [(0.5, 0.95), (1.0, 0.9), (1.6, 0.75)])
def test_a_standard_deviation_of_log_normal_samples_misses_no_tail(
    tau: float, least: float
) -> None:
    """Its median is near that of the distribution, where that of the samples' own deviation is
    0.97, 0.8 and 0.45 of it."""
    draws = pairs(32, 4_000).log().sub(1.0).mul(tau / 0.5).exp()
    true = math.exp(0.5 * tau**2) * math.sqrt(math.expm1(tau**2))
    asked = MapRequest.named(("mean", "std"))
    found = statistics(draws, asked)
    assert least < float(found["std"].median()) / true < 1.0
    variance = log_normal_variance(draws.mean(0), log_moments(draws)[1])
    torch.testing.assert_close(found["std"].square(), variance)
    own = statistics_of_integrals(draws, asked)["std"]
    torch.testing.assert_close(own, variance_of_pairs(draws).sqrt())
    assert float(own.median()) < float(found["std"].median())


@pytest.mark.parametrize(
    ("tau", "own", "drawn", "known"),
    [
        (1.0, (0.39, 0.80, 2.1), (0.42, 0.94, 2.5), (0.75, 0.97, 1.5)),
        (1.6, (0.15, 0.44, 2.3), (0.20, 0.83, 6.5), (0.47, 0.86, 2.4)),
        (2.2, (0.03, 0.14, 1.4), (0.06, 0.60, 22.0), (0.24, 0.65, 3.7)),
    ],
)
def test_a_known_width_makes_standard_deviations_sharper(
    tau: float,
    own: tuple[float, ...],
    drawn: tuple[float, ...],
    known: tuple[float, ...],
) -> None:
    """The table of docs/engines.md: 2.5 %, median and 97.5 % over the true one."""
    draws = pairs(32, 40_000).log().sub(1.0).mul(tau / 0.5).exp()
    true = math.exp(0.5 * tau**2) * math.sqrt(math.expm1(tau**2))
    asked, levels = MapRequest.named(("mean", "std")), torch.tensor([0.025, 0.5, 0.975]).double()
    ratio = tau**2 / log_moments(draws)[1].square()
    found = (
        (draws.std(0), own),
        (statistics(draws, asked)["std"], drawn),
        (statistics(draws, asked, ratio=ratio)["std"], known),
    )
    for std, expected in found:
        got = (std / true).quantile(levels).tolist()
        assert got == pytest.approx(expected, rel=0.1, abs=0.006)


def test_what_samples_lack_adds_to_their_mean_square() -> None:
    draws, relative = pairs(8, 5), torch.linspace(0.0, 2.0, 5).double()
    asked = MapRequest.named(("mean", "std"))
    std, more = (statistics(draws, asked, r)["std"] for r in (0.0, relative))
    square = std.square() + draws.mean(0).square()
    torch.testing.assert_close(more.square(), std.square() + relative * square)
