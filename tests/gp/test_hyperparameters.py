"""Hyperparameters by maximising the evidence of the exact Gaussian process."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import FitStatus, GPModel, fit_hyperparameters
from dustmap.gp._batch import Batch
from dustmap.gp._exact import ExactGP
from dustmap.gp._means import ConstantMean, LinearMean
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from tests.gp.parameters import traced

TRUTH = {"lengthscale": 0.3, "variance": 2.0, "noise": 0.2, "mean": 5.0}


def drawn(n: int = 150, seed: int = 0) -> Batch:
    """Noisy values of a draw from the prior, without given noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((n, 2), generator=generator, dtype=torch.float64)
    gp = ExactGP(Matern32(TRUTH["lengthscale"], TRUTH["variance"], dim=2), ConstantMean())
    A = gp.covariance(PointValues(x)) + TRUTH["noise"] ** 2 * torch.eye(n, dtype=torch.float64)
    white = torch.randn(n, generator=generator, dtype=torch.float64)
    return Batch(PointValues(x), TRUTH["mean"] + torch.linalg.cholesky(A) @ white)


def start() -> GPModel:
    return GPModel(Matern32(1.0, 1.0, dim=2), ConstantMean(), GaussianLikelihood(jitter=1.0))


def evidence(model: GPModel, batch: Batch) -> Tensor:
    gp, noise = ExactGP(model.kernel, model.mean), model.likelihood.noise_variance(batch)
    return gp.log_evidence(batch.functional, batch.y, noise)


def test_the_maximum_is_found_from_a_bad_start() -> None:
    batch = drawn()
    fit = fit_hyperparameters(start(), batch)
    assert fit.status is FitStatus.CONVERGED
    assert fit.status.remedy
    assert fit.n_data == len(batch)
    model, parameters = traced(fit.model)
    at_end = evidence(model, batch)
    assert fit.log_evidence == pytest.approx(float(at_end.detach()), rel=1e-12)
    for gradient in torch.autograd.grad(at_end, parameters):
        assert float(gradient.abs().max()) < 1e-2
    truth = GPModel(
        Matern32(TRUTH["lengthscale"], TRUTH["variance"], dim=2),
        ConstantMean(TRUTH["mean"]),
        GaussianLikelihood(jitter=TRUTH["noise"]),
    )
    at_truth = float(evidence(truth, batch))
    # Twice the gain over the truth is chi-squared with four degrees of freedom.
    assert 0 < fit.log_evidence - at_truth < 10
    assert fit.model.noise.log_jitter is not None
    assert abs(float(fit.model.noise.log_jitter) - math.log(TRUTH["noise"])) < 0.5
    assert fit.objective[-1] == max(fit.objective)
    assert fit.objective[-1] == pytest.approx(fit.log_evidence / len(batch), rel=1e-12)


def test_a_subset_of_the_data() -> None:
    batch = drawn()
    ends = []
    for seed in (1, 1, 2):
        fit = fit_hyperparameters(start(), batch, max_data=50, seed=seed)
        assert fit.n_data == 50
        assert fit.status is FitStatus.CONVERGED
        ends.append(fit.log_evidence)
    assert ends[0] == ends[1] != ends[2]


def test_too_few_steps_are_reported() -> None:
    fit = fit_hyperparameters(start(), drawn(60), max_steps=2)
    assert fit.status is FitStatus.MAX_STEPS
    assert "max_steps" in fit.status.remedy


def test_what_data_do_not_constrain_ends_at_the_bound_unless_a_prior_holds_it() -> None:
    x = torch.rand((30, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(PointValues(x), torch.ones(30, dtype=torch.float64))
    fit = fit_hyperparameters(start(), batch, max_steps=300)
    assert fit.status is FitStatus.AT_BOUND
    held = fit_hyperparameters(start(), batch, prior_std=0.1, max_steps=300)
    assert held.status is FitStatus.CONVERGED
    for p in held.model.kernel.parameters():
        assert float(p.value.abs().max()) < math.log(1e3), p.name


def test_the_prior_is_the_stated_penalty() -> None:
    batch = drawn(60)
    width = 0.05
    model, (length, variance, _, jitter) = traced(
        fit_hyperparameters(start(), batch, prior_std=width).model
    )
    at_end, logs = evidence(model, batch), [length, variance, jitter]
    for p, gradient in zip(logs, torch.autograd.grad(at_end, logs), strict=True):
        # All starts are at ln 1 = 0.
        torch.testing.assert_close(gradient, p.detach() / width**2, rtol=0, atol=1e-2)


def test_a_slope_that_no_datum_sees_stays() -> None:
    """All data on x₂ = 0, of whatever size."""
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 1] = 0.0
    for level in (3.0, 10.0, 1e6):
        y = (3.0 * x[:, 0]).sin() + level
        data = Batch(PointValues(x), y, torch.full_like(y, 0.01))
        mean = LinearMean((0.0, 0.0), 0.0)
        fit = fit_hyperparameters(
            GPModel(Matern32(1.0, 1.0, dim=2), mean, GaussianLikelihood()), data
        )
        found = fit.model.mean
        assert isinstance(found, LinearMean)
        assert bool(found.basis(data.functional).isfinite().all())
        assert all(bool(p.value.isfinite().all()) for p in found.parameters())


def test_fixed_parameters_stay_and_some_must_be_free() -> None:
    batch = drawn(40)
    fixed = ConstantMean(3.0, learn=False), GaussianLikelihood(jitter=0.2, learn=False)
    model = GPModel(Matern32(1.0, 1.0, dim=2), *fixed)
    fitted = fit_hyperparameters(model, batch).model
    assert float(fitted.mean.coefficients()) == 3.0
    assert fitted.noise.log_jitter is not None
    assert float(fitted.noise.log_jitter) == pytest.approx(math.log(0.2), rel=1e-15)
    assert float(fitted.kernel.variance()) != 1.0
    assert float(model.kernel.variance()) == 1.0
    with pytest.raises(ValueError, match="nothing to learn"):
        fit_hyperparameters(model.fixed(), batch)
