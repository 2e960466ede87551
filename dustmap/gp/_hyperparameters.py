"""Type-II maximum likelihood for the exact Gaussian process."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp._ascent import Coordinates, FitStatus, ascend
from dustmap.gp._batch import Batch
from dustmap.gp._exact import ExactGP
from dustmap.gp._shares import whole_batch
from dustmap.gp.likelihoods import GaussianLikelihood


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
