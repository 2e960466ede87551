"""Fisher's identity against the dense evidence: autograd, finite differences, the exact GP."""

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ExactGP, GPModel, Parameters, gradient_at
from dustmap.gp.features import TorusFeatures
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel
from dustmap.inference.evidence._evidence import (
    Moments,
    differentiate,
    gradient_values,
)
from tests.inference.evidence_cases import (
    KINDS,
    dense_log_evidence,
    dense_solution,
    functionals,
    model,
    observed,
    sampled_deviations,
    torus_features,
)


def autograd_of_dense(grid_model: GridModel, batch: Batch) -> Tensor:
    parameters = Parameters.of(grid_model)
    _, gradient = gradient_at(
        parameters.theta, lambda theta: dense_log_evidence(parameters.build(theta), batch)
    )
    return gradient


def values_of(grid_model: GridModel, batch: Batch, moments: Moments) -> Tensor:
    """`gradient_values` in all that is learned."""
    parameters = Parameters.of(grid_model)
    leaf = parameters.theta.clone().requires_grad_()
    return gradient_values(parameters.build(leaf), leaf, batch, moments)


def standard_errors(grid_model: GridModel, batch: Batch, moments: Moments) -> Tensor:
    """Of `values_of`: the scatter of the deviations; the prior mean has none."""
    return differentiate(grid_model, batch, moments).monte_carlo_covariance.diagonal().sqrt()


@pytest.mark.parametrize(
    ("dim", "kind"),
    [
        *((d, k) for d in (1, 2) for k in KINDS),
        (3, "points"),
        pytest.param(2, "all", marks=pytest.mark.slow),
        pytest.param(3, "all", marks=pytest.mark.slow),
    ],
)
def test_exact_moments_give_the_exact_gradient(dim: int, kind: str) -> None:
    likelihood = GaussianLikelihood(scale=1.2, jitter=0.2)
    grid_model = model(dim, likelihood=likelihood)
    batch = observed(functionals(kind, dim, 9 if dim < 3 else 3))
    solution = dense_solution(grid_model, batch)
    got = values_of(grid_model, batch, Moments(solution.eps_mean, solution.deviations))
    expected = autograd_of_dense(grid_model, batch)
    assert len(got) == 5
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


def test_the_gradient_is_that_of_finite_differences() -> None:
    grid_model = model(2)
    batch = observed(functionals("rays", 2, 20))
    solution = dense_solution(grid_model, batch)
    got = values_of(grid_model, batch, Moments(solution.eps_mean, solution.deviations))
    parameters = Parameters.of(grid_model)
    for unit, gradient in zip(torch.eye(len(parameters)).double(), got, strict=True):
        ends = [
            float(dense_log_evidence(parameters.build(parameters.theta + step * unit), batch))
            for step in (1e-5, -1e-5)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        assert float(gradient) == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_samples_are_right_within_their_standard_errors() -> None:
    grid_model = model(1, 0.3)
    batch = observed(functionals("points", 1, 60))
    solution = dense_solution(grid_model, batch)
    exact = autograd_of_dense(grid_model, batch)
    scores = []
    for seed in range(8):
        deviations = sampled_deviations(solution, 16, seed)
        moments = Moments(solution.eps_mean, deviations)
        *kernel_errors, mean_error, noise_error = standard_errors(grid_model, batch, moments)
        assert float(mean_error) == 0.0
        errors = torch.stack([*kernel_errors, noise_error])
        wrong = values_of(grid_model, batch, moments) - exact
        assert abs(float(wrong[2])) < 1e-8
        scores.append(wrong[[0, 1, 3]] / errors)
    rms = torch.stack(scores).square().mean(0).sqrt()
    # 8 values of Student's t with 15 degrees of freedom.
    assert bool((rms > 0.5).all())
    assert bool((rms < 1.7).all())


@pytest.mark.parametrize("kind", ["points", "rays"])
def test_the_field_held_fixed_gives_the_same_gradient_with_less_noise(kind: str) -> None:
    grid_model = model(1, 0.3, 10.0, shape=(30,))
    batch = observed(functionals(kind, 1, 40))
    solution = dense_solution(grid_model, batch)
    width = grid_model.features.n_features
    identity = width**0.5 * torch.eye(width, dtype=torch.float64)
    moments = Moments(solution.eps_mean, solution.deviations, identity)
    got = values_of(grid_model, batch, moments)
    expected = autograd_of_dense(grid_model, batch)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))

    white = torch.randn((400, width), generator=torch.Generator().manual_seed(0)).double()
    phi = grid_model.features.rows(batch.functional).phi.detach()
    sigma = grid_model.sigma(batch).detach()
    xi = torch.randn((400, len(batch)), generator=torch.Generator().manual_seed(1)).double()
    right = white + (xi / sigma.sqrt()) @ phi
    deviations = right @ solution.factor @ solution.factor.mT
    centred = Moments(solution.eps_mean, deviations, white)
    errors = standard_errors(grid_model, batch, centred)
    wrong = values_of(grid_model, batch, centred) - expected
    assert bool((wrong.abs() <= 4.0 * errors + 1e-8).all())
    plain = standard_errors(grid_model, batch, Moments(solution.eps_mean, deviations))
    assert float(errors[0]) < 0.5 * float(plain[0])


@pytest.mark.parametrize("kind", ["points", "rays"])
def test_average_information_of_the_dense_model(kind: str) -> None:
    grid_model = model(1, 0.3, shape=(30,))
    batch = observed(functionals(kind, 1, 80))
    solution = dense_solution(grid_model, batch)
    deviations = sampled_deviations(solution, 4)
    moments = Moments(solution.eps_mean, deviations, deviations)
    derivatives = differentiate(grid_model, batch, moments)
    got = derivatives.average_information()

    def covariance(present: GridModel) -> Tensor:
        phi = present.features.rows(batch.functional).phi
        return (phi @ phi.mT + torch.diag(present.sigma(batch))).detach()

    A = covariance(grid_model)
    residual = batch.y - grid_model.mean.values(batch.functional).detach()
    alpha = torch.linalg.solve(A, residual)
    parameters = Parameters.of(grid_model)
    moved = [
        parameters.build(parameters.theta + 1e-5 * unit)
        for unit in torch.eye(len(parameters)).double()
    ]
    columns = [(covariance(at) - A) @ alpha / 1e-5 for at in moved]
    q = torch.stack(columns, -1)
    q[:, 2] = 0.0
    expected = 0.5 * q.mT @ torch.linalg.solve(A, q)
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=5e-3 * float(expected.max()))


@pytest.mark.parametrize("kind", ["points", "rays"])
def test_close_to_the_exact_gaussian_process_on_a_fine_grid(kind: str) -> None:
    grid_model = model(1, 0.3, shape=(60,))
    batch = observed(functionals(kind, 1, 40))
    solution = dense_solution(grid_model, batch)
    got = values_of(grid_model, batch, Moments(solution.eps_mean, solution.deviations))
    prior = torus_features(grid_model).prior
    parameters = Parameters.of(GPModel(prior.kernel, grid_model.mean, grid_model.likelihood))

    def log_evidence(theta: Tensor) -> Tensor:
        at = parameters.build(theta)
        exact = ExactGP(at.kernel, at.mean, wrapping=prior.wrapping)
        noise = at.likelihood.noise_variance(batch)
        return exact.log_evidence(batch.functional, batch.y, noise)

    _, expected = gradient_at(parameters.theta, log_evidence)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [7])
def test_chunks_of_the_data_add_up(rows: int) -> None:
    likelihood = GaussianLikelihood(jitter=0.2)
    whole = model(2, likelihood=likelihood)
    width = whole.features.n_features
    batch = observed(functionals("points", 2, 15))
    solution = dense_solution(whole, batch)
    small = GridModel(
        TorusFeatures(torus_features(whole).prior, memory=6 * 8 * width * rows),
        whole.mean,
        likelihood,
    )
    assert small.features.chunk == rows
    moments = Moments(solution.eps_mean, sampled_deviations(solution, 5))
    expected, got = (values_of(m, batch, moments) for m in (whole, small))
    # The estimator interpolates far images over the range of the data that it is given together.
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    expected, got = (standard_errors(m, batch, moments) for m in (whole, small))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-8)
