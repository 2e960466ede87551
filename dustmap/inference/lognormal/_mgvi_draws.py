"""Deviations of posterior samples: Gaussian by the metric, or following the field's curvature."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.inference.lognormal._lognormal_state import Iterate, LogNormalProblem, Tether
from dustmap.inference.lognormal._mgvi_newton import Accuracy, Descent, descend, relative
from dustmap.linalg import AbstractOperator, KeyedNormal, SolveResult, pcg

#: Streams of the random numbers: the prior's draw and the noise.
_WHITE, _NOISE = 101, 102
#: Straight deviations that spread the responses by this much more than the linear model are curved.
_LARGEST_EXCESS = 0.03


@final
@dataclass(frozen=True, eq=False)
class Perturbations:
    """ξ₀ ~ N(0, I) (K, n) and η ~ N(0, I) (K, N), functions of (seed, sample, position) only."""

    white: Tensor
    noise: Tensor

    @staticmethod
    def of(problem: LogNormalProblem, seed: int, samples: range) -> "Perturbations":
        """Those of the given samples."""
        like, parts = problem.y, []
        for stream, size in ((_WHITE, problem.n_latent), (_NOISE, len(problem.y))):
            numbers = KeyedNormal(seed, stream)
            drawn = [numbers.draw(s, size, like.dtype, like.device) for s in samples]
            parts.append(torch.stack(drawn))
        return Perturbations(*parts)


@torch.no_grad()
def metric_draws(
    mean: Iterate,
    perturbations: Perturbations,
    residual: float,
    max_steps: int,
    preconditioner: AbstractOperator | None,
    start: Tensor | None = None,
) -> tuple[Tensor, SolveResult]:
    """δ_s ~ N(0, (I + Jᵀ Σ⁻¹ J)⁻¹) (K, n) at ξ̄, by perturbing draws of the prior (pathwise):

        δ = ξ₀ + Jᵀ W^½ z,   (I + W^½ J Jᵀ W^½) z = η − W^½ J ξ₀

    Where the solve stops early, δ keeps the spread of the prior: too wide, not too narrow.
    start: z (K, N) of the same perturbations at a centre nearby.
    """
    problem, density = mean.problem, mean.log_density.exp()
    root_weights = problem.noise.rsqrt()
    target = perturbations.noise - root_weights * problem.jacobian(density, perturbations.white)
    solve = pcg(
        problem.gram(density),
        target,
        preconditioner=preconditioner,
        x0=start,
        rtol=relative(residual, target),
        max_steps=max_steps,
    )
    moved = problem.jacobian_transpose(density, root_weights * solve.x)
    return perturbations.white + moved, solve


def bends(mean: Iterate, straight: Tensor) -> bool:
    """Whether straight deviations leave the data at second order."""
    return excess_spread(mean, straight) > _LARGEST_EXCESS


@torch.no_grad()
def excess_spread(mean: Iterate, straight: Tensor) -> float:
    """By how much ±δ_s (K, n) spread the responses further than the linear model does.

        [mean_n Var_s(L ρ(ξ̄ ± δ_s))_n / σ_n²]^½ / [mean_n Var_s(J δ_s)_n / σ_n²]^½ − 1

    The metric is that of the linear model: what second order adds is not in the posterior.
    """
    problem, both = mean.problem, torch.cat([straight, -straight])
    bent = Iterate.at(problem, mean.tether, mean.xi, both).responses
    linear = problem.jacobian(mean.log_density.exp(), straight)
    squares = (bent - bent.mean(0)).square().mean(0), linear.square().mean(0)
    spread, expected = ((square / problem.noise).mean() for square in squares)
    return float((spread / expected).sqrt()) - 1.0


@torch.no_grad()
def curved_draw(
    mean: Iterate,
    white: Tensor,
    noise: Tensor,
    start: Tensor,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: AbstractOperator | None,
) -> Descent:
    """One deviation that honours the curvature of ρ: the ξ that minimises

        ½ ‖ξ − ξ̄ − ξ₀‖² + ½ ‖L ρ(ξ) − L ρ(ξ̄) − Σ^½ η‖²_{Σ⁻¹}

    For a linear response that is `metric_draws`. Here the sample stays within the noise of the
    data, where the straight deviation leaves it at second order. geoVI (Frank, Leike & Enßlin
    2021) solves the same equation with the Jacobian of ξ̄ in place of the sample's own; with the
    sample's own it is the gradient of an energy, so that every step can be made to lower it.
    """
    problem = mean.problem
    centre = problem.rows.matmul(mean.log_density.exp())
    tether = Tether(centre + problem.noise.sqrt() * noise, mean.xi + white)
    return descend(Iterate.at(problem, tether, mean.xi + start), z, accuracy, preconditioner)
