"""Likelihoods, their expectations over f ~ N(μ, v) by quadrature, and those of discrete data."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dustmap.errors import UserError
from dustmap.gp._batch import Batch
from dustmap.gp._parameters import AbstractParametric

#: Half width of the interval of `SinhTrapezoid` in standard deviations: 1.2e-15 lies outside.
_REACH = 8.0
#: Nodes of the quadrature of the predictive density.
_DENSITY_NODES = 96
#: Newton steps for its mode, from above the root of a convex function.
_STEPS = 12


class AbstractLikelihood(AbstractParametric, ABC):
    """p(y_n | f_n) of independent data, averaged over q(f_n) = N(μ_n, v_n).

    All arguments and results are (N,): y, mean μ, variance v, and noise_variance, which is what
    `noise_variance(batch)` returned. A likelihood without noise returns zeros there and ignores it.
    """

    @abstractmethod
    def noise_variance(self, batch: Batch) -> Tensor:
        """Return σ_n² (N,) of each datum, differentiable in what is learned of it."""

    @abstractmethod
    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Return E_n = E[ln p(y_n | f_n)] under f_n ~ N(μ_n, v_n)."""

    @abstractmethod
    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return g1_n = ∂E_n/∂μ_n and g2_n = ∂E_n/∂v_n, without a graph.

        The gradient of the data term in m is Σ_n g1_n φ_n, and −2 g2_n is the weight of φ_n φ_nᵀ
        in the precision of q.
        """

    @abstractmethod
    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Return ln ∫ p(y_n | f) N(f; μ_n, v_n) df, the score of a held-out datum."""

    @abstractmethod
    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of a new y_n, noise included."""


@final
@dataclass(frozen=True, eq=False)
class SinhTrapezoid:
    """E[g(f)] ≈ Σ_q w_q g(μ + √v x_q) under f ~ N(μ, v), for g with a bend at c.

    The trapezoidal rule in t, f = c + s sinh t, with `count` nodes x_q of weights w_q.

    centre c, scale s: numbers or (N,); place and width of the bend. Where the singularities of g
    lie at c ± i r with r ≥ s, sinh keeps them π/2 from the real axis of t, and the rule converges
    geometrically however wide q is beside s: the nodes crowd where g bends and thin out as g
    becomes smooth. Where q is narrow the nodes are evenly spaced over it.

    Nodes cover μ ± 8 √v, and beyond that on its side `tilt`, a number or (N,): how far a factor
    p(y|f) can move the bulk of p(y|f) N(f; μ, v), as `log_expectation` needs: v times its slope.

    Sums are in float64, results in the dtype of the mean. Nodes and weights are constants of
    autograd: the gradient in μ and v is that of g at its nodes.
    """

    centre: Tensor | float
    scale: Tensor | float
    count: int
    tilt: Tensor | float = 0.0

    def standard(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and ln w (N, Q), for float64 mean (N,) and variance (N,)."""
        c, s, tilt = (
            torch.as_tensor(part, dtype=mean.dtype, device=mean.device).expand_as(mean)
            for part in (self.centre, self.scale, self.tilt)
        )
        offset = (mean - c) / s
        # Narrower than this, q is a point to float64.
        std = variance.sqrt().clamp_min(1e-12).maximum(1e-12 * (mean - c).abs().maximum(s))
        t0 = offset.asinh()
        low = (offset - (_REACH * std - tilt.clamp_max(0)) / s).asinh() - t0
        high = (offset + (_REACH * std + tilt.clamp_min(0)) / s).asinh() - t0
        step = (high - low) / (self.count - 1)
        u = low.unsqueeze(-1) + step.unsqueeze(-1) * torch.arange(
            self.count, dtype=mean.dtype, device=mean.device
        )
        t0, ratio = t0.unsqueeze(-1), (s / std).unsqueeze(-1)
        # sinh(t₀ + u) − sinh t₀, without the cancellation.
        x = 2.0 * ratio * (t0 + 0.5 * u).cosh() * (0.5 * u).sinh()
        spacing = step.unsqueeze(-1) * ratio * (t0 + u).cosh()
        return x, spacing.log() - 0.5 * (x.square() + math.log(2.0 * math.pi))

    def expectation(
        self, function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor
    ) -> Tensor:
        """Return E[function(f)] (N,); function maps float64 (N, Q) to (N, Q)."""
        (value,) = self.expectations([function], mean, variance)
        return value

    def expectations(
        self, functions: Sequence[Callable[[Tensor], Tensor]], mean: Tensor, variance: Tensor
    ) -> list[Tensor]:
        """Return E[function(f)] (N,) of every function, from the same nodes."""
        f, log_weights = self._nodes(mean, variance)
        weights = log_weights.exp()
        return [(weights * function(f)).sum(-1).to(mean.dtype) for function in functions]

    def log_expectation(
        self, log_function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor
    ) -> Tensor:
        """Return ln E[exp(log_function(f))] (N,), which does not underflow."""
        f, log_weights = self._nodes(mean, variance)
        return torch.logsumexp(log_weights + log_function(f), -1).to(mean.dtype)

    def _nodes(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = mean.double(), variance.double()
        with torch.no_grad():
            x, log_weights = self.standard(mean, variance)
        return mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * x, log_weights


#: 64 nodes for a bend of ln p of width 2, of both links: errors of E, g1 and g2 are below 1e-10 for
#: v ≤ 100 and |μ| ≤ √v, and 1e-7 (logit) and 3e-5 (probit) of E = 50 and 1250 at μ = −50.
_LINK_RULE = SinhTrapezoid(0.0, 2.0, 64)


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
        self.link = link
        self._curve: _Logit | _Probit = _Logit() if link is BernoulliLink.LOGIT else _Probit()

    def noise_variance(self, batch: Batch) -> Tensor:
        """Return zeros (N,): the classes are the noise. Refuses y other than 0 and 1."""
        other, name = (batch.y != 0) & (batch.y != 1), "BernoulliLikelihood"
        _refuse(other, batch.y, name, "0 or 1", "encode the two classes as 0 and 1")
        return torch.zeros_like(batch.y)

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Return E ln p(1 | s f), which is E ln p(y | f) by the symmetry of both links."""
        return _LINK_RULE.expectation(self._curve.log_prob, _sign(y) * mean, variance)

    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return g1 = E[∂ ln p/∂f] and g2 = ½ E[∂² ln p/∂f²] ≤ 0 (Bonnet, Price)."""
        sign = _sign(y)
        with torch.no_grad():
            functions = self._curve.slope, self._curve.curvature
            slope, bend = _LINK_RULE.expectations(functions, sign * mean, variance)
            return sign * slope, 0.5 * bend

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Return ln P(y)."""
        return self._curve.log_expected_prob(_sign(y) * mean, variance)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return p = P(y = 1) and p (1 − p)."""
        p = self._curve.log_expected_prob(mean, variance).exp()
        return p, p * self._curve.log_expected_prob(-mean, variance).exp()


@final
class _Logit:
    """ln p(1 | f) = ln σ(f) = −ln(1 + e^{−f}) of f of any shape, its derivatives, and its mean."""

    def log_prob(self, f: Tensor) -> Tensor:
        """Return ln p(1 | f)."""
        return logsigmoid(f)

    def slope(self, f: Tensor) -> Tensor:
        """Return ∂ ln p(1 | f)/∂f."""
        return torch.sigmoid(-f)

    def curvature(self, f: Tensor) -> Tensor:
        """Return ∂² ln p(1 | f)/∂f²."""
        return -torch.sigmoid(f) * torch.sigmoid(-f)

    def log_expected_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return ln E p(1 | f) (N,) under f ~ N(mean, variance), by quadrature.

        The slope of ln σ is at most 1, so it moves the bulk by at most v.
        """
        return replace(_LINK_RULE, tilt=variance).log_expectation(self.log_prob, mean, variance)


@final
class _Probit:
    """The same of ln Φ(f); its derivatives by r(f) = N(f; 0, 1)/Φ(f) = √(2/π)/erfcx(−f/√2)."""

    def log_prob(self, f: Tensor) -> Tensor:
        log_prob: Tensor = torch.special.log_ndtr(f)
        return log_prob

    def slope(self, f: Tensor) -> Tensor:
        slope: Tensor = math.sqrt(2.0 / math.pi) / torch.special.erfcx(-f / math.sqrt(2.0))
        return slope

    def curvature(self, f: Tensor) -> Tensor:
        """Return −r (f + r), in (−1, 0); round-off far in the left tail is kept there."""
        slope = self.slope(f)
        return -(slope * (f + slope)).clamp(0.0, 1.0)

    def log_expected_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return ln Φ(μ/√(1 + v))."""
        return self.log_prob(mean / (1.0 + variance).sqrt())


def _refuse(other: Tensor, y: Tensor, name: str, expected: str, remedy: str) -> None:
    """Raise where some y (N,) are none that a likelihood knows."""
    if bool(other.any()):
        first = int(other.nonzero()[0, 0])
        raise UserError(
            f"{name} needs y of {expected}, got {int(other.sum())} other values of {len(y)}, the "
            f"first is y[{first}] = {float(y[first])}: {remedy}"
        )


def _sign(y: Tensor) -> Tensor:
    """Map classes 0 and 1 to −1 and 1."""
    return 2.0 * y - 1.0


@final
class PoissonLikelihood(AbstractLikelihood):
    """p(y | f) = e^{y f − e^f}/y!: counts of rate e^f.

    All in closed form but the predictive density. Nothing is learned, and the noise of a batch,
    if any, is not used. f is the log of the rate: a mean of ln ȳ is a good one to start from.
    """

    def noise_variance(self, batch: Batch) -> Tensor:
        """Return zeros (N,): the counts are the noise. Refuses y other than whole numbers ≥ 0."""
        other = (batch.y < 0) | (batch.y != batch.y.round())
        expected = "whole numbers >= 0"
        _refuse(other, batch.y, "PoissonLikelihood", expected, "give it counts, not rates")
        return torch.zeros_like(batch.y)

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Return y μ − e^{μ + v/2} − ln y!."""
        return y * mean - (mean + 0.5 * variance).exp() - torch.lgamma(y + 1.0)

    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return g1 = y − e^{μ + v/2}, g2 = −½ e^{μ + v/2}."""
        rate = (mean + 0.5 * variance).detach().exp()
        return y - rate, -0.5 * rate

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """By the trapezoidal rule about the rate of y, reaching over the mode of the integrand."""
        counts = y.double().unsqueeze(-1)
        with torch.no_grad():
            tilt = _mode_offset(y.double(), mean.double(), variance.double())
            rule = SinhTrapezoid((y + 0.5).log(), (y + 1.0).rsqrt(), _DENSITY_NODES, tilt)
        normalisation = torch.lgamma(counts + 1.0)
        return rule.log_expectation(
            lambda f: counts * f - f.exp() - normalisation, mean.double(), variance
        ).to(mean.dtype)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean rate e^{μ + v/2} = r, and r + r² (e^v − 1)."""
        rate = (mean + 0.5 * variance).exp()
        return rate, rate + rate.square() * variance.expm1()


def _mode_offset(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return f* − μ (N,) for the maximum f* of y f − e^f − (f − μ)²/2v.

    There f* = μ + v y − W with W = v e^{f*}, so that u = ln W solves u + e^u = μ + v y + ln v.
    """
    target = mean + variance * y + variance.clamp_min(1e-300).log()
    u = torch.where(target > 1.0, target.clamp_min(1.0).log(), target)
    for _ in range(_STEPS):
        u = u - (u + u.exp() - target) / (1.0 + u.exp())
    return variance * y - u.exp()
