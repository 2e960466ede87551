"""The figure of `accuracy_per_second`."""

from collections.abc import Mapping, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_METHODS = {
    "exact GP, subset": (style.BLACK, "o", "-"),
    "exact GP, product kernel": (style.BLACK, "o", ":"),
    "HIP-GP": (style.ORANGE, "s", "-"),
    "Cholesky-SVGP": (style.GREEN, "^", "-"),
    "SVGP (gpytorch)": (style.PINK, "v", "--"),
    "KISS-GP (gpytorch)": (style.GOLD, "D", "--"),
    "global": (style.BLUE, "P", "-"),
}


def draw(rows: Sequence[Row], units: Mapping[str, str]) -> Figure:
    """RMSE and mean log-likelihood of what was held out against seconds, one line per task.

    units: of each task's RMSE, by its name.
    """
    figure, axes = style.panels(len(units), 2, 5.0, 3.8)
    for line, (name, unit) in enumerate(units.items()):
        mine = [row for row in rows if row["data"] == name]
        left, right = axes[2 * line : 2 * line + 2]
        _panel(left, mine, "rmse", name, f"held-out RMSE [{unit}]")
        _panel(right, mine, "loglike", name, "mean log-likelihood")
        left.set_yscale("log")
        left.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:.3g}"))
        left.yaxis.set_minor_formatter(ticker.StrMethodFormatter("{x:.3g}"))
        left.tick_params(axis="y", which="minor", labelsize=7)
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], key: str, title: str, label: str) -> None:
    style.label(axes, title, "seconds, from data to prediction", label)
    for method, (colour, marker, dashes) in _METHODS.items():
        for curve in _curves([row for row in rows if row["method"] == method]):
            xs, ys = ([number(row, name) for row in curve] for name in ("seconds", key))
            first = method not in axes.get_legend_handles_labels()[1]
            axes.plot(
                xs,
                ys,
                dashes,
                color=colour,
                marker=marker,
                markersize=5,
                mfc="white" if dashes == ":" else colour,
                label=method if first else None,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))


def _curves(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows to join by a line: all sizes of a method, or the epochs of one size."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        size, _, detail = str(row["size"]).partition(", ")
        key = size if detail.startswith("epoch") else ""
        curves.setdefault(key, []).append(row)
    return list(curves.values())
