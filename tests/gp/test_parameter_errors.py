"""Errors of learned parameters against dense information matrices, and against many data sets."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import integrate, stats
from torch import Tensor

from dustmap.gp import (
    Batch,
    ConstantMean,
    ExactGP,
    GPModel,
    HyperparameterFit,
    NeighbourEvidence,
    ParameterErrors,
    Parameters,
    fit_hyperparameters,
)
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import student_t_information

LENGTH, SIGMA = 0.5, 0.3


def drawn(n: int, dim: int, seed: int) -> tuple[GPModel, Batch]:
    """A model at the truth with mean zero, and n data of it in a box."""
    generator = torch.Generator().manual_seed(seed)
    side = {1: 8.0, 2: 3.0}[dim]
    x = side * torch.rand(n, dim, dtype=torch.float64, generator=generator)
    kernel = Matern32(LENGTH, 1.0, dim=dim)
    K = kernel(x[:, None] - x) + SIGMA**2 * torch.eye(n, dtype=torch.float64)
    y = torch.linalg.cholesky(K) @ torch.randn(n, dtype=torch.float64, generator=generator)
    model = GPModel(kernel, ConstantMean(0.0), GaussianLikelihood(jitter=SIGMA))
    return model, Batch(PointValues(x), y)


def fitted(n: int, dim: int, seed: int) -> tuple[Batch, HyperparameterFit]:
    model, data = drawn(n, dim, seed)
    return data, fit_hyperparameters(model, data, tolerance=1e-6)


def covariance_at(parameters: Parameters[GPModel], data: Batch, theta: Tensor) -> Tensor:
    model = parameters.build(theta)
    K = ExactGP(model.kernel, model.mean).covariance(data.functional)
    return K + torch.diag(model.likelihood.noise_variance(data))


def central(function: Callable[[Tensor], Tensor], theta: Tensor, step: float = 1e-4) -> Tensor:
    units = step * torch.eye(len(theta)).double()
    rows = [(function(theta + unit) - function(theta - unit)) / (2.0 * step) for unit in units]
    return torch.stack(rows)


@pytest.mark.parametrize("dim", [1, 2])
def test_errors_are_those_of_the_dense_average_information(dim: int) -> None:
    data, fit = fitted(120, dim, seed=0)
    parameters = Parameters.of(fit.model)
    theta = parameters.theta
    A = covariance_at(parameters, data, theta)
    slopes = central(lambda at: covariance_at(parameters, data, at), theta)
    residual = data.y - fit.model.mean.values(data.functional)
    pulls = slopes @ torch.linalg.solve(A, residual)
    information = 0.5 * pulls @ torch.linalg.solve(A, pulls.mT)
    of_mean = parameters.names.index("mean")
    information[of_mean, of_mean] = torch.linalg.solve(A, torch.ones_like(data.y)).sum()
    assert fit.errors is not None
    assert fit.errors.names == parameters.names
    got = torch.tensor(fit.errors.covariance).double()
    expected = torch.linalg.inv(information)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.max()))


@pytest.mark.parametrize("dim", [1, 2])
def test_errors_are_nearly_those_of_the_curvature_of_the_evidence(dim: int) -> None:
    data, fit = fitted(200, dim, seed=1)
    parameters = Parameters.of(fit.model)

    def gradient(theta: Tensor) -> Tensor:
        leaf = theta.clone().requires_grad_()
        model = parameters.build(leaf)
        noise = model.likelihood.noise_variance(data)
        value = ExactGP(model.kernel, model.mean).log_evidence(data.functional, data.y, noise)
        return torch.autograd.grad(value, leaf)[0]

    expected = torch.linalg.inv(-central(gradient, parameters.theta)).diagonal().sqrt()
    assert fit.errors is not None
    got = torch.tensor(fit.errors.covariance).double().diagonal().sqrt()
    # The two have the same expectation, and differ by 1/√(degrees of freedom).
    assert bool(((got / expected).log().abs() < 0.15).all()), got / expected


@pytest.mark.slow
def test_errors_are_calibrated() -> None:
    deviations = []
    for seed in range(40):
        _, fit = fitted(60, 1, seed)
        assert fit.errors is not None
        std = torch.tensor(fit.errors.covariance).double().diagonal().sqrt()
        length = fit.model.kernel.terms()[0].lengthscale[0].detach()
        place = fit.errors.names.index("length")
        deviations.append(float((length / LENGTH).log() / std[place]))
    z = torch.tensor(deviations)
    # 40 squares average 1 ± 0.22; the evidence is not quite normal in ln ℓ.
    assert abs(float(z.mean())) < 0.5
    assert 0.6 < float(z.square().mean()) < 1.7


def test_scores_of_conditionals_add_up_to_their_information() -> None:
    model, data = drawn(40, 2, seed=0)
    evidence = NeighbourEvidence.of(model.kernel, data, neighbours=40)
    parameters = Parameters.of(model, without=("mean",))
    got = evidence.information(parameters, parameters.theta)
    expected = torch.zeros_like(got)
    for i in range(len(data)):
        row = slice(i, i + 1)
        alone = NeighbourEvidence(data, evidence.rows[row], evidence.before[row])
        _, score = alone.gradient(parameters, parameters.theta)
        expected += torch.outer(score, score) / len(data) ** 2
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


def test_the_scores_of_many_conditionals_have_the_average_information() -> None:
    model, data = drawn(600, 2, seed=0)
    parameters = Parameters.of(model.learning("length", "variance", "scatter"))
    evidence = NeighbourEvidence.of(model.kernel, data)
    got = torch.linalg.inv(evidence.information(parameters, parameters.theta))
    fit = fit_hyperparameters(parameters.model, data, max_steps=1)
    assert fit.errors is not None
    expected = torch.tensor(fit.errors.covariance).double()
    ratio = (got.diagonal() / expected.diagonal()).sqrt()
    assert bool((ratio.log().abs() < 0.3).all()), ratio


def test_information_of_student_t_is_the_variance_of_its_scores() -> None:
    nu, step, at = 3.0, 1e-5, math.log(3.0)
    x = np.sinh(np.linspace(-8.0, 8.0, 4001))

    def log(log_nu: float, log_scale: float) -> NDArray[np.float64]:
        found: NDArray[np.float64] = stats.t.logpdf(x, math.exp(log_nu), scale=math.exp(log_scale))
        return found

    of_nu = (log(at + step, 0.0) - log(at - step, 0.0)) / (2.0 * step)
    scores = np.stack([of_nu, (log(at, step) - log(at, -step)) / (2.0 * step)])
    products = scores[:, None] * scores * stats.t.pdf(x, nu)
    expected = torch.from_numpy(integrate.trapezoid(products, x))
    one = torch.ones(1, dtype=torch.float64)
    got = student_t_information(nu, [one], one)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_what_follows_from_parameters_has_errors_to_first_order() -> None:
    errors = ParameterErrors(("a", "b"), ((0.04, 0.01), (0.01, 0.09)), (False, False))
    theta = torch.tensor([0.5, -1.0]).double()
    got = errors.of(theta, lambda at: {"sum": float(at.sum()), "ratio": float(at[0] / at[1])})
    assert got["sum"] == pytest.approx(math.sqrt(0.04 + 0.09 + 0.02))
    slope = torch.tensor([-1.0, -0.5]).double()
    covariance = torch.tensor(errors.covariance).double()
    assert got["ratio"] == pytest.approx(math.sqrt(float(slope @ covariance @ slope)))


def test_an_indefinite_covariance_tells_no_error() -> None:
    """As of information from solves that stopped early."""
    errors = ParameterErrors(("a", "b"), ((-0.04, 0.0), (0.0, 0.09)), (False, False))
    got = errors.of(torch.zeros(2), lambda at: {"a": float(at[0]), "b": float(at[1])})
    assert got == {"b": pytest.approx(0.3)}


def test_what_depends_on_a_held_parameter_has_no_error() -> None:
    information = torch.diag(torch.tensor([4.0, 1.0, 0.0]))
    held = torch.tensor([False, True, False])
    errors = ParameterErrors.of_information(("a", "b", "c"), information, held)
    assert errors.held == (False, True, True)
    names = {"a": 0, "b": 1, "c": 2}

    def quantities(theta: Tensor) -> dict[str, float]:
        return {name: float(theta[i]) for name, i in names.items()} | {"fixed": 1.0}

    found = errors.of(torch.ones(3).double(), quantities)
    assert found == {"a": pytest.approx(0.5), "b": None, "c": None}
    found = errors.holding("a").of(torch.ones(3).double(), quantities)
    assert found == {"a": None, "b": None, "c": None}
