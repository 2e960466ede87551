"""Noise of real numbers: Gaussian, given with the data or learned, and Student-t with heavy tails.

Predictions of data with Student-t noise are normal distributions of unknown variance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._batch import Batch
from dustmap.gp._parameters import Parameter
from dustmap.gp.likelihoods._likelihood import AbstractLikelihood, SinhTrapezoid

#: e-foldings by which the integrand has fallen at the ends of the quadrature.
_FALL = 20.0
#: Step of the trapezoidal rule in ln τ at most, and in standard deviations √(2/ν) of ln τ.
_STEP, _STEPS_PER_STD = 0.3, 2.0
#: Nodes at most: ν = 1000 with residuals of 10⁶ widths takes that many.
_MOST_NODES = 1024
#: Scores in units of y take every third node: single ones are right to 0.4 %, means to 10⁻⁵.
_STRIDE = 3
#: Nodes of the quadrature: errors of E are below 1e-9 for √v ≤ 300 a and residuals within √v, and
#: 4e-5 at four times that; those of g1 and g2 below 1e-14 of their largest values.
_COUNT = 96
#: ν stays above this, where the variance of the noise begins to exist.
_LEAST = 2.0


#: Names of the parameters of the noise in reports.
_PARAMETERS = {"scale": "noise", "jitter": "scatter", "relative": "relative_scatter"}


@final
class GaussianLikelihood(AbstractLikelihood):
    """y_n ~ N(f_n, scale² σ_n² + v_n + jitter² + (relative a_n)²), σ_n² and v_n from the batch:
    σ_n² = noise_variance − added_variance, v_n = added_variance. Data with σ_n² = 0 are no
    measurements, and have v_n alone.

    GaussianLikelihood()                          the given σ_n alone
    GaussianLikelihood(jitter=0.1)                learned homoscedastic noise; σ_n may be absent
    GaussianLikelihood(scale=1.0, jitter=0.01)    both learned on top of the given σ_n
    GaussianLikelihood(relative=0.1)              noise that grows with the field

    Parameters "noise" (ln scale), "scatter" (ln jitter) and "relative_scatter" (ln relative).

    a_n = batch.response is what the model expects of datum n, never y_n: data that noise has made
    small would weigh more than those it has made large. Whoever fits the field sets and renews it.

    scale, jitter, relative: starting values > 0, jitter in the units of y, None for those that are
    not in the model; fixed with `learn=False`.
    """

    def __init__(
        self,
        scale: float | None = None,
        jitter: float | None = None,
        relative: float | None = None,
        *,
        learn: bool = True,
    ) -> None:
        named = (("scale", scale), ("jitter", jitter), ("relative", relative))
        for name, value in named:
            _check_positive(name, value)
        self._parameters = {
            part: Parameter.log(_PARAMETERS[part], value, learn=learn)
            for part, value in named
            if value is not None
        }

    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(self._parameters.values())

    def with_parameters(self, parameters: Sequence[Parameter]) -> "GaussianLikelihood":
        made = GaussianLikelihood()
        made._parameters = dict(zip(self._parameters, parameters, strict=True))
        return made

    @property
    def log_scale(self) -> Tensor | None:
        """ln of the factor on the given errors, None where they are taken as given."""
        return self._log("scale")

    @property
    def log_jitter(self) -> Tensor | None:
        """ln of the standard deviation that is added, None for none."""
        return self._log("jitter")

    @property
    def log_relative(self) -> Tensor | None:
        """ln of the noise in proportion to the response, None for none."""
        return self._log("relative")

    def noise_variance(self, batch: Batch) -> Tensor:
        stated = batch.noise_variance
        if stated is None and (self.log_jitter is None or self.log_scale is not None):
            raise UserError(
                "the batch has noise_variance=None, but this GaussianLikelihood "
                + ("scales given noise" if self.log_scale is not None else "has no jitter to learn")
                + ": give the batch noise_variance (N,), or use GaussianLikelihood(jitter=...)"
            )
        total = torch.zeros_like(batch.y) if stated is None else stated
        measured: Tensor | float = 1.0
        if stated is not None and batch.added_variance is not None:
            measured = (stated > batch.added_variance).to(total)
        if self.log_scale is not None:
            added = 0.0 if batch.added_variance is None else batch.added_variance
            total = (total - added) * (2.0 * self.log_scale).exp().to(total) + added
        if self.log_jitter is not None:
            total = total + measured * (2.0 * self.log_jitter).exp().to(total)
        if self.log_relative is not None:
            if batch.response is None:
                raise UserError(
                    "the batch has response=None, but the noise of this GaussianLikelihood grows "
                    "with the response: give the batch response (N,), or fit it with fit_mgvi"
                )
            response = batch.response if batch.offset is None else batch.response + batch.offset
            square = measured * response.to(total).square()
            total = total + (2.0 * self.log_relative).exp().to(total) * square
        return total

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Return −½ ln 2πσ² − [(y − μ)² + v] / 2σ²  (eq. 14)."""
        return _log_normal_density(y - mean, noise_variance) - 0.5 * variance / noise_variance

    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return g1 = (y − μ)/σ², g2 = −1/(2σ²)."""
        weight = noise_variance.detach().reciprocal()
        return (y - mean).detach() * weight, -0.5 * weight

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Return ln N(y; μ, v + σ²)."""
        return _log_normal_density(y - mean, variance + noise_variance)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return μ and v + σ²."""
        return mean, variance + noise_variance

    def _log(self, part: str) -> Tensor | None:
        parameter = self._parameters.get(part)
        return None if parameter is None else parameter.value


def _log_normal_density(residual: Tensor, variance: Tensor) -> Tensor:
    """Return ln N(y; m, v) of every datum."""
    return -0.5 * ((2.0 * math.pi * variance).log() + residual.square() / variance)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} must be a positive number or None, got {value}")


@final
@dataclass(frozen=True, eq=False)
class NormalMixture:
    """y_n ~ Σ_k w_k N(μ_n, V_nk): mean (N,); log_weights (K,); variances (N, K), float64.

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
        variances = torch.addcmul(variance[:, None], width2[:, None], (-log_tau).exp())
        return NormalMixture(mean, log_weights, variances)

    def log_density(self, y: Tensor) -> Tensor:
        """Return ln p(y_n) (N,)."""
        square = (y.double() - self.mean).square()[:, None]
        precisions = self.variances.reciprocal()
        exponents = torch.addcmul(self.log_weights, square, precisions, value=-0.5)
        largest = exponents.detach().amax(-1, keepdim=True)
        density = ((exponents - largest).exp() * precisions.sqrt()).sum(-1)
        return density.log() + largest[:, 0] - 0.5 * math.log(2.0 * math.pi)

    def log_tail(self, y: Tensor) -> Tensor:
        """Return ln P(Y_n − μ_n > |y_n − μ_n|) (N,), one half at most."""
        z = (y.double() - self.mean).abs()[:, None] / self.variances.sqrt()
        return torch.logsumexp(self.log_weights + torch.special.log_ndtr(-z), dim=-1)

    def crps(self, y: Tensor) -> Tensor:
        """E|Y − y| − ½ E|Y − Y'| (N,), the continuous ranked probability score, in units of y."""
        # The same nodes for both means, which for ν = 1 are infinite where their difference is not.
        weights = torch.softmax(self.log_weights[::_STRIDE], dim=-1)
        variances = self.variances[:, ::_STRIDE]
        apart = mean_size((y.double() - self.mean).abs()[:, None], variances.sqrt())
        for k in range(len(weights)):
            pairs = (variances + variances[:, k, None]).sqrt()
            apart = apart - weights[k] * pairs / math.sqrt(2.0 * math.pi)
        return (weights * apart).sum(-1)


def mean_size(mean: Tensor, std: Tensor) -> Tensor:
    """Return E|Y| of Y ~ N(m, s²), m (2Φ(m/s) − 1) + 2 s φ(m/s), of any shape (...).

    Examples
    --------
    >>> mean_size(torch.zeros(1), torch.ones(1))  # √(2/π)
    tensor([0.7979])
    """
    z = mean / std
    peak = (-0.5 * z.square()).exp() * math.sqrt(2.0 / math.pi)
    size: Tensor = mean * torch.special.erf(z / math.sqrt(2.0)) + std * peak
    return size


@torch.no_grad()
def _nodes(residual: Tensor, width2: Tensor, dof: Tensor) -> Tensor:
    """ln τ (K,): from where the tail beyond the largest of residuals (N,) has no weight to where
    the prior has none. Its falls are those of τ^{ν/2} and of exp(−ντ/2)."""
    nu = float(dof)
    std = math.sqrt(2.0 / nu)
    farthest = float((residual.square() / (nu * width2)).max())
    low = -math.log1p(farthest) - 2.0 * _FALL / nu - 9.0 * std
    high = math.log1p(9.0 * std + 2.0 * _FALL / nu)
    wanted = (high - low) / min(_STEP, std / _STEPS_PER_STD)
    count = min(_MOST_NODES, math.ceil(wanted) + 1)
    return torch.linspace(low, high, count, dtype=torch.float64, device=residual.device)


@final
class StudentTLikelihood(AbstractLikelihood):
    """y_n = f_n + s_n t_ν: ln p = c − ½ (ν + 1) ln(1 + (y − f)²/a²), a² = ν s_n².

    Parameters "excess" (ln(ν − 2)) and "noise" (ln scale).

    Noise variances in the sense of the methods are the squared widths s_n², not the variances of
    the noise. Expectations by the trapezoidal rule in t, f = y + a sinh t, which is as good for a
    wide q as for a narrow one; Gauss-Hermite rules miss the bend of width a where √v > a. The
    predictive density is that of a `NormalMixture`.

    ln p is not concave beyond |y − f| = a: g2 may be positive, and the weight −2 g2 of an outlier
    in the precision of q negative.

    dof: ν > 2 to start from, so that a new datum has a variance, s² ν/(ν − 2); scale > 0: s_n
    itself, in the units of y, where the batch has no noise_variance, else the factor of its errors,
    s_n = scale · σ_n. Both are learned unless `learn=False`.
    """

    def __init__(self, dof: float = 4.0, scale: float = 1.0, *, learn: bool = True) -> None:
        if not (math.isfinite(dof) and dof > _LEAST):
            raise UserError(
                f"dof must be a number above {_LEAST:g}, where the noise has a variance, got {dof}"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise UserError(f"scale must be a positive number, got {scale}")
        self._parameters = (
            Parameter.log("excess", dof - _LEAST, learn=learn),
            Parameter.log("noise", scale, learn=learn),
        )

    def parameters(self) -> tuple[Parameter, ...]:
        return self._parameters

    def with_parameters(self, parameters: Sequence[Parameter]) -> "StudentTLikelihood":
        made = StudentTLikelihood()
        excess, noise = parameters
        made._parameters = (excess, noise)
        return made

    @property
    def log_scale(self) -> Tensor:
        """ln of the width of the noise, or of the factor of the given errors."""
        return self._parameters[1].value

    @property
    def dof(self) -> float:
        """ν at present."""
        return float(self._dof().detach())

    @property
    def scale(self) -> float:
        """Width of the noise at present, or factor of the given errors."""
        return float(self.log_scale.detach().exp())

    def noise_variance(self, batch: Batch) -> Tensor:
        """Return s_n² (N,), the squared width: scale², times σ_n² where the batch has it."""
        stated = torch.ones_like(batch.y) if batch.noise_variance is None else batch.noise_variance
        return stated * (2.0 * self.log_scale).exp().to(stated)

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        width2 = noise_variance.double()
        dof = self._dof()
        bend2, target = (dof * width2).unsqueeze(-1), y.double().unsqueeze(-1)
        rule = SinhTrapezoid(y, bend2[:, 0].sqrt(), _COUNT)
        tail = rule.expectation(
            lambda f: ((target - f).square() / bend2).log1p(), mean.double(), variance
        )
        return (self._log_peak(width2) - 0.5 * (dof + 1.0) * tail).to(mean.dtype)

    @torch.no_grad()
    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """With r = y − f: g1 = (ν + 1) E[r/(a² + r²)], g2 = −½ (ν + 1) E[(a² − r²)/(a² + r²)²]."""
        dof, target = self._dof(), y.double().unsqueeze(-1)
        bend2, more = (dof * noise_variance.double()).unsqueeze(-1), dof + 1.0
        rule = SinhTrapezoid(y, bend2[:, 0].sqrt(), _COUNT)

        def slope(f: Tensor) -> Tensor:
            return more * (target - f) / (bend2 + (target - f).square())

        def curvature(f: Tensor) -> Tensor:
            r2 = (target - f).square()
            return -more * (bend2 - r2) / (bend2 + r2).square()

        g1, bend = rule.expectations((slope, curvature), mean, variance)
        return g1, 0.5 * bend

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        mixture = NormalMixture.student_t(y, mean, variance, noise_variance, self._dof())
        return mixture.log_density(y).to(mean.dtype)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return μ and v + s² ν/(ν − 2)."""
        dof = self._dof().to(noise_variance)
        return mean, variance + noise_variance * dof / (dof - _LEAST)

    def _dof(self) -> Tensor:
        """Return ν, a float64 scalar."""
        return _LEAST + self._parameters[0].value.exp()

    def _log_peak(self, width2: Tensor) -> Tensor:
        """Return ln p at f = y: ln Γ((ν + 1)/2) − ln Γ(ν/2) − ½ ln(ν π s²)."""
        dof = self._dof()
        gammas = torch.lgamma(0.5 * (dof + 1.0)) - torch.lgamma(0.5 * dof)
        return gammas - 0.5 * (math.pi * dof * width2).log()
