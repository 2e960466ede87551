"""Likelihoods against quadrature over q(f) and autograd."""

import math
from collections.abc import Callable

import numpy as np
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


def hermite(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """E[function(f)] (N,) under f ~ N(mean, variance), by 150 Gauss-Hermite nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    f = mean[:, None] + variance.sqrt()[:, None] * torch.from_numpy(nodes)
    return function(f) @ torch.from_numpy(weights / math.sqrt(2 * math.pi))


def log_density(y: Tensor, noise: Tensor) -> Callable[[Tensor], Tensor]:
    def of(f: Tensor) -> Tensor:
        z2 = (y[:, None] - f).square() / noise[:, None]
        return -0.5 * (z2 + (2 * math.pi * noise[:, None]).log())

    return of


def batch(
    noise: Tensor | None, dtype: torch.dtype = torch.float64, response: Tensor | None = None
) -> Batch:
    x = torch.arange(6, dtype=torch.float64)[:, None]
    return Batch(PointValues(x), torch.zeros(6, dtype=dtype), noise, response)


def test_expected_log_prob_is_the_integral_over_q() -> None:
    y, mean, variance, noise = data()
    expected = hermite(log_density(y, noise), mean, variance)
    got = GaussianLikelihood().expected_log_prob(y, mean, variance, noise)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_moment_gradients_are_the_derivatives_of_the_expectation() -> None:
    y, mean, variance, noise = data()
    mean.requires_grad_()
    variance.requires_grad_()
    likelihood = GaussianLikelihood()
    g1, g2 = likelihood.moment_gradients(y, mean, variance, noise)
    assert not g1.requires_grad
    assert not g2.requires_grad
    for expectation in (
        likelihood.expected_log_prob(y, mean, variance, noise),
        hermite(log_density(y, noise), mean, variance),
    ):
        d1, d2 = torch.autograd.grad(expectation.sum(), (mean, variance))
        torch.testing.assert_close(g1, d1, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(g2, d2, rtol=1e-10, atol=1e-10)


def test_predictive_density_and_moments() -> None:
    y, mean, variance, noise = data()
    density = hermite(lambda f: log_density(y, noise)(f).exp(), mean, variance)
    likelihood = GaussianLikelihood()
    got = likelihood.log_predictive_density(y, mean, variance, noise)
    torch.testing.assert_close(got, density.log(), rtol=1e-6, atol=1e-6)
    mu, v = likelihood.predictive_moments(mean, variance, noise)
    second = hermite(lambda f: f.square() + noise[:, None], mean, variance)
    torch.testing.assert_close(mu.square() + v, second)
    torch.testing.assert_close(mu, mean)


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
