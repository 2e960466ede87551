"""The sky as pixels: the density at a distance, or the extinction up to it, and their pictures.

`SkyCells` are parts of the sky of nearly equal area, for means of stars.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._coordinates import galactic, places_at, positions_of
from dustmap.sky.figures import _panels
from dustmap.sky.figures import _style as style
from dustmap.sky.figures._style import Array
from dustmap.sky.maps import DustMap, MapRequest, Quantity, muted_reports
from dustmap.sky.maps._answers import spread_of
from dustmap.sky.systems import ExtinctionSystem, conversion

if TYPE_CHECKING:
    import torch

    from dustmap.sky.maps import AbstractDensityField

#: Degrees of pixels of integrals: every stored sample is integrated along every ray.
_COARSE = 1.5
_LONGITUDES, _LATITUDES = (120, 60, 0, -60, -120), (-60, -30, 0, 30, 60)
#: The same meridian on both edges: where their labels end that lie inside, in degrees.
_EDGES = ((176.0, "left"), (-176.0, "right"))


@final
@dataclass(frozen=True)
class SkyCells:
    """`rows` belts of equal height in b, each cut in l into as many cells as make them square."""

    rows: int

    @property
    def per_row(self) -> NDArray[np.int64]:
        """SkyCells of each belt (rows,), from b = −90° up."""
        middle = np.radians(180.0 * (np.arange(self.rows) + 0.5) / self.rows - 90.0)
        return np.maximum(1, np.round(2.0 * self.rows * np.cos(middle))).astype(np.int64)

    def __len__(self) -> int:
        return int(self.per_row.sum())

    def of(self, l: Array, b: Array) -> NDArray[np.int64]:
        """Return the cells that hold places in degrees, numbered from 0."""
        row = np.minimum((np.asarray(b) + 90.0) / 180.0 * self.rows, self.rows - 1).astype(np.int64)
        first = np.concatenate([[0], np.cumsum(self.per_row)[:-1]])
        across = (np.asarray(l) % 360.0) / 360.0 * self.per_row[row]
        return np.asarray(first[row] + np.minimum(across.astype(np.int64), self.per_row[row] - 1))

    @classmethod
    def holding(cls, count: int, each: int, most_rows: int = 60) -> "SkyCells":
        """Make so many that `count` places are about `each` in a cell."""
        # About 4/π rows² of them.
        rows = np.sqrt(np.pi / 4.0 * count / each)
        return cls(int(np.clip(rows, 2, most_rows)))


@final
@dataclass(frozen=True, eq=False)
class Pixels:
    """SkyCells of the sky between l_edges (H + 1,) and b_edges (V + 1,) in degrees.

    Both ascend; l is continuous, from below 0 if need be.

    Examples
    --------
    >>> Pixels.whole_sky(size=30.0).longitudes
    array([-165., -135., -105.,  -75.,  -45.,  -15.,   15.,   45.,   75.,
            105.,  135.,  165.])
    """

    l_edges: Array
    b_edges: Array

    @classmethod
    def whole_sky(cls, size: float = 1.0) -> "Pixels":
        """Cut all of it, −180° to 180°, into cells of about `size` degrees."""
        if not 0.0 < size <= 90.0:
            raise UserError(f"size of pixels: expected 0 to 90 degrees, got {size:g}")
        rows = round(180.0 / size)
        return cls(np.linspace(-180.0, 180.0, 2 * rows + 1), np.linspace(-90.0, 90.0, rows + 1))

    @classmethod
    def around(cls, l: float, b: float, radius: float, rows: int = 200) -> "Pixels":
        """Make a window that reaches `radius` degrees to every side of (l, b)."""
        if (
            not (np.isfinite(l) and abs(b) <= 90.0)
            or not 0.0 < radius <= 45.0
            or abs(b) + radius > 85.0
        ):
            raise UserError(
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
    def projection(self) -> dict[str, Any]:
        """Arguments of a figure whose panels have Mollweide's projection, of all of the sky."""
        return {"subplot_kw": {"projection": "mollweide"}} if self.whole else {}

    @property
    def longitudes(self) -> Array:
        """Centres (H,)."""
        return 0.5 * (self.l_edges[1:] + self.l_edges[:-1])

    @property
    def latitudes(self) -> Array:
        """Centres (V,)."""
        return 0.5 * (self.b_edges[1:] + self.b_edges[:-1])

    def at(self, distance: float) -> SkyCoord:
        """Return the centres (V, H) at a distance in pc."""
        return places_at(*np.meshgrid(self.longitudes, self.latitudes), distance)


@final
@dataclass(frozen=True, eq=False)
class SkyImage(_panels.AbstractImage):
    """An image of the sky: densities at `distance` from the Sun in pc, or integrals up to it."""

    pixels: Pixels
    distance: float

    def height(self, width: float, alone: bool) -> float:
        if self.pixels.whole:
            return 0.5 * width + (0.72 if alone else 0.12)
        return width - (0.6 if alone else 0.1)

    def label(self, axis: Axes, text: str) -> None:
        axis.set_title(text, pad=3.0)

    def orient(self, axis: Axes) -> None:
        if self.pixels.whole:
            graticule(axis)

    def draw(
        self, figure: Figure, axis: Axes, panel: _panels.Panel, height: float | None
    ) -> tuple[Array, Array]:
        pixels, label = self.pixels, panel.label_for(np.inf)
        if pixels.whole:
            mesh = whole_sky(axis, pixels, panel, named=height is not None)
            if height is not None:
                panel.scale.bar_below(figure, mesh, axis, label)
            return -np.radians(pixels.longitudes), np.radians(pixels.latitudes)
        mesh = panel.mesh(axis, pixels.l_edges, pixels.b_edges)
        axis.set_xlim(pixels.l_edges[-1], pixels.l_edges[0])
        axis.set_ylim(pixels.b_edges[0], pixels.b_edges[-1])
        # A degree along l is shorter on the sky by cos b.
        axis.set_aspect(1.0 / np.cos(np.radians(pixels.latitudes.mean())))
        axis.xaxis.set_major_formatter(lambda l, _: style.plain(l % 360))
        axis.yaxis.set_major_formatter(lambda b, _: style.plain(b))
        axis.set_xlabel("Galactic longitude $l$ [deg]")
        axis.set_ylabel("Galactic latitude $b$ [deg]")
        style.fix_ticks(axis)
        axis.label_outer()
        if height is not None:
            panel.scale.bar(figure, mesh, axis, label)
        return pixels.longitudes, pixels.latitudes

    def outline(self, place: Array, radius: float) -> Array | None:
        """The circle in which the shell cuts the ball, or for integrals the edge of one within."""
        l, b, distance = (float(value) for value in galactic(place))
        near = abs(distance - self.distance) < radius
        if not (distance < self.distance if self.integrated else near) or distance <= radius:
            return None
        middle = 0.5 * (self.pixels.l_edges[0] + self.pixels.l_edges[-1])
        l = middle + (l - middle + 180.0) % 360.0 - 180.0
        angle, turn = np.arcsin(radius / distance), np.linspace(0.0, 2.0 * np.pi, 65)
        if not self.integrated:
            chord = self.distance**2 + distance**2 - radius**2
            angle = np.arccos(chord / (2.0 * self.distance * distance))
        angle = np.degrees(angle)
        across = l + angle * np.cos(turn) / max(np.cos(np.radians(b)), 0.1)
        up = np.clip(b + angle * np.sin(turn), -90.0, 90.0)
        edges = self.pixels.l_edges, self.pixels.b_edges
        if not all(e[0] <= x <= e[-1] for e, x in zip(edges, (l, b), strict=True)):
            return None
        if self.pixels.whole:  # Mollweide's axes have radians, and longitude to the left
            across, up = -np.radians(np.clip(across, -180.0, 180.0)), np.radians(up)
        return np.stack([across, up], axis=-1)

    def figure(self, system: ExtinctionSystem, clouds: _panels.CloudMarks | None = None) -> Figure:
        """Draw the panels."""
        what = "Extinction up to" if self.integrated else "Dust density at"
        title = f"{what} {style.plain(self.distance)} pc"
        grey = "outside the map"
        return _panels.panels_figure(system, self, title, grey, clouds, **self.pixels.projection)


def sky_image(
    density: DustMap,
    distance: float,
    pixels: Pixels,
    truth: DustMap | None,
    integrated: bool,
    field: "AbstractDensityField | None" = None,
    device: "torch.device | None" = None,
) -> SkyImage:
    """Ask for ρ at a distance from the Sun in pc, or A(<d); NaN where that leaves the map.

    The standard deviation of ρ is the field's, where there is one: between voxels a map has only
    what its voxels have. That of A, and of a map without its own, is of the stored samples.
    """
    image = mean_image(density, distance, pixels, integrated)
    coords = pixels.at(distance)
    with muted_reports():  # the mean has reported how many places are outside
        std = spread_of(density, coords, integrated)
        if field is not None and not integrated:
            std = _spread_of(field, coords, np.isfinite(image.mean), device)
        true = None
        if truth is not None:
            factor = conversion(truth.system, density.system)
            true = factor * truth.query(coords, integrated=integrated)
    return replace(image, std=std, truth=true)


def mean_image(density: DustMap, distance: float, pixels: Pixels, integrated: bool) -> SkyImage:
    """Ask for the mean of ρ or A(<d), and the coverage of ρ; NaN where that leaves the map."""
    near, far = density.distance_bounds.to_value(u.pc)
    if not max(near, 0.0) < distance <= far:
        raise UserError(
            f"distance = {distance:g} pc: expected more than {near:g} and at most {far:g} pc, "
            "where the map is"
        )
    coords = pixels.at(distance)
    mean = density.query(coords, integrated=integrated)
    if not np.isfinite(mean).any():
        nothing = "no line from the Sun to" if integrated else "no place at"
        raise UserError(
            f"{nothing} {distance:g} pc in this direction is inside the map: choose another"
        )
    covered = Quantity.COVERAGE in density.available and not integrated
    with muted_reports():
        coverage = density.coverage(coords) if covered else None
    positive = density.layout.positive
    return SkyImage(integrated, positive, mean, None, coverage, None, pixels, distance)


def _spread_of(
    field: "AbstractDensityField",
    coords: SkyCoord,
    inside: NDArray[np.bool_],
    device: "torch.device | None",
) -> Array:
    """Return the posterior's standard deviation of ρ (V, H), NaN where it is outside."""
    # A map is drawn without torch.
    import torch

    from dustmap.gp.functionals import PointValues

    points = np.clip(positions_of(coords[inside]), field.lower, field.upper)
    places = PointValues(torch.from_numpy(points).to(device))
    values = field.evaluate(places, MapRequest((Quantity.STD,)))
    std = np.full(inside.shape, np.nan)
    std[inside] = values["std"]
    return std


@style.styled()
def shell_figure(
    density: DustMap,
    distance: float,
    pixels: Pixels | None = None,
    truth: DustMap | None = None,
    field: "AbstractDensityField | None" = None,
    device: "torch.device | None" = None,
    clouds: _panels.CloudMarks | None = None,
) -> Figure:
    """Draw the density at a distance from the Sun in pc, on these pixels or the whole sky.

    Parameters
    ----------
    density : the map
    distance : from the Sun in pc
    pixels : of the sky; None for all of it
    truth : the true density, where it is known
    field : AbstractDensityField or None
        The posterior of the map, whose uncertainty between voxels is larger than what a map of
        voxels has; None to draw that.
    device : of the posterior
    clouds : CloudMarks or None
        Those at this distance are outlined.
    """
    pixels = pixels or Pixels.whole_sky()
    image = sky_image(density, distance, pixels, truth, False, field, device)
    return image.figure(density.system, clouds)


@style.styled()
def extinction_sky_figure(
    density: DustMap,
    distance: float,
    pixels: Pixels | None = None,
    truth: DustMap | None = None,
    clouds: _panels.CloudMarks | None = None,
) -> Figure:
    """Draw the extinction up to a distance in pc, on these pixels or the whole sky, with clouds
    that are nearer."""
    pixels = pixels or Pixels.whole_sky(_COARSE)
    image = sky_image(density, distance, pixels, truth, integrated=True)
    return image.figure(density.system, clouds)


@style.styled()
def skies_figure(
    density: DustMap,
    distances: Sequence[float],
    pixels: Pixels | None = None,
    integrated: bool = False,
    clouds: _panels.CloudMarks | None = None,
) -> Figure:
    """Draw the mean at several distances from the Sun in pc, or integrated up to them, with one
    scale, on these pixels or the whole sky."""
    pixels = pixels or Pixels.whole_sky(_COARSE)
    images = [mean_image(density, distance, pixels, integrated) for distance in distances]
    labels = [f"{style.plain(distance)} pc" for distance in distances]
    title = "Extinction up to distances" if integrated else "Dust density at distances"
    title, grey = f"{title} from the Sun", "outside the map"
    return _panels.sequence_figure(
        density.system, images, labels, title, grey, clouds, **pixels.projection
    )


def whole_sky(axis: Axes, pixels: Pixels, panel: _panels.Panel, named: bool = True) -> QuadMesh:
    """Draw all pixels in Mollweide's projection; l = 0 in the centre, growing leftwards."""
    mesh = panel.mesh(axis, -np.radians(pixels.l_edges), np.radians(pixels.b_edges))
    graticule(axis, named)
    return mesh


def graticule(axis: Axes, named: bool = True) -> None:
    """Draw meridians and parallels of Galactic coordinates, named: with their degrees."""
    axis.set_xticks(-np.radians(_LONGITUDES), [])
    words = [f"{style.plain(b)}°" for b in _LATITUDES] if named else []
    axis.set_yticks(np.radians(_LATITUDES), words)
    axis.grid(color="white", linewidth=0.3, alpha=0.5)
    style.fix_ticks(axis)
    if not named:
        return
    for l, side in (*((l, "center") for l in _LONGITUDES), *_EDGES):
        axis.text(
            -np.radians(l),
            np.radians(-4.0),
            "180°" if abs(l) > 170 else f"{l % 360}°",
            ha=side,
            va="top",
            **style.outlined(style.SMALL - 1.0),
        )
