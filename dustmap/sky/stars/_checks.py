"""Checks of columns, with messages that name the column and its first bad row."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

#: Largest |extinction|, and smallest and largest error, that can be a measurement, in mag.
MOST_EXTINCTION, LEAST_ERROR, MOST_ERROR = 1e3, 1e-9, 1e6


def check_lengths(columns: Mapping[str, NDArray[np.generic]]) -> None:
    """Every column is a vector (N,) of one length N."""
    shapes = {name: values.shape for name, values in columns.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError(f"every column of a catalog must have one length (N,), got {shapes}")


def check_rows(good: NDArray[np.bool_], column: str, wanted: str) -> None:
    if not good.all():
        bad = np.flatnonzero(~good)
        raise ValueError(
            f"column {column}: {len(bad)} of {len(good)} rows are not {wanted} "
            f"(first at row {bad[0]}, counted from 0); correct or remove them"
        )


def check_finite(columns: Mapping[str, NDArray[np.float64]]) -> None:
    for name, values in columns.items():
        check_rows(np.isfinite(values), name, "finite")


def check_positive(columns: Mapping[str, NDArray[np.float64]]) -> None:
    check_finite(columns)
    for name, values in columns.items():
        check_rows(values > 0.0, name, "> 0")


def check_magnitudes(columns: Mapping[str, NDArray[np.float64]]) -> None:
    """Extinctions and their errors lie within what can be a measurement."""
    extinction, error = columns["extinction"], columns["extinction_error"]
    within = f"between -{MOST_EXTINCTION:g} and {MOST_EXTINCTION:g} mag"
    check_rows(np.abs(extinction) <= MOST_EXTINCTION, "extinction", within)
    check_rows(error > 0.0, "extinction_error", "> 0")
    within = f"between {LEAST_ERROR:g} and {MOST_ERROR:g} mag"
    check_rows((error >= LEAST_ERROR) & (error <= MOST_ERROR), "extinction_error", within)
