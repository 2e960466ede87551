"""Settings, rounds and the complete state of a fit of a log-normal field."""

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias, final

import torch
from torch import Tensor

from dustmap.gp import Parameters
from dustmap.inference import _state
from dustmap.inference.evidence._steps import TrustRegion
from dustmap.inference.evidence._student_t_noise import (
    StudentTNoise,
    StudentTWeights,
)
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import (
    GramPreconditionerState,
    LogNormalProblem,
    NodePreconditionerState,
    Preconditioner,
)
from dustmap.inference.lognormal._mgvi_hyper import LARGEST_STEP, learned_from, on_torus
from dustmap.inference.lognormal._mgvi_settings import MGVIRound, MGVISettings

#: The name of the states of a fit.
MGVI = "fit_mgvi"
#: ξ (n,), and multipliers (Q,) of solves.
_Latent: TypeAlias = Annotated[Tensor, _state.Layout("data", "n")]
_Multipliers: TypeAlias = Annotated[Tensor, _state.Layout("data", "Q")]
#: CG steps below which a preconditioner need not be renewed.
QUICK = 30
#: Posterior standard deviations from the optimum at which θ of a first fit, and of one that starts
#: from an earlier one, is taken to be.
_FAR, _NEARER = 100.0, 5.0
#: Share of new data up to which the samples of an earlier fit are near.
_NEW = 0.25
#: Variance of samples over that of Student-t noise itself, at most, and the least curvature.
_WIDEST, _LEAST_CURVATURE = 2.0, 1e-3
#: Standard deviations that differ by no more of themselves are one.
_SAME = 1e-5


@final
@dataclass(frozen=True, eq=False)
class MGVIStart:
    """The end of a fit, from which one of the same data and others after them may start.

    Attributes
    ----------
    torus : points per axis
    mode : (n,), its ξ
    means : (K, n), ξ̄_k of the samples (see `FitState`)
    deviations : (S, n), of the samples from their means, all δ_s before all −δ_s
    curved : whether these follow the curvature of ρ
    pull : (N,), W^½ z of the mode's multipliers z, whose limit is Σ⁻¹ times its residuals
    share : of the numbers that its data determined (see `FitState`)
    std : of ln ρ before the data, whose R was that many times as large; 0 of earlier versions,
        which did not keep it
    """

    torus: tuple[int, ...]
    mode: Tensor
    means: Tensor
    deviations: Tensor
    curved: bool
    pull: Tensor
    share: float = 1.0
    std: float = 0.0

    def under(self, problem: LogNormalProblem) -> "MGVIStart":
        """Return the same densities under a prior that may be wider or narrower: ξ of the fields
        R ξ are as many times smaller or larger as R is larger or smaller."""
        now, white = prior_std(problem), problem.model.prior.white_on(self.torus)
        if self.std == 0.0 or math.isclose(now, self.std, rel_tol=_SAME):
            return self
        vectors = {name: getattr(self, name).clone() for name in ("mode", "means", "deviations")}
        for each in vectors.values():
            each[..., :white] *= self.std / now
        return replace(self, std=now, **vectors)

    def in_order(self, order: Tensor) -> "MGVIStart":
        """Return the same for these data in another order (N,)."""
        return replace(self, pull=self.pull[order])

    def fits(self, problem: LogNormalProblem) -> bool:
        """Whether the problem has such variables."""
        prior = problem.model.prior
        others = problem.n_latent - prior.n_white
        expected = prior.white_on(self.torus) + others
        may_change = prior.grows and len(self.torus) == prior.box.dim
        return len(self.mode) == expected and (may_change or self.torus == prior.torus_shape)

    def has_samples(self, settings: MGVISettings) -> bool:
        """Whether it has as many samples as are asked for."""
        return len(self.deviations) == settings.samples


@final
class Phase(enum.Enum):
    """The phase that comes next."""

    WEIGHTS = "weights"
    MODE = "mode"
    LEARN = "learn"
    SAMPLE = "sample"
    DONE = "done"


@final
@dataclass(frozen=True, eq=False)
class _Place:
    """Source of problem, weights, centre and mode: θ with the centre of its prior, the
    noise of the data, ξ (n,) of the centre with its deviations, and of the mode with its z.
    """

    data: int
    ordered_sum: float
    nodes: int
    torus: tuple[int, ...]
    origin: _state.ParameterVector
    theta: _state.ParameterVector
    noise: StudentTNoise | None
    change: float
    tau: Annotated[Tensor, _state.Layout("data", "N", any_dtype=True)] | None
    response: Annotated[Tensor, _state.Layout("data", "N", any_dtype=True)] | None
    xi: _Latent
    centre_deviations: Annotated[Tensor, _state.Layout("data", "C n")] | None
    mode_xi: _Latent | None
    mode_z: _Multipliers | None
    made: GramPreconditionerState | None
    made_at_nodes: NodePreconditionerState | None = None


@final
@dataclass(frozen=True, eq=False)
class FitState:
    """State of a fit between two turns of a phase, or between two of its curved draws.

    centre, with multipliers z (Q,), at the present hyperparameters; mode: centre and z before the
    first samples, for samples that stray.
    means (K, n) of the samples (see `mean_of_samples`), whose middle the centre is; None where the
    centre is the only one. deviations (S, n) of the samples from their means; evidence_draws
    (D, Q), sample_draws (S/2, Q), curve_draws (S, Q): multipliers of the last draws of each kind;
    drawn: ξ (n,) and z (Q,) of the curved draws so far, is_drawing: whether there are more to come
    in this turn.
    evidence_count: D, draws of the next gradient; near: steps so far that were taken with all of
    them near the optimum; widths: distance of θ from there, in posterior standard deviations,
    where the last step began, 0 where the next gradient has to be accurate; trust: in the next step
    of θ; slowest: CG steps since the last preconditioner; share: γ/N of the numbers γ that the data
    determine (see `determined_share`), at most 1, and 1 where it is not known yet.
    """

    prior: Annotated[Parameters[LogNormalModel], _state.REBUILT]
    centre: Annotated[Iterate, _state.REBUILT]
    z: _Multipliers
    phase: Phase
    turn: int = 0
    preconditioner: Annotated[Preconditioner | None, _state.REBUILT] = None
    means: Annotated[Tensor, _state.Layout("data", "K n")] | None = None
    deviations: Annotated[Tensor, _state.Layout("data", "S n")] | None = None
    evidence_draws: Annotated[Tensor, _state.Layout("data", "D Q")] | None = None
    sample_draws: Annotated[Tensor, _state.Layout("data", "pairs Q")] | None = None
    curve_draws: Annotated[Tensor, _state.Layout("data", "S Q")] | None = None
    drawn: tuple[tuple[_Latent, _Multipliers], ...] = ()
    is_drawing: bool = False
    mode: Annotated[tuple[Iterate, Tensor] | None, _state.REBUILT] = None
    evidence_count: int = 0
    near: int = 0
    widths: float = 0.0
    trust: TrustRegion = field(default_factory=lambda: TrustRegion.of(LARGEST_STEP))
    slowest: int = QUICK
    share: float = 1.0
    moved: bool = False
    unsolved: bool = False
    strayed: bool = False
    curved: bool = False
    weights: Annotated[StudentTWeights | None, _state.REBUILT] = None
    history: tuple[MGVIRound, ...] = ()

    @staticmethod
    def first(
        problem: LogNormalProblem,
        settings: MGVISettings,
        origin: Tensor | None,
        start: MGVIStart | None = None,
    ) -> "FitState":
        """At ξ = 0, or at the mode of an earlier fit with its weights and multipliers."""
        prior = learned_from(problem.model, origin, settings.prior_std, settings.padding)
        phase = Phase.MODE if settings.robust is None else Phase.WEIGHTS
        if start is None:
            xi = torch.zeros(problem.n_latent).to(problem.y)
            centre, weights = posterior_at(problem, xi), None
            z = problem.y.new_zeros(problem.n_multipliers)
        else:
            problem = on_torus(problem, start.torus).with_present_noise()
            centre, weights = _started(problem, settings, start)
            missing = len(centre.problem.y) - len(start.pull)
            pull = torch.nn.functional.pad(start.pull, (0, missing))
            z = centre.problem.multipliers_of(pull)
        return FitState(
            prior,
            centre,
            z,
            phase,
            evidence_count=settings.draws,
            widths=_FAR if start is None else _NEARER,
            share=1.0 if start is None else start.share,
            curved=bool(settings.curved),
            weights=weights,
        )

    @property
    def problem(self) -> LogNormalProblem:
        """At the present hyperparameters."""
        return self.centre.problem

    @property
    def count(self) -> int:
        """K."""
        return 1 if self.means is None else len(self.means)

    @property
    def all_means(self) -> Tensor:
        """ξ̄_k (K, n)."""
        return self.centre.xi[None] if self.means is None else self.means

    def samples(self) -> Tensor:
        """ξ (S, n) of all samples, in new memory."""
        assert self.deviations is not None
        return samples_at(self.all_means, self.deviations)

    def is_near(self, start: MGVIStart | None, settings: MGVISettings) -> bool:
        """Whether samples of an earlier fit are near: few data are new, and nothing is learned."""
        if start is None or not start.has_samples(settings) or len(self.prior) > 0:
            return False
        return len(start.pull) >= (1.0 - _NEW) * len(self.problem.y)

    def ratios(self, spread: Tensor | None) -> tuple[Tensor, Tensor]:
        """Squared residual of the mode, and spread (N,), each over the likelihood's σ_n²."""
        problem = self.problem
        noise = problem.model.likelihood.noise_variance(problem.data).detach().double()
        left = self.centre.residuals[0].double().square() / noise
        return left, torch.zeros_like(left) if spread is None else spread.double() / noise

    @property
    def noise_width(self) -> float:
        """By which noise of samples is wider than the weights of data; 1 of normal noise."""
        return 1.0 if self.weights is None else noise_width(self.weights)

    def loosened(self) -> "FitState":
        """At the mode, with data and noise that hold it and let it move as Student-t noise does."""
        if self.weights is None:
            return self
        mode, width = posterior_at(self.problem, self.centre.xi), self.noise_width
        problem = self.problem.loosened(width, mode.residuals[0])
        z = self.z * width if problem.nodes is None else self.z
        return replace(self, z=z, centre=posterior_at(problem, self.centre.xi))

    @property
    def misfit(self) -> float:
        """Root mean square of the mean response's residual in units of the noise of the data."""
        return self.centre.misfit() / (1.0 if self.mode is None else self.noise_width)

    def weighed(self, weights: StudentTWeights) -> "FitState":
        """Other weights, the mode where it is, and its multipliers where the residuals are."""
        before = self.centre
        problem = before.problem.weighted(weights.precision_weights)
        return replace(
            self,
            weights=weights,
            z=before.problem.multipliers_under(problem, self.z),
            centre=Iterate.at(problem, before.xi),
        )

    def end(self) -> MGVIStart:
        """Where a later fit of more data may start, of a fit that is done."""
        assert self.deviations is not None
        assert self.mode is not None
        mode, z = self.mode
        at_nodes = mode.problem.nodes is not None
        return MGVIStart(
            self.problem.model.prior.torus_shape,
            mode.xi,
            self.all_means,
            self.deviations,
            self.curved,
            mode.residuals[0] / mode.problem.noise if at_nodes else mode.problem.noise.rsqrt() * z,
            self.share,
            prior_std(mode.problem),
        )

    def at(self, phase: Phase, turn: int = 0) -> "FitState":
        """Before this turn of a phase."""
        return replace(self, phase=phase, turn=turn)

    def snapshot(self) -> _state.State:
        """All of it; of a fit that is done, what its result takes."""
        if self.phase is not Phase.DONE:
            return _state.state_of(MGVI, self, self._place())
        result = replace(
            self,
            preconditioner=None,
            evidence_draws=None,
            sample_draws=None,
            curve_draws=None,
            trust=TrustRegion.of(LARGEST_STEP),
        )
        return _state.state_of(MGVI, result, result._place(), finished=True)

    def _place(self) -> _Place:
        centre, problem, weights = self.centre, self.centre.problem, self.weights
        return _Place(
            len(problem.y),
            problem.ordered_sum,
            problem.model.prior.lattice.size,
            problem.model.prior.torus_shape,
            self.prior.centre,
            problem.theta,
            None if weights is None else weights.noise,
            0.0 if weights is None else weights.change,
            None if weights is None else weights.tau,
            problem.data.response,
            centre.xi,
            None if len(centre.deviations) == 1 else centre.deviations,
            None if self.mode is None else self.mode[0].xi,
            None if self.mode is None else self.mode[1],
            GramPreconditionerState.of(self.preconditioner),
            NodePreconditionerState.of(self.preconditioner),
        )

    @staticmethod
    def restored(
        problem: LogNormalProblem, settings: MGVISettings, reader: _state.StateReader
    ) -> "FitState":
        """The state of a fit of this problem."""
        y, theta = problem.y, problem.theta
        like = {"data": y, "theta": theta, "space": y}
        place = reader.read(_Place, like, N=len(y), Q=problem.n_multipliers, P=len(theta))
        reader.refuse_other("data", place.data, len(y))
        if not problem.has_order_of(place.ordered_sum):
            raise reader.refusal("the data in another order")
        reader.refuse_other("nodes", place.nodes, problem.model.prior.lattice.size)
        prior = learned_from(problem.model, place.origin, settings.prior_std, settings.padding)
        problem = on_torus(problem.at(place.theta), place.torus)
        weights = _weights(place, settings, reader)
        if weights is not None:
            problem = problem.weighted(weights.precision_weights)
        if place.response is not None:
            problem = problem.with_response(place.response)
        reader.refuse_other("numbers of the field", len(place.xi), problem.n_latent)
        present = problem.with_present_noise()
        if weights is not None and place.mode_xi is not None:
            there = posterior_at(present, place.mode_xi)
            present = present.loosened(noise_width(weights), there.residuals[0])
        centre, mode = posterior_at(present, place.xi, place.centre_deviations), None
        if place.mode_xi is not None and place.mode_z is not None:
            there = posterior_at(centre.problem, place.mode_xi)
            mode = there.with_own_response(), place.mode_z
        sizes = {"Q": problem.n_multipliers, "n": len(place.xi), "P": len(theta)}
        samples = {"S": settings.samples, "pairs": settings.samples // 2}
        world, made, at_nodes = problem.together, place.made, place.made_at_nodes
        earlier = None if made is None else made.preconditioner(world)
        return FitState(
            prior=prior,
            centre=centre,
            preconditioner=earlier if at_nodes is None else at_nodes.preconditioner(),
            mode=mode,
            weights=weights,
            **reader.fields(FitState, like, **sizes, **samples),
        )


def noise_width(weights: StudentTWeights) -> float:
    """k = √(E J)/H, by which the noise of samples is wider than the weights of data say.

    A mode is found with the weights w = τ/s² of Student-t noise, E = ⟨w⟩. With the noise it moves
    as the mean curvature of −ln t, H = ⟨τ² (ν − v)⟩/(ν + 1)s², and J = ⟨τ² v⟩/s² have it, v = u/s²:
    its variance is J/H² of a datum (Huber 1967), not 1/E. At the law itself that is the inverse of
    Fisher's information (ν + 1)/(ν + 3)s²; of normal noise with outliers, which wide tails stand
    for, it is more. k² counts as no less, and as no more than twice.
    """
    nu, tau = weights.noise.nu, weights.tau.double()
    least, v = (nu + 3.0) / (nu + 1.0), (nu + 1.0) / tau - nu
    H = float((tau.square() * (nu - v)).mean()) / (nu + 1.0)
    square = float(tau.mean() * (tau.square() * v).mean()) / max(H, _LEAST_CURVATURE) ** 2
    return math.sqrt(min(max(square, least), _WIDEST * least))


def mean_of_samples(samples: int, means: int) -> Tensor:
    """The number (S,) of the mean, of K, that each of S samples belongs to.

    Examples
    --------
    >>> mean_of_samples(8, 2)  # of pairs 0, 1, 2, 3 and their other halves
    tensor([0, 1, 0, 1, 0, 1, 0, 1])
    """
    return (torch.arange(samples // 2) % means).repeat(2)


def prior_std(problem: LogNormalProblem) -> float:
    """Standard deviation of the field R ξ at a node."""
    return math.sqrt(float(problem.model.prior.kernel.variance()))


def samples_at(means: Tensor, deviations: Tensor, sign: float = 1.0) -> Tensor:
    """δ_s ± ξ̄_k(s) (S, n), in new memory, for deviations (S, n) and means (K, n): samples of their
    deviations, and with a sign of −1 deviations of samples."""
    xi = deviations.clone()
    for sample, k in zip(xi, mean_of_samples(len(xi), len(means)).tolist(), strict=True):
        sample.add_(means[k], alpha=sign)
    return xi


def posterior_at(
    problem: LogNormalProblem, xi: Tensor, deviations: Tensor | None = None
) -> Iterate:
    """ξ with its deviations, held by data and prior as they are."""
    return Iterate.at(problem, xi, deviations)


def _started(
    problem: LogNormalProblem, settings: MGVISettings, start: MGVIStart
) -> tuple[Iterate, StudentTWeights | None]:
    """The mode of an earlier fit, under the noise of its own response, and the weights of
    Student-t noise that mode and samples of that fit leave the data."""
    mode = posterior_at(problem, start.mode).with_own_response()
    if settings.robust is None:
        return mode, None
    middle = start.means.mean(0)
    around = samples_at(start.means, start.deviations).sub_(middle)
    samples = posterior_at(mode.problem, middle, around)
    ratio = samples.residuals.double().square().mean(0) / mode.problem.noise.double()
    weights = StudentTWeights.known(settings.robust, ratio)
    problem = mode.problem.weighted(weights.precision_weights)
    return posterior_at(problem, start.mode), weights


def _weights(
    place: _Place, settings: MGVISettings, reader: _state.StateReader
) -> StudentTWeights | None:
    """The weights of Student-t noise, None where the noise is normal."""
    if place.tau is None or place.noise is None:
        return None
    if settings.robust is None:
        raise reader.refusal("weights of Student-t noise, where this problem has none")
    return StudentTWeights(settings.robust, place.noise, place.tau, place.change)
