"""Cells of the sky of nearly equal area, for means of stars."""

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Cells:
    """`rows` belts of equal height in b, each cut in l into as many cells as make them square."""

    rows: int

    @property
    def per_row(self) -> NDArray[np.int64]:
        """Cells of each belt (rows,), from b = −90° up."""
        middle = np.radians(180.0 * (np.arange(self.rows) + 0.5) / self.rows - 90.0)
        return np.maximum(1, np.round(2.0 * self.rows * np.cos(middle))).astype(np.int64)

    def __len__(self) -> int:
        return int(self.per_row.sum())

    def of(self, l: Array, b: Array) -> NDArray[np.int64]:
        """The cells that hold places in degrees, numbered from 0."""
        row = np.minimum((np.asarray(b) + 90.0) / 180.0 * self.rows, self.rows - 1).astype(np.int64)
        first = np.concatenate([[0], np.cumsum(self.per_row)[:-1]])
        across = (np.asarray(l) % 360.0) / 360.0 * self.per_row[row]
        return np.asarray(first[row] + np.minimum(across.astype(np.int64), self.per_row[row] - 1))

    @classmethod
    def holding(cls, count: int, each: int, most_rows: int = 60) -> "Cells":
        """So many that `count` places are about `each` in a cell."""
        # About 4/π rows² of them.
        rows = np.sqrt(np.pi / 4.0 * count / each)
        return cls(int(np.clip(rows, 2, most_rows)))
