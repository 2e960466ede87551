"""Measured against predicted extinctions."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.sky.figures._comparisons import Array, Comparison
from dustmap.sky.figures._scales import count_scale
from dustmap.sky.figures._style import (
    MODEL_COLOUR,
    SMALL,
    TRUTH_COLOUR,
    TWO_COLUMNS,
    new_figure,
    rasterize,
    settle,
    styled,
)
from dustmap.sky.figures._words import symbol_of, unit_of

#: Stars beyond which their number in cells is drawn instead of dots.
_MOST_DOTS = 3000
_GRID = 50
#: Standardised residuals that are drawn; how many lie beyond is told.
_MOST_SIGMA = 6.0
#: Bins along the prediction at most, and stars in each at least.
_BINS, _PER_BIN = 8, 20
_IDEAL: dict[str, Any] = {"color": "0.2", "linewidth": 0.8, "linestyle": (0, (4, 1.5))}


@styled()
def extinction_figure(compared: Comparison, of: str = "held-out stars") -> Figure:
    """Measured against predicted extinctions, and their standardised difference."""
    figure = new_figure(TWO_COLUMNS, 3.1)
    left, right = figure.subplots(1, 2)
    symbol = f"{symbol_of(compared.system)} [{unit_of(compared.system)}]"
    _against_each_other(figure, left, compared)
    left.set_ylabel(f"measured {symbol}")
    _standardised(figure, right, compared)
    right.set_ylabel(compared.label)
    for axis in (left, right):
        axis.set_xlabel(f"predicted {symbol}")
        settle(axis)
    figure.suptitle(f"Extinctions of {len(compared):,} {of}")
    return figure


def _against_each_other(figure: Figure, axis: Axes, compared: Comparison) -> None:
    both = np.concatenate([compared.predicted, compared.measured])
    margin = 0.05 * float(np.ptp(both)) + 1e-9
    ends = float(both.min()) - margin, float(both.max()) + margin
    _dots(figure, axis, compared.predicted, compared.measured, (*ends, *ends), compared.std)
    axis.plot(ends, ends, **_IDEAL)
    axis.set_xlim(ends)
    axis.set_ylim(ends)
    axis.set_aspect("equal")


def _standardised(figure: Figure, axis: Axes, compared: Comparison) -> None:
    x, z = compared.predicted, compared.standardised
    limit = min(_MOST_SIGMA, max(4.0, 1.1 * float(np.abs(z).max())))
    margin = 0.05 * float(np.ptp(x)) + 1e-9
    ends = float(x.min()) - margin, float(x.max()) + margin
    _dots(figure, axis, x, z, (*ends, -limit, limit), None)
    axis.axhline(0.0, **_IDEAL)
    _running(axis, x, z)
    beyond = int((np.abs(z) > limit).sum())
    if beyond:
        axis.text(
            0.03, 0.03, f"{beyond:,} beyond", transform=axis.transAxes, fontsize=SMALL, va="bottom"
        )
    axis.set_xlim(ends)
    axis.set_ylim(-limit, limit)
    axis.legend(loc="upper right")


def _dots(
    figure: Figure,
    axis: Axes,
    x: Array,
    y: Array,
    extent: tuple[float, float, float, float],
    error: Array | None,
) -> None:
    """Dots with vertical errors, or the number of stars in hexagons if there are too many."""
    if len(x) > _MOST_DOTS:
        cells = axis.hexbin(x, y, gridsize=_GRID, extent=extent, mincnt=1, linewidths=0.1)
        scale = count_scale(np.asarray(cells.get_array(), np.float64))
        cells.set_cmap(scale.colormap())
        cells.set_norm(scale.norm)
        rasterize(cells)
        scale.bar(figure, cells, axis, "stars")
        return
    if error is not None:
        bars = axis.vlines(x, y - error, y + error, color=MODEL_COLOUR, linewidth=0.4, alpha=0.35)
        rasterize(bars)
    (dots,) = axis.plot(x, y, ".", markersize=2.5, color=MODEL_COLOUR, alpha=0.8)
    rasterize(dots)


def _running(axis: Axes, x: Array, z: Array) -> None:
    """Mean and deviation in bins of equally many stars along the prediction."""
    order = np.argsort(x)
    bins = np.array_split(order, int(np.clip(len(order) // _PER_BIN, 1, _BINS)))
    mean = np.array([z[part].mean() for part in bins])
    spread = np.array([z[part].std() for part in bins])
    axis.errorbar(
        [x[part].mean() for part in bins],
        mean,
        yerr=spread,
        fmt="o",
        markersize=3.5,
        color=TRUTH_COLOUR,
        elinewidth=1.0,
        label="mean and deviation",
    )
