"""Hyperparameters by maximising the evidence of the exact Gaussian process."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import FitStatus, fit_hyperparameters
from dustmap.gp._batch import Batch
from dustmap.gp._exact import ExactGP
from dustmap.gp._means import ConstantMean
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood

TRUTH = {"lengthscale": 0.3, "variance": 2.0, "noise": 0.2, "mean": 5.0}


def drawn(n: int = 150, seed: int = 0) -> Batch:
    """Noisy values of a draw from the prior, without given noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((n, 2), generator=generator, dtype=torch.float64)
    gp = ExactGP(Matern32(TRUTH["lengthscale"], TRUTH["variance"], dim=2), ConstantMean())
    A = gp.covariance(PointValues(x)) + TRUTH["noise"] ** 2 * torch.eye(n, dtype=torch.float64)
    white = torch.randn(n, generator=generator, dtype=torch.float64)
    return Batch(PointValues(x), TRUTH["mean"] + torch.linalg.cholesky(A) @ white)


def start() -> tuple[ExactGP, GaussianLikelihood]:
    return ExactGP(Matern32(1.0, 1.0, dim=2), ConstantMean()), GaussianLikelihood(jitter=1.0)


def evidence(gp: ExactGP, likelihood: GaussianLikelihood, batch: Batch) -> Tensor:
    return gp.log_evidence(batch.functional, batch.y, likelihood.noise_variance(batch))


def test_the_maximum_is_found_from_a_bad_start() -> None:
    batch = drawn()
    gp, likelihood = start()
    fit = fit_hyperparameters(gp, likelihood, batch)
    assert fit.status is FitStatus.CONVERGED
    assert fit.status.remedy
    assert fit.n_data == len(batch)
    at_end = evidence(gp, likelihood, batch)
    assert fit.log_evidence == pytest.approx(float(at_end.detach()), rel=1e-12)
    parameters = [*gp.parameters(), *likelihood.parameters()]
    for gradient in torch.autograd.grad(at_end, parameters):
        assert float(gradient.abs().max()) < 1e-2
    truth = ExactGP(
        Matern32(TRUTH["lengthscale"], TRUTH["variance"], dim=2), ConstantMean(TRUTH["mean"])
    )
    at_truth = float(evidence(truth, GaussianLikelihood(jitter=TRUTH["noise"]), batch).detach())
    # Twice the gain over the truth is chi-squared with four degrees of freedom.
    assert 0 < fit.log_evidence - at_truth < 10
    assert likelihood.log_jitter is not None
    assert abs(float(likelihood.log_jitter.detach()) - math.log(TRUTH["noise"])) < 0.5
    assert fit.objective[-1] == max(fit.objective)
    assert fit.objective[-1] == pytest.approx(fit.log_evidence / len(batch), rel=1e-12)


def test_a_subset_of_the_data() -> None:
    batch = drawn()
    ends = []
    for seed in (1, 1, 2):
        gp, likelihood = start()
        fit = fit_hyperparameters(gp, likelihood, batch, max_data=50, seed=seed)
        assert fit.n_data == 50
        assert fit.status is FitStatus.CONVERGED
        ends.append(fit.log_evidence)
    assert ends[0] == ends[1] != ends[2]


def test_too_few_steps_are_reported() -> None:
    gp, likelihood = start()
    fit = fit_hyperparameters(gp, likelihood, drawn(60), max_steps=2)
    assert fit.status is FitStatus.MAX_STEPS
    assert "max_steps" in fit.status.remedy


def test_what_data_do_not_constrain_ends_at_the_bound_unless_a_prior_holds_it() -> None:
    x = torch.rand((30, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(PointValues(x), torch.ones(30, dtype=torch.float64))
    gp, likelihood = start()
    fit = fit_hyperparameters(gp, likelihood, batch, max_steps=300)
    assert fit.status is FitStatus.AT_BOUND
    gp, likelihood = start()
    held = fit_hyperparameters(gp, likelihood, batch, prior_std=0.1, max_steps=300)
    assert held.status is FitStatus.CONVERGED
    for name, p in gp.kernel.named_parameters():
        assert float(p.detach().abs().max()) < math.log(1e3), name


def test_the_prior_is_the_stated_penalty() -> None:
    batch = drawn(60)
    width = 0.05
    gp, likelihood = start()
    fit_hyperparameters(gp, likelihood, batch, prior_std=width)
    at_end = evidence(gp, likelihood, batch)
    logs = [*gp.kernel.parameters(), *likelihood.parameters()]
    for p, gradient in zip(logs, torch.autograd.grad(at_end, logs), strict=True):
        # All starts are at ln 1 = 0.
        torch.testing.assert_close(gradient, p.detach() / width**2, rtol=0, atol=1e-2)


def test_fixed_parameters_stay_and_some_must_be_free() -> None:
    batch = drawn(40)
    gp = ExactGP(Matern32(1.0, 1.0, dim=2), ConstantMean(3.0, learn=False))
    likelihood = GaussianLikelihood(jitter=0.2, learn=False)
    fit_hyperparameters(gp, likelihood, batch)
    assert float(gp.mean.coefficients()) == 3.0
    assert likelihood.log_jitter is not None
    assert float(likelihood.log_jitter) == pytest.approx(math.log(0.2), rel=1e-15)
    for p in gp.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to learn"):
        fit_hyperparameters(gp, likelihood, batch)
