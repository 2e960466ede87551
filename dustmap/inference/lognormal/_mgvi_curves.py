"""Deviations of posterior samples along the curvature of the field."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_descent import (
    FAR,
    HALVINGS,
    ROUGH,
    TIGHTER,
    TIGHTEST,
    Accuracy,
    vertex,
)
from dustmap.inference.lognormal._lognormal_energy import ADVICE
from dustmap.inference.lognormal._lognormal_problem import (
    LogNormalProblem,
    Preconditioner,
    metric_solver,
)
from dustmap.inference.lognormal._tangent import Tangent
from dustmap.linalg import (
    AdaptiveBatch,
    Progress,
    SolveResult,
    SolveStatus,
    chunks,
    numbers_together,
    unwatched,
)

#: Parts of the first deviation that a sample may start from.
_PARTS = (1.0, 0.5, 0.25, 0.0)
#: Largest change of the log-density that a step may ask for: where data say little samples move by
#: several, and the energy decides whether that is too far.
_REACH = 8.0
#: How far from 1 the lowest energy along a whole Gauss-Newton step is where a response is linear.
_LINEAR = 0.3
#: Curved samples at once on a CPU: products of 32 share rows and vectors of the preconditioner, and
#: take half as long as those of 4 times 8 while vectors of so many numbers in all stay in cache. A
#: fit goes on from what it has kept after every such group, too, so that of more it takes fewer.
_CURVED_TOGETHER, _FEWEST, _NUMBERS = 32, 8, 2**22
#: Products of vectors that are summed at once, in float64: larger temporaries take longer.
_SUMMED_AT_ONCE = 2**17


def curved_at_once(count: int, problem: LogNormalProblem) -> AdaptiveBatch:
    """A rank's part of `count` samples: on a CPU groups of equal size, smaller where vectors are
    longer; all at once on an accelerator."""
    size = -(-count // problem.world.size)
    if problem.y.device.type == "cpu":
        longest = max(len(problem.y), len(problem.log_mean), 1)
        in_cache = -(-size // max(1, round(size * longest / _NUMBERS)))
        groups = -(-size // min(_CURVED_TOGETHER, max(_FEWEST, in_cache)))
        size = -(-size // groups)
    return AdaptiveBatch("samples that are curved together", size, ADVICE)


@final
@dataclass(frozen=True, eq=False)
class CurvedDraws:
    """Ends of K descents: ξ_s (K, n), multipliers z_s (K, Q) for a warm start, CG steps and
    Gauss-Newton steps of every sample (K,), and whether its last step was solved for (K,)."""

    xi: Tensor
    z: Tensor
    cg_steps: Tensor
    steps: Tensor
    solved: Tensor

    @property
    def slowest(self) -> int:
        """CG steps of a solve of the sample that took the most of them."""
        return int((self.cg_steps // self.steps.clamp_min(1)).max())


@final
@dataclass(frozen=True, eq=False)
class Centres:
    """Means ξ̄ (n,) of all samples, or (K, n) of each, and their log-densities (..., M)."""

    problem: LogNormalProblem
    xi: Tensor
    log_density: Tensor

    @staticmethod
    @torch.no_grad()
    def of(problem: LogNormalProblem, means: Tensor, which: Tensor) -> "Centres":
        """Of samples that belong to these rows (K,) of means (L, n)."""
        density = problem.log_density(means)
        if len(means) == 1:
            return Centres(problem, means[0], density[0])
        return Centres(problem, means[which], density[which])

    @property
    def c(self) -> Tensor:
        """(c, c') (..., G), the last variables of ξ̄."""
        return self.xi[..., self.problem.root.n_field :]


@torch.no_grad()
def curved_draws(
    mean: Centres,
    white: Tensor,
    noise: Tensor,
    start: Tensor,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: Preconditioner | None,
    progress: Progress = unwatched,
    *,
    near: bool = False,
) -> CurvedDraws:
    """K deviations that honour the curvature of ρ: the ξ_s that minimise

        E_s(ξ) = ½ ‖ξ − ξ̄ − ξ₀‖² + ½ ‖f(ξ) − f(ξ̄) − Σ^½ η‖²_{Σ⁻¹}

    for ξ₀ = white[s] (n,) and η = noise[s] (N,). For a linear response these are `metric_draws`.
    Here a sample stays within the noise of the data, where the straight deviation leaves it at
    second order. geoVI (Frank, Leike & Enßlin 2021) solves the same equation with the Jacobian of
    ξ̄ in place of the sample's own; with the sample's own it is the gradient of an energy, so that
    every step can be made to lower it.

    Every sample has its own Gauss-Newton steps (see `descend`), lengths and end; their linear
    systems, I + W^½ L ρ_s K ρ_s Lᵀ W^½ at the sample's own density, are solved together, since
    rows and transforms that K vectors share cost little more than those of one.

    Between the first ξ and the last all of it happens at the nodes, where vectors are several times
    shorter: with a = ξ̄ + ξ₀ and e = ξ − a, a step leads to e₁ = Tᵀ v, v = ρ Lᵀ W^½ z, whose field
    and products are T e₁ = T Tᵀ v, ‖e₁‖² = v · T e₁ and e · e₁ = T e · v.

    start (K, n): first deviations, of which each sample takes the part with the lowest energy:
    straight ones overshoot where the density is uncertain by factors; z (K, Q): first multipliers;
    near: whether a first step that is as long as that of a linear response is the last.
    """
    problem = mean.problem
    centre = problem.response(mean.log_density.exp(), mean.xi)
    target = centre + problem.noise.sqrt() * noise
    part = _part(mean, target, white, start)[:, None]
    samples = _Samples.first(problem, target, mean.xi + white, part * start - white, z)
    made = _descended(samples, accuracy, preconditioner, progress, near)
    # e₀ = t δ − ξ₀ is made again: vectors of the field's variables are the largest of the fit.
    share = samples.share[:, None]
    moved = problem.root.rmatmul(samples.pull).addcmul_(share * part, start)
    moved.addcmul_(share, white, value=-1.0)
    moved[:, problem.root.n_field :] = samples.c
    return CurvedDraws(moved.add_(white).add_(mean.xi), samples.z, *made)


def _part(mean: Centres, target: Tensor, white: Tensor, start: Tensor) -> Tensor:
    """The t (K,) of `_PARTS` with the lowest energy at ξ̄ + t δ_s, for δ_s = start (K, n)."""
    problem, n = mean.problem, mean.problem.root.n_field
    along, c = problem.root.matmul(start), start[:, n:]
    squares = _dots(white, white), _dots(white, start), _dots(start, start)
    energies = []
    for t in _PARTS:
        density = (mean.log_density + t * along).exp_()
        response = problem.measured(problem.rows.matmul(density), mean.c + t * c)
        misfit = ((target - response).square() / problem.noise).sum(-1, dtype=torch.float64)
        energy = 0.5 * (misfit + squares[0] - 2.0 * t * squares[1] + t * t * squares[2])
        energies.append(torch.where(density.amax(-1).isfinite(), energy, math.inf))
    best = torch.stack(energies).nan_to_num(math.inf, math.inf).argmin(0)
    return torch.tensor(_PARTS).to(start)[best]


@final
@dataclass(frozen=True, eq=False)
class _Samples:
    """K samples on their way from e₀ = ξ_first − a, at the nodes.

    target t (K, N); anchor H β₀ + T a (K, M); anchor_c (K, G), variables of groups in a; shift T e
    (K, M) and c (K, G), variables of groups in e; pull V (K, M) and share κ (K,), e = κ e₀ + Tᵀ V;
    strain ‖e‖² (K,), float64; z: multipliers (K, Q). They are written in place while samples move.
    """

    problem: LogNormalProblem
    target: Tensor
    anchor: Tensor
    anchor_c: Tensor
    shift: Tensor
    c: Tensor
    pull: Tensor
    share: Tensor
    strain: Tensor
    z: Tensor

    @staticmethod
    def first(
        problem: LogNormalProblem, target: Tensor, anchor: Tensor, first: Tensor, z: Tensor
    ) -> "_Samples":
        """Begin at anchors a (K, n) and e₀ (K, n)."""
        n, shift = problem.root.n_field, problem.root.matmul(first)
        return _Samples(
            problem,
            target,
            problem.log_density(anchor),
            anchor[:, n:],
            shift,
            first[:, n:].clone(),
            torch.zeros_like(shift),
            torch.ones_like(shift[:, 0]),
            _dots(first, first),
            z.clone(),
        )

    def taken(self, which: Tensor) -> "_Samples":
        """Some of the samples (W,), ascending: copied, or all of them in the same memory."""
        return _Samples(self.problem, *(_taken(getattr(self, name), which) for name in _TENSORS))

    def put(self, which: Tensor, others: "_Samples") -> None:
        """Write what steps have changed of others in the places `which` (W,)."""
        for name in _MOVING:
            getattr(self, name)[which] = getattr(others, name)

    @cached_property
    def density(self) -> Tensor:
        """ρ_s (K, M)."""
        return (self.anchor + self.shift).exp_()

    @cached_property
    def seen(self) -> Tensor:
        """L ρ_s (K, N)."""
        return self.problem.rows.matmul(self.density)

    @cached_property
    def tangents(self) -> Tangent:
        """The responses linearised at ξ_s."""
        return self.problem.tangent(self.density, self.anchor_c + self.c, self.seen)

    @cached_property
    def residual(self) -> Tensor:
        """t − f(ξ_s) (K, N)."""
        return self.target - self.problem.measured(self.seen, self.anchor_c + self.c)

    @cached_property
    def energy(self) -> Tensor:
        """E_s (K,), float64; infinite where a density overflows."""
        misfit = (self.residual.square() / self.problem.noise).sum(-1, dtype=torch.float64)
        energy = 0.5 * (misfit + self.strain)
        finite = energy.isfinite() & self.density.amax(-1).isfinite()
        return torch.where(finite, energy, math.inf)

    def misfit(self) -> Tensor:
        """Root mean square residual of every sample in units of the noise (K,)."""
        return (self.residual * self.problem.noise.rsqrt()).square().mean(-1).sqrt()


#: The tensors of `_Samples`, in their order, and those that a step changes.
_TENSORS = tuple(each.name for each in fields(_Samples) if each.name != "problem")
_MOVING = ("shift", "c", "pull", "share", "strain")


@final
@dataclass(frozen=True, eq=False)
class _Step:
    """Where a whole Gauss-Newton step leads, e₁ = (Tᵀ v, c₁): pull v (K, M), shift T e₁ (K, M), c₁
    (K, G); square ‖e₁‖² and across e · e₁ (K,), float64."""

    pull: Tensor
    shift: Tensor
    c: Tensor
    square: Tensor
    across: Tensor

    @staticmethod
    def of(samples: _Samples) -> "_Step":
        """e₁ = Jᵀ W^½ z of the samples' multipliers."""
        tangents = samples.tangents
        pull, c = tangents.pull_of(samples.z)
        shift = tangents.covaried(pull)
        square = _dots(pull, shift) + _dots(c, c)
        return _Step(pull, shift, c, square, _dots(pull, samples.shift) + _dots(c, samples.c))

    def ahead(self, samples: _Samples, which: Tensor, length: Tensor) -> _Samples:
        """Samples `which` (W,) after a part (W,) of their step, e ← (1 − t) e + t e₁, but for pull
        and share, which energies do not need."""
        old, t, kept = samples.taken(which), length, 1.0 - length
        part = t[:, None].to(self.shift)
        across, square = self.across[which], self.square[which]
        return replace(
            old,
            shift=torch.lerp(old.shift, _taken(self.shift, which), part),
            c=torch.lerp(old.c, _taken(self.c, which), part),
            strain=kept**2 * old.strain + 2.0 * kept * t * across + t**2 * square,
        )

    def taken(self, samples: _Samples, which: Tensor, length: Tensor) -> _Samples:
        """The same with pull and share."""
        ahead, part = self.ahead(samples, which, length), length[:, None].to(self.pull)
        pull = torch.lerp(ahead.pull, _taken(self.pull, which), part)
        return replace(ahead, pull=pull, share=ahead.share * (1.0 - length).to(ahead.share))


def _descended(
    samples: _Samples,
    accuracy: Accuracy,
    preconditioner: Preconditioner | None,
    progress: Progress,
    near: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lower every E_s, in place, until it falls by less than `accuracy.decrease`, or, `near`, by a
    first step as of a linear response: CG steps and Gauss-Newton steps of every sample (K,), and
    whether the last of them was solved for."""
    cg_steps = torch.zeros(len(samples.z), dtype=torch.int64, device=samples.z.device)
    steps, tight = torch.zeros_like(cg_steps), torch.ones_like(samples.strain)
    active = torch.arange(len(samples.z), device=samples.z.device)
    solved = torch.ones_like(active, dtype=torch.bool)
    for step in range(accuracy.steps):
        here = samples.taken(active)
        solve = _solved(here, accuracy, tight[active], preconditioner, progress)
        cg_steps[active] += solve.steps
        steps[active] += 1
        solved[active] = solve.status == SolveStatus.CONVERGED.value
        here.z.copy_(solve.x)
        samples.z.index_copy_(0, active, solve.x)
        decrease, linear = _line_search(here, samples, active)
        # Where no length lowers the energy the direction is solved for again, more tightly.
        stuck = decrease <= 0.0
        tight[active[stuck]] *= TIGHTER
        goes_on = torch.where(stuck, tight[active] >= TIGHTEST, decrease >= accuracy.decrease)
        goes_on &= ~linear if near and step == 0 else True
        active = active[goes_on]
        if len(active) == 0:
            break
    return cg_steps, steps, solved


def _solved(
    samples: _Samples,
    accuracy: Accuracy,
    tight: Tensor,
    preconditioner: Preconditioner | None,
    progress: Progress,
) -> SolveResult:
    """Multipliers (K, Q) of a Gauss-Newton step:

    (I + W^½ J Jᵀ W^½) z = W^½ (t − f(ξ) + J e)
    """
    tangents, misfit = samples.tangents, samples.misfit()
    linear = tangents.of_field(samples.shift, samples.c)
    target = tangents.root_weights * (samples.residual + linear)
    wanted = torch.where(misfit > FAR, ROUGH * misfit, 0.0).clamp_min(accuracy.residual)
    size = target.norm(dim=-1).clamp_min(1e-30)
    rtol = (tight * wanted * math.sqrt(target.shape[-1]) / size).clamp_max(0.5)
    return metric_solver(tangents, preconditioner)(
        target,
        x0=samples.z,
        rtol=rtol,
        max_steps=accuracy.cg_steps,
        progress=progress,
    )


def _line_search(here: _Samples, samples: _Samples, places: Tensor) -> tuple[Tensor, Tensor]:
    """Move samples in their places (W,) to the lowest of ξ_s + t Δξ_s for t = 1 or what is within
    reach, half of that, the `vertex` of both and, where these lead upwards, halves of them:
    decrease of the energy (W,), 0 where there is none, and whether the vertex is near 1 (W,).

    here: the same samples with the multipliers of their step.
    """
    step = _Step.of(here)
    reach = (step.shift - here.shift).abs().amax(-1).double()
    most = _REACH / reach.clamp_min(1e-30)
    every, whole = torch.arange(len(most), device=most.device), most.clamp_max(1.0)

    def fall(which: Tensor, length: Tensor) -> Tensor:
        return here.energy[which] - step.ahead(here, which, length).energy

    falls = [fall(every, whole), fall(every, 0.5 * whole)]
    third = (vertex(*falls) * whole).minimum(most)
    lengths, falls = [whole, 0.5 * whole, third], [*falls, fall(every, third)]
    for k in range(2, HALVINGS):
        left = (torch.stack(falls).amax(0) <= 0.0).nonzero().squeeze(1)
        if len(left) == 0:
            break
        lengths.append(whole * 0.5**k)
        falls.append(torch.zeros_like(whole).index_copy_(0, left, fall(left, lengths[-1][left])))
    decrease, best = torch.stack(falls).nan_to_num(0.0, neginf=0.0).max(0)
    moved = (decrease > 0.0).nonzero().squeeze(1)
    length = torch.stack(lengths)[best[moved], moved]
    samples.put(places[moved], step.taken(here, moved, length))
    linear = (whole == 1.0) & ((third - 1.0).abs() <= _LINEAR) & (decrease > 0.0)
    return decrease.clamp_min(0.0), linear


def _taken(values: Tensor, which: Tensor) -> Tensor:
    """Rows `which` (W,), ascending, of values (K, ...): a copy, or the values where it is all."""
    return values if len(which) == len(values) else values[which]


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Row-wise x · y (K,), summed in float64, in parts that stay in the cache."""
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    numbers = numbers_together(_SUMMED_AT_ONCE, x.device)
    for part in chunks(x.shape[1], max(1, numbers // max(1, len(x)))):
        total += (x[:, part] * y[:, part]).sum(-1, dtype=torch.float64)
    return total
