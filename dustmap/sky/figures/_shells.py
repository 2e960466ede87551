"""The sky at a distance: all of it in Mollweide's projection, or a window."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from dustmap.sky.figures._panels import (
    Panel,
    anywhere_unknown,
    arranged,
    each,
    hatch_prior,
    legend_of_marks,
    panels_of,
)
from dustmap.sky.figures._sky_image import Pixels, SkyImage, extinction_of, shell_of
from dustmap.sky.figures._style import (
    ONE_COLUMN,
    SMALL,
    TWO_COLUMNS,
    new_figure,
    outlined,
    rasterize,
    settle,
    styled,
)
from dustmap.sky.figures._words import GALACTIC_B, GALACTIC_L, plain, symbol_of
from dustmap.sky.maps import DustMap
from dustmap.sky.systems import ExtinctionSystem

#: Degrees of pixels of integrals: every stored sample is integrated along every ray.
_COARSE = 1.5
_LONGITUDES = (120, 60, 0, -60, -120)
#: The same meridian on both edges: where their labels end that lie inside, in degrees.
_EDGES = ((176.0, "left"), (-176.0, "right"))


@styled()
def shell_figure(
    density: DustMap,
    distance: float,
    pixels: Pixels | None = None,
    truth: DustMap | None = None,
) -> Figure:
    """The density at a distance from the Sun in pc, on the pixels given or the whole sky."""
    image = shell_of(density, distance, pixels or Pixels.whole_sky(), truth)
    return _drawn(image, density.system)


@styled()
def extinction_sky_figure(
    density: DustMap,
    distance: float,
    pixels: Pixels | None = None,
    truth: DustMap | None = None,
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
        rows,
        columns,
        squeeze=False,
        subplot_kw={"projection": "mollweide"} if whole else {},
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
