"""Intrinsic colours (B−V)₀ by spectral type, from a published table."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from pipelines.hipparcos._types import parse_type

Array: TypeAlias = NDArray[np.float64]
#: The table that comes along: `intrinsic_colours.csv` says where its numbers are from.
TABLE = Path(__file__).with_name("intrinsic_colours.csv")


@final
@dataclass(frozen=True, eq=False)
class IntrinsicColours:
    """(B−V)₀ at numbers of spectral types, of dwarfs (V) and of giants (III)."""

    dwarfs: tuple[Array, Array]
    giants: tuple[Array, Array]

    @classmethod
    def read(cls, path: Path = TABLE) -> "IntrinsicColours":
        """Read a table of types and (B−V)₀; lines that begin with # are comments."""
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        return cls(_sequence(rows, 5.0), _sequence(rows, 3.0))

    def at(self, numbers: Array, giant: NDArray[np.bool_]) -> Array:
        """Return (B−V)₀ of N stars in mag, linear between the types of the table.

        Parameters
        ----------
        numbers
            Spectral types (N,) as numbers.
        giant
            Whether the sequence of giants holds (N,), else that of dwarfs.

        Returns
        -------
        Array
            (N,); NaN beyond the ends of a sequence.

        Examples
        --------
        >>> colours = IntrinsicColours.read()
        >>> [float(c) for c in colours.at(np.array([20.0, 50.0]), np.array([False, True]))]
        [0.0, 1.02]
        """
        dwarfs, giants = (
            np.interp(numbers, x, y, left=np.nan, right=np.nan)
            for x, y in (self.dwarfs, self.giants)
        )
        return np.where(giant, giants, dwarfs)


def _sequence(rows: list[dict[str, str]], luminosity: float) -> tuple[Array, Array]:
    """Return the types and colours of one luminosity class, in the order of the types."""
    pairs = []
    for row in rows:
        kind = parse_type(row["type"])
        assert kind is not None, row
        if kind.luminosity == luminosity:
            pairs.append((kind.number, float(row["B-V"])))
    numbers, colours = np.array(sorted(pairs)).T
    return numbers, colours
