"""The exact Gaussian process against dense numpy algebra over point weights.

Every functional is a weighted sum over points here: a derivative by finite differences, an
integral by Gauss-Legendre nodes. One kernel matrix between all points then gives everything.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from dustmap.gp import GPModel
from dustmap.gp._exact import ExactGP, ExactPosterior
from dustmap.gp._means import ConstantMean, LinearMean
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Quadrature
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import Matern12, Matern32, Matern52
from dustmap.gp.likelihoods import GaussianLikelihood
from tests.gp.parameters import traced, with_values

Array = NDArray[np.float64]

LENGTHS = (0.8, 0.6, 1.1)
VARIANCE = 1.7
NODES = 40
INTERCEPT, SLOPE = 0.4, (0.5, -1.0, 0.3)


def matern52(a: Array, b: Array) -> Array:
    """k(a, b) (P, P') with one length scale per axis."""
    scaled = (a[:, None] - b[None, :]) / np.array(LENGTHS[: a.shape[1]])
    r = np.sqrt((scaled**2).sum(-1))
    return np.asarray(VARIANCE * (1 + math.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-math.sqrt(5) * r))


@dataclass(frozen=True, eq=False)
class Weighted:
    """f = W ρ(points)."""

    points: Array
    W: Array

    def mean(self) -> Array:
        slope = np.array(SLOPE[: self.points.shape[1]])
        return np.asarray(self.W @ (INTERCEPT + self.points @ slope), dtype=np.float64)

    def between(self, other: "Weighted") -> Array:
        return self.W @ matern52(self.points, other.points) @ other.W.T


def weighted(rows: list[tuple[Array, Array]]) -> Weighted:
    W = np.zeros((len(rows), sum(len(w) for _, w in rows)))
    start = 0
    for i, (_, w) in enumerate(rows):
        W[i, start : start + len(w)] = w
        start += len(w)
    return Weighted(np.concatenate([p for p, _ in rows]), W)


def value(x: Array) -> tuple[Array, Array]:
    return x[None], np.ones(1)


def derivative(x: Array, v: Array, h: float = 5e-4) -> tuple[Array, Array]:
    offsets, w = np.array([-2, -1, 1, 2]) * h, np.array([1, -8, 8, -1]) / (12 * h)
    return x + offsets[:, None] * v, w


def segment(a: Array, b: Array) -> tuple[Array, Array]:
    nodes, w = np.polynomial.legendre.leggauss(NODES)
    return a + 0.5 * (nodes[:, None] + 1) * (b - a), 0.5 * w * np.linalg.norm(b - a)


def data_of_every_kind(dim: int, seed: int, n: int = 4) -> tuple[Stacked, Weighted]:
    """n values, n derivatives and n line integrals, in two forms."""
    rng = np.random.default_rng(seed)
    x, at, start, end, v = rng.uniform(-1, 1, (5, n, dim))
    v = v / np.linalg.norm(v, axis=1, keepdims=True)
    rows = [value(p) for p in x]
    rows += [derivative(p, u) for p, u in zip(at, v, strict=True)]
    rows += [segment(a, b) for a, b in zip(start, end, strict=True)]
    functional = Stacked(
        (
            PointValues(torch.from_numpy(x)),
            Derivatives(torch.from_numpy(at), torch.from_numpy(v)),
            LineIntegrals.segment(torch.from_numpy(start), torch.from_numpy(end)),
        )
    )
    return functional, weighted(rows)


def prior_of(gp: ExactGP) -> GPModel:
    """Kernel and mean, which have the parameters."""
    return GPModel(gp.kernel, gp.mean, GaussianLikelihood())


def of_prior(gp: ExactGP, prior: GPModel) -> ExactGP:
    """The process with another kernel and mean."""
    return replace(gp, kernel=prior.kernel, mean=prior.mean)


def model(dim: int, estimator: AbstractEstimator | None = None) -> ExactGP:
    """The prior of the references, with their quadrature unless told otherwise."""
    kernel = Matern52(LENGTHS[:dim], VARIANCE)
    return ExactGP(kernel, LinearMean(SLOPE[:dim], INTERCEPT), estimator or Quadrature(NODES))


def measured(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """y and noise variance, float64."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=n)), torch.from_numpy(rng.uniform(0.01, 0.2, n))


@pytest.fixture(params=[1, 2, 3])
def dim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_prior_covariance(dim: int) -> None:
    functional, reference = data_of_every_kind(dim, 0)
    K = model(dim).covariance(functional).numpy()
    np.testing.assert_allclose(K, reference.between(reference), rtol=0, atol=2e-7)


def test_log_evidence_is_the_density_of_the_data(dim: int) -> None:
    functional, reference = data_of_every_kind(dim, 0)
    y, noise = measured(len(functional))
    A = reference.between(reference) + np.diag(noise)
    expected = stats.multivariate_normal.logpdf(y, reference.mean(), A)
    got = float(model(dim).log_evidence(functional, y, noise).detach())
    assert got == pytest.approx(expected, abs=1e-6)
    again = model(dim).condition(functional, y, noise).log_evidence(y)
    assert float(again) == pytest.approx(got, abs=1e-9)


def test_posterior_of_every_kind(dim: int) -> None:
    functional, reference = data_of_every_kind(dim, 0)
    query, at = data_of_every_kind(dim, 1, n=3)
    y, noise = measured(len(functional))
    A = reference.between(reference) + np.diag(noise)
    K_sf = at.between(reference)
    mean = at.mean() + K_sf @ np.linalg.solve(A, y.numpy() - reference.mean())
    covariance = at.between(at) - K_sf @ np.linalg.solve(A, K_sf.T)

    posterior = model(dim).condition(functional, y, noise)
    got = posterior.predict(query)
    np.testing.assert_allclose(got.mean, mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got.variance, covariance.diagonal(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(got.std, np.sqrt(covariance.diagonal()), rtol=0, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance(query), covariance, rtol=0, atol=1e-6)
    assert got.clamped == 0


def test_variances_below_round_off_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.linspace(0.0, 1.0, 60, dtype=torch.float64)
    at, y = PointValues(x[:, None]), torch.sin(6 * x)
    gp = ExactGP(Matern32(0.3, 1.0, dim=1), ConstantMean(0.0))
    got = gp.condition(at, y, torch.full_like(y, 1e-17)).predict(at)
    assert 0 < got.clamped <= int((got.variance == 0).sum())
    assert f"{got.clamped} of 60 posterior variances" in caplog.text


def test_samples_have_the_posterior_covariance() -> None:
    posterior, query = fitted()
    covariance = posterior.covariance(query)
    count = 20_000
    draws = posterior.sample(query, count, torch.Generator().manual_seed(3))
    assert torch.equal(draws, posterior.sample(query, count, torch.Generator().manual_seed(3)))
    variance = covariance.diagonal()
    error = (draws.mean(0) - posterior.predict(query).mean) / (variance / count).sqrt()
    assert float(error.abs().max()) < 5
    spread = ((variance[:, None] * variance[None, :] + covariance.square()) / count).sqrt()
    assert float(((draws.T.cov() - covariance) / spread).abs().max()) < 5


def test_samples_of_a_singular_covariance() -> None:
    posterior, _ = fitted()
    x = torch.zeros(3, 2, dtype=torch.float64)
    draws = posterior.sample(PointValues(x), 10, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws[:, 0], draws[:, 1], rtol=0, atol=1e-6)
    assert float(draws.std()) > 0


def fitted() -> tuple[ExactPosterior, AbstractFunctional]:
    functional, _ = data_of_every_kind(2, 0)
    return model(2).condition(functional, *measured(len(functional))), data_of_every_kind(2, 1)[0]


def values_and_derivatives(dim: int, n: int = 5) -> Stacked:
    functional, _ = data_of_every_kind(dim, 0, n)
    return Stacked(functional.parts[:2])


def test_gradient_of_the_log_evidence(dim: int) -> None:
    functional = values_and_derivatives(dim)
    y, noise = (t.requires_grad_() for t in measured(len(functional)))
    prior, leaves = traced(prior_of(model(dim)))

    def evidence(y: Tensor, noise: Tensor, *values: Tensor) -> Tensor:
        return of_prior(model(dim), with_values(prior, values)).log_evidence(functional, y, noise)

    assert torch.autograd.gradcheck(evidence, (y, noise, *leaves))


@pytest.mark.parametrize("estimator", [ClosedForm(), Quadrature(12)])
def test_gradient_of_the_log_evidence_of_rays(estimator: AbstractEstimator) -> None:
    functional, _ = data_of_every_kind(2, 0)
    y, noise = measured(len(functional))
    gp = model(2, estimator)
    prior, leaves = traced(prior_of(gp))

    def evidence(*values: Tensor) -> Tensor:
        return of_prior(gp, with_values(prior, values)).log_evidence(functional, y, noise)

    assert torch.autograd.gradcheck(evidence, leaves, atol=1e-4, rtol=1e-4)


def test_a_second_derivative_is_refused() -> None:
    functional = values_and_derivatives(1)
    y, noise = (t.requires_grad_() for t in measured(len(functional)))
    squared = model(1).log_evidence(functional, y, noise).square()
    for first in torch.autograd.grad(squared, (y, noise), create_graph=True):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.backward(first.sum())


def test_no_gradient_where_none_is_asked_for() -> None:
    functional = values_and_derivatives(1)
    y, noise = measured(len(functional))
    gp = model(1)
    with torch.no_grad():
        followed = of_prior(gp, traced(prior_of(gp))[0])
        assert not followed.log_evidence(functional, y, noise).requires_grad
    assert not gp.log_evidence(functional, y, noise).requires_grad
    noise.requires_grad_()
    assert gp.log_evidence(functional, y, noise).requires_grad


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    functional, _ = data_of_every_kind(2, 0)
    query, _ = data_of_every_kind(2, 1)
    y, noise = measured(len(functional))

    def everything() -> list[Tensor]:
        prior, leaves = traced(prior_of(model(2)))
        gp = of_prior(model(2), prior)
        evidence = gp.log_evidence(functional, y, noise)
        gradients = torch.autograd.grad(evidence, leaves)
        posterior = gp.condition(functional, y, noise)
        prediction = posterior.predict(query)
        joint = posterior.covariance(query)
        return [evidence.detach(), *gradients, prediction.mean, prediction.variance, joint]

    whole = everything()
    monkeypatch.setattr("dustmap.gp._exact._PAIRS", 60)
    torch.testing.assert_close(everything(), whole, rtol=1e-10, atol=1e-10)


def test_nearly_noiseless_data_are_reproduced() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    y = torch.sin(3 * x[:, 0])
    noise = torch.full_like(y, 1e-12)
    gp = ExactGP(Matern32(0.5, dim=1), ConstantMean())
    got = gp.condition(PointValues(x), y, noise).predict(PointValues(x))
    torch.testing.assert_close(got.mean, y, rtol=0, atol=1e-9)
    assert float(got.variance.max()) < 1e-11
    assert float(got.variance.min()) >= 0


def test_far_from_data_the_posterior_is_the_prior() -> None:
    functional, _ = data_of_every_kind(1, 0)
    posterior = model(1).condition(functional, *measured(len(functional)))
    far = posterior.predict(PointValues(torch.full((1, 1), 100.0, dtype=torch.float64)))
    assert float(far.mean) == pytest.approx(INTERCEPT + 100 * SLOPE[0])
    assert float(far.variance) == pytest.approx(VARIANCE)


def test_float32_data_get_float32_answers() -> None:
    functional, _ = data_of_every_kind(2, 0)
    y, noise = measured(len(functional))
    single = model(2).condition(functional, y.float(), noise.float()).predict(functional)
    double = model(2).condition(functional, y, noise).predict(functional)
    assert single.mean.dtype == single.variance.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-5, atol=1e-5)


def test_mean_by_generalised_least_squares_maximises_the_evidence() -> None:
    functional, _ = data_of_every_kind(2, 0)
    y, noise = measured(len(functional))
    gp = model(2)
    mean = gp.mean.with_coefficients(gp.fitted_coefficients(functional, y, noise))
    mean, leaves = traced(mean)
    evidence = replace(gp, mean=mean).log_evidence(functional, y, noise)
    (gradient,) = torch.autograd.grad(evidence, leaves)
    assert float(gradient.abs().max()) < 1e-8


def test_too_many_data_are_refused_before_allocation() -> None:
    n = 20_001
    functional = PointValues(torch.zeros(n, 1, dtype=torch.float64))
    y = torch.zeros(n, dtype=torch.float64)
    gp = model(1)
    with pytest.raises(ValueError, match=r"N = 20,001 data needs 6,400,640,016 bytes"):
        gp.log_evidence(functional, y, y + 1)
    with pytest.raises(ValueError, match="the largest N is 20,000"):
        gp.condition(functional, y, y + 1)
    with pytest.raises(ValueError, match="the largest N is 20,000"):
        gp.covariance(functional)


def test_shapes_that_disagree_are_refused() -> None:
    functional, _ = data_of_every_kind(1, 0)
    y, noise = measured(len(functional))
    with pytest.raises(ValueError, match=r"shape \(12,\).*\(11,\)"):
        model(1).condition(functional, y, noise[1:])


def test_a_covariance_that_is_not_positive_definite_is_refused() -> None:
    functional = PointValues(torch.zeros(4, 1, dtype=torch.float64))
    y = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"not positive definite.*raise noise_variance"):
        model(1).condition(functional, y, torch.full_like(y, 1e-18))


def test_derivatives_of_a_rough_kernel_are_refused() -> None:
    functional = values_and_derivatives(1)
    gp = ExactGP(Matern12(0.5, dim=1), ConstantMean())
    with pytest.raises(ValueError, match=r"Derivatives.*Matern12"):
        gp.condition(functional, *measured(len(functional)))
