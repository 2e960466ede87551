"""The energy of a log-normal field, its derivatives, and Gauss-Newton steps down it.

Every step solves its linear system from the side of the data.
"""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, GridPrior
from dustmap.gp.features import ProductOperator
from dustmap.inference.lognormal._gram_preconditioner import GramPreconditioner
from dustmap.inference.lognormal._groups import GroupTerms
from dustmap.inference.lognormal._lognormal import LatentRoot, LogNormalModel
from dustmap.inference.lognormal._tangent import Tangent, TangentStack
from dustmap.linalg import (
    AbstractOperator,
    DiagonalOperator,
    Progress,
    SolveResult,
    pcg,
    unwatched,
)

#: A misfit beyond which the data are not fit yet, and rough steps do, to this share of it.
FAR, ROUGH = 2.0, 0.1
#: A direction of a rough solve may lead upwards: it is solved again, this much tighter, till here.
TIGHTER, TIGHTEST = 0.2, 0.03
#: Halvings of a step before the line search gives up.
HALVINGS = 8
#: Largest change of the log-density that a step may ask for: the linearised exponential holds
#: no further.
_REACH = 2.0
#: What is counted while a fit descends.
_NEWTON = "Newton steps"


@final
@dataclass(frozen=True, eq=False)
class LogNormalProblem:
    """A model with its data at the present hyperparameters, ready for products.

    rows L (N, M); root T (M, n), n = M_w + P + G; groups: terms of zero points and scales, None
    for none; log_mean H β₀ (M,); covariance K (M, M); y (N,);
    noise Σ (N,), the likelihood's divided by weights (N,). All in the prior's dtype, without a
    graph. Noise that grows with the response takes data.response, at first that of ξ = 0.
    """

    model: LogNormalModel
    data: Batch
    rows: AbstractOperator
    root: LatentRoot
    log_mean: Tensor
    covariance: AbstractOperator
    y: Tensor
    noise: Tensor
    weights: Tensor
    groups: GroupTerms | None = None

    @staticmethod
    @torch.no_grad()
    def of(model: LogNormalModel, data: Batch) -> "LogNormalProblem":
        """Everything computed once: L, T, H β₀."""
        rows = model.interpolation(data.functional)
        expected = (len(data), model.prior.grid.size)
        if rows.shape != expected:
            raise UserError(
                f"interpolation: expected rows of shape {expected}, one per datum over the nodes "
                f"of prior.grid, got {rows.shape}"
            )
        dtype, points = model.prior.dtype, model.zero_points
        log_mean = model.log_mean()
        if model.likelihood.log_relative is not None:
            data = replace(data, response=rows.matmul(log_mean.exp()).to(data.y))
        return LogNormalProblem(
            model,
            data,
            rows,
            model.latent_root(),
            log_mean,
            model.prior.covariance(),
            data.y.to(dtype),
            model.likelihood.noise_variance(data).to(dtype),
            torch.ones_like(data.y, dtype=dtype),
            None if points is None else GroupTerms.of(points, data.functional, log_mean),
        )

    @torch.no_grad()
    def on(self, prior: GridPrior) -> "LogNormalProblem":
        """With another prior, or another torus, on the same grid."""
        model = replace(self.model, prior=prior)
        root = replace(self.root, root=prior.root())
        return replace(self, model=model, root=root, covariance=prior.covariance())

    @property
    def theta(self) -> Tensor:
        """θ (Q,): what is learned of kernel and noise."""
        return self.model.learned().theta

    @torch.no_grad()
    def at(self, theta: Tensor) -> "LogNormalProblem":
        """At other θ (Q,), on the same torus; the mean and the response as they are here."""
        model = self.model.learned().build(theta)
        return replace(self, model=model).on(model.prior).with_present_noise()

    @torch.no_grad()
    def with_present_noise(self) -> "LogNormalProblem":
        """With the noise of the likelihood under present weights and response."""
        noise = self.model.likelihood.noise_variance(self.data).to(self.y.dtype)
        return replace(self, noise=noise / self.weights)

    def with_response(self, response: Tensor) -> "LogNormalProblem":
        """With noise that grows with the response taken at another one (N,)."""
        data = replace(self.data, response=response.to(self.data.y))
        return replace(self, data=data).with_present_noise()

    def weighted(self, weights: Tensor) -> "LogNormalProblem":
        """With the noise variances divided by weights (N,)."""
        return replace(self, weights=weights.to(self.y.dtype)).with_present_noise()

    @property
    def n_latent(self) -> int:
        """n, the length of ξ."""
        return self.root.shape[1]

    def tangent(self, density: Tensor, c: Tensor) -> Tangent:
        """The response linearised at ρ (M,) and at variables (c, c') (G,) of groups."""
        rows, groups, columns = self.rows, self.groups, None
        if groups is not None:
            columns = groups.columns(rows.matmul(density) if groups.has_scales else density)
        if groups is not None and groups.has_scales:
            rows = ProductOperator(DiagonalOperator(groups.gains(c)), rows)
        return Tangent(rows, density, self.root, columns, self.covariance, self.noise)

    def tangents(self, densities: Tensor, seen: Tensor, c: Tensor) -> TangentStack:
        """The response linearised at several ρ_s (S, M), L ρ_s (S, N) and (c, c')_s (S, G)."""
        here = self.covariance, self.root.columns, self.noise.rsqrt()
        return TangentStack(self.rows, densities, *here, self.groups, seen, c)

    def response(self, density: Tensor, xi: Tensor) -> Tensor:
        """(1 + κ c'_g) L ρ + τ c_g (..., N) for ρ (..., M) and (c, c') of ξ (..., n)."""
        return self.measured(self.rows.matmul(density), xi[..., self.root.n_field :])

    def measured(self, seen: Tensor, c: Tensor) -> Tensor:
        """(1 + κ c'_g) L ρ + τ c_g (..., N) of L ρ (..., N) and (c, c') (..., G)."""
        return seen if self.groups is None else self.groups.measured(seen, c)

    @property
    def has_scales(self) -> bool:
        """Whether groups multiply what the data see of the density."""
        return self.groups is not None and self.groups.has_scales

    def pulled(self, on_density: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Tᵀ of a pull (M,) on the log-density, with the mean pull on (c, c') of v_s (S, N) at
        L ρ_s (S, N), as one (n,)."""
        pull = self.root.rmatmul(on_density)
        if self.groups is not None:
            pull[self.root.n_field :] = self.groups.pulled(v, seen).mean(0)
        return pull


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
    and responses f_s (S, N); energy E(ξ), infinite where a density overflows.
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
        return _iterate(problem, target, xi, deviations, problem.root.matmul(deviations))

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

    @property
    def density(self) -> Tensor:
        """mean_s ρ_s (M,): J = L diag(mean_s ρ_s) T is the derivative of the mean response."""
        return self.densities.mean(0)

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

    def gradient(self) -> Tensor:
        """∂E/∂ξ (n,) = ξ − a − mean_s J_sᵀ Σ⁻¹ (t − f_s)."""
        weighted = self.residuals / self.problem.noise
        pull = (self.densities * self._forces(weighted)).mean(0)
        pulled = self.problem.pulled(pull, weighted, self.seen)
        return self.xi - self.target.anchor - pulled

    def covariance_pull(self) -> Tensor:
        """mean_s J_sᵀ Σ⁻¹ r_s − Jᵀ Σ⁻¹ mean_s r_s (n,): the part of the data's pull on ξ that
        the mean response does not see."""
        if len(self.densities) == 1:
            return torch.zeros_like(self.xi)
        problem, weighted = self.problem, self.residuals / self.problem.noise
        forces = self._forces(weighted)
        if problem.has_scales:
            whole = problem.pulled((self.densities * forces).mean(0), weighted, self.seen)
            return whole - self.tangent.rmatmul(weighted.mean(0))
        pull = (self.densities * forces).mean(0) - self.density * forces.mean(0)
        return problem.root.rmatmul(pull)

    def _forces(self, weighted: Tensor) -> Tensor:
        """Lᵀ diag(g_s) v_s (S, M) of v_s (S, N), g_s the gains of scales."""
        groups = self.problem.groups
        if groups is not None and groups.has_scales:
            c = self.c + self.deviations[:, self.problem.root.n_field :]
            weighted = groups.gains(c) * weighted
        return self.problem.rows.rmatmul(weighted)


@torch.no_grad()
def _iterate(
    problem: LogNormalProblem, target: EnergyTarget, xi: Tensor, deviations: Tensor, spread: Tensor
) -> Iterate:
    """The iterate at ξ of deviations (S, n) whose fields are spread (S, M), or 0 (1, 1)."""
    log_density = problem.log_mean + problem.root.matmul(xi)
    densities = (log_density + spread).exp_()
    seen = problem.rows.matmul(densities)
    n = problem.root.n_field
    responses = problem.measured(seen, xi[n:] + deviations[:, n:])
    energy = _energy(problem, target, xi, responses)
    if not (math.isfinite(energy) and bool(densities.isfinite().all())):
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
    """End of a descent: the iterate, the multipliers z (N,) for a warm start, CG steps spent,
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
    preconditioner: GramPreconditioner | None = None,
    progress: Progress = unwatched,
) -> Descent:
    """Lower E by Gauss-Newton steps at fixed hyperparameters.

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
        full = iterate.tangent.rmatmul(root_weights * solve.x)
        z, spent, taken = solve.x, spent + int(solve.steps), taken + 1
        found = line_search(iterate, anchor + full - iterate.xi)
        if found is None:
            decrease, tight = -1.0, tight * TIGHTER
            if tight < TIGHTEST:
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
    preconditioner: GramPreconditioner | None,
    tight: float = 1.0,
    progress: Progress = unwatched,
) -> tuple[SolveResult, Tensor]:
    """z of the next step, and a + e; tight scales the residual asked for."""
    tangent, root_weights = iterate.tangent, iterate.problem.noise.rsqrt()
    anchor = iterate.target.anchor + iterate.covariance_pull()
    carried = tangent.matmul(iterate.xi - anchor)
    target = root_weights * (iterate.residuals.mean(0) + carried)
    misfit = iterate.misfit()
    wanted = max(accuracy.residual, ROUGH * misfit) if misfit > FAR else accuracy.residual
    solve = pcg(
        tangent.gram(),
        target,
        preconditioner=preconditioner and preconditioner.at(tangent),
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
    for _ in range(HALVINGS):
        trial = iterate.moved(iterate.xi + length * step)
        if trial.energy < iterate.energy:
            return trial
        length *= 0.5
    return None
