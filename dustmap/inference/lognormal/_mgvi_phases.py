"""The phases of a log-normal fit before its samples: weights, mode, hyperparameters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from dustmap.inference.evidence._steps import TrustRegion
from dustmap.inference.evidence._student_t_noise import StudentTWeights, measured_weight
from dustmap.inference.lognormal._lognormal_descent import Accuracy, Descent, descend
from dustmap.inference.lognormal._lognormal_energy import Iterate, preconditioner_at
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_hyper import EvidenceStep, carry, evidence_step, on_its_torus
from dustmap.inference.lognormal._mgvi_samples import Probe, Sampler, probed
from dustmap.inference.lognormal._mgvi_settings import MGVIRound, MGVISettings
from dustmap.inference.lognormal._mgvi_state import QUICK, FitState, MGVIStart, Phase
from dustmap.inference.lognormal._tangent import GramPreconditioner
from dustmap.linalg import AT_MOST, EnteredOperator, Progress, SparseOperator

#: Gauss-Newton steps between two looks at the preconditioner.
_STRIDE = 3
#: Steps before data lose weight for the first time: dense clouds take more than a stride to build.
_TO_THE_MODE = 15
#: Least rank of the first preconditioner, data for each of more, and steps of CG from which on the
#: next has twice the rank: with 171,000 data on levels, 300,000 stars, ranks of 128, 256, 512 and
#: 1,024 take 113, 65, 32 and 17 steps to the same residual, one solve with the fourth as long as
#: with the third.
_RANK, _DATA_PER_RANK, _SLOW = 128, 400, 60
#: Rank up to which products with a preconditioner may read more than those with the rows.
_WIDE = 256
#: Turns of the mode at most.
_TURNS = 10
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
#: Rounds of weights at first that take the mode for the field, whose spread is not that of the
#: noise that is looked for.
_BARE = 3
#: The least 1 − h of the leverage h of a datum: of less there is no digit in single precision.
_LEAST_REST = 1e-7
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
#: What is counted while hyperparameters are learned.
_LEARNING = f"steps of learning{AT_MOST}"


Rounds = Callable[[MGVIRound], None]


@final
@dataclass(frozen=True, eq=False)
class Walk:
    """Steps of a fit that its phases share."""

    settings: MGVISettings
    rounds: Rounds | None
    progress: Progress

    def descended(
        self, state: FitState, accuracy: Accuracy, stage: str | None = None
    ) -> tuple[FitState, Descent]:
        """Gauss-Newton steps of the mode; stage: of the entry in the history, None for none."""
        before = state.centre
        descent, z = descend(before, state.z, accuracy, state.preconditioner, self.progress)
        slowest = max(state.slowest, descent.cg_steps // max(1, descent.steps))
        state = replace(state, centre=descent.iterate, z=z, slowest=slowest)
        if stage is not None:
            state = self.recorded(state, stage, before, descent.cg_steps)
        return state, descent

    def preconditioned(self, state: FitState) -> FitState:
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

    def recorded(
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
            state.misfit,
            float((change.square() / state.problem.noise).mean().sqrt()),
            tuple(state.problem.theta.tolist()),
            () if step is None else tuple(step.gradient.tolist()),
            cg_steps,
            None if step is None else step.errors,
        )
        if self.rounds is not None:
            self.rounds(entry)
        return replace(state, history=(*state.history, entry))


@final
@dataclass(frozen=True, eq=False)
class Learning:
    """Weights, mode and hyperparameters; start: the earlier fit that it started from, if any."""

    walk: Walk
    sampler: Sampler
    start: MGVIStart | None = None

    phases = (Phase.WEIGHTS, Phase.MODE, Phase.LEARN)

    def states(self, state: FitState) -> Iterator[FitState]:
        """Yield the complete state after every turn of a phase."""
        turns = {
            Phase.WEIGHTS: self._find_weights,
            Phase.MODE: self._find_mode,
            Phase.LEARN: self._learn,
        }
        while state.phase in self.phases:
            state = turns[state.phase](state)
            yield state

    @property
    def settings(self) -> MGVISettings:
        """Of the fit."""
        return self.walk.settings

    @property
    def progress(self) -> Progress:
        """Of the fit."""
        return self.walk.progress

    def _find_weights(self, state: FitState) -> FitState:
        """Mode and weights by turns, from data that all count in full."""
        robust, accuracy = self.settings.robust, self._rough(state)
        assert robust is not None
        first = 0 if self.start is None else _BARE + 1
        turn = state.turn or first
        if turn == 0:
            state = state.weighed(StudentTWeights.first(robust, state.problem.y))
        steps = _STRIDE if turn > 0 else _TO_THE_MODE
        state, descent = self._at_these_weights(state, accuracy, steps)
        state, ratios = self._ratios(state, turn)
        assert state.weights is not None
        share = measured_weight(state.problem.data, state.problem.model.likelihood)
        weights = state.weights.updated(*ratios, turn > _BARE, share)
        state = state.weighed(weights)
        rests = turn > _BARE and weights.settled and descent.decrease < accuracy.decrease
        if rests or turn + 1 - first >= robust.max_rounds:
            # Where something is learned, every step of it renews the weights as well.
            still_moves = not weights.settled and len(state.prior) == 0
            return replace(state, moved=state.moved or still_moves).at(Phase.MODE)
        return state.at(Phase.WEIGHTS, turn + 1)

    def _at_these_weights(
        self, state: FitState, accuracy: Accuracy, steps: int
    ) -> tuple[FitState, Descent]:
        """Gauss-Newton steps, the preconditioner kept up to date: one of a smooth field hardly
        helps where clouds have built up."""
        before, spent = state.centre, 0
        for _ in range(0, steps, _STRIDE):
            state = self.walk.preconditioned(state)
            state, descent = self.walk.descended(state, replace(accuracy, steps=_STRIDE))
            spent += descent.cg_steps
            if descent.decrease < accuracy.decrease:
                break
        return self.walk.recorded(state, "weights", before, spent), descent

    def _ratios(self, state: FitState, turn: int) -> tuple[FitState, tuple[Tensor, Tensor]]:
        """Squared residual and spread (N,) over σ_n², as a turn of the weights takes them.

        Data in full have bent the field to themselves. At first their residuals are therefore those
        of a field without the datum, e_n/(1 − h_n), of linear responses with the leverage h_n. An
        error is as large there as it is, and the stars behind a cloud speak for each other.
        """
        if 0 < turn < _BARE:
            return state, state.ratios(None)
        state, probe = self._probed(self.walk.preconditioned(state))
        if turn >= _BARE:
            return state, state.ratios(probe.spread)
        left, spread = state.ratios(None)
        return state, (left / probe.rest.double().clamp_min(_LEAST_REST).square(), spread)

    def _find_mode(self, state: FitState) -> FitState:
        """To where Gauss-Newton gains little, the preconditioner kept up to date."""
        state, accuracy = self.walk.preconditioned(state), self._rough(state)
        before = state.centre.energy
        state, descent = self.walk.descended(state, replace(accuracy, steps=_STRIDE), "mode")
        gained = before - state.centre.energy
        rests = descent.decrease < accuracy.decrease and gained < 0.05 * before
        if rests or state.turn + 1 == _TURNS:
            return state.at(Phase.LEARN)
        return state.at(Phase.MODE, state.turn + 1)

    def _learn(self, state: FitState) -> FitState:
        """An evidence step, until θ rests."""
        if len(state.prior) == 0:
            return self.walk.descended(state, self._accuracy, "mode")[0].at(Phase.SAMPLE)
        self.progress(_LEARNING, state.turn, self.settings.rounds)
        if state.turn == self.settings.rounds:
            return replace(state, moved=True).at(Phase.SAMPLE)
        accuracy = self._accuracy_of_learning(state.widths)
        state, descent = self.walk.descended(self.walk.preconditioned(state), accuracy)
        at_rest = descent.decrease < accuracy.decrease
        state, is_last = self._evidence_round(state, at_rest)
        if not is_last:
            return state.at(Phase.LEARN, state.turn + 1)
        if self._is_to_weigh_anew(state):
            return state.at(Phase.WEIGHTS)
        self.progress(_LEARNING, self.settings.rounds, self.settings.rounds)
        return self.walk.descended(state, self._accuracy, "mode")[0].at(Phase.SAMPLE)

    def _is_to_weigh_anew(self, state: FitState) -> bool:
        """Whether there are outliers that may be clouds of the length and std that were learned.

        A smoother field could not take these up, and weights that go on from there keep them out.
        """
        if self.start is not None or state.weights is None or state.weights.outliers == 0:
            return False
        learned = next((n for n, entry in enumerate(state.history) if entry.gradient), 0)
        return all(entry.stage != "weights" for entry in state.history[learned:])

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
        state = self.walk.recorded(replace(state, trust=trust), stage, before, probe.cg_steps, step)
        averaged = state.near >= _AVERAGED and gain * step.widths < _SHORT
        rests = averaged or step.rests(settings.tolerance)
        if state.weights is not None:
            share = measured_weight(state.problem.data, state.problem.model.likelihood)
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

    def _rough(self, state: FitState) -> Accuracy:
        """On the way to the mode."""
        return replace(self._accuracy, decrease=0.01 * len(state.problem.y))

    @property
    def _accuracy(self) -> Accuracy:
        return Accuracy(self.settings.residual, 2.0, 4, self.settings.cg_steps)

    def _accuracy_of_learning(self, widths: float) -> Accuracy:
        """Accuracy of the mode at which a gradient of the evidence is taken, so many posterior
        standard deviations of θ from its optimum."""
        residual, far = _LEVEL * self.settings.residual, _FAR_DECREASE * widths**2
        decrease = min(_MOST_DECREASE, max(_LEVEL_DECREASE, far))
        return Accuracy(residual, decrease, _LEVEL_STEPS, self.settings.cg_steps)


def _widest(problem: LogNormalProblem) -> int:
    """The rank, a power of two, from which on a product with a preconditioner, whose vectors are
    read twice, reads more than one with L and Lᵀ; none where rows are not stored."""
    rows = problem.own_rows
    if not isinstance(rows, SparseOperator | EnteredOperator):
        return MGVISettings.most_rank
    even = rows.bytes // max(1, 2 * rows.shape[0] * rows.dtype.itemsize)
    return max(_WIDE, 1 << max(1, even).bit_length() - 1)
