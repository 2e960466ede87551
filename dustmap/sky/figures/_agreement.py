"""Extinctions of a map beside those of others: pairs, and their scores by distance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.errors import UserError
from dustmap.sky.agreement import Pairs, distance_edges
from dustmap.sky.agreement._scores import INTEGRATED
from dustmap.sky.figures import _style as style
from dustmap.sky.figures._panels import PER_MILLE
from dustmap.sky.figures._style import Array

_GRID = 50
#: Percentiles of the pairs that are shown.
_SHOWN = (0.1, 99.9)
_EQUAL: dict[str, Any] = {"color": "0.2", "linewidth": 0.8, "linestyle": (0, (4, 1.5))}


@style.styled()
def agreement_figure(compared: Sequence[Pairs]) -> Figure:
    """Draw a row for each set of pairs: numbers of pairs, bias and RMSE, slope and correlation.

    The last two panels are by distance from the Sun, in the bins of the table.
    """
    if not compared:
        raise UserError("compare: expected one other map or catalog at least")
    figure = style.new_figure(style.TWO_COLUMNS, 2.35 * len(compared) + 0.2)
    rows = figure.subplots(len(compared), 3, squeeze=False)
    edges = distance_edges(compared)
    for (left, middle, right), pairs in zip(rows, compared, strict=True):
        factor, unit = 1.0, style.unit_of(pairs.system)
        if pairs.kind != INTEGRATED:
            factor, unit = PER_MILLE, style.density_unit(pairs.system)
        _pairs(figure, left, pairs, factor, unit)
        _scores(middle, right, pairs, edges, factor, unit)
        for axis in (left, middle, right):
            style.fix_ticks(axis)
    for axis in rows[-1, 1:]:
        axis.set_xlabel("distance [pc]")
    return figure


def _pairs(figure: Figure, axis: Axes, pairs: Pairs, factor: float, unit: str) -> None:
    both = factor * np.stack([pairs.theirs, pairs.ours])
    low, high = np.percentile(both, _SHOWN)
    low, high = min(float(low), 0.0), max(float(high), float(low) + 1e-9)
    extent = (low, high, low, high)
    drawn = axis.hexbin(both[0], both[1], gridsize=_GRID, extent=extent, mincnt=1, linewidths=0.1)
    scale = style.count_scale(np.asarray(drawn.get_array(), np.float64))
    drawn.set_cmap(scale.colormap())
    drawn.set_norm(scale.norm)
    drawn.set_rasterized(True)
    scale.bar(figure, drawn, axis, "pairs")
    axis.plot((low, high), (low, high), **_EQUAL)
    score = pairs.score()
    words = f"slope {score.slope:.2f}, correlation {score.correlation:.2f}"
    axis.set_title(words.replace("-", "\N{MINUS SIGN}"))
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_aspect("equal")
    symbol = style.symbol_of(pairs.system)
    what = symbol if pairs.kind == INTEGRATED else f"$\\rho$ in {symbol}"
    axis.set_xlabel(f"{pairs.name}: {what} [{unit}]")
    axis.set_ylabel(f"this map [{unit}]")


def _scores(
    spread: Axes, line: Axes, pairs: Pairs, edges: Sequence[float], factor: float, unit: str
) -> None:
    """Draw bias and RMSE on one axis, slope and correlation on the other, against distance."""
    bins = [
        (0.5 * (low + high), part.score())
        for what, low, high, part in pairs.bins(edges)
        if what == "distance"
    ]
    middle = np.array([at for at, _ in bins])

    def curve(name: str) -> Array:
        return np.array([getattr(score, name) for _, score in bins], np.float64)

    looks: tuple[dict[str, Any], ...] = (
        {"color": style.MODEL_COLOUR, "marker": "o", "markersize": 3.0},
        {"color": style.TRUTH_COLOUR, "marker": "s", "markersize": 3.0},
    )
    for name, look in zip(("rmse", "bias"), looks, strict=True):
        label = "RMSE" if name == "rmse" else name
        spread.plot(middle, factor * curve(name), label=label, **look)
    for name, look in zip(("slope", "correlation"), looks, strict=True):
        line.plot(middle, curve(name), label=name, **look)
    spread.axhline(0.0, **_EQUAL)
    line.axhline(1.0, **_EQUAL)
    spread.set_ylabel(f"{pairs.kind} [{unit}]")
    line.set_ylim(bottom=min(0.0, line.get_ylim()[0]))
    for axis in (spread, line):
        axis.set_xlim(0.0, edges[-1])
        axis.legend(loc="best")
