"""The Gaussian likelihood's noise: given, scaled, learned, refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp._batch import Batch
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import GaussianLikelihood
from tests.gp.parameters import traced, with_values


def data(n: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, mean, variance, noise variance."""
    generator = torch.Generator().manual_seed(0)
    y, mean, a, b = torch.randn((4, n), generator=generator, dtype=torch.float64).to(dtype)
    return y, mean, 0.1 + a.square(), 0.2 + b.square()


def batch(
    noise: Tensor | None, dtype: torch.dtype = torch.float64, response: Tensor | None = None
) -> Batch:
    x = torch.arange(6, dtype=torch.float64)[:, None]
    return Batch(PointValues(x), torch.zeros(6, dtype=dtype), noise, response)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_given_scaled_and_learned(dtype: torch.dtype) -> None:
    noise = data(dtype=dtype)[3]
    given = batch(noise, dtype)
    assert torch.equal(GaussianLikelihood().noise_variance(given), noise)
    learned = GaussianLikelihood(jitter=0.3).noise_variance(batch(None, dtype))
    torch.testing.assert_close(learned, torch.full_like(noise, 0.09))
    both = GaussianLikelihood(scale=2.0, jitter=0.5).noise_variance(given)
    torch.testing.assert_close(both, 4 * noise + 0.25)
    assert both.dtype == learned.dtype == dtype
    response = torch.arange(-2.0, 4.0, dtype=dtype)
    grows = GaussianLikelihood(jitter=0.5, relative=0.2)
    got = grows.noise_variance(batch(noise, dtype, response))
    torch.testing.assert_close(got, noise + 0.25 + 0.04 * response.square())
    assert got.dtype == dtype
    lost = replace(batch(noise, dtype, response), offset=torch.full_like(response, 3.0))
    whole = grows.noise_variance(lost[1:4])
    torch.testing.assert_close(whole, noise[1:4] + 0.25 + 0.04 * (response[1:4] + 3.0).square())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_that_are_no_measurements_have_no_scatter(dtype: torch.dtype) -> None:
    noise, response = data(dtype=dtype)[3], torch.arange(-2.0, 4.0, dtype=dtype)
    added = torch.where(torch.arange(6) < 2, noise, 0.5 * noise)
    mixed = replace(batch(noise, dtype, response), added_variance=added)
    got = GaussianLikelihood(scale=2.0, jitter=0.5, relative=0.2).noise_variance(mixed)
    for n in range(6):
        own = float(noise[n] - added[n])
        scatter = 0.25 + 0.04 * float(response[n]) ** 2 if own > 0.0 else 0.0
        assert float(got[n]) == pytest.approx(4.0 * own + float(added[n]) + scatter, rel=1e-6)
    assert got.dtype == dtype


def test_noise_is_differentiable_in_what_is_learned() -> None:
    y, mean, variance, noise = data()
    likelihood = GaussianLikelihood(scale=1.5, jitter=0.4, relative=0.3)

    def evidence(*values: Tensor) -> Tensor:
        total = with_values(likelihood, values).noise_variance(batch(noise, response=mean))
        return likelihood.expected_log_prob(y, mean, variance, total).sum()

    assert torch.autograd.gradcheck(evidence, traced(likelihood)[1])
    fixed = GaussianLikelihood(scale=1.5, jitter=0.4, learn=False)
    assert not fixed.is_learned


def test_missing_noise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"noise_variance=None.*has no jitter"):
        GaussianLikelihood().noise_variance(batch(None))
    with pytest.raises(ValueError, match=r"noise_variance=None.*scales given noise"):
        GaussianLikelihood(scale=1.0, jitter=0.1).noise_variance(batch(None))
    with pytest.raises(ValueError, match=r"response=None.*grows with the response"):
        GaussianLikelihood(relative=0.1).noise_variance(batch(data()[3]))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_impossible_starting_values_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="jitter must be a positive number"):
        GaussianLikelihood(jitter=value)
    with pytest.raises(ValueError, match="scale must be a positive number"):
        GaussianLikelihood(scale=value)
    with pytest.raises(ValueError, match="relative must be a positive number"):
        GaussianLikelihood(relative=value)


def test_predictions_are_those_of_f_with_the_noise_added() -> None:
    _, mean, variance, noise = data()
    mu, v = GaussianLikelihood().predictive_moments(mean, variance, noise)
    assert torch.equal(mu, mean)
    torch.testing.assert_close(v, variance + noise, rtol=1e-14, atol=0)
