"""Gaussian noise, given with the data, learned, or both."""

import math
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._batch import Batch
from dustmap.gp.likelihoods._likelihood import AbstractLikelihood


@final
class GaussianLikelihood(AbstractLikelihood):
    """y_n ~ N(f_n, scale² σ_n² + v_n + jitter² + (relative a_n)²), σ_n² and v_n from the batch:
    σ_n² = noise_variance − added_variance, v_n = added_variance.

    GaussianLikelihood()                          the given σ_n alone
    GaussianLikelihood(jitter=0.1)                learned homoscedastic noise; σ_n may be absent
    GaussianLikelihood(scale=1.0, jitter=0.01)    both learned on top of the given σ_n
    GaussianLikelihood(relative=0.1)              noise that grows with the field

    scale, jitter, relative > 0: starting values, jitter in the units of y; what is None is not in
    the model. With `learn=False` they stay fixed.

    a_n = batch.response is what the model expects of datum n, never y_n: data that noise has made
    small would weigh more than those it has made large. Whoever fits the field sets it, and
    renews it as the field is found.
    """

    def __init__(
        self,
        scale: float | None = None,
        jitter: float | None = None,
        relative: float | None = None,
        *,
        learn: bool = True,
    ) -> None:
        super().__init__()
        self.log_scale = _log_parameter("scale", scale, learn)
        self.log_jitter = _log_parameter("jitter", jitter, learn)
        self.log_relative = _log_parameter("relative", relative, learn)

    def noise_variance(self, batch: Batch) -> Tensor:
        given = batch.noise_variance
        if given is None and (self.log_jitter is None or self.log_scale is not None):
            raise ValueError(
                "the batch has noise_variance=None, but this GaussianLikelihood "
                + ("scales given noise" if self.log_scale is not None else "has no jitter to learn")
                + ": give the batch noise_variance (N,), or use GaussianLikelihood(jitter=...)"
            )
        total = torch.zeros_like(batch.y) if given is None else given
        if self.log_scale is not None:
            added = 0.0 if batch.added_variance is None else batch.added_variance
            total = (total - added) * (2.0 * self.log_scale).exp().to(total) + added
        if self.log_jitter is not None:
            total = total + (2.0 * self.log_jitter).exp().to(total)
        if self.log_relative is not None:
            if batch.response is None:
                raise ValueError(
                    "the batch has response=None, but the noise of this GaussianLikelihood grows "
                    "with the response: give the batch response (N,), or fit it with fit_mgvi"
                )
            response = batch.response.to(total)
            total = total + (2.0 * self.log_relative).exp().to(total) * response.square()
        return total

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """−½ ln 2πσ² − [(y − μ)² + v] / 2σ²  (eq. 14)."""
        return _log_normal_density(y - mean, noise_variance) - 0.5 * variance / noise_variance

    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """g1 = (y − μ)/σ², g2 = −1/(2σ²)."""
        weight = noise_variance.detach().reciprocal()
        return (y - mean).detach() * weight, -0.5 * weight

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """ln N(y; μ, v + σ²)."""
        return _log_normal_density(y - mean, variance + noise_variance)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """μ and v + σ²."""
        return mean, variance + noise_variance


def _log_normal_density(residual: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((2.0 * math.pi * variance).log() + residual.square() / variance)


def _log_parameter(name: str, value: float | None, learn: bool) -> nn.Parameter | None:
    if value is None:
        return None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number or None, got {value}")
    log_value = torch.tensor(math.log(value), dtype=torch.float64)
    return nn.Parameter(log_value, requires_grad=learn)
