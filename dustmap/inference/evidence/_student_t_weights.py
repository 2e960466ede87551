"""Weights of Student-t data from residuals and spread of a field: expectation–maximisation.

Of a Student-t datum with width s σ_n the weight is τ_n = (ν + 1)/(ν + e_n²/(s² σ_n²)), about one
for ordinary data and next to nothing for outliers.
"""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference.evidence._student_t_noise import (
    LEAST_NU,
    MOST_NU,
    OUTLIER_WEIGHT,
    RobustSettings,
    StudentTNoise,
)

#: σ changes by at most this factor in one round.
_SCALES = 4.0
#: Change of the weights below which they rest: solves of a fifth of the noise leave half of it.
_SETTLED = 0.1
#: Turns of scale and spread at most.
_TURNS = 8


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
    def first(settings: RobustSettings, ratio: Tensor) -> "StudentTWeights":
        """For residuals of a field that has not seen the data, u (N,) = e_n²/σ_n².

        Most of them are dust. The scale is that of half the residuals, so that outliers are what
        stands out of these, and it shrinks as the field takes up the dust.
        """
        wide = max(1.0, float(ratio.median().sqrt())) if settings.learn_scale else 1.0
        noise = StudentTNoise(settings.nu, wide)
        return StudentTWeights(settings, noise, _weights(noise, ratio), float("inf"))

    def updated(
        self, left: Tensor, spread: Tensor, learn_nu: bool = True, share: Tensor | None = None
    ) -> "StudentTWeights":
        """At E e_n²/σ_n² = left + spread (N,), of the mean residual and of the field around it;
        share (N,): which part of σ_n² is of the measurement.

        The spread goes with s², the more the more of the data's freedom the field takes up. With
        that in mind one turn gets where plain expectation–maximisation creeps to.
        """
        settings = replace(self.settings, learn_nu=learn_nu and self.settings.learn_nu)
        noise = self.noise
        for _ in range(_TURNS):
            before = noise.scale
            ratio = left + spread * (before / self.noise.scale) ** 2
            noise = fitted_noise(ratio, self.noise, settings, share)
            if abs(math.log(noise.scale / before)) < 1e-2:
                break
        found = StudentTWeights(self.settings, noise, _weights(noise, ratio), 0.0)
        moved = found.precision_weights - self.precision_weights
        return replace(found, change=float(moved.square().mean().sqrt()) * noise.scale**2)

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
        """One clause for the report."""
        return (
            f"Student-t noise of ν = {self.noise.nu:.3g} and scale {self.noise.scale:.3g}, "
            f"{self.outliers} of {len(self.tau)} data have a weight below {OUTLIER_WEIGHT:g}"
        )


def _weights(noise: StudentTNoise, ratio: Tensor) -> Tensor:
    """τ_n = (ν + 1) / (ν + u_n / s²) (N,)."""
    weights: Tensor = (noise.nu + 1.0) / (noise.nu + ratio / noise.scale**2)
    return weights


def fitted_noise(
    ratio: Tensor,
    present: StudentTNoise,
    settings: RobustSettings,
    share: Tensor | None = None,
) -> StudentTNoise:
    """ν and scale s of largest Σ_n p_n [ln t_ν(√u_n / s) − ln s] for u (N,) = E e_n²/σ_n².

    σ_n as given; p = share (N,), 1 where left out: data whose noise is no error of measurement have
    no say in its law. By turns: ν on a refined grid of ln ν, s by the fixed point s² = mean w u,
    w = (ν+1)/(ν+u/s²).
    """
    share = torch.ones_like(ratio) if share is None else share.to(ratio)
    share = share / share.mean()
    nu, scale = present.nu, present.scale
    for _ in range(20):
        before = (nu, scale)
        if settings.learn_scale:
            free = _fitted_scale(ratio, nu, scale, share)
            scale = min(max(free, present.scale / _SCALES), present.scale * _SCALES)
        if settings.learn_nu:
            nu = _fitted_nu(ratio / scale**2, share)
        if abs(math.log(nu / before[0])) + abs(math.log(scale / before[1])) < 1e-3:
            break
    return StudentTNoise(nu, scale)


def _fitted_scale(ratio: Tensor, nu: float, scale: float, share: Tensor) -> float:
    square = scale**2
    for _ in range(100):
        weights = (nu + 1.0) / (nu + ratio / square)
        new = float((share * weights * ratio).mean())
        done = abs(math.log(new / square)) < 1e-6
        square = new
        if done:
            break
    return math.sqrt(square)


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
