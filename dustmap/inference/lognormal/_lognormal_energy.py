"""The energy of a log-normal field and its derivatives, and whether straight deviations leave the
data."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_problem import (
    LogNormalProblem,
    Preconditioner,
    node_preconditioner,
)
from dustmap.inference.lognormal._tangent import GramPreconditioner, NodePreconditioner, Tangent
from dustmap.linalg import AdaptiveBatch, Progress, divided

#: Straight deviations that spread the responses by this much more than the linear model are curved.
_LARGEST_EXCESS = 0.03
#: What helps where even few samples are too many.
ADVICE = "set a smaller fit.samples or box, or a larger grid.spacing"


@final
@dataclass(frozen=True, eq=False)
class Move:
    """A step Δξ (n,) and the change T Δξ (M,) of the log-density."""

    xi: Tensor
    field: Tensor


@final
@dataclass(frozen=True, eq=False)
class Iterate:
    """ξ with deviations δ_s at the present hyperparameters, and what follows from them:

        E(ξ) = mean_s ½ ‖y − f(ξ + δ_s)‖²_{Σ⁻¹} + ½ ‖ξ‖²,   f(ξ) = (1 + κ c'_g) L ρ(ξ) + τ c_g.

    xi (n,); deviations (S, n), S ≥ 1, a single row of zeros for a mode; spread T δ_s (S, M), or 0
    (1, 1); log_density H β₀ + T ξ (M,); densities ρ_s = exp(H β₀ + T (ξ + δ_s)) (S, M); seen L ρ_s
    and responses f_s (S, N); energy E(ξ), infinite where a density overflows. Of spread and
    densities ranks that divide draws have those of their share of the samples.
    """

    problem: LogNormalProblem
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
    def at(problem: LogNormalProblem, xi: Tensor, deviations: Tensor | None = None) -> "Iterate":
        """Everything that ξ and δ_s determine; without deviations, of ξ alone."""
        log_density = problem.log_density(xi)
        if deviations is None:
            alone = torch.zeros_like(xi)[None]
            return _iterate(problem, xi, alone, problem.log_mean.new_zeros(1, 1), log_density)
        own = deviations[problem.world.share(len(deviations))]
        return _iterate(problem, xi, deviations, problem.root.matmul(own), log_density)

    def apart(self) -> "Iterate":
        """The same for this rank alone, of ξ alone."""
        assert len(self.deviations) == 1
        return replace(self, problem=self.problem.apart())

    def moved(self, move: Move, length: float = 1.0) -> "Iterate":
        """At ξ + t Δξ, with the same deviations; takes no transform."""
        xi = torch.add(self.xi, move.xi, alpha=length)
        log_density = torch.add(self.log_density, move.field, alpha=length)
        return _iterate(self.problem, xi, self.deviations, self.spread, log_density)

    def afresh(self) -> "Iterate":
        """The same with its log-density by a transform of ξ, as a later reader of ξ has it."""
        log_density = self.problem.log_density(self.xi)
        return _iterate(self.problem, self.xi, self.deviations, self.spread, log_density)

    def with_own_response(self) -> "Iterate":
        """The same ξ and δ_s under the noise of their own mean response, where it grows with it."""
        if self.problem.model.likelihood.log_relative is None:
            return self
        problem = self.problem.with_response(self.responses.mean(0))
        energy = _energy(problem, self.xi, self.responses)
        return replace(self, problem=problem, energy=energy)

    @property
    def is_finite(self) -> bool:
        """Whether nothing overflows, so that there are steps to take from here."""
        return math.isfinite(self.energy)

    @property
    def residuals(self) -> Tensor:
        """y − f_s (S, N)."""
        return self.problem.y - self.responses

    @property
    def field(self) -> Tensor:
        """T ξ (M,)."""
        return self.log_density - self.problem.log_mean

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

    @property
    def all_c(self) -> Tensor:
        """(c, c') of all samples (S, G)."""
        return self.c + self.deviations[:, self.problem.root.n_field :]

    def misfit(self) -> float:
        """Root mean square of the mean response's residual in units of the noise."""
        white = self.residuals.mean(0) * self.problem.noise.rsqrt()
        return float(white.square().mean().sqrt())

    def _mean(self, own: Tensor) -> Tensor:
        """Mean over all samples of what this rank has of its own (S_r, ...)."""
        count = len(self.deviations)
        return (self.problem.world.total(own.sum(0)) if count > 1 else own.sum(0)) / count


@torch.no_grad()
def _iterate(
    problem: LogNormalProblem, xi: Tensor, deviations: Tensor, spread: Tensor, log_density: Tensor
) -> Iterate:
    """The iterate at ξ of deviations (S, n) whose fields are spread (S, M), or 0 (1, 1)."""
    densities = (log_density + spread).exp_()
    seen = problem.seen(densities, len(deviations))
    n = problem.root.n_field
    responses = problem.measured(seen, xi[n:] + deviations[:, n:])
    energy = _energy(problem, xi, responses)
    # Of densities ≥ 0 the largest is finite where all are.
    overflows = (~densities.amax(-1).isfinite()).sum()
    if len(deviations) > 1:
        overflows = problem.world.total(overflows)
    if not math.isfinite(energy) or int(overflows) > 0:
        energy = math.inf
    here = problem, xi, deviations, spread, log_density
    return Iterate(*here, densities, seen, responses, energy)


def _energy(problem: LogNormalProblem, xi: Tensor, responses: Tensor) -> float:
    """E(ξ) of responses f_s (S, N), in nats."""
    misfit = ((problem.y - responses).square() / problem.noise).sum(-1, dtype=torch.float64)
    strain = xi.square().sum(dtype=torch.float64)
    return 0.5 * float(misfit.mean() + strain)


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


def draws_at_once(count: int) -> AdaptiveBatch:
    """All samples at once, fewer where memory runs out."""
    return AdaptiveBatch("samples drawn together", count, ADVICE)


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

    def response(part: slice, sign: int) -> Tensor:
        moved = torch.add(mean.xi, own[part], alpha=sign)
        density = problem.log_density(moved).exp()
        return problem.response(density, moved)

    sides = [at_once.in_groups(len(own), partial(response, sign=s)) for s in (1, -1)]
    bent = torch.cat([*sides[0], *sides[1]])
    centre = world.total(bent.sum(0)) / (2 * count)
    square = world.total((bent - centre).square().sum(0)) / (2 * count)
    spread = (square / problem.noise).mean()
    return float((spread / determined_share(mean, straight, at_once)).sqrt()) - 1.0


@torch.no_grad()
def determined_share(mean: Iterate, straight: Tensor, at_once: AdaptiveBatch) -> float:
    """γ/N of the numbers γ = tr(Λ⁻¹ JᵀWJ) that N data determine, Λ = I + JᵀWJ, from draws δ_s
    (K, n) of N(0, Λ⁻¹):

        γ ≈ mean_s ‖W^½ J δ_s‖²

    Reference: MacKay (1992), "Bayesian interpolation", section 4.
    """
    world, count, problem = mean.problem.world, len(straight), mean.problem.apart()
    own, tangent = straight[world.share(count)], problem.tangent(mean.log_density.exp(), mean.c)

    def square(part: slice) -> Tensor:
        spread = tangent.root_weights * tangent.matmul(own[part])
        return spread.square().sum(dtype=torch.float64)[None]

    none = torch.zeros(1, dtype=torch.float64, device=straight.device)
    total = torch.cat([none, *at_once.in_groups(len(own), square)]).sum()
    return float(world.total(total)) / (count * len(problem.y))
