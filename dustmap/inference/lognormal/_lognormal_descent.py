"""Gauss-Newton steps down the energy of a log-normal field.

Every step solves its linear system from the side of the data, or among the nodes that these see.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_energy import Iterate, Move
from dustmap.inference.lognormal._lognormal_problem import Preconditioner, metric_solver
from dustmap.inference.lognormal._sampled_metric import sampled_steps
from dustmap.linalg import Progress, SolveResult, unwatched

#: A misfit beyond which the data are not fit yet, and rough steps do, to this share of it.
FAR, ROUGH = 2.0, 0.1
#: A direction of a rough solve may lead upwards: it is solved again, this much tighter, till here.
TIGHTER, TIGHTEST = 0.2, 0.03
#: Halvings of a step before the line search gives up; the least and the greatest length, in steps,
#: that a parabola may suggest.
HALVINGS = 8
_SHORTEST, _LONGEST = 0.1, 2.0
#: Largest change of the log-density that a step may ask for: the linearised exponential holds
#: no further.
_REACH = 2.0
#: Steps of a descent that are extrapolated from, and the ridge of their Gram matrix.
_MIXED, _RIDGE = 5, 1e-6
#: What is counted while a fit descends.
_NEWTON = "Newton steps"


@final
@dataclass(frozen=True)
class Accuracy:
    """When a fit is good enough.

    residual: of CG, root mean square over the data in units of the noise, once the data are fit;
        before, a tenth of the misfit. decrease: of the energy in a step, in nats, below which to
        stop.
    steps: of Gauss-Newton at most. cg_steps: of CG at most in each.
    """

    residual: float = 0.1
    decrease: float = 1.0
    steps: int = 10
    cg_steps: int = 200


@final
@dataclass(frozen=True, eq=False)
class Descent:
    """End of a descent, or where it has come to: the iterate, CG steps spent, Gauss-Newton steps,
    the last decrease of the energy (infinite before any step, negative where none lowered it), and
    `tight` of the next solve."""

    iterate: Iterate
    cg_steps: int = 0
    steps: int = 0
    decrease: float = math.inf
    tight: float = 1.0

    def is_over(self, accuracy: Accuracy) -> bool:
        """Whether it has gained little in the last step, or does not get any lower."""
        if self.decrease < 0.0:
            return self.tight < TIGHTEST
        return self.decrease < accuracy.decrease

    def residual(self, accuracy: Accuracy) -> float:
        """Of the next solve, per datum in units of the noise."""
        misfit = self.iterate.misfit()
        rough = ROUGH * misfit if misfit > FAR else 0.0
        return self.tight * max(accuracy.residual, rough)

    def after(self, lower: Iterate | None, cg_steps: int) -> "Descent":
        """After a step, where it led lower."""
        went = replace(self, cg_steps=self.cg_steps + cg_steps, steps=self.steps + 1)
        if lower is None:
            return replace(went, decrease=-1.0, tight=self.tight * TIGHTER)
        return replace(went, iterate=lower, decrease=self.iterate.energy - lower.energy)

    def afresh(self) -> "Descent":
        """The same at its end without the rounding of its steps."""
        return replace(self, iterate=self.iterate.afresh()) if self.steps > 0 else self


@final
@dataclass(frozen=True, eq=False)
class Steps:
    """The last few points ξ_k of a descent and the whole Gauss-Newton steps g_k from them (n,)."""

    points: tuple[Tensor, ...] = ()
    steps: tuple[Tensor, ...] = ()

    def joined(self, xi: Tensor, step: Tensor) -> "Steps":
        """With one more, and no more than are of use."""
        return Steps((*self.points, xi)[-_MIXED:], (*self.steps, step)[-_MIXED:])

    def extrapolated(self) -> Tensor | None:
        """The step to where the g_k would vanish if they were linear in ξ; None of a single one.

            g − (ΔX + ΔG) γ,   γ = argmin ‖g − ΔG γ‖

        for differences ΔX, ΔG of successive points and steps (Anderson 1965). Gauss-Newton leaves
        out the curvature of the response, so that its steps shrink by a constant factor only.
        """
        if len(self.points) < 2:
            return None
        last = self.steps[-1]
        changes = torch.stack([b - a for a, b in itertools.pairwise(self.steps)])
        moves = torch.stack([b - a for a, b in itertools.pairwise(self.points)])
        gram = (changes @ changes.mT).double()
        gram.diagonal().add_(_RIDGE * gram.diagonal().max() + torch.finfo(gram.dtype).tiny)
        gamma = torch.linalg.solve(gram, (changes @ last).double())
        step: Tensor = last - gamma.to(last) @ (moves + changes)
        return step


@torch.no_grad()
def descend(
    iterate: Iterate,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: Preconditioner | None = None,
    progress: Progress = unwatched,
) -> tuple[Descent, Tensor]:
    """Lower E of one ξ without samples by Gauss-Newton steps at fixed hyperparameters; and its
    multipliers (Q,) for a warm start.

    Of this step and of that which the last few steps together suggest, the one that leads to the
    lower energy is taken.
    """
    descent, steps = Descent(iterate), Steps()
    for taken in range(accuracy.steps):
        if descent.is_over(accuracy):
            break
        progress(_NEWTON, taken, accuracy.steps)
        here, wanted = descent.iterate, descent.residual(accuracy)
        solve, step = gauss_newton(here, z, wanted, preconditioner, accuracy.cg_steps, progress)
        z, steps = solve.x, steps.joined(here.xi, step.xi)
        descent = descent.after(_lower(here, step, steps), int(solve.steps))
    progress(_NEWTON, accuracy.steps, accuracy.steps)
    return descent.afresh(), z


@torch.no_grad()
def descend_samples(
    iterates: Sequence[Iterate],
    accuracy: Accuracy,
    preconditioner: Preconditioner | None = None,
    progress: Progress = unwatched,
) -> list[Descent]:
    """Lower every E of means that have equally many samples, by steps in the metric of all of them.

    Every one of K iterates of a problem has its own steps, lengths and end; their linear systems
    are solved together, from the multipliers of the step before.
    """
    going = [Descent(iterate) for iterate in iterates]
    multipliers: Tensor | None = None
    for taken in range(accuracy.steps):
        active = [k for k, one in enumerate(going) if not one.is_over(accuracy)]
        if not active:
            break
        progress(_NEWTON, taken, accuracy.steps)
        here = [going[k].iterate for k in active]
        wanted = torch.tensor([going[k].residual(accuracy) for k in active]).to(here[0].xi.device)
        start = None if multipliers is None else multipliers[active]
        how = preconditioner, accuracy.cg_steps, progress, start
        steps = sampled_steps(here, wanted, *how)
        if multipliers is None:
            multipliers = steps.multipliers
        else:
            multipliers[active] = steps.multipliers
        for k, step, cg_steps in zip(active, steps.moves, steps.cg_steps.tolist(), strict=True):
            lower = line_search(going[k].iterate, step)
            going[k] = going[k].after(lower, cg_steps)
    progress(_NEWTON, accuracy.steps, accuracy.steps)
    return [end.afresh() for end in going]


def gauss_newton(
    iterate: Iterate,
    z: Tensor,
    wanted: float,
    preconditioner: Preconditioner | None = None,
    max_steps: int = 200,
    progress: Progress = unwatched,
) -> tuple[SolveResult, Move]:
    """Multipliers (Q,) of the next step of a ξ without samples, and the step:

        ξ ← Jᵀ W^½ z,   (I + W^½ J Jᵀ W^½) z = W^½ (r + J ξ)

    by Woodbury the Newton step with the metric I + Jᵀ Σ⁻¹ J, in vectors of the data's length or,
    where data see few nodes, of theirs (`metric_solver`). At the optimum z is the whitened
    residual, so that of one step starts the next. wanted: residual of CG per datum.
    """
    tangent, field = iterate.tangent, iterate.field
    carried = tangent.of_field(field, iterate.c)
    target = tangent.root_weights * (iterate.residuals[0] + carried)
    solve = metric_solver(tangent, preconditioner)(
        target, x0=z, rtol=relative(wanted, target), max_steps=max_steps, progress=progress
    )
    pull, c = tangent.pull_of(solve.x)
    return solve, Move(tangent.latent(pull, c) - iterate.xi, tangent.covaried(pull) - field)


def relative(wanted: float, target: Tensor) -> Tensor:
    """The relative residuals (...) that leave `wanted` per datum, for right-hand sides (..., N)."""
    size = target.norm(dim=-1).double().clamp_min(1e-30)
    ratio: Tensor = wanted * math.sqrt(target.shape[-1]) / size
    return ratio.clamp_max(0.5)


def _lower(iterate: Iterate, step: Move, steps: Steps) -> Iterate | None:
    """The lower end of the last step and of the extrapolated one, if either lowers the energy."""
    accepted, further = line_search(iterate, step), steps.extrapolated()
    if accepted is None or further is None:
        return accepted
    trial = iterate.moved(Move(further, iterate.problem.root.matmul(further)))
    return trial if trial.energy < accepted.energy else accepted


def line_search(iterate: Iterate, step: Move) -> Iterate | None:
    """The lowest of ξ + t Δξ with lower energy, t = 1 or so long that T Δξ is within reach, half of
    that and the `vertex` of both; else the first of halves of these."""
    most = _REACH / max(float(step.field.abs().max()), 1e-30)
    whole, moved = min(1.0, most), functools.partial(iterate.moved, step)
    best, other = moved(whole), moved(0.5 * whole)
    energies = torch.tensor([iterate.energy, best.energy, other.energy], dtype=torch.float64)
    third = vertex(energies[0] - energies[1], energies[0] - energies[2])
    best = _lower_of(best, other)
    best = _lower_of(best, moved(min(most, whole * float(third))))
    for k in range(2, HALVINGS):
        if best.energy < iterate.energy:
            return best
        best = moved(whole * 0.5**k)
    return best if best.energy < iterate.energy else None


def _lower_of(one: Iterate, other: Iterate) -> Iterate:
    return one if one.energy <= other.energy else other


def vertex(whole: Tensor, half: Tensor) -> Tensor:
    """Length t (...) at which a parabola falls furthest that falls by `whole` (...) at t = 1 and by
    `half` at t = ½; no longer than twice the step, where the parabola has no lowest point, too.

    Examples
    --------
    >>> vertex(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.2500])
    """
    slope, bend = 4.0 * half - whole, 4.0 * half - 2.0 * whole
    length = torch.where(bend > 0.0, 0.5 * slope / bend, _LONGEST)
    return length.nan_to_num(_SHORTEST).clamp(_SHORTEST, _LONGEST)
