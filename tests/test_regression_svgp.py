"""The engine of free inducing points: against the exact one, in many dimensions, and bad input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from dustmap import HIPGPClassifier, HIPGPRegressor
from dustmap.errors import UserError
from tests.regression_cases import Array, fitted_at_its_rows, wave, wave_kernel


def additive(n: int, dim: int, seed: int = 0) -> tuple[Array, Array]:
    """Inputs (n, dim) and a noise-free target of two of their columns, of variance near 1."""
    X = np.random.default_rng(seed).standard_normal((n, dim))
    return X, np.sin(1.5 * X[:, 0]) + 0.7 * X[:, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API.*")
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [HIPGPRegressor(engine="svgp", inducing="auto", epochs=50, n_learn=100)]
)
def test_scikit_learn_contract(estimator: HIPGPRegressor, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_all_rows_as_fixed_points_are_the_exact_gp(dim: int) -> None:
    sparse = fitted_at_its_rows("svgp", dim)
    assert sparse.report_["steps"] == 0


@pytest.mark.parametrize(("dim", "count"), [(1, 30), (2, 50), (3, 80)])
def test_few_learned_points_agree_with_exact(dim: int, count: int) -> None:
    X, truth, noise = wave(300, dim)
    X, y, new = X[:240], (truth + 2.0 * noise)[:240], X[240:]
    exact = HIPGPRegressor("matern32", engine="exact", n_learn=240).fit(X, y)
    sparse = HIPGPRegressor("matern32", engine="svgp", inducing=count, epochs=40).fit(X, y)
    mean, std = exact.predict(new, return_std=True)
    sparse_mean, sparse_std = sparse.predict(new, return_std=True)
    assert np.sqrt(np.mean((sparse_mean - mean) ** 2)) < 0.3 * std.mean()
    assert np.mean(sparse_std / std) == pytest.approx(1.0, abs=0.15)
    assert sparse.noise_std_ == pytest.approx(exact.noise_std_, rel=0.15)
    assert exact.log_evidence_ - 0.1 * len(X) < sparse.elbo_ <= exact.log_evidence_ + 1e-6
    assert sparse.grid_ is None
    assert sparse.inducing_points_.shape == (count, dim)
    low, high = X.min(axis=0), X.max(axis=0)
    slack = 0.3 * (high - low)
    assert bool(
        ((sparse.inducing_points_ > low - slack) & (sparse.inducing_points_ < high + slack)).all()
    )


def friedman(n: int, seed: int) -> tuple[Array, Array]:
    """Friedman's first function (Annals of Statistics 19, 1991) at n places in five columns."""
    X = np.random.default_rng(seed).random((n, 5))
    f = 10.0 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20.0 * (X[:, 2] - 0.5) ** 2
    return X, f + 10.0 * X[:, 3] + 5.0 * X[:, 4]


@pytest.mark.parametrize("engine", ["svgp", pytest.param("sgpr", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_lengths_of_five_columns_are_those_of_the_evidence(engine: str, seed: int) -> None:
    """Linear columns have lengths far beyond the data; steps on minibatches alone end at two."""
    X, f = friedman(2200, seed)
    y = f + np.random.default_rng(seed + 10).standard_normal(len(f))
    few = HIPGPRegressor("matern52", engine=engine, inducing=60, epochs=10)
    few.fit(X[:1200], y[:1200])
    (kernel,) = few.report_["hyperparameters"]["kernel"]
    lengths = np.array(kernel["length"])
    assert lengths[:3].max() < 0.5 * lengths[3:].min()
    exact = HIPGPRegressor("matern52", engine="exact").fit(X[:300], y[:300])
    errors = [np.sqrt(np.mean((m.predict(X[1200:]) - f[1200:]) ** 2)) for m in (few, exact)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_twenty_columns_on_minibatches(dtype: str) -> None:
    X, truth = additive(1500, 20)
    y = truth + 0.3 * np.random.default_rng(1).standard_normal(1500)
    model = HIPGPRegressor(
        "matern52", engine="svgp", inducing=60, epochs=15, learning_rate=0.03, dtype=dtype
    )
    model.fit(X[:1000], y[:1000])
    mean, std = model.predict(X[1000:], return_std=True)
    error = mean - truth[1000:]
    assert np.sqrt(np.mean(error**2)) < 0.35 * truth.std()
    assert 0.3 < np.mean((error / std) ** 2) < 3.0
    assert model.report_["epochs"] == 15
    assert model.report_["dtype"] == dtype


def test_learning_beats_starting_values_and_places_matter() -> None:
    X, truth, noise = wave(300, 2)
    y = truth + noise
    elbos = [
        HIPGPRegressor(
            wave_kernel(2), engine="svgp", inducing=12, noise=1.0, epochs=40, learn=learn
        )
        .fit(X, y)
        .elbo_
        for learn in (False, ("inducing",), ("length", "variance", "mean", "inducing"))
    ]
    assert elbos[0] + 1.0 < elbos[1]
    assert elbos[1] + 1.0 < elbos[2]


def test_seeds_decide_everything() -> None:
    X, truth, noise = wave(150, 2)

    def predictions(seed: int) -> Array:
        model = HIPGPRegressor(engine="svgp", inducing=15, epochs=3, n_learn=50, random_state=seed)
        found = model.fit(X, truth + noise).predict(X)
        assert isinstance(found, np.ndarray)
        return found

    assert (predictions(1) == predictions(1)).all()
    assert not (predictions(1) == predictions(2)).all()


def test_patience_ends_the_learning() -> None:
    X, truth, noise = wave(200, 1)
    settings: dict[str, Any] = {"engine": "svgp", "inducing": 10, "epochs": 200, "n_learn": 50}
    # A rate far too large never gets better.
    model = HIPGPRegressor(**settings, learning_rate=0.9, patience=2).fit(X, truth + noise)
    assert model.report_["epochs"] < 200


def test_noise_of_each_datum_and_zero_rate() -> None:
    X, truth, white = wave(200, 1)
    std = np.where(np.arange(200) % 2 == 0, 0.5, 5.0)
    settings: dict[str, Any] = {"engine": "svgp", "inducing": 30, "learning_rate": 0.0}
    model = HIPGPRegressor(**settings).fit(X, truth + std * white, noise_std=std)
    assert model.noise_std_ is None
    assert np.sqrt(np.mean((model.predict(X) - truth) ** 2)) < 0.6
    assert model.report_["steps"] == 0
    draws = model.sample_y(X[:5], 4)
    assert draws.shape == (5, 4)


def test_saved_and_loaded(tmp_path: Path) -> None:
    X, truth, noise = wave(120, 3)
    model = HIPGPRegressor(engine="svgp", inducing=20, epochs=2, n_learn=50, mean="linear")
    model.fit(X, truth + noise).save(tmp_path / "model")
    again = HIPGPRegressor.load(tmp_path / "model")
    for before, after in zip(
        model.predict(X, return_std=True), again.predict(X, return_std=True), strict=True
    ):
        np.testing.assert_allclose(after, before, rtol=1e-12)
    assert again.engine_ == "svgp"
    assert again.elbo_ == model.elbo_
    np.testing.assert_array_equal(again.inducing_points_, model.inducing_points_)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"inducing": 31}, "inducing = 31 but X has 30 rows"),
        ({"inducing": 0}, "inducing = 0: expected a whole number of at least 1"),
        ({"inducing": 2.5}, r"inducing = 2\.5: expected a whole number"),
        ({"inducing": "many"}, "inducing = 'many': expected one of 'auto'"),
        ({"inducing": None}, 'inducing = None: expected "auto" or a whole number'),
        ({"batch_size": 0}, "batch_size = 0: expected a whole number of at least 1"),
        ({"epochs": 0}, "epochs = 0: expected a whole number of at least 1"),
        ({"learning_rate": 2.0}, r"learning_rate = 2\.0: expected a number in \[0, 1\)"),
        ({"learning_rate": float("nan")}, "learning_rate = nan: expected a number"),
        ({"patience": 0}, "patience = 0: expected a whole number of at least 1"),
        ({"grid": (5,)}, 'engine="svgp" has no grid'),
        ({"learn": ("points",)}, "learn = 'points': expected one of .*'inducing'"),
    ],
)
def test_bad_input(parameters: dict[str, Any], message: str) -> None:
    X = np.arange(30.0)[:, None]
    with pytest.raises(ValueError, match=message):
        HIPGPRegressor(**{"engine": "svgp"} | parameters).fit(X, X[:, 0])


def test_rows_that_repeat_and_memory_are_told() -> None:
    X = np.tile(np.arange(5.0), 6)[:, None]
    with pytest.raises(ValueError, match="inducing = 10 but only 5 rows of X differ"):
        HIPGPRegressor(engine="svgp", inducing=10, n_learn=20).fit(X, X[:, 0])
    with pytest.raises(MemoryError, match=r"inducing = 5 points need 1,800 bytes; max_memory = 9"):
        HIPGPRegressor(engine="svgp", inducing=5, n_learn=20, max_memory=999).fit(X, X[:, 0])


def test_minibatches_learn_what_the_collapsed_bound_does() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(200, 2))
    y = np.sin(6.0 * X).sum(axis=1) + 0.2 * rng.standard_normal(len(X))
    best = HIPGPRegressor("matern52", engine="sgpr", inducing=60).fit(X, y)
    # One minibatch of 160 and a rest of 40, if they were not made even.
    sparse = HIPGPRegressor("matern52", engine="svgp", inducing=60, batch_size=160).fit(X, y)
    assert sparse.noise_std_ == pytest.approx(best.noise_std_, rel=0.05)
    assert best.elbo_ - 0.02 * len(X) < sparse.elbo_ <= best.elbo_ + 0.005 * len(X)


def _repeated(seed: int) -> tuple[Array, Array]:
    """Forty rows, three times each with the same y: the evidence wants no noise at all."""
    random = np.random.default_rng(seed)
    X = random.uniform(0.0, 5.0, (40, 1))
    y = np.sin(2.0 * X[:, 0]) + 0.1 * random.standard_normal(40)
    return np.repeat(X, 3, axis=0), np.repeat(y, 3)


@pytest.mark.parametrize("seed", [1, 2])
def test_learning_on_minibatches_does_not_lower_the_bound(seed: int) -> None:
    """Steps of Adam lost 10⁵ nats per row here, with deviations of 15 times the spread of y."""
    X, y = _repeated(seed)
    held, learned = (
        HIPGPRegressor("matern32", engine="svgp", learning_rate=rate).fit(X, y)
        for rate in (0.0, 0.05)
    )
    assert learned.elbo_ >= held.elbo_ - 1e-3 * len(y)
    assert learned.report_["taken_back"]
    assert learned.report_["learning"]["status"] == "taken back"
    assert any("nats per row" in words for words in learned.report_["advice"])
    mean, std = learned.predict(X, return_std=True)
    assert np.abs(mean - y).max() < 1e-3
    assert np.median(std) < 0.01


@pytest.mark.parametrize(("noise", "largest"), [(1e-2, 1.01), (1e-3, 1.2)])
@pytest.mark.parametrize("engine", ["svgp", "sgpr"])
def test_small_noise_is_not_lost_in_the_nugget(engine: str, noise: float, largest: float) -> None:
    """At 1e-3 deviations were three times the exact ones, and the bound 790 nats below."""
    random = np.random.default_rng(0)
    X, new = random.uniform(0.0, 1.0, (200, 1)), np.linspace(0.05, 0.95, 50)[:, None]
    y = np.sin(12.0 * X[:, 0]) + noise * random.standard_normal(200)
    exact = HIPGPRegressor("matern32", engine="exact", noise=noise).fit(X, y)
    sparse = HIPGPRegressor("matern32", engine=engine, noise=noise).fit(X, y)
    ratio = sparse.predict(new, return_std=True)[1] / exact.predict(new, return_std=True)[1]
    assert 0.98 < np.median(ratio) < largest
    assert exact.log_evidence_ - 30.0 < sparse.elbo_ <= exact.log_evidence_ + 1e-6


def test_points_that_leave_more_than_the_noise_are_said_to_be_few() -> None:
    random = np.random.default_rng(0)
    X = random.uniform(0.0, 1.0, (200, 1))
    y = np.sin(12.0 * X[:, 0]) + 1e-3 * random.standard_normal(200)
    few, enough = (
        HIPGPRegressor("matern32", engine="sgpr", noise=noise, inducing=20, learn=False).fit(X, y)
        for noise in (1e-3, 0.3)
    )
    assert any("times the noise variance of a typical row" in w for w in few.report_["advice"])
    assert enough.report_["advice"] == []


def test_memory_that_takes_points_away_is_reported() -> None:
    X, y = _repeated(2)
    X = X + 1e-3 * np.arange(len(X))[:, None]
    model = HIPGPRegressor("matern32", engine="sgpr", max_memory=20_000, learn=False).fit(X, y)
    assert len(model.inducing_points_) == 16
    assert "room for 16 inducing points of 120" in model.report_["advice"][0]
    labels = HIPGPClassifier("matern32", max_memory=20_000, epochs=2).fit(X, y > 0.0)
    assert "room for 16 inducing points of 100" in labels.report_[0]["advice"][0]


def test_noise_of_measurements_is_asked_for_with_them() -> None:
    X, y = _repeated(0)
    model = HIPGPRegressor("matern32", noise=0.3, learn=False).fit(X, y)
    with pytest.raises(UserError, match="pass include_noise=True"):
        model.predict(X, return_std=True, noise_std=0.1)


def test_learning_of_five_columns_is_reported() -> None:
    X, truth = additive(150, 5)
    y = truth + 0.1 * np.random.default_rng(2).standard_normal(150)
    fits = [
        HIPGPRegressor("matern32", engine=engine, inducing=30, max_steps=4).fit(X, y)
        for engine in ("svgp", "sgpr")
    ]
    assert [fit.report_["learning"]["status"] for fit in fits] == ["minibatches", "max_steps"]
