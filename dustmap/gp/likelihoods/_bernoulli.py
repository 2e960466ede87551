"""Two classes: y ∈ {0, 1}."""

import math
from abc import ABC, abstractmethod
from enum import Enum
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dustmap.gp._batch import Batch
from dustmap.gp.likelihoods._likelihood import AbstractLikelihood
from dustmap.gp.likelihoods._quadrature import SinhTrapezoid

#: Nodes of the quadrature and width of the bend of ln p, for both links: errors of E, g1 and g2
#: are below 1e-10 for v ≤ 100.
_COUNT, _SCALE = 64, 2.0


class BernoulliLink(Enum):
    """p(y = 1 | f): LOGIT 1/(1 + e^{−f}), PROBIT Φ(f), the normal distribution function."""

    LOGIT = "logit"
    PROBIT = "probit"


@final
class BernoulliLikelihood(AbstractLikelihood):
    """p(y = 1 | f) = σ(f) or Φ(f), p(y = 0 | f) = σ(−f) or Φ(−f): ln p = ln σ(s f), s = 2y − 1.

    Expectations by the trapezoidal rule of 64 nodes in t, f = 2 sinh t; those of the density
    itself for the probit in closed form, E Φ(s f) = Φ(s μ/√(1 + v)). Nothing is learned, and the
    noise of a batch, if any, is not used.
    """

    def __init__(self, link: BernoulliLink = BernoulliLink.LOGIT) -> None:
        super().__init__()
        self.link = link
        self._curve: _AbstractCurve = _Logit() if link is BernoulliLink.LOGIT else _Probit()

    def noise_variance(self, batch: Batch) -> Tensor:
        """Zeros (N,): the classes are the noise. Refuses y other than 0 and 1."""
        other = (batch.y != 0) & (batch.y != 1)
        if bool(other.any()):
            first = int(other.nonzero()[0, 0])
            raise ValueError(
                f"BernoulliLikelihood needs y of 0 or 1, got {int(other.sum())} other values of "
                f"{len(batch)}, the first is y[{first}] = {float(batch.y[first])}: encode the two "
                f"classes as 0 and 1"
            )
        return torch.zeros_like(batch.y)

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """E ln p(1 | s f), which is E ln p(y | f) by the symmetry of both links."""
        rule = SinhTrapezoid(0.0, _SCALE, _COUNT)
        return rule.expectation(self._curve.log_prob, _sign(y) * mean, variance)

    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """g1 = E[∂ ln p/∂f] and g2 = ½ E[∂² ln p/∂f²] ≤ 0 (Bonnet, Price)."""
        sign, rule = _sign(y), SinhTrapezoid(0.0, _SCALE, _COUNT)
        with torch.no_grad():
            slope, bend = rule.expectations(
                self._curve.slope, self._curve.curvature, sign * mean, variance
            )
            return sign * slope, 0.5 * bend

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """ln P(y)."""
        return self._curve.log_expected_prob(_sign(y) * mean, variance)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """p = P(y = 1) and p (1 − p)."""
        p = self._curve.log_expected_prob(mean, variance).exp()
        return p, p * self._curve.log_expected_prob(-mean, variance).exp()


class _AbstractCurve(ABC):
    """ln p(1 | f) as a function of f of any shape, and its derivatives."""

    @abstractmethod
    def log_prob(self, f: Tensor) -> Tensor:
        """ln p(1 | f)."""

    @abstractmethod
    def slope(self, f: Tensor) -> Tensor:
        """∂ ln p(1 | f)/∂f."""

    @abstractmethod
    def curvature(self, f: Tensor) -> Tensor:
        """∂² ln p(1 | f)/∂f²."""

    @abstractmethod
    def log_expected_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """ln E p(1 | f) (N,) under f ~ N(mean, variance)."""


@final
class _Logit(_AbstractCurve):
    """ln σ(f) = −ln(1 + e^{−f})."""

    def log_prob(self, f: Tensor) -> Tensor:
        return logsigmoid(f)

    def slope(self, f: Tensor) -> Tensor:
        return torch.sigmoid(-f)

    def curvature(self, f: Tensor) -> Tensor:
        return -torch.sigmoid(f) * torch.sigmoid(-f)

    def log_expected_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """By quadrature. The slope of ln σ is at most 1, so it moves the bulk by at most v."""
        rule = SinhTrapezoid(0.0, _SCALE, _COUNT, tilt=variance)
        return rule.log_expectation(self.log_prob, mean, variance)


@final
class _Probit(_AbstractCurve):
    """ln Φ(f), with r(f) = N(f; 0, 1)/Φ(f) = √(2/π)/erfcx(−f/√2) for its derivatives."""

    def log_prob(self, f: Tensor) -> Tensor:
        log_prob: Tensor = torch.special.log_ndtr(f)
        return log_prob

    def slope(self, f: Tensor) -> Tensor:
        slope: Tensor = math.sqrt(2.0 / math.pi) / torch.special.erfcx(-f / math.sqrt(2.0))
        return slope

    def curvature(self, f: Tensor) -> Tensor:
        """−r (f + r), in (−1, 0); round-off far in the left tail is kept there."""
        slope = self.slope(f)
        return -(slope * (f + slope)).clamp(0.0, 1.0)

    def log_expected_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """ln Φ(μ/√(1 + v))."""
        return self.log_prob(mean / (1.0 + variance).sqrt())


def _sign(y: Tensor) -> Tensor:
    return 2.0 * y - 1.0
