"""Likelihoods as inference sees them, and expectations over f ~ N(μ, v) by quadrature."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._batch import Batch
from dustmap.gp._parameters import AbstractParametric

#: Half width of the interval of `SinhTrapezoid` in standard deviations: 1.2e-15 lies outside.
_REACH = 8.0


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


class AbstractQuadrature(ABC):
    """Nodes x_q and weights w_q with E[g(f)] ≈ Σ_q w_q g(μ + √v x_q) under f ~ N(μ, v).

    Sums are in float64, results in the dtype of the mean. Nodes and weights are constants of
    autograd: the gradient in μ and v is that of g at its nodes, which for an exact rule is the
    gradient of the expectation.
    """

    @abstractmethod
    def standard(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and ln w, (Q,) or (N, Q), for float64 mean (N,) and variance (N,)."""

    def expectation(
        self, function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor
    ) -> Tensor:
        """Return E[function(f)] (N,); function maps float64 (N, Q) to (N, Q)."""
        f, log_weights = self._nodes(mean, variance)
        return (log_weights.exp() * function(f)).sum(-1).to(mean.dtype)

    def expectations(
        self,
        first: Callable[[Tensor], Tensor],
        second: Callable[[Tensor], Tensor],
        mean: Tensor,
        variance: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return E[first(f)] and E[second(f)] (N,) from the same nodes."""
        f, log_weights = self._nodes(mean, variance)
        weights = log_weights.exp()
        values = ((weights * function(f)).sum(-1).to(mean.dtype) for function in (first, second))
        return next(values), next(values)

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


@final
@dataclass(frozen=True)
class GaussHermite(AbstractQuadrature):
    """The Gauss rule of `order` nodes: exact where g is a polynomial of degree < 2 · order.

    Its error falls like exp(−2 d √order), d the distance of g's nearest singularity from the real
    axis in units of √v: fast where g is smooth over the width of q, useless where it is not.
    """

    order: int

    def __post_init__(self) -> None:
        if not 1 <= self.order <= 300:
            raise UserError(f"order of GaussHermite must be in [1, 300], got {self.order}")

    def standard(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        nodes, log_weights = _hermite(self.order)
        return mean.new_tensor(nodes), mean.new_tensor(log_weights)


@final
@dataclass(frozen=True, eq=False)
class SinhTrapezoid(AbstractQuadrature):
    """The trapezoidal rule in t, f = c + s sinh t, with `count` nodes, for g with a bend at c.

    centre c, scale s: numbers or (N,); place and width of the bend. Where the singularities of g
    lie at c ± i r with r ≥ s, sinh keeps them π/2 from the real axis of t, and the rule converges
    geometrically however wide q is beside s: the nodes crowd where g bends and thin out as g
    becomes smooth. Where q is narrow the nodes are evenly spaced over it.

    Nodes cover μ ± 8 √v, and beyond that on its side `tilt`, a number or (N,): how far a factor
    p(y|f) can move the bulk of p(y|f) N(f; μ, v), as `log_expectation` needs: v times its slope.
    """

    centre: Tensor | float
    scale: Tensor | float
    count: int
    tilt: Tensor | float = 0.0

    def standard(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        c, s, tilt = (_like(part, mean) for part in (self.centre, self.scale, self.tilt))
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


def _like(value: Tensor | float, like: Tensor) -> Tensor:
    """Expand a number to the shape of a tensor."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like)


@lru_cache(maxsize=16)
def _hermite(order: int) -> tuple[list[float], list[float]]:
    """Return the nodes and ln weights of the rule for N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    log_weights = np.log(np.maximum(weights, np.finfo(float).tiny) / math.sqrt(2.0 * math.pi))
    return nodes.tolist(), log_weights.tolist()
