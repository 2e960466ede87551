"""Student-t noise: its law, ν, scale and the likelihood's own numbers around a field in part known.

Beside a field known by residual and spread alone, weights come by expectation–maximisation: of a
Student-t datum with width s σ_n it is τ_n = (ν + 1)/(ν + e_n²/(s² σ_n²)), about one for ordinary
data and next to nothing for outliers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractParametric, Batch, Parameter, Parameters, gradient_at, maximise
from dustmap.gp.likelihoods import GaussianLikelihood, SinhTrapezoid

#: ν is looked for in this range; its upper end is Gaussian noise for all purposes.
LEAST_NU, MOST_NU = 1.0, 1e3
#: Data of smaller weight count as outliers in reports.
OUTLIER_WEIGHT = 0.1
#: Data that the noise is learned from at most, nodes of their quadrature, steps of L-BFGS and the
#: largest gradient per datum at its end.
_ROWS, _NODES, _STEPS, _GRADIENT = 50_000, 32, 40, 1e-6
#: Turns of the scale and of the field's variance with it: by L-BFGS, and by fixed points.
_TURNS, _FIXED_POINT_TURNS = 6, 8
#: Jitter, of the median σ, below which there is none.
_LEAST_JITTER = 0.02
#: σ changes by at most this factor in one round; halvings of that interval of ln s.
_SCALES, _HALVINGS = 4.0, 30
#: Change of the weights below which they rest: solves of a fifth of the noise leave half of it.
_SETTLED = 0.1


@final
@dataclass(frozen=True)
class StudentTNoise:
    """e ~ scale · σ · t_ν: degrees of freedom nu > 0; scale > 0 of the given σ.

    The variance is that of σ²ν/(ν − 2) only for ν > 2; σ itself is the width of the core.
    """

    nu: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.nu > 0 and math.isfinite(self.nu) and self.scale > 0):
            raise UserError(
                f"nu must be positive and finite and scale positive, got nu={self.nu}, "
                f"scale={self.scale}"
            )


@final
@dataclass(frozen=True)
class RobustSettings:
    """Settings of `fit_student_t`.

    Attributes
    ----------
    max_rounds : most solves at one kernel
    tolerance : of the sites' root mean square change, in units of the noise, below which they rest
    samples : deviations per solve
    nu : degrees of freedom to start from
    learn_nu, learn_scale : whether ν, and the factor s of all σ, are learned
    scale_std : standard deviation of ln s around 0 before the data
    max_turns : most turns of noise and kernel, where the kernel is learned too
    """

    max_rounds: int = 25
    tolerance: float = 0.02
    samples: int = 16
    nu: float = 4.0
    learn_nu: bool = True
    learn_scale: bool = True
    scale_std: float = math.inf
    max_turns: int = 10

    def __post_init__(self) -> None:
        if min(self.max_rounds, self.max_turns) < 1 or self.samples < 2 or self.tolerance <= 0:
            raise UserError(
                "max_rounds and max_turns must be at least 1, samples at least 2 and tolerance "
                f"positive, got max_rounds={self.max_rounds}, max_turns={self.max_turns}, "
                f"samples={self.samples}, tolerance={self.tolerance}"
            )
        if not self.scale_std > 0.0:
            raise UserError(f"scale_std must be positive, got {self.scale_std}")
        if not LEAST_NU <= self.nu <= MOST_NU:
            raise UserError(f"nu must be between {LEAST_NU:g} and {MOST_NU:g}, got {self.nu}")


def measured_weight(data: Batch, likelihood: GaussianLikelihood) -> Tensor | None:
    """What every datum says of the scale of the noise, of what it says without additions (N,).

    That of N(0, s² σ_n² + v_n) has 2 p² of Fisher's information of ln s, p the part of its variance
    under the likelihood that is of its measurement; p² here, None where nothing is added. Additions
    that stars share are counted more than once in v_n, and with p alone many such data would take
    the noise for small.

    Examples
    --------
    >>> from dustmap.gp.functionals import PointValues
    >>> x, total, added = torch.zeros(1, 1), torch.tensor([4.0]), torch.tensor([1.0])
    >>> data = Batch(PointValues(x), total, total, added_variance=added)
    >>> measured_weight(data, GaussianLikelihood(scale=1.0))
    tensor([0.5625], dtype=torch.float64)
    """
    if data.added_variance is None or data.noise_variance is None:
        return None
    whole = likelihood.noise_variance(data).detach()
    return (1.0 - (data.added_variance / whole).double()).square()


@final
@dataclass(frozen=True, eq=False)
class StudentTModel(AbstractParametric):
    """The law of the noise as it is learned: ν and s by their logarithms, and the likelihood of σ.

    Parameters "nu" and "scale" beside those of the likelihood; where s is learned, the likelihood's
    own scale is not, for the two are one. scale_std: τ of ln s around 0 before the data.
    """

    nu: Parameter
    scale: Parameter
    likelihood: GaussianLikelihood
    scale_std: float = math.inf

    @staticmethod
    def of(
        noise: StudentTNoise, likelihood: GaussianLikelihood, learn_nu: bool, learn_scale: bool
    ) -> "StudentTModel":
        """Build the model that starts at this noise."""
        return StudentTModel(
            Parameter.log("nu", noise.nu, learn=learn_nu),
            Parameter.log("scale", noise.scale, learn=learn_scale),
            likelihood.holding("noise") if learn_scale else likelihood,
        )

    def parameters(self) -> tuple[Parameter, ...]:
        return self.nu, self.scale, *self.likelihood.parameters()

    def with_parameters(self, parameters: Sequence[Parameter]) -> "StudentTModel":
        nu, scale, *rest = parameters
        likelihood = self.likelihood.with_parameters(rest)
        return replace(self, nu=nu, scale=scale, likelihood=likelihood)

    @property
    def noise(self) -> StudentTNoise:
        """ν within its range, and s."""
        nu, scale = (float(p.value.detach().exp()) for p in (self.nu, self.scale))
        return StudentTNoise(min(max(nu, LEAST_NU), MOST_NU), scale)

    def variance(self, data: Batch) -> Tensor:
        """σ_n² (N,) of the likelihood, float64."""
        return self.likelihood.noise_variance(data).double()

    def logs(self) -> tuple[float, ...]:
        """ln ν, ln s and what is learned of the likelihood (2 + K,)."""
        own = (p for p in self.likelihood.parameters() if p.is_learned)
        noise = self.noise
        return (math.log(noise.nu), math.log(noise.scale), *(float(p.value) for p in own))


def noise_nats(before: Sequence[float], after: Sequence[float], n: int) -> float:
    """½ Δᵀ I Δ of a change of `StudentTModel.logs` by n data, I their Fisher information but for
    what one parameter says of another.

    Per datum 2ν/(ν + 3) of ln s, and of ν, with the trigamma function ψ',
    ¼ ψ'(ν/2) − ¼ ψ'((ν + 1)/2) − (ν + 5)/(2ν (ν + 1)(ν + 3)).

    Examples
    --------
    >>> round(noise_nats([math.log(4.0), 0.0], [math.log(4.0), 0.1], n=700), 9)  # a 10 % wider t
    4.0
    """
    nu = math.exp(after[0])
    squares = [(b - a) ** 2 for a, b in zip(before, after, strict=True)]
    of_scale = 2.0 * nu / (nu + 3.0)
    nats: float = information_of_nu(nu) * squares[0] + of_scale * sum(squares[1:])
    return 0.5 * n * nats


def student_t_information(nu: float, slopes: Sequence[Tensor], counted: Tensor) -> Tensor:
    """Fisher information (1 + K, 1 + K) of ln ν and of K parameters of the widths, float64.

    slopes: ∂ ln s_n / ∂θ_k (N,) each; counted (N,): how much of a datum counts. A datum has

        2ν/(ν + 3) of ln s        −2ν/((ν + 1)(ν + 3)) between ln ν and ln s

    and of ln ν what `noise_nats` has (Lange, Little & Taylor 1989).

    Examples
    --------
    >>> one = torch.ones(700, dtype=torch.float64)
    >>> round(float(student_t_information(4.0, [one], one)[1, 1]), 6)  # 2 · 4/7 of 700 data
    800.0
    """
    widths = torch.stack([torch.zeros_like(counted), *slopes])
    of_widths = 2.0 * nu / (nu + 3.0) * (widths * counted) @ widths.mT
    between = -2.0 * nu / ((nu + 1.0) * (nu + 3.0)) * widths @ counted
    information: Tensor = of_widths.double().cpu()
    information[0] = information[:, 0] = between
    information[0, 0] = information_of_nu(nu) * float(counted.sum())
    return information


def information_of_nu(nu: float) -> float:
    """Fisher information of ln ν in a datum."""
    half = torch.tensor([0.5 * nu, 0.5 * (nu + 1.0)], dtype=torch.float64)
    low, high = torch.special.polygamma(1, half).tolist()
    of_nu = 0.25 * (low - high) - 0.5 * (nu + 5.0) / (nu * (nu + 1.0) * (nu + 3.0))
    return max(float(of_nu), 0.0) * nu**2


def fitted_around(
    present: StudentTModel, data: Batch, mean: Tensor, variance: Tensor
) -> StudentTModel:
    """The law of largest Σ_n p_n E ln t + ln N(ln s; 0, τ²) over ν, s and the likelihood.

    f_n ~ N(mean, variance) (N,), y_n = f_n + s σ_n t_ν; p (N,) = `measured_weight`. At a fixed
    field that is a step of expectation–maximisation, which creeps where data determine a field of
    much freedom: its variance goes with s² σ². With that in mind a step gets where plain ones creep
    to.
    """
    part = data.random_rows(_ROWS, seed=0)
    some, m, v = data[part], mean[part].double(), variance[part].double()
    share = measured_weight(some, present.likelihood)
    p = torch.ones_like(m) if share is None else share.to(m)
    if not bool((p > 0).any()):  # no datum has an error of measurement to speak of
        return present
    objective = _Objective(
        some, m, p / p.mean(), _weight(present.scale_std, float(p.mean()) * len(data))
    )
    at, first = present, objective.typical_width(present)
    for _ in range(_TURNS):
        before = objective.typical_width(at)
        at = objective.maximised(at, v * (before / first) ** 2)
        if abs(math.log(objective.typical_width(at) / before)) < 1e-3:
            break
    return at


@torch.no_grad()
def scatter_floor(likelihood: GaussianLikelihood, data: Batch) -> dict[str, float]:
    """The least log jitter by the name of its parameter: so small a part of σ is none."""
    if likelihood.log_jitter is None or data.noise_variance is None:
        return {}
    return {"scatter": math.log(_LEAST_JITTER * float(data.noise_variance.median().sqrt()))}


@final
@dataclass(frozen=True, eq=False)
class _Objective:
    """N⁻¹ Σ_n p_n E ln t − ½ weight (ln s)² of data around a field of this mean (N,)."""

    data: Batch
    mean: Tensor
    share: Tensor
    weight: float

    def maximised(self, start: StudentTModel, variance: Tensor) -> StudentTModel:
        """The law where it is largest at this variance (N,) of the field, by L-BFGS."""
        parameters = Parameters.of(start)
        if len(parameters) == 0:
            return start
        square, shares = self._nodes(start, variance)

        def gradient(theta: Tensor) -> tuple[float, Tensor]:
            return gradient_at(theta, lambda at: self._value(parameters.build(at), square, shares))

        maximum = maximise(parameters, gradient, n_data=1, max_steps=_STEPS, tolerance=_GRADIENT)
        fitted = parameters.build(maximum.theta)
        for name, floor in scatter_floor(fitted.likelihood, self.data).items():
            held = fitted.likelihood.log_jitter
            learned = any(p.is_learned and p.name == name for p in fitted.likelihood.parameters())
            if learned and held is not None:
                fitted = fitted.with_value(name, held.clamp_min(floor))
        return fitted.with_value("nu", torch.tensor(math.log(fitted.noise.nu)).double())

    @torch.no_grad()
    def typical_width(self, model: StudentTModel) -> float:
        """s σ of the median datum."""
        return model.noise.scale * float(model.variance(self.data).median().sqrt())

    @torch.no_grad()
    def _nodes(self, start: StudentTModel, variance: Tensor) -> tuple[Tensor, Tensor]:
        """e² (N, Q) and weights of the rule that suits the present width."""
        noise = start.noise
        bend = noise.scale * (noise.nu * start.variance(self.data)).sqrt()
        target = self.data.y.double()
        x, log_weights = SinhTrapezoid(target, bend, _NODES).standard(self.mean, variance)
        e = (target - self.mean)[:, None] - variance.sqrt()[:, None] * x
        return e.square(), log_weights.exp()

    def _value(self, model: StudentTModel, square: Tensor, shares: Tensor) -> Tensor:
        log_nu, log_scale = (p.value.to(square) for p in (model.nu, model.scale))
        nu = log_nu.clamp(math.log(LEAST_NU), math.log(MOST_NU)).exp()
        width2 = model.variance(self.data) * (2.0 * log_scale).exp()
        tails = (shares * (square / (nu * width2)[:, None]).log1p()).sum(-1)
        peak = torch.lgamma(0.5 * (nu + 1.0)) - torch.lgamma(0.5 * nu) - 0.5 * nu.log()
        each = peak - 0.5 * width2.log() - 0.5 * (nu + 1.0) * tails
        return (self.share * each).mean() - 0.5 * self.weight * log_scale.square().sum()


@final
@dataclass(frozen=True, eq=False)
class StudentTWeights:
    """ν and scale s of the noise, and tau (N,), the weights τ that follow from the last residuals.

    change: root mean square of the last change of τ/s², in units of 1/s²: that of ordinary data is
    of order one.
    """

    settings: RobustSettings
    noise: StudentTNoise
    tau: Tensor
    change: float

    @staticmethod
    def first(settings: RobustSettings, y: Tensor) -> "StudentTWeights":
        """Before a field has seen the data y (N,): all count in full.

        There is more than one optimum: a cloud before few stars stands out of the residuals of a
        smooth field as outliers do, and stays one if it begins as one. What a field that has seen
        all data has to bend far for loses its weight.
        """
        whole = torch.ones_like(y, dtype=torch.float64)
        return StudentTWeights(settings, StudentTNoise(settings.nu), whole, float("inf"))

    @staticmethod
    def known(settings: RobustSettings, ratio: Tensor) -> "StudentTWeights":
        """For noise whose ν and widths σ_n are known, at u (N,) = E e_n²/σ_n²."""
        noise = StudentTNoise(settings.nu)
        return StudentTWeights(settings, noise, _weights(noise, ratio), float("inf"))

    def updated(
        self, left: Tensor, spread: Tensor, learn_nu: bool = True, share: Tensor | None = None
    ) -> "StudentTWeights":
        """At E e_n²/σ_n² = left + spread (N,), of the mean residual and of the field around it;
        share (N,): `measured_weight`.

        The spread goes with s², the more the more of the data's freedom the field takes up. With
        that in mind one turn gets where plain expectation–maximisation creeps to.
        """
        settings = replace(self.settings, learn_nu=learn_nu and self.settings.learn_nu)
        noise = self.noise
        for _ in range(_FIXED_POINT_TURNS):
            before = noise.scale
            ratio = left + spread * (before / self.noise.scale) ** 2
            noise = fitted_noise(ratio, self.noise, settings, share)
            if abs(math.log(noise.scale / before)) < 1e-2:
                break
        weights = StudentTWeights(self.settings, noise, _weights(noise, ratio), 0.0)
        moved = weights.precision_weights - self.precision_weights
        return replace(weights, change=float(moved.square().mean().sqrt()) * noise.scale**2)

    @property
    def precision_weights(self) -> Tensor:
        """τ_n / s² (N,), by which σ_n² is divided."""
        return self.tau / self.noise.scale**2

    @property
    def settled(self) -> bool:
        """Whether the weights rest."""
        return self.change <= _SETTLED

    @property
    def outliers(self) -> int:
        """Data of weight below 0.1."""
        return int((self.tau < OUTLIER_WEIGHT).sum())

    def message(self) -> str:
        """One clause for the report, without the scale, which is relative to the noise that the
        fit began with: reports have it relative to the errors of the data."""
        return (
            f"Student-t noise of ν = {self.noise.nu:.3g}, {self.outliers} of {len(self.tau)} data "
            f"have a weight below {OUTLIER_WEIGHT:g}"
        )


def _weights(noise: StudentTNoise, ratio: Tensor) -> Tensor:
    """τ_n = (ν + 1) / (ν + u_n / s²) (N,)."""
    return (noise.nu + 1.0) / (noise.nu + ratio / noise.scale**2)


def fitted_noise(
    ratio: Tensor,
    present: StudentTNoise,
    settings: RobustSettings,
    share: Tensor | None = None,
) -> StudentTNoise:
    """ν and scale s of largest Σ_n p_n [ln t_ν(√u_n / s) − ln s] + ln N(ln s; 0, τ²), τ the
    settings' `scale_std`, for u (N,) = E e_n²/σ_n².

    σ_n as given; p = share (N,), 1 where left out: data whose noise is no error of measurement have
    no say in its law. By turns: ν on a refined grid of ln ν, s where
    mean w u / s² = 1 + ln s / (τ² Σ p), w = (ν+1)/(ν+u/s²).
    """
    share = torch.ones_like(ratio) if share is None else share.to(ratio)
    if not bool((share > 0).any()):
        return present
    weight = _weight(settings.scale_std, float(share.sum()))
    share = share / share.mean()
    nu, scale = present.nu, present.scale
    for _ in range(20):
        before = (nu, scale)
        if settings.learn_scale:
            scale = _fitted_scale(ratio, nu, present.scale, share, weight)
        if settings.learn_nu:
            nu = _fitted_nu(ratio / scale**2, share)
        if abs(math.log(nu / before[0])) + abs(math.log(scale / before[1])) < 1e-3:
            break
    return StudentTNoise(nu, scale)


def _fitted_scale(ratio: Tensor, nu: float, present: float, share: Tensor, weight: float) -> float:
    """The zero of mean w u / s² − 1 − weight · ln s, which falls in s, around the present s."""
    low, high = math.log(present / _SCALES), math.log(present * _SCALES)
    for _ in range(_HALVINGS):
        at = 0.5 * (low + high)
        u = ratio * math.exp(-2.0 * at)
        pull = float((share * (nu + 1.0) * u / (nu + u)).mean()) - 1.0 - weight * at
        low, high = (at, high) if pull > 0.0 else (low, at)
    return math.exp(0.5 * (low + high))


def _weight(scale_std: float, counted: float) -> float:
    """That of ½ (ln s)² beside the mean over so many data."""
    return 0.0 if math.isinf(scale_std) else 1.0 / (scale_std**2 * max(counted, 1e-12))


def _fitted_nu(ratio: Tensor, share: Tensor) -> float:
    """argmax_ν of mean ln t_ν, by a grid in ln ν refined three times."""
    low, high = math.log(LEAST_NU), math.log(MOST_NU)
    best = low
    for _ in range(4):
        grid = torch.linspace(low, high, 15, dtype=torch.float64)
        values = torch.stack([_mean_log_t(ratio, math.exp(v), share) for v in grid.tolist()])
        best = float(grid[int(values.argmax())])
        width = float(grid[1] - grid[0])
        low, high = max(best - width, math.log(LEAST_NU)), min(best + width, math.log(MOST_NU))
    return math.exp(best)


def _mean_log_t(ratio: Tensor, nu: float, share: Tensor) -> Tensor:
    """Mean of ln t_ν at squared values u (N,)."""
    constant = math.lgamma(0.5 * (nu + 1.0)) - math.lgamma(0.5 * nu) - 0.5 * math.log(math.pi * nu)
    return constant - 0.5 * (nu + 1.0) * (share * (ratio / nu).log1p()).mean()
