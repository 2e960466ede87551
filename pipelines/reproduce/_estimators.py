"""What experiments on estimators share: a split, methods that fit it, and a row of the table."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import GridSearchCV
from threadpoolctl import threadpool_limits

from dustmap import HIPGPRegressor
from dustmap.inference import scores
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch

Array: TypeAlias = NDArray[np.float64]


@final
@dataclass(frozen=True, eq=False)
class Split:
    """Training data x (N, D), y (N,) and those held out, both in random order."""

    name: str
    x: Array
    y: Array
    x_test: Array
    y_test: Array

    def first(self, n: int) -> "Split":
        """The first n training data, which are a random part, and all that is held out."""
        return Split(self.name, self.x[:n], self.y[:n], self.x_test, self.y_test)

    def as_row(self) -> Row:
        """The entry in the settings."""
        return {
            "n_train": len(self.y),
            "n_test": len(self.y_test),
            "D": self.x.shape[1],
            "std_of_y": float(self.y.std()),
        }


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted method.

    predict: x (N, D) ↦ mean and standard deviation (N,) of new measurements, noise included.
    details: what it tells of itself, entries of its row.
    """

    predict: Callable[[Array], tuple[Array, Array]]
    details: Row


@final
@dataclass(frozen=True)
class Method:
    """A method by its name in the table.

    fit: x (N, D), y (N,) ↦ the fitted method. most: training data that it gets, None for all.
    """

    name: str
    fit: Callable[[Array, Array], Fitted]
    most: int | None = None


@final
@dataclass(frozen=True, eq=False)
class Measured:
    """A row of the table, and the squared errors (N_test,) that it has the mean of."""

    row: Row
    squares: Array

    def rise(self, before: "Measured") -> float:
        """How much larger the squared errors are than those `before`, in standard errors."""
        apart = self.squares - before.squares
        spread = float(apart.std()) / math.sqrt(len(apart))
        return float(apart.mean()) / spread if spread > 0 else 0.0


def measure(split: Split, method: Method) -> Measured:
    """Fits and predicts on as many threads as torch has, whatever library computes."""
    part = split if method.most is None else split.first(method.most)
    with threadpool_limits(torch.get_num_threads()):
        fitted, fit = stopwatch(lambda: method.fit(part.x, part.y))
        (mean, std), predict = stopwatch(lambda: fitted.predict(part.x_test))
    row: Row = {
        "method": method.name,
        "n_train": len(part.y),
        "fit_s": fit,
        "predict_s": predict,
        **scored(part.y_test, mean, std),
        **fitted.details,
    }
    return Measured(row, (part.y_test - mean) ** 2)


def warm_up(split: Split) -> None:
    """A fit of few rows, after which torch has loaded what it loads at first use."""
    part = split.first(50)
    HIPGPRegressor("matern32", engine="svgp", inducing=5, epochs=1).fit(part.x, part.y)
    HIPGPRegressor("matern32", engine="exact").fit(part.x, part.y)


def scored(y: Array, mean: Array, std: Array) -> Row:
    """RMSE, mean negative log-density, and the share of y within one standard deviation."""
    found = scores(*(torch.from_numpy(values) for values in (y, mean, std**2)))
    return {"rmse": found.rmse, "nll": -found.loglike, "coverage68": found.coverage68}


def regressor(estimator: HIPGPRegressor) -> Callable[[Array, Array], Fitted]:
    """The estimator of this package."""

    def fit(x: Array, y: Array) -> Fitted:
        fitted = estimator.fit(x, y)

        def predict(at: Array) -> tuple[Array, Array]:
            mean, std = fitted.predict(at, return_std=True, include_noise=True)
            return mean, std

        return Fitted(predict, told(fitted))

    return fit


def told(fitted: HIPGPRegressor) -> Row:
    """Size, passes and hyperparameters of a fitted estimator of this package."""
    sizes = ("n_inducing", "grid_shape", "n_features", "steps", "epochs", "passes")
    report = fitted.report_
    learned = report["hyperparameters"]
    return {
        **{key: report[key] for key in sizes if key in report},
        "lengthscale": learned["kernel"][0]["length"],
        "std": learned["kernel"][0]["std"],
        "noise_std": learned["noise_std"],
        "advice": report["advice"],
    }


def cross_validated(
    model: Any, choices: Mapping[str, Sequence[int]], splits: Any
) -> Callable[[Array, Array], Fitted]:
    """A model of scikit-learn, refitted on all data with the best choice by its squared errors.

    Its noise is normal and as wide as the errors on those parts of the data that were left out;
    splits: what `cv` of `GridSearchCV` takes. choices: may be none.
    """

    def fit(x: Array, y: Array) -> Fitted:
        search = GridSearchCV(model, choices, scoring="neg_mean_squared_error", cv=splits)
        search.fit(x, y)
        width = math.sqrt(-float(search.best_score_))

        def predict(at: Array) -> tuple[Array, Array]:
            mean = np.asarray(search.predict(at), np.float64)
            return mean, np.full_like(mean, width)

        return Fitted(predict, {"noise_std": width, **search.best_params_})

    return fit


def quietly(fit: Callable[[Array, Array], Fitted]) -> Callable[[Array, Array], Fitted]:
    """`fit` with its warnings counted in the row rather than shown."""

    def counted(x: Array, y: Array) -> Fitted:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitted = fit(x, y)
        return Fitted(fitted.predict, {**fitted.details, "warnings": len(caught)})

    return counted
