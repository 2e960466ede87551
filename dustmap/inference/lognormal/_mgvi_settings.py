"""Settings of a fit of a log-normal field, and the lines of its report."""

from dataclasses import dataclass, replace
from typing import final

from dustmap.errors import UserError
from dustmap.gp import ParameterErrors
from dustmap.inference.evidence._student_t_noise import RobustSettings

#: Samples of each of several means, and turns of means and samples.
_FEW, TURNS = 16, 4
#: Posterior standard deviations from its optimum at which θ of a fit rests that another follows.
_NEARBY = 2.0
#: Samples of such a fit at most, of which the next one takes its noise.
_ENOUGH = 8


@final
@dataclass(frozen=True)
class MGVISettings:
    """Settings of `fit_mgvi`.

    Attributes
    ----------
    samples : S, in S/2 antithetic pairs
    curved : whether they follow the curvature of ρ; None where straight ones stray too far
    rounds, refinements : most updates of hyperparameters, and of a lone mean and its samples
    draws, most_draws : int
        Per gradient of the evidence, and near its optimum, where their Monte Carlo error is to be a
        sixth of a posterior standard deviation.
    rank : of the preconditioner; 0 for none, None for an eighth of the data, at most 128 or one
        for 400 data, doubled where solves from the side of the data are slow
    most_rank : to which it is doubled at most
    tolerance : float
        Distance of the optimum, in posterior standard deviations of the hyperparameters, at which
        they rest.
    redrawn : whether samples are drawn again at the mean that follows from them; the only ones of a
        fit that another follows are rough
    prior_std : width of the log-normal priors of hyperparameters around their start
    residual : of CG per datum, in units of the noise; straight samples take twice as much, curved
        ones four times, eight times where they are drawn again, less where data determine little
    cg_steps : most steps of a solve
    padding : of a torus that replaces the prior's own, in length scales
    seed : of the draws
    kept : bytes of random numbers of draws that are kept for the next time, at most
    among_nodes : whether solves may be made among the nodes, where memory has room for LᵀΣ⁻¹L
    robust : RobustSettings or None
        Student-t noise, its ν and scale, and the most rounds of weights before anything else is
        learned; None for normal noise.
    """

    samples: int = 32
    curved: bool | None = None
    rounds: int = 16
    refinements: int = 2
    draws: int = 8
    most_draws: int = 32
    rank: int | None = None
    most_rank: int = 512
    tolerance: float = 0.1
    redrawn: bool = True
    prior_std: float = 1.5
    residual: float = 0.025
    cg_steps: int = 300
    padding: float = 3.0
    seed: int = 0
    kept: int = 2**27
    among_nodes: bool = True
    robust: RobustSettings | None = None

    def __post_init__(self) -> None:
        if self.samples < 4 or self.samples % 2:
            raise UserError(f"samples must be even and at least 4, got {self.samples}")
        if self.draws < 2:
            raise UserError(f"draws must be at least 2, got {self.draws}")
        if not self.tolerance > 0:
            raise UserError(f"tolerance must be positive, got {self.tolerance}")

    def before_another(self) -> "MGVISettings":
        """Of a fit that another follows, whose data differ by more than this one leaves open."""
        samples = min(self.samples, _ENOUGH)
        return replace(
            self, samples=samples, tolerance=_NEARBY, most_draws=self.draws, redrawn=False
        )

    @property
    def means(self) -> int:
        """K, of curved samples: one for every few of them."""
        return max(1, self.samples // _FEW)


@final
@dataclass(frozen=True)
class MGVIRound:
    """One line of the report.

    Attributes
    ----------
    stage : "weights", "mode", "evidence", "rejected" (an evidence step that is not taken) or "mean"
    energy : in nats
    misfit : rms residual of the mean response in units of the noise
    moved : rms change of the mean response, same units
    parameters : θ (log)
    gradient : of ln p(y | θ) (evidence only)
    cg_steps : of the solves
    errors : of θ given the data, where the step started (evidence only)
    """

    stage: str
    energy: float
    misfit: float
    moved: float
    parameters: tuple[float, ...]
    gradient: tuple[float, ...] = ()
    cg_steps: int = 0
    errors: ParameterErrors | None = None
