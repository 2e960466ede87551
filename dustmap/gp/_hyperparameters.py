"""Type-II maximum likelihood for the exact Gaussian process."""

import enum
import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._batch import Batch
from dustmap.gp._exact import ExactGP
from dustmap.gp._shares import whole_batch
from dustmap.gp.likelihoods import GaussianLikelihood

#: Log-parameters stay within this distance of their start: a factor of 1000 either way.
_LOG_RANGE = math.log(1e3)


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
    """The objective per datum as a function of one vector z (P,) with parameters of order one.

    Log-parameters are origin + B tanh(z/B), so that no line search can leave the range B; the
    mean's coefficients are origin + scale z, with scale their effect on y.
    """

    gp: ExactGP
    likelihood: GaussianLikelihood
    batch: Batch
    prior_std: float | None
    parameters: tuple[nn.Parameter, ...]
    origin: Tensor
    scale: Tensor
    is_log: Tensor

    @staticmethod
    def at_present(
        gp: ExactGP, likelihood: GaussianLikelihood, batch: Batch, prior_std: float | None
    ) -> "_Problem":
        named = [*gp.named_parameters(), *likelihood.named_parameters()]
        learned = [(name, p) for name, p in named if p.requires_grad]
        if not learned:
            raise ValueError("nothing to learn: no parameter of gp or likelihood requires grad")
        parameters = tuple(p for _, p in learned)
        origin = torch.cat([p.detach().reshape(-1) for p in parameters])
        logs = [torch.full((p.numel(),), _is_log(name)) for name, p in learned]
        in_mean = {id(p) for p in gp.mean.parameters()}
        scales = [
            _mean_scale(gp, batch) if id(p) in in_mean else torch.ones_like(p).reshape(-1)
            for p in parameters
        ]
        is_log = torch.cat(logs).to(origin.device)
        scale = torch.cat(scales).detach().to(origin)
        return _Problem(gp, likelihood, batch, prior_std, parameters, origin, scale, is_log)

    def _log_evidence(self) -> Tensor:
        noise_variance = self.likelihood.noise_variance(self.batch)
        return self.gp.log_evidence(self.batch.functional, self.batch.y, noise_variance)

    @torch.no_grad()
    def load(self, z: Tensor) -> Tensor:
        """Sets the parameters to those of z; returns dθ/dz (P,)."""
        squashed = torch.tanh(z / _LOG_RANGE)
        shift = torch.where(self.is_log, _LOG_RANGE * squashed, self.scale * z)
        theta = self.origin + shift
        sizes = [p.numel() for p in self.parameters]
        for p, value in zip(self.parameters, torch.split(theta, sizes), strict=True):
            p.copy_(value.reshape(p.shape))
        return torch.where(self.is_log, 1.0 - squashed.square(), self.scale)

    def evaluate(self, z: Tensor) -> tuple[float, Tensor]:
        """(ln p(y) + ln prior) / N at z and its gradient in z."""
        slope = self.load(z)
        value = self._log_evidence() + self._log_prior()
        parts = torch.autograd.grad(value, self.parameters)
        gradient = torch.cat([part.reshape(-1) for part in parts]) * slope
        return float(value.detach()) / len(self.batch), gradient / len(self.batch)

    def maximise(self, max_steps: int, tolerance: float) -> HyperparameterFit:
        """L-BFGS with strong Wolfe line searches from z = 0; leaves the parameters at the end."""
        z = torch.zeros_like(self.origin, requires_grad=True)
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
            value, gradient = self.evaluate(z.detach())
            z.grad = -gradient
            history.append(value)
            return -value

        optimiser.step(closure)  # type: ignore[no-untyped-call]
        end = z.detach()
        objective, gradient = self.evaluate(end)
        largest = float(gradient.abs().max())
        finished = optimiser.state[z]["n_iter"] < max_steps and len(history) < 4 * max_steps
        n = len(self.batch)
        return HyperparameterFit(
            log_evidence=n * objective - float(self._log_prior().detach()),
            objective=(*history, objective),
            status=self._status(end, largest <= tolerance, finished),
            largest_gradient=largest,
            n_data=n,
        )

    def _status(self, z: Tensor, flat: bool, finished: bool) -> FitStatus:
        # tanh has used up 95 % of the range at 1.8 B.
        if bool((self.is_log & (z.abs() > 1.8 * _LOG_RANGE)).any()):
            return FitStatus.AT_BOUND
        if flat:
            return FitStatus.CONVERGED
        return FitStatus.STAGNATED if finished else FitStatus.MAX_STEPS

    def _log_prior(self) -> Tensor:
        theta = torch.cat([p.reshape(-1) for p in self.parameters])
        if self.prior_std is None:
            return theta.new_zeros(())
        deviation = (theta - self.origin) / self.prior_std
        return -0.5 * (deviation.square() * self.is_log).sum()


def _is_log(name: str) -> bool:
    return name.split(".")[-1].startswith("log_")


def _mean_scale(gp: ExactGP, batch: Batch) -> Tensor:
    """Change of each coefficient that moves the data by their own spread, (P,)."""
    basis = gp.mean.basis(batch.functional)
    spread = batch.y.double().square().mean().sqrt() + torch.finfo(torch.float64).tiny
    return spread / basis.square().mean(0).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
