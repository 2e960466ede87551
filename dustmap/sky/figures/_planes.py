"""Planes through a map, and the map projected on a plane, as arrays and as pictures.

An image, of a plane here or of the sky, is drawn as panels: mean, truth, uncertainty and difference
beside each other, each with its scale.
"""

import enum
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dustmap.sky.figures import _style as style
from dustmap.sky.figures._clouds import CloudMarks
from dustmap.sky.figures._style import Array, Scale
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.maps._cubes import Cube
from dustmap.sky.maps._quantities import DATA_DOMINATED
from dustmap.sky.systems import ExtinctionSystem

#: Colour bars count densities in 10⁻³ mag/pc, their size near the Sun.
PER_MILLE = 1e3
#: Differences are shown up to so many standard deviations.
_MOST_SIGMA = 3.0
#: Inches of a letter, and what of a formula is no letter.
_PER_LETTER = 0.066
_UNSEEN = r"\\mathrm|\\rho|[${}^_]"
_TRUTH, _MEAN = "truth", "posterior mean"
_HATCH = "////"
_HATCH_COLOUR = "0.75"
#: Inches for the title of a figure, and for the legend of its marks.
_TITLE, _LEGEND = 0.3, 0.25
#: Planes of a cube that are in memory at once.
_DEPTH = 16
#: Inches of an image that is higher than wide, at most.
_TALLEST = 4.2
#: Inches beside and above an image, for labels and bars.
_BESIDE, _ABOVE = 1.12, 0.53
_PANELS: dict[str, Any] = {"grey": "outside the truth", "sharex": True, "sharey": True}


@final
@dataclass(frozen=True, eq=False)
class Panel:
    """One image: values (V, H) on a scale, whose bar says what in which unit they are."""

    title: str
    values: Array
    scale: Scale
    quantity: str
    unit: str = ""
    of_mean: bool = False

    def mesh(self, axis: Axes, across: Array, up: Array) -> QuadMesh:
        """Draw the values on pixels between edges (H + 1,), (V + 1,)."""
        scale = self.scale
        mesh = axis.pcolormesh(across, up, self.values, cmap=scale.colormap(), norm=scale.norm)
        mesh.set_rasterized(True)
        return mesh

    def label_for(self, length: float) -> str:
        """Return the label of a bar of so many inches: in two lines where it is short."""
        whole = f"{self.quantity} [{self.unit}]" if self.unit else self.quantity
        if _PER_LETTER * len(re.sub(_UNSEEN, "", whole)) <= length:
            return whole
        return f"{self.quantity}\n[{self.unit}]" if self.unit else whole.replace(" / ", "\n/ ")


@dataclass(frozen=True, eq=False)
class AbstractImage(ABC):
    """Values (V, H): densities in mag/pc, or integrals in mag; NaN outside the map.

    std, coverage and truth (V, H) where they are known.
    """

    integrated: bool
    mean: Array
    std: Array | None
    coverage: Array | None
    truth: Array | None

    @abstractmethod
    def height(self, width: float) -> float:
        """Return inches of a panel of so many inches width."""

    @abstractmethod
    def draw(self, figure: Figure, axis: Axes, panel: Panel, height: float) -> tuple[Array, Array]:
        """Draw a panel and its bar, `height` inches high; return centres (H,), (V,) of pixels."""

    @abstractmethod
    def outline(self, place: Array, radius: float) -> Array | None:
        """Return the outline (P, 2) of a ball around X, Y, Z in pc; None where it is not shown."""


def panels_of(system: ExtinctionSystem, image: AbstractImage) -> tuple[Panel, ...]:
    """Show truth and mean on one scale, then the uncertainty and the difference in units of it.

    The uncertainty is relative to the mean where that is positive everywhere.
    """
    mean, std, truth = image.mean, image.std, image.truth
    if image.integrated:
        factor, quantity, unit = 1.0, style.symbol_of(system), style.unit_of(system)
    else:
        factor, quantity, unit = PER_MILLE, style.density_of(system), style.density_unit(system)
    shown = {_TRUTH: truth, _MEAN if std is not None else "map": mean}
    scaled = {title: factor * values for title, values in shown.items() if values is not None}
    colours = style.INTEGRAL_COLOURS if image.integrated else style.DENSITY_COLOURS
    scale = style.density_scale(*scaled.values(), colours=colours)
    panels = [
        Panel(title, values, scale, quantity, unit, of_mean=title != _TRUTH)
        for title, values in scaled.items()
    ]
    if std is not None:
        panels.append(_spread(factor, unit, mean, std))
        if truth is not None:
            panels.append(_difference(mean, std, truth))
    return tuple(panels)


def _difference(mean: Array, std: Array, truth: Array) -> Panel:
    """Return what is standard normal where all is well.

    Of positive values that of their logarithms, whose law with this mean and std is normal:
    ln x ~ N(ln μ − s²/2, s²) with s² = ln(1 + σ²/μ²). The values themselves are skewed, and a truth
    many σ above a small mean would be no surprise.
    """
    title = f"posterior \N{MINUS SIGN} {_TRUTH}"
    none = np.full_like(mean, np.nan)
    if _positive(mean) and _positive(truth):
        variance = np.log1p((std / mean) ** 2)
        ahead = np.log(mean / truth) - 0.5 * variance
        off = np.divide(ahead, np.sqrt(variance), out=none, where=variance > 0)
        words = "difference of ln / std. deviation"
    else:
        off = np.divide(mean - truth, std, out=none, where=std > 0)
        words = "difference / std. deviation"
    return Panel(title, off, style.signed_scale(_MOST_SIGMA, off), words)


def _positive(values: Array) -> bool:
    return bool(np.all(values[np.isfinite(values)] > 0))


def _spread(factor: float, unit: str, mean: Array, std: Array) -> Panel:
    if _positive(mean):
        ratio = std / mean
        return Panel(
            "relative uncertainty", ratio, style.spread_scale(ratio), "std. deviation / mean"
        )
    scaled = factor * std
    return Panel("uncertainty", scaled, style.spread_scale(scaled), "std. deviation", unit)


def panels_figure(
    system: ExtinctionSystem,
    image: AbstractImage,
    title: str,
    grey: str,
    marks: CloudMarks | None = None,
    **subplots: Any,
) -> Figure:
    """Draw mean, truth and uncertainty beside each other, hatched where the prior dominates.

    grey: the places without a value. marks: clouds, outlined on every panel and named on one.
    """
    panels = panels_of(system, image)
    rows, columns = -(-len(panels) // 2), min(len(panels), 2)
    width = style.ONE_COLUMN if columns == 1 else style.TWO_COLUMNS
    unknown = any(not np.isfinite(panel.values).all() for panel in panels)
    legend = _LEGEND if image.coverage is not None or unknown else 0.0
    each = image.height(width / columns)
    figure = style.new_figure(width, rows * each + _TITLE + legend)
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    hatched = False
    for panel, axis in zip(panels, axes.ravel(), strict=True):
        across, up = image.draw(figure, axis, panel, each)
        axis.set_title(panel.title)
        if marks is not None:
            marks.draw(axis, image, named=panel.of_mean)
        if panel.of_mean:
            hatched = _hatch_prior(axis, across, up, image.coverage)
    figure.suptitle(f"{title} ({style.symbol_of(system)})")
    _legend_of_marks(figure, hatched, grey if unknown else None)
    return figure


def _hatch_prior(axis: Axes, across: Array, up: Array, coverage: Array | None) -> bool:
    """Hatch where the prior dominates, on pixels with centres (H,), (V,); False if never."""
    if coverage is None:
        return False
    prior = np.where(np.isfinite(coverage), coverage, 1.0) < DATA_DOMINATED
    if prior.any():
        values = prior.astype(np.float64)
        drawn: QuadContourSet = axis.contourf(
            across, up, values, levels=[0.5, 1.5], colors="none", hatches=[_HATCH]
        )
        drawn.set_edgecolor(_HATCH_COLOUR)
        drawn.set_linewidth(0.0)
    return bool(prior.any())


def _legend_of_marks(figure: Figure, hatched: bool, grey: str | None) -> None:
    """Explain hatching and grey below the panels."""
    handles: list[Artist] = []
    if hatched:
        label = f"the prior dominates (coverage < {DATA_DOMINATED:g})"
        hatches: dict[str, Any] = {"edgecolor": _HATCH_COLOUR, "hatch": 2 * _HATCH}
        handles.append(Patch(facecolor="0.35", linewidth=0.0, label=label, **hatches))
    if grey is not None:
        handles.append(Patch(facecolor=style.OUTSIDE_COLOUR, linewidth=0.0, label=grey))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


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
class Plane(AbstractImage):
    """An image seen along `axis`: densities on the plane `at` = (level, level), or integrals.

    at: between which levels, in pc; extent: outer faces of the pixels, left, right, bottom, top.
    """

    axis: Axis
    at: tuple[float, float]
    extent: tuple[float, float, float, float]

    def height(self, width: float) -> float:
        left, right, bottom, top = self.extent
        return min((width - _BESIDE) * (top - bottom) / (right - left), _TALLEST) + _ABOVE

    def draw(self, figure: Figure, axis: Axes, panel: Panel, height: float) -> tuple[Array, Array]:
        image = axis.imshow(
            panel.values,
            origin="lower",
            extent=self.extent,
            cmap=panel.scale.colormap(),
            norm=panel.scale.norm,
            interpolation="nearest",
        )
        across, up = self.axis.others
        axis.set_xlabel(f"{across.name} [pc]")
        axis.set_ylabel(f"{up.name} [pc]")
        style.fix_ticks(axis)
        _mark_sun(axis, self)
        _mark_centre(axis, self)
        axis.set_xlim(self.extent[:2])
        axis.set_ylim(self.extent[2:])
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

    The truth is interpolated at the centres of the same voxels.
    """
    index = density.layout.nearest_slice(axis.value, level)
    shown = float(density.axes()[axis.value][index])
    quantities = (Quantity.MEAN, Quantity.STD, Quantity.COVERAGE)
    known = [quantity for quantity in quantities if quantity in density.available]
    values = {quantity: _plane(density, axis, index, quantity) for quantity in known}
    return Plane(
        integrated=False,
        axis=axis,
        at=(shown, shown),
        extent=_extent(density, axis),
        mean=values[Quantity.MEAN],
        std=values.get(Quantity.STD),
        coverage=values.get(Quantity.COVERAGE),
        truth=None if truth is None else _truth(density, axis, shown, truth),
    )


def projection_of(density: DustMap, axis: Axis, truth: DustMap | None = None) -> Plane:
    """Integrate ρ along `axis` in mag, from the first voxel centre to the last; trapezoidal rule.

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
        integrated=True,
        axis=axis,
        at=(float(centres[0]), float(centres[-1])),
        extent=_extent(density, axis),
        mean=mean,
        std=_std_of_integral(density, axis),
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


def _plane(density: DustMap, axis: Axis, index: int, quantity: Quantity) -> Array:
    """Read one plane, and nothing else."""
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


def _std_of_integral(density: DustMap, axis: Axis) -> Array | None:
    if density.n_samples < 2:
        return None
    drawn = [_integral(density, axis, (Quantity.SAMPLES,), k) for k in range(density.n_samples)]
    return np.asarray(np.std(drawn, axis=0, ddof=1), np.float64)


@style.styled()
def slice_figure(
    density: DustMap,
    axis: Axis = Axis.Z,
    level: float = 0.0,
    truth: DustMap | None = None,
    clouds: CloudMarks | None = None,
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
    return panels_figure(density.system, plane, f"Dust density at {where}", marks=clouds, **_PANELS)


@style.styled()
def projection_figure(
    density: DustMap,
    axis: Axis = Axis.Z,
    truth: DustMap | None = None,
    clouds: CloudMarks | None = None,
) -> Figure:
    """Draw the extinction through the whole map along an axis: along Z, seen from above."""
    plane = projection_of(density, axis, truth)
    low, high = (style.plain(level) for level in plane.at)
    where = f"{axis.name} = {low} to {high} pc"
    title = f"Extinction integrated over {where}"
    return panels_figure(density.system, plane, title, marks=clouds, **_PANELS)


def _mark_sun(axis: Axes, plane: Plane) -> None:
    """Draw the Sun's symbol ☉ where the Sun is, or below and above it."""
    left, right, bottom, top = plane.extent
    if not (left <= 0.0 <= right and bottom <= 0.0 <= top):
        return
    ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": "black"}
    axis.plot(0.0, 0.0, "o", markersize=5.0, markeredgewidth=0.6, **ring)
    axis.plot(0.0, 0.0, ".", markersize=1.6, color="black")
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
