"""The picture of the experiment on open clusters."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from dustmap.sky.agreement import Comparison
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, ORANGE, label, panels
from pipelines.reproduce.clusters._problem import Fitted

#: Nodes between which a projection integrates, in pc.
_STEP = 50.0
_LEAST = 0.03


def draw(fitted: Fitted, rows: Sequence[Row], other: Comparison) -> Figure:
    """From above with the clusters; predicted against observed, held out and of the other catalog;
    residuals by distance; errors of all methods; residuals in units of their std."""
    figure, axes = panels(2, 3, width=5.0, height=4.2)
    _above(axes[0], fitted)
    _observed(axes[1], fitted.compared, "held-out clusters of Hunt & Reffert")
    _observed(axes[2], other, "clusters of Dias et al. alone")
    _residuals(axes[3], fitted)
    _calibration(axes[4], fitted.compared)
    _errors(axes[5], rows)
    return figure


def _above(axes: Axes, fitted: Fitted) -> None:
    """∫ρ dZ of the mean in mag, clusters of the map as dots and those held out as circles."""
    grid = fitted.map.run.grid
    posterior = fitted.map.fit.at_nodes
    assert posterior is not None
    mean = posterior().mean.double().reshape(grid.shape)
    column = torch.trapezoid(mean, dx=grid.spacing[2], dim=2).clamp(min=_LEAST)
    extent = (grid.lower[0], grid.upper[0], grid.lower[1], grid.upper[1])
    low, high = np.quantile(column.numpy(), [0.02, 0.998])
    image = axes.imshow(
        column.T.numpy(), origin="lower", extent=extent, norm=LogNorm(low, high), cmap="inferno"
    )
    for stars, size, colour in ((fitted.train, 1.0, "white"), (fitted.test, 2.0, "#56B4E9")):
        x = stars.positions()
        axes.scatter(x[:, 0], x[:, 1], s=size, color=colour, alpha=0.5, linewidths=0)
    axes.plot(0, 0, marker="*", color="#56B4E9", markersize=9, markeredgecolor="black")
    label(axes, "seen from above (centre to the right)", "X [pc]", "Y [pc]")
    axes.grid(False)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, shrink=0.85, label="A$_V$ through the box [mag]")


def _observed(axes: Axes, compared: Comparison, title: str) -> None:
    top = float(np.quantile(compared.measured, 0.998)) * 1.05
    axes.errorbar(
        compared.predicted,
        compared.measured,
        xerr=None,
        yerr=compared.std,
        fmt="none",
        ecolor="0.85",
        elinewidth=0.5,
    )
    axes.plot(compared.predicted, compared.measured, "o", color=BLUE, markersize=2, alpha=0.6)
    axes.plot([0, top], [0, top], color=ORANGE, linewidth=1)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal")
    label(axes, title, "predicted A$_V$ [mag]", "observed A$_V$ [mag]")


def _residuals(axes: Axes, fitted: Fitted) -> None:
    """Residuals by distance, with medians and central 68 % of equally many clusters."""
    distance = fitted.test.distance
    residual = fitted.compared.measured - fitted.compared.predicted
    axes.plot(distance, residual, "o", color=BLUE, markersize=2, alpha=0.5)
    edges = np.quantile(distance, np.linspace(0, 1, 9))
    for low, high in itertools.pairwise(edges):
        chosen = residual[(distance >= low) & (distance <= high)]
        p16, p50, p84 = np.quantile(chosen, [0.16, 0.5, 0.84])
        axes.fill_between([low, high], p16, p84, color=ORANGE, alpha=0.25, linewidth=0)
        axes.plot([low, high], [p50, p50], color=ORANGE, linewidth=1.5)
    axes.axhline(0.0, color="0.6", linewidth=1)
    axes.set_ylim(-2.5, 2.5)
    label(axes, "held out: observed − predicted", "distance [pc]", "A$_V$ [mag]")


def _calibration(axes: Axes, compared: Comparison) -> None:
    """Share of clusters inside central intervals, against what the intervals promise."""
    nominal = np.linspace(0.0, 1.0, 101)
    inside = [np.mean(np.abs(2.0 * compared.pit - 1.0) <= p) for p in nominal]
    axes.plot(nominal, inside, color=BLUE)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    axes.set_aspect("equal")
    label(axes, "held out: coverage", "promised", "found")


def _errors(axes: Axes, rows: Sequence[Row]) -> None:
    """RMSE of every method, by what is predicted."""
    parts = list(dict.fromkeys(str(row["part"]) for row in rows))
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    for part, colour, shift in zip(parts, (BLUE, ORANGE, "0.4"), (-0.2, 0.0, 0.2), strict=False):
        mine = [row for row in rows if row["part"] == part]
        places = [methods.index(str(row["method"])) + shift for row in mine]
        axes.plot([number(row, "rmse") for row in mine], places, "o", color=colour, label=part)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.legend(fontsize=7, frameon=False)
    label(axes, "root mean square error", "RMSE [mag]", "")
