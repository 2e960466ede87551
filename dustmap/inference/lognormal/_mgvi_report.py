"""How a log-normal fit is set, the weights of its data, and what its rounds report."""

import math
from dataclasses import asdict, dataclass, replace
from typing import final

from torch import Tensor

from dustmap.inference._journal import Plain, Reading
from dustmap.inference.evidence._student_t_noise import (
    OUTLIER_WEIGHT,
    RobustSettings,
    StudentTNoise,
    fitted_noise,
)

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
        return int((self.weights < OUTLIER_WEIGHT).sum())

    def message(self) -> str:
        """One clause for the report."""
        return (
            f"Student-t noise of ν = {self.noise.nu:.3g} and scale {self.noise.scale:.3g}, "
            f"{self.outliers} of {len(self.weights)} data have a weight below {OUTLIER_WEIGHT:g}"
        )


def _weights(noise: StudentTNoise, ratio: Tensor) -> Tensor:
    """τ_n = (ν + 1) / (ν + u_n / s²) (N,)."""
    weights: Tensor = (noise.nu + 1.0) / (noise.nu + ratio / noise.scale**2)
    return weights


@final
@dataclass(frozen=True)
class MGVISettings:
    """samples S, in S/2 antithetic pairs; curved: whether they follow the curvature of ρ (None:
    where straight ones spread the data too far); rounds: of hyperparameters at most; refinements:
    of mean and samples at most; draws: per gradient of the evidence, most_draws: of those near its
    optimum, so that their Monte Carlo error is a sixth of a posterior standard deviation; rank: of
    the preconditioner (None: an eighth of the data, at most 128, 0: none); tolerance: distance of
    the optimum, in posterior standard deviations of the hyperparameters, at which they rest;
    prior_std: of the log-normal priors around their start; residual: of CG per datum, in units of
    the noise; padding: of a torus that replaces the prior's own, in length scales; robust:
    Student-t noise (None: normal), its ν and scale, and the rounds of weights at most before
    anything else is learned."""

    samples: int = 32
    curved: bool | None = None
    rounds: int = 12
    refinements: int = 2
    draws: int = 8
    most_draws: int = 32
    rank: int | None = None
    tolerance: float = 0.1
    prior_std: float = 1.5
    residual: float = 0.05
    cg_steps: int = 300
    padding: float = 3.0
    seed: int = 0
    robust: RobustSettings | None = None

    def __post_init__(self) -> None:
        if self.samples < 4 or self.samples % 2:
            raise ValueError(f"samples must be even and at least 4, got {self.samples}")
        if self.draws < 2:
            raise ValueError(f"draws must be at least 2, got {self.draws}")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance}")


@final
@dataclass(frozen=True)
class MGVIRound:
    """One line of the report.

    stage: "weights", "mode", "evidence", "rejected" (an evidence step that is not taken), "mean";
    energy E in nats; misfit: rms residual of the mean
    response in units of the noise; moved: rms change of the mean response, same units;
    parameters θ (log); gradient of ln p(y | θ) with its Monte Carlo error (evidence only);
    cg_steps.
    """

    stage: str
    energy: float
    misfit: float
    moved: float
    parameters: tuple[float, ...]
    gradient: tuple[float, ...] = ()
    gradient_error: tuple[float, ...] = ()
    cg_steps: int = 0

    @property
    def plain(self) -> Plain:
        """For a journal."""
        return asdict(self)

    @staticmethod
    def read(reading: Reading) -> "MGVIRound":
        """What `plain` gave."""
        return MGVIRound(
            reading.text("stage"),
            reading.number("energy"),
            reading.number("misfit"),
            reading.number("moved"),
            reading.numbers("parameters"),
            reading.numbers("gradient"),
            reading.numbers("gradient_error"),
            reading.integer("cg_steps"),
        )
