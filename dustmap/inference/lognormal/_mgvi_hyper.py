"""Hyperparameters of a log-normal field: Newton steps on the evidence of its linearised model.

A trust radius limits the steps and says when they rest.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp import (
    MOST_INFLATION,
    AbstractSlopes,
    ParameterErrors,
    Parameters,
    RegularGrid,
    torus_for,
)
from dustmap.inference.evidence._steps import TrustRegion, bounded_step, shifted
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_descent import Accuracy, relative
from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import (
    LogNormalProblem,
    Preconditioner,
    metric_solver,
    shared_solve,
)
from dustmap.inference.lognormal._tangent import Tangent

_log = logging.getLogger(__name__)
#: Bounds |Δθ| of one evidence step: the model is linearised where θ was.
LARGEST_STEP = 0.5
#: What that bound is multiplied with. A step of 1 in the log-odds of the projection's share moves
#: the share by at most 0.25, and the variance of no mode by more than a factor of 1.7.
_SCALES = {"projection": 2.0}
#: |Δθ| that no user needs: solves of large data are no more accurate than that.
_NEGLIGIBLE_STEP = 1e-3
#: Step of differences in a log-parameter: errors of order 1e-4 of a derivative whose Monte Carlo
#: error is of the order of 1e-2.
_STEP = 1e-4
#: Relative residual of A⁻¹ A_q z, at most. With 0.1 one in eight fits rests too early.
_INFORMATION = 0.03
#: Draws whose fields are held at once.
_AT_ONCE = 8
#: Nodes of a torus per node of the grid, at most, for lengths that are learned; nodes that are few
#: whatever the grid; halvings of the interval of that length.
_MOST_POINTS, _FEW_POINTS, _HALVINGS = 16, 2**17, 40
#: Prior correlation of opposite faces beyond which the torus is enlarged.
_LARGEST_WRAP = 0.15
#: A torus with this many times the points that the present length scale asks for is replaced.
_WASTE = 1.5


def learned_from(
    model: LogNormalModel, origin: Tensor | None, std: float, padding: float
) -> Parameters[LogNormalModel]:
    """Learned parameters, with log-normal priors of width std at `origin` (Q,) or the present θ.

    Lengths stay between the spacing of the nodes and `longest_length`, the start within: to nodes
    that are further apart all fields are white, and what is smoother than the box looks the same
    in it. padding: of the torus, in length scales.
    """
    prior = model.prior
    longest = longest_length(prior.box, padding)
    bounds = {"length": math.log(longest)}, {"length": math.log(max(prior.lattice.spacing))}
    learned = replace(model.learned(), prior_std=std).limited(*bounds)
    if origin is None:
        return learned
    if origin.shape != learned.theta.shape:
        raise UserError(
            f"origin must have shape {tuple(learned.theta.shape)}, one centre per log-parameter "
            f"that is learned, got {tuple(origin.shape)}"
        )
    return replace(learned, centre=origin.to(learned.theta))


def longest_length(grid: RegularGrid, padding: float) -> float:
    """The length ℓ up to the longest side of the box at which padding makes a torus

        Π_d (M_d + padding · ℓ / h_d) ≤ max(`_MOST_POINTS` · M, `_FEW_POINTS`)

    that is no burden; padding: in length scales.
    """
    sides = list(zip(grid.shape, grid.spacing, strict=True))
    low, high = 0.0, max(h * (count - 1) for count, h in sides)
    most = max(_MOST_POINTS * grid.size, _FEW_POINTS)

    def holds(length: float) -> bool:
        return math.prod(m + padding * length / h for m, h in sides) <= most

    if holds(high):
        return high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def on_its_torus(problem: LogNormalProblem, padding: float) -> LogNormalProblem:
    """On another torus where ℓ has outgrown the padding, or shrunk to where it is wasted.

    padding: of a new torus, in length scales.
    """
    prior = problem.model.prior
    if not prior.grows:
        return problem
    wanted, report = torus_for(prior.kernel, prior.box, padding), prior.report
    outgrown = report.wrap_error > _LARGEST_WRAP or report.wrap_inflation > MOST_INFLATION
    if not (outgrown or prior.n_white > _WASTE * prior.white_on(wanted)):
        return problem
    now, before = (" × ".join(map(str, each)) for each in (wanted, prior.torus_shape))
    _log.info("the length has changed: the padded box has %s nodes, had %s", now, before)
    return problem.on(prior.on_torus(prior.kernel, wanted))


def on_torus(problem: LogNormalProblem, shape: tuple[int, ...]) -> LogNormalProblem:
    """On a torus of so many points per axis."""
    prior = problem.model.prior
    if shape == prior.torus_shape:
        return problem
    if not prior.grows or len(shape) != prior.box.dim:
        raise UserError(
            f"the torus {prior.torus_shape} of this prior cannot become {shape}: it belongs to "
            "another computation"
        )
    return problem.on(prior.on_torus(prior.kernel, shape))


@final
@dataclass(frozen=True, eq=False)
class EvidenceStep:
    """gradient (Q,) of ln p(y | θ) + ln p(θ), its Monte Carlo error (Q,), the average information
    (Q, Q) of both, and the step Δθ (Q,) that follows.

    widths: distance of the optimum in posterior standard deviations; unbounded (Q,): the step
    without a bound of its length; radius: that bound; errors: of θ, by the information. What is at
    a limit that the gradient leads across is held.
    """

    gradient: Tensor
    error: Tensor
    information: Tensor
    delta: Tensor
    widths: float
    unbounded: Tensor
    radius: float
    solve: linalg.SolveResult
    errors: ParameterErrors

    def rests(self, tolerance: float) -> bool:
        """Whether θ is within so many posterior standard deviations of the optimum, or within the
        accuracy of solves."""
        return self.widths < tolerance or float(self.unbounded.abs().max()) < _NEGLIGIBLE_STEP


@torch.no_grad()
def evidence_step(
    iterate: Iterate,
    z: Tensor,
    draws: Tensor,
    prior: Parameters[LogNormalModel],
    accuracy: Accuracy,
    preconditioner: Preconditioner | None,
    trust: TrustRegion,
    progress: linalg.Progress = linalg.unwatched,
) -> EvidenceStep:
    """One Newton step on the log evidence of the model linearised at ξ̄.

    There y − f̄ + J ξ̄ ~ N(0, C), W^½ C W^½ = A = I + W^½ J Jᵀ W^½. With A_p = ∂A/∂θ_p at a fixed
    linearisation, z = A⁻¹ W^½ (y − f̄ + J ξ̄) and draws z_s ~ N(0, A⁻¹) (K, N),

        ∂_p ln p = ½ zᵀ A_p z − ½ tr(A⁻¹ A_p),   tr(A⁻¹ A_p) ≈ mean_s z_sᵀ A_p z_s
        −∂_p ∂_q ln p ≈ ½ (A_p z)ᵀ A⁻¹ (A_q z)                      (average information)

    The draws are those of the metric samples, so the gradient costs one transform of each. No
    whitened sample is held fixed: at fixed ξ accurate data leave θ next to no freedom, and such
    gradients take many small steps. `trust` bounds |Δθ|.

    Reference: Gilmour, Thompson & Cullis (1995) on average information.
    """
    theta, tangent = iterate.problem.theta, iterate.tangent
    slopes, world = _Slopes.of(iterate.problem, tangent), iterate.problem.world
    own = slopes.quadratic(z[None])[:, 0]
    alone = iterate.apart().tangent
    parts = torch.split(draws[world.share(len(draws))], _AT_ONCE)
    forms = torch.cat([replace(slopes, tangent=alone).quadratic(part) for part in parts], 1)
    drawn = world.gathered(forms, world.shares(len(draws)))
    _, pull = prior.log_prior(theta)
    gradient = (0.5 * (own - drawn.mean(-1))).cpu() + pull
    error = (0.5 * drawn.std(-1) / drawn.shape[-1] ** 0.5).cpu()
    solver = metric_solver(alone, preconditioner and preconditioner.apart_from(world))
    # As exact as the information needs.
    residual, steps = min(_INFORMATION, accuracy.residual), accuracy.cg_steps
    solve = partial(solver, rtol=residual, max_steps=steps, progress=progress)
    v = slopes.products(z)
    solved = shared_solve(world, len(v), lambda own: solve(v[own]))
    products = v.double() @ solved.x.double().mT
    information = (0.25 * (products + products.mT)).cpu() + prior.prior_precision()
    held = prior.held(theta.cpu(), gradient)
    unbounded = bounded_step(gradient, information, math.inf, held)
    # The linearisation and the weights of the data move with θ.
    scales = gradient.new_tensor([_SCALES.get(name, 1.0) for name in prior.names])
    delta, radius = trust.next_step(gradient, information, held, scales)
    return EvidenceStep(
        gradient,
        error,
        information,
        prior.inside(theta.cpu() + delta) - theta.cpu(),
        math.sqrt(max(0.0, float(gradient @ unbounded))),
        unbounded,
        radius,
        solved,
        ParameterErrors.of_information(prior.names, information, held),
    )


@torch.no_grad()
def carry(
    iterate: Iterate,
    problem: LogNormalProblem,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: Preconditioner | None,
    progress: linalg.Progress = linalg.unwatched,
) -> tuple[Iterate, Tensor]:
    """Move to the optimum of the old linearisation under new hyperparameters."""
    field = iterate.log_density - problem.log_mean
    # The new torus may have another number of points.
    tangent = problem.tangent(iterate.density, iterate.c)
    pseudo = iterate.residuals.mean(0) + tangent.of_field(field, iterate.c)
    target = tangent.root_weights * pseudo
    solve = metric_solver(tangent, preconditioner)(
        target,
        x0=z,
        rtol=relative(accuracy.residual, target),
        max_steps=accuracy.cg_steps,
        progress=progress,
    )
    xi = tangent.rmatmul(tangent.root_weights * solve.x)
    return Iterate.at(problem, xi), solve.x


@final
@dataclass(frozen=True, eq=False)
class _Slopes:
    """A_p = ∂A/∂θ_p of every learned parameter at a tangent: kernels first, then the noise.

    kernels: ∂K/∂θ_p of A_p = W^½ L diag(ρ) (∂K/∂θ_p) diag(ρ) Lᵀ W^½, None of none; noises: the
    diagonal ∂ ln σ_n² / ∂θ_p (N,) of A_p, the derivative of W^½ C W^½ at fixed W.
    """

    tangent: Tangent
    kernels: AbstractSlopes | None
    noises: tuple[Tensor, ...]
    world: linalg.AbstractWorld

    @staticmethod
    def of(problem: LogNormalProblem, tangent: Tangent) -> "_Slopes":
        """By forward differences: reverse mode would give one number of a spectrum at a time."""
        model, dtype = problem.model, problem.y.dtype
        prior, noise = model.prior, model.likelihood.noise_variance(problem.data)
        changed, noises = list(shifted(Parameters.of(prior.kernel), _STEP)), list[Tensor]()
        kernels = prior.slopes(changed, _STEP) if changed else None
        for likelihood in shifted(Parameters.of(model.likelihood), _STEP):
            change = (likelihood.noise_variance(problem.data) - noise) / _STEP
            noises.append((change / noise).to(dtype))
        return _Slopes(tangent, kernels, tuple(noises), prior.world)

    def products(self, z: Tensor) -> Tensor:
        """A_p z (Q, N) of z (N,)."""
        spread = self._spread(z)
        parts = [slope * z for slope in self.noises]
        if self.kernels is not None:
            seen = self.tangent.root_weights * self.tangent.response(self.kernels.products(spread))
            parts = [*seen, *parts]
        return torch.stack(parts)

    def quadratic(self, z: Tensor) -> Tensor:
        """z_sᵀ A_p z_s (Q, K) of z (K, N), float64; ranks divide the K among them."""
        squares = z.square()
        parts = [(slope * squares).sum(-1, dtype=torch.float64)[None] for slope in self.noises]
        if self.kernels is not None:
            spread, world = self._spread(z), self.world
            forms = self.kernels.quadratic(spread[world.share(len(z))])
            parts = [world.gathered(forms, world.shares(len(z))), *parts]
        return torch.cat(parts)

    def _spread(self, z: Tensor) -> Tensor:
        """diag(ρ) Lᵀ W^½ z (..., M)."""
        return self.tangent.spread(self.tangent.root_weights * z)
