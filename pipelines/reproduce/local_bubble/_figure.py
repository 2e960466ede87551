"""The picture of the experiment on the Local Bubble."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, ORANGE, label, panels
from pipelines.reproduce.local_bubble._problem import Fitted

#: Room of a name on the panel of the clouds, in pc.
_WIDTH, _HEIGHT = 70.0, 14.0


def draw(fitted: Fitted, lines: Sequence[Row]) -> Figure:
    """Distances of clouds; density by distance from the Sun; residuals and coverage of stars."""
    figure, axes = panels(2, 2, width=4.6, height=4.0)
    _distances(axes[0], lines)
    _cavity(axes[1], fitted)
    _residuals(axes[2], fitted)
    _coverage(axes[3], fitted)
    return figure


def _distances(axes: Axes, lines: Sequence[Row]) -> None:
    """Where the map has the clouds, against where they are."""
    true, peak, error = (
        np.array([number(row, key) for row in lines]) for key in ("distance", "peak", "peak_error")
    )
    axes.errorbar(true, peak, yerr=error, fmt="none", ecolor="0.8", elinewidth=0.8)
    axes.plot(true, peak, "o", color=BLUE, markersize=3)
    named: dict[str, tuple[float, float]] = {}
    for row, x, y in zip(lines, true, peak, strict=True):
        name = str(row["name"]).replace("_", " ")
        free = all(abs(x - a) > _WIDTH or abs(y - b) > _HEIGHT for a, b in named.values())
        if name not in named and free:
            named[name] = x, y
            axes.annotate(name, (x, y), xytext=(3, 2), textcoords="offset points", fontsize=5)
    axes.plot([100, 420], [100, 420], color=ORANGE, linewidth=1)
    label(axes, "clouds", "published distance [pc]", "where the map is densest [pc]")


def _cavity(axes: Axes, fitted: Fitted) -> None:
    """Mean density on spheres around the Sun."""
    x, y, z = fitted.density.axes()
    height, up, right = np.meshgrid(z, y, x, indexing="ij")
    radius = np.sqrt(right**2 + up**2 + height**2).ravel()
    mean = fitted.density.mean.astype(float).ravel()
    edges = np.arange(0.0, min(-x[0], x[-1]) + 1.0, 20.0)
    flat = np.abs(height).ravel() <= 50.0
    for chosen, colour, name in (
        (np.ones_like(flat), BLUE, "everywhere"),
        (flat, ORANGE, "|Z| ≤ 50 pc"),
    ):
        total = np.histogram(radius[chosen], edges, weights=mean[chosen])[0]
        count = np.histogram(radius[chosen], edges)[0]
        middle = 0.5 * (edges[1:] + edges[:-1])
        axes.plot(middle, 1e3 * total / np.maximum(count, 1), color=colour, label=name)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    label(axes, "the cavity", "distance from the Sun [pc]", "E(B−V) per kpc [mag/kpc]")


def _residuals(axes: Axes, fitted: Fitted) -> None:
    compared = fitted.compared
    axes.hexbin(
        compared.predicted,
        compared.measured,
        gridsize=60,
        bins="log",
        extent=(0, 0.6, -0.3, 0.9),
        cmap="Blues",
        linewidths=0.1,
    )
    axes.plot([0, 0.6], [0, 0.6], color=ORANGE, linewidth=1)
    label(axes, "held-out stars", "predicted E(B−V) [mag]", "measured E(B−V) [mag]")


def _coverage(axes: Axes, fitted: Fitted) -> None:
    nominal = np.linspace(0.0, 1.0, 101)
    inside = [np.mean(np.abs(2.0 * fitted.compared.pit - 1.0) <= p) for p in nominal]
    axes.plot(nominal, inside, color=BLUE)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    axes.set_aspect("equal")
    label(axes, "held-out stars: coverage", "promised", "measured")
