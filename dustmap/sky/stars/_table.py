"""Stars as one checked value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky._coordinates import cartesian
from dustmap.sky.stars._checks import check_finite, check_lengths, check_magnitudes, check_rows
from dustmap.sky.stars._distances import AbstractDistances, Array
from dustmap.sky.stars._kinds import joined
from dustmap.sky.systems import ExtinctionSystem


@final
@dataclass(frozen=True, eq=False)
class StarTable:
    """N ≥ 1 stars.

    source_id (N,); Galactic l, b (N,) in degrees; distances of N stars; extinction and
    extinction_error (N,) in mag of `system`. Every value is finite and can be a measurement: errors
    from 1e-9 to 1e6 mag, extinctions within ±1000 mag; an extinction may be negative.
    """

    source_id: NDArray[np.int64]
    l: Array
    b: Array
    distances: AbstractDistances
    extinction: Array
    extinction_error: Array
    system: ExtinctionSystem

    def __post_init__(self) -> None:
        columns = self._columns()
        check_lengths({"source_id": self.source_id, **columns, **self.distances.columns()})
        if len(self) == 0:
            raise ValueError("the catalog has no rows: expected at least one star")
        check_finite(columns)
        check_rows(np.abs(self.b) <= 90.0, "b", "between -90 and 90 degrees")
        check_magnitudes(columns)

    def __len__(self) -> int:
        return len(self.source_id)

    def __getitem__(self, index: NDArray[Any] | slice) -> "StarTable":
        """The stars at an index array, under a mask, or in a slice."""
        columns = {name: values[index] for name, values in self._columns().items()}
        return StarTable(
            source_id=self.source_id[index],
            distances=self.distances[index],
            system=self.system,
            **columns,
        )

    @property
    def distance(self) -> Array:
        """Median distance (N,) in pc."""
        return self.distances.median

    def positions(self) -> Array:
        """Heliocentric Galactic X, Y, Z in pc (N, 3), at the median distance."""
        return cartesian(self.l, self.b, self.distance)

    def _columns(self) -> dict[str, Array]:
        names = ("l", "b", "extinction", "extinction_error")
        return {name: getattr(self, name) for name in names}


def concatenate(parts: Sequence[StarTable]) -> StarTable:
    """The stars of all parts, in order: of one system, with one kind of distances."""
    if not parts:
        raise ValueError("there are no tables to join: expected at least one")
    systems = {part.system.name for part in parts}
    if len(systems) > 1:
        raise ValueError(
            f"tables in {' and '.join(sorted(systems))} cannot be joined: convert them to one "
            "extinction system first"
        )
    if len(parts) == 1:
        return parts[0]
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("source_id", "l", "b", "extinction", "extinction_error")
    }
    distances = joined([part.distances for part in parts])
    return StarTable(distances=distances, system=parts[0].system, **columns)


def thinned(stars: StarTable, most: int) -> StarTable:
    """Every k-th star, at most `most` of them."""
    return stars[:: -(-len(stars) // most)]
