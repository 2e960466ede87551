"""Gauss-Newton steps on the energy of a log-normal field, from the side of the data."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_state import Iterate
from dustmap.linalg import AbstractOperator, Progress, SolveResult, pcg, unwatched

#: A misfit beyond which the data are not fit yet, and rough steps do.
_FAR = 2.0
#: A direction of a rough solve may lead upwards: it is solved again, this much tighter, till here.
_TIGHTER, _TIGHTEST = 0.2, 0.03
#: Halvings of a step before the line search gives up.
_HALVINGS = 8
#: Largest change of the log-density that a step may ask for: the linearised exponential holds
#: no further.
_REACH = 2.0
#: What is counted while a fit descends.
_NEWTON = "Newton steps"


@final
@dataclass(frozen=True)
class Accuracy:
    """When a fit is good enough.

    residual: of CG, root mean square over the data in units of the noise, once the data are fit;
        before, a tenth of the misfit. decrease: of the energy, in nats, below which to stop.
    steps: of Gauss-Newton at most. cg_steps: of CG at most in each.
    """

    residual: float = 0.1
    decrease: float = 1.0
    steps: int = 10
    cg_steps: int = 200


@final
@dataclass(frozen=True, eq=False)
class Descent:
    """Where a fit ended: the iterate, the multipliers z (N,) for a warm start, CG steps spent,
    Gauss-Newton steps, and the last decrease of the energy (negative: no step lowered it)."""

    iterate: Iterate
    z: Tensor
    cg_steps: int
    steps: int
    decrease: float


@torch.no_grad()
def descend(
    iterate: Iterate,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: AbstractOperator | None = None,
    progress: Progress = unwatched,
) -> Descent:
    """Lowers E by Gauss-Newton steps at fixed hyperparameters.

    ξ ← a + e + Jᵀ W^½ z,   (I + W^½ J Jᵀ W^½) z = W^½ (mean_s r_s + J (ξ − a − e))

    with e the pull that the mean response does not see: by Woodbury the Newton step with the
    metric I + Jᵀ Σ⁻¹ J, in vectors of the data's length. At the optimum without deviations z is
    the whitened residual, so z of one step starts the next.
    """
    spent, taken, decrease, tight = 0, 0, 0.0, 1.0
    while taken < accuracy.steps:
        progress(_NEWTON, taken, accuracy.steps)
        solve, anchor = solve_multipliers(iterate, z, accuracy, preconditioner, tight, progress)
        root_weights = iterate.problem.noise.rsqrt()
        full = iterate.problem.jacobian_transpose(iterate.density, root_weights * solve.x)
        z, spent, taken = solve.x, spent + int(solve.steps), taken + 1
        found = line_search(iterate, anchor + full - iterate.xi)
        if found is None:
            decrease, tight = -1.0, tight * _TIGHTER
            if tight < _TIGHTEST:
                break
            continue
        decrease, iterate = iterate.energy - found.energy, found
        if decrease < accuracy.decrease:
            break
    progress(_NEWTON, accuracy.steps, accuracy.steps)
    return Descent(iterate, z, spent, taken, decrease)


def solve_multipliers(
    iterate: Iterate,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: AbstractOperator | None,
    tight: float = 1.0,
    progress: Progress = unwatched,
) -> tuple[SolveResult, Tensor]:
    """z of the next step, and a + e; tight scales the residual asked for."""
    problem, density = iterate.problem, iterate.density
    root_weights = problem.noise.rsqrt()
    anchor = iterate.tether.anchor + iterate.covariance_pull()
    carried = problem.jacobian(density, iterate.xi - anchor)
    target = root_weights * (iterate.residuals.mean(0) + carried)
    misfit = iterate.misfit()
    wanted = max(accuracy.residual, 0.1 * misfit) if misfit > _FAR else accuracy.residual
    solve = pcg(
        problem.gram(density),
        target,
        preconditioner=preconditioner,
        x0=z,
        rtol=relative(tight * wanted, target),
        max_steps=accuracy.cg_steps,
        progress=progress,
    )
    return solve, anchor


def relative(wanted: float, target: Tensor) -> float:
    """The relative residual that leaves `wanted` per datum, for right-hand sides (..., N)."""
    size = float(target.norm(dim=-1).min()) if target.ndim > 1 else float(target.norm())
    return min(0.5, wanted * math.sqrt(target.shape[-1]) / max(size, 1e-30))


def line_search(iterate: Iterate, step: Tensor) -> Iterate | None:
    """The first of ξ + t Δξ with lower energy, t halved from where T Δξ is within reach."""
    reach = float(iterate.problem.root.matmul(step).abs().max())
    length = min(1.0, _REACH / max(reach, 1e-30))
    deviations = None if len(iterate.densities) == 1 else iterate.deviations
    for _ in range(_HALVINGS):
        trial = Iterate.at(iterate.problem, iterate.tether, iterate.xi + length * step, deviations)
        if trial.energy < iterate.energy:
            return trial
        length *= 0.5
    return None
