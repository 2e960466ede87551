"""A Gaussian process with noise as one value, and its parameters of largest evidence."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import _parameters
from dustmap.gp._batch import Batch, whole_batch
from dustmap.gp._exact import ExactGP, covariance_factor
from dustmap.gp._means import AbstractMean
from dustmap.gp._parameter_errors import ParameterErrors
from dustmap.gp._zero_points import ZeroPoints
from dustmap.gp.covariances import AbstractEstimator, Wrapping
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood
from dustmap.linalg import Progress, unwatched

#: Change of a parameter in forward differences.
_SHIFT = 1e-5


@final
@dataclass(frozen=True, eq=False)
class GPModel(_parameters.AbstractParametric):
    """ρ ~ GP(mean, kernel), y = functionals of ρ + noise of the likelihood.

    zero_points: prior of those of groups of data, which the engines on grids of rays take; None for
    none. `Parameters.of(model)` has what is learned of it, and builds it at other values.
    """

    parts = ("kernel", "mean", "likelihood")

    kernel: AbstractKernel
    mean: AbstractMean
    likelihood: AbstractLikelihood
    zero_points: ZeroPoints | None = None

    @property
    def noise(self) -> GaussianLikelihood:
        """The likelihood of methods for Gaussian noise; a TypeError where it is another."""
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise TypeError(
                f"expected a GaussianLikelihood, got {type(self.likelihood).__name__}: use an "
                "engine of variational inference"
            )
        return self.likelihood

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the numbers that are learned of kernel and noise, kernel first."""
        return _parameters.Parameters.of(self, without=("mean",)).names

    def with_coefficients(self, coefficients: Tensor) -> "GPModel":
        """Return the model at other coefficients β (P,) of the mean."""
        return replace(self, mean=self.mean.with_coefficients(coefficients))


@final
@dataclass(frozen=True, eq=False)
class HyperparameterFit:
    """The model of largest evidence, as `maximise` left it.

    log_evidence: of the n_data data used, at the end; objective: log evidence plus log prior per
    datum at every evaluation, the last being the end; largest_gradient: of that objective at the
    end; refused: evaluations where the covariance could not be factorised; errors: of the learned
    parameters, by the average information of `fit_hyperparameters` and by the scores of the
    conditionals of `fit_neighbour_evidence`.
    """

    model: GPModel
    log_evidence: float
    objective: tuple[float, ...]
    status: _parameters.FitStatus
    largest_gradient: float
    n_data: int
    refused: int = 0
    errors: ParameterErrors | None = None

    @staticmethod
    def of(
        parameters: _parameters.Parameters[GPModel],
        maximum: _parameters.Maximum,
        n_data: int,
        information: Tensor,
    ) -> "HyperparameterFit":
        """Return the model at a maximum of its log evidence by `n_data` data.

        information (P, P): of the data there, in θ.
        """
        log_prior, _ = parameters.log_prior(maximum.theta)
        whole = information.double().cpu() + parameters.prior_precision()
        held = parameters.at_bound(maximum.theta)
        return HyperparameterFit(
            parameters.build(maximum.theta),
            n_data * maximum.history[-1] - log_prior,
            maximum.history,
            maximum.status,
            maximum.largest_gradient,
            n_data,
            maximum.refused,
            ParameterErrors.of_information(parameters.names, whole, held),
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
    progress: Progress = unwatched,
) -> HyperparameterFit:
    """Maximise ln p(y | θ) over what `model` learns, by L-BFGS.

    estimator, wrapping: as for `ExactGP`; tolerance: of the largest |gradient| per datum, below
    which it stops; prior_std: width of a normal prior of every log-parameter around its start (2 is
    a factor of 7), None for a flat one; max_data: size of a random subset that is used instead;
    progress: of the steps.
    """
    if max_data is not None and len(batch) > max_data:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(batch), generator=generator)[:max_data]
        batch = batch[chosen.sort().values.to(batch.y.device)]
    used = whole_batch(batch)
    functional, y = used.functional, used.y

    def gp(of: GPModel) -> ExactGP:
        return ExactGP(of.kernel, of.mean, estimator, wrapping)

    if model.mean.is_learned:
        with torch.no_grad():
            noise_variance = model.likelihood.noise_variance(used)
        beta = gp(model).fitted_coefficients(functional, y, noise_variance)
        model = model.with_coefficients(beta)
    parameters = _parameters.Parameters.of(
        model, scales={"mean": mean_scale(model.mean, used)}, prior_std=prior_std
    )
    parameters.require_some("the model")

    def log_evidence(theta: Tensor) -> Tensor:
        at = parameters.build(theta)
        return gp(at).log_evidence(functional, y, at.likelihood.noise_variance(used))

    maximum = _parameters.maximise(
        parameters,
        lambda theta: _parameters.gradient_at(theta, log_evidence),
        n_data=len(used),
        max_steps=max_steps,
        tolerance=tolerance,
        progress=progress,
    )
    information = average_information(parameters, maximum.theta, gp(model), used)
    return HyperparameterFit.of(parameters, maximum, len(used), information)


@torch.no_grad()
def average_information(
    parameters: _parameters.Parameters[GPModel], theta: Tensor, process: ExactGP, batch: Batch
) -> Tensor:
    """Return ½ (A_i α)ᵀ A⁻¹ (A_j α) + m_iᵀ A⁻¹ m_j (P, P), float64, of dense data at θ (P,).

    A = K_ff + Σ, α = A⁻¹ (y − m) at θ; A_i and m_i by forward differences. The mean of observed and
    expected information of kernel and noise, and the expected one of coefficients of the mean.

    process: its estimator and wrapping.

    Reference: Gilmour, Thompson & Cullis (1995).
    """
    functional = batch.functional

    def at(theta: Tensor) -> tuple[ExactGP, Tensor, Tensor]:
        model = parameters.build(theta)
        there = replace(process, kernel=model.kernel, mean=model.mean)
        return there, model.likelihood.noise_variance(batch).double(), model.mean.values(functional)

    here, noise, mean = at(theta)
    K, residual = here.covariance(functional), batch.y.double() - mean
    L = covariance_factor(K.clone(), noise)
    alpha = torch.cholesky_solve(residual[:, None], L).squeeze(-1)
    before, of_noise, of_mean = K @ alpha + noise * alpha, list[Tensor](), list[Tensor]()
    del K
    for unit in torch.eye(len(theta), dtype=theta.dtype):
        there, moved_noise, moved_mean = at(theta + _SHIFT * unit)
        after = there.covariance(functional) @ alpha + moved_noise * alpha
        of_noise.append((after - before) / _SHIFT)
        of_mean.append((moved_mean - mean) / _SHIFT)
    pulls, shifts = (
        torch.linalg.solve_triangular(L, torch.stack(each, -1), upper=False)
        for each in (of_noise, of_mean)
    )
    information: Tensor = 0.5 * pulls.mT @ pulls + shifts.mT @ shifts
    return information


def mean_scale(mean: AbstractMean, batch: Batch) -> Tensor:
    """Return the change (P,) of each coefficient that moves the data by their own spread."""
    tiny = torch.finfo(torch.float64).tiny
    basis = mean.basis(batch.functional)
    spread = batch.y.double().square().mean().sqrt() + tiny
    return spread / basis.square().mean(0).sqrt().clamp(min=tiny)
