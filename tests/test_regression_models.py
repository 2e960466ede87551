"""Regressions that are saved, and arguments that are refused."""

import pickle
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dustmap import HIPGPClassifier, HIPGPRegressor
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.kernels import Matern32
from tests.combinations import covering
from tests.regression_cases import ENGINES, wave


@pytest.mark.parametrize(("engine", "mean"), covering(ENGINES, ["constant", "linear"]))
def test_saved_models_predict_the_same(engine: str, mean: str, tmp_path: Path) -> None:
    X, truth, noise = wave(200, 2)
    family = "block" if mean == "linear" else "full"
    model = HIPGPRegressor(engine=engine, mean=mean, family=family, random_state=3)
    model.fit(X, truth + noise)
    model.save(tmp_path / "model")
    again = HIPGPRegressor.load(tmp_path / "model")
    for ours, theirs in zip(
        again.predict(X + 0.01, return_std=True),
        model.predict(X + 0.01, return_std=True),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    assert again.get_params() == model.get_params()
    assert again.report_ == model.report_
    assert again.hyperparameter_errors_ == model.hyperparameter_errors_
    assert (model.hyperparameter_errors_ is None) == (engine in ("svgp", "sgpr"))
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".json", ".npz"}
    again.save(tmp_path / "again")
    third = HIPGPRegressor.load(tmp_path / "again")
    np.testing.assert_allclose(third.predict(X), model.predict(X), rtol=1e-8)
    with pytest.raises(FileExistsError, match="exists already"):
        model.save(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"expected a directory with model\.json"):
        HIPGPRegressor.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"which HIPGPRegressor\.load reads"):
        HIPGPClassifier.load(tmp_path / "model")


@pytest.mark.parametrize("name", ["model.json", "arrays.npz"])
def test_damaged_files_of_models_are_refused(name: str, tmp_path: Path) -> None:
    X, truth, noise = wave(30, 1)
    HIPGPRegressor(learn=False).fit(X, truth + noise).save(tmp_path)
    half = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(half[: len(half) // 2])
    with pytest.raises(UserError, match=f"{name} is damaged"):
        HIPGPRegressor.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["n_learn", "max_steps", "samples", "rank", "padding", "learning_rate", "max_memory"],
)
@pytest.mark.parametrize("value", ["many", None])
def test_arguments_that_are_no_numbers_are_refused(name: str, value: object) -> None:
    X, truth, noise = wave(30, 1)
    with pytest.raises(UserError, match=f"{name} = {value!r}: expected a"):
        HIPGPRegressor().set_params(**{name: value}).fit(X, truth + noise)


def test_saved_models_keep_kernel_and_grid_arguments(tmp_path: Path) -> None:
    X, truth, noise = wave(200, 1)
    grid, block = RegularGrid((50.0,), (0.05,), (21,)), cast(Any, (np.int64(8),))
    model = HIPGPRegressor(Matern32(0.3, 4.0, dim=1), grid=grid, noise="scale", block=block)
    model.fit(X, truth + noise, noise_std=np.ones(200)).save(tmp_path / "model")
    again = HIPGPRegressor.load(tmp_path / "model")
    assert again.grid == grid
    assert again.block == (8,)
    assert again.kernel.terms()[0].profile.name == "matern32"
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-8)
    again.fit(X, truth + noise, noise_std=np.ones(200))
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-6)


@pytest.mark.parametrize("whitening", ["torus", "cholesky"])
def test_float32_gives_way_to_float64_where_it_would_lose_the_data(whitening: str) -> None:
    X = np.random.default_rng(0).uniform(size=(60, 1))
    y = np.sin(5.0 * X[:, 0])
    model = HIPGPRegressor("matern32", grid=(60,), whitening=whitening, dtype="float32").fit(X, y)
    assert model.report_["dtype"] == "float64"
    assert "fitted in float64: rounding in float32" in model.report_["advice"][0]
    np.testing.assert_allclose(model.predict(X), y, atol=1e-2)
    noisy = y + 0.1 * np.random.default_rng(1).standard_normal(60)
    assert HIPGPRegressor(grid=(60,), dtype="float32").fit(X, noisy).report_["dtype"] == "float32"


def test_targets_beyond_float64_are_refused() -> None:
    with pytest.raises(ValueError, match="y is too large for its square to be a number"):
        HIPGPRegressor().fit(LINE, 1e200 * LINE[:, 0])


def bad(**arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the estimator, and of fit."""
    given = [name for name in ("X", "y", "noise_std") if name in arguments]
    return arguments, {name: arguments.pop(name) for name in given}


LINE = np.linspace(0.0, 1.0, 20)[:, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            bad(kernel="matern23"),
            "kernel = 'matern23': expected one of 'auto', 'matern13', 'matern12', 'mat",
        ),
        (bad(kernel=Matern32(1.0, dim=2)), "kernel has 2 input dimensions but X has 1 columns"),
        (bad(family="blocks"), "family = 'blocks': expected one of .*did you mean 'block'"),
        (
            bad(whitening="ciqq"),
            "whitening = 'ciqq': expected one of 'auto', 'torus', .*did you mean 'ciq'",
        ),
        (
            bad(engine="svpg"),
            "engine = 'svpg': expected one of 'auto', 'exact', .*'svgp', 'sgpr'; did you",
        ),
        (bad(dtype="float16"), "dtype = 'float16': expected one of"),
        (bad(mean="zero"), "mean = 'zero': expected one of"),
        (bad(noise="none"), "noise = 'none': expected one of"),
        (bad(noise=0.0), r"noise must be a positive standard deviation, got 0\.0"),
        (bad(noise="scale"), 'noise = "scale" needs noise_std'),
        (bad(noise="learn", noise_std=np.ones(20)), "replaces noise_std"),
        (bad(noise=1.0, noise_std=np.ones(20)), "leave one of them out"),
        (bad(learn=("lenght",)), "learn = 'lenght': expected one of .*did you mean 'length'"),
        (bad(learn="length"), "learn must be True, False or names"),
        (bad(padding=0.0), r"padding = 0\.0: expected a positive number of length scales"),
        (bad(max_memory=0), "max_memory = 0: expected a positive number of bytes"),
        (bad(n_learn=1), "n_learn = 1: expected a whole number of at least 2"),
        (bad(max_steps=2.5), r"max_steps = 2\.5: expected a whole number"),
        (bad(block=(0,)), r"block = \(0,\): expected None or a tuple"),
        (bad(grid="fine"), "grid = 'fine': expected one of 'auto'"),
        (bad(grid=3.5), 'grid must be "auto", a RegularGrid, or a tuple'),
        (bad(grid=(5, 5)), "gives the points of 2 axes but X has 1 columns"),
        (bad(grid=(1,)), "at least two points on every axis"),
        (bad(grid=RegularGrid((0.0, 0.0), (1.0, 1.0), (2, 2))), "grid has 2 axes but X has 1"),
        (
            bad(grid=RegularGrid((0.0,), (0.01,), (51,))),
            r"10 of 20 rows of X lie outside grid, the farthest 0\.5 above it on axis 0",
        ),
        (bad(engine="exact", grid=(10,)), 'engine="exact" has no grid'),
        (bad(engine="hip", X=np.zeros((20, 1))), "column 0 of X has one value only"),
        (bad(engine="hip", X=np.random.default_rng(0).uniform(size=(20, 5))), "4 axes at most"),
        (bad(engine="hip", noise_std=np.full(20, 1e-8)), 'use noise="jitter" to learn more noise'),
        (bad(noise_std=np.ones(19)), r"noise_std must have one value per row of X, \(20,\)"),
        (bad(noise_std=-np.ones(20)), "20 of 20 values are not, the first is noise_std.0. = -1"),
        (bad(noise_std=np.full(20, np.nan)), "noise_std must be positive and finite"),
        (bad(y=np.full(20, np.inf)), "Input y contains infinity"),
        (bad(X=np.full((20, 1), np.nan)), "Input X contains NaN"),
        (bad(y=np.zeros(19)), "inconsistent numbers of samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(arguments: tuple[dict[str, Any], dict[str, Any]], message: str) -> None:
    parameters, fit = arguments
    with pytest.raises(ValueError, match=message):
        HIPGPRegressor(**parameters).fit(**{"X": LINE, "y": LINE[:, 0]} | fit)


def test_too_much_data_for_the_exact_engine() -> None:
    X = np.zeros((20_001, 5))
    said = r'20,001 rows: the exact engine .* engine="auto".* or fit a rand'
    with pytest.raises(ValueError, match=said):
        HIPGPRegressor(engine="exact").fit(X, X[:, 0])


@pytest.mark.parametrize("family", ["full", "block", "low-rank", "mean-field"])
def test_a_grid_beyond_the_memory_is_refused_before_it_is_made(family: str) -> None:
    X, truth, noise = wave(100, 2)
    model = HIPGPRegressor(grid=(20_000, 20_000), family=family, max_memory=2**30)
    with pytest.raises(
        MemoryError, match=r"grid 20000 × 20000 needs [\d,]+ bytes: .* max_memory = 1,073"
    ):
        model.fit(X, truth + noise)


def test_mean_and_covariance_at_once_are_refused() -> None:
    model = HIPGPRegressor().fit(LINE, LINE[:, 0])
    with pytest.raises(ValueError, match="ask for one of them"):
        model.predict(LINE, return_std=True, return_cov=True)


def test_names_of_columns_are_kept(tmp_path: Path) -> None:
    """A table with its columns in another order is refused by loaded and refitted models, too;
    a model without names is read."""
    pandas: Any = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {"lon": np.linspace(0.0, 1.0, 40), "lat": np.linspace(1.0, 0.0, 40) ** 2}
    )
    y, swapped = np.sin(6.0 * table["lon"].to_numpy()), table[["lat", "lon"]]
    model = HIPGPRegressor("matern32", engine="exact").fit(table, y)
    model.save(tmp_path / "model")
    loaded = HIPGPRegressor.load(tmp_path / "model")
    for other in (loaded, model.refit(table, y)):
        np.testing.assert_allclose(other.predict(table), model.predict(table), atol=1e-6)
        assert list(other.feature_names_in_) == ["lon", "lat"]
        with pytest.raises(ValueError, match="feature names"):
            other.predict(swapped)
    classifier = HIPGPClassifier("matern32").fit(table, y > 0.0)
    classifier.save(tmp_path / "classifier")
    with pytest.raises(ValueError, match="feature names"):
        HIPGPClassifier.load(tmp_path / "classifier").predict(swapped)
    bare = HIPGPRegressor("matern32", engine="exact").fit(table.to_numpy(), y)
    bare.save(tmp_path / "bare")
    assert not hasattr(HIPGPRegressor.load(tmp_path / "bare"), "feature_names_in_")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_by_quadrature_are_as_exact_as_asked_and_pickled(dtype: str) -> None:
    X, truth, noise = wave(120, 2)
    y = truth + noise
    fitted = HIPGPRegressor("matern32", engine="hip", whitening="ciq", family="block", dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = fitted.fit(X, y).predict(X[:5])
    assert fitted.report_["advice"] == []
    assert (pickle.loads(pickle.dumps(fitted)).predict(X[:5]) == mean).all()
