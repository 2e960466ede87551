"""The phases of a log-normal fit: weights, mode, hyperparameters, samples."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference.evidence._steps import TrustRegion
from dustmap.inference.evidence._student_t_noise import StudentTWeights, measured_weight
from dustmap.inference.lognormal._lognormal_energy import (
    Accuracy,
    Descent,
    Iterate,
    descend,
    monte_carlo_error,
    preconditioner_at,
)
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_hyper import EvidenceStep, carry, evidence_step, on_its_torus
from dustmap.inference.lognormal._mgvi_samples import Probe, Sampler, probed
from dustmap.inference.lognormal._mgvi_state import (
    QUICK,
    FitState,
    MGVIRound,
    MGVISettings,
    MGVIStart,
    Phase,
    posterior_at,
)
from dustmap.inference.lognormal._tangent import GramPreconditioner
from dustmap.linalg import AT_MOST, Progress, SparseOperator

_log = logging.getLogger(__name__)

#: Gauss-Newton steps between two looks at the preconditioner.
_STRIDE = 3
#: Least rank of the first preconditioner, data for each of more, and steps of CG from which on the
#: next has twice the rank: with 171,000 data on levels, 300,000 stars, ranks of 128, 256, 512 and
#: 1,024 take 113, 65, 32 and 17 steps to the same residual, one solve with the fourth as long as
#: with the third.
_RANK, _DATA_PER_RANK, _SLOW = 128, 400, 60
#: Rank up to which products with a preconditioner may read more than those with the rows.
_WIDE = 256
#: Turns of the mode at most.
_TURNS = 10
#: Decrease of the energy in so many steps at which ξ̄ rests, and steps at most. Four leave tens of
#: nats: data are off by a tenth of their noise, but all on one side, and maps of thousands of stars
#: have a fifth more dust than there is, five to seven of their standard deviations.
_MEAN_DECREASE, _MEAN_TOGETHER, _MEAN_STEPS = 0.15, 3, 20
#: The same at few samples, and so many turns. Samples at the mode are those of a denser field: they
#: spread less, and ξ̄ that follows them needs several more turns, each of which leaves less dust.
#: Of few samples they are cheap, and what these lack is noise.
_FEW_DECREASE, _FEW_STEPS, _FEW_TURNS = 0.3, 12, 4
#: Accuracy of the mode at which gradients of the evidence are taken: residual of CG over
#: `settings.residual`, decrease of the energy in nats, and Gauss-Newton steps at most. Two nats
#: from rest, gradients of skies that vary by factors of a hundred are off by several posterior
#: standard deviations of θ: lengths come out too long, or run along the ridge of length and
#: variance to the size of the box.
_LEVEL, _LEVEL_DECREASE, _LEVEL_STEPS = 0.4, 0.01, 20
#: The same decrease over the squared distance of θ from its optimum, in posterior standard
#: deviations, and at most, and the share of this distance that gradients are then off by: d nats
#: from rest it is some 2 √d of these.
_FAR_DECREASE, _MOST_DECREASE, _FAR_ERROR = 0.005, 1.0, 0.14
#: Samples whose mean response misses the data this many times more than the mode have strayed.
_STRAY = 1.75
#: Rounds of weights at first that take the mode for the field: its spread is of the wide noise.
_BARE = 3
#: Posterior standard deviations from the optimum within which gradients take more draws: with K
#: of them the optimum is off by 1/√K of one.
_NEAR = 1.0
#: Steps that have to be averaged before θ rests for a short one, and how short, in posterior
#: standard deviations.
_AVERAGED, _SHORT = 3, 0.3
#: Nats that an evidence step of one posterior standard deviation promises.
_ONE_WIDTH = 0.5
#: Parts of an evidence step that are tried, one after the other.
_LENGTHS = (1.0, 0.5, 0.25, 0.125)
#: A mean response that still moves by more than this, in units of the noise, has not converged;
#: fresh deviations of few samples alone move it by half of that.
_RESTLESS = 1.0
#: Move of ξ̄, in Monte Carlo errors of the mean, below which it rests: every turn moves it about a
#: third as far as the turn before, so that all to come would move it by less than that error.
_RESTING = 2.0
#: What is counted while hyperparameters are learned.
_LEARNING = f"steps of learning{AT_MOST}"


Rounds = Callable[[MGVIRound], None]


@final
@dataclass(frozen=True, eq=False)
class Fit:
    """Leads from one state of a fit to the next; start: the earlier fit that it started from, if
    any."""

    settings: MGVISettings
    rounds: Rounds | None
    progress: Progress
    sampler: Sampler
    start: MGVIStart | None = None

    def states(self, state: FitState) -> Iterator[FitState]:
        """Yield the complete state after every turn of a phase and every few curved draws."""
        turns = {
            Phase.WEIGHTS: self._find_weights,
            Phase.MODE: self._find_mode,
            Phase.LEARN: self._learn,
        }
        while state.phase is not Phase.DONE:
            if state.phase in turns:
                state = turns[state.phase](state)
                yield state
                continue
            # Deviations at ξ̄, then ξ̄ at those deviations, until ξ̄ rests at the last of them. What a
            # step replaces is free for the next, for no other frame holds the state.
            if not state.is_drawing:
                if state.mode is None:
                    state = self._started(state)
                if state.turn > 0:
                    state = self._recentred(state)
                    if not state.strayed:
                        state = self._preconditioned(state)
                    state = self._refined(state)
                if self._rests(state):
                    state = self._ended(state)
                    yield state
                    continue
                state = self._sampler(state).drawn(self._preconditioned(state))
            while state.is_drawing:
                state = self._sampler(state).curved(state)
                if state.is_drawing:
                    yield state
            state = self._sampled(state)
            yield state

    def _find_weights(self, state: FitState) -> FitState:
        """Mode and weights by turns, from a noise that explains all data to what is left."""
        turn, robust, accuracy = state.turn, self.settings.robust, self._rough(state)
        assert robust is not None
        if turn == 0 and self.start is not None:
            turn = _BARE + 1
        elif turn == 0:
            state = state.weighed(StudentTWeights.first(robust, state.ratios(None)[0]))
        state = self._preconditioned(state)
        state, descent = self._descended(state, replace(accuracy, steps=_STRIDE), "weights")
        spread = None
        if turn >= _BARE:
            state, probe = self._probed(self._preconditioned(state))
            spread = probe.spread
        assert state.weights is not None
        share = measured_weight(state.problem.data)
        weights = state.weights.updated(*state.ratios(spread), turn > _BARE, share)
        state = state.weighed(weights)
        rests = turn > _BARE and weights.settled and descent.decrease < accuracy.decrease
        if rests or turn + 1 == robust.max_rounds:
            return state.at(Phase.MODE)
        return state.at(Phase.WEIGHTS, turn + 1)

    def _find_mode(self, state: FitState) -> FitState:
        """To where Gauss-Newton gains little, the preconditioner kept up to date."""
        state, accuracy = self._preconditioned(state), self._rough(state)
        before = state.centre.energy
        state, descent = self._descended(state, replace(accuracy, steps=_STRIDE), "mode")
        gained = before - state.centre.energy
        rests = descent.decrease < accuracy.decrease and gained < 0.05 * before
        if rests or state.turn + 1 == _TURNS:
            return state.at(Phase.LEARN)
        return state.at(Phase.MODE, state.turn + 1)

    def _learn(self, state: FitState) -> FitState:
        """An evidence step, until θ rests."""
        if len(state.prior) == 0:
            return self._learned(self._descended(state, self._accuracy, "mode")[0])
        self.progress(_LEARNING, state.turn, self.settings.rounds)
        if state.turn == self.settings.rounds:
            return self._learned(replace(state, moved=True))
        accuracy = self._accuracy_of_learning(state.widths)
        state, descent = self._descended(self._preconditioned(state), accuracy)
        at_rest = descent.decrease < accuracy.decrease
        state, is_last = self._evidence_round(state, at_rest)
        if not is_last:
            return state.at(Phase.LEARN, state.turn + 1)
        self.progress(_LEARNING, self.settings.rounds, self.settings.rounds)
        return self._learned(self._descended(state, self._accuracy, "mode")[0])

    def _learned(self, state: FitState) -> FitState:
        """Before the first samples: few, where ξ̄ is to rest far from where it is."""
        follows = self.settings.redrawn and self.settings.refinements > 0
        is_far = follows and not state.is_near(self.start)
        return state.at(Phase.FEW if is_far else Phase.SAMPLE)

    def _evidence_round(self, state: FitState, at_rest: bool) -> tuple[FitState, bool]:
        """Take one step in θ, and say whether it was the last.

        It is where θ was within `tolerance` posterior standard deviations of its optimum, and where
        no length of it is accepted at a mode that is at rest; elsewhere a rejected step is tried
        again from a better mode.

        The mode, weights and solves that a gradient is taken at leave it uncertain by about half a
        posterior standard deviation, whatever K is. Near the optimum step m is therefore 1/m of
        Newton's (Robbins & Monro 1951), and θ rests where that is short.
        """
        before, settings = state.centre, self.settings
        state, probe = self._probed(state)
        step = self._evidence_step(state, probe, state.trust)
        more = max(settings.draws, settings.most_draws)
        if step.widths < _NEAR and state.evidence_count < more:
            state, probe = self._probed(replace(state, evidence_count=more))
            step = self._evidence_step(state, probe, state.trust.within(step.radius))
        is_near = state.evidence_count == more and step.widths < 2.0 * _NEAR
        state = replace(state, near=state.near + 1 if is_near else 0)
        gain = 1.0 / max(1, state.near)
        state, length = self._moved(state, gain * step.delta)
        taken, trust = gain * length, state.trust.within(step.radius)
        if taken > 0.0:
            followed = trust.after(taken * step.delta, step.gradient, step.information)
            # After a short step the gradient changes by its own uncertainty, not by the step.
            if followed.promised > _ONE_WIDTH:
                trust = followed
        stage = "evidence" if taken > 0.0 else "rejected"
        state = self._recorded(replace(state, trust=trust), stage, before, probe.cg_steps, step)
        averaged = state.near >= _AVERAGED and gain * step.widths < _SHORT
        rests = averaged or step.rests(settings.tolerance)
        if state.weights is not None:
            share = measured_weight(state.problem.data)
            weights = state.weights.updated(*state.ratios(probe.spread), share=share)
            state, rests = state.weighed(weights), rests and weights.settled
        is_last = rests if taken > 0.0 else at_rest
        # What would end at a rough mode is tried again at an accurate one.
        is_rough = _FAR_ERROR * state.widths > max(_SHORT, settings.tolerance)
        widths = 0.0 if is_last or taken == 0.0 else step.widths
        return replace(state, widths=widths), is_last and not is_rough

    def _evidence_step(self, state: FitState, probe: Probe, trust: TrustRegion) -> EvidenceStep:
        how = self._accuracy, state.preconditioner, trust, self.progress
        return evidence_step(state.centre, state.z, probe.z, state.prior, *how)

    def _probed(self, state: FitState) -> tuple[FitState, Probe]:
        """The gradient's draws at the centre, from the same random numbers every time."""
        counts, seed = (state.evidence_count, self.sampler.at_once.size), self.settings.seed
        solver = self.sampler.solver(state, 1.0)
        known, numbers = state.evidence_draws, self.sampler.numbers
        probe = probed(state.centre, seed, *counts, solver, known, kept=numbers)
        slowest = max(state.slowest, probe.cg_steps)
        share = min(1.0, float((probe.spread / state.problem.noise).mean()))
        return replace(state, evidence_draws=probe.z, slowest=slowest, share=share), probe

    def _moved(self, state: FitState, delta: Tensor) -> tuple[FitState, float]:
        """Carry the centre along to θ + t Δθ, and return t, halved until the data stay in reach.

        Where they never do, everything stays as it is, and t is 0.
        """
        before, theta = state.centre, state.problem.theta
        for length in _LENGTHS if bool(delta.isfinite().all()) else ():
            changed = on_its_torus(before.problem.at(theta + length * delta), self.settings.padding)
            how = self._accuracy, state.preconditioner, self.progress
            centre, z = carry(before, changed, state.z, *how)
            near = centre.misfit() < 2.0 * max(before.misfit(), 1.0)
            if near and centre.is_finite:
                return replace(state, centre=centre, z=z), length
        return state, 0.0

    def _earlier(self, state: FitState) -> MGVIStart | None:
        """The earlier fit, where its samples are of use: of the same variables and kind."""
        start, settings = self.start, self.settings
        if start is None or start.mode.shape != state.centre.xi.shape:
            return None
        same = settings.curved in (None, start.curved) and settings.refinements > 0
        return start if same else None

    def _started(self, state: FitState) -> FitState:
        """Before the first samples: the mode, and as far from it as in the earlier fit, ξ̄ with the
        curved deviations of that fit."""
        start, centre = self._earlier(state), state.centre
        if start is None:
            return state
        return replace(
            state,
            mode=(centre, state.z),
            centre=posterior_at(state.problem, centre.xi + (start.mean - start.mode)),
            deviations=self._earlier_deviations(state),
            curved=start.curved,
        )

    def _earlier_deviations(self, state: FitState) -> Tensor | None:
        """Curved ones of an earlier fit, those of the samples of this phase."""
        start = self._earlier(state)
        if start is None or not start.curved:
            return None
        pairs = self._sampler(state).settings.samples // 2
        return torch.cat([half[:pairs] for half in start.deviations.chunk(2)])

    def _sampler(self, state: FitState) -> Sampler:
        """Of all samples, or of few."""
        if state.phase is not Phase.FEW:
            return self.sampler
        return replace(self.sampler, settings=self.settings.of_few())

    def _rests(self, state: FitState) -> bool:
        """Whether ξ̄ has followed samples that stay: they need not be good, ξ̄ of an earlier fit was
        near, ξ̄ has hardly moved, or there have been enough of them."""
        turn, settings = state.turn, self.settings
        if turn == 0 or state.strayed:
            return False
        if state.phase is Phase.FEW:
            return turn == _FEW_TURNS
        if turn > settings.refinements or not settings.redrawn or self._earlier(state) is not None:
            return True
        moved = state.history[-1].moved
        return turn > 1 and moved < _RESTING * monte_carlo_error(state.centre)

    def _recentred(self, state: FitState) -> FitState:
        """The centre with the deviations of the turn before, or the mode where these overflow."""
        assert state.mode is not None
        mode, z = state.mode
        centre = Iterate.at(state.problem, state.centre.target, state.centre.xi, state.deviations)
        if centre.is_finite:
            return replace(state, centre=centre, strayed=False)
        return replace(state, centre=mode, z=z, strayed=True)

    def _refined(self, state: FitState) -> FitState:
        """ξ̄ at the deviations of the turn before; the mode where straight ones have strayed."""
        assert state.mode is not None
        mode, z = state.mode
        if not state.strayed:
            state, _ = self._descended(state, self._accuracy_of_mean(state.phase), "mean")
            strayed = state.centre.misfit() > _STRAY * max(mode.misfit(), 0.5)
            state = replace(state, strayed=strayed)
        if not state.strayed or self.settings.curved is not None or state.curved:
            return state
        _log.info("samples on straight lines miss the data: they are drawn along curves")
        return self._recorded(replace(state, curved=True, centre=mode, z=z), "mode", mode, 0)

    def _sampled(self, state: FitState) -> FitState:
        """The next turn, or the end where ξ̄ cannot or is not to follow the samples."""
        last = self.settings.refinements
        if last == 0 or (state.strayed and state.turn > last):
            return self._ended(state)
        return state.at(state.phase, state.turn + 1)

    def _ended(self, state: FitState) -> FitState:
        """Before all samples are drawn where few have led; else the fit as it is."""
        if state.phase is Phase.FEW:
            state = state.at(Phase.SAMPLE)
            drawn = self._earlier_deviations(state)
            return replace(state, deviations=drawn, sample_draws=None, curve_draws=None)
        is_restless = state.moved or state.history[-1].moved > _RESTLESS
        return replace(state, moved=is_restless).at(Phase.DONE)

    def _descended(
        self, state: FitState, accuracy: Accuracy, stage: str | None = None
    ) -> tuple[FitState, Descent]:
        """Gauss-Newton steps of ξ̄; stage: of the entry in the history, None for none."""
        before = state.centre
        descent = descend(before, state.z, accuracy, state.preconditioner, self.progress)
        slowest = max(state.slowest, descent.cg_steps // max(1, descent.steps))
        state = replace(state, centre=descent.iterate, z=descent.z, slowest=slowest)
        if stage is not None:
            state = self._recorded(state, stage, before, descent.cg_steps)
        return state, descent

    def _preconditioned(self, state: FitState) -> FitState:
        """Nyström of I + W^½ J Jᵀ W^½ at the centre, under the noise of its own response."""
        state = replace(state, centre=state.centre.with_own_response())
        rank, old = self._rank(state), state.preconditioner
        if rank == 0 or (old is not None and state.slowest < QUICK):
            return state
        made = preconditioner_at(state.centre, rank, old, self.progress)
        return replace(state, preconditioner=made, slowest=0)

    def _rank(self, state: FitState) -> int:
        """Rank of the next preconditioner: more for more data, twice the last one where solves
        were slow.

        Not among nodes, where errors of solves are known by how much less of the matrix a
        preconditioner has than there is.
        """
        settings, n, old = self.settings, len(state.problem.y), state.preconditioner
        if settings.rank is not None:
            return settings.rank
        if state.problem.nodes is not None:
            return min(_RANK, n // 8)
        most = min(settings.most_rank, _widest(state.problem))
        if not isinstance(old, GramPreconditioner):
            wide = 1 << max(1, n // _DATA_PER_RANK).bit_length() - 1
            return min(max(_RANK, min(wide, most)), n // 8)
        wider = min(2 * old.rank, most, n // 8)
        return max(old.rank, wider) if state.slowest > _SLOW else old.rank

    def _rough(self, state: FitState) -> Accuracy:
        """On the way to the mode."""
        return replace(self._accuracy, decrease=0.01 * len(state.problem.y))

    @property
    def _accuracy(self) -> Accuracy:
        return Accuracy(self.settings.residual, 2.0, 4, self.settings.cg_steps)

    def _accuracy_of_mean(self, phase: Phase) -> Accuracy:
        """Accuracy of ξ̄ at samples of this phase."""
        few = _FEW_DECREASE, _FEW_STEPS
        decrease, steps = few if phase is Phase.FEW else (_MEAN_DECREASE, _MEAN_STEPS)
        how = decrease, steps, self.settings.cg_steps, _MEAN_TOGETHER
        return Accuracy(self.settings.residual, *how)

    def _accuracy_of_learning(self, widths: float) -> Accuracy:
        """Accuracy of the mode at which a gradient of the evidence is taken, so many posterior
        standard deviations of θ from its optimum."""
        residual, far = _LEVEL * self.settings.residual, _FAR_DECREASE * widths**2
        decrease = min(_MOST_DECREASE, max(_LEVEL_DECREASE, far))
        return Accuracy(residual, decrease, _LEVEL_STEPS, self.settings.cg_steps)

    def _recorded(
        self,
        state: FitState,
        stage: str,
        before: Iterate,
        cg_steps: int,
        step: EvidenceStep | None = None,
    ) -> FitState:
        """With one more entry in the history."""
        change = state.centre.responses.mean(0) - before.responses.mean(0)
        entry = MGVIRound(
            stage,
            state.centre.energy,
            state.centre.misfit(),
            float((change.square() / state.problem.noise).mean().sqrt()),
            tuple(state.problem.theta.tolist()),
            () if step is None else tuple(step.gradient.tolist()),
            cg_steps,
            None if step is None else step.errors,
        )
        if self.rounds is not None:
            self.rounds(entry)
        return replace(state, history=(*state.history, entry))


def _widest(problem: LogNormalProblem) -> int:
    """The rank, a power of two, from which on a product with a preconditioner, whose vectors are
    read twice, reads more than one with L and Lᵀ; none where rows are not stored."""
    rows = problem.own_rows
    if not isinstance(rows, SparseOperator):
        return MGVISettings.most_rank
    even = rows.bytes // max(1, 2 * rows.shape[0] * rows.dtype.itemsize)
    return max(_WIDE, 1 << max(1, even).bit_length() - 1)
