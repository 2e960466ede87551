"""Hyperparameters refined by the evidence of neighbours: where held-out rows speak for it."""

from typing import Any

import numpy as np
import pytest
import torch

from dustmap import HIPGPRegressor, gp
from dustmap.gp import Batch, ConstantMean, GPModel
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, SquaredExponential
from dustmap.gp.likelihoods import GaussianLikelihood


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


def waves(n: int, columns: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(n, columns))
    return X, np.sin(9.0 * X[:, 0]) * np.cos(7.0 * X[:, -1]) + 0.1 * rng.standard_normal(n)


@pytest.mark.parametrize(("n", "rows"), [(3, 2), (410, 400), (900, 400)])
def test_rows_that_decide_have_taught_neither(
    n: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[float]] = {}
    exact, near, held = gp.fit_hyperparameters, gp.NeighbourEvidence.of, gp.HeldOutRows.of

    def spied_exact(model: GPModel, batch: Batch, *, max_data: int, seed: int, **more: Any) -> Any:
        seen["exact"] = set(batch.random_part(max_data, seed).y.tolist())
        return exact(model, batch, max_data=max_data, seed=seed, **more)

    def spied_near(kernel: AbstractKernel, data: Batch, **more: Any) -> gp.NeighbourEvidence:
        seen.setdefault("neighbours", set(data.y.tolist()))  # the noise alone is not judged
        return near(kernel, data, **more)

    def spied_held(kernel: AbstractKernel, data: Batch, count: int) -> gp.HeldOutRows:
        made = held(kernel, data, count)
        seen["held out"] = set(data.y[made.rows].tolist())
        return made

    monkeypatch.setattr(gp, "fit_hyperparameters", spied_exact)
    monkeypatch.setattr(gp.NeighbourEvidence, "of", staticmethod(spied_near))
    monkeypatch.setattr(gp.HeldOutRows, "of", staticmethod(spied_held))
    model = HIPGPRegressor("matern32", engine="global", n_learn=rows, grid=(20, 20)).fit(*waves(n))
    if n > 3:
        assert "neighbours_held_out_gain_per_datum" in model.report_["learning"]
        assert len(seen["held out"]) == n // 4
        assert not seen["held out"] & (seen["exact"] | seen["neighbours"])


def test_a_check_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(held: gp.HeldOutRows, model: GPModel) -> Any:
        raise torch.linalg.LinAlgError("not positive definite")  # type: ignore[attr-defined]

    monkeypatch.setattr(gp.HeldOutRows, "scores", failing)
    model = HIPGPRegressor("matern32", engine="global", n_learn=100).fit(*waves(600))
    learning = model.report_["learning"]
    assert not learning["neighbours_kept"]
    assert learning["neighbours_failed"] == "not positive definite"


def test_shared_rows_that_nearly_coincide_have_a_conditional() -> None:
    """Of a smooth kernel without noise, whose covariance rounding makes indefinite."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(size=(1_500, 3)))
    data = Batch(PointValues(x), torch.sin(x.sum(1)), torch.full((1_500,), 1e-14).double())
    kernel = SquaredExponential([1.0] * 3)
    held = gp.HeldOutRows.of(kernel, data, 200)
    scores = held.scores(GPModel(kernel, ConstantMean(), GaussianLikelihood()))
    assert bool(scores.isfinite().all())
