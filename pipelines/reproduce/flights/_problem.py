"""Delays of flights, split at random, and the methods that `flights` compares."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import ShuffleSplit

from dustmap import HIPGPRegressor
from pipelines.reproduce import _estimators_gpytorch as peer
from pipelines.reproduce._estimators import (
    Array,
    Fitted,
    Method,
    Split,
    cross_validated,
    regressor,
)
from pipelines.reproduce._experiment import Request, Row

KERNEL = "squared-exponential"
SEED = 0
MEAN, LINEAR, BOOSTED = "constant mean", "linear regression", "boosted trees (scikit-learn)"
SVGP, SUBSET = "SVGP", "exact GP, subset"
#: Length of our engine's natural steps at these batches.
_NATURAL = 0.1


@final
@dataclass(frozen=True)
class Schedule:
    """Data of a minibatch, passes, Adam's rate, and the precision of rows and posterior."""

    batch: int
    epochs: int
    rate: float
    dtype: str

    def as_row(self) -> Row:
        """The entry in the settings."""
        return {**asdict(self), "natural_step": _NATURAL}


@final
@dataclass(frozen=True)
class Sizes:
    """Data held out and trained on (None: all others), inducing points, rows of subset GPs.

    each: how every M is trained. beside: the M at which gpytorch's SVGP is, too, where its steps
    take less than `limit` seconds; both: how it and ours are trained there, long enough for the
    rate to fall, as gpytorch leaves q where the last steps left it.
    """

    n_test: int
    n_train: int | None
    inducing: tuple[int, ...]
    subsets: tuple[int, ...]
    each: Schedule
    beside: int
    both: Schedule
    limit: float

    def as_row(self) -> Row:
        """The entry in the settings."""
        return {
            "each_M": self.each.as_row(),
            "beside_gpytorch": {"M": self.beside, **self.both.as_row(), "limit_s": self.limit},
        }


def load(request: Request, sizes: Sizes) -> Split:
    """Arrival delay in minutes by eight features; those held out are drawn at random."""
    with np.load(request.file("us_flight_delays_8feat.npz")) as table:
        x, y = table["X"].astype(np.float64), table["y"].astype(np.float64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED)).numpy()
    test, train = order[: sizes.n_test], order[sizes.n_test :][: sizes.n_train]
    return Split("flights", x[train], y[train], x[test], y[test])


def baselines(sizes: Sizes) -> Iterator[Method]:
    """What is no SVGP."""
    yield Method(MEAN, _judged(DummyRegressor()))
    yield Method(LINEAR, _judged(LinearRegression()))
    for n in sizes.subsets:
        yield Method(SUBSET, regressor(HIPGPRegressor(KERNEL, engine="exact", n_learn=n)), n)
    yield Method(BOOSTED, _judged(HistGradientBoostingRegressor(random_state=SEED)))


def _judged(model: Any) -> Callable[[Array, Array], Fitted]:
    """With the errors on a tenth of the training data for its noise."""
    left_out = ShuffleSplit(1, test_size=0.1, random_state=SEED)
    return cross_validated(model, {}, left_out)


def svgp(schedule: Schedule, m: int) -> Method:
    """Our engine with M inducing points."""
    estimator = HIPGPRegressor(
        KERNEL,
        engine="svgp",
        inducing=m,
        batch_size=schedule.batch,
        epochs=schedule.epochs,
        learning_rate=schedule.rate,
        dtype=schedule.dtype,
    )
    return Method(SVGP, regressor(estimator))


def gpytorch(sizes: Sizes) -> Iterator[Method]:
    """Its SVGP in float64, by the steps of its example and by ours."""
    schedule = sizes.both
    for name in (peer.NAME, peer.ALTERNATING):
        training = peer.SVGPTraining(
            sizes.beside,
            schedule.batch,
            schedule.epochs,
            _NATURAL,
            schedule.rate,
            alternating=name == peer.ALTERNATING,
            limit=sizes.limit,
        )
        yield Method(name, peer.svgp(peer.squared_exponential, _start, training))


def _start(x: Array, y: Array) -> peer.Start:
    """The longest length scales and the wider noise of those that our engine chooses from."""
    dim = x.shape[1]
    return peer.Start((2.0 * math.sqrt(dim),) * dim, 1.0, 0.25)
