"""The phases of a log-normal fit: weights, mode, hyperparameters, samples."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference._state import AbstractCheckpointer, load_reader
from dustmap.inference.evidence._newton import TrustRegion
from dustmap.inference.evidence._student_t_noise import StudentTWeights, measured_share
from dustmap.inference.lognormal._lognormal_energy import (
    Accuracy,
    Descent,
    Iterate,
    LogNormalProblem,
    descend,
)
from dustmap.inference.lognormal._mgvi_draws import (
    Perturbations,
    Probe,
    bends,
    curved_draw,
    draws_at_once,
    metric_draws,
    probed,
)
from dustmap.inference.lognormal._mgvi_hyper import EvidenceStep, carry, evidence_step
from dustmap.inference.lognormal._mgvi_state import (
    MGVI,
    QUICK,
    FitState,
    MGVIRound,
    MGVISettings,
    Phase,
    on_its_torus,
)
from dustmap.linalg import Progress, nystrom

_log = logging.getLogger(__name__)

#: Gauss-Newton steps between two looks at the preconditioner.
_STRIDE = 3
#: Turns of the mode at most.
_TURNS = 10
#: Of a curved sample, its decrease per datum, and decrease of the energy at which ξ̄ rests. Where
#: they are ten times looser, rounding decides where descents end: a change of the data by 1e-7
#: then moves the map by 0.07 posterior standard deviations (rms) instead of 0.02.
_CURVED = Accuracy(residual=0.1, decrease=2e-3, steps=5)
_MEAN_DECREASE = 0.05
#: Samples whose mean response misses the data this many times more than the mode have strayed.
_STRAY = 1.75
#: Rounds of weights at first that take the mode for the field: its spread is of the wide noise.
_BARE = 3
#: Change of the weights beyond which the preconditioner is renewed.
_MUCH = 0.1
#: Posterior standard deviations from the optimum within which gradients take more draws: with K
#: of them the optimum is off by 1/√K of one.
_NEAR = 1.0
#: Steps that have to be averaged before θ rests for a short one, and how short, in posterior
#: standard deviations.
_AVERAGED, _SHORT = 3, 0.3
#: Nats that an evidence step of one posterior standard deviation promises.
_ONE_WIDTH = 0.5
#: Of an evidence step, from the whole of it on.
_LENGTHS = (1.0, 0.5, 0.25, 0.125)
#: A mean response that still moves by more than this, in units of the noise, has not converged;
#: fresh deviations of few samples alone move it by half of that.
_RESTLESS = 1.0
#: What is counted while samples follow the curvature.
_CURVING = "curved draws"


Rounds = Callable[[MGVIRound], None]
#: A phase with the number of its turn.
_Place = tuple[Phase, int]


@final
class Fit:
    """A fit of one problem: `run` takes one turn of a phase after the other."""

    def __init__(
        self,
        problem: LogNormalProblem,
        settings: MGVISettings,
        rounds: Rounds | None,
        progress: Progress,
        origin: Tensor | None,
        checkpointer: AbstractCheckpointer,
    ) -> None:
        self.settings, self.rounds, self.progress = settings, rounds, progress
        self.checkpointer = checkpointer
        self.at_once = draws_at_once(max(settings.samples // 2, settings.draws))
        reader = load_reader(checkpointer, MGVI)
        if reader is None:
            self.state = FitState.first(problem, settings, origin)
        else:
            self.state = FitState.restored(problem, settings, reader)
        self._is_new = reader is None or not reader.finished

    def run(self) -> FitState:
        """The state that is done, from wherever the checkpointer was."""
        for _ in self.states():
            self.checkpointer.save_if_due(self.state.snapshot)
        if self._is_new:
            self.checkpointer.finish(self.state.snapshot())
        return self.state

    def states(self) -> Iterator[FitState]:
        """The complete state after every turn but the last."""
        turns = {
            Phase.WEIGHTS: self._find_weights,
            Phase.MODE: self._find_mode,
            Phase.LEARN: self._learn,
            Phase.SAMPLE: self._sample,
        }
        while self.state.phase is not Phase.DONE:
            self.state.phase, self.state.turn = turns[self.state.phase](self.state.turn)
            if self.state.phase is not Phase.DONE:
                yield self.state

    @property
    def problem(self) -> LogNormalProblem:
        """At the present hyperparameters."""
        return self.state.centre.problem

    def _find_weights(self, turn: int) -> _Place:
        """Mode and weights by turns, from a noise that explains all data to what is left."""
        state, robust, accuracy = self.state, self.settings.robust, self._rough()
        assert robust is not None
        if turn == 0:
            self._weigh(StudentTWeights.first(robust, self._ratios(None)[0]))
        self._precondition()
        found = self._descend(replace(accuracy, steps=_STRIDE), "weights")
        spread = None
        if turn >= _BARE:
            self._precondition()
            spread = self._probe().spread
        assert state.weights is not None
        share = measured_share(self.problem.data)
        self._weigh(state.weights.updated(*self._ratios(spread), turn > _BARE, share))
        rests = turn > _BARE and state.weights.settled and found.decrease < accuracy.decrease
        if rests or turn + 1 == robust.max_rounds:
            return Phase.MODE, 0
        return Phase.WEIGHTS, turn + 1

    def _find_mode(self, turn: int) -> _Place:
        """To where Gauss-Newton gains little, the preconditioner kept up to date."""
        accuracy = self._rough()
        self._precondition()
        before = self.state.centre
        found = self._descend(replace(accuracy, steps=_STRIDE), "mode")
        gained = before.energy - found.iterate.energy
        rests = found.decrease < accuracy.decrease and gained < 0.05 * before.energy
        return (Phase.LEARN, 0) if rests or turn + 1 == _TURNS else (Phase.MODE, turn + 1)

    def _learn(self, turn: int) -> _Place:
        """An evidence step, until θ rests."""
        if len(self.state.prior) == 0:
            self._descend(self._accuracy(), "mode")
            return Phase.SAMPLE, 0
        if turn == self.settings.rounds:
            self.state.moved = True
            return Phase.SAMPLE, 0
        self._precondition()
        found = self._descend(self._accuracy(), "mode", quiet=True)
        if not self._evidence_round(at_rest=found.decrease < self._accuracy().decrease):
            return Phase.LEARN, turn + 1
        self._descend(self._accuracy(), "mode")
        return Phase.SAMPLE, 0

    def _sample(self, turn: int) -> _Place:
        """Deviations at ξ̄, then ξ̄ at those deviations, until ξ̄ rests."""
        state = self.state
        if not state.is_drawing:
            self._refine(turn)
            self._precondition()
            if turn == 0:
                state.mode = state.centre, state.z
            self._draw()
        if state.is_drawing:
            self._curve()
        if turn < self.settings.refinements:
            return Phase.SAMPLE, turn + 1
        state.moved = state.moved or state.history[-1].moved > _RESTLESS
        return Phase.DONE, 0

    def _ratios(self, spread: Tensor | None) -> tuple[Tensor, Tensor]:
        """Squared residual of the mode, and spread (N,), each over σ_n² as given."""
        problem = self.problem
        given = problem.model.likelihood.noise_variance(problem.data).detach().double()
        left = self.state.centre.residuals[0].double().square() / given
        return left, torch.zeros_like(left) if spread is None else spread.double() / given

    def _weigh(self, weights: StudentTWeights) -> None:
        """Other weights, the mode where it is, and its multipliers where the residuals are."""
        before, self.state.weights = self.state.centre, weights
        problem = before.problem.weighted(weights.precision_weights)
        self.state.z = self.state.z * (before.problem.noise / problem.noise).sqrt()
        self.state.centre = Iterate.at(problem, before.target, before.xi)
        if weights.change > _MUCH:
            self.state.slowest = QUICK

    def _evidence_round(self, at_rest: bool) -> bool:
        """Take one step in θ and return whether it was the last.

        It is where θ was within `tolerance` posterior standard deviations of its optimum, and where
        no length of it is accepted at a mode that is at rest; elsewhere a rejected step is tried
        again from a better mode.

        The mode, weights and solves that a gradient is taken at leave it uncertain by about half a
        posterior standard deviation, whatever K is. Near the optimum step m is therefore 1/m of
        Newton's (Robbins & Monro 1951), and θ rests where that is short.
        """
        before, state, settings = self.state.centre, self.state, self.settings
        probe = self._probe()
        step = self._evidence_step(probe, state.trust)
        more = max(settings.draws, settings.most_draws)
        if step.widths < _NEAR and state.evidence_count < more:
            state.evidence_count = more
            probe = self._probe()
            step = self._evidence_step(probe, state.trust.within(step.radius))
        is_near = state.evidence_count == more and step.widths < 2.0 * _NEAR
        state.near = state.near + 1 if is_near else 0
        gain = 1.0 / max(1, state.near)
        taken = gain * self._move(gain * step.delta)
        state.trust = state.trust.within(step.radius)
        if taken > 0.0:
            followed = state.trust.after(taken * step.delta, step.gradient, step.information)
            # After a short step the gradient changes by its own uncertainty, not by the step.
            if followed.promised > _ONE_WIDTH:
                state.trust = followed
        self._record(
            "evidence" if taken > 0.0 else "rejected",
            before,
            probe.cg_steps,
            gradient=tuple(step.gradient.tolist()),
            gradient_error=tuple(step.error.tolist()),
        )
        averaged = state.near >= _AVERAGED and gain * step.widths < _SHORT
        rests = averaged or step.rests(settings.tolerance)
        if state.weights is not None:
            share = measured_share(self.problem.data)
            self._weigh(state.weights.updated(*self._ratios(probe.spread), share=share))
            assert state.weights is not None
            rests = rests and state.weights.settled
        return rests if taken > 0.0 else at_rest

    def _evidence_step(self, probe: Probe, trust: TrustRegion) -> EvidenceStep:
        state = self.state
        how = self._accuracy(), state.preconditioner, trust, self.progress
        return evidence_step(state.centre, state.z, probe.z, state.prior, *how)

    def _probe(self) -> Probe:
        """The gradient's draws at the centre, from the same random numbers every time."""
        state, settings = self.state, self.settings
        how = settings.residual, settings.cg_steps, state.preconditioner
        start, seed = state.evidence_draws, settings.seed
        probe = probed(
            state.centre,
            seed,
            (state.evidence_count, settings.draws),
            *how,
            start,
            self.at_once,
            self.progress,
        )
        state.evidence_draws = probe.z
        state.slowest = max(state.slowest, probe.cg_steps)
        return probe

    def _move(self, delta: Tensor) -> float:
        """Return t of θ + t Δθ, the centre carried along; t is halved until the data stay in reach.

        Where they never do, everything stays as it is, and t is 0.
        """
        before, theta = self.state.centre, self.problem.theta
        for length in _LENGTHS if bool(delta.isfinite().all()) else ():
            changed = on_its_torus(before.problem.at(theta + length * delta), self.settings.padding)
            how = self._accuracy(), self.state.preconditioner, self.progress
            centre, z = carry(before, changed, self.state.z, *how)
            near = centre.misfit() < 2.0 * max(before.misfit(), 1.0)
            if near and centre.is_finite:
                self.state.centre, self.state.z = centre, z
                return length
        return 0.0

    def _refine(self, turn: int) -> None:
        """ξ̄ at the deviations of the turn before."""
        if turn == 0:
            return
        state = self.state
        assert state.mode is not None
        mode, z = state.mode
        # The deviations of the turn before are not held any longer than this.
        state.centre = Iterate.at(
            self.problem, state.centre.target, state.centre.xi, state.deviations
        )
        state.slowest = QUICK  # the mean density of the samples is not that of their centre
        state.strayed = not state.centre.is_finite
        if state.strayed:
            state.centre, state.z = mode, z
        else:
            self._precondition()
            self._descend(replace(self._accuracy(), decrease=_MEAN_DECREASE), "mean")
            state.strayed = state.centre.misfit() > _STRAY * max(mode.misfit(), 0.5)
        if state.strayed and self.settings.curved is None and not state.curved:
            _log.info("samples on straight lines miss the data: they are drawn along curves")
            state.curved, state.centre, state.z = True, mode, z
            self._record("mode", mode, 0)

    def _draw(self) -> None:
        """All δ_s, then all −δ_s, at the centre, from the same random numbers every time."""
        state, settings, pairs = self.state, self.settings, self.settings.samples // 2
        if state.curve_draws is not None and state.deviations is not None:
            state.is_drawing = True
            return
        both = state.centre.xi.new_empty(2 * pairs, len(state.centre.xi))
        perturbations = Perturbations.of(self.problem, settings.seed, range(pairs), both[:pairs])
        mode = self._mode_here()
        how = settings.residual, settings.cg_steps, state.preconditioner
        straight, solve = metric_draws(
            mode, perturbations, *how, state.sample_draws, self.at_once, self.progress
        )
        state.unsolved = state.unsolved or not solve.converged
        state.sample_draws, state.slowest = solve.x, max(state.slowest, int(solve.steps.max()))
        state.deviations = both
        torch.neg(straight, out=both[pairs:])
        if settings.curved is None and not state.curved:
            state.curved = bends(mode, straight, self.at_once)
        state.is_drawing = state.curved

    def _curve(self) -> None:
        """The same δ_s along the curvature of ρ, from those so far."""
        state, settings, pairs = self.state, self.settings, self.settings.samples // 2
        mode, start, z = self._mode_here(), state.deviations, state.curve_draws
        assert start is not None
        if z is None:
            assert state.sample_draws is not None
            z = torch.cat([state.sample_draws, -state.sample_draws])
        accuracy = Accuracy(
            _CURVED.residual, _CURVED.decrease * len(state.z), _CURVED.steps, settings.cg_steps
        )
        for s in range(len(state.drawn), len(start)):
            own = Perturbations.of(self.problem, settings.seed, range(s % pairs, s % pairs + 1))
            sign = 1.0 if s < pairs else -1.0
            white, noise = sign * own.white[0], sign * own.noise[0]
            self.progress(_CURVING, s, len(start))
            how = accuracy, state.preconditioner, self.progress
            draw = curved_draw(mode, white, noise, start[s], z[s], *how)
            state.drawn.append((draw.iterate.xi, draw.z))
            if s + 1 < len(start):
                self.checkpointer.save_if_due(state.snapshot)
        self.progress(_CURVING, len(start), len(start))
        xi, multipliers = zip(*state.drawn, strict=True)
        state.deviations = torch.stack(xi).sub_(mode.xi)
        state.curve_draws = torch.stack(multipliers)
        state.drawn, state.is_drawing = [], False

    def _mode_here(self) -> Iterate:
        """The centre without deviations."""
        centre = self.state.centre
        return Iterate.at(self.problem, centre.target, centre.xi)

    def _descend(self, accuracy: Accuracy, stage: str, quiet: bool = False) -> Descent:
        before = self.state.centre
        found = descend(before, self.state.z, accuracy, self.state.preconditioner, self.progress)
        self.state.centre, self.state.z = found.iterate, found.z
        self.state.slowest = max(self.state.slowest, found.cg_steps // max(1, found.steps))
        if not quiet:
            self._record(stage, before, found.cg_steps)
        return found

    def _precondition(self) -> None:
        """Nyström of I + W^½ J Jᵀ W^½ at the centre, under the noise of its own response."""
        self.state.centre = self.state.centre.with_own_response()
        n = len(self.state.z)
        rank = min(128, n // 8) if self.settings.rank is None else self.settings.rank
        if rank == 0:
            return
        old = self.state.preconditioner
        if old is not None and self.state.slowest < QUICK:
            return
        self.state.slowest = 0
        gram, world = self.problem.gram(self.state.centre.density), self.problem.model.prior.world
        self.state.preconditioner = (
            nystrom(gram, rank, seed=0, world=world, progress=self.progress)
            if old is None
            else old.refreshed(gram, self.progress)
        )

    def _rough(self) -> Accuracy:
        """On the way to the mode."""
        return replace(self._accuracy(), decrease=0.01 * len(self.state.z))

    def _accuracy(self) -> Accuracy:
        return Accuracy(self.settings.residual, 2.0, 4, self.settings.cg_steps)

    def _record(
        self,
        stage: str,
        before: Iterate,
        cg_steps: int,
        gradient: tuple[float, ...] = (),
        gradient_error: tuple[float, ...] = (),
    ) -> None:
        change = self.state.centre.responses.mean(0) - before.responses.mean(0)
        moved = float((change.square() / self.problem.noise).mean().sqrt())
        theta = tuple(self.problem.theta.tolist())
        entry = MGVIRound(
            stage,
            self.state.centre.energy,
            self.state.centre.misfit(),
            moved,
            theta,
            gradient,
            gradient_error,
            cg_steps,
        )
        self.state.history.append(entry)
        if self.rounds is not None:
            self.rounds(entry)
