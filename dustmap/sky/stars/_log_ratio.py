"""A smooth factor on a density of distances, tabulated in ln d."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from scipy.interpolate import CubicSpline

from dustmap.sky.stars._distances import Array


@final
@dataclass(frozen=True)
class LogRatio:
    """ln r(t), t = ln d: a cubic spline through `values` at first, first + step, ..; constant, with
    slope 0, beyond its ends."""

    first: float
    step: float
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 2 or not self.step > 0.0 or not np.isfinite(self.values).all():
            raise ValueError("the table of a distance prior must have two finite values or more")

    def at(self, t: Array) -> tuple[Array, Array]:
        """ln r and its slope."""
        spline = CubicSpline(np.arange(len(self.values)), self.values, bc_type="clamped")
        place = np.clip((t - self.first) / self.step, 0.0, len(self.values) - 1.0)
        return np.asarray(spline(place)), np.asarray(spline(place, 1)) / self.step

    @property
    def span(self) -> float:
        """The most that ln r changes between two nodes."""
        return max(self.values) - min(self.values)

    def attributes(self) -> dict[str, Any]:
        return {"first_ln_pc": self.first, "step": self.step, "values": list(self.values)}

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "LogRatio":
        """What `attributes` gave."""
        first, step = (float(attributes[name]) for name in ("first_ln_pc", "step"))
        return cls(first, step, tuple(map(float, attributes["values"])))
