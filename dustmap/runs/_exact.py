"""The exact engine: a dense Gaussian process, its hyperparameters learned by its evidence."""

import torch

from dustmap.config import Config
from dustmap.gp import Batch, ExactGP, HyperparameterFit, RegularGrid, fit_hyperparameters
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, MonteCarlo, Quadrature
from dustmap.runs._parts import Parts, start_of
from dustmap.runs._star_fit import Arrays, Hyperparameters, Learning, StarFit

MOST_ROWS = 10_000  # beyond, the dense covariance is too much to factor
QUADRATURE_ORDER = 32  # Gauss-Legendre points a ray
MONTE_CARLO_POINTS = 64  # seeded stratified points a ray


def fit_exact(config: Config, data: Batch, start: Hyperparameters | None) -> StarFit:
    """Learns what model.learn names, from start (None: the configuration's values), and conditions
    on all data."""
    gp, parts, learning = learn_exact(config, data, start, estimator_of(config))
    return _conditioned(gp, parts, data, learning)


def learn_exact(
    config: Config, data: Batch, start: Hyperparameters | None, estimator: AbstractEstimator
) -> tuple[ExactGP, Parts, HyperparameterFit | None]:
    """Maximises the evidence of fit.learn_rows stars from start, or the configuration's values."""
    parts = Parts.of(config, start or start_of(config.model), data)
    gp, likelihood = ExactGP(parts.kernel, parts.mean, estimator), parts.likelihood
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
    return gp, parts, learning


def reopen_exact(config: Config, data: Batch, at: Hyperparameters, arrays: Arrays) -> StarFit:
    """The posterior at hyperparameters that an earlier fit has learned."""
    del arrays  # the dense solve takes seconds
    parts = Parts.of(config, at, data)
    gp = ExactGP(parts.kernel, parts.mean, estimator_of(config))
    return _conditioned(gp, parts, data, None)


def exact_bytes(config: Config, rows: int, grid: RegularGrid) -> int:
    """Covariance, factor and inverse of the data; mean and variance of the nodes; float64."""
    del config  # float64 whatever it says
    return 8 * (3 * rows**2 + 8 * grid.size)


def estimator_of(config: Config) -> AbstractEstimator:
    """How model.line_integral has the covariances of rays computed."""
    if config.model.line_integral == "quadrature":
        return Quadrature(QUADRATURE_ORDER)
    if config.model.line_integral == "monte-carlo":
        return MonteCarlo(MONTE_CARLO_POINTS, config.fit.seed)
    return ClosedForm()


@torch.no_grad()
def _conditioned(
    gp: ExactGP, parts: Parts, data: Batch, learning: HyperparameterFit | None
) -> StarFit:
    noise_variance = parts.likelihood.noise_variance(data)
    return StarFit(
        posterior=gp.condition(data.functional, data.y, noise_variance),
        hyperparameters=parts.hyperparameters(),
        summary={"log_evidence": float(gp.log_evidence(data.functional, data.y, noise_variance))},
        learning=Learning.of_evidence(learning),
    )
