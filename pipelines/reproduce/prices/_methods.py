"""Prices of houses, and the estimators that `prices` compares."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dustmap import HIPGPRegressor
from dustmap.gp.kernels import StationaryKernel
from pipelines.reproduce import _estimators_gpytorch as peer
from pipelines.reproduce._estimators import (
    Array,
    Fitted,
    Method,
    Split,
    cross_validated,
    quietly,
    regressor,
)
from pipelines.reproduce._experiment import Request
from pipelines.reproduce.spatial._problem import SEED, projected

OURS = ("hip", "global", "svgp")
SKLEARN_GP, NEAREST = "GaussianProcessRegressor (scikit-learn)", "nearest neighbours (scikit-learn)"
NEIGHBOURS = (2, 3, 5, 7, 10, 15, 20, 30, 50)
_FOLDS = 5
#: What `HIPGPRegressor` steps by when left to itself.
_BATCH, _EPOCHS, _NATURAL, _RATE = 256, 20, 0.1, 0.02
#: Rows by whose evidence gpytorch's hyperparameters start, as those of our own engine do.
_START_ROWS = 500


@final
@dataclass(frozen=True)
class Sizes:
    """Data (None: all), points of SVGPs, rows of scikit-learn's GP, seconds of gpytorch's steps."""

    n_train: int | None
    n_test: int | None
    inducing: int
    dense: int
    limit: float


def load(request: Request, sizes: Sizes) -> Split:
    """ln(price) by kilometres east and north, one in ten held out: the split of `spatial`."""
    with np.load(request.file("kingcounty_house_prices.npz")) as table:
        columns = dict(zip(table["columns"].tolist(), table["data"].T, strict=True))
    x = projected(columns["long"], columns["lat"]).numpy()
    y = np.log(columns["price"])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED)).numpy()
    test, train = order[: len(y) // 10], order[len(y) // 10 :]
    test, train = test[: sizes.n_test], train[: sizes.n_train]
    return Split("King County house prices", x[train], y[train], x[test], y[test])


def methods(sizes: Sizes) -> Iterator[Method]:
    """Ours at defaults, and those of scikit-learn."""
    yield Method("hip", regressor(HIPGPRegressor("matern32", engine="hip")))
    yield Method("global", regressor(HIPGPRegressor("matern32", engine="global")))
    yield Method(
        "svgp", regressor(HIPGPRegressor("matern32", engine="svgp", inducing=sizes.inducing))
    )
    yield Method(SKLEARN_GP, quietly(_sklearn_gp), sizes.dense)
    neighbours = make_pipeline(StandardScaler(), KNeighborsRegressor())
    choices = {"kneighborsregressor__n_neighbors": NEIGHBOURS}
    yield Method(NEAREST, cross_validated(neighbours, choices, _FOLDS))


def gpytorch(sizes: Sizes) -> Method:
    """Its SVGP, with the settings of our engine."""
    training = peer.SVGPTraining(
        sizes.inducing, _BATCH, _EPOCHS, _NATURAL, _RATE, alternating=False, limit=sizes.limit
    )
    return Method(peer.NAME, peer.svgp(peer.matern32, _start, training))


def _start(x: Array, y: Array) -> peer.Start:
    """The maximum of the evidence of some rows, by our exact engine."""
    fitted = HIPGPRegressor("matern32", engine="exact").fit(x[:_START_ROWS], y[:_START_ROWS])
    kernel, noise = fitted.kernel_, fitted.noise_std_
    assert isinstance(kernel, StationaryKernel)
    assert noise is not None
    lengthscale = kernel.lengthscale.detach().numpy() / x.std(0)
    variance = float(y.var())
    return peer.Start(
        tuple(lengthscale.tolist()),
        float(kernel.variance().detach()) / variance,
        noise**2 / variance,
    )


def _sklearn_gp(x: Array, y: Array) -> Fitted:
    """Matérn-3/2 with a length scale per axis, and white noise; X standardised, y inside."""
    kernel = ConstantKernel(1.0) * Matern([1.0] * x.shape[1], nu=1.5) + WhiteKernel(0.3)
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=SEED)
    scaler = StandardScaler().fit(x)
    fitted: Any = model.fit(scaler.transform(x), y)

    def predict(at: Array) -> tuple[Array, Array]:
        # Its white noise is part of the kernel, so that std is that of measurements.
        mean, std = fitted.predict(scaler.transform(at), return_std=True)
        return mean, std

    signal, noise = fitted.kernel_.k1, fitted.kernel_.k2
    scale = float(y.std())
    return Fitted(
        predict,
        {
            "lengthscale": (signal.k2.length_scale * scaler.scale_).tolist(),
            "std": scale * float(signal.k1.constant_value) ** 0.5,
            "noise_std": scale * float(noise.noise_level) ** 0.5,
        },
    )
