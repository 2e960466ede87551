"""Measured extinctions beside their prediction, as numbers."""

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dustmap.sky.systems import ExtinctionSystem

Array: TypeAlias = NDArray[np.float64]

_COLUMNS = ("l", "b", "measured", "predicted", "std")


@final
@dataclass(frozen=True, eq=False)
class Comparison:
    """N measured extinctions in mag beside their predictions.

    std (N,): of measured − predicted, errors of the measurement included. l, b in degrees.
    normal (N,): normal scores Φ⁻¹(P(less than measured)) of predictions that are not normal.
    """

    l: Array
    b: Array
    measured: Array
    predicted: Array
    std: Array
    system: ExtinctionSystem
    normal: Array | None = None

    def __post_init__(self) -> None:
        shapes = {name: np.shape(getattr(self, name)) for name in _COLUMNS}
        if len(set(shapes.values())) != 1 or np.ndim(self.l) != 1 or len(self.l) == 0:
            raise ValueError(f"expected columns of one length, of one star at least, got {shapes}")
        if not np.all(self.std > 0.0):
            raise ValueError("std: expected standard deviations > 0; add the measurements' errors")

    def __len__(self) -> int:
        return len(self.l)

    @property
    def standardised(self) -> Array:
        """Normal scores (N,), standard normal where all is well: (measured − predicted) / std of
        normal predictions."""
        plain = (self.measured - self.predicted) / self.std
        return plain if self.normal is None else self.normal

    @property
    def label(self) -> str:
        """What `standardised` is."""
        if self.normal is None:
            return "(measured \N{MINUS SIGN} predicted) / std. deviation"
        return "normal score of measured \N{MINUS SIGN} predicted"

    @property
    def pit(self) -> Array:
        """Probability integral transforms (N,): uniform in (0, 1) where all is well."""
        return np.asarray(ndtr(self.standardised), np.float64)


def coverage_curve(pit: Array, nominal: Array) -> Array:
    """Share of transforms (N,) inside the central intervals of probability `nominal` (K,)."""
    widths = np.sort(np.abs(2.0 * pit - 1.0))
    return np.searchsorted(widths, nominal, side="right") / len(pit)
