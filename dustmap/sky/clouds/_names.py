"""Names of clouds: known ones by their directions, and the structures that they are.

A known cloud is the structure with the most extinction along its line of sight, ∫ρ ds within the
structure, if the structure's distance agrees with that of the known one, where it has one.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import cartesian
from dustmap.sky.catalogs._card import card_directory
from dustmap.sky.clouds._watershed import Structures, Values
from dustmap.sky.maps._trilinear import within
from dustmap.tables import number_column, read_tables, text_column

Array: TypeAlias = NDArray[np.float64]

#: Half of Zucker et al. 2020 (A&A 633, A51), tables of molecular clouds: 163 lines of sight.
KNOWN = "clouds_zucker2020.csv"
#: Steps along a line, in voxels; and the largest share by which distances of one cloud differ.
_STEP, _AGREES = 0.25, 0.3


@final
@dataclass(frozen=True, eq=False)
class NamedPlaces:
    """K lines of sight through clouds: l, b (K,) in degrees, distance (K,) in pc, NaN for none."""

    names: tuple[str, ...]
    l: Array
    b: Array
    distance: Array

    def __len__(self) -> int:
        return len(self.names)

    def place(self, name: str) -> tuple[float, float, float]:
        """Return l, b in degrees and distance in pc of a cloud, of the middle one of its lines.

        Small and capital letters, spaces, hyphens and underscores make no difference.

        Raises
        ------
        UserError
            Where no line has the name, with those that are nearest.

        Examples
        --------
        >>> NamedPlaces.read().place("corona australis")
        (359.5, -17.8, 147.0)
        """
        by = {_plain(each): each for each in self.names}
        if _plain(name) not in by:
            parts = [each for plain, each in by.items() if _plain(name) and _plain(name) in plain]
            close = difflib.get_close_matches(_plain(name), by, n=3, cutoff=0.5)
            near = list(dict.fromkeys([*parts, *(by[each] for each in close)]))[:4]
            hint = f"the nearest names are {', '.join(near)}" if near else "no name is near to it"
            raise UserError(f"{name!r}: no line of sight has this name; {hint}")
        lines = np.flatnonzero([_plain(each) == _plain(name) for each in self.names])
        ahead = cartesian(self.l[lines], self.b[lines], np.ones(len(lines)))
        k = int(lines[(ahead @ ahead.mean(0)).argmax()])
        return float(self.l[k]), float(self.b[k]), float(self.distance[k])

    @classmethod
    def read(cls, path: Path | None = None) -> "NamedPlaces":
        """Read a table with the columns name, l, b and, if known, distance_pc; or the one shipped.

        The latter has 163 of the lines of sight of Zucker et al. (2020, A&A 633, A51).
        """
        path = card_directory() / KNOWN if path is None else path
        table = read_tables(path)
        if "name" not in table.colnames:
            raise UserError(
                f"{path}: expected the columns name, l, b and, where it is known, distance_pc, got "
                f"{', '.join(table.colnames)}"
            )
        l, b = (number_column(table, name) for name in ("l", "b"))
        if not np.all(np.abs(b) <= 90.0):
            raise UserError(f"{path}: b: expected -90 to 90 degrees")
        distance = np.full(len(l), np.nan)
        if "distance_pc" in table.colnames:
            column = np.ma.asarray(table["distance_pc"])
            distance = np.asarray(np.ma.filled(column.astype(np.float64), np.nan))
        return cls(text_column(table, "name"), l, b, distance)


def _plain(name: str) -> str:
    """Return a name without capitals and what stands between its words."""
    return re.sub(r"[\s_-]+", " ", name.strip().casefold())


def names_of(
    known: NamedPlaces, density: Values, found: Structures, grid: RegularGrid
) -> tuple[tuple[str, ...], Array]:
    """Return names (K,) of structures, and the distance (K,) of the first, NaN for none.

    A structure with several has them in the order of the extinctions along their lines.
    """
    names: list[dict[str, tuple[float, float]]] = [{} for _ in range(found.count)]
    for i, name in enumerate(known.names):
        column, distance = _along(known.l[i], known.b[i], density, found, grid)
        if np.isfinite(known.distance[i]):
            column[np.abs(distance / known.distance[i] - 1.0) > _AGREES] = 0.0
        if column.max(initial=0.0) > 0.0:
            cloud = int(column.argmax())
            if column[cloud] > names[cloud].get(name, (0.0, 0.0))[0]:
                names[cloud][name] = float(column[cloud]), float(known.distance[i])
    ordered = [sorted(by.items(), key=lambda item: (-item[1][0], item[0])) for by in names]
    joined = tuple("; ".join(name for name, _ in by) for by in ordered)
    return joined, np.array([by[0][1][1] if by else np.nan for by in ordered])


def _along(
    l: float, b: float, density: Values, found: Structures, grid: RegularGrid
) -> tuple[Array, Array]:
    """Return ∫ρ ds within each structure (K,), and the mean distance of that dust, along a line."""
    ahead = cartesian(l, b, 1.0)
    rays, _ = within(grid, ahead[None], np.array([np.inf]))
    step = _STEP * min(grid.spacing)
    s = np.arange(rays.near[0] + 0.5 * step, rays.far[0], step)
    voxel = np.rint((s[:, None] * ahead - grid.lower) / grid.spacing).astype(np.int64)
    x, y, z = np.clip(voxel, 0, np.array(grid.shape) - 1).T
    cloud, dust = found.dense[z, y, x], step * density[z, y, x].astype(np.float64)
    column = np.asarray(np.bincount(cloud, dust, found.count + 1)[1:], np.float64)
    moment = np.asarray(np.bincount(cloud, dust * s, found.count + 1)[1:], np.float64)
    return column, np.divide(moment, column, out=np.zeros_like(moment), where=column > 0)
