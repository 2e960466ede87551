"""Draws that the ranks of a fit divide among them: each makes its share, and all get all of them.

Random numbers belong to samples, so that a draw is the same whichever rank makes it. A rank alone
makes them all.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_draws import (
    DrawSolver,
    Perturbations,
    answered,
    draws_at_once,
    in_groups,
    metric_draws,
)
from dustmap.linalg import AbstractWorld, AdaptiveBatch, SolveResult

#: Straight deviations that spread the responses by this much more than the linear model are curved.
_LARGEST_EXCESS = 0.03
#: Samples that are turned into fields at once.
_FIELDS = 8


@torch.no_grad()
def shared_solve(
    world: AbstractWorld, count: int, solve: Callable[[slice], SolveResult]
) -> SolveResult:
    """Solve for `count` right-hand sides, every rank for its share of them."""
    own = solve(world.share(count))
    columns = own.x, own.status, own.steps, own.residuals
    x, status, steps, residuals = (world.stacked(column, count) for column in columns)
    return SolveResult(x, status, steps, residuals, own.rtol)


@torch.no_grad()
def straight_pairs(
    mean: Iterate, seed: int, both: Tensor, solver: DrawSolver, start: Tensor | None
) -> SolveResult:
    """Write all δ_s of `metric_draws`, then all −δ_s, to `both` (2K, n); multipliers (K, Q)
    of all.

    start (K, Q): those of the same samples at a centre nearby.
    """
    world, pairs = mean.problem.world, len(both) // 2
    straight = both[:pairs]

    def drawn(own: slice) -> SolveResult:
        samples, known = range(pairs)[own], None if start is None else start[own]
        perturbations = Perturbations.of(mean.problem, seed, samples, straight[own])
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
    mean response that follows, and the most CG steps of one."""

    z: Tensor
    spread: Tensor
    cg_steps: int


@torch.no_grad()
def probed(
    mean: Iterate, seed: int, count: int, group: int, solver: DrawSolver, start: Tensor | None
) -> Probe:
    """The K = count draws behind a gradient of the evidence, perturbed `group` at a time by a rank.

    W^½ J δ_s = η_s − z_s for δ_s = ξ₀ + Jᵀ W^½ z_s gives the spread. start (≤ K, N): those of a
    centre nearby.
    """
    world, squares = mean.problem.world, torch.zeros_like(mean.problem.y)
    draws, steps, alone = list[Tensor](), 0, mean.apart()
    begun = 0 if start is None else min(len(start), count)
    for part in _ranges((0, begun, count), group * world.size):
        known = None if start is None or begun < part.stop else start[part.start : part.stop]

        def drawn(own: slice, part: range = part, known: Tensor | None = known) -> SolveResult:
            perturbations = Perturbations.of(mean.problem, seed, part[own])
            solve = solver(alone, perturbations, None if known is None else known[own])
            squares.add_(answered(alone, perturbations, solve.x).square().sum(0))
            return solve

        solve = shared_solve(world, len(part), drawn)
        steps = max(steps, int(solve.steps.max()))
        draws.append(solve.x)
    return Probe(torch.cat(draws), world.total(squares) / count * mean.problem.noise, steps)


def _ranges(ends: Sequence[int], size: int) -> Iterator[range]:
    """Ranges of at most `size` that follow one another, none of them across one of the ends."""
    for first, last in itertools.pairwise(ends):
        yield from (range(k, min(k + size, last)) for k in range(first, last, size))


def bends(mean: Iterate, straight: Tensor, at_once: AdaptiveBatch | None = None) -> bool:
    """Whether straight deviations leave the data at second order."""
    # Of responses that overflow the excess is no number.
    return not excess_spread(mean, straight, at_once) <= _LARGEST_EXCESS


@torch.no_grad()
def excess_spread(mean: Iterate, straight: Tensor, at_once: AdaptiveBatch | None = None) -> float:
    """By how much ±δ_s (K, n) spread the responses further than the linear model does.

        [mean_n Var_s(L ρ(ξ̄ ± δ_s))_n / σ_n²]^½ / [mean_n Var_s(J δ_s)_n / σ_n²]^½ − 1

    The metric is that of the linear model: what second order adds is not in the posterior.
    """
    world, count, problem = mean.problem.world, len(straight), mean.problem.apart()
    at_once = draws_at_once(count) if at_once is None else at_once
    own = straight[world.share(count)]
    tangent = problem.tangent(mean.log_density.exp(), mean.c)

    def response(part: slice, sign: int) -> Tensor:
        moved = torch.add(mean.xi, own[part], alpha=sign)
        density = (problem.log_mean + problem.root.matmul(moved)).exp()
        return problem.response(density, moved)

    sides = [in_groups(len(own), at_once, partial(response, sign=s)) for s in (1, -1)]
    bent = torch.cat([*sides[0], *sides[1]])
    linear = torch.cat(in_groups(len(own), at_once, lambda part: tangent.matmul(own[part])))
    centre = world.total(bent.sum(0)) / (2 * count)
    squares = (
        world.total((bent - centre).square().sum(0)) / (2 * count),
        world.total(linear.square().sum(0)) / count,
    )
    spread, expected = ((square / problem.noise).mean() for square in squares)
    return float((spread / expected).sqrt()) - 1.0


@torch.no_grad()
def fields_of(problem: LogNormalProblem, centre: Tensor, deviations: Tensor) -> Tensor:
    """Log-densities (S, M) at ξ̄ + δ_s for a centre (n,) and deviations (S, n)."""
    own = deviations[problem.world.share(len(deviations))]
    parts = (centre + part for part in torch.split(own, _FIELDS))
    fields = torch.cat([problem.log_mean + problem.root.matmul(xi) for xi in parts])
    return problem.world.stacked(fields, len(deviations))


@torch.no_grad()
def explained_share(
    problem: LogNormalProblem, seed: int, deviations: Tensor, fields: Tensor, centre: Tensor
) -> Tensor:
    """Σ_s g_s² / Σ_s (g_s² + d_s²) (M,), the share of the prior's variance that the data explain.

    d_s: deviation of field s (2K, M) from `centre` (M,); g_s = ±R ε₀_s − R δ_s: what the data have
    taken from the draw of the prior that deviation ±δ_s (2K, n) is made of. They are independent
    and their variances add up to the prior's. Deviations are pairs, one after the other.
    """
    root, own, world = problem.model.prior.root(), problem.root.n_white, problem.world
    sums = torch.zeros_like(centre).repeat(2, 1)
    for s in range(len(deviations) // 2)[world.share(len(deviations) // 2)]:
        white = Perturbations.of(problem, seed, range(s, s + 1)).white[0, :own]
        for row, sign in ((2 * s, 1.0), (2 * s + 1, -1.0)):
            sums[0] += root.matmul(sign * white - deviations[row, :own]).square()
            sums[1] += (fields[row] - centre).square()
    taken, left = world.total(sums)
    share: Tensor = taken / (taken + left)
    return share
