"""Where learning starts: fields far shorter than their data, uneven columns, and noise alone."""

import numpy as np
import pytest
import torch

from dustmap import HIPGPRegressor
from dustmap.engines import EvidenceSettings, Problem, Watch, learn_from_start
from dustmap.engines._starts import local_spreads, start_lengths
from dustmap.gp import Batch, ConstantMean, GPModel
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern52
from dustmap.gp.likelihoods import GaussianLikelihood

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def years(n: int) -> tuple[Array, Array]:
    """Months of a yearly cycle with an eighth of noise, from rows of one column."""
    t = np.arange(n) / 12.0
    return t[:, None], 8.0 * np.sin(2.0 * np.pi * t) + np.random.default_rng(1).standard_normal(n)


def crossed_waves(n: int) -> tuple[Array, Array]:
    """Waves in two columns as wide as 5, with noise of 0.1."""
    rng = np.random.default_rng(1)
    X = rng.uniform(0.0, 5.0, (n, 2))
    return X, np.sin(3.0 * X[:, 0]) * np.cos(3.0 * X[:, 1]) + 0.1 * rng.standard_normal(n)


@pytest.mark.parametrize("kernel", ["matern52", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_cycle_that_is_a_fortieth_of_the_rows_is_no_noise(kernel: str) -> None:
    X, y = years(480)
    model = HIPGPRegressor(kernel).fit(X, y)
    best = HIPGPRegressor(Matern52([0.4], 50.0), noise=0.9).fit(X, y)
    assert model.log_evidence_ > best.log_evidence_ - 2.0
    assert model.noise_std_ == pytest.approx(1.0, abs=0.15)
    assert model.report_["advice"] == []


@pytest.mark.parametrize("far", ["a row", "a row in one column", "half of the rows"])
def test_far_rows_hide_no_field(far: str) -> None:
    X, y = crossed_waves(400)
    if far == "a row":
        X[0] = 1e4
    elif far == "a row in one column":
        X[0, 0] = 1e4
    else:
        X[200:, 0] += 1000.0
    model = HIPGPRegressor("matern32").fit(X, y)
    assert model.noise_std_ == pytest.approx(0.1, rel=0.3)
    assert all(0.4 < length < 1.5 for length in model.kernel_.terms()[0].lengthscale)


def test_neighbours_find_what_few_rows_called_noise() -> None:
    """Of 1,500 months the 100 that learn first are over a year apart."""
    X, y = years(1500)
    scale = X.std()
    data = Batch(
        PointValues(torch.from_numpy((X - X.mean()) / scale)), torch.from_numpy(y / y.std())
    )
    model = GPModel(Matern52([1.0]), ConstantMean(), GaussianLikelihood(jitter=0.5))
    settings = EvidenceSettings(rows=100, search_start=True)
    learned = learn_from_start(Problem(model, data), settings, 2**30, Watch())
    assert learned.learning is not None
    assert learned.learning.summary["neighbours_kept"]
    assert 0.2 < float(learned.model.kernel.terms()[0].lengthscale) * scale < 0.6
    noise = float(learned.model.likelihood.noise_variance(data)[0]) ** 0.5
    assert noise * y.std() == pytest.approx(1.0, abs=0.15)


def test_noise_is_no_field_and_said_to_be_none() -> None:
    advised = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x, y = rng.uniform(size=(200, 1)), rng.standard_normal(200)
        model = HIPGPRegressor("matern32").fit(x, y)
        std = model.predict(np.linspace(0.0, 1.0, 50)[:, None], return_std=True)[1]
        assert model.noise_std_ is not None
        assert model.noise_std_ == pytest.approx(1.0, abs=0.15)
        assert std.mean() < 0.35
        nothing = float(model.kernel_.variance()) < 1e-3 * model.noise_std_**2
        texts = [text for text in model.report_["advice"] if "taken for noise" in text]
        assert len(texts) == nothing
        advised += nothing
    assert advised > 0


def test_lengths_reach_from_the_data_to_their_neighbours() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((300, 1)))
    lengths = [float(length) for length in start_lengths(x)]
    assert lengths[:4] == [2.0, 0.7, 0.25, 0.08]
    assert lengths == sorted(lengths, reverse=True)
    assert 1e-4 < lengths[-1] < 5e-3
    # In many columns no rows are near each other.
    assert len(start_lengths(torch.from_numpy(rng.standard_normal((300, 8))))) == 4
    # Rows at one place, and a column of few values, have no spread of their own.
    assert len(start_lengths(torch.zeros(20, 2))) == 4
    few = torch.tensor([0.0] * 150 + [1.0] * 150)[:, None]
    assert local_spreads(few).tolist() == [1.0]
