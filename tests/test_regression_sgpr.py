"""The engine of the collapsed bound: against the exact one and the one of minibatches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from dustmap import HIPGPRegressor
from tests.regression_cases import fitted_at_its_rows, wave, wave_kernel


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API.*")
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [HIPGPRegressor(engine="sgpr", n_learn=100, max_steps=30)]
)
def test_scikit_learn_contract(estimator: HIPGPRegressor, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_all_rows_as_fixed_points_are_the_exact_gp(dim: int) -> None:
    sparse = fitted_at_its_rows("sgpr", dim)
    assert sparse.report_["climb"] == {"evaluations": 0, "refused": 0}


@pytest.mark.parametrize(("dim", "count"), [(1, 30), (2, 50), (3, 80)])
def test_few_learned_points_agree_with_exact(dim: int, count: int) -> None:
    X, truth, noise = wave(300, dim)
    X, y, new = X[:240], (truth + 2.0 * noise)[:240], X[240:]
    exact = HIPGPRegressor("matern32", engine="exact", n_learn=240).fit(X, y)
    sparse = HIPGPRegressor("matern32", engine="sgpr", inducing=count, max_steps=40).fit(X, y)
    mean, std = exact.predict(new, return_std=True)
    sparse_mean, sparse_std = sparse.predict(new, return_std=True)
    assert np.sqrt(np.mean((sparse_mean - mean) ** 2)) < 0.3 * std.mean()
    assert np.mean(sparse_std / std) == pytest.approx(1.0, abs=0.1)
    assert sparse.noise_std_ == pytest.approx(exact.noise_std_, rel=0.1)
    assert exact.log_evidence_ - 0.1 * len(X) < sparse.elbo_ <= exact.log_evidence_ + 1e-6
    assert sparse.grid_ is None
    assert sparse.inducing_points_.shape == (count, dim)
    assert sparse.engine_ == "sgpr"


def test_its_bound_is_above_that_of_minibatches_from_the_same_start() -> None:
    X, truth, noise = wave(300, 2)
    y = truth + noise
    settings: dict[str, Any] = {"inducing": 12, "noise": 1.0, "learn": ("length", "inducing")}
    bounds = [
        HIPGPRegressor(wave_kernel(2), engine=engine, **settings).fit(X, y).elbo_
        for engine in ("svgp", "sgpr")
    ]
    assert bounds[0] < bounds[1]


def test_many_columns_and_noise_of_each_datum() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((700, 12))
    truth = np.sin(1.5 * X[:, 0]) + 0.7 * X[:, 1]
    std = rng.uniform(0.1, 0.5, 700)
    y = truth + std * rng.standard_normal(700)
    model = HIPGPRegressor("matern52", engine="sgpr", inducing=40, max_steps=60)
    model.fit(X[:500], y[:500], noise_std=std[:500])
    mean, spread = model.predict(X[500:], return_std=True)
    error = mean - truth[500:]
    assert np.sqrt(np.mean(error**2)) < 0.35 * truth.std()
    assert 0.3 < np.mean((error / spread) ** 2) < 3.0
    assert model.noise_std_ is None
    assert model.sample_y(X[:5], 4).shape == (5, 4)


def test_saved_and_loaded(tmp_path: Path) -> None:
    X, truth, noise = wave(120, 3)
    model = HIPGPRegressor(engine="sgpr", inducing=20, max_steps=3, mean="linear")
    model.fit(X, truth + noise).save(tmp_path / "model")
    again = HIPGPRegressor.load(tmp_path / "model")
    for before, after in zip(
        model.predict(X, return_std=True), again.predict(X, return_std=True), strict=True
    ):
        np.testing.assert_allclose(after, before, rtol=1e-12)
    assert again.engine_ == "sgpr"
    assert again.elbo_ == model.elbo_
    assert again.report_ == model.report_
    np.testing.assert_array_equal(again.inducing_points_, model.inducing_points_)


def test_ends_before_the_top_are_told() -> None:
    X, truth, noise = wave(100, 1)
    model = HIPGPRegressor(engine="sgpr", inducing=10, max_steps=2).fit(X, truth + noise)
    assert model.report_["climb"]["status"] == "max_steps"
    assert model.report_["advice"] == [
        "the bound still rose after max_steps of L-BFGS: the gradient is not small yet: increase "
        "max_steps"
    ]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"inducing": 31}, "inducing = 31 but X has 30 rows"),
        ({"inducing": 0}, "inducing = 0: expected a whole number of at least 1"),
        ({"max_steps": 0}, "max_steps = 0: expected a whole number of at least 1"),
        ({"grid": (5,)}, 'engine="sgpr" has no grid'),
        ({"noise": 1e-9}, r'too small for inducing points in float64: use noise="jitter"'),
    ],
)
def test_bad_input(parameters: dict[str, Any], message: str) -> None:
    X = np.arange(30.0)[:, None]
    settings: dict[str, Any] = {"engine": "sgpr", "learn": False}
    with pytest.raises(ValueError, match=message):
        HIPGPRegressor(**settings | parameters).fit(X, X[:, 0])
    with pytest.raises(MemoryError, match=r"inducing = 5 points need 1,800 bytes; max_memory = 9"):
        HIPGPRegressor(engine="sgpr", inducing=5, max_memory=999).fit(X, X[:, 0])
