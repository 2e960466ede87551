"""How a log-normal fit is set, and what it reports."""

import enum
from dataclasses import asdict, dataclass
from typing import final

from torch import Tensor

from dustmap.inference._journal import Plain, Reading
from dustmap.inference.evidence._student_t_noise import RobustSettings
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_posterior import LogNormalPosterior
from dustmap.inference.lognormal._mgvi_weights import Weighing


@final
class MGVIStatus(enum.Enum):
    """How a fit ended, from best to worst."""

    CONVERGED = "converged"
    MAX_ROUNDS = "max_rounds"
    REJECTED = "rejected"
    STRAYED = "strayed"
    UNSOLVED = "unsolved"
    MISFIT = "misfit"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES[self]


_REMEDIES = {
    MGVIStatus.CONVERGED: "nothing to do",
    MGVIStatus.MAX_ROUNDS: (
        "the hyperparameters, the mean or the weights of the data were still moving: raise rounds "
        "or refinements"
    ),
    MGVIStatus.REJECTED: (
        "the next step of the hyperparameters leaves the data at any length and was not taken: use "
        "Student-t noise if some data are outliers, or start from other hyperparameters"
    ),
    MGVIStatus.STRAYED: (
        "the samples leave the data at second order of their deviations: set curved=True, or raise "
        "refinements"
    ),
    MGVIStatus.UNSOLVED: (
        "CG left larger residuals than asked for, so the samples are too wide: raise rank or "
        "cg_steps, or use float64"
    ),
    MGVIStatus.MISFIT: (
        "the mode does not reach the data: use Student-t noise if some of them are outliers, "
        "float64 if the errors are tiny, learn a noise scale or jitter, use a finer grid, or start "
        "from a larger variance or a shorter length scale"
    ),
}


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


@final
@dataclass(frozen=True, eq=False)
class MGVISolution:
    """q(ξ) = mean xi (n,) with deviations (S, n) of its samples, and how the fit went.

    Deviations and samples come in pairs +δ_0, −δ_0, +δ_1, −δ_1, ...: any even number of the first
    ones is as good as a fit with so many.

    coefficients β (P,) of the mean, posterior means where they are learned; float64. weighing: of
    the data under Student-t noise, None for normal noise.
    """

    model: LogNormalModel
    posterior: LogNormalPosterior
    coefficients: Tensor
    xi: Tensor
    deviations: Tensor
    history: tuple[MGVIRound, ...]
    status: MGVIStatus
    weighing: Weighing | None = None

    @property
    def rejected_steps(self) -> int:
        """Evidence steps that were not taken."""
        return sum(entry.stage == "rejected" for entry in self.history)

    def message(self) -> str:
        """One sentence for the report."""
        last = self.history[-1]
        noise = "" if self.weighing is None else f"{self.weighing.message()}, "
        return (
            f"log-normal fit {self.status.value} after {len(self.history)} rounds, {noise}"
            f"rms residual {last.misfit:.2f} of the noise: {self.status.remedy}"
        )
