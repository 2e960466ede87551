"""Scores of predictions of y_n against what was measured.

Predictions are normal, y_n ~ N(μ_n, v_n), or with Student-t noise a normal convolved with it. All
columns are (N,); v_n is the variance of y itself, noise included, unless y is a noise-free truth.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.likelihoods import NormalMixture, mean_size
from dustmap.linalg import chunks

#: Steps of Newton's method on ln Φ: enough for 1e-12.
_NEWTON_STEPS = 8
#: Half-widths, in standard deviations, of the central 68.27 % (±1σ) and 95 % intervals.
_ONE_SIGMA = 1.0
_HALF_95 = 1.959963984540054
#: Standard deviation of a normal distribution over its median absolute deviation.
_STD_OF_NORMAL = 1.0 / 0.6744897501960817
#: Data whose mixtures are held at once.
_MIXTURES_AT_ONCE = 4096
#: Data whose pairs of distributions are held at once.
_PAIRS = 2**11
#: Widths of the difference of two Student-t numbers; nodes in ln τ, and how far they reach in
#: standard deviations √(2/ν).
_WIDTHS, _NODES, _REACH = 24, 240, 12.0


@final
@dataclass(frozen=True)
class Scores:
    """Means over n data of their scores.

    Attributes
    ----------
    n : data
    mae, mse, rmse : errors of the predicted mean
    loglike : log-density
    chi2 : of the normal scores, 1 when calibrated, above when overconfident
    coverage68, coverage95 : shares of the data in the central 68.27 % and 95 % of their laws
    crps : continuous ranked probability score, in the units of y
    robust_scatter : float
        1.4826 median |r − median r| of the residuals r = y − μ, the standard deviation of normal
        ones; a few data that are far off hardly change it, and rule rmse.
    """

    n: int
    mae: float
    mse: float
    rmse: float
    loglike: float
    chi2: float
    coverage68: float
    coverage95: float
    crps: float
    robust_scatter: float

    def as_dict(self) -> dict[str, float]:
        """Plain numbers by name, for reports."""
        return dataclasses.asdict(self)


@final
@dataclass(frozen=True, eq=False)
class DatumScores:
    """Scores of N data, one by one, in float64.

    Attributes
    ----------
    residual : (N,)
        y − μ.
    normal : (N,)
        Normal score Φ⁻¹(P(Y < y)), (y − μ)/√v of a normal prediction: N(0, 1) when calibrated.
    log_density : (N,)
        ln p(y).
    crps : (N,)
        Continuous ranked probability score, in the units of y.
    """

    residual: Tensor
    normal: Tensor
    log_density: Tensor
    crps: Tensor

    def __len__(self) -> int:
        return len(self.residual)

    def where(self, chosen: Tensor) -> "DatumScores":
        """Return the scores of the data that `chosen` (N,) marks."""
        return DatumScores(*(column[chosen] for column in vars(self).values()))

    def with_rows(self, rows: Tensor, others: "DatumScores") -> "DatumScores":
        """Return the scores with those of some rows (n,), on their device, replaced."""
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return DatumScores(*(column.index_copy(0, rows, other) for column, other in pairs))

    @property
    def pit(self) -> Tensor:
        """Probability integral transforms P(Y_n < y_n) (N,): uniform when calibrated."""
        transform: Tensor = torch.special.ndtr(self.normal)
        return transform

    def scores(self) -> Scores:
        """Return the means over all data."""
        mse, spread = float(self.residual.square().mean()), self.residual - _median(self.residual)
        return Scores(
            n=len(self),
            mae=float(self.residual.abs().mean()),
            mse=mse,
            rmse=math.sqrt(mse),
            loglike=float(self.log_density.mean()),
            chi2=float(self.normal.square().mean()),
            coverage68=self._coverage(_ONE_SIGMA),
            coverage95=self._coverage(_HALF_95),
            crps=float(self.crps.mean()),
            robust_scatter=_STD_OF_NORMAL * float(_median(spread.abs())),
        )

    def _coverage(self, half_width: float) -> float:
        return float((self.normal.abs() <= half_width).double().mean())

    @staticmethod
    def joined(parts: "Iterable[DatumScores]") -> "DatumScores":
        """Concatenate the scores of several sets of data."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return DatumScores(*(torch.cat(column) for column in columns))


def scores(y: Tensor, mean: Tensor, variance: Tensor) -> Scores:
    """Score predictions N(mean (N,), variance (N,)) of data y (N,), in the mean over the data.

    Examples
    --------
    >>> means = scores(torch.tensor([0.5, -0.5]), torch.zeros(2), torch.ones(2))
    >>> means.rmse, means.chi2, means.coverage68
    (0.5, 0.25, 1.0)
    """
    return scores_of_normal(y, mean, variance).scores()


def scores_of_normal(y: Tensor, mean: Tensor, variance: Tensor) -> DatumScores:
    """Score data y (N,) under N(mean (N,), variance (N,)), one by one.

    crps: √v [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − μ)/√v (Gneiting and Raftery 2007, eq. 21).

    Examples
    --------
    >>> scores_of_normal(torch.tensor([1.0, -2.0]), torch.zeros(2), torch.ones(2)).pit
    tensor([0.8413, 0.0228], dtype=torch.float64)
    """
    _check(y, mean, variance)
    residual, v = y.double() - mean.double(), variance.double()
    z = residual / v.sqrt()
    log_density = -0.5 * ((2.0 * math.pi * v).log() + z.square())
    crps = mean_size(residual, v.sqrt()) - (v / math.pi).sqrt()
    return DatumScores(residual, z, log_density, crps)


@torch.no_grad()
def scores_of_mixture(
    each: DatumScores,
    mean: Tensor,
    variance: Tensor,
    width2: Tensor,
    probability: Tensor,
    nu: float | None = None,
) -> DatumScores:
    """Score data y (N,) of which each is from one of K distributions, of probability p (K,).

    With the distributions' own scores, ln p(y) = ln Σ_k p_k p_k(y), the same of both tails, and

        crps = Σ_k p_k crps_k − ½ Σ_kl p_k p_l D_kl,
        D_kl = E|Y_k − Y_l| − ½ E|Y_k − Y_k'| − ½ E|Y_l − Y_l'|.

    Parameters
    ----------
    each : of N K data, those of one y after the other's
    mean, variance, width2 : (N, K)
        Y_k = f + s t_ν with f ~ N(mean, variance), s² = width2.
    probability : (K,)
    nu : ν; None for normal noise

    Examples
    --------
    Of two distributions that are the same:

    >>> zero, one = torch.zeros(2), torch.ones(2)
    >>> two = scores_of_normal(0.5 * one, zero, one)
    >>> found = scores_of_mixture(two, zero[None], zero[None], one[None], 0.5 * one)
    >>> round(float(found.normal), 9), bool((found.crps - two.crps[0]).abs() < 1e-9)
    (0.5, True)
    """
    p, mean, variance, width2 = (v.double() for v in (probability, mean, variance, width2))
    residual, normal, log_density, crps = (
        column.view(mean.shape) for column in vars(each).values()
    )
    below, above = (
        torch.logsumexp(p.log() + torch.special.log_ndtr(z), -1) for z in (normal, -normal)
    )
    # Of the smaller tail, lest it be 1 to rounding.
    score = _normal_score(torch.minimum(below, above).clamp_max(math.log(0.5)))
    widths = _noise_differences(nu).to(mean)
    apart = [
        _mean_spread(mean[rows], variance[rows], width2[rows], p, widths)
        for rows in chunks(len(mean), _PAIRS)
    ]
    return DatumScores(
        residual @ p,
        torch.where(below < above, -score, score),
        torch.logsumexp(p.log() + log_density, -1),
        crps @ p - 0.5 * torch.cat(apart),
    )


def _mean_spread(
    mean: Tensor, variance: Tensor, width2: Tensor, p: Tensor, widths: Tensor
) -> Tensor:
    """Σ_kl p_k p_l D_kl (n,) of `scores_of_mixture`, for few data: the mean over variances
    `widths` (Q,) of ε − ε', with each of which every D is that of normal distributions."""
    off = mean[:, :, None] - mean[:, None, :]
    total = torch.zeros_like(off)
    for width in widths:
        own = 2.0 * variance + width * width2
        both = 0.5 * (own[:, :, None] + own[:, None, :])
        half = (own / (2.0 * math.pi)).sqrt()
        total = total + mean_size(off, both.sqrt()) - half[:, :, None] - half[:, None, :]
    return (total @ p) @ p / len(widths)


def _noise_differences(nu: float | None) -> Tensor:
    """Values (Q,), as likely as each other, of the variance of ε − ε' for noise ε = t_ν, which is
    normal with the variance 1/τ + 1/τ', τ ~ Gamma(ν/2, ν/2); 2 of normal noise."""
    if nu is None:
        return torch.tensor([2.0], dtype=torch.float64)
    log_tau = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64) * math.sqrt(2.0 / nu)
    weight = torch.softmax(0.5 * nu * (log_tau - log_tau.expm1()), 0)
    inverse = (-log_tau).exp()
    total, order = (inverse[:, None] + inverse).flatten().sort()
    shares = (weight[:, None] * weight).flatten()[order]
    part = (_WIDTHS * shares.cumsum(0)).long().clamp_max(_WIDTHS - 1)
    none = total.new_zeros(_WIDTHS)
    # A normal density is as high as the mean of 1/√variance says.
    mass, peak = (none.index_add(0, part, v) for v in (shares, shares / total.sqrt()))
    return (mass / peak).square()


@torch.no_grad()
def scores_of_student_t(
    y: Tensor, mean: Tensor, variance: Tensor, width2: Tensor, nu: float
) -> DatumScores:
    """Score data y (N,) under f + s t_ν, f ~ N(mean (N,), variance (N,)), s² = width2 (N,), ν = nu.

    Examples
    --------
    >>> zero, one = torch.zeros(2), torch.ones(2)
    >>> scores_of_student_t(torch.tensor([1.0, -2.0]), zero, 1e-6 * one, one, nu=4.0).pit
    tensor([0.8130, 0.0581], dtype=torch.float64)
    """

    def of_part(y: Tensor, mixture: NormalMixture) -> DatumScores:
        residual = y - mixture.mean
        # Of the tail beyond y, lest the other one be 1 to rounding.
        normal = residual.sign() * _normal_score(mixture.log_tail(y))
        return DatumScores(residual, normal, mixture.log_density(y), mixture.crps(y))

    parts = _mixtures(y, mean, variance, width2, nu)
    return DatumScores.joined(of_part(*part) for part in parts)


@torch.no_grad()
def log_density_of_student_t(
    y: Tensor, mean: Tensor, variance: Tensor, width2: Tensor, nu: float
) -> Tensor:
    """ln p(y_n) (N,) under f + s t_ν, the log-densities of `scores_of_student_t` alone; float64.

    Examples
    --------
    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> log_density_of_student_t(zero, zero, 1e-6 * one, one, nu=4.0)  # ln 3/8
    tensor([-0.9808], dtype=torch.float64)
    """
    if len(y) == 0:
        return y.double()
    parts = _mixtures(y, mean, variance, width2, nu)
    return torch.cat([mixture.log_density(part) for part, mixture in parts])


def _mixtures(
    y: Tensor, mean: Tensor, variance: Tensor, width2: Tensor, nu: float
) -> Iterator[tuple[Tensor, NormalMixture]]:
    """Some of the data (n,) in float64 with f + s t_ν for them, one part after the other."""
    _check(y, mean, variance + width2)
    columns = (y.double(), mean, variance, width2)
    parts = zip(*(torch.split(column, _MIXTURES_AT_ONCE) for column in columns), strict=True)
    dof = torch.tensor(nu, dtype=torch.float64, device=y.device)
    for data, centre, spread, width in parts:
        yield data, NormalMixture.student_t(data, centre, spread, width, dof)


def _median(values: Tensor) -> Tensor:
    """The mean of the two in the middle of an even number; torch takes the lower, and
    torch.quantile no more than 2²⁴."""
    ordered, n = values.sort().values, len(values)
    return 0.5 * (ordered[(n - 1) // 2] + ordered[n // 2])


def _normal_score(log_tail: Tensor) -> Tensor:
    """z ≥ 0 (N,) with ln Φ(−z) = log_tail ≤ ln ½, by Newton's method.

    ln Φ is concave, so that the steps from z = √(−2 ln p), where Φ(−z) < p, all stay on one side.
    """
    z = (-2.0 * log_tail).sqrt()
    for _ in range(_NEWTON_STEPS):
        log_p = torch.special.log_ndtr(-z)
        slope = (-0.5 * z.square() - 0.5 * math.log(2.0 * math.pi) - log_p).exp()
        z = z + (log_p - log_tail) / slope
    return z.clamp_min(0.0)


def _check(y: Tensor, mean: Tensor, variance: Tensor) -> None:
    if not (y.ndim == 1 and len(y) > 0 and y.shape == mean.shape == variance.shape):
        raise UserError(
            f"y, mean and variance must all have the same shape (N,), N > 0, got "
            f"{tuple(y.shape)}, {tuple(mean.shape)}, {tuple(variance.shape)}"
        )
    for name, value in (("y", y), ("mean", mean), ("variance", variance)):
        if not bool(torch.isfinite(value).all()):
            raise UserError(f"{name} must be finite to be scored: drop NaN and infinity first")
    if not bool((variance > 0).all()):
        raise UserError("variance must be positive: add the noise variance to the latent one")
