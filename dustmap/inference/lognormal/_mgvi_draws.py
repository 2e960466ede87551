"""Deviations of posterior samples: Gaussian by the metric, or following the field's curvature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
from torch import Tensor

from dustmap.inference.lognormal._gram_preconditioner import GramPreconditioner
from dustmap.inference.lognormal._lognormal_energy import (
    Iterate,
    LogNormalProblem,
    relative,
)
from dustmap.linalg import (
    AdaptiveBatch,
    KeyedNormal,
    Progress,
    SolveResult,
    pcg,
    unwatched,
)

#: Streams of the random numbers: the prior's draw and the noise.
_WHITE, _NOISE = 101, 102
#: Straight deviations that spread the responses by this much more than the linear model are curved.
_LARGEST_EXCESS = 0.03
#: Curved samples at once on a CPU: a sparse product with 8 vectors takes as long as with one.
_CURVED_TOGETHER = 8
#: What helps where even few samples are too many.
_ADVICE = "set a smaller fit.samples or box, or a larger grid.spacing"
#: What is counted while they are made.
_DRAWS = "draws"

T = TypeVar("T")


def draws_at_once(count: int) -> AdaptiveBatch:
    """All samples at once, fewer where memory runs out."""
    return AdaptiveBatch("samples drawn together", count, _ADVICE)


def curved_at_once(count: int, device: torch.device) -> AdaptiveBatch:
    """Few samples on a CPU, where more share no more of the work; all at once on an accelerator."""
    few = min(count, _CURVED_TOGETHER) if device.type == "cpu" else count
    return AdaptiveBatch("samples that are curved together", few, _ADVICE)


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
    ) -> "Perturbations":
        """Those of the given samples; white (K, n): where ξ₀ goes, if there is a place for it."""
        like, count = problem.y, len(samples)
        white = like.new_empty(count, problem.n_latent) if white is None else white
        noise = like.new_empty(count, len(like))
        for stream, drawn in ((_WHITE, white), (_NOISE, noise)):
            numbers = KeyedNormal(seed, stream)
            for row, sample in zip(drawn, samples, strict=True):
                row.copy_(numbers.draw(sample, len(row), like.dtype, like.device))
        return Perturbations(white, noise)


@torch.no_grad()
def explained_share(
    problem: LogNormalProblem, seed: int, deviations: Tensor, fields: Tensor, centre: Tensor
) -> Tensor:
    """Σ_s g_s² / Σ_s (g_s² + d_s²) (M,), the share of the prior's variance that the data explain.

    d_s: deviation of field s (2K, M) from `centre` (M,); g_s = ±R ε₀_s − R δ_s: what the data have
    taken from the draw of the prior that deviation ±δ_s (2K, n) is made of. They are independent
    and their variances add up to the prior's. Deviations are pairs, one after the other.
    """
    root, own = problem.model.prior.root(), problem.root.n_white
    taken, left = torch.zeros_like(centre), torch.zeros_like(centre)
    for s in range(len(deviations) // 2):
        white = Perturbations.of(problem, seed, range(s, s + 1)).white[0, :own]
        for row, sign in ((2 * s, 1.0), (2 * s + 1, -1.0)):
            taken += root.matmul(sign * white - deviations[row, :own]).square()
            left += (fields[row] - centre).square()
    share: Tensor = taken / (taken + left)
    return share


@final
@dataclass(frozen=True, eq=False)
class DrawSolver:
    """Solves for samples: residual (see `Accuracy`) and steps of CG at most; at_once: samples that
    are solved for together."""

    residual: float
    max_steps: int
    at_once: AdaptiveBatch
    preconditioner: GramPreconditioner | None = None
    progress: Progress = unwatched

    @torch.no_grad()
    def __call__(
        self, mean: Iterate, perturbations: Perturbations, start: Tensor | None = None
    ) -> SolveResult:
        """z (K, N) of `metric_draws`, as accurate however many samples are solved together."""
        tangent = mean.problem.tangent(mean.log_density.exp(), mean.c)
        white, noise = perturbations.white, perturbations.noise
        root_weights, gram, count = tangent.noise.rsqrt(), tangent.gram(), len(white)

        def seen(part: slice) -> Tensor:
            return noise[part] - root_weights * tangent.matmul(white[part])

        near = self.preconditioner and self.preconditioner.at(tangent)
        target = torch.cat(_in_groups(count, self.at_once, seen))
        rtol = relative(self.residual, target)

        def solved(part: slice) -> SolveResult:
            self.progress(_DRAWS, part.start, count)
            return pcg(
                gram,
                target[part],
                preconditioner=near,
                x0=None if start is None else start[part],
                rtol=rtol,
                max_steps=self.max_steps,
                progress=self.progress,
            )

        ends = _in_groups(count, self.at_once, solved)
        self.progress(_DRAWS, count, count)
        columns = zip(*((end.x, end.status, end.steps, end.residuals) for end in ends), strict=True)
        x, status, steps, residuals = (torch.cat(column) for column in columns)
        return SolveResult(x, status, steps, residuals, rtol)


@torch.no_grad()
def metric_draws(
    mean: Iterate, perturbations: Perturbations, solver: DrawSolver, start: Tensor | None = None
) -> tuple[Tensor, SolveResult]:
    """δ_s ~ N(0, (I + Jᵀ Σ⁻¹ J)⁻¹) (K, n) at ξ̄, by perturbing draws of the prior (pathwise):

        δ = ξ₀ + Jᵀ W^½ z,   (I + W^½ J Jᵀ W^½) z = η − W^½ J ξ₀

    Where the solve stops early, δ keeps the spread of the prior: too wide, not too narrow.
    start: z (K, N) of the same perturbations at a centre nearby. δ takes the place of ξ₀ in
    perturbations.white.
    """
    tangent = mean.problem.tangent(mean.log_density.exp(), mean.c)
    delta, solve = perturbations.white, solver(mean, perturbations, start)
    pulls = tangent.noise.rsqrt() * solve.x

    def move(part: slice) -> None:
        # In place as the last thing, so that running out of memory leaves ξ₀ as it was.
        delta[part].add_(tangent.rmatmul(pulls[part]))

    _in_groups(len(delta), solver.at_once, move)
    return delta, solve


def first_rows(draws: Tensor, count: int) -> Tensor:
    """z (count, N): the first of draws (K, N), and zeros where there are fewer."""
    known = draws[:count]
    return torch.nn.functional.pad(known, (0, 0, 0, count - len(known)))


def monte_carlo_error(mean: Iterate) -> float:
    """Error of a mean response of S samples, rms over the data in units of their noise:

    (mean_n Var_s(f_sn) / (S σ_n²))^½
    """
    responses = mean.responses
    variance = (responses.var(0) / mean.problem.noise).mean() / len(responses)
    return float(variance.sqrt())


@final
@dataclass(frozen=True, eq=False)
class Probe:
    """Draws z_s ~ N(0, A⁻¹) (K, N), A = I + W^½ J Jᵀ W^½, the variance (N,) of the mean response
    that follows, and the most CG steps of one."""

    z: Tensor
    spread: Tensor
    cg_steps: int


@torch.no_grad()
def probed(
    mean: Iterate, seed: int, count: int, group: int, solver: DrawSolver, start: Tensor | None
) -> Probe:
    """The K = count draws behind a gradient of the evidence, perturbed `group` at a time.

    W^½ J δ_s = η_s − z_s for δ_s = ξ₀ + Jᵀ W^½ z_s gives the spread. start (≤ K, N): those of a
    centre nearby.
    """
    draws, squares, steps = list[Tensor](), torch.zeros_like(mean.problem.y), 0
    for first in range(0, count, group):
        part = range(first, min(first + group, count))
        known = None if start is None or len(start) < part.stop else start[first : part.stop]
        perturbations = Perturbations.of(mean.problem, seed, part)
        solve = solver(mean, perturbations, known)
        squares += (perturbations.noise - solve.x).square().sum(0)
        steps = max(steps, int(solve.steps.max()))
        draws.append(solve.x)
    return Probe(torch.cat(draws), squares / count * mean.problem.noise, steps)


def _in_groups(count: int, at_once: AdaptiveBatch, step: Callable[[slice], T]) -> list[T]:
    """step of one group of samples after the other, in their order."""
    found = list[T]()
    first = 0
    while first < count:

        def attempt(size: int, first: int = first) -> tuple[int, T]:
            part = slice(first, min(first + size, count))
            return part.stop, step(part)

        first, made = at_once.attempt(attempt)
        found.append(made)
    return found


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
    problem, tangent = mean.problem, mean.problem.tangent(mean.log_density.exp(), mean.c)
    at_once = draws_at_once(len(straight)) if at_once is None else at_once

    def response(part: slice, sign: int) -> Tensor:
        moved = torch.add(mean.xi, straight[part], alpha=sign)
        density = (problem.log_mean + problem.root.matmul(moved)).exp()
        return problem.response(density, moved)

    sides = [_in_groups(len(straight), at_once, partial(response, sign=s)) for s in (1, -1)]
    bent = torch.cat([*sides[0], *sides[1]])
    linear = torch.cat(
        _in_groups(len(straight), at_once, lambda part: tangent.matmul(straight[part]))
    )
    squares = (bent - bent.mean(0)).square().mean(0), linear.square().mean(0)
    spread, expected = ((square / problem.noise).mean() for square in squares)
    return float((spread / expected).sqrt()) - 1.0
