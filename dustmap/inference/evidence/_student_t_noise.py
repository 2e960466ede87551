"""Student-t noise: its two numbers, how they are learned, and their values by plain residuals."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch

#: ν is looked for in this range; its upper end is Gaussian noise for all purposes.
LEAST_NU, MOST_NU = 1.0, 1e3
#: σ changes by at most this factor in one round.
_SCALES = 4.0


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
            raise ValueError(
                f"nu must be positive and finite and scale positive, got nu={self.nu}, "
                f"scale={self.scale}"
            )


@final
@dataclass(frozen=True)
class RobustSettings:
    """How to alternate solves, sites and noise.

    max_rounds: solves at most, at one kernel. tolerance: of the sites' root mean square change, in
    units of the noise, below which they rest. samples: deviations per solve. nu: degrees of freedom
    to start from; learn_nu, learn_scale: whether ν, and the factor of all σ, are learned.
    max_turns: turns of noise and kernel at most, where the kernel is learned too.
    """

    max_rounds: int = 25
    tolerance: float = 0.02
    samples: int = 16
    nu: float = 4.0
    learn_nu: bool = True
    learn_scale: bool = True
    max_turns: int = 10

    def __post_init__(self) -> None:
        if min(self.max_rounds, self.max_turns) < 1 or self.samples < 2 or self.tolerance <= 0:
            raise ValueError(
                "max_rounds and max_turns must be at least 1, samples at least 2 and tolerance "
                f"positive, got max_rounds={self.max_rounds}, max_turns={self.max_turns}, "
                f"samples={self.samples}, tolerance={self.tolerance}"
            )
        if not LEAST_NU <= self.nu <= MOST_NU:
            raise ValueError(f"nu must be between {LEAST_NU:g} and {MOST_NU:g}, got {self.nu}")


def measured_share(data: Batch) -> Tensor | None:
    """Which part of its noise variance every datum has from its measurement (N,); None for all."""
    if data.added_variance is None or data.noise_variance is None:
        return None
    return 1.0 - (data.added_variance / data.noise_variance).double()


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
