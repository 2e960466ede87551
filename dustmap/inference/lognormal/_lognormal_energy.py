"""The energy of a log-normal field, its derivatives, and Gauss-Newton steps down it.

Every step solves its linear system from the side of the data, or among the nodes that these see.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_problem import (
    LogNormalProblem,
    Preconditioner,
    metric_solver,
    node_preconditioner,
)
from dustmap.inference.lognormal._tangent import GramPreconditioner, NodePreconditioner, Tangent
from dustmap.linalg import Progress, SolveResult, divided, unwatched

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
@dataclass(frozen=True, eq=False)
class EnergyTarget:
    """Target t (N,) of the data and anchor a (n,) of the latent space, in the energy

        E(ξ) = mean_s ½ ‖t − f(ξ + δ_s)‖²_{Σ⁻¹} + ½ ‖ξ − a‖²,   f(ξ) = (1 + κ c'_g) L ρ(ξ) + τ c_g

    The posterior's mode and mean have t = y and a = 0; samples perturb both.
    """

    data: Tensor
    anchor: Tensor

    @staticmethod
    def posterior(y: Tensor, xi: Tensor) -> "EnergyTarget":
        """The posterior's: t = y (N,), a = 0 like xi (n,)."""
        return EnergyTarget(y, torch.zeros_like(xi))


@final
@dataclass(frozen=True, eq=False)
class Iterate:
    """ξ with deviations δ_s at the present hyperparameters, and what follows from them.

    xi (n,); deviations (S, n), S ≥ 1, a single row of zeros for a mode; spread T δ_s (S, M), or 0
    (1, 1); log_density H β₀ + T ξ (M,); densities ρ_s = exp(H β₀ + T (ξ + δ_s)) (S, M); seen L ρ_s
    and responses f_s (S, N); energy E(ξ), infinite where a density overflows. Of spread and
    densities ranks that divide draws have those of their share of the samples.
    """

    problem: LogNormalProblem
    target: EnergyTarget
    xi: Tensor
    deviations: Tensor
    spread: Tensor
    log_density: Tensor
    densities: Tensor
    seen: Tensor
    responses: Tensor
    energy: float

    @staticmethod
    @torch.no_grad()
    def at(
        problem: LogNormalProblem,
        target: EnergyTarget,
        xi: Tensor,
        deviations: Tensor | None = None,
    ) -> "Iterate":
        """Everything that ξ and δ_s determine; without deviations, of ξ alone."""
        if deviations is None:
            alone = torch.zeros_like(xi)[None]
            return _iterate(problem, target, xi, alone, problem.log_mean.new_zeros(1, 1))
        own = deviations[problem.world.share(len(deviations))]
        return _iterate(problem, target, xi, deviations, problem.root.matmul(own))

    def apart(self) -> "Iterate":
        """The same for this rank alone, of ξ alone."""
        assert len(self.deviations) == 1
        return replace(self, problem=self.problem.apart())

    def moved(self, xi: Tensor) -> "Iterate":
        """At another ξ (n,), with the same deviations."""
        return _iterate(self.problem, self.target, xi, self.deviations, self.spread)

    def with_own_response(self) -> "Iterate":
        """The same ξ and δ_s under the noise of their own mean response, where it grows with it."""
        if self.problem.model.likelihood.log_relative is None:
            return self
        problem = self.problem.with_response(self.responses.mean(0))
        energy = _energy(problem, self.target, self.xi, self.responses)
        return replace(self, problem=problem, energy=energy)

    @property
    def is_finite(self) -> bool:
        """Whether nothing overflows, so that there are steps to take from here."""
        return math.isfinite(self.energy)

    @property
    def residuals(self) -> Tensor:
        """t − f_s (S, N)."""
        return self.target.data - self.responses

    @cached_property
    def density(self) -> Tensor:
        """mean_s ρ_s (M,): J = L diag(mean_s ρ_s) T is the derivative of the mean response."""
        return self._mean(self.densities)

    @property
    def tangent(self) -> Tangent:
        """The response linearised at `density` and ξ."""
        return self.problem.tangent(self.density, self.c)

    @property
    def c(self) -> Tensor:
        """(c, c') (G,), the last variables of ξ."""
        return self.xi[self.problem.root.n_field :]

    def misfit(self) -> float:
        """Root mean square of the mean response's residual in units of the noise."""
        white = self.residuals.mean(0) * self.problem.noise.rsqrt()
        return float(white.square().mean().sqrt())

    def covariance_pull(self) -> Tensor:
        """mean_s J_sᵀ Σ⁻¹ r_s − Jᵀ Σ⁻¹ mean_s r_s (n,): the part of the data's pull on ξ that
        the mean response does not see."""
        if len(self.deviations) == 1:
            return torch.zeros_like(self.xi)
        problem, weighted = self.problem, self.residuals / self.problem.noise
        forces = self._forces(weighted)
        if problem.has_scales:
            whole = problem.pulled(self._mean(self.densities * forces), weighted, self.seen)
            return whole - self.tangent.rmatmul(weighted.mean(0))
        pull = self._mean(self.densities * forces) - self.density * self._mean(forces)
        return problem.root.rmatmul(pull)

    def _mean(self, own: Tensor) -> Tensor:
        """Mean over all samples of what this rank has of its own (S_r, ...)."""
        count = len(self.deviations)
        return (self.problem.world.total(own.sum(0)) if count > 1 else own.sum(0)) / count

    def _forces(self, weighted: Tensor) -> Tensor:
        """Lᵀ diag(g_s) v_s (S_r, M) of v_s (S, N), g_s the gains of scales, of its own samples."""
        groups, own = self.problem.groups, self.problem.own_samples(len(weighted))
        if groups is not None and groups.has_scales:
            c = self.c + self.deviations[own, self.problem.root.n_field :]
            return self.problem.own_rows.rmatmul(groups.gains(c) * weighted[own])
        return self.problem.own_rows.rmatmul(weighted[own])


@torch.no_grad()
def _iterate(
    problem: LogNormalProblem, target: EnergyTarget, xi: Tensor, deviations: Tensor, spread: Tensor
) -> Iterate:
    """The iterate at ξ of deviations (S, n) whose fields are spread (S, M), or 0 (1, 1)."""
    log_density = problem.log_mean + problem.root.matmul(xi)
    densities = (log_density + spread).exp_()
    seen = problem.seen(densities, len(deviations))
    n = problem.root.n_field
    responses = problem.measured(seen, xi[n:] + deviations[:, n:])
    energy = _energy(problem, target, xi, responses)
    # Of densities ≥ 0 the largest is finite where all are.
    overflows = (~densities.amax(-1).isfinite()).sum()
    if len(deviations) > 1:
        overflows = problem.world.total(overflows)
    if not math.isfinite(energy) or int(overflows) > 0:
        energy = math.inf
    here = problem, target, xi, deviations, spread, log_density
    return Iterate(*here, densities, seen, responses, energy)


def _energy(
    problem: LogNormalProblem, target: EnergyTarget, xi: Tensor, responses: Tensor
) -> float:
    """E(ξ) of responses f_s (S, N), in nats."""
    misfit = ((target.data - responses).square() / problem.noise).sum(-1, dtype=torch.float64)
    strain = (xi - target.anchor).square().sum(dtype=torch.float64)
    return 0.5 * float(misfit.mean() + strain)


@final
@dataclass(frozen=True)
class Accuracy:
    """When a fit is good enough.

    residual: of CG, root mean square over the data in units of the noise, once the data are fit;
        before, a tenth of the misfit. decrease: of the energy, in nats, below which to stop, in
        `together` steps, for one may be short by chance.
    steps: of Gauss-Newton at most. cg_steps: of CG at most in each.
    """

    residual: float = 0.1
    decrease: float = 1.0
    steps: int = 10
    cg_steps: int = 200
    together: int = 1


@final
@dataclass(frozen=True, eq=False)
class Descent:
    """End of a descent: the iterate, the multipliers z (Q,) for a warm start, CG steps spent,
    Gauss-Newton steps, and the last decrease of the energy (negative: no step lowered it)."""

    iterate: Iterate
    z: Tensor
    cg_steps: int
    steps: int
    decrease: float


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
) -> Descent:
    """Lower E by Gauss-Newton steps at fixed hyperparameters.

    ξ ← a + e + Jᵀ W^½ z,   (I + W^½ J Jᵀ W^½) z = W^½ (mean_s r_s + J (ξ − a − e))

    with e the pull that the mean response does not see: by Woodbury the Newton step with the
    metric I + Jᵀ Σ⁻¹ J, in vectors of the data's length or, where data see few nodes, of theirs
    (`metric_solver`). At the optimum without deviations z is the whitened residual, so z of one
    step starts the next. Of this step and of that which the last few steps together suggest, the
    one that leads to the lower energy is taken.
    """
    spent, taken, decrease, tight, steps, energies = 0, 0, 0.0, 1.0, Steps(), [iterate.energy]
    while taken < accuracy.steps:
        progress(_NEWTON, taken, accuracy.steps)
        solve, anchor = solve_multipliers(iterate, z, accuracy, preconditioner, tight, progress)
        full = iterate.tangent.step_of(solve.x)
        z, spent, taken = solve.x, spent + int(solve.steps), taken + 1
        steps = steps.joined(iterate.xi, anchor + full - iterate.xi)
        lower = _lower(iterate, steps)
        if lower is None:
            decrease, tight = -1.0, tight * TIGHTER
            if tight < TIGHTEST:
                break
            continue
        decrease, iterate = iterate.energy - lower.energy, lower
        energies = [*energies, lower.energy][-accuracy.together - 1 :]
        if len(energies) > accuracy.together and energies[0] - lower.energy < accuracy.decrease:
            break
    progress(_NEWTON, accuracy.steps, accuracy.steps)
    return Descent(iterate, z, spent, taken, decrease)


def solve_multipliers(
    iterate: Iterate,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: Preconditioner | None,
    tight: float = 1.0,
    progress: Progress = unwatched,
) -> tuple[SolveResult, Tensor]:
    """z of the next step, and a + e; tight scales the residual asked for."""
    tangent = iterate.tangent
    anchor = iterate.target.anchor + iterate.covariance_pull()
    carried = tangent.matmul(iterate.xi - anchor)
    target = tangent.root_weights * (iterate.residuals.mean(0) + carried)
    misfit = iterate.misfit()
    wanted = max(accuracy.residual, ROUGH * misfit) if misfit > FAR else accuracy.residual
    solve = metric_solver(tangent, preconditioner)(
        target,
        x0=z,
        rtol=relative(tight * wanted, target),
        max_steps=accuracy.cg_steps,
        progress=progress,
    )
    return solve, anchor


def relative(wanted: float, target: Tensor) -> Tensor:
    """The relative residuals (...) that leave `wanted` per datum, for right-hand sides (..., N)."""
    size = target.norm(dim=-1).double().clamp_min(1e-30)
    ratio: Tensor = wanted * math.sqrt(target.shape[-1]) / size
    return ratio.clamp_max(0.5)


def _lower(iterate: Iterate, steps: Steps) -> Iterate | None:
    """The lower end of the last step and of the extrapolated one, if either lowers the energy."""
    accepted, further = line_search(iterate, steps.steps[-1]), steps.extrapolated()
    if accepted is None or further is None:
        return accepted
    trial = iterate.moved(iterate.xi + further)
    return trial if trial.energy < accepted.energy else accepted


def line_search(iterate: Iterate, step: Tensor) -> Iterate | None:
    """The lowest of ξ + t Δξ with lower energy, t = 1 or so long that T Δξ is within reach, half of
    that and the `vertex` of both; else the first of halves of these."""
    reach = float(iterate.problem.root.matmul(step).abs().max())
    most = _REACH / max(reach, 1e-30)
    whole = min(1.0, most)

    def moved(length: float) -> Iterate:
        return iterate.moved(iterate.xi + length * step)

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


def monte_carlo_error(mean: Iterate) -> float:
    """Error of a mean response of S samples, rms over the data in units of their noise:

    (mean_n Var_s(f_sn) / (S σ_n²))^½
    """
    responses = mean.responses
    variance = (responses.var(0) / mean.problem.noise).mean() / len(responses)
    return float(variance.sqrt())


def preconditioner_at(
    centre: Iterate, rank: int, old: Preconditioner | None, progress: Progress
) -> Preconditioner:
    """A preconditioner of the side that the problem has chosen."""
    problem, nodes = centre.problem, centre.problem.nodes
    if nodes is not None:
        assert not isinstance(old, GramPreconditioner)
        return node_preconditioner(nodes, centre.tangent, rank, old, progress)
    assert not isinstance(old, NodePreconditioner)
    # Ranks divide the vectors that the Gram matrix is multiplied with.
    alone = problem.apart().tangent(centre.density, centre.c)
    gram, size = divided(alone.gram(), problem.world), centre.tangent.size
    # Random rows beside eigenvectors drown in the rounding of what these see: a wider one is
    # made of random rows alone.
    if old is not None and rank <= old.rank:
        return old.refreshed(gram, size, progress)
    return GramPreconditioner.of(gram, size, rank, problem.together, progress)
