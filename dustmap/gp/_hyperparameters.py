"""Type-II maximum likelihood for the exact Gaussian process.

Maxima over the parameters of modules are found by L-BFGS in coordinates of order one.
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._batch import Batch, whole_batch
from dustmap.gp._exact import ExactGP
from dustmap.gp.likelihoods import GaussianLikelihood

#: Logarithms stay within this distance of their start: a factor of 1000 either way.
_LOG_RANGE = math.log(1e3)

#: z (P,) ↦ an objective and its gradient in z (P,).
Objective = Callable[[Tensor], tuple[float, Tensor]]


@final
class FitStatus(enum.Enum):
    """How the maximisation ended."""

    CONVERGED = "converged"
    MAX_STEPS = "max_steps"
    AT_BOUND = "at_bound"
    STAGNATED = "stagnated"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES[self]


_REMEDIES = {
    FitStatus.CONVERGED: "nothing to do",
    FitStatus.MAX_STEPS: "the gradient is not small yet: increase max_steps",
    FitStatus.AT_BOUND: (
        "a parameter moved by a factor of nearly 1000 from its start: the data may not constrain "
        "it; start elsewhere, fix it, or set prior_std"
    ),
    FitStatus.STAGNATED: (
        "the line search found no better point though the gradient is not small: loosen "
        "tolerance, or start elsewhere"
    ),
}


@final
@dataclass(frozen=True, eq=False)
class Coordinates:
    """Parameters θ as a function of one vector z (P,) of order one, with θ(0) their origin.

    Logarithms are origin + B tanh(z/B), so that no line search can leave the range B; all others
    are origin + scale z, with scale what a step of one is to them.

    origin, scale, is_log: (P,).
    """

    parameters: tuple[nn.Parameter, ...]
    origin: Tensor
    scale: Tensor
    is_log: Tensor

    @staticmethod
    def at_present(
        parameters: Sequence[nn.Parameter], logs: Sequence[bool], scales: Sequence[Tensor]
    ) -> "Coordinates":
        """Around the present values; of each parameter whether it is a logarithm, and its scale."""
        origin = torch.cat([p.detach().reshape(-1) for p in parameters])
        is_log = [torch.full((p.numel(),), log) for p, log in zip(parameters, logs, strict=True)]
        scale = torch.cat([scale.detach().reshape(-1) for scale in scales])
        return Coordinates(
            tuple(parameters), origin, scale.to(origin), torch.cat(is_log).to(origin.device)
        )

    @torch.no_grad()
    def load(self, z: Tensor) -> Tensor:
        """Sets the parameters to those of z; returns dθ/dz (P,)."""
        squashed = torch.tanh(z / _LOG_RANGE)
        theta = self.origin + torch.where(self.is_log, _LOG_RANGE * squashed, self.scale * z)
        sizes = [p.numel() for p in self.parameters]
        for p, value in zip(self.parameters, torch.split(theta, sizes), strict=True):
            p.copy_(value.reshape(p.shape))
        return torch.where(self.is_log, 1.0 - squashed.square(), self.scale)

    def log_prior(self, std: float | None) -> tuple[float, Tensor]:
        """ln N(θ; origin, std²) of the logarithms up to a constant, and its gradient in θ (P,)."""
        if std is None:
            return 0.0, torch.zeros_like(self.origin)
        theta = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        deviation = (theta - self.origin) / std * self.is_log
        return -0.5 * float(deviation.square().sum()), -deviation / std

    def is_at_bound(self, z: Tensor) -> bool:
        """Whether a logarithm is near the end of its range."""
        # tanh has used up 95 % of the range at 1.8 B.
        return bool((self.is_log & (z.abs() > 1.8 * _LOG_RANGE)).any())


@final
@dataclass(frozen=True)
class Ascent:
    """What `ascend` did.

    history: the objective at every evaluation, the last being the end; status; largest_gradient: in
    z, at the end.
    """

    history: tuple[float, ...]
    status: FitStatus
    largest_gradient: float


def ascend(
    coordinates: Coordinates,
    attempt: Objective,
    evaluate: Objective,
    *,
    max_steps: int,
    tolerance: float,
) -> Ascent:
    """L-BFGS with strong Wolfe line searches from z = 0; leaves the parameters at the end.

    attempt: the objective on the way; evaluate: at the end, of which the parameters are then those.
    tolerance: of the largest |gradient|, below which it stops.
    """
    z = torch.zeros_like(coordinates.origin, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [z],
        max_iter=max_steps,
        max_eval=4 * max_steps,
        history_size=20,
        tolerance_grad=tolerance,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )
    history: list[float] = []

    def closure() -> float:
        value, gradient = attempt(z.detach())
        z.grad = -gradient
        history.append(value)
        return -value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    end = z.detach()
    value, gradient = evaluate(end)
    largest = float(gradient.abs().max())
    finished = optimiser.state[z]["n_iter"] < max_steps and len(history) < 4 * max_steps
    if coordinates.is_at_bound(end):
        status = FitStatus.AT_BOUND
    elif largest <= tolerance:
        status = FitStatus.CONVERGED
    else:
        status = FitStatus.STAGNATED if finished else FitStatus.MAX_STEPS
    return Ascent((*history, value), status, largest)


@final
@dataclass(frozen=True)
class HyperparameterFit:
    """What `fit_hyperparameters` did.

    log_evidence: of the data used, at the end; objective: log evidence plus log prior per datum at
    every evaluation, the last being the end; status; largest_gradient: of that objective at the
    end; n_data: data used.
    """

    log_evidence: float
    objective: tuple[float, ...]
    status: FitStatus
    largest_gradient: float
    n_data: int


def fit_hyperparameters(
    gp: ExactGP,
    likelihood: GaussianLikelihood,
    batch: Batch,
    *,
    max_steps: int = 100,
    tolerance: float = 1e-5,
    prior_std: float | None = None,
    max_data: int | None = None,
    seed: int = 0,
) -> HyperparameterFit:
    """Maximises ln p(y) over all learned parameters of gp and likelihood, in place, by L-BFGS.

    tolerance: stop when the largest |gradient| of the objective per datum is below.
    prior_std: if given, every log-parameter gets a normal prior of this width around its start (a
    weak log-normal prior on the parameter: 2 is a factor of 7).
    max_data: if given, a random subset of that size is used.
    """
    generator = torch.Generator().manual_seed(seed)
    used = whole_batch(_subset(batch, max_data, generator))
    with torch.no_grad():
        noise_variance = likelihood.noise_variance(used)
    if any(p.requires_grad for p in gp.mean.parameters()):
        gp.fit_mean(used.functional, used.y, noise_variance)
    problem = _Problem.at_present(gp, likelihood, used, prior_std)
    return problem.maximise(max_steps, tolerance)


def _subset(batch: Batch, max_data: int | None, generator: torch.Generator) -> Batch:
    if max_data is None or len(batch) <= max_data:
        return batch
    chosen = torch.randperm(len(batch), generator=generator)[:max_data]
    return batch[chosen.sort().values.to(batch.y.device)]


@final
@dataclass(frozen=True, eq=False)
class _Problem:
    """The objective per datum as a function of the coordinates of what is learned."""

    gp: ExactGP
    likelihood: GaussianLikelihood
    batch: Batch
    prior_std: float | None
    coordinates: Coordinates

    @staticmethod
    def at_present(
        gp: ExactGP, likelihood: GaussianLikelihood, batch: Batch, prior_std: float | None
    ) -> "_Problem":
        named = [*gp.named_parameters(), *likelihood.named_parameters()]
        learned = [(name, p) for name, p in named if p.requires_grad]
        if not learned:
            raise ValueError("nothing to learn: no parameter of gp or likelihood requires grad")
        in_mean = {id(p) for p in gp.mean.parameters()}
        scales = [
            _mean_scale(gp, batch) if id(p) in in_mean else torch.ones_like(p) for _, p in learned
        ]
        coordinates = Coordinates.at_present(
            [p for _, p in learned], [_is_log(name) for name, _ in learned], scales
        )
        return _Problem(gp, likelihood, batch, prior_std, coordinates)

    def evaluate(self, z: Tensor) -> tuple[float, Tensor]:
        """(ln p(y) + ln prior) / N at z and its gradient in z."""
        slope, n = self.coordinates.load(z), len(self.batch)
        noise_variance = self.likelihood.noise_variance(self.batch)
        value = self.gp.log_evidence(self.batch.functional, self.batch.y, noise_variance)
        parts = torch.autograd.grad(value, self.coordinates.parameters)
        log_prior, pull = self.coordinates.log_prior(self.prior_std)
        gradient = (torch.cat([part.reshape(-1) for part in parts]) + pull) * slope
        return (float(value.detach()) + log_prior) / n, gradient / n

    def maximise(self, max_steps: int, tolerance: float) -> HyperparameterFit:
        """`ascend` from the present parameters."""
        ascent = ascend(
            self.coordinates,
            self.evaluate,
            self.evaluate,
            max_steps=max_steps,
            tolerance=tolerance,
        )
        n, (log_prior, _) = len(self.batch), self.coordinates.log_prior(self.prior_std)
        return HyperparameterFit(
            log_evidence=n * ascent.history[-1] - log_prior,
            objective=ascent.history,
            status=ascent.status,
            largest_gradient=ascent.largest_gradient,
            n_data=n,
        )


def _is_log(name: str) -> bool:
    return name.split(".")[-1].startswith("log_")


def _mean_scale(gp: ExactGP, batch: Batch) -> Tensor:
    """Change of each coefficient that moves the data by their own spread, (P,)."""
    basis = gp.mean.basis(batch.functional)
    spread = batch.y.double().square().mean().sqrt() + torch.finfo(torch.float64).tiny
    return spread / basis.square().mean(0).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
