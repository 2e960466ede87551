"""The classifier: scikit-learn's contract, calibration on simulated data, and bad input."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy import units as u
from astropy.utils.masked import Masked
from sklearn.utils.estimator_checks import parametrize_with_checks

import dustmap
from dustmap import HIPGPClassifier, HIPGPRegressor
from dustmap.errors import UserError
from dustmap.estimators._engines import auto_points
from dustmap.gp.kernels import Matern32
from tests.regression_cases import Array


def simulated(n: int, dim: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Inputs (n, dim), P(y = 1) (n,), and y drawn from it."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2.0, 2.0, size=(n, dim))
    f = 3.0 * np.sin(2.0 * X[:, 0]) + (2.0 * X[:, 1] if dim > 1 else 0.0)
    p = 1.0 / (1.0 + np.exp(-f))
    return X, p, (rng.uniform(size=n) < p).astype(int)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API.*")
@parametrize_with_checks([HIPGPClassifier(epochs=30)])  # type: ignore[untyped-decorator]
def test_scikit_learn_contract(estimator: HIPGPClassifier, check: Any) -> None:
    check(estimator)


def test_it_is_at_the_front_door() -> None:
    assert dustmap.HIPGPClassifier is HIPGPClassifier
    assert "HIPGPClassifier" in dir(dustmap)


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_separable_classes_with_names(link: str) -> None:
    X, _, _ = simulated(220, 2)
    y = np.where(X[:, 0] + X[:, 1] > 0, "above", "below")
    model = HIPGPClassifier(link=link, inducing=20, epochs=40).fit(X[:150], y[:150])
    assert list(model.classes_) == ["above", "below"]
    assert model.score(X[150:], y[150:]) > 0.93
    probability = model.predict_proba(X[150:])
    np.testing.assert_allclose(probability.sum(axis=1), 1.0)
    log_odds = model.decision_function(X[150:])
    np.testing.assert_allclose(np.log(probability[:, 1] / probability[:, 0]), log_odds, atol=1e-6)
    assert (model.predict(X[150:]) == np.where(log_odds > 0, "below", "above")).all()


@pytest.mark.parametrize("dim", [1, 2])
def test_probabilities_are_calibrated(dim: int) -> None:
    X, p, y = simulated(2600, dim)
    model = HIPGPClassifier("matern52", inducing=30, epochs=12).fit(X[:600], y[:600])
    found = model.predict_proba(X[600:])[:, 1]
    assert np.sqrt(np.mean((found - p[600:]) ** 2)) < 0.1
    # Labels within bins of like probability occur as often as told: 5 sigma of 400 in a bin.
    order = found.argsort()
    for part in np.array_split(order, 5):
        told, seen = found[part].mean(), y[600:][part].mean()
        assert abs(told - seen) < 0.04 + 3.0 * np.sqrt(told * (1.0 - told) / len(part))
    score = np.mean(np.log(np.where(y[600:] == 1, found, 1.0 - found)))
    best = np.mean(np.log(np.where(y[600:] == 1, p[600:], 1.0 - p[600:])))
    assert score > best - 0.05


@pytest.mark.parametrize("link", ["logit", pytest.param("probit", marks=pytest.mark.slow)])
def test_far_from_all_rows_a_rare_class_is_as_rare_as_among_them(link: str) -> None:
    rng = np.random.default_rng(1)
    X = rng.uniform(size=(600, 2))
    rare = rng.uniform(size=600) < 0.03
    model = HIPGPClassifier(link=link).fit(X, rare)
    inside = model.predict_proba(rng.uniform(size=(200, 2)))[:, 1]
    far = model.predict_proba(np.array([[3.0, 3.0], [100.0, 100.0]]))[:, 1]
    assert inside.mean() == pytest.approx(rare.mean(), rel=0.3)
    np.testing.assert_allclose(far, rare.mean(), rtol=0.5)
    third = np.where(X[:, 0] > 0.5, "left", "right")
    three = HIPGPClassifier(link=link, epochs=5).fit(X, np.where(rare, "rare", third))
    assert three.predict_proba([[100.0, 100.0]])[0, 1] == pytest.approx(rare.mean(), rel=0.5)


def test_labels_of_which_the_columns_say_nothing_are_said_to_be_such() -> None:
    rng = np.random.default_rng(2)
    X = rng.uniform(size=(400, 2))
    (report,) = HIPGPClassifier().fit(X, rng.uniform(size=400) < 0.1).report_
    assert any("X may say nothing of the class" in each for each in report["advice"])
    X, _, y = simulated(300, 2)
    (report,) = HIPGPClassifier().fit(X, y).report_
    assert report["advice"] == []


def test_three_classes() -> None:
    X, _, _ = simulated(400, 2)
    y = np.digitize(X[:, 0], [-0.7, 0.7]) + 5
    model = HIPGPClassifier(inducing=20, epochs=40).fit(X[:250], y[:250])
    assert list(model.classes_) == [5, 6, 7]
    assert model.score(X[250:], y[250:]) > 0.9
    probability, log_odds = model.predict_proba(X[250:]), model.decision_function(X[250:])
    assert probability.shape == log_odds.shape == (150, 3)
    np.testing.assert_allclose(probability.sum(axis=1), 1.0)
    np.testing.assert_array_equal(probability.argmax(axis=1), log_odds.argmax(axis=1))
    assert len(model.kernels_) == len(model.elbos_) == len(model.report_) == 3


def test_twenty_columns() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((900, 20))
    y = X[:, 0] + 0.5 * X[:, 1] > 0
    model = HIPGPClassifier("matern52", inducing=40, epochs=20, learning_rate=0.03)
    assert model.fit(X[:700], y[:700]).score(X[700:], y[700:]) > 0.8
    assert model.predict(X[:3]).dtype == bool


def test_seeds_decide_everything() -> None:
    X, _, y = simulated(150, 2)

    def found(seed: int) -> Array:
        model = HIPGPClassifier(inducing=10, epochs=3, batch_size=50, random_state=seed)
        log_odds: Array = model.fit(X, y).decision_function(X)
        return log_odds

    assert (found(1) == found(1)).all()
    assert not (found(1) == found(2)).all()


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "b", "c"], [1, 2], [False, True]])
def test_saved_and_loaded(labels: list[Any], tmp_path: Path) -> None:
    X, _, _ = simulated(60, 2)
    y = np.array(labels)[np.arange(60) % len(labels)]
    model = HIPGPClassifier(Matern32([1.0, 1.0], 2.0), inducing=8, epochs=2, mean="linear")
    model.fit(X, y).save(tmp_path / "model")
    again = HIPGPClassifier.load(tmp_path / "model")
    np.testing.assert_allclose(again.predict_proba(X), model.predict_proba(X), rtol=1e-9)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.classes_.dtype == model.classes_.dtype
    assert again.get_params()["mean"] == "linear"
    with pytest.raises(FileExistsError, match="exists already"):
        model.save(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"expected a directory with classifier\.json"):
        HIPGPClassifier.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"which HIPGPClassifier\.load reads"):
        HIPGPRegressor.load(tmp_path / "model")


def test_labels_that_are_not_there_are_counted_as_pandas_writes_them() -> None:
    pandas: Any = pytest.importorskip("pandas")
    labels = pandas.Series(["a", pandas.NA, "b"] * 10, dtype="string")
    with pytest.raises(UserError, match=r"y is missing .* in 10 of 30 rows \(first in row 1"):
        HIPGPClassifier().fit(np.arange(30.0)[:, None], labels)


@pytest.mark.parametrize(
    ("parameters", "data", "message"),
    [
        ({}, {"y": np.zeros(30)}, r"y has one class only, 0\.0"),
        ({}, {"y": ["a", None] * 15}, r"y is missing \(None, NaN or NA\) in 15 of 30 rows \(first"),
        ({}, {"y": ["a", math.nan] * 15}, "y is missing .* in 15 of 30 rows"),
        ({}, {"y": np.linspace(0.0, 1.0, 30)}, "Unknown label type: continuous"),
        ({}, {"X": np.full((30, 1), np.nan)}, "Input X contains NaN"),
        ({}, {"y": np.zeros(29)}, "inconsistent numbers of samples"),
        ({"inducing": 31}, {}, "inducing = 31 but X has 30 rows"),
        ({"link": "cloglog"}, {}, "link = 'cloglog': expected one of 'logit', 'probit'"),
        ({"kernel": Matern32(1.0, dim=2)}, {}, "kernel has 2 input dimensions but X has 1"),
        ({"dtype": "float16"}, {}, "dtype = 'float16': expected one of"),
        ({"learn": ("lenght",)}, {}, "learn = 'lenght': expected one of .*did you mean 'length'"),
    ],
)
def test_bad_input(parameters: dict[str, Any], data: dict[str, Any], message: str) -> None:
    X = np.arange(30.0)[:, None]
    with pytest.raises(ValueError, match=message):
        HIPGPClassifier(**parameters).fit(**{"X": X, "y": np.arange(30) % 2} | data)


def test_few_rows_take_few_inducing_points() -> None:
    X, _, y = simulated(150, 2)
    (report,) = HIPGPClassifier(epochs=1).fit(X, y).report_
    assert report["n_inducing"] == 100
    assert [auto_points(n, 500) for n in (10, 500, 1_000, 2_500, 10**6)] == [
        100,
        100,
        200,
        500,
        500,
    ]


def _masked(values: Array) -> Any:
    return np.ma.array(values, mask=np.arange(values.size).reshape(values.shape) == 3)


def _masked_by_astropy(values: Array) -> Any:
    return Masked(values, mask=True)


def _in_parsecs(values: Array) -> Any:
    return values * u.pc


@pytest.mark.parametrize(
    ("dress", "words"),
    [
        (_in_parsecs, "is in pc: estimators take numbers without units"),
        (_masked, "has masked values: leave those rows out"),
        (_masked_by_astropy, "has masked values"),
    ],
)
@pytest.mark.parametrize("name", ["X", "y", "noise_std"])
def test_units_and_masks_are_not_dropped_in_silence(
    dress: Callable[[Array], Any], words: str, name: str
) -> None:
    X, _, y = simulated(40, 1)
    plain: dict[str, Array] = {"X": X, "y": y.astype(float), "noise_std": np.full(40, 0.1)}
    dressed = plain | {name: dress(plain[name])}
    with pytest.raises(UserError, match=f"{name} {words}"):
        HIPGPRegressor(engine="exact").fit(**dressed)
    if name != "noise_std":
        with pytest.raises(UserError, match=f"{name} {words}"):
            HIPGPClassifier().fit(dressed["X"], dressed["y"])


def test_units_are_not_dropped_where_answers_are_asked_for() -> None:
    X, _, y = simulated(40, 1)
    classifier = HIPGPClassifier(inducing=5, epochs=2).fit(X, y)
    regressor = HIPGPRegressor(engine="exact", learn=False).fit(X, y.astype(float))
    for ask in (classifier.predict, regressor.predict):
        with pytest.raises(UserError, match="X is in kpc"):
            ask(X * u.kpc)
    with pytest.raises(UserError, match="y is in mag"):
        regressor.refit(X, y * u.mag)
    numbers = np.ma.array(X, mask=np.zeros(X.shape, bool))
    np.testing.assert_array_equal(regressor.predict(numbers), regressor.predict(X))


def test_probabilities_far_out_are_of_the_class_that_is_predicted() -> None:
    log_odds = np.array([[-800.0, -40.0, -60.0], [-3.0, 2.0, -1e4], [-50.0, -50.0, -51.0]])
    model = HIPGPClassifier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HIPGPClassifier, "_log_odds", lambda self, X: log_odds)
        model.classes_ = np.array(["a", "b", "c"])
        found, chosen = model.predict_proba(log_odds), model.predict(log_odds)
    share = np.exp(-np.logaddexp(0.0, -log_odds[1]))
    np.testing.assert_allclose(found[1], share / share.sum(), rtol=1e-12)
    np.testing.assert_allclose(found[2], [0.4223, 0.4223, 0.1554], atol=1e-4)
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-12)
    assert found[0].tolist() == pytest.approx([0.0, 1.0, math.exp(-20.0)], rel=1e-6)
    assert chosen.tolist() == ["b", "b", "a"]


def test_labels_that_are_left_out_are_asked_for() -> None:
    nothing: Any = None
    with pytest.raises(UserError, match="requires y to be passed"):
        HIPGPClassifier().fit(np.zeros((3, 1)), nothing)
