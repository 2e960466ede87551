"""Moments of samples that come in pairs about a centre."""

import pytest
import torch

from dustmap.sky.maps._quantities import log_moments, normal_quantile, percentiles


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
