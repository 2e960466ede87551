"""Kernels by the names that configurations and estimators give them."""

from collections.abc import Callable, Mapping

from dustmap.gp.kernels._kernel import (
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
    StationaryKernel,
)

KERNELS: Mapping[str, Callable[..., StationaryKernel]] = {
    "matern12": Matern12,
    "matern32": Matern32,
    "matern52": Matern52,
    "squared-exponential": SquaredExponential,
}
