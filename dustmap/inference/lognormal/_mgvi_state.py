"""The complete state of a fit of a log-normal field, and its torus while the length changes."""

import enum
import logging
import math
from dataclasses import asdict, dataclass, field
from typing import final

import torch
from torch import Tensor

from dustmap.gp import MOST_INFLATION, GridPrior, Parameters, torus_for
from dustmap.inference._checkpoint import (
    Plain,
    State,
    StateReader,
    kept_preconditioner,
    restored_preconditioner,
    state,
)
from dustmap.inference._newton import TrustRegion
from dustmap.inference.evidence._student_t_noise import StudentTNoise
from dustmap.inference.evidence._student_t_weights import StudentTWeights
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_energy import EnergyTarget, Iterate, LogNormalProblem
from dustmap.inference.lognormal._mgvi_hyper import LARGEST_STEP, learned_from
from dustmap.inference.lognormal._mgvi_report import MGVIRound, MGVISettings
from dustmap.linalg import NystromPreconditioner

_log = logging.getLogger(__name__)

#: Prior correlation of opposite faces beyond which the torus is enlarged.
_LARGEST_WRAP = 0.15
#: A torus with this many times the points that the present length scale asks for is replaced.
_WASTE = 1.5
#: What the states of a fit are called.
MGVI = "fit_mgvi"
#: CG steps below which a preconditioner need not be renewed.
QUICK = 30


def on_its_torus(problem: LogNormalProblem, padding: float) -> LogNormalProblem:
    """On another torus where ℓ has outgrown the padding, or shrunk to where it is wasted.

    padding: of a new torus, in length scales.
    """
    prior = problem.model.prior
    if prior.wrapping is None:
        return problem
    wanted = math.prod(torus_for(prior.kernel, prior.grid, padding))
    report = prior.report
    outgrown = report.wrap_error > _LARGEST_WRAP or report.wrap_inflation > MOST_INFLATION
    if not (outgrown or prior.n_white > _WASTE * wanted):
        return problem
    other = GridPrior.padded(
        prior.kernel,
        prior.grid,
        padding=padding,
        nugget=prior.nugget,
        dtype=prior.dtype,
        memory=prior.memory,
        world=prior.world,
    )
    now, before = (" × ".join(map(str, each.torus_shape)) for each in (other, prior))
    _log.info("the length has changed: the padded box has %s nodes, had %s", now, before)
    return problem.on(other)


def _on_torus(problem: LogNormalProblem, shape: tuple[int, ...]) -> LogNormalProblem:
    """On a torus of so many points per axis."""
    prior = problem.model.prior
    if shape == prior.torus_shape:
        return problem
    if prior.wrapping is None or len(shape) != prior.grid.dim:
        raise ValueError(
            f"the torus {prior.torus_shape} of this prior cannot become {shape}: it belongs to "
            "another computation"
        )
    return problem.on(prior.on_torus(prior.kernel, shape))


@final
class Phase(enum.Enum):
    """What a fit does next."""

    WEIGHTS = "weights"
    MODE = "mode"
    LEARN = "learn"
    SAMPLE = "sample"
    DONE = "done"


@final
@dataclass(eq=False)
class FitState:
    """A fit between two turns of a phase, or between two of its curved draws.

    centre, with multipliers z (N,), at the present hyperparameters; mode: centre and z before the
    first samples, for samples that stray.
    deviations (S, n) of the samples; evidence_draws (K, N), sample_draws (S/2, N), curve_draws
    (S, N): multipliers of the last draws of each kind; drawn: ξ (n,) and z (N,) of the curved
    draws so far, is_drawing: whether there are more to come in this turn.
    evidence_count: K, draws of the next gradient; near: steps so far that were taken with all of
    them near the optimum; trust: in the next step of θ; slowest: CG steps
    since the last preconditioner.
    """

    prior: Parameters[LogNormalModel]
    centre: Iterate
    z: Tensor
    phase: Phase
    turn: int = 0
    preconditioner: NystromPreconditioner | None = None
    deviations: Tensor | None = None
    evidence_draws: Tensor | None = None
    sample_draws: Tensor | None = None
    curve_draws: Tensor | None = None
    drawn: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    is_drawing: bool = False
    mode: tuple[Iterate, Tensor] | None = None
    evidence_count: int = 0
    near: int = 0
    trust: TrustRegion = field(default_factory=lambda: TrustRegion.of(LARGEST_STEP))
    slowest: int = QUICK
    moved: bool = False
    unsolved: bool = False
    strayed: bool = False
    curved: bool = False
    weights: StudentTWeights | None = None
    history: list[MGVIRound] = field(default_factory=list)

    @staticmethod
    def first(
        problem: LogNormalProblem, settings: MGVISettings, origin: Tensor | None
    ) -> "FitState":
        """At ξ = 0."""
        xi = torch.zeros(problem.n_latent).to(problem.y)
        return FitState(
            learned_from(problem.model, origin, settings.prior_std),
            posterior_at(problem, xi),
            torch.zeros_like(problem.y),
            Phase.MODE if settings.robust is None else Phase.WEIGHTS,
            evidence_count=settings.draws,
            curved=bool(settings.curved),
        )

    def snapshot(self) -> State:
        """All of it; of a fit that is done, what its result takes."""
        if self.phase is Phase.DONE:
            return state(MGVI, self._values(), self._place(), finished=True)
        drawn = list(zip(*self.drawn, strict=True)) if self.drawn else None
        arrays = {
            **self._place(),
            "z": self.z,
            "evidence_draws": self.evidence_draws,
            "sample_draws": self.sample_draws,
            "curve_draws": self.curve_draws,
            "drawn_xi": torch.stack(drawn[0]) if drawn else None,
            "drawn_z": torch.stack(drawn[1]) if drawn else None,
            "mode_xi": self.mode[0].xi if self.mode else None,
            "mode_z": self.mode[1] if self.mode else None,
            "last_step": self.trust.step,
            "last_gradient": self.trust.gradient,
        }
        parts = {"preconditioner": kept_preconditioner(self.preconditioner)}
        return state(MGVI, self._values(), arrays, parts)

    def _values(self) -> dict[str, Plain]:
        prior = self.centre.problem.model.prior
        noise = None if self.weights is None else asdict(self.weights.noise)
        return {
            "data": len(self.z),
            "nodes": prior.grid.size,
            "torus": list(prior.torus_shape),
            "phase": self.phase.value,
            "turn": self.turn,
            "is_drawing": self.is_drawing,
            "evidence_count": self.evidence_count,
            "near": self.near,
            "radius": self.trust.radius,
            "promised": self.trust.promised,
            "slowest": self.slowest,
            "moved": self.moved,
            "unsolved": self.unsolved,
            "strayed": self.strayed,
            "curved": self.curved,
            "noise": noise,
            "change": None if self.weights is None else self.weights.change,
            "history": [entry.plain for entry in self.history],
        }

    def _place(self) -> dict[str, Tensor | None]:
        """Hyperparameters, centre and samples."""
        centre, problem = self.centre, self.centre.problem
        return {
            "origin": self.prior.centre,
            "theta": problem.theta,
            "weights": None if self.weights is None else self.weights.tau,
            "response": problem.data.response,
            "xi": centre.xi,
            "centre_deviations": None if len(centre.deviations) == 1 else centre.deviations,
            "deviations": self.deviations,
        }

    @staticmethod
    def restored(
        problem: LogNormalProblem, settings: MGVISettings, reader: StateReader
    ) -> "FitState":
        """What was kept of a fit of this problem."""
        y, n = problem.y, len(problem.y)
        reader.refuse_other("data", n)
        reader.refuse_other("nodes", problem.model.prior.grid.size)
        present = problem.theta
        origin = reader.array("origin", present, len(present))
        prior = learned_from(problem.model, origin, settings.prior_std)
        problem = problem.at(reader.array("theta", present, len(present)))
        problem = _on_torus(problem, tuple(int(m) for m in reader.numbers("torus")))
        weights = _restored_weights(reader, settings, n, y)
        if weights is not None:
            problem = problem.weighted(weights.precision_weights)
        if reader.has("response"):
            problem = problem.with_response(reader.real("response", y, n))
        width = problem.n_latent
        xi = reader.array("xi", y, width)
        centre = posterior_at(
            problem.with_present_noise(), xi, reader.maybe("centre_deviations", y, None, width)
        )
        found = FitState(
            prior,
            centre,
            torch.zeros_like(y) if reader.finished else reader.array("z", y, n),
            Phase(reader.text("phase")),
            reader.integer("turn"),
            restored_preconditioner(reader, "preconditioner", n, y, problem.model.prior.world),
            deviations=reader.maybe("deviations", y, settings.samples, width),
            evidence_draws=reader.maybe("evidence_draws", y, None, n),
            sample_draws=reader.maybe("sample_draws", y, settings.samples // 2, n),
            curve_draws=reader.maybe("curve_draws", y, settings.samples, n),
            is_drawing=reader.flag("is_drawing"),
            evidence_count=reader.integer("evidence_count"),
            near=reader.integer("near"),
            trust=TrustRegion(
                LARGEST_STEP,
                reader.number("radius"),
                reader.maybe("last_step", present, len(present)),
                reader.maybe("last_gradient", present, len(present)),
                reader.number("promised"),
            ),
            slowest=reader.integer("slowest"),
            moved=reader.flag("moved"),
            unsolved=reader.flag("unsolved"),
            strayed=reader.flag("strayed"),
            curved=reader.flag("curved"),
            weights=weights,
            history=list(reader.each("history", MGVIRound.read)),
        )
        if reader.has("drawn_xi"):
            drawn_xi = reader.array("drawn_xi", y, None, width)
            drawn_z = reader.array("drawn_z", y, len(drawn_xi), n)
            found.drawn = list(zip(drawn_xi, drawn_z, strict=True))
        if reader.has("mode_xi"):
            mode = posterior_at(centre.problem, reader.array("mode_xi", y, width))
            found.mode = mode.with_own_response(), reader.array("mode_z", y, n)
        return found


def posterior_at(
    problem: LogNormalProblem, xi: Tensor, deviations: Tensor | None = None
) -> Iterate:
    """ξ with its deviations, held by data and prior as they are."""
    return Iterate.at(problem, EnergyTarget.posterior(problem.y, xi), xi, deviations)


def _restored_weights(
    reader: StateReader, settings: MGVISettings, n: int, y: Tensor
) -> StudentTWeights | None:
    if not reader.has("weights"):
        return None
    if settings.robust is None:
        raise reader.refusal("weights of Student-t noise, where this problem has none")
    told = StateReader("Student-t noise", reader.inside("noise"))
    noise = StudentTNoise(told.number("nu"), told.number("scale"))
    weights = reader.real("weights", y, n)
    return StudentTWeights(settings.robust, noise, weights, reader.number("change"))
