"""Normal distributions of unknown variance: predictions under Student-t noise."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

#: e-foldings by which the integrand has fallen at the ends of the quadrature.
_FALL = 20.0
#: Step of the trapezoidal rule in ln τ at most, and in standard deviations √(2/ν) of ln τ.
_STEP, _STEPS_PER_STD = 0.3, 2.0
#: Nodes at most: ν = 1000 with residuals of 10⁶ widths takes that many.
_MOST_NODES = 1024
#: Of so many nodes one serves the scores in units of y, whose relative error stays below 10⁻⁴.
_STRIDE = 3


@final
@dataclass(frozen=True, eq=False)
class NormalMixture:
    """y_n ~ Σ_k w_nk N(μ_n, V_nk): mean (N,); log_weights and variances (N, K), float64.

    The convolution of N(f; μ, v) with Student-t noise of width s and ν degrees of freedom is one,
    ∫ Gamma(τ; ν/2, ν/2) N(y; μ, v + s²/τ) dτ; density, distribution function and scores are sums.
    """

    mean: Tensor
    log_weights: Tensor
    variances: Tensor

    @staticmethod
    def student_t(
        y: Tensor, mean: Tensor, variance: Tensor, width2: Tensor, dof: Tensor
    ) -> "NormalMixture":
        """f + s t_ν for f ~ N(μ, v), by the trapezoidal rule in ln τ, whose integrand is smooth
        however narrow or wide N(f; μ, v) is. Nodes reach the weights that a datum y asks for.

        y, mean, variance, width2 = s² (N,); dof = ν, a number.
        """
        y, mean, variance, width2 = (part.double() for part in (y, mean, variance, width2))
        log_tau = _nodes(y - mean, width2, dof)
        log_weights = torch.log_softmax(0.5 * dof * (log_tau - log_tau.expm1()), dim=-1)
        variances = variance[:, None] + width2[:, None] * (-log_tau).exp()
        return NormalMixture(mean, log_weights, variances)

    def log_density(self, y: Tensor) -> Tensor:
        """ln p(y_n) (N,)."""
        square = (y.double() - self.mean).square()[:, None]
        terms = -0.5 * ((2.0 * math.pi * self.variances).log() + square / self.variances)
        return torch.logsumexp(self.log_weights + terms, dim=-1)

    def log_tail(self, y: Tensor) -> Tensor:
        """ln P(Y_n − μ_n > |y_n − μ_n|) (N,), one half at most."""
        z = (y.double() - self.mean).abs()[:, None] / self.variances.sqrt()
        return torch.logsumexp(self.log_weights + torch.special.log_ndtr(-z), dim=-1)

    def crps(self, y: Tensor) -> Tensor:
        """E|Y − y| − ½ E|Y − Y'| (N,), the continuous ranked probability score, in units of y.

        |N(m, V)| has the mean m (2Φ(m/√V) − 1) + 2 √V φ(m/√V).
        """
        # The same nodes for both means, which for ν = 1 are infinite where their difference is not.
        weights = torch.softmax(self.log_weights[:, ::_STRIDE], dim=-1)
        variances = self.variances[:, ::_STRIDE]
        offset, std = (y.double() - self.mean).abs()[:, None], variances.sqrt()
        z = offset / std
        peak = (-0.5 * z.square()).exp() * math.sqrt(2.0 / math.pi)
        apart = offset * torch.special.erf(z / math.sqrt(2.0)) + std * peak
        for k in range(weights.shape[1]):
            pairs = (variances + variances[:, k, None]).sqrt()
            apart = apart - weights[:, k, None] * pairs / math.sqrt(2.0 * math.pi)
        score: Tensor = (weights * apart).sum(-1)
        return score


@torch.no_grad()
def _nodes(residual: Tensor, width2: Tensor, dof: Tensor) -> Tensor:
    """ln τ (N, K): from where the tail beyond a residual (N,) has no weight to where the prior has
    none. Its falls are those of τ^{ν/2} and of exp(−ντ/2)."""
    nu = float(dof)
    std = math.sqrt(2.0 / nu)
    low = -(residual.square() / (nu * width2)).log1p() - 2.0 * _FALL / nu - 9.0 * std
    high = math.log1p(9.0 * std + 2.0 * _FALL / nu)
    wanted = float((high - low).max()) / min(_STEP, std / _STEPS_PER_STD)
    count = min(_MOST_NODES, math.ceil(wanted) + 1)
    share = torch.linspace(0.0, 1.0, count, dtype=torch.float64, device=residual.device)
    return low[:, None] + (high - low)[:, None] * share
