"""Cubes as bytes: 254 steps of a linear or logarithmic scale, packed for a page of text."""

import base64
import zlib
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Codes: TypeAlias = NDArray[np.uint8]
#: Steps between the codes 1 and 255; 0 is a voxel without a value.
STEPS = 254
#: A logarithmic scale spans at most so many decades: what is below counts as its lower end.
MOST_DECADES = 4.0


@final
@dataclass(frozen=True)
class Scale:
    """The values of the codes c = 1..255.

        v(c) = 10^u or u,  u = low + (high − low) (c − 1) / 254

    low, high: decadic logarithms where `logarithmic`, else values. Rounding to a code changes
    log10 v, or v, by at most half a step.
    """

    logarithmic: bool
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[np.float32], logarithmic: bool) -> "Scale":
        """Span the finite values; a logarithmic scale, those within `MOST_DECADES` of the top."""
        known = values[np.isfinite(values)]
        if logarithmic:
            known = known[known > 0]
        if known.size == 0:
            return cls(
                logarithmic, -MOST_DECADES if logarithmic else 0.0, 0.0 if logarithmic else 1.0
            )
        low, high = float(known.min()), float(known.max())
        if logarithmic:
            high = float(np.log10(high))
            low = max(float(np.log10(low)), high - MOST_DECADES)
        if high <= low:  # one value: its code is 1
            high = low + (1.0 if logarithmic else abs(low) or 1.0)
        return cls(logarithmic, low, high)

    @property
    def half_step(self) -> float:
        """Largest change of log10 v, or of v, by rounding."""
        return 0.5 * (self.high - self.low) / STEPS

    @property
    def error(self) -> float:
        """Largest change by rounding: relative where logarithmic, else absolute."""
        return float(10.0**self.half_step - 1.0) if self.logarithmic else self.half_step

    def encode(self, values: NDArray[np.float32]) -> Codes:
        """Round values (...) to codes (...); 0 where there is none, 1 and 255 beyond the ends."""
        known = np.isfinite(values)
        filled = np.where(known, values, 1.0).astype(np.float64)
        if self.logarithmic:
            filled = np.log10(np.maximum(filled, 10.0**self.low))
        share = np.clip((filled - self.low) / (self.high - self.low), 0.0, 1.0)
        return np.where(known, 1 + np.rint(STEPS * share), 0).astype(np.uint8)

    def decode(self, codes: Codes) -> NDArray[np.float64]:
        """Return the values (...) of codes (...); NaN of 0."""
        u = self.low + (self.high - self.low) * (codes.astype(np.float64) - 1.0) / STEPS
        values = 10.0**u if self.logarithmic else u
        return np.where(codes > 0, values, np.nan)


def packed(codes: Codes) -> str:
    """Pack codes (z, y, x) as text: differences along x modulo 256, deflated, in base64."""
    # A smooth field has small differences, which deflate packs to some 80 % of the field itself.
    differences = np.diff(codes, axis=-1, prepend=np.uint8(0))
    return base64.b64encode(zlib.compress(differences.tobytes(), 9)).decode("ascii")
