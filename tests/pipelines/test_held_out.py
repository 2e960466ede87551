"""Held-out scores under any likelihood."""

import math

import pytest
import torch

from dustmap.gp import Batch, Prediction
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from dustmap.inference import scores
from pipelines.reproduce.ciq._training import HeldOut, held_out, misclassified


def case(dtype: torch.dtype) -> tuple[Batch, Prediction]:
    generator = torch.Generator().manual_seed(0)
    y, mean, a, b = torch.randn(4, 50, generator=generator, dtype=torch.float64).to(dtype)
    where = PointValues(torch.zeros(50, 1, dtype=torch.float64))
    return Batch(where, y, 0.1 + b.square()), Prediction(mean, a.square())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_scores_are_those_of_predictions_with_noise(dtype: torch.dtype) -> None:
    batch, prediction = case(dtype)
    assert batch.noise_variance is not None
    found = held_out(GaussianLikelihood(), prediction, batch)
    known = scores(batch.y, prediction.mean, prediction.variance + batch.noise_variance)
    assert found.n == known.n
    assert found.loglike == pytest.approx(known.loglike, rel=1e-5)
    assert found.rmse == pytest.approx(known.rmse, rel=1e-5)


def test_known_predictions_have_the_scores_of_the_likelihood() -> None:
    """Var f = 0: the predictive density is p(y | f)."""
    batch, _ = case(torch.float64)
    classes = Batch(batch.functional, (batch.y > 0).double())
    certain = Prediction(torch.full_like(batch.y, math.log(3.0)), torch.zeros_like(batch.y))
    ones = float(classes.y.mean())
    found = held_out(BernoulliLikelihood(), certain, classes)
    expected = ones * math.log(0.75) + (1 - ones) * math.log(0.25)
    brier = math.sqrt(ones * 0.25**2 + (1 - ones) * 0.75**2)
    assert (found.loglike, found.rmse) == pytest.approx((expected, brier))
    assert isinstance(found, HeldOut)
    p, _ = BernoulliLikelihood().predictive_moments(
        certain.mean, certain.variance, certain.variance
    )
    assert misclassified(classes.y, p) == pytest.approx(1 - ones)
    counts = held_out(PoissonLikelihood(), certain, classes)
    assert counts.loglike == pytest.approx(ones * math.log(3.0) - 3.0)
    heavy = held_out(StudentTLikelihood(3.0, 0.5), certain, Batch(batch.functional, batch.y))
    z = (batch.y - math.log(3.0)) / 0.5
    peak = math.lgamma(2.0) - math.lgamma(1.5) - 0.5 * math.log(3.0 * math.pi * 0.25)
    student = peak - 2.0 * (z.square() / 3.0).log1p()
    assert heavy.loglike == pytest.approx(float(student.mean()))


def test_predictions_of_other_data_are_refused() -> None:
    batch, prediction = case(torch.float64)
    with pytest.raises(ValueError, match=r"got \(50,\) predictions of 7 data"):
        held_out(GaussianLikelihood(), prediction, batch[:7])
