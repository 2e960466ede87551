#!/usr/bin/env python3
"""The Local Bubble from above and from the side, with clouds at their published distances.

    scripts/local_bubble.py MAP PICTURE          a run, a map.zarr or a map.fits; a .png or .pdf

Needs an environment in which dustmap is installed; what it uses is the public interface.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import astropy.units as u
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from dustmap.sky import DustMap, cartesian, save_figure
from dustmap.sky.clouds import NamedPlaces

#: Half of the depth in pc through which the picture from the side looks.
DEPTH = 100.0
#: Percentiles of an image that its colours reach.
SHOWN = (1.0, 99.7)
#: Clouds of the table of Zucker et al. (2020, A&A 633, A51) that dustmap has, and to where their
#: names go, so that they do not run into each other.
CLOUDS = {
    "Taurus": (-1, 1),
    "Perseus": (-1, 1),
    "Ophiuchus": (1, 1),
    "Lupus": (1, -1),
    "Chamaeleon": (1, 1),
    "Coalsack": (1, -1),
    "Aquila Rift": (1, -1),
    "Cepheus": (1, 1),
    "Orion": (1, 1),
}


@dataclass(frozen=True)
class View:
    """A direction to look along: axes of the picture and of the depth in X, Y, Z, and its half."""

    title: str
    right: int
    up: int
    along: int
    half_depth: float
    clouds: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture and say where it is."""
    options = parser().parse_args(arguments)
    try:
        figure = picture(DustMap.open(options.map).on_one_grid())
        save_figure(figure, Path(options.picture), options.overwrite)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"local_bubble: error: {' '.join(str(error).split())}\n")
        return 2
    print(options.picture)
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    command = argparse.ArgumentParser(description="The Local Bubble from above and from the side.")
    command.add_argument("map", help="a run, a map.zarr or a map.fits")
    command.add_argument("picture", help="a .png or .pdf")
    command.add_argument("--overwrite", action="store_true", help="replace what is there")
    return command


def picture(density: DustMap) -> Figure:
    """Draw both views of the posterior mean, side by side."""
    height = max(abs(level) for level in density.bounds[:, 2].to_value(u.pc))
    views = (
        View(f"from above, |Z| ≤ {height:g} pc", 0, 1, 2, height, tuple(CLOUDS)),
        View(
            f"from the side, |Y| ≤ {DEPTH:g} pc",
            *(0, 2, 1, DEPTH),
            ("Taurus", "Ophiuchus", "Aquila Rift"),
        ),
    )
    figure = Figure(figsize=(4.9, 6.2), layout="compressed", dpi=220)
    above, side = figure.subplots(2, 1, height_ratios=(2.0, 1.0), sharex=True)
    for axes, view in ((above, views[0]), (side, views[1])):
        draw(figure, axes, density, view)
    return figure


def draw(figure: Figure, axes: Axes, density: DustMap, view: View) -> None:
    """Integrate the mean along the view and draw it with the Sun and the clouds."""
    centres = density.axes()
    # A cube is in the order of Z, Y, X.
    mean = np.moveaxis(density.mean.astype(float).transpose(2, 1, 0), view.along, -1)
    chosen = np.abs(centres[view.along]) <= view.half_depth
    step = density.grid.spacing[view.along]
    image = np.trapezoid(mean[..., chosen], dx=step, axis=-1)
    right, up = centres[view.right], centres[view.up]
    low, high = np.percentile(image, SHOWN)
    mesh = axes.pcolormesh(
        right, up, image.T, cmap="inferno", norm=LogNorm(low, high), shading="gouraud"
    )
    mesh.set_rasterized(True)
    label = f"{density.system.name} [mag]"
    bar = figure.colorbar(mesh, ax=axes, label=label, extend="both", pad=0.01)
    bar.locator = LogLocator(subs=(1.0, 2.0, 5.0))
    bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
    bar.minorlocator = NullLocator()
    bar.update_ticks()
    published = NamedPlaces.read()
    places = cartesian(published.l, published.b, published.distance)
    low_corner, high_corner = density.bounds.to_value(u.pc)
    within = ((low_corner <= places) & (places <= high_corner)).all(1)
    for name in view.clouds:
        lines = within & (np.array(published.names) == name)
        if not lines.any():
            continue
        at = np.median(places[lines], axis=0)
        if abs(at[view.along]) <= view.half_depth:
            mark(axes, name, (float(at[view.right]), float(at[view.up])), CLOUDS[name])
    axes.plot(0.0, 0.0, "o", markersize=5, color="white", markeredgecolor="black")
    axes.plot(0.0, 0.0, ".", markersize=1.6, color="black")
    words(axes, "Sun", (0.0, 0.0), (1, 1))
    axes.set_aspect("equal")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_title(view.title, fontsize=9, loc="left")
    if view.up == 2:
        axes.set_xlabel("X [pc], to the Galactic centre")
    axes.set_ylabel("Y [pc], to l = 90°" if view.up == 1 else "Z [pc]")


def mark(axes: Axes, name: str, place: tuple[float, float], beside: tuple[int, int]) -> None:
    """Draw a ring and a name at a cloud."""
    axes.plot(*place, "o", markersize=7, markerfacecolor="none", markeredgecolor="#56B4E9")
    words(axes, name, place, beside)


def words(axes: Axes, text: str, place: tuple[float, float], beside: tuple[int, int]) -> None:
    """Write white words with a dark outline to the right or left, above or below a place."""
    outline = [withStroke(linewidth=1.4, foreground="black")]
    axes.annotate(
        text,
        place,
        xytext=(5 * beside[0], 4 * beside[1]),
        textcoords="offset points",
        ha="left" if beside[0] > 0 else "right",
        va="bottom" if beside[1] > 0 else "top",
        color="white",
        fontsize=7,
        path_effects=outline,
    )


if __name__ == "__main__":
    sys.exit(main())
