"""The picture of the experiment on clouds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from dustmap.sky.maps import DustMap
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, ORANGE, label, panels
from pipelines.reproduce.clouds._problem import Mapped

_MAP = "map"


def draw(sky: Mapped, rows: Sequence[Row]) -> Figure:
    """The first sky from above, true and mapped, with its balls; distances and their errors."""
    figure, axes = panels(2, 2, width=4.6, height=4.0)
    columns = [_column(density) for density in (sky.truth, sky.map)]
    low, high = np.quantile(columns[0], [0.02, 0.998])
    for axis, column, what in zip(axes[:2], columns, ("true density", "map"), strict=True):
        _above(axis, sky, column, LogNorm(float(low), float(high)), what)
    balls = [row for row in rows if row["part"] == "ball" and row["recovered"] is not None]
    _distances(axes[2], balls)
    _errors(axes[3], balls)
    return figure


def _column(density: DustMap) -> np.ndarray:
    """Integrate the mean along z, (y, x) in mag."""
    return np.asarray(density.mean.sum(0) * density.grid.spacing[2], np.float64)


def _above(axis: Axes, sky: Mapped, column: np.ndarray, norm: LogNorm, what: str) -> None:
    grid = sky.map.grid
    extent = (grid.lower[0], grid.upper[0], grid.lower[1], grid.upper[1])
    image = axis.imshow(column, origin="lower", extent=extent, norm=norm, cmap="inferno")
    turn = np.linspace(0.0, 2.0 * np.pi, 65)
    for centre, radius in zip(sky.blobs.centres, sky.blobs.radii, strict=True):
        x, y = centre[0] + 2 * radius * np.cos(turn), centre[1] + 2 * radius * np.sin(turn)
        axis.plot(x, y, color="#56B4E9", linewidth=0.8)
    axis.plot(0, 0, marker="o", color="white", markersize=3)
    label(axis, f"{what}, from above; balls of 2σ", "X [pc]", "Y [pc]")
    axis.grid(False)
    assert axis.figure is not None
    axis.figure.colorbar(image, ax=axis, shrink=0.85, label="A$_V$ through the box [mag]")


def _distances(axis: Axes, balls: Sequence[Row]) -> None:
    """Recovered against true distances, with their errors."""
    ours = [row for row in balls if row["density"] == _MAP]
    true = np.array([number(row, "distance") for row in ours])
    recovered = np.array([number(row, "recovered") for row in ours])
    errors = np.array([row.get("error") or 0.0 for row in ours], np.float64)
    axis.errorbar(true, recovered, errors, fmt="o", color=BLUE, markersize=3, elinewidth=0.8)
    ends = (0.0, 1.05 * float(np.max([true, recovered], initial=1.0)))
    axis.plot(ends, ends, color=ORANGE, linewidth=1)
    axis.set_xlim(ends)
    axis.set_ylim(ends)
    axis.set_aspect("equal")
    label(axis, "distances of balls", "true [pc]", "of their clouds [pc]")


def _errors(axis: Axes, balls: Sequence[Row]) -> None:
    """Cumulated shares of balls by |Δd|/d, of the map and of the true density."""
    for name, colour in ((_MAP, BLUE), ("true density", ORANGE)):
        off = [
            abs(number(row, "recovered") / number(row, "distance") - 1.0)
            for row in balls
            if row["density"] == name
        ]
        share = (1.0 + np.arange(len(off))) / max(1, len(off))
        axis.plot(np.maximum(np.sort(off), 1e-4), share, color=colour, label=name)
    axis.axvline(0.05, color="0.6", linewidth=1)
    axis.set_xscale("log")
    axis.legend(fontsize=7, frameon=False)
    label(axis, "errors of distances", "|Δd| / d", "share of balls")
