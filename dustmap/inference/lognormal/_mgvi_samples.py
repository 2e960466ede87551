"""The samples of a fit: straight deviations, and curved ones a few at a time."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_energy import Accuracy, Iterate
from dustmap.inference.lognormal._metric_solver import Preconditioner
from dustmap.inference.lognormal._mgvi_curves import CurvedDraws, curved_draws
from dustmap.inference.lognormal._mgvi_draws import (
    DrawSolver,
    Perturbations,
    curved_at_once,
    draws_at_once,
    first_rows,
    in_groups,
)
from dustmap.inference.lognormal._mgvi_shares import bends, straight_pairs
from dustmap.inference.lognormal._mgvi_state import FitState, MGVISettings, MGVIStart
from dustmap.linalg import AdaptiveBatch, Progress

#: Residual of CG of a curved sample, in units of that of the settings, and its decrease per datum.
#: Where that is ten times looser, rounding decides where descents end: a change of the data by 1e-7
#: then moves the map by 0.07 posterior standard deviations (rms) instead of 0.02.
_CURVED = Accuracy(residual=4.0, decrease=2e-3, steps=5)
#: Share of new data up to which one step, with this residual of CG (same units), does for curved
#: samples of an earlier fit at the same hyperparameters. Of 5,000 stars, a tenth of them new, it
#: takes them from 0.14 to 0.05 of a posterior standard deviation (rms over the nodes) of where
#: steps end. Multipliers of that fit would not help: where J has changed, A z is far longer than
#: the right-hand side.
_FEW, _SHORT_RESIDUAL = 0.25, 8.0
#: What is counted while samples follow the curvature.
_CURVING = "curved draws"


@final
@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the samples of a fit, which ranks divide among them.

    at_once, curved_at_once: samples that a rank draws together, and curved ones; together: curved
    samples of a rank between two states; start: the earlier fit that it started from, if any.
    """

    settings: MGVISettings
    progress: Progress
    at_once: AdaptiveBatch
    curved_at_once: AdaptiveBatch
    together: int
    start: MGVIStart | None = None

    @staticmethod
    def of(
        settings: MGVISettings, device: torch.device, progress: Progress, start: MGVIStart | None
    ) -> "Sampler":
        """For a device."""
        at_once = draws_at_once(max(settings.samples // 2, settings.draws))
        curved = curved_at_once(settings.samples, device)
        return Sampler(settings, progress, at_once, curved, curved.size, start)

    def drawn(self, state: FitState) -> FitState:
        """All δ_s, then all −δ_s, at the centre, from the same random numbers every time."""
        settings, pairs = self.settings, self.settings.samples // 2
        if state.mode is None:
            state = replace(state, mode=(state.centre, state.z))
        # Straight draws that are to be curved come first, where none are curved yet.
        are_curved = state.curve_draws is not None or state.sample_draws is None
        if state.curved and are_curved and state.deviations is not None:
            return replace(state, is_drawing=True)
        both = state.centre.xi.new_empty(2 * pairs, len(state.centre.xi))
        mode = bare_centre(state)
        # Gradients are perturbed alike.
        known = state.sample_draws
        if known is None and state.evidence_draws is not None:
            known = first_rows(state.evidence_draws, pairs)
        # Samples need half the accuracy of gradients.
        solver = self.solver(state, 2.0 * settings.residual)
        solve = straight_pairs(mode, settings.seed, both, solver, known)
        curved = state.curved
        if settings.curved is None and not curved:
            curved = bends(mode, both[:pairs], self.at_once)
        return replace(
            state,
            deviations=both,
            sample_draws=solve.x,
            slowest=max(state.slowest, int(solve.steps.max())),
            unsolved=state.unsolved or not solve.converged,
            curved=curved,
            is_drawing=curved,
        )

    def curved(self, state: FitState) -> FitState:
        """More of the same δ_s along the curvature of ρ; after the last of them, all."""
        start, first, pairs = state.deviations, len(state.drawn), self.settings.samples // 2
        assert start is not None
        self.progress(_CURVING, first, len(start))
        state = self._more_curved(state, start)
        if len(state.drawn) < 2 * pairs:
            return state
        self.progress(_CURVING, len(start), len(start))
        deviations = torch.stack([xi for xi, _ in state.drawn]).sub_(state.centre.xi)
        curve_draws = torch.stack([z for _, z in state.drawn])
        return replace(
            state, deviations=deviations, curve_draws=curve_draws, drawn=(), is_drawing=False
        )

    def _more_curved(self, state: FitState, start: Tensor) -> FitState:
        """The next few curved draws of every rank, from deviations `start` (S, n) of all."""
        mode, first, world = bare_centre(state), len(state.drawn), state.problem.world
        which = range(first, min(first + self.together * world.size, len(start)))
        own, alone = which[world.share(len(which))], mode.apart()

        def make(part: slice) -> CurvedDraws:
            return self._curved_part(state, alone, start, own[part])

        made = in_groups(len(own), self.curved_at_once, make) if len(own) else []
        xi = torch.cat([start[:0], *(draws.xi for draws in made)])
        z = torch.cat([state.z.new_empty(0, len(state.z)), *(draws.z for draws in made)])
        drawn = (world.stacked(own, len(which)) for own in (xi, z))
        return replace(state, drawn=(*state.drawn, *zip(*drawn, strict=True)))

    def _curved_part(
        self, state: FitState, mode: Iterate, start: Tensor, which: range
    ) -> CurvedDraws:
        """Curved draws `which`, made by this rank alone."""
        settings, pairs = self.settings, self.settings.samples // 2
        pair = [s % pairs for s in which]
        own = Perturbations.of(state.problem, settings.seed, pair)
        sign = torch.tensor([1.0 if s < pairs else -1.0 for s in which]).to(state.z)[:, None]
        steps, residual = _CURVED.steps, _CURVED.residual
        if state.curve_draws is not None:
            z = state.curve_draws[which.start : which.stop]
        elif state.sample_draws is not None:
            z = sign * state.sample_draws[pair]
        else:
            z = state.z.new_zeros(len(pair), len(state.z))
            if self._is_near(state):
                steps, residual = 1, _SHORT_RESIDUAL
        accuracy = Accuracy(
            residual * settings.residual,
            _CURVED.decrease * len(state.problem.y),
            steps,
            settings.cg_steps,
        )
        how = accuracy, _apart(state), self.progress
        white, noise = sign * own.white, sign * own.noise
        return curved_draws(mode, white, noise, start[which.start : which.stop], z, *how)

    def _is_near(self, state: FitState) -> bool:
        """Whether the samples of the earlier fit are, with few new data and nothing learned."""
        assert self.start is not None
        return len(state.prior) == 0 and len(self.start.pull) >= (1.0 - _FEW) * len(state.problem.y)

    def solver(self, state: FitState, residual: float) -> DrawSolver:
        """For straight draws at the centre, to such a residual per datum."""
        how = self.settings.cg_steps, self.at_once, _apart(state), self.progress
        return DrawSolver(residual, *how, state.problem.world)


def bare_centre(state: FitState) -> Iterate:
    """The centre without deviations."""
    return Iterate.at(state.problem, state.centre.target, state.centre.xi)


def _apart(state: FitState) -> Preconditioner | None:
    """The preconditioner as a rank applies it to draws of its own."""
    return state.preconditioner and state.preconditioner.apart_from(state.problem.world)
