"""Hyperparameters refined by the evidence of neighbours: where held-out rows speak for it."""

import numpy as np
import pytest

from dustmap import HIPGPRegressor


@pytest.mark.slow
def test_neighbours_alone_do_not_decide_on_a_smooth_field_in_noise() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(8_000, 4))
    truth = np.sin(3.0 * X[:, 0]) + X[:, 3] ** 2 + np.cos(2.0 * X[:, 2] * X[:, 3])
    y = truth + 0.2 * rng.standard_normal(len(X))
    model = HIPGPRegressor("matern52").fit(X[:6_000], y[:6_000])
    learning = model.report_["learning"]
    assert learning["neighbours_gain_per_datum"] > 0
    assert not learning["neighbours_kept"]
    mean, std = model.predict(X[6_000:], return_std=True)
    error = mean - truth[6_000:]
    # The kernel that thirty neighbours prefer has errors of 0.1, eight standard deviations.
    assert np.sqrt(np.mean(error**2)) < 0.02
    assert 0.6 < np.sqrt(np.mean((error / std) ** 2)) < 1.3


def test_detail_between_the_rows_that_were_learned_from_is_for_neighbours() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(900, 1))
    y = np.sin(6.0 * X[:, 0]) + 0.5 * np.sin(150.0 * X[:, 0]) + 0.1 * rng.standard_normal(900)
    model = HIPGPRegressor("matern32", engine="exact", n_learn=40).fit(X[:800], y[:800])
    learning = model.report_["learning"]
    assert learning["neighbours_kept"]
    assert learning["neighbours_held_out_gain_per_datum"] > 0.2
    assert np.sqrt(np.mean((model.predict(X[800:]) - y[800:]) ** 2)) < 0.13
