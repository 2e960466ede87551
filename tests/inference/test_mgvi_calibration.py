"""Log-normal posteriors against importance sampling, known truths and the Gaussian model."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ExactGP, GPModel, Prediction, fit_hyperparameters
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import LogNormalModel, MGVISettings, fit_mgvi, typical_log_density
from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

pytestmark = pytest.mark.slow


def importance_moments(
    problem: LogNormalProblem, solution_xi: Tensor, count: int
) -> tuple[Tensor, Tensor, float]:
    """Posterior mean and std of the log-density (M,) and the effective number of draws.

    Proposals ξ̄ + 1.2 δ, δ of the inverse metric at ξ̄, weighted by posterior over proposal.
    """
    tangent = Iterate.at(problem, solution_xi).tangent
    eye = torch.eye(problem.n_latent, dtype=torch.float64)
    J = tangent.matmul(eye).mT
    metric = eye + J.mT @ (J / problem.noise[:, None])
    factor = 1.2 * torch.linalg.inv(torch.linalg.cholesky(metric)).mT
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(count, problem.n_latent, generator=generator, dtype=torch.float64)
    xi = solution_xi + white @ factor.mT
    fields = problem.log_mean + problem.root.matmul(xi)
    residual = problem.y - problem.rows.matmul(fields.exp())
    log_posterior = -0.5 * ((residual.square() / problem.noise).sum(-1) + xi.square().sum(-1))
    weight = torch.softmax(log_posterior + 0.5 * white.square().sum(-1), 0)
    mean = weight @ fields
    return mean, (weight @ (fields - mean).square()).sqrt(), float(1 / weight.square().sum())


@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_moments_of_a_small_problem_are_those_of_importance_sampling(
    dim: int, curved: bool
) -> None:
    nodes = 9 if dim == 1 else 4
    model = model_of(
        box(dim, nodes),
        length=0.15 if dim == 1 else 0.25,
        variance=0.5,
        mean=ConstantMean(0.0, learn=False),
        learn=False,
    )
    data = observe(model, draw_truth(model, 0), positions(12, dim, 0), 0.2, 0)
    settings = MGVISettings(samples=200, curved=curved, residual=1e-2)
    solution = fit_mgvi(model, data, settings)
    problem = LogNormalProblem.of(model, data)
    mean, std, effective = importance_moments(problem, solution.xi, 200_000)
    assert effective > 2_000
    found_mean, found_std = solution.posterior.node_log_moments()
    assert float(((found_mean - mean) / std).abs().max()) < 0.35
    assert float((found_std / std - 1).abs().median()) < 0.15
    assert float((found_std / std - 1).abs().max()) < 0.35


SEEDS = (0, 1, 2, 3)


def truth_and_data(seed: int) -> tuple[LogNormalModel, Tensor, Batch, LineIntegrals, Tensor]:
    """The generating model, its log-density, training data, held-out rays and their values."""
    truth = model_of(box(3, 14), length=0.3)
    log_density = draw_truth(truth, seed)
    where = positions(700, 3, seed)
    data = observe(truth, log_density, where, 0.05, seed)
    held = data.functional[500:]
    assert isinstance(held, LineIntegrals)
    values = truth.interpolation(held).matmul(log_density.exp())
    return truth, log_density, data[:500], held, values


def held_likelihood(found: Prediction, values: Tensor, noise: Tensor) -> float:
    """Mean log density of noise-free held-out values, with the noise's variance added."""
    variance = found.variance.double() + noise
    z2 = (values - found.mean.double()).square() / variance
    return float((-0.5 * (z2 + (2 * math.pi * variance).log())).mean())


def gaussian_model(data: Batch) -> tuple[ExactGP, GaussianLikelihood]:
    """The exact GP at its evidence optimum, from the same start."""
    start = float(data.y.mean() / data.functional.moments()[:, 0].mean())
    kernel, mean = Matern32(0.15, start**2, dim=3), ConstantMean(start)
    model = GPModel(kernel, mean, GaussianLikelihood(scale=1.0))
    best = fit_hyperparameters(model, data, max_steps=25, prior_std=2.0).model
    return ExactGP(best.kernel, best.mean), best.noise


def test_skies_from_the_prior_are_calibrated_and_beat_the_gaussian_model() -> None:
    coverages, lengths, errors, scores = [], [], [], []
    for seed in SEEDS:
        _, log_density, data, held, values = truth_and_data(seed)
        model = model_of(
            box(3, 14),
            length=0.15,
            mean=ConstantMean(typical_log_density(data, 1.0)),
            likelihood=GaussianLikelihood(scale=1.0),
            dtype=torch.float32,
        )
        solution = fit_mgvi(model, data, MGVISettings(samples=32))
        posterior = solution.posterior
        mean, std = (moment.double() for moment in posterior.node_log_moments())
        coverages.append(float((((log_density - mean) / std).abs() < 1).double().mean()))
        lengths.append(float(solution.model.learned().theta[0].exp()))
        nodes = PointValues(model.prior.lattice.points())
        gp, likelihood = gaussian_model(data)
        noise = likelihood.noise_variance(data).detach()
        exact = gp.condition(data.functional, data.y, noise)
        density = log_density.exp()
        errors.append(
            tuple(
                float((found.double() - density).square().mean().sqrt())
                for found in (posterior.predict(nodes).mean, exact.predict(nodes).mean)
            )
        )
        scores.append(
            tuple(
                held_likelihood(found, values, noise[0])
                for found in (posterior.predict(held), exact.predict(held))
            )
        )
    assert 0.64 <= sum(coverages) / len(coverages) <= 0.72, coverages
    typical = math.exp(sum(math.log(length) for length in lengths) / len(lengths))
    assert 0.3 / 1.3 < typical < 0.3 * 1.3, lengths
    assert sum(a for a, _ in errors) < sum(b for _, b in errors), errors
    assert sum(a for a, _ in scores) > sum(b for _, b in scores), scores
