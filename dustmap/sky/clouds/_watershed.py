"""Watersheds of a density: the basins of its peaks, and the regions that are dense.

Every voxel climbs to its highest neighbour until it stands on a peak; the voxels of one peak are
its basin. Basins meet at saddles. From the highest saddle s down, two basins become one where the
lower peak is less than `contrast` · s (persistence, as Chazal et al. 2013, J. ACM 60, 41). What is
left and reaches `contrast` · `threshold` is a structure, as far as its voxels are at least
`threshold`. Neighbours share a face, an edge or a corner.
"""

import itertools
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from dustmap.errors import UserError

Values: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = NDArray[np.int64]
Indices: TypeAlias = NDArray[np.int64]
#: One of each two opposite neighbours (13, 3): in z, y, x.
_AHEAD = tuple(shift for shift in itertools.product((-1, 0, 1), repeat=3) if shift > (0, 0, 0))


@final
@dataclass(frozen=True)
class Criteria:
    """What makes a part of a density a structure.

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
    >>> found = structures_of(density, Criteria(threshold=0.005, voxels=8))
    >>> found.count, np.bincount(found.dense.ravel()).tolist()
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
    ranks = np.empty(density.size, np.int64)
    ranks[np.argsort(density, axis=None, kind="stable")] = np.arange(density.size)
    rank = ranks.reshape(density.shape)
    best, up = rank.copy(), np.arange(density.size).reshape(density.shape)
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
            return peak.reshape(density.shape)
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
        differ = basin[here] != basin[there]
        ends = np.stack([basin[here][differ], basin[there][differ]])
        pairs.append(np.sort(ends, axis=0))
        heights.append(np.minimum(density[here][differ], density[there][differ]))
    low, high = np.concatenate(pairs, axis=1)
    saddle = np.concatenate(heights)
    order = np.lexsort((high, low, -saddle))
    low, high, saddle = low[order], high[order], saddle[order]
    _, first = np.unique(low * density.size + high, return_index=True)
    first.sort()
    return low[first], high[first], saddle[first]


def _overlap(
    shape: tuple[int, ...], shift: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the voxels that have a neighbour in a direction, and these neighbours."""
    here = tuple(slice(max(0, -s), n - max(0, s)) for s, n in zip(shift, shape, strict=True))
    there = tuple(slice(max(0, s), n - max(0, -s)) for s, n in zip(shift, shape, strict=True))
    return here, there
