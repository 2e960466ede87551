"""The exact engine: a dense Gaussian process, its hyperparameters learned by its evidence."""

import torch

from dustmap.config import Config, ModelConfig
from dustmap.gp import (
    AbstractMean,
    Batch,
    ConstantMean,
    ExactGP,
    HyperparameterFit,
    RegularGrid,
    fit_hyperparameters,
)
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, MonteCarlo, Quadrature
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
    StationaryKernel,
)
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.runs._star_fit import Arrays, Hyperparameters, Learning, StarFit

KERNELS = {
    "matern12": Matern12,
    "matern32": Matern32,
    "matern52": Matern52,
    "squared-exponential": SquaredExponential,
}
MOST_ROWS = 10_000  # beyond, the dense covariance is too much to factor
QUADRATURE_ORDER = 32  # Gauss-Legendre points a ray
MONTE_CARLO_POINTS = 64  # seeded stratified points a ray


def fit_exact(config: Config, data: Batch) -> StarFit:
    """Learns what model.learn names, starting at the configuration, and conditions on all data."""
    gp, likelihood, learning = learn_exact(config, data, estimator_of(config))
    return _conditioned(gp, likelihood, data, learning)


def learn_exact(
    config: Config, data: Batch, estimator: AbstractEstimator
) -> tuple[ExactGP, GaussianLikelihood, HyperparameterFit | None]:
    """Maximises the evidence of fit.learn_rows stars from the configuration's values."""
    gp, likelihood = _model(config, start_of(config.model), data.y.device, estimator)
    learning = None
    if any(p.requires_grad for p in (*gp.parameters(), *likelihood.parameters())):
        learning = fit_hyperparameters(
            gp,
            likelihood,
            data,
            max_steps=config.fit.max_steps,
            tolerance=config.fit.tolerance,
            max_data=config.fit.learn_rows,
            seed=config.fit.seed,
        )
    return gp, likelihood, learning


def start_of(model: ModelConfig) -> Hyperparameters:
    """Where learning starts, and what stays where nothing is learned."""
    std = model.std or model.mean_density
    return Hyperparameters(model.length, std, model.mean_density, 1.0)


def reopen_exact(config: Config, data: Batch, at: Hyperparameters, arrays: Arrays) -> StarFit:
    """The posterior at hyperparameters that an earlier fit has learned."""
    del arrays  # the dense solve takes seconds
    gp, likelihood = _model(config, at, data.y.device, estimator_of(config))
    return _conditioned(gp, likelihood, data, None)


def exact_bytes(config: Config, rows: int, grid: RegularGrid) -> int:
    """Covariance, factor and inverse of the data; mean and variance of the nodes; float64."""
    del config  # float64 whatever it says
    return 8 * (3 * rows**2 + 8 * grid.size)


def _model(
    config: Config, at: Hyperparameters, device: torch.device, estimator: AbstractEstimator
) -> tuple[ExactGP, GaussianLikelihood]:
    learn = config.model.learn
    kernel = kernel_of(config.model, at)
    kernel.log_lengthscale.requires_grad_("length" in learn)
    kernel.log_variance.requires_grad_("std" in learn)
    mean = ConstantMean(at.mean, learn="mean" in learn)
    gp = ExactGP(kernel, mean, estimator).to(device)
    likelihood = GaussianLikelihood(scale=at.noise, learn="noise" in learn).to(device)
    return gp, likelihood


def kernel_of(model: ModelConfig, at: Hyperparameters) -> StationaryKernel:
    """The kernel that model.kernel names, in three dimensions."""
    return KERNELS[model.kernel](at.length, at.std**2, dim=3)


def estimator_of(config: Config) -> AbstractEstimator:
    """How model.line_integral has the covariances of rays computed."""
    if config.model.line_integral == "quadrature":
        return Quadrature(QUADRATURE_ORDER)
    if config.model.line_integral == "monte-carlo":
        return MonteCarlo(MONTE_CARLO_POINTS, config.fit.seed)
    return ClosedForm()


@torch.no_grad()
def _conditioned(
    gp: ExactGP,
    likelihood: GaussianLikelihood,
    data: Batch,
    learning: HyperparameterFit | None,
) -> StarFit:
    noise_variance = likelihood.noise_variance(data)
    return StarFit(
        posterior=gp.condition(data.functional, data.y, noise_variance),
        hyperparameters=hyperparameters_of(gp.kernel, gp.mean, likelihood),
        summary={"log_evidence": float(gp.log_evidence(data.functional, data.y, noise_variance))},
        learning=Learning.of_evidence(learning),
    )


@torch.no_grad()
def hyperparameters_of(
    kernel: AbstractKernel, mean: AbstractMean, likelihood: GaussianLikelihood
) -> Hyperparameters:
    """The present values of what `Hyperparameters` names."""
    (term,) = kernel.terms()
    assert likelihood.log_scale is not None
    return Hyperparameters(
        length=float(term.lengthscale[0]),
        std=float(term.variance.sqrt()),
        mean=float(mean.coefficients()[0]),
        noise=float(likelihood.log_scale.exp()),
    )
