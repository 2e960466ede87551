"""Planes through a map, and the map projected on a plane, as arrays and as pictures."""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.errors import UserError
from dustmap.sky.figures import _panels
from dustmap.sky.figures import _style as style
from dustmap.sky.figures._style import Array
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.maps._cubes import Cube
from dustmap.sky.maps._quantities import integrals_std, standard_deviation
from dustmap.sky.systems import conversion

#: Planes of a cube that are in memory at once.
_DEPTH = 16
#: Inches of an image that is higher than wide, at most.
_TALLEST = 4.2
#: Inches beside and above an image, for labels and bars.
_BESIDE, _ABOVE = 1.12, 0.53
#: Inches beside and above each of many.
_MARGIN = 0.2
#: Voxels between a plane that is asked for and the one that is drawn, without a word.
_AWAY = 0.1
_PANELS: dict[str, Any] = {"sharex": True, "sharey": True}
#: What is grey, without a truth and beside one.
_GREY = "outside the map", "outside the truth"


log = logging.getLogger(__name__)


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
class Plane(_panels.AbstractImage):
    """An image seen along `axis`: densities on the plane `at` = (level, level), or integrals.

    at: between which levels, in pc; extent: outer faces of the pixels, left, right, bottom, top.
    """

    axis: Axis
    at: tuple[float, float]
    extent: tuple[float, float, float, float]

    def height(self, width: float, alone: bool) -> float:
        left, right, bottom, top = self.extent
        right_margin, above = (_BESIDE, _ABOVE) if alone else (_MARGIN, _MARGIN)
        return min((width - right_margin) * (top - bottom) / (right - left), _TALLEST) + above

    def label(self, axis: Axes, text: str) -> None:
        axis.text(0.03, 0.96, text, transform=axis.transAxes, va="top", **style.outlined())

    def orient(self, axis: Axes) -> None:
        _mark_centre(axis, self)

    def draw(
        self, figure: Figure, axis: Axes, panel: _panels.Panel, height: float | None
    ) -> tuple[Array, Array]:
        image = axis.imshow(
            panel.values,
            origin="lower",
            extent=self.extent,
            interpolation="nearest",
            **panel.scale.look,
        )
        across, up = self.axis.others
        axis.set_xlabel(f"{across.name} [pc]")
        axis.set_ylabel(f"{up.name} [pc]")
        style.fix_ticks(axis)
        _mark_sun(axis, self, named=height is not None)
        axis.set_xlim(self.extent[:2])
        axis.set_ylim(self.extent[2:])
        if height is not None:
            _mark_centre(axis, self)
            panel.scale.bar(figure, image, axis, panel.label_for(height - _ABOVE))
        axis.label_outer()
        (left, right, bottom, top), (rows, columns) = self.extent, self.mean.shape
        dx, dy = (right - left) / columns, (top - bottom) / rows
        return left + dx * (np.arange(columns) + 0.5), bottom + dy * (np.arange(rows) + 0.5)

    def outline(self, place: Array, radius: float) -> Array | None:
        """A circle: that in which the plane cuts the ball, or the whole ball of a projection."""
        low, high = self.at
        away = max(low - place[self.axis.value], place[self.axis.value] - high, 0.0)
        across, up = (float(place[other.value]) for other in self.axis.others)
        left, right, bottom, top = self.extent
        if away >= radius or not (left <= across <= right and bottom <= up <= top):
            return None
        turn = np.linspace(0.0, 2.0 * np.pi, 65)
        circle = np.sqrt(radius**2 - away**2) * np.stack([np.cos(turn), np.sin(turn)], axis=-1)
        return np.asarray(circle + np.array([across, up]))


def slice_of(density: DustMap, axis: Axis, level: float, truth: DustMap | None = None) -> Plane:
    """Read the plane of voxels nearest to `level` in pc, which must lie inside the map.

    The standard deviation is that of the stored samples where the map has no other. The truth is
    interpolated at the centres of the same voxels; a map with levels is one grid (`on_one_grid`).
    """
    density = density.on_one_grid()
    index = density.layout.nearest_slice(axis.value, level)
    plane = mean_slice_of(density, axis, level)
    true = None if truth is None else _truth(density, axis, plane.at[0], truth)
    return replace(plane, std=_spread(density, axis, index), truth=true)


def mean_slice_of(density: DustMap, axis: Axis, level: float) -> Plane:
    """Read the mean and the coverage of the plane of voxels nearest to `level` in pc."""
    density = density.on_one_grid()
    index = density.layout.nearest_slice(axis.value, level)
    shown = float(density.axes()[axis.value][index])
    covered = Quantity.COVERAGE in density.available
    return Plane(
        integrated=False,
        positive=density.layout.positive,
        axis=axis,
        at=(shown, shown),
        extent=_extent(density, axis),
        mean=_of_mean(density, lambda cube: _plane(density, axis, index, cube)),
        std=None,
        coverage=_plane(density, axis, index, Cube(Quantity.COVERAGE)) if covered else None,
        truth=None,
    )


def _of_mean(density: DustMap, taken: Callable[[Cube], Array]) -> Array:
    """Take a plane of the mean density, or the mean of those of samples where there is none."""
    if Quantity.MEAN in density.available:
        return taken(Cube(Quantity.MEAN))
    if density.n_samples == 0:
        raise UserError(f"{density!r} has no mean and no samples to show; export one of them")
    samples = (Cube(Quantity.SAMPLES, k) for k in range(density.n_samples))
    return np.asarray(np.mean([taken(sample) for sample in samples], axis=0), np.float64)


def _spread(density: DustMap, axis: Axis, index: int) -> Array | None:
    """Read the standard deviation, or take that of the samples; None of a map that has neither."""
    if Quantity.STD in density.available:
        return _plane(density, axis, index, Cube(Quantity.STD))
    if density.n_samples < 2:
        return None
    samples = (Cube(Quantity.SAMPLES, k) for k in range(density.n_samples))
    drawn = [_plane(density, axis, index, sample) for sample in samples]
    return np.asarray(standard_deviation(np.stack(drawn), density.layout.positive), np.float64)


def projection_of(density: DustMap, axis: Axis, truth: DustMap | None = None) -> Plane:
    """Integrate ρ along `axis` in mag, from the first voxel centre to the last; trapezoidal rule.

    The standard deviation is that of the stored samples, if there are any. Coverage is weighted by
    the density: the part of the column that the data decide on. The truth is integrated over the
    same stretch, whatever its own voxels.
    """
    density = density.on_one_grid()
    mean = _of_mean(density, lambda cube: _integral(density, axis, (cube.quantity,), cube.sample))
    coverage = None
    if {Quantity.MEAN, Quantity.COVERAGE} <= set(density.available):
        weighted = _integral(density, axis, (Quantity.MEAN, Quantity.COVERAGE))
        nothing = np.where(np.isnan(mean), np.nan, 0.0)
        coverage = np.divide(weighted, mean, out=nothing, where=mean > 0)
    centres = density.axes()[axis.value]
    true = None
    if truth is not None:
        levels, weights = _planes_of(truth, axis, float(centres[0]), float(centres[-1]))
        planes = (_truth(density, axis, level, truth) for level in levels)
        true = sum((w * plane for w, plane in zip(weights, planes, strict=True)), start=0.0 * mean)
    std = None
    if density.n_samples > 1:
        samples = range(density.n_samples)
        drawn = [_integral(density, axis, (Quantity.SAMPLES,), k) for k in samples]
        std = np.asarray(integrals_std(np.stack(drawn), density.layout.positive), np.float64)
    return Plane(
        integrated=True,
        positive=density.layout.positive,
        axis=axis,
        at=(float(centres[0]), float(centres[-1])),
        extent=_extent(density, axis),
        mean=mean,
        std=std,
        coverage=coverage,
        truth=true,
    )


def _extent(density: DustMap, axis: Axis) -> tuple[float, float, float, float]:
    """Return the outer faces of the first and last voxels: half a voxel beyond their centres."""
    faces = []
    for other in axis.others:
        half = density.grid.spacing[other.value] / 2
        faces += [density.grid.lower[other.value] - half, density.grid.upper[other.value] + half]
    left, right, bottom, top = faces
    return left, right, bottom, top


def _plane(density: DustMap, axis: Axis, index: int, cube: Cube) -> Array:
    """Read one plane, and nothing else."""
    parts = [slice(None)] * 3
    parts[axis.of_cube] = slice(index, index + 1)
    z, y, x = parts
    read = density.cubes.read(cube, (z, y, x))
    return np.asarray(read.take(0, axis=axis.of_cube), np.float64)


def _truth(density: DustMap, axis: Axis, level: float, truth: DustMap) -> Array:
    right, up = (density.axes()[other.value] for other in axis.others)
    points = np.full((len(up), len(right), 3), level)
    points[..., axis.others[0].value] = right
    points[..., axis.others[1].value] = up[:, None]
    factor = conversion(truth.system, density.system)
    return factor * truth.mean_at(points.reshape(-1, 3)).reshape(points.shape[:2])


def _planes_of(truth: DustMap, axis: Axis, low: float, high: float) -> tuple[list[float], Array]:
    """Return where a density is to be read between two levels in pc, and the weights (K,) in pc.

    The trapezoidal rule over its planes of voxels is exact of what is linear between them.
    """
    own = np.concatenate([each.axes()[axis.value] for each in (truth, *truth.finer)])
    levels = np.unique([low, *own[(low < own) & (own < high)], high])
    steps = np.diff(levels, prepend=low, append=high)
    return levels.tolist(), 0.5 * (steps[1:] + steps[:-1])


def _weights(density: DustMap, axis: Axis) -> Array:
    """Return the weights of the trapezoidal rule along an axis, in pc."""
    weights = np.full(density.grid.shape[axis.value], density.grid.spacing[axis.value])
    weights[[0, -1]] /= 2
    return weights


def _integral(
    density: DustMap, axis: Axis, factors: tuple[Quantity, ...], sample: int = 0
) -> Array:
    """Integrate the product of cubes along an axis (V, H), a few planes in z at a time."""
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


@style.styled()
def slice_figure(
    density: DustMap,
    axis: Axis = Axis.Z,
    level: float = 0.0,
    truth: DustMap | None = None,
    clouds: _panels.CloudMarks | None = None,
) -> Figure:
    """Draw mean and uncertainty on the plane of voxels nearest to `level` in pc, and the truth.

    X grows to the Galactic centre, Y to l = 90°, Z to b = 90°. clouds: those that the plane cuts
    are outlined.

    Examples
    --------
    >>> from dustmap.gp import RegularGrid
    >>> from dustmap.sky.figures import save_figure
    >>> grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    >>> density = DustMap.from_nodes(grid, np.full(125, 0.002), None, "A_V")
    >>> save_figure(slice_figure(density, Axis.Z), "plane.png")
    """
    plane = slice_of(density, axis, level, truth)
    where = f"{axis.name} = {style.signed(plane.at[0])} pc"
    title, grey = f"Dust density at {where}", _GREY[truth is not None]
    return _panels.panels_figure(density.system, plane, title, marks=clouds, grey=grey, **_PANELS)


def slices_figure(
    density: DustMap,
    axis: Axis,
    levels: Sequence[float],
    clouds: _panels.CloudMarks | None = None,
) -> Figure:
    """Draw the mean on several planes of voxels, with one scale: those nearest to levels in pc."""
    density = density.on_one_grid()
    planes = [mean_slice_of(density, axis, level) for level in levels]
    shown = np.array([plane.at[0] for plane in planes])
    if (np.abs(shown - levels) > _AWAY * density.grid.spacing[axis.value]).any():
        words = ", ".join(map(style.plain, shown))
        log.info("the nearest planes of voxels are drawn: %s = %s pc", axis.name, words)
    labels = [f"{axis.name} = {style.signed(plane.at[0])} pc" for plane in planes]
    title = f"Dust density on planes of {axis.name}"
    looks = {**_PANELS, "grey": _GREY[False]}
    return _panels.sequence_figure(density.system, planes, labels, title, marks=clouds, **looks)


@style.styled()
def projection_figure(
    density: DustMap,
    axis: Axis = Axis.Z,
    truth: DustMap | None = None,
    clouds: _panels.CloudMarks | None = None,
) -> Figure:
    """Draw the extinction through the whole map along an axis: along Z, seen from above."""
    plane = projection_of(density, axis, truth)
    low, high = (style.plain(level) for level in plane.at)
    where = f"{axis.name} = {low} to {high} pc"
    title, grey = f"Extinction integrated over {where}", _GREY[truth is not None]
    return _panels.panels_figure(density.system, plane, title, marks=clouds, grey=grey, **_PANELS)


def _mark_sun(axis: Axes, plane: Plane, named: bool) -> None:
    """Draw the Sun's symbol ☉ where the Sun is, or below and above it."""
    left, right, bottom, top = plane.extent
    if not (left <= 0.0 <= right and bottom <= 0.0 <= top):
        return
    ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": "black"}
    axis.plot(0.0, 0.0, "o", markersize=5.0, markeredgewidth=0.6, **ring)
    axis.plot(0.0, 0.0, ".", markersize=1.6, color="black")
    if named:
        offset: dict[str, Any] = {"xytext": (4, 4), "textcoords": "offset points"}
        axis.annotate("Sun", (0.0, 0.0), **offset, **style.outlined())


def _mark_centre(axis: Axes, plane: Plane) -> None:
    """Draw an arrow to the Galactic centre; along X, which grows towards the viewer, words."""
    words, light = "Galactic centre", style.outlined()
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    place |= {"ha": "right", "va": "center", **light}
    if plane.axis is Axis.X:
        axis.annotate(f"{words}: towards you", (0.97, 0.06), xytext=(0, 0), **place)
        return
    arrow = {"arrowstyle": "-|>", "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    arrow |= {"mutation_scale": 7, "color": "white", "path_effects": light["path_effects"]}
    axis.annotate(words, (0.97, 0.06), xytext=(-16, 0), arrowprops=arrow, **place)
