"""How a log-normal fit is set, and what its rounds report."""

from dataclasses import dataclass
from typing import final

from dustmap.errors import UserError
from dustmap.inference.evidence._student_t_noise import RobustSettings


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
            raise UserError(f"samples must be even and at least 4, got {self.samples}")
        if self.draws < 2:
            raise UserError(f"draws must be at least 2, got {self.draws}")
        if not self.tolerance > 0:
            raise UserError(f"tolerance must be positive, got {self.tolerance}")


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
