"""Measured extinctions beside their predictions, in numbers: what `_comparisons` draws."""

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dustmap.errors import UserError
from dustmap.sky.systems import ExtinctionSystem

Array: TypeAlias = NDArray[np.float64]

_MEASURES = ("l", "b", "measured", "predicted", "std")


@final
@dataclass(frozen=True, eq=False)
class Comparison:
    """N measured extinctions in mag beside their predictions.

    Attributes
    ----------
    l, b : (N,)
        Galactic coordinates in degrees.
    measured, predicted : (N,)
    std : (N,)
        Of measured − predicted, errors of the measurement included.
    system : of the extinctions
    normal : (N,) or None
        Normal scores Φ⁻¹(P(less than measured)) of predictions that are not normal.
    """

    l: Array
    b: Array
    measured: Array
    predicted: Array
    std: Array
    system: ExtinctionSystem
    normal: Array | None = None

    def __post_init__(self) -> None:
        shapes = {name: np.shape(getattr(self, name)) for name in _MEASURES}
        if len(set(shapes.values())) != 1 or np.ndim(self.l) != 1 or len(self.l) == 0:
            raise UserError(f"expected columns of one length, of one star at least, got {shapes}")
        if not np.all(self.std > 0.0):
            raise UserError("std: expected standard deviations > 0; add the measurements' errors")

    def __len__(self) -> int:
        return len(self.l)

    @property
    def standardised(self) -> Array:
        """Normal scores (N,), standard normal where all is well: (measured − predicted) / std of
        normal predictions."""
        if self.normal is not None:
            return self.normal
        return (self.measured - self.predicted) / self.std

    @property
    def label(self) -> str:
        """Name `standardised` on an axis."""
        if self.normal is None:
            return "(measured \N{MINUS SIGN} predicted) / std. deviation"
        return "normal score of measured \N{MINUS SIGN} predicted"

    @property
    def pit(self) -> Array:
        """Probability integral transforms (N,): uniform in (0, 1) where all is well."""
        return np.asarray(ndtr(self.standardised), np.float64)
