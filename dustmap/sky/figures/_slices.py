"""Planes through a map, and the map projected on a plane."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from dustmap.sky.figures._panels import (
    Panel,
    anywhere_unknown,
    arranged,
    each,
    hatch_prior,
    legend_of_marks,
    panels_of,
)
from dustmap.sky.figures._planes import Axis, Plane, projection_of, slice_of
from dustmap.sky.figures._style import (
    ONE_COLUMN,
    SMALL,
    TWO_COLUMNS,
    new_figure,
    outlined,
    settle,
    styled,
)
from dustmap.sky.figures._words import plain, signed, symbol_of
from dustmap.sky.maps import DustMap
from dustmap.sky.systems import ExtinctionSystem

#: Inches of an image that is higher than wide, at most.
_TALLEST = 4.2
#: Inches beside and above an image, for labels and bars.
_BESIDE, _ABOVE = 1.12, 0.53
_TITLE, _LEGEND = 0.3, 0.25


@styled()
def slice_figure(
    density: DustMap, axis: Axis = Axis.Z, level: float = 0.0, truth: DustMap | None = None
) -> Figure:
    """Mean and uncertainty on the plane of voxels nearest to `level` in pc; the truth beside it.

    X grows to the Galactic centre, Y to l = 90°, Z to b = 90°.
    """
    plane = slice_of(density, axis, level, truth)
    where = f"{axis.name} = {signed(plane.at[0])} pc"
    return _drawn(plane, density.system, f"Dust density at {where}")


@styled()
def projection_figure(
    density: DustMap, axis: Axis = Axis.Z, truth: DustMap | None = None
) -> Figure:
    """Extinction through the whole map along an axis: along Z, the map seen from above."""
    plane = projection_of(density, axis, truth)
    low, high = (plain(level) for level in plane.at)
    where = f"{axis.name} = {low} to {high} pc"
    return _drawn(plane, density.system, f"Extinction integrated over {where}")


def _drawn(plane: Plane, system: ExtinctionSystem, title: str) -> Figure:
    panels = panels_of(system, plane.integrated, plane.mean, plane.std, plane.truth)
    rows, columns = arranged(len(panels))
    left, right, bottom, top = plane.extent
    width = ONE_COLUMN if columns == 1 else TWO_COLUMNS
    image_height = (width / columns - _BESIDE) * (top - bottom) / (right - left)
    image_height = min(image_height, _TALLEST)
    legend = _LEGEND if plane.coverage is not None else 0.0
    figure = new_figure(width, rows * (image_height + _ABOVE) + _TITLE + legend)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    hatched = False
    for panel, axis in each(panels, axes):
        image = _draw(axis, panel, plane)
        if panel.of_mean:
            hatched = _hatch(axis, plane)
        panel.scale.bar(figure, image, axis, panel.label_for(image_height))
        axis.label_outer()
    figure.suptitle(f"{title} ({symbol_of(system)})")
    unknown = "outside the truth" if anywhere_unknown(panels) else None
    legend_of_marks(figure, hatched, unknown)
    return figure


def _draw(axis: Axes, panel: Panel, plane: Plane) -> AxesImage:
    image = axis.imshow(
        panel.values,
        origin="lower",
        extent=plane.extent,
        cmap=panel.scale.colormap(),
        norm=panel.scale.norm,
        interpolation="nearest",
    )
    across, up = plane.axis.others
    axis.set_title(panel.title)
    axis.set_xlabel(f"{across.name} [pc]")
    axis.set_ylabel(f"{up.name} [pc]")
    settle(axis)
    _mark_sun(axis, plane)
    _mark_centre(axis, plane)
    axis.set_xlim(plane.extent[:2])
    axis.set_ylim(plane.extent[2:])
    return image


def _hatch(axis: Axes, plane: Plane) -> bool:
    left, right, bottom, top = plane.extent
    up, across = plane.mean.shape
    dx, dy = (right - left) / across, (top - bottom) / up
    return hatch_prior(
        axis,
        left + dx * (np.arange(across) + 0.5),
        bottom + dy * (np.arange(up) + 0.5),
        plane.coverage,
    )


def _mark_sun(axis: Axes, plane: Plane) -> None:
    """The Sun's symbol ☉ where the Sun is, or below and above it."""
    left, right, bottom, top = plane.extent
    if not (left <= 0.0 <= right and bottom <= 0.0 <= top):
        return
    axis.plot(
        0.0,
        0.0,
        marker="o",
        markersize=5.0,
        markerfacecolor="white",
        markeredgecolor="black",
        markeredgewidth=0.6,
    )
    axis.plot(0.0, 0.0, marker=".", markersize=1.6, color="black")
    axis.annotate(
        "Sun",
        (0.0, 0.0),
        xytext=(4, 4),
        textcoords="offset points",
        color="white",
        fontsize=SMALL,
        path_effects=outlined(),
    )


def _mark_centre(axis: Axes, plane: Plane) -> None:
    """An arrow to the Galactic centre, which is to the right wherever X is; else in words: X grows
    towards the viewer."""
    towards_viewer = plane.axis is Axis.X
    arrow = {
        "arrowstyle": "-|>",
        "color": "white",
        "linewidth": 1.0,
        "shrinkA": 0,
        "shrinkB": 0,
        "mutation_scale": 7,
        "path_effects": outlined(),
    }
    axis.annotate(
        "Galactic centre: towards you" if towards_viewer else "Galactic centre",
        (0.97, 0.06),
        xytext=(0, 0) if towards_viewer else (-16, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        arrowprops=None if towards_viewer else arrow,
        ha="right",
        va="center",
        color="white",
        fontsize=SMALL,
        path_effects=outlined(),
    )
