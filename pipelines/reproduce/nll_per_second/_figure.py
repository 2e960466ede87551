"""The figure of `nll_per_second`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_METHODS = {
    "SVGP, Cholesky": (style.GREEN, "^", "-"),
    "SVGP, CIQ": (style.SKY, "o", "-"),
    "SVGP, Cholesky (gpytorch)": (style.GREEN, "^", ":"),
    "SVGP, CIQ (gpytorch)": (style.SKY, "o", ":"),
    "SGPR": (style.PINK, "v", "-"),
    "exact GP": (style.BLACK, "X", "-"),
    "HIP-GP": (style.ORANGE, "s", "-"),
    "global": (style.BLUE, "P", "-"),
}
_CURVES = "SVGP"


def draw(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """NLL against seconds, a panel per data set."""
    figure, axes = style.panels(1, len(names), 5.4, 4.2)
    handles: dict[str, Line2D] = {}
    for panel, name in zip(axes, names, strict=True):
        style.label(panel, name, "seconds of training", "held-out NLL")
        handles |= _panel(panel, [row for row in rows if row["data"] == name])
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    return figure


def _panel(axes: Axes, rows: Sequence[Row]) -> dict[str, Line2D]:
    handles: dict[str, Line2D] = {}
    for method, (colour, marker, dashes) in _METHODS.items():
        mine = [row for row in rows if row["method"] == method]
        for setting in dict.fromkeys(_line(row) for row in mine):
            line = sorted(
                (number(r, "seconds"), number(r, "nll")) for r in mine if _line(r) == setting
            )
            xs, ys = zip(*line, strict=True)
            drawn = axes.plot(xs, ys, dashes, color=colour, marker=marker, markersize=4.5)[0]
            drawn.set_markerfacecolor("white" if dashes == ":" else colour)
            handles[method] = drawn
    axes.set_xscale("log")
    style.few_labels(axes.xaxis)
    return handles


def _line(row: Row) -> str:
    """Points of one line: a fit in steps, or all settings of a method."""
    return str(row["setting"]) if str(row["method"]).startswith(_CURVES) else ""
