"""Type-II maximum likelihood for the exact Gaussian process."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp._batch import Batch, whole_batch
from dustmap.gp._exact import ExactGP
from dustmap.gp._lbfgs import FitStatus, Maximum, gradient_at, maximise
from dustmap.gp._means import AbstractMean
from dustmap.gp._model import GPModel
from dustmap.gp._parameters import Parameters
from dustmap.gp.covariances import AbstractEstimator, Wrapping


@final
@dataclass(frozen=True, eq=False)
class HyperparameterFit:
    """What `fit_hyperparameters` did.

    model: with the parameters at the end; log_evidence: of the data used, there; objective: log
    evidence plus log prior per datum at every evaluation, the last being the end; status;
    largest_gradient: of that objective at the end; n_data: data used; refused: evaluations where
    the covariance could not be factorised.
    """

    model: GPModel
    log_evidence: float
    objective: tuple[float, ...]
    status: FitStatus
    largest_gradient: float
    n_data: int
    refused: int = 0

    @staticmethod
    def of(parameters: Parameters[GPModel], maximum: Maximum, n_data: int) -> "HyperparameterFit":
        """The model at a maximum of its log evidence by `n_data` data."""
        log_prior, _ = parameters.log_prior(maximum.theta)
        return HyperparameterFit(
            parameters.build(maximum.theta),
            n_data * maximum.history[-1] - log_prior,
            maximum.history,
            maximum.status,
            maximum.largest_gradient,
            n_data,
            maximum.refused,
        )


def fit_hyperparameters(
    model: GPModel,
    batch: Batch,
    *,
    estimator: AbstractEstimator | None = None,
    wrapping: Wrapping | None = None,
    max_steps: int = 100,
    tolerance: float = 1e-5,
    prior_std: float | None = None,
    max_data: int | None = None,
    seed: int = 0,
) -> HyperparameterFit:
    """Maximises ln p(y | θ) over what `model` learns, by L-BFGS; the fitted model is in the result.

    estimator, wrapping: as for `ExactGP`.
    tolerance: stop when the largest |gradient| of the objective per datum is below.
    prior_std: if given, every log-parameter gets a normal prior of this width around its start (a
    weak log-normal prior on the parameter: 2 is a factor of 7).
    max_data: if given, a random subset of that size is used.
    """
    generator = torch.Generator().manual_seed(seed)
    used = whole_batch(_subset(batch, max_data, generator))
    functional, y = used.functional, used.y

    def gp(of: GPModel) -> ExactGP:
        return ExactGP(of.kernel, of.mean, estimator, wrapping)

    if model.mean.is_learned:
        with torch.no_grad():
            noise_variance = model.likelihood.noise_variance(used)
        beta = gp(model).fitted_coefficients(functional, y, noise_variance)
        model = model.with_coefficients(beta)
    parameters = Parameters.of(
        model, scales={"mean": mean_scale(model.mean, used)}, prior_std=prior_std
    )
    parameters.require_some("the model")

    def log_evidence(theta: Tensor) -> Tensor:
        at = parameters.build(theta)
        return gp(at).log_evidence(functional, y, at.likelihood.noise_variance(used))

    maximum = maximise(
        parameters,
        lambda theta: gradient_at(theta, log_evidence),
        n_data=len(used),
        max_steps=max_steps,
        tolerance=tolerance,
    )
    return HyperparameterFit.of(parameters, maximum, len(used))


def _subset(batch: Batch, max_data: int | None, generator: torch.Generator) -> Batch:
    if max_data is None or len(batch) <= max_data:
        return batch
    chosen = torch.randperm(len(batch), generator=generator)[:max_data]
    return batch[chosen.sort().values.to(batch.y.device)]


def mean_scale(mean: AbstractMean, batch: Batch) -> Tensor:
    """Change of each coefficient of the mean that moves the data by their own spread, (P,)."""
    tiny = torch.finfo(torch.float64).tiny
    basis = mean.basis(batch.functional)
    spread = batch.y.double().square().mean().sqrt() + tiny
    return spread / basis.square().mean(0).sqrt().clamp(min=tiny)
