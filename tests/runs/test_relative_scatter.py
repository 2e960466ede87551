"""Noise that grows with the extinction: learned beside a constant scatter, and what it predicts."""

from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch, Prediction
from dustmap.gp.functionals import GaussLegendre, LineIntegrals
from dustmap.inference import StudentTNoise
from dustmap.runs.stars._engines import StarFit, fit_stars
from dustmap.runs.stars._model import Hyperparameters
from tests.runs.test_engines import SIZE, config, wave

STARS, SIGMA, SCATTER, RELATIVE = 500, 0.005, 0.03, 0.15


def sky(scatter: float, relative: float, seed: int = 0) -> tuple[Batch, Batch]:
    """Stars to fit and as many to judge the fit by; median extinction 0.24, errors within e of σ.

    Where both kinds of scatter are there, the constant one is the larger below 0.2 mag.
    """
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand((2 * STARS, 3), generator=generator, dtype=torch.float64) - 0.5
    rays = LineIntegrals.from_observer(unit * torch.tensor(SIZE, dtype=torch.float64))
    measure = rays.measure(GaussLegendre(12, panels=4))
    truth = (measure.weights * wave(measure.points)).sum(-1)
    u = torch.rand(2 * STARS, generator=generator, dtype=torch.float64)
    sigma = SIGMA * (2.0 * u - 1.0).exp()
    noise = (sigma.square() + scatter**2 + (relative * truth).square()).sqrt()
    y = truth + noise * torch.randn(2 * STARS, generator=generator, dtype=torch.float64)
    data = Batch(rays, y, sigma.square())
    return data[:STARS], data[STARS:]


def fitted(data: Batch, *settings: str) -> StarFit:
    learn = 'model.learn=["length", "std", "mean", "scatter", "relative_scatter"]'
    made = config("model.density=lognormal", "model.std=1", learn, *settings)
    return fit_stars(made, data)


def coverage_in_bins(fit: StarFit, data: Batch) -> list[float]:
    """Share within ±1σ, noise included, in quarters by the predicted extinction."""
    found = fit.posterior.predict(data.functional)
    assert data.noise_variance is not None
    noise = fit.hyperparameters.noise_variance(data.noise_variance, found)
    z = (data.y - found.mean) / (found.variance + noise).sqrt()
    quarters = found.mean.argsort().chunk(4)
    return [float((z[part].abs() < 1).double().mean()) for part in quarters]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_both_kinds_of_scatter_are_found_apart(seed: int) -> None:
    data, held_out = sky(SCATTER, RELATIVE, seed)
    fit = fitted(data)
    assert fit.learning is not None
    assert fit.learning.converged
    assert fit.hyperparameters.scatter == pytest.approx(SCATTER, rel=0.25)
    assert fit.hyperparameters.relative_scatter == pytest.approx(RELATIVE, rel=0.25)
    # Three standard deviations of the share of 125.
    for share in coverage_in_bins(fit, held_out):
        assert share == pytest.approx(0.683, abs=0.125)


@pytest.mark.slow
def test_a_constant_scatter_alone_is_wrong_at_both_ends() -> None:
    """What the relative one is for: faint stars then look better than they are known."""
    data, held_out = sky(0.0, 0.3)
    without = fitted(data, 'model.learn=["length", "std", "mean", "scatter"]')
    shares = coverage_in_bins(without, held_out)
    assert max(shares) - min(shares) > 0.15
    beside = coverage_in_bins(fitted(data), held_out)
    assert max(beside) - min(beside) < max(shares) - min(shares)


@pytest.mark.slow
def test_none_is_found_where_there_is_none() -> None:
    fit = fitted(sky(SCATTER, 0.0)[0])
    assert fit.hyperparameters.relative_scatter < 0.05
    assert fit.hyperparameters.scatter == pytest.approx(SCATTER, rel=0.25)


def test_a_relative_scatter_that_is_given_stays() -> None:
    data = sky(0.0, RELATIVE)[0][:100]
    fit = fitted(data, "model.relative_scatter=0.2", "model.learn=[]")
    assert fit.hyperparameters.relative_scatter == pytest.approx(0.2)
    assert fit.hyperparameters.scatter == 0.0


def test_noise_grows_with_the_extinction_that_is_predicted() -> None:
    at = Hyperparameters(60.0, 1.0, 1e-3, 2.0, scatter=0.1, relative_scatter=0.5)
    given, mean, variance = torch.tensor([0.01]), torch.tensor([3.0]), torch.tensor([1.0])
    predicted = Prediction(mean, variance, 0)
    # E a² = 9 + 1: a new star's own extinction is as uncertain as the map.
    expected = torch.tensor([0.04 + 0.01 + 0.25 * 10.0])
    torch.testing.assert_close(at.noise_variance(given, predicted), expected)
    wider = at.with_student_t(StudentTNoise(5.0, 2.0))
    assert wider.relative_scatter == pytest.approx(1.0)
    assert at.as_dict()["relative_scatter"] == 0.5
    plain = Hyperparameters(60.0, 1.0, 1e-3, 2.0)
    assert list(plain.as_dict()) == ["length", "std", "mean", "noise"]
    # A level with its error: both, also where the level is what it was before the fit.
    leaves = replace(plain, beyond_std=0.5).as_dict()
    assert (leaves["beyond"], leaves["beyond_std"]) == (1.0, 0.5)
