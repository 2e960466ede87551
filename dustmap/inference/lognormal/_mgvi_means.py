"""The samples of a log-normal fit, and the means that follow them."""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from dustmap.inference.lognormal._lognormal_descent import (
    Accuracy,
    Descent,
    descend,
    descend_samples,
)
from dustmap.inference.lognormal._lognormal_energy import Iterate, monte_carlo_error
from dustmap.inference.lognormal._mgvi_phases import Walk
from dustmap.inference.lognormal._mgvi_samples import Sampler, fine_residual
from dustmap.inference.lognormal._mgvi_settings import TURNS, MGVISettings
from dustmap.inference.lognormal._mgvi_state import (
    QUICK,
    FitState,
    MGVIStart,
    Phase,
    mean_of_samples,
    posterior_at,
)

_log = logging.getLogger(__name__)

#: Decrease of the energy for every number that the data determine at which a mean rests, steps at
#: most, and residual of CG, in units of that of the settings. The mean of S samples misses the
#: lowest energy by 1/(2 S) for every such number, 0.03 for 16.
_DECREASE, _STEPS, _RESIDUAL = 0.002, 8, 2.0
#: The same of several means on their way.
_FEW_DECREASE, _FEW_STEPS, _FEW_RESIDUAL = 1.0, 2, 8.0
#: How many times larger the noise is at whose mode several means begin, and decrease of the energy
#: per datum, or steps, at which it is found. From three times the noise more of the means choose
#: alike.
_HOT, _HOT_DECREASE, _HOT_STEPS = 5.0, 0.01, 8
#: Samples whose mean response misses the data this many times more than the mode have strayed.
_STRAY = 1.75
#: A mean response that still moves by more than this, in units of the noise, has not converged;
#: fresh deviations of few samples alone move it by half of that.
_RESTLESS = 1.0
#: Move of the mean response, in units of the noise, at which the samples of an earlier fit were
#: near: 0.07 to 0.1 where new data lie between the old ones. Where they are of another patch of the
#: sky, or farther, it is 0.13 to 3, and standard deviations would be up to 1.6 times too large.
_STAYS = 0.12
#: Move of ξ̄, in Monte Carlo errors of the mean, below which it rests: every turn moves it about a
#: third as far as the turn before, so that all to come would move it by less than that error.
_RESTING = 2.0


@final
@dataclass(frozen=True, eq=False)
class Sampling:
    """Leads from the mode to samples ξ̄_k ± δ_s: deviations at every mean, then the means where
    their own deviations lead them, by turns.

    One mean, at first the mode, for deviations on straight lines, and K means of few samples each,
    at first the mode of far larger noise, for those that follow the curvature of ρ. A datum that
    sees a sum of densities does not say which of them is large: the posterior has a mode for each,
    and a mean with its samples follows one. From a smooth field, which favours none, means with
    random numbers of their own follow different ones, and the mixture of all is the posterior.

    start: the earlier fit that this one started from, if any.
    """

    walk: Walk
    sampler: Sampler
    start: MGVIStart | None = None

    phases = (Phase.SAMPLE,)

    def states(self, state: FitState) -> Iterator[FitState]:
        """Yield the complete state after every turn and every few curved draws.

        What a step replaces is free for the next, for no other frame holds the state.
        """
        while state.phase is not Phase.DONE:
            if not state.is_drawing:
                if state.mode is None:
                    state = self._started(state)
                if state.turn > 0:
                    state = self._followed(state)
                if self._rests(state):
                    state = self._ended(state)
                    yield state
                    continue
                state = self.sampler.drawn(self.walk.preconditioned(state))
                if state.curved and state.means is None and self._spreads(state):
                    state = self._spread(state)
                    yield state
                    continue
            while state.is_drawing:
                state = self.sampler.curved(state)
                if state.is_drawing:
                    yield state
            state = self._sampled(state)
            yield state

    @property
    def settings(self) -> MGVISettings:
        """Of the fit."""
        return self.walk.settings

    def _spreads(self, state: FitState) -> bool:
        """Whether curved samples have several means that begin at a smooth field."""
        follows = self.settings.redrawn and self.settings.refinements > 0
        return follows and not self._is_near(state)

    def _is_near(self, state: FitState) -> bool:
        """Whether the samples of an earlier fit are near."""
        return state.is_near(self.start, self.settings)

    @property
    def _was_curved(self) -> bool:
        """Whether an earlier fit has found that samples bend."""
        return self.settings.curved is None and self.start is not None and self.start.curved

    def _earlier(self, state: FitState) -> MGVIStart | None:
        """The earlier fit, where its samples are of use: of the same variables and kind."""
        start, settings = self.start, self.settings
        if start is None or start.mode.shape != state.centre.xi.shape:
            return None
        if not start.has_samples(settings):
            return None
        near = self._is_near(state) or len(start.means) == 1
        same = settings.curved in (None, start.curved) and settings.refinements > 0
        return start if same and near else None

    def _started(self, state: FitState) -> FitState:
        """Before the first samples: at the mode; as far from it as in an earlier fit that is near,
        with the curved deviations of that fit; or at several means."""
        start = self._earlier(state)
        state = replace(state, centre=state.centre.with_own_response()).loosened()
        state = replace(state, mode=(state.centre, state.z))
        if self._spreads(state) and (state.curved or self._was_curved):
            # Where nothing has been learned, straight draws at the mode measure the share first.
            return self._spread(state) if state.share < 1.0 else state
        if start is None:
            return state
        deviations = start.deviations if start.curved else None
        means = state.centre.xi + (start.means - start.mode)
        state = replace(state, deviations=deviations, curved=start.curved)
        if len(means) == 1:
            return replace(state, centre=posterior_at(state.problem, means[0]))
        return self._at_middle(replace(state, means=means))

    def _spread(self, state: FitState) -> FitState:
        """Several means at the mode of noise that is `_HOT` times as large, beginning with a field
        of 0: such data ask for a smooth density, and leave open which nodes it is in."""
        count, problem = self.settings.means, state.problem
        n, hot = problem.root.n_white, problem.weighted(problem.weights / _HOT**2)
        xi = torch.cat([torch.zeros_like(state.centre.xi[:n]), state.centre.xi[n:]])
        settings, decrease = self.settings, _HOT_DECREASE * len(problem.y)
        accuracy = Accuracy(settings.residual, decrease, _HOT_STEPS, settings.cg_steps)
        how = torch.zeros_like(state.z), accuracy, state.preconditioner, self.walk.progress
        xi = descend(posterior_at(hot, xi), *how)[0].iterate.xi
        return replace(
            state.at(Phase.SAMPLE),
            means=xi.repeat(count, 1),
            centre=posterior_at(problem, xi),
            deviations=None,
            sample_draws=None,
            curve_draws=None,
            is_drawing=False,
            curved=True,
            slowest=QUICK,
        )

    def _rests(self, state: FitState) -> bool:
        """Whether means have followed samples that stay: they need not be good, those of an earlier
        fit were near, they have hardly moved, or there have been enough of them."""
        turn, settings = state.turn, self.settings
        if turn == 0:
            return False
        if state.means is not None:
            stays = self._is_near(state) and state.history[-1].moved < _STAYS
            return turn == TURNS or stays
        if state.strayed:
            return False
        if turn > settings.refinements or not settings.redrawn or self._earlier(state) is not None:
            return True
        moved = state.history[-1].moved
        return turn > 1 and moved < _RESTING * monte_carlo_error(state.centre)

    def _followed(self, state: FitState) -> FitState:
        """Every mean at its deviations of the turn before."""
        if state.means is None:
            state = self._recentred(state)
            if not state.strayed:
                state = self.walk.preconditioned(state)
            return self._refined(state)
        state = self.walk.preconditioned(replace(state, strayed=False))
        before, mode = state.centre, state.mode
        assert mode is not None
        here = self._of_their_own(state)
        finite = [k for k, iterate in enumerate(here) if iterate.is_finite]
        ends, means = self._descended(state, [here[k] for k in finite]), state.all_means.clone()
        for k, end in zip(finite, ends, strict=True):
            means[k] = end.iterate.xi
        most = _STRAY * max(mode[0].misfit(), 1.0)  # few samples leave noise in every mean
        square = sum(end.iterate.misfit() ** 2 for end in ends) / max(1, len(ends))
        strayed = len(ends) < len(here) or math.sqrt(square) > most
        state = self._at_middle(replace(state, means=means, strayed=strayed))
        return self._recorded(state, before, ends)

    def _descended(self, state: FitState, iterates: Sequence[Iterate]) -> list[Descent]:
        """Every mean where its samples lead it; the first of them may have a pair more."""
        how = self._accuracy(state), state.preconditioner, self.walk.progress
        alike = itertools.groupby(iterates, key=lambda at: len(at.deviations))
        return [end for _, some in alike for end in descend_samples(list(some), *how)]

    def _recorded(self, state: FitState, before: Iterate, ends: Sequence[Descent]) -> FitState:
        """With a line of the report on these descents."""
        slowest = max([state.slowest, *(end.cg_steps // max(1, end.steps) for end in ends)])
        spent = sum(end.cg_steps for end in ends)
        return self.walk.recorded(replace(state, slowest=slowest), "mean", before, spent)

    def _of_their_own(self, state: FitState) -> list[Iterate]:
        """At every mean, with its own deviations."""
        assert state.deviations is not None
        numbers = mean_of_samples(self.settings.samples, state.count)
        return [
            Iterate.at(state.problem, mean, state.deviations[numbers == k])
            for k, mean in enumerate(state.all_means)
        ]

    def _at_middle(self, state: FitState) -> FitState:
        """At the mean of all samples' means, which the samples are scattered around."""
        numbers = mean_of_samples(self.settings.samples, state.count)
        means = state.all_means
        xi = (torch.bincount(numbers) / len(numbers)).to(means) @ means
        around = None if state.deviations is None else state.samples().sub_(xi)
        centre = Iterate.at(state.problem, xi, around)
        return replace(state, centre=centre)

    def _recentred(self, state: FitState) -> FitState:
        """The centre with the deviations of the turn before, or the mode where these overflow."""
        assert state.mode is not None
        mode, _ = state.mode
        centre = Iterate.at(state.problem, state.centre.xi, state.deviations)
        if centre.is_finite:
            return replace(state, centre=centre, strayed=False)
        return replace(state, centre=mode, strayed=True)

    def _refined(self, state: FitState) -> FitState:
        """ξ̄ at the deviations of the turn before; the mode where straight ones have strayed."""
        assert state.mode is not None
        mode, _ = state.mode
        if not state.strayed:
            (end,) = self._descended(state, [state.centre])
            state = self._recorded(replace(state, centre=end.iterate), state.centre, [end])
            strayed = state.centre.misfit() > _STRAY * max(mode.misfit(), 0.5)
            state = replace(state, strayed=strayed)
        if not state.strayed or self.settings.curved is not None or state.curved:
            return state
        _log.info("samples on straight lines miss the data: they are drawn along curves")
        return self.walk.recorded(replace(state, curved=True, centre=mode), "mode", mode, 0)

    def _sampled(self, state: FitState) -> FitState:
        """The next turn, or the end where a mean cannot or is not to follow the samples."""
        last = self.settings.refinements
        if last == 0 or (state.means is None and state.strayed and state.turn > last):
            return self._ended(state)
        return state.at(Phase.SAMPLE, state.turn + 1)

    def _ended(self, state: FitState) -> FitState:
        """The fit as it is."""
        is_restless = state.moved or state.history[-1].moved > _RESTLESS
        return replace(state, moved=is_restless).at(Phase.DONE)

    def _accuracy(self, state: FitState) -> Accuracy:
        """Of one mean and of the last turn, or of several on their way from a smooth field."""
        settings, is_last = self.settings, state.turn == TURNS or self._is_near(state)
        if state.means is not None and not is_last:
            residual, decrease, steps = _FEW_RESIDUAL, _FEW_DECREASE, _FEW_STEPS
        else:
            # What is left differs from mean to mean, and is spread that the samples have.
            residual, steps = fine_residual(state, _RESIDUAL), _STEPS
            decrease = _DECREASE * state.share * len(state.problem.y)
        return Accuracy(residual * settings.residual, decrease, steps, settings.cg_steps)
