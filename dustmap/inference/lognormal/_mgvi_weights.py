"""Student-t noise of a log-normal field: weights of the data by expectation–maximisation.

Given weights τ_n a Student-t is the normal e_n ~ N(0, s² σ_n²/τ_n), and every step of the fit is
the Gaussian one. See `dustmap.inference.evidence._student_t_noise`.
"""

import math
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from dustmap.inference.evidence._student_t_noise import (
    RobustSettings,
    StudentTNoise,
    fitted_noise,
)

#: Data of smaller weight count as outliers in reports.
_OUTLIER = 0.1
#: Change of the weights below which they rest: solves of a fifth of the noise leave half of it.
_SETTLED = 0.1
#: Turns of scale and spread at most.
_TURNS = 8


@final
@dataclass(frozen=True, eq=False)
class Weighing:
    """ν and scale s of the noise, and the weights τ (N,) that follow from the last residuals.

    change: root mean square of the last change of τ/s², in units of 1/s²: that of ordinary data is
    of order one.
    """

    settings: RobustSettings
    noise: StudentTNoise
    weights: Tensor
    change: float

    @staticmethod
    def first(settings: RobustSettings, ratio: Tensor) -> "Weighing":
        """For residuals of a field that has not seen the data, u (N,) = e_n²/σ_n².

        Most of them are dust. The scale is that of half the residuals, so that outliers are what
        stands out of these, and it shrinks as the field takes up the dust.
        """
        wide = max(1.0, float(ratio.median().sqrt())) if settings.learn_scale else 1.0
        noise = StudentTNoise(settings.nu, wide)
        return Weighing(settings, noise, _weights(noise, ratio), float("inf"))

    def updated(
        self, left: Tensor, spread: Tensor, learn_nu: bool = True, share: Tensor | None = None
    ) -> "Weighing":
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
        found = Weighing(self.settings, noise, _weights(noise, ratio), 0.0)
        moved = found.precision_weights - self.precision_weights
        return replace(found, change=float(moved.square().mean().sqrt()) * noise.scale**2)

    @property
    def precision_weights(self) -> Tensor:
        """τ_n / s² (N,), by which σ_n² is divided."""
        return self.weights / self.noise.scale**2

    @property
    def settled(self) -> bool:
        """Whether the weights rest."""
        return self.change <= _SETTLED

    @property
    def outliers(self) -> int:
        """Data of weight below 0.1."""
        return int((self.weights < _OUTLIER).sum())

    def message(self) -> str:
        """One clause for the report."""
        return (
            f"Student-t noise of ν = {self.noise.nu:.3g} and scale {self.noise.scale:.3g}, "
            f"{self.outliers} of {len(self.weights)} data have a weight below {_OUTLIER:g}"
        )


def _weights(noise: StudentTNoise, ratio: Tensor) -> Tensor:
    """τ_n = (ν + 1) / (ν + u_n / s²) (N,)."""
    weights: Tensor = (noise.nu + 1.0) / (noise.nu + ratio / noise.scale**2)
    return weights
