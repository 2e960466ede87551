"""Hyperparameters of a log-normal field: Newton steps on the evidence of its linearised model.

A trust radius limits the steps and says when they rest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.inference.evidence._learn_evidence import bounded_step
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_energy import (
    Accuracy,
    Iterate,
    LogNormalProblem,
    Tether,
    relative,
)
from dustmap.linalg import (
    AbstractOperator,
    CirculantOperator,
    Progress,
    SolveResult,
    divided,
    pcg,
    unwatched,
)

#: Bounds |Δθ| of one evidence step: the model is linearised where θ was.
_LARGEST_STEP = 0.5
#: |Δθ| that no user needs: solves of large data are no more accurate than that.
_NEGLIGIBLE_STEP = 1e-3
#: Step of differences in a log-parameter: errors of order 1e-4 of a derivative whose Monte Carlo
#: error is of the order of 1e-2.
_STEP = 1e-4
#: Draws whose fields are held at once.
_AT_ONCE = 8


@final
@dataclass(frozen=True, eq=False)
class Trust:
    """The last step Δθ (Q,) that was taken and the gradient (Q,) where it started, if there was
    one; promised: gain in nats that it was taken for; radius: bound of |Δθ|."""

    radius: float = _LARGEST_STEP
    step: Tensor | None = None
    gradient: Tensor | None = None
    promised: float = 0.0

    def new_radius(self, gradient: Tensor) -> float:
        """Twice the radius after a step that gained what it promised, half of it after one that
        did not; by the trapezoid rule the gain is ½ sᵀ(g₀ + g)."""
        if self.step is None or self.gradient is None:
            return self.radius
        gain = 0.5 * float(self.step @ (self.gradient + gradient))
        if gain > 0.5 * self.promised:
            return min(2.0 * self.radius, _LARGEST_STEP)
        return self.radius if gain > 0.25 * self.promised else 0.5 * self.radius

    def turns_back(self, delta: Tensor) -> bool:
        """Whether Δθ leads back where the last step came from. The linearisation and the weights of
        the data move with θ: such a step is cut to `half_a_step`, lest θ goes round in circles."""
        return self.step is not None and float(delta @ self.step) < 0.0

    @property
    def half_a_step(self) -> float:
        """Half of the last step's largest component."""
        return math.inf if self.step is None else 0.5 * float(self.step.abs().max())


def _widths_to_go(gradient: Tensor, information: Tensor) -> float:
    """√(gᵀ I⁻¹ g): posterior standard deviations between θ and the optimum."""
    return math.sqrt(max(0.0, float(gradient @ torch.linalg.solve(information, gradient))))


@final
@dataclass(frozen=True, eq=False)
class HyperPrior:
    """θ ~ N(origin, std²) for log-parameters θ (Q,): weak log-normal priors around the start."""

    origin: Tensor
    std: float

    @staticmethod
    def around(model: LogNormalModel, origin: Tensor | None, std: float) -> "HyperPrior":
        """Around `origin` (Q,), or the model's present log-parameters."""
        present = model.log_parameters()
        if origin is not None and origin.shape != present.shape:
            raise ValueError(
                f"origin must have shape {tuple(present.shape)}, one centre per log-parameter that "
                f"is learned, got {tuple(origin.shape)}"
            )
        return HyperPrior(present if origin is None else origin, std)

    def gradient(self, theta: Tensor) -> Tensor:
        """∂/∂θ ln p(θ) = −(θ − origin) / std² (Q,)."""
        return (self.origin - theta) / self.std**2


@final
@dataclass(frozen=True, eq=False)
class EvidenceStep:
    """gradient (Q,) of ln p(y | θ) + ln p(θ), its Monte Carlo error (Q,), the average information
    (Q, Q) of both, and the step Δθ (Q,) that follows.

    widths: distance of the optimum in posterior standard deviations; unbounded (Q,): the step
    without a bound; radius: the bound.
    """

    gradient: Tensor
    error: Tensor
    information: Tensor
    delta: Tensor
    widths: float
    unbounded: Tensor
    radius: float
    solve: SolveResult

    def rests(self, tolerance: float) -> bool:
        """Whether θ is within so many posterior standard deviations of the optimum, or within
        what solves can tell."""
        return self.widths < tolerance or float(self.unbounded.abs().max()) < _NEGLIGIBLE_STEP


@torch.no_grad()
def evidence_step(
    iterate: Iterate,
    z: Tensor,
    draws: Tensor,
    prior: HyperPrior,
    accuracy: Accuracy,
    preconditioner: AbstractOperator | None,
    trust: Trust,
    progress: Progress = unwatched,
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
    problem, theta = iterate.problem, read(iterate.problem)
    slopes = _slopes(problem, iterate.density)
    own = torch.stack([slope.quadratic(z) for slope in slopes])
    parts = torch.split(draws, _AT_ONCE)
    drawn = torch.stack([torch.cat([s.quadratic(part) for part in parts]) for s in slopes])
    gradient = 0.5 * (own - drawn.mean(-1)) + prior.gradient(theta)
    error = 0.5 * drawn.std(-1) / drawn.shape[-1] ** 0.5
    v = torch.stack([slope.product(z) for slope in slopes])
    solve = pcg(
        problem.gram(iterate.density),
        v,
        preconditioner=preconditioner,
        rtol=0.03,
        max_steps=accuracy.cg_steps,
        progress=progress,
    )
    products = v.double() @ solve.x.double().mT
    information = 0.25 * (products + products.mT) + torch.eye(len(theta)).to(own) / prior.std**2
    radius = trust.new_radius(gradient)
    delta = bounded_step(gradient, information, radius)
    if trust.turns_back(delta):
        radius = min(radius, trust.half_a_step)
        delta = bounded_step(gradient, information, radius)
    return EvidenceStep(
        gradient,
        error,
        information,
        delta,
        _widths_to_go(gradient, information),
        torch.linalg.solve(information, gradient),
        radius,
        solve,
    )


@torch.no_grad()
def carry(
    iterate: Iterate,
    problem: LogNormalProblem,
    z: Tensor,
    accuracy: Accuracy,
    preconditioner: AbstractOperator | None,
    progress: Progress = unwatched,
) -> tuple[Iterate, Tensor]:
    """The optimum of the old linearisation under new hyperparameters, where the fit goes on."""
    root_weights, density = problem.noise.rsqrt(), iterate.density
    field = iterate.log_density - problem.log_mean
    pseudo = iterate.residuals.mean(0) + problem.rows.matmul(density * field)
    target = root_weights * pseudo
    solve = pcg(
        problem.gram(density),
        target,
        preconditioner=preconditioner,
        x0=z,
        rtol=relative(accuracy.residual, target),
        max_steps=accuracy.cg_steps,
        progress=progress,
    )
    xi = problem.jacobian_transpose(density, root_weights * solve.x)
    tether = Tether(problem.y, torch.zeros_like(xi))
    return Iterate.at(problem, tether, xi), solve.x


def read(problem: LogNormalProblem) -> Tensor:
    """θ (Q,): what is learned of kernel and noise, float64."""
    return problem.model.log_parameters()


@torch.no_grad()
def write(problem: LogNormalProblem, theta: Tensor) -> None:
    """Sets the learned parameters of kernel and noise."""
    parameters = _parameters(problem)
    sizes = [p.numel() for p in parameters]
    for p, value in zip(parameters, torch.split(theta, sizes), strict=True):
        p.copy_(value.reshape(p.shape))


def _parameters(problem: LogNormalProblem) -> tuple[nn.Parameter, ...]:
    return problem.model.kernel_parameters() + problem.model.noise_parameters()


@final
@dataclass(frozen=True, eq=False)
class _KernelSlope:
    """A_p = W^½ L diag(ρ) (∂K/∂θ_p) diag(ρ) Lᵀ W^½, ∂K/∂θ_p a circulant of its own."""

    problem: LogNormalProblem
    density: Tensor
    covariance: AbstractOperator

    def product(self, z: Tensor) -> Tensor:
        """A_p z (..., N)."""
        root_weights = self.problem.noise.rsqrt()
        spread = self.density * self.problem.rows.rmatmul(root_weights * z)
        covaried = self.covariance.matmul(spread)
        return root_weights * self.problem.rows.matmul(self.density * covaried)

    def quadratic(self, z: Tensor) -> Tensor:
        """zᵀ A_p z (...), float64."""
        spread = self.density * self.problem.rows.rmatmul(self.problem.noise.rsqrt() * z)
        return (spread * self.covariance.matmul(spread)).sum(-1, dtype=torch.float64)


@final
@dataclass(frozen=True, eq=False)
class _NoiseSlope:
    """A_p = diag(∂ ln σ_n² / ∂θ_p), the derivative of W^½ C W^½ at fixed W."""

    slope: Tensor

    def product(self, z: Tensor) -> Tensor:
        """A_p z (..., N)."""
        return self.slope * z

    def quadratic(self, z: Tensor) -> Tensor:
        """zᵀ A_p z (...), float64."""
        return (self.slope * z.square()).sum(-1, dtype=torch.float64)


def _slopes(problem: LogNormalProblem, density: Tensor) -> list[_KernelSlope | _NoiseSlope]:
    """A_p of every learned parameter, in the order of `read`."""
    prior, found = problem.model.prior, list[_KernelSlope | _NoiseSlope]()
    for p in problem.model.kernel_parameters():
        for place in range(p.numel()):
            spectrum = _difference(p, place, prior.spectrum, lambda: prior.rebuilt().spectrum)
            slope = spectrum.to(problem.y.dtype)
            box = prior.grid.shape
            covariance = CirculantOperator(slope, prior.torus_shape, rows=box, columns=box)
            found.append(_KernelSlope(problem, density, divided(covariance, prior.world)))
    for p in problem.model.noise_parameters():
        for place in range(p.numel()):
            given = problem.model.likelihood.noise_variance(problem.data)
            slope = _difference(
                p, place, given, lambda: problem.model.likelihood.noise_variance(problem.data)
            )
            found.append(_NoiseSlope((slope / given).to(problem.y.dtype)))
    return found


def _difference(
    p: nn.Parameter, place: int, present: Tensor, value: Callable[[], Tensor]
) -> Tensor:
    """∂ value / ∂ p[place] by a difference; reverse mode would give one number at a time."""
    flat = p.data.view(-1)
    old = float(flat[place])
    flat[place] = old + _STEP
    moved = value()
    flat[place] = old
    return (moved - present) / _STEP
