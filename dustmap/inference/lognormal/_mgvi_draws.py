"""Deviations of posterior samples: Gaussian by the metric, or following the field's curvature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_energy import Iterate, relative_to
from dustmap.inference.lognormal._lognormal_problem import (
    LogNormalProblem,
    Preconditioner,
    metric_solver,
)
from dustmap.linalg import (
    AbstractWorld,
    AdaptiveBatch,
    Alone,
    KeyedNormal,
    Progress,
    SolveResult,
    unwatched,
)

#: Streams of the random numbers: the prior's draw and the noise.
_WHITE, _NOISE = 101, 102
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
class KeptNumbers:
    """Random numbers of samples, kept for the next time as far as `most` bytes go.

    They are the same whether they are kept or not; samples are drawn again and again.
    """

    def __init__(self, most: int) -> None:
        self._left, self._kept = most, dict[tuple[int, int, int], Tensor]()

    def draw(self, seed: int, stream: int, sample: int, size: int, like: Tensor) -> Tensor:
        """Return the first `size` numbers of a sample, in dtype and on the device of `like`."""
        key = seed, stream, sample
        known = self._kept.get(key)
        if known is not None and len(known) >= size:
            return known[:size]
        made = KeyedNormal(seed, stream).draw(sample, size, like.dtype, like.device)
        more = made.nbytes - (0 if known is None else known.nbytes)
        if more <= self._left:
            self._left -= more
            self._kept[key] = made
        return made


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
    are solved for together; world: ranks that solve for others at the same time, to one relative
    residual."""

    residual: float
    max_steps: int
    at_once: AdaptiveBatch
    preconditioner: Preconditioner | None = None
    progress: Progress = unwatched
    world: AbstractWorld = field(default_factory=Alone)

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
        target = torch.cat(in_groups(count, self.at_once, seen))
        sizes = self.world.gathered(target.norm(dim=-1))
        rtol = relative_to(self.residual, sizes, target.shape[-1])

        def solved(part: slice) -> SolveResult:
            self.progress(_DRAWS, part.start, count)
            return solver(
                target[part],
                x0=None if start is None else start[part],
                rtol=rtol,
                max_steps=self.max_steps,
                progress=self.progress,
            )

        ends = in_groups(count, self.at_once, solved)
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
    start: multipliers (K, Q) of the same perturbations at a centre nearby. δ takes the place of ξ₀
    in perturbations.white.
    """
    tangent = mean.problem.tangent(mean.log_density.exp(), mean.c)
    delta, solve = perturbations.white, solver(mean, perturbations, start)

    def move(part: slice) -> None:
        # In place as the last thing, so that running out of memory leaves ξ₀ as it was.
        delta[part].add_(tangent.step_of(solve.x[part]))

    in_groups(len(delta), solver.at_once, move)
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


def monte_carlo_error(mean: Iterate) -> float:
    """Error of a mean response of S samples, rms over the data in units of their noise:

    (mean_n Var_s(f_sn) / (S σ_n²))^½
    """
    responses = mean.responses
    variance = (responses.var(0) / mean.problem.noise).mean() / len(responses)
    return float(variance.sqrt())


@torch.no_grad()
def shared_solve(
    world: AbstractWorld, count: int, solve: Callable[[slice], SolveResult]
) -> SolveResult:
    """Solve for `count` right-hand sides, every rank for its share of them."""
    own = solve(world.share(count))
    columns = own.x, own.status, own.steps, own.residuals
    x, status, steps, residuals = (world.stacked(column, count) for column in columns)
    return SolveResult(x, status, steps, residuals, own.rtol)


def in_groups(count: int, at_once: AdaptiveBatch, step: Callable[[slice], T]) -> list[T]:
    """step of one group of samples after the other, in their order; of an empty one where there
    are none."""
    results = list[T]()
    first = 0
    while first < count or not results:

        def attempt(size: int, first: int = first) -> tuple[int, T]:
            part = slice(first, min(first + size, count))
            return part.stop, step(part)

        first, made = at_once.attempt(attempt)
        results.append(made)
    return results
