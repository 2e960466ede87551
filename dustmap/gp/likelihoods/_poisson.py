"""Counts: y ∈ {0, 1, 2, …}."""

from typing import final

import torch
from torch import Tensor

from dustmap.gp._batch import Batch
from dustmap.gp.likelihoods._likelihood import AbstractLikelihood
from dustmap.gp.likelihoods._quadrature import SinhTrapezoid

#: Nodes of the quadrature of the predictive density.
_COUNT = 96
#: Newton steps for its mode, from above the root of a convex function.
_STEPS = 12


@final
class PoissonLikelihood(AbstractLikelihood):
    """p(y | f) = e^{y f − e^f}/y!: counts of rate e^f.

    All in closed form but the predictive density. Nothing is learned, and the noise of a batch,
    if any, is not used. f is the log of the rate: a mean of ln ȳ is a good one to start from.
    """

    def noise_variance(self, batch: Batch) -> Tensor:
        """Zeros (N,): the counts are the noise. Refuses y other than whole numbers ≥ 0."""
        other = (batch.y < 0) | (batch.y != batch.y.round())
        if bool(other.any()):
            first = int(other.nonzero()[0, 0])
            raise ValueError(
                f"PoissonLikelihood needs y of whole numbers >= 0, got {int(other.sum())} other "
                f"values of {len(batch)}, the first is y[{first}] = {float(batch.y[first])}: give "
                f"it counts, not rates"
            )
        return torch.zeros_like(batch.y)

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """y μ − e^{μ + v/2} − ln y!."""
        return y * mean - (mean + 0.5 * variance).exp() - torch.lgamma(y + 1.0)

    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """g1 = y − e^{μ + v/2}, g2 = −½ e^{μ + v/2}."""
        rate = (mean + 0.5 * variance).detach().exp()
        return y - rate, -0.5 * rate

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """By the trapezoidal rule about the rate of y, reaching over the mode of the integrand."""
        counts = y.double().unsqueeze(-1)
        with torch.no_grad():
            tilt = _mode_offset(y.double(), mean.double(), variance.double())
            rule = SinhTrapezoid((y + 0.5).log(), (y + 1.0).rsqrt(), _COUNT, tilt)
        normalisation = torch.lgamma(counts + 1.0)
        return rule.log_expectation(
            lambda f: counts * f - f.exp() - normalisation, mean.double(), variance
        ).to(mean.dtype)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean rate e^{μ + v/2} = r, and r + r² (e^v − 1)."""
        rate = (mean + 0.5 * variance).exp()
        return rate, rate + rate.square() * variance.expm1()


def _mode_offset(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """f* − μ (N,) for the maximum f* of y f − e^f − (f − μ)²/2v.

    There f* = μ + v y − W with W = v e^{f*}, so that u = ln W solves u + e^u = μ + v y + ln v.
    """
    target = mean + variance * y + variance.clamp_min(1e-300).log()
    u = torch.where(target > 1.0, target.clamp_min(1.0).log(), target)
    for _ in range(_STEPS):
        u = u - (u + u.exp() - target) / (1.0 + u.exp())
    return variance * y - u.exp()
