"""Hyperparameters learned along collapsed objectives."""

import math

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, ExactGP, FitStatus, Parameters
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32, SquaredExponential
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    FITC,
    SGPR,
    VariationalModel,
    fit_collapsed,
)
from tests.inference.collapsed_cases import free_model, points_batch, solved


def test_learning_reaches_what_the_exact_process_learns() -> None:
    generator = torch.Generator().manual_seed(2)
    x = 6 * torch.rand(150, 1, dtype=torch.float64, generator=generator)
    truth = SquaredExponential(0.8, 1.5, dim=1)
    K = truth(x[:, None] - x[None]).detach() + 1e-9 * torch.eye(150).double()
    white, noise = torch.randn(2, 150, dtype=torch.float64, generator=generator)
    y = 1.0 + torch.linalg.cholesky(K) @ white + 0.2 * noise
    batch = Batch(PointValues(x), y)
    points = 6 * torch.rand(12, 1, dtype=torch.float64, generator=generator)
    kernel = SquaredExponential(2.0, 0.5, dim=1)
    features = CholeskyFeatures(kernel, points, nugget=1e-8, learn_points=True)
    model = VariationalModel(
        features, ConstantMean(0.0), GaussianLikelihood(jitter=0.6), FullRankFamily(12)
    )
    before = solved(model, batch).value
    fit = fit_collapsed(model, batch, max_steps=80, tolerance=1e-4)
    assert fit.status in (FitStatus.CONVERGED, FitStatus.MAX_STEPS)
    assert fit.solution.value > before + 50
    assert fit.solution.value == pytest.approx(solved(fit.model, batch).value, rel=1e-10)
    assert fit.objective[-1] == pytest.approx(fit.solution.value / 150)
    likelihood = fit.model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    assert likelihood.log_jitter is not None
    assert math.exp(float(likelihood.log_jitter)) == pytest.approx(0.2, rel=0.2)
    assert isinstance(fit.model.features, CholeskyFeatures)
    fitted = fit.model.features.kernel
    assert float(fitted.terms()[0].lengthscale) == pytest.approx(0.8, rel=0.3)
    gp = ExactGP(fitted, fit.model.mean)
    exact = gp.log_evidence(batch.functional, y, likelihood.noise_variance(batch))
    assert fit.solution.value <= float(exact.detach()) + 1e-6
    assert fit.solution.value == pytest.approx(float(exact.detach()), abs=2.0)


def test_a_refused_step_is_counted_and_turned_back_from() -> None:
    # Five equal data: the evidence wants ever longer length scales, K_uu then has no factor.
    x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    batch = Batch(PointValues(x), 1.0 + 0.01 * x[:, 0])
    kernel = SquaredExponential(0.1, 1.0, dim=1)
    model = VariationalModel(
        CholeskyFeatures(kernel, x),
        ConstantMean(0.0, learn=False),
        GaussianLikelihood(jitter=0.05, learn=False),
        FullRankFamily(12),
    )
    start = solved(model, batch).value
    fit = fit_collapsed(model, batch, max_steps=30)
    assert fit.refused > 0
    assert fit.solution.value > start
    assert isinstance(fit.model.features, CholeskyFeatures)
    assert float(fit.model.features.kernel.terms()[0].lengthscale) > 0.1


def test_a_prior_holds_what_data_leave_open() -> None:
    batch = points_batch(1)
    free, held = (
        free_model(torch.linspace(0, 1, 6, dtype=torch.float64)[:, None]) for _ in range(2)
    )
    loose = fit_collapsed(free, batch, max_steps=40)
    fit = fit_collapsed(held, batch, max_steps=40, prior_std=1e-3)
    for a, b, c in zip(
        *(Parameters.of(m.features).theta for m in (fit.model, held, loose.model)), strict=True
    ):
        assert abs(float(a - b)) < 0.02
        assert abs(float(c - b)) > 0.05
    assert fit.objective[-1] * len(batch) <= fit.solution.value


def test_the_noise_of_fitc_gives_way_to_its_residuals() -> None:
    # Few inducing points: Var r stands in for the noise, which is then learned too small.
    x = torch.linspace(0, 4, 80, dtype=torch.float64)[:, None]
    generator = torch.Generator().manual_seed(1)
    y = (3 * x[:, 0]).sin() + 0.3 * torch.randn(80, generator=generator, dtype=torch.float64)
    learned = []
    for objective in (SGPR(), FITC()):
        model = VariationalModel(
            CholeskyFeatures(Matern32(0.7, 1.0, dim=1), x[5::16]),
            ConstantMean(learn=False),
            GaussianLikelihood(jitter=0.3),
            FullRankFamily(5),
        )
        fit = fit_collapsed(model, Batch(PointValues(x), y), objective, max_steps=60)
        likelihood = fit.model.likelihood
        assert isinstance(likelihood, GaussianLikelihood)
        assert likelihood.log_jitter is not None
        learned.append(math.exp(float(likelihood.log_jitter.detach())))
    assert learned[0] > 0.29
    assert learned[1] < 0.8 * learned[0]
