"""What the selection of a survey makes of the density of its distances."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from scipy.interpolate import CubicSpline

from dustmap.sky.stars._distances import Array


@final
@dataclass(frozen=True)
class SurveyRatio:
    """ln r(t) of C classes of stars, t = ln d: cubic splines through `values` (C, K) at first,
    first + step, ..; constant, with slope 0, beyond their ends.

    bounds (C − 1): errors of the parallax in mas between the classes. Stars with large errors are
    faint, and so farther than others, or nearer.
    """

    first: float
    step: float
    values: tuple[tuple[float, ...], ...]
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.values}
        if len(self.values) != len(self.bounds) + 1 or len(lengths) != 1 or min(lengths) < 2:
            raise ValueError("the table of a distance prior must have a row for every class")
        if not self.step > 0.0 or not all(np.isfinite(row).all() for row in self.values):
            raise ValueError("the table of a distance prior must be of finite numbers")

    def at(self, t: Array, error: Array) -> tuple[Array, Array]:
        """ln r and its slope at t (n, P) or (P,) of stars with errors (n, 1)."""
        splines = CubicSpline(np.arange(len(self.values[0])), np.transpose(self.values), axis=0)
        place = np.clip((t - self.first) / self.step, 0.0, len(self.values[0]) - 1.0)
        rows = np.searchsorted(self.bounds, error)
        cell = np.minimum(place.astype(np.int64), len(self.values[0]) - 2)
        u = place - cell
        c3, c2, c1, c0 = splines.c[:, cell, rows]
        value = c0 + u * (c1 + u * (c2 + u * c3))
        slope = (c1 + u * (2.0 * c2 + u * 3.0 * c3)) / self.step
        return value, np.where((place > 0.0) & (place < len(self.values[0]) - 1.0), slope, 0.0)

    @property
    def span(self) -> float:
        """The most that ln r changes."""
        return float(np.ptp(self.values, axis=1).max())

    def attributes(self) -> dict[str, Any]:
        return {
            "first_ln_pc": self.first,
            "step": self.step,
            "ln_ratio": [list(row) for row in self.values],
            "error_bounds_mas": list(self.bounds),
        }

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "SurveyRatio":
        """What `attributes` gave."""
        first, step = (float(attributes[name]) for name in ("first_ln_pc", "step"))
        values = tuple(tuple(map(float, row)) for row in attributes["ln_ratio"])
        return cls(first, step, values, tuple(map(float, attributes["error_bounds_mas"])))
