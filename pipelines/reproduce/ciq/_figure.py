"""The figure of `ciq`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_METHODS = {
    "Cholesky": (style.GREEN, "^", "-"),
    "CIQ": (style.BLUE, "o", "-"),
    "HIP": (style.ORANGE, "s", "-"),
    "CIQ, circulant": (style.SKY, "P", "-"),
    "Cholesky (gpytorch)": (style.GREEN, "^", ":"),
    "CIQ (gpytorch)": (style.BLUE, "o", ":"),
}
_LINES = (("epoch_s", "seconds per epoch"), ("nll", "held-out NLL"), ("error", "held-out error"))
_PARAMETERS = (("noise_variance", "σ²"), ("dof", "ν"))


def draw(rows: Sequence[Row], names: Sequence[str], student_t: str) -> Figure:
    """Time, NLL and error against M, a column per data set; likelihood parameters; crossover.

    student_t: the data set whose σ² and ν are shown.
    """
    figure, axes = style.panels(4, 3)
    for column, name in enumerate(names):
        mine = [row for row in rows if row["part"] == name]
        for line, (key, label) in enumerate(_LINES):
            _panel(axes[3 * line + column], mine, key, name, label)
            if key == "epoch_s":
                axes[3 * line + column].set_yscale("log")
    mine = [row for row in rows if row["part"] == student_t]
    for panel, (key, symbol) in zip(axes[9:11], _PARAMETERS, strict=True):
        _panel(panel, mine, key, f"{student_t}: learned {symbol}", symbol)
    _crossover(axes[11], [row for row in rows if row["part"] == "crossover"])
    if axes[0].get_legend_handles_labels()[1]:
        axes[0].legend(fontsize=7, frameon=False)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], key: str, title: str, label: str) -> None:
    style.label(axes, title, "M", label)
    for method, (colour, marker, dashes) in _METHODS.items():
        mine = [row for row in rows if row["method"] == method and row.get(key) is not None]
        if mine:
            xs, ys = [number(row, "M") for row in mine], [number(row, key) for row in mine]
            line = axes.plot(xs, ys, dashes, color=colour, marker=marker, markersize=4)[0]
            line.set_label(method)
            line.set_markerfacecolor("white" if dashes == ":" else colour)
    axes.set_xscale("log")
    style.few_labels(axes.xaxis)


def _crossover(axes: Axes, rows: Sequence[Row]) -> None:
    style.label(axes, "256 rows: free points (—), grids (- -)", "M", "seconds")
    for products, dashes in (("dense", "-"), ("toeplitz", "--")):
        for method, (colour, marker, _) in _METHODS.items():
            mine = [r for r in rows if (r["method"], r["products"]) == (method, products)]
            if mine:
                xs, ys = [number(r, "M") for r in mine], [number(r, "rows_s") for r in mine]
                axes.plot(xs, ys, dashes, color=colour, marker=marker, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
