"""Dense structures of a map, and the names of known clouds that they are.

Every voxel climbs to its highest neighbour until it stands on a peak; the voxels of one peak are
its basin. Basins meet at saddles. From the highest saddle s down, two basins become one where the
lower peak is less than `contrast` · s (persistence, as Chazal et al. 2013, J. ACM 60, 41). What is
left and reaches `contrast` · `threshold` is a structure, as far as its voxels are at least
`threshold`. Neighbours share a face, an edge or a corner.

A known cloud is the structure with the most extinction along its line of sight, ∫ρ ds within the
structure, if the structure's distance agrees with that of the known one, where it has one.
"""

import difflib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import cartesian
from dustmap.sky.catalogs._card import card_directory
from dustmap.sky.maps._trilinear import within
from dustmap.tables import in_unit, number_column, numbers_or_nan, read_tables, text_column

Values: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = NDArray[np.int64]
Indices: TypeAlias = NDArray[np.signedinteger[Any]]
#: One of each two opposite neighbours (13, 3): in z, y, x.
_AHEAD = tuple(shift for shift in itertools.product((-1, 0, 1), repeat=3) if shift > (0, 0, 0))


@final
@dataclass(frozen=True)
class Criteria:
    """Criteria that make a part of a density a structure.

    Attributes
    ----------
    threshold : density of its surface in mag/pc
    contrast : its peak over the threshold, and over the saddle to a structure with a higher peak,
        at least
    voxels : that it has, at least
    """

    threshold: float
    contrast: float = 1.5
    voxels: int = 8

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < np.inf:
            raise UserError(f"threshold: expected more than 0 mag/pc, got {self.threshold:g}")
        if not 1.0 < self.contrast < np.inf:
            raise UserError(f"contrast: expected more than 1, got {self.contrast:g}")
        if self.voxels < 1:
            raise UserError(f"voxels: expected at least 1, got {self.voxels}")


@final
@dataclass(frozen=True, eq=False)
class Structures:
    """The structures of a density, numbered 1 to K from the highest peak down; 0 is none.

    dense (z, y, x): the voxels of each structure; basins (z, y, x): those that lead up to its peak,
    dense or not.
    """

    count: int
    dense: Labels
    basins: Labels


def structures_of(density: Values, criteria: Criteria) -> Structures:
    """Find the structures of a density (z, y, x) of finite numbers.

    Examples
    --------
    >>> density = np.full((9, 9, 9), 0.001, np.float32)
    >>> density[1:4, 1:4, 1:4], density[6:8, 6:8, 6:8] = 0.01, 0.02
    >>> structures = structures_of(density, Criteria(threshold=0.005, voxels=8))
    >>> structures.count, np.bincount(structures.dense.ravel()).tolist()
    (2, [694, 8, 27])
    """
    basin = _basins(density)
    merged = _merged(density, basin, criteria.contrast)
    dense = density >= criteria.threshold
    size = np.bincount(merged[dense], minlength=density.size)
    peaks = np.unique(merged)
    height = density.ravel()[peaks]
    kept = (height >= criteria.contrast * criteria.threshold) & (size[peaks] >= criteria.voxels)
    ordered = peaks[kept][np.argsort(-height[kept], kind="stable")]
    number = np.zeros(density.size, np.int64)
    number[ordered] = 1 + np.arange(len(ordered))
    basins = number[merged]
    return Structures(len(ordered), np.where(dense, basins, 0), basins)


def dense_regions(density: Values, criteria: Criteria) -> Labels:
    """Number (z, y, x) from 1 the connected regions above the threshold that have a structure.

    Their peak reaches `contrast` · `threshold`, and they have voxels enough; 0 is none.

    Examples
    --------
    >>> density = np.full((9, 9, 9), 0.001, np.float32)
    >>> density[1:4, 1:4, 1:4] = 0.01
    >>> regions = dense_regions(density, Criteria(threshold=0.005))
    >>> int(regions.max()), int((regions > 0).sum())
    (1, 27)
    """
    connected = np.ones((3, 3, 3), np.bool_)
    regions, count = ndimage.label(density >= criteria.threshold, structure=connected)
    peak = np.zeros(count + 1, np.float32)
    np.maximum.at(peak, regions.ravel(), density.ravel())
    kept = peak >= criteria.contrast * criteria.threshold
    kept &= np.bincount(regions.ravel(), minlength=count + 1) >= criteria.voxels
    kept[0] = False
    return np.asarray(np.where(kept[regions], regions, 0), np.int64)


def _basins(density: Values) -> Indices:
    """Return the flat index (z, y, x) of the peak that each voxel climbs to."""
    kind: type[np.signedinteger[Any]] = np.int32 if density.size < 2**31 else np.int64
    ranks: Indices = np.empty(density.size, kind)
    ranks[np.argsort(density, axis=None, kind="stable")] = np.arange(density.size, dtype=kind)
    rank = ranks.reshape(density.shape)
    best, up = rank.copy(), np.arange(density.size, dtype=kind).reshape(density.shape)
    index = up.copy()
    for shift in _AHEAD:
        for here, there in (_overlap(density.shape, shift), _overlap(density.shape, shift)[::-1]):
            higher = rank[there] > best[here]
            best[here] = np.where(higher, rank[there], best[here])
            up[here] = np.where(higher, index[there], up[here])
    peak = up.ravel()
    while True:
        further = peak[peak]
        if np.array_equal(further, peak):
            return np.asarray(peak.reshape(density.shape))
        peak = further


def _merged(density: Values, basin: Indices, contrast: float) -> Indices:
    """Return the basins (z, y, x) by the flat index of their peaks, once the faint are merged."""
    low, high, saddle = _saddles(density, basin)
    flat = density.ravel()
    owner = {int(peak): int(peak) for peak in np.unique(basin)}

    def root(peak: int) -> int:
        while owner[peak] != peak:
            owner[peak] = owner[owner[peak]]
            peak = owner[peak]
        return peak

    for one, other, s in zip(low.tolist(), high.tolist(), saddle.tolist(), strict=True):
        a, b = root(one), root(other)
        if a == b:
            continue
        upper, lower = (a, b) if (flat[a], a) > (flat[b], b) else (b, a)
        if flat[lower] < contrast * s:
            owner[lower] = upper
    table = np.zeros(density.size, np.int64)
    for peak in owner:
        table[peak] = root(peak)
    return table[basin]


def _saddles(density: Values, basin: Indices) -> tuple[Indices, Indices, Values]:
    """Return pairs of neighbouring basins (P,), (P,) and their saddles (P,), the highest first."""
    pairs, heights = [], []
    for shift in _AHEAD:
        here, there = _overlap(density.shape, shift)
        differ = np.nonzero(basin[here] != basin[there])
        ends = np.stack([basin[here][differ], basin[there][differ]]).astype(np.int64)
        height = np.minimum(density[here][differ], density[there][differ])
        low, high, saddle = _highest(np.sort(ends, axis=0), height, density.size)
        pairs.append(np.stack([low, high]))
        heights.append(saddle)
    return _highest(np.concatenate(pairs, axis=1), np.concatenate(heights), density.size)


def _highest(pairs: Indices, saddle: Values, size: int) -> tuple[Indices, Indices, Values]:
    """Return pairs (2, P) of basins below `size` once each, with their highest saddles (P,), the
    highest first."""
    low, high = pairs
    order = np.lexsort((high, low, -saddle))
    low, high, saddle = low[order], high[order], saddle[order]
    _, first = np.unique(low * size + high, return_index=True)
    first.sort()
    return low[first], high[first], saddle[first]


def _overlap(
    shape: tuple[int, ...], shift: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the voxels that have a neighbour in a direction, and these neighbours."""
    here = tuple(slice(max(0, -s), n - max(0, s)) for s, n in zip(shift, shape, strict=True))
    there = tuple(slice(max(0, s), n - max(0, -s)) for s, n in zip(shift, shape, strict=True))
    return here, there


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
        l, b = (number_column(table, name, "deg") for name in ("l", "b"))
        if not np.all(np.abs(b) <= 90.0):
            raise UserError(f"{path}: b: expected -90 to 90 degrees")
        distance = np.full(len(l), np.nan)
        if "distance_pc" in table.colnames:
            distance = in_unit(table, "distance_pc", numbers_or_nan(table, "distance_pc"), "pc")
        return cls(text_column(table, "name"), l, b, distance)


def _plain(name: str) -> str:
    """Return a name without capitals and what stands between its words."""
    return re.sub(r"[\s_-]+", " ", name.strip().casefold())


def names_of(
    known: NamedPlaces, density: Values, structures: Structures, grid: RegularGrid
) -> tuple[tuple[str, ...], Array]:
    """Return names (K,) of structures, and the distance (K,) of the first, NaN for none.

    A structure with several has them in the order of the extinctions along their lines.
    """
    names: list[dict[str, tuple[float, float]]] = [{} for _ in range(structures.count)]
    for i, name in enumerate(known.names):
        column, distance = _along(known.l[i], known.b[i], density, structures, grid)
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
    l: float, b: float, density: Values, structures: Structures, grid: RegularGrid
) -> tuple[Array, Array]:
    """Return ∫ρ ds within each structure (K,), and the mean distance of that dust, along a line."""
    ahead = cartesian(l, b, 1.0)
    rays, _ = within(grid, ahead[None], np.array([np.inf]))
    step = _STEP * min(grid.spacing)
    s = np.arange(rays.near[0] + 0.5 * step, rays.far[0], step)
    voxel = np.rint((s[:, None] * ahead - grid.lower) / grid.spacing).astype(np.int64)
    x, y, z = np.clip(voxel, 0, np.array(grid.shape) - 1).T
    cloud, dust = structures.dense[z, y, x], step * density[z, y, x].astype(np.float64)
    column = np.asarray(np.bincount(cloud, dust, structures.count + 1)[1:], np.float64)
    moment = np.asarray(np.bincount(cloud, dust * s, structures.count + 1)[1:], np.float64)
    return column, np.divide(moment, column, out=np.zeros_like(moment), where=column > 0)
