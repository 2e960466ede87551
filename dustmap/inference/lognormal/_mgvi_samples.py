"""The samples of a fit: straight deviations by the metric, and curved ones a few at a time.

Ranks divide draws among them: each makes its share, and all get all of them. Random numbers belong
to samples, so that a draw is the same whichever rank makes it. A rank alone makes them all.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_descent import Accuracy, relative
from dustmap.inference.lognormal._lognormal_energy import (
    Iterate,
    bends,
    determined_share,
    draws_at_once,
)
from dustmap.inference.lognormal._lognormal_problem import (
    LogNormalProblem,
    Preconditioner,
    metric_solver,
    shared_solve,
)
from dustmap.inference.lognormal._mgvi_curves import (
    Centres,
    CurvedDraws,
    curved_at_once,
    curved_draws,
)
from dustmap.inference.lognormal._mgvi_settings import TURNS, MGVISettings
from dustmap.inference.lognormal._mgvi_state import FitState, MGVIStart, mean_of_samples, samples_at
from dustmap.linalg import (
    AdaptiveBatch,
    KeptNumbers,
    Progress,
    SolveResult,
    unwatched,
)

#: Residuals of CG of straight deviations, in units of that of the settings: to see whether they
#: bend and what the data determine, and of those that stay straight, until both agree.
_STRAIGHT = (4.0, 2.0, 2.0)
#: Residual of CG of a curved sample, in units of that of the settings, and its decrease per datum.
#: Where that is ten times looser, rounding decides where descents end: a change of the data by 1e-7
#: then moves the map by 0.07 posterior standard deviations (rms) instead of 0.02.
_CURVED = Accuracy(residual=4.0, decrease=2e-3, steps=5)
#: The same of samples that are drawn again at the mean that follows from them.
_ROUGHLY = Accuracy(residual=8.0, decrease=1e-2, steps=3)
#: Data a number that they determine up to which decreases are for each datum, beyond for each of
#: these numbers.
_DETERMINED = 4.0
#: Where few data are new one step, with this residual of CG (same units), does for curved samples
#: of an earlier fit at the same hyperparameters, if it is as long as that of a linear response. Of
#: 5,000 stars, a tenth of them new, it takes them from 0.14 to 0.05 of a posterior standard
#: deviation (rms over the nodes) of where steps end. Of 12,000 that see less of a wider field 0.06
#: is left where coverage is above one half, and standard deviations of extinctions are 2 % too
#: large, for a third of the CG steps of what would end. Multipliers of that fit would not help:
#: where J has changed, A z is far longer than the right-hand side.
_SHORT_RESIDUAL = 8.0
#: Residual of CG of draws at most, in units of that of the settings and of √(γ/N), and how many
#: times larger that of rough ones is.
_FINE, _COARSE = 7.0, 2.0
#: Streams of the random numbers: the prior's draw and the noise.
_WHITE, _NOISE = 101, 102
#: What is counted while samples are made, and while they follow the curvature.
_DRAWS, _CURVING = "draws", "curved draws"


@final
@dataclass(frozen=True, eq=False)
class Perturbations:
    """ξ₀ ~ N(0, I) (K, n) and η ~ N(0, I) (K, N), functions of (seed, sample, position) only."""

    white: Tensor
    noise: Tensor

    @staticmethod
    def of(
        problem: LogNormalProblem,
        seed: int,
        samples: Sequence[int],
        white: Tensor | None = None,
        kept: KeptNumbers | None = None,
    ) -> "Perturbations":
        """Those of the given samples; white (K, n): where ξ₀ goes, if there is a place for it;
        kept: the numbers of earlier times."""
        like, count, numbers = problem.y, len(samples), kept or KeptNumbers(0)
        white = like.new_empty(count, problem.n_latent) if white is None else white
        noise = like.new_empty(count, len(like))
        for stream, drawn in ((_WHITE, white), (_NOISE, noise)):
            for row, sample in zip(drawn, samples, strict=True):
                row.copy_(numbers.draw(seed, stream, sample, len(row), like))
        return Perturbations(white, noise)


@final
@dataclass(frozen=True, eq=False)
class DrawSolver:
    """Solves for samples: residual (see `Accuracy`) and steps of CG at most; at_once: samples that
    are solved for together."""

    residual: float
    max_steps: int
    at_once: AdaptiveBatch
    preconditioner: Preconditioner | None = None
    progress: Progress = unwatched

    @torch.no_grad()
    def __call__(
        self, mean: Iterate, perturbations: Perturbations, start: Tensor | None = None
    ) -> SolveResult:
        """Multipliers (K, Q) of `metric_draws`, as accurate however many samples are solved
        together."""
        tangent = mean.problem.tangent(mean.log_density.exp(), mean.c)
        white, noise = perturbations.white, perturbations.noise
        root_weights, count = tangent.root_weights, len(white)

        def seen(part: slice) -> Tensor:
            return noise[part] - root_weights * tangent.matmul(white[part])

        solver = metric_solver(tangent, self.preconditioner)
        target = torch.cat(self.at_once.in_groups(count, seen))
        rtol = relative(self.residual, target)

        def solved(part: slice) -> SolveResult:
            self.progress(_DRAWS, part.start, count)
            return solver(
                target[part],
                x0=None if start is None else start[part],
                rtol=rtol[part],
                max_steps=self.max_steps,
                progress=self.progress,
            )

        ends = self.at_once.in_groups(count, solved)
        self.progress(_DRAWS, count, count)
        columns = zip(*((end.x, end.status, end.steps, end.residuals) for end in ends), strict=True)
        x, status, steps, residuals = (torch.cat(column) for column in columns)
        return SolveResult(x, status, steps, residuals, max(end.rtol for end in ends))


@torch.no_grad()
def metric_draws(
    mean: Iterate, perturbations: Perturbations, solver: DrawSolver, start: Tensor | None = None
) -> tuple[Tensor, SolveResult]:
    """δ_s ~ N(0, (I + Jᵀ Σ⁻¹ J)⁻¹) (K, n) at ξ̄, by perturbing draws of the prior (pathwise):

        δ = ξ₀ + Jᵀ W^½ z,   (I + W^½ J Jᵀ W^½) z = η − W^½ J ξ₀

    Where the solve stops early, δ keeps the spread of the prior: too wide, not too narrow.
    start: multipliers (K, Q) of the same perturbations at a centre nearby. δ takes the place of ξ₀
    in perturbations.white.
    """
    tangent = mean.problem.tangent(mean.log_density.exp(), mean.c)
    delta, solve = perturbations.white, solver(mean, perturbations, start)

    def move(part: slice) -> None:
        # In place as the last thing, so that running out of memory leaves ξ₀ as it was.
        delta[part].add_(tangent.step_of(solve.x[part]))

    solver.at_once.in_groups(len(delta), move)
    return delta, solve


@torch.no_grad()
def answered(mean: Iterate, perturbations: Perturbations, multipliers: Tensor) -> Tensor:
    """W^½ J δ_s (K, N) of the draws of these perturbations: η − z, or by products with J."""
    tangent = mean.problem.tangent(mean.log_density.exp(), mean.c)
    if tangent.nodes is None:
        return perturbations.noise - multipliers
    delta = perturbations.white + tangent.step_of(multipliers)
    return tangent.root_weights * tangent.matmul(delta)


def first_rows(draws: Tensor, count: int) -> Tensor:
    """Multipliers (count, Q): the first of draws (K, Q), and zeros where there are fewer."""
    known = draws[:count]
    return torch.nn.functional.pad(known, (0, 0, 0, count - len(known)))


@torch.no_grad()
def straight_pairs(
    mean: Iterate,
    seed: int,
    both: Tensor,
    solver: DrawSolver,
    start: Tensor | None,
    kept: KeptNumbers | None = None,
) -> SolveResult:
    """Write all δ_s of `metric_draws`, then all −δ_s, to `both` (2K, n); multipliers (K, Q)
    of all.

    start (K, Q): those of the same samples at a centre nearby; kept: numbers of earlier draws.
    """
    world, pairs = mean.problem.world, len(both) // 2
    straight = both[:pairs]

    def drawn(own: slice) -> SolveResult:
        samples, known = range(pairs)[own], None if start is None else start[own]
        perturbations = Perturbations.of(mean.problem, seed, samples, straight[own], kept)
        return metric_draws(mean.apart(), perturbations, solver, known)[1]

    solve = shared_solve(world, pairs, drawn)
    if world.size > 1:
        straight.copy_(world.stacked(straight[world.share(pairs)], pairs))
    torch.neg(straight, out=both[pairs:])
    return solve


@final
@dataclass(frozen=True, eq=False)
class Probe:
    """Multipliers (K, Q) of draws z_s ~ N(0, A⁻¹), A = I + W^½ J Jᵀ W^½, the variance (N,) of the
    mean response that follows, what of 1 the leverages of data leave (N,), the mean of their z_s²,
    and the most CG steps of one."""

    z: Tensor
    spread: Tensor
    rest: Tensor
    cg_steps: int


@torch.no_grad()
def probed(
    mean: Iterate,
    seed: int,
    count: int,
    group: int,
    solver: DrawSolver,
    start: Tensor | None,
    kept: KeptNumbers | None = None,
) -> Probe:
    """The K = count draws behind a gradient of the evidence, perturbed `group` at a time by a rank.

    W^½ J δ_s = η_s − z_s for δ_s = ξ₀ + Jᵀ W^½ z_s gives the spread. start (≤ K, N): those of a
    centre nearby; kept: numbers of earlier draws.
    """
    world, squares, rests = mean.problem.world, *mean.problem.y.new_zeros(2, len(mean.problem.y))
    draws, steps, alone = list[Tensor](), 0, mean.apart()
    begun = 0 if start is None else min(len(start), count)
    for part in _ranges((0, begun, count), group * world.size):
        known = None if start is None or begun < part.stop else start[part.start : part.stop]

        def drawn(own: slice, part: range = part, known: Tensor | None = known) -> SolveResult:
            perturbations = Perturbations.of(mean.problem, seed, part[own], kept=kept)
            solve = solver(alone, perturbations, None if known is None else known[own])
            seen = answered(alone, perturbations, solve.x)
            squares.add_(seen.square().sum(0))
            if alone.problem.nodes is not None:  # the multipliers of the data, W^½ J δ = η − z
                rests.add_((perturbations.noise - seen).square().sum(0))
            return solve

        solve = shared_solve(world, len(part), drawn)
        steps = max(steps, int(solve.steps.max()))
        draws.append(solve.x)
    z, spread = torch.cat(draws), world.total(squares) / count * mean.problem.noise
    of_data = mean.problem.nodes is None
    rest = z.double().square().mean(0) if of_data else world.total(rests) / count
    return Probe(z, spread, rest, steps)


def _ranges(ends: Sequence[int], size: int) -> Iterator[range]:
    """Ranges of at most `size` that follow one another, none of them across one of the ends."""
    for first, last in itertools.pairwise(ends):
        yield from (range(k, min(k + size, last)) for k in range(first, last, size))


@final
@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the samples of a fit, which ranks divide among them.

    at_once, curved_at_once: samples that a rank draws together, and curved ones; together: curved
    samples of a rank between two states; start: the earlier fit that it started from, if any;
    numbers: of all draws.
    """

    settings: MGVISettings
    progress: Progress
    at_once: AdaptiveBatch
    curved_at_once: AdaptiveBatch
    together: int
    start: MGVIStart | None = None
    numbers: KeptNumbers = field(default_factory=lambda: KeptNumbers(0))

    @staticmethod
    def of(
        settings: MGVISettings,
        problem: LogNormalProblem,
        progress: Progress,
        start: MGVIStart | None,
    ) -> "Sampler":
        """For a problem, on its device."""
        at_once = draws_at_once(max(settings.samples // 2, settings.draws))
        curved = curved_at_once(settings.samples, problem)
        numbers = KeptNumbers(settings.kept)
        return Sampler(settings, progress, at_once, curved, curved.size, start, numbers)

    def drawn(self, state: FitState) -> FitState:
        """All δ_s, then all −δ_s, at the centre, from the same random numbers every time."""
        settings, pairs = self.settings, self.settings.samples // 2
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
        curved = state.curved
        for residual in _STRAIGHT:
            solver = self.solver(state, residual)
            solve = straight_pairs(mode, settings.seed, both, solver, known, self.numbers)
            known = solve.x
            if state.means is None:  # Elsewhere than near the mode data determine less.
                share = determined_share(mode, both[:pairs], self.at_once)
                state = replace(state, share=min(1.0, share))
            if settings.curved is None and not curved:
                curved = bends(mode, both[:pairs], self.at_once)
            if curved:
                break
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
        deviations = samples_at(state.all_means, torch.stack([xi for xi, _ in state.drawn]), -1.0)
        curve_draws = torch.stack([z for _, z in state.drawn])
        return replace(
            state, deviations=deviations, curve_draws=curve_draws, drawn=(), is_drawing=False
        )

    def _more_curved(self, state: FitState, start: Tensor) -> FitState:
        """The next few curved draws of every rank, from deviations `start` (S, n) of all."""
        first, world = len(state.drawn), state.problem.world
        which = range(first, min(first + self.together * world.size, len(start)))
        own = which[world.share(len(which))]

        def make(part: slice) -> CurvedDraws:
            return self._curved_part(state, start, own[part])

        made = self.curved_at_once.in_groups(len(own), make) if len(own) else []
        xi = torch.cat([start[:0], *(draws.xi for draws in made)])
        z = torch.cat([state.z.new_empty(0, len(state.z)), *(draws.z for draws in made)])
        drawn = (world.stacked(own, len(which)) for own in (xi, z))
        slowest = max([state.slowest, *(draws.slowest for draws in made)])
        unsolved = sum(int((~draws.solved).sum()) for draws in made)
        slowest, missed = world.gathered(torch.tensor([[slowest], [unsolved]])).amax(1).tolist()
        return replace(
            state,
            drawn=(*state.drawn, *zip(*drawn, strict=True)),
            slowest=slowest,
            unsolved=missed > 0 or (first > 0 and state.unsolved),
        )

    def _curved_part(self, state: FitState, start: Tensor, which: range) -> CurvedDraws:
        """Curved draws `which`, made by this rank alone."""
        settings, pairs = self.settings, self.settings.samples // 2
        pair = [s % pairs for s in which]
        own = Perturbations.of(state.problem, settings.seed, pair, kept=self.numbers)
        sign = torch.tensor([1.0 if s < pairs else -1.0 for s in which]).to(state.z)[:, None]
        numbers = mean_of_samples(settings.samples, state.count)[which.start : which.stop]
        centres = Centres.of(state.problem.apart(), state.all_means, numbers)
        wanted, coarse = (_CURVED, 1.0) if self._stay(state) else (_ROUGHLY, _COARSE)
        residual = fine_residual(state, wanted.residual, coarse)
        near = False
        if state.curve_draws is not None:
            z = state.curve_draws[which.start : which.stop]
        elif state.sample_draws is not None:
            z = sign * state.sample_draws[pair]
        else:
            z = state.z.new_zeros(len(pair), len(state.z))
            near = state.is_near(self.start, self.settings)
            residual = _SHORT_RESIDUAL if near else residual
        accuracy = Accuracy(
            residual * settings.residual,
            wanted.decrease * len(state.problem.y) * min(1.0, _DETERMINED * state.share),
            wanted.steps,
            settings.cg_steps,
        )
        how = accuracy, _apart(state), self.progress
        white, noise = own.white.mul_(sign), own.noise.mul_(sign)
        first = start[which.start : which.stop]
        return curved_draws(centres, white, noise, first, z, *how, near=near)

    def _stay(self, state: FitState) -> bool:
        """Whether the next draws are perhaps the last, of a fit that no other follows: they are
        drawn accurately."""
        if state.means is not None and not state.is_near(self.start, self.settings):
            return state.turn >= TURNS - 2
        return self.settings.refinements == 0 or state.turn > 0 or self.start is not None

    def solver(self, state: FitState, residual: float) -> DrawSolver:
        """For straight draws at the centre; residual: of CG in units of that of the settings."""
        how = self.settings.cg_steps, self.at_once, _apart(state), self.progress
        left = fine_residual(state, residual) * self.settings.residual
        return DrawSolver(left, *how)


def bare_centre(state: FitState) -> Iterate:
    """The centre without deviations."""
    return Iterate.at(state.problem, state.centre.xi)


def _apart(state: FitState) -> Preconditioner | None:
    """The preconditioner as a rank applies it to draws of its own."""
    return state.preconditioner and state.preconditioner.apart_from(state.problem.world)


def fine_residual(state: FitState, wanted: float, coarse: float = 1.0) -> float:
    """Residual of CG per datum for one of `wanted`, both in units of that of the settings.

    coarse: how many times larger than `_FINE` √(γ/N) it may be.

    A draw that leaves r per datum is off by r² N in ‖W^½ J δ‖², whose mean is γ: the variances
    of its responses come out 0.7 r² N/γ too large (300,000 stars: 171,000 data that determine
    7,300 numbers; r = 0.2, 0.1 and 0.05: 0.68, 0.17 and 0.04), of which 0.03 remains. Among
    nodes the error is measured as the field has it.
    """
    if state.problem.nodes is not None:
        return wanted
    share = max(state.share, 1.0 / len(state.problem.y))
    return min(wanted, coarse * _FINE * math.sqrt(share))
