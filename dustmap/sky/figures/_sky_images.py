"""The sky as pixels: the density at a distance, or the extinction up to it, and their pictures.

`Cells` are parts of the sky of nearly equal area, for means of stars.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap.sky.figures._panels import (
    Panel,
    anywhere_unknown,
    arranged,
    each,
    hatch_prior,
    legend_of_marks,
    panels_of,
)
from dustmap.sky.figures._style import (
    GALACTIC_B,
    GALACTIC_L,
    ONE_COLUMN,
    SMALL,
    TWO_COLUMNS,
    Array,
    new_figure,
    outlined,
    plain,
    rasterize,
    settle,
    styled,
    symbol_of,
)
from dustmap.sky.maps import DustMap, Quantity, quietly
from dustmap.sky.systems import ExtinctionSystem

#: Degrees of pixels of integrals: every stored sample is integrated along every ray.
_COARSE = 1.5
_LONGITUDES = (120, 60, 0, -60, -120)
#: The same meridian on both edges: where their labels end that lie inside, in degrees.
_EDGES = ((176.0, "left"), (-176.0, "right"))


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


@final
@dataclass(frozen=True, eq=False)
class Pixels:
    """Cells of the sky between l_edges (H + 1,) and b_edges (V + 1,) in degrees.

    Both ascend; l is continuous, from below 0 if need be.
    """

    l_edges: Array
    b_edges: Array

    @classmethod
    def whole_sky(cls, size: float = 1.0) -> "Pixels":
        """All of it, −180° to 180°, in cells of about `size` degrees."""
        if not 0.0 < size <= 90.0:
            raise ValueError(f"size of pixels: expected 0 to 90 degrees, got {size:g}")
        rows = round(180.0 / size)
        return cls(np.linspace(-180.0, 180.0, 2 * rows + 1), np.linspace(-90.0, 90.0, rows + 1))

    @classmethod
    def around(cls, l: float, b: float, radius: float, rows: int = 200) -> "Pixels":
        """A window that reaches `radius` degrees to every side of (l, b)."""
        if not abs(b) <= 90.0 or not 0.0 < radius <= 45.0 or abs(b) + radius > 85.0:
            raise ValueError(
                f"window at l = {l:g}, b = {b:g} of radius {radius:g} degrees: expected a radius "
                "of 45 at most, with |b| + radius <= 85; near the poles take the whole sky"
            )
        l = (l + 180.0) % 360.0 - 180.0
        across = min(radius / np.cos(np.radians(b)), 180.0)
        return cls(
            np.linspace(l - across, l + across, rows + 1),
            np.linspace(b - radius, b + radius, rows + 1),
        )

    @property
    def whole(self) -> bool:
        """Whether this is all of the sky."""
        return bool(np.ptp(self.l_edges) >= 360.0 and np.ptp(self.b_edges) >= 180.0)

    @property
    def longitudes(self) -> Array:
        """Centres (H,)."""
        return 0.5 * (self.l_edges[1:] + self.l_edges[:-1])

    @property
    def latitudes(self) -> Array:
        """Centres (V,)."""
        return 0.5 * (self.b_edges[1:] + self.b_edges[:-1])

    def at(self, distance: float) -> SkyCoord:
        """The centres (V, H) at a distance in pc."""
        l, b = np.meshgrid(self.longitudes, self.latitudes)
        away = np.full(l.shape, distance) * u.pc
        return SkyCoord(l=l * u.deg, b=b * u.deg, distance=away, frame="galactic")


@final
@dataclass(frozen=True, eq=False)
class SkyImage:
    """Values (V, H) on pixels: densities in mag/pc at `distance`, or integrals in mag up to it.

    NaN outside the map. std, coverage and truth where they are known.
    """

    pixels: Pixels
    distance: float
    integrated: bool
    mean: Array
    std: Array | None
    coverage: Array | None
    truth: Array | None


def shell_of(
    density: DustMap, distance: float, pixels: Pixels, truth: DustMap | None = None
) -> SkyImage:
    """The density at a distance from the Sun in pc."""
    _check(density, distance)
    coords = pixels.at(distance)
    known = density.available
    mean = density.query(coords)
    _check_known(mean, f"no place at {distance:g} pc")
    with quietly():  # the mean has reported how many places are outside
        std = density.query(coords, mode="std") if Quantity.STD in known else None
        coverage = density.coverage(coords) if Quantity.COVERAGE in known else None
    return SkyImage(
        pixels=pixels,
        distance=distance,
        integrated=False,
        mean=mean,
        std=std,
        coverage=coverage,
        truth=None if truth is None else truth.query(coords),
    )


def extinction_of(
    density: DustMap, distance: float, pixels: Pixels, truth: DustMap | None = None
) -> SkyImage:
    """The extinction A(<d) up to a distance from the Sun in pc; NaN where that leaves the map.

    The standard deviation is that of the stored samples, if there are any.
    """
    _check(density, distance)
    coords = pixels.at(distance)
    several = density.n_samples > 1
    mean = density.query(coords, integrated=True)
    _check_known(mean, f"no line from the Sun to {distance:g} pc")
    with quietly():  # the mean has reported how many lines leave the map
        std = density.query(coords, mode="std", integrated=True) if several else None
    return SkyImage(
        pixels=pixels,
        distance=distance,
        integrated=True,
        mean=mean,
        std=std,
        coverage=None,
        truth=None if truth is None else truth.query(coords, integrated=True),
    )


def _check(density: DustMap, distance: float) -> None:
    near, far = density.distance_bounds.to_value(u.pc)
    if not max(near, 0.0) < distance <= far:
        raise ValueError(
            f"distance = {distance:g} pc: expected more than {near:g} and at most {far:g} pc, "
            "where the map is"
        )


def _check_known(mean: Array, what: str) -> None:
    """A picture of nothing is an error."""
    if not np.isfinite(mean).any():
        raise ValueError(f"{what} in this direction is inside the map: choose another")


@styled()
def shell_figure(
    density: DustMap, distance: float, pixels: Pixels | None = None, truth: DustMap | None = None
) -> Figure:
    """The density at a distance from the Sun in pc, on the pixels given or the whole sky."""
    image = shell_of(density, distance, pixels or Pixels.whole_sky(), truth)
    return _drawn(image, density.system)


@styled()
def extinction_sky_figure(
    density: DustMap, distance: float, pixels: Pixels | None = None, truth: DustMap | None = None
) -> Figure:
    """The extinction up to a distance in pc, on the pixels given or the whole sky."""
    image = extinction_of(density, distance, pixels or Pixels.whole_sky(_COARSE), truth)
    return _drawn(image, density.system)


def _drawn(image: SkyImage, system: ExtinctionSystem) -> Figure:
    whole = image.pixels.whole
    panels = panels_of(system, image.integrated, image.mean, image.std, image.truth)
    rows, columns = arranged(len(panels))
    width = ONE_COLUMN if columns == 1 else TWO_COLUMNS
    legend = 0.25 if image.coverage is not None or anywhere_unknown(panels) else 0.0
    each_height = 0.5 * width / columns + 0.72 if whole else width / columns - 0.6
    figure = new_figure(width, rows * each_height + 0.3 + legend)
    axes = figure.subplots(
        rows, columns, squeeze=False, subplot_kw={"projection": "mollweide"} if whole else {}
    )
    hatched = False
    for panel, axis in each(panels, axes):
        mesh = whole_sky(axis, image.pixels, panel) if whole else _window(axis, image.pixels, panel)
        if panel.of_mean:
            hatched = _hatch(axis, image, whole)
        if whole:
            panel.scale.bar_below(figure, mesh, axis, panel.label_for(np.inf))
        else:
            axis.label_outer()
            panel.scale.bar(figure, mesh, axis, panel.label_for(np.inf))
    what = "Extinction up to" if image.integrated else "Dust density at"
    figure.suptitle(f"{what} {plain(image.distance)} pc ({symbol_of(system)})")
    unknown = "outside the map" if anywhere_unknown(panels) else None
    legend_of_marks(figure, hatched, unknown)
    return figure


def whole_sky(axis: Axes, pixels: Pixels, panel: Panel) -> QuadMesh:
    """All pixels on an axis of Mollweide's projection; l = 0 in the centre, growing leftwards."""
    mesh = axis.pcolormesh(
        -np.radians(pixels.l_edges),
        np.radians(pixels.b_edges),
        panel.values,
        cmap=panel.scale.colormap(),
        norm=panel.scale.norm,
    )
    rasterize(mesh)
    graticule(axis)
    axis.set_title(panel.title)
    return mesh


def graticule(axis: Axes) -> None:
    """Meridians and parallels of Galactic coordinates with their degrees."""
    axis.set_xticks(-np.radians(_LONGITUDES), [])
    axis.set_yticks(np.radians([-60, -30, 0, 30, 60]))
    axis.set_yticklabels([f"{plain(b)}°" for b in (-60, -30, 0, 30, 60)])
    axis.grid(color="white", linewidth=0.3, alpha=0.5)
    settle(axis)
    for l, side in (*((l, "center") for l in _LONGITUDES), *_EDGES):
        axis.text(
            -np.radians(l),
            np.radians(-4.0),
            "180°" if abs(l) > 170 else f"{l % 360}°",
            ha=side,
            va="top",
            color="white",
            fontsize=SMALL - 1.0,
            path_effects=outlined(),
        )


def _window(axis: Axes, pixels: Pixels, panel: Panel) -> QuadMesh:
    mesh = axis.pcolormesh(
        pixels.l_edges,
        pixels.b_edges,
        panel.values,
        cmap=panel.scale.colormap(),
        norm=panel.scale.norm,
    )
    rasterize(mesh)
    axis.set_xlim(pixels.l_edges[-1], pixels.l_edges[0])
    axis.set_ylim(pixels.b_edges[0], pixels.b_edges[-1])
    # A degree along l is shorter on the sky by cos b.
    axis.set_aspect(1.0 / np.cos(np.radians(pixels.latitudes.mean())))
    axis.xaxis.set_major_formatter(lambda l, _: plain(l % 360))
    axis.yaxis.set_major_formatter(lambda b, _: plain(b))
    axis.set_xlabel(GALACTIC_L)
    axis.set_ylabel(GALACTIC_B)
    axis.set_title(panel.title)
    settle(axis)
    return mesh


def _hatch(axis: Axes, image: SkyImage, whole: bool) -> bool:
    l, b = image.pixels.longitudes, image.pixels.latitudes
    if whole:
        return hatch_prior(axis, -np.radians(l), np.radians(b), image.coverage)
    return hatch_prior(axis, l, b, image.coverage)
