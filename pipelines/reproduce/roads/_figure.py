"""The figure of `roads`."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number


def draw(rows: Sequence[Row], published: Mapping[str, tuple[float, float]]) -> Figure:
    """RMSE and NLL of every split and, of all the data, of the paper; NLL against seconds."""
    figure, axes = style.panels(1, 3, 4.6, 3.6)
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    for panel, key, column in ((axes[0], "error", 0), (axes[1], "nll", 1)):
        title = {"error": "held-out RMSE", "nll": "held-out NLL"}[key]
        style.label(panel, title, "standardised", "")
        _dots(panel, rows, methods, key)
        theirs = [(scores[column], methods.index(m)) for m, scores in published.items()]
        xs, ys = zip(*theirs, strict=True)
        panel.plot(xs, ys, "x", color=style.ORANGE, label="table S4, N = 278,319")
        panel.set_yticks(range(len(methods)), methods if key == "error" else [""] * len(methods))
        panel.invert_yaxis()
    axes[0].legend(fontsize=7, frameon=False)
    _against_seconds(axes[2], rows, methods)
    return figure


def _dots(axes: Axes, rows: Sequence[Row], methods: Sequence[str], key: str) -> None:
    found = [(number(row, key), methods.index(str(row["method"]))) for row in rows]
    xs, ys = zip(*found, strict=True)
    axes.plot(xs, ys, "o", color=style.BLUE, markersize=4, label="here, each split")


def _against_seconds(axes: Axes, rows: Sequence[Row], methods: Sequence[str]) -> None:
    style.label(axes, "NLL against seconds", "seconds", "held-out NLL")
    colours = [*style.COLOURS, "0.5"]
    for i, method in enumerate(methods):
        mine = [row for row in rows if row["method"] == method]
        xs, ys = [number(r, "seconds") for r in mine], [number(r, "nll") for r in mine]
        marker = style.MARKERS[i % len(style.MARKERS)]
        axes.plot(xs, ys, marker, color=colours[i], markersize=4, label=method)
    axes.set_xscale("log")
    style.few_labels(axes.xaxis)
    axes.legend(fontsize=6, frameon=False)
