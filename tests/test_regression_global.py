"""The estimator's global engine: beside the exact one, inside its grid and beyond."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap import HIPGPRegressor
from dustmap.engines import PointPlan, PointSettings, plan_points
from dustmap.engines._pathwise_points import within_box
from dustmap.gp import RegularGrid
from dustmap.gp.kernels import Matern12, Matern13, Matern32, StationaryKernel
from tests.regression_cases import wave, wave_kernel

Array = NDArray[np.float64]


def test_draws_of_the_global_engine_are_as_many_as_were_solved_for() -> None:
    X, truth, noise = wave(100, 1)
    model = HIPGPRegressor(wave_kernel(1), engine="global", samples=5, noise=1.0, learn=False)
    model.fit(X, truth + noise)
    assert model.report_["monte_carlo_error_of_std"] == pytest.approx(10**-0.5)
    draws, others = (model.sample_y(X, 5, random_state=seed) for seed in (0, 1))
    apart = np.square(draws[:, :, None] - others[:, None]).mean(axis=0)
    # the same five, in another order, but for residuals
    np.testing.assert_array_equal(np.sort(apart.argmin(axis=1)), np.arange(5))
    assert apart.min(axis=1).max() < 0.5 * np.sort(apart, axis=1)[:, 1].min()
    assert not np.allclose(model.sample_y(X, random_state=0), model.sample_y(X, random_state=2))
    with pytest.raises(ValueError, match="n_samples = 6: expected between 1 and samples = 5"):
        model.sample_y(X, 6)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (1, "float64"),
        (2, "float32"),
        (2, "float64"),
        pytest.param(3, "float32", marks=pytest.mark.slow),
    ],
)
def test_global_engine_agrees_with_exact_inside_and_beyond_the_grid(dim: int, dtype: str) -> None:
    X, truth, noise = wave(240, dim)
    X, y, new = X[:200], (truth + 2.0 * noise)[:200], X[200:]
    far = X.max(axis=0) + 0.3 * 10.0 ** np.arange(dim) * np.array([[0.05], [0.5], [2.0], [100.0]])
    queries = np.concatenate([new[:20], far, new[20:]])
    exact = HIPGPRegressor(wave_kernel(dim), noise=2.0, learn=("mean",)).fit(X, y)
    whole = HIPGPRegressor(
        wave_kernel(dim), engine="global", noise=2.0, learn=("mean",), samples=500, dtype=dtype
    )
    whole.fit(X, y)
    assert whole.report_["advice"] == []
    assert whole.report_["solve"]["status"] == "converged"
    mean, std = exact.predict(queries, return_std=True)
    ours, spread = whole.predict(queries, return_std=True)
    np.testing.assert_allclose(ours, mean, atol=0.25 * std.max())
    assert np.sqrt(np.mean((ours - mean) ** 2)) < 0.1 * std.mean()
    np.testing.assert_allclose(spread, std, rtol=0.2)  # 6 standard errors of 500 draws
    assert np.mean(spread / std) == pytest.approx(1.0, abs=0.05)
    beyond = whole.predict(far[-1:], return_std=True)
    assert beyond[0] == pytest.approx(1000.0 + (whole.mean_[0] - 1000.0), rel=1e-5)
    # The prior's variance, and that of the fitted level.
    assert beyond[1] == pytest.approx(exact.predict(far[-1:], return_std=True)[1], rel=1e-3)
    assert beyond[1] > 5.0


@pytest.mark.parametrize(
    ("dim", "rough", "dtype"),
    [
        (1, Matern12, "float32"),
        (1, Matern12, "float64"),
        (1, Matern13, "float64"),
        pytest.param(2, Matern12, "float32", marks=pytest.mark.slow),
        pytest.param(2, Matern12, "float64", marks=pytest.mark.slow),
        pytest.param(3, Matern12, "float64", marks=pytest.mark.slow),
    ],
)
def test_a_rough_term_far_longer_than_the_data_needs_no_wide_torus(
    dim: int, rough: Callable[..., StationaryKernel], dtype: str
) -> None:
    """20 times as long as the box, beside the exact process: inside, and a tenth beyond."""
    rng, side, n = np.random.default_rng(1), 10.0, 150
    kernel = rough([20.0 * side] * dim, 20.0) + Matern32([0.2 * side] * dim, 0.3)
    X = rng.uniform(0.0, side, (n, dim))
    K = kernel(torch.from_numpy(X[:, None] - X[None])).detach().numpy()
    y = np.linalg.cholesky(K + 0.01 * np.eye(n)) @ rng.standard_normal(n)
    inside = rng.uniform(0.0, side, (200, dim))
    beyond = np.concatenate([side * rng.uniform(1.0, 1.1, (200, 1)), inside[:, 1:]], axis=1)
    given: dict[str, Any] = {"noise": 0.1, "learn": ("mean",)}
    exact = HIPGPRegressor(kernel, engine="exact", **given).fit(X, y)
    ours = HIPGPRegressor(kernel, engine="global", samples=100, dtype=dtype, **given).fit(X, y)
    pairs = zip(ours.report_["torus_shape"], ours.report_["grid_shape"], strict=True)
    assert all(torus <= 3 * nodes for torus, nodes in pairs)
    # Beyond the data the shorter term forgets them sooner.
    for places, of_mean, of_std in ((inside, 0.1, 0.03), (beyond, 0.3, 0.1)):
        mean, std = exact.predict(places, return_std=True)
        mean_ours, std_ours = ours.predict(places, return_std=True)
        assert np.sqrt(np.mean(((mean_ours - mean) / std) ** 2)) < of_mean
        assert np.mean(std_ours / std) == pytest.approx(1.0, abs=of_std)


def test_plans_of_earlier_versions_leave_rough_terms_as_long_as_they_were() -> None:
    kernel, grid = Matern12([50.0]) + Matern12([1.0]), RegularGrid((0.0,), (0.1,), (101,))
    settings = PointSettings(8, padding=4.0, dtype=torch.float64, max_memory=2**30)
    plan = plan_points(kernel, grid, 80, settings)
    assert PointPlan.of_plain(plan.as_plain()) == plan
    earlier = PointPlan.of_plain({k: v for k, v in plan.as_plain().items() if k != "longest"})
    assert within_box(kernel, grid, earlier.longest, in_all_axes=False) is kernel
    shorter = within_box(kernel, grid, plan.longest, in_all_axes=True)
    assert shorter.terms()[0].lengthscale.tolist() == pytest.approx([6.5])
    single = Matern12([50.0])
    assert within_box(single, grid, plan.longest, in_all_axes=True) is single


def test_global_engine_is_the_same_in_every_space(monkeypatch: pytest.MonkeyPatch) -> None:
    X, truth, noise = wave(200, 1)
    model = HIPGPRegressor(
        wave_kernel(1), engine="global", grid=(150,), noise=1.0, learn=("mean",), samples=8
    )
    mean, std = model.fit(X, truth + noise).predict(X, return_std=True)
    assert model.report_["solve"]["space"] == "nodes"
    for other, left in (("data", "at_nodes"), ("field", "in_data_space")):
        monkeypatch.setattr(PointPlan, left, False)
        again, spread = model.fit(X, truth + noise).predict(X, return_std=True)
        assert model.report_["solve"]["space"] == other
        np.testing.assert_allclose(again, mean, atol=0.01 * std.min())
        np.testing.assert_allclose(spread, std, rtol=0.01)


def test_global_engine_has_a_linear_mean() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(200, 2))
    y = 3.0 + X @ [5.0, -2.0] + 0.01 * rng.standard_normal(200)
    model = HIPGPRegressor(Matern32([0.5, 0.5], 0.01), engine="global", mean="linear", noise=0.01)
    model.set_params(learn=("mean",)).fit(X, y)
    np.testing.assert_allclose(model.mean_, [3.0, 5.0, -2.0], atol=0.2)
    np.testing.assert_allclose(model.predict([[30.0, 30.0]]), model.mean_ @ [1.0, 30.0, 30.0])


@pytest.mark.slow
def test_global_engine_learns_the_detail_that_few_rows_do_not_show() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(1700, 1))
    y = (
        5.0 * np.sin(6.0 * X[:, 0])
        + 0.5 * np.sin(300.0 * X[:, 0])
        + 0.1 * rng.standard_normal(1700)
    )
    model = HIPGPRegressor("matern32", engine="global", n_learn=60, samples=16)
    model.fit(X[:1500], y[:1500])
    learning = model.report_["learning"]
    assert learning["neighbours_kept"]
    # A quarter of the rows decides, which learning has not seen.
    assert (learning["n_data"], learning["neighbours_n_data"]) == (60, 1125)
    assert learning["neighbours_gain_per_datum"] > 0.5
    assert model.noise_std_ == pytest.approx(0.1, rel=0.1)
    assert np.sqrt(np.mean((model.predict(X[1500:]) - y[1500:]) ** 2)) < 0.12


def test_global_engine_tells_that_float32_cannot_hold_tiny_noise() -> None:
    X, truth, _ = wave(150, 1)
    model = HIPGPRegressor(
        wave_kernel(1), engine="global", noise=1e-5, learn=False, dtype="float32", samples=4
    )
    model.fit(X, truth)
    told = " ".join(model.report_["advice"])
    assert 'dtype="float64"' in told


def test_a_rough_kernel_far_longer_than_its_spacing_ends_as_the_exact_process_does() -> None:
    """A walk: right beside the last node the images of the torus are most of what it has added."""
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(0.0, 100.0, (1_500, 1)), axis=0)
    steps = np.sqrt(np.diff(X[:, 0], prepend=0.0)) * rng.standard_normal(len(X))
    y = steps.cumsum() + 0.3 * rng.standard_normal(len(X))
    kernel = Matern12([50.0], variance=25.0)
    fixed: dict[str, Any] = {"noise": 0.3, "learn": False}
    exact = HIPGPRegressor(kernel, engine="exact", **fixed).fit(X, y)
    gridded = HIPGPRegressor(
        kernel, engine="global", grid=(8_000,), samples=256, random_state=0, **fixed
    ).fit(X, y)
    places = np.array([[-5.0], [-0.5], [-0.02], [-0.005], [100.0], [100.02], [100.5], [105.0]])
    (mean, std), (wanted, width) = (
        each.predict(places, return_std=True) for each in (gridded, exact)
    )
    np.testing.assert_allclose(mean, wanted, atol=0.15 * float(width.min()))
    np.testing.assert_allclose(std, width, rtol=0.12)
