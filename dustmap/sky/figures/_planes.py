"""What a picture of a plane shows: slices and projections of a map, as arrays."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.maps import Cube, DustMap, Quantity

Array: TypeAlias = NDArray[np.float64]

#: Planes of a cube that are in memory at once.
_DEPTH = 16


@final
class Axis(enum.Enum):
    """An axis of heliocentric Galactic coordinates; the value is its column."""

    X = 0
    Y = 1
    Z = 2

    @property
    def others(self) -> "tuple[Axis, Axis]":
        """The axes of a picture that looks along this one: to the right, and up."""
        right, up = (axis for axis in Axis if axis is not self)
        return right, up

    @property
    def of_cube(self) -> int:
        """Which axis of a cube (z, y, x) this is."""
        return 2 - self.value


@final
@dataclass(frozen=True, eq=False)
class Plane:
    """Values (V, H) on pixels to the right and up, seen along `axis`.

    Densities in mag/pc at the plane `at` = (level, level), or integrals in mag between `at`.
    extent: outer faces of the pixels, left, right, bottom, top, in pc. std, coverage and truth
    where they are known.
    """

    axis: Axis
    at: tuple[float, float]
    extent: tuple[float, float, float, float]
    mean: Array
    std: Array | None
    coverage: Array | None
    truth: Array | None

    @property
    def integrated(self) -> bool:
        """Whether the values are integrals."""
        return self.at[0] != self.at[1]


def slice_of(density: DustMap, axis: Axis, level: float, truth: DustMap | None = None) -> Plane:
    """The plane of voxels nearest to `level` in pc, which must lie inside the map.

    The truth is interpolated at the centres of the same voxels.
    """
    index = _nearest(density, axis, level)
    shown = float(density.axes()[axis.value][index])
    values = {q: _plane(density, axis, index, q) for q in _known(density)}
    return Plane(
        axis=axis,
        at=(shown, shown),
        extent=_extent(density, axis),
        mean=values[Quantity.MEAN],
        std=values.get(Quantity.STD),
        coverage=values.get(Quantity.COVERAGE),
        truth=None if truth is None else _truth(density, axis, shown, truth),
    )


def projection_of(density: DustMap, axis: Axis, truth: DustMap | None = None) -> Plane:
    """∫ρ along `axis` in mag, from the first voxel centre to the last; trapezoidal rule.

    The standard deviation is that of the stored samples, if there are any. Coverage is weighted by
    the density: the part of the column that the data decide on.
    """
    mean = _integral(density, axis, (Quantity.MEAN,))
    coverage = None
    if Quantity.COVERAGE in density.available:
        weighted = _integral(density, axis, (Quantity.MEAN, Quantity.COVERAGE))
        coverage = np.divide(weighted, mean, out=np.zeros_like(mean), where=mean > 0)
    centres = density.axes()[axis.value]
    true = None
    if truth is not None:
        weights = _weights(density, axis)
        planes = (_truth(density, axis, float(level), truth) for level in centres)
        true = sum((w * plane for w, plane in zip(weights, planes, strict=True)), start=0.0 * mean)
    return Plane(
        axis=axis,
        at=(float(centres[0]), float(centres[-1])),
        extent=_extent(density, axis),
        mean=mean,
        std=_std_of_integral(density, axis),
        coverage=coverage,
        truth=true,
    )


def _known(density: DustMap) -> Iterator[Quantity]:
    for quantity in (Quantity.MEAN, Quantity.STD, Quantity.COVERAGE):
        if quantity in density.available:
            yield quantity


def _nearest(density: DustMap, axis: Axis, level: float) -> int:
    centres = density.axes()[axis.value]
    half = density.grid.spacing[axis.value] / 2
    low, high = centres[0] - half, centres[-1] + half
    if not low <= level <= high:
        raise ValueError(f"{axis.name.lower()} = {level:g} pc: expected {low:g} to {high:g} pc")
    return int(np.abs(centres - level).argmin())


def _extent(density: DustMap, axis: Axis) -> tuple[float, float, float, float]:
    """Outer faces of the first and last voxels: half a voxel beyond their centres."""
    faces = []
    for other in axis.others:
        half = density.grid.spacing[other.value] / 2
        faces += [density.grid.lower[other.value] - half, density.grid.upper[other.value] + half]
    left, right, bottom, top = faces
    return left, right, bottom, top


def _plane(density: DustMap, axis: Axis, index: int, quantity: Quantity) -> Array:
    """One plane, of which nothing else is read."""
    parts = [slice(None)] * 3
    parts[axis.of_cube] = slice(index, index + 1)
    z, y, x = parts
    read = density.cubes.read(Cube(quantity), (z, y, x))
    return np.asarray(read.take(0, axis=axis.of_cube), np.float64)


def _truth(density: DustMap, axis: Axis, level: float, truth: DustMap) -> Array:
    right, up = (density.axes()[other.value] for other in axis.others)
    points = np.full((len(up), len(right), 3), level)
    points[..., axis.others[0].value] = right
    points[..., axis.others[1].value] = up[:, None]
    return truth.mean_at(points.reshape(-1, 3)).reshape(points.shape[:2])


def _weights(density: DustMap, axis: Axis) -> Array:
    """Of the trapezoidal rule, in pc."""
    weights = np.full(density.grid.shape[axis.value], density.grid.spacing[axis.value])
    weights[[0, -1]] /= 2
    return weights


def _integral(
    density: DustMap, axis: Axis, factors: tuple[Quantity, ...], sample: int = 0
) -> Array:
    """∫ of the product of cubes along an axis (V, H), a few planes in z at a time."""
    weights = _weights(density, axis)
    parts = []
    for start in range(0, density.grid.shape[2], _DEPTH):
        chosen = slice(start, start + _DEPTH)
        box = chosen, slice(None), slice(None)
        cubes = [density.cubes.read(Cube(quantity, sample), box) for quantity in factors]
        slab = np.prod(np.asarray(cubes, np.float64), axis=0)
        along = weights[chosen] if axis is Axis.Z else weights
        parts.append(np.tensordot(along, slab, axes=(0, axis.of_cube)))
    return np.asarray(sum(parts) if axis is Axis.Z else np.concatenate(parts), np.float64)


def _std_of_integral(density: DustMap, axis: Axis) -> Array | None:
    if density.n_samples < 2:
        return None
    drawn = [_integral(density, axis, (Quantity.SAMPLES,), k) for k in range(density.n_samples)]
    return np.asarray(np.std(drawn, axis=0, ddof=1), np.float64)
