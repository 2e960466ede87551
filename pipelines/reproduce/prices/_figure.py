"""The figure of `prices`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._estimators_gpytorch import NAME as GPYTORCH
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce.prices._methods import NEAREST, SKLEARN_GP

_METHODS = {
    "hip": (style.BLUE, "o"),
    "global": (style.SKY, "P"),
    "svgp": (style.GREEN, "^"),
    GPYTORCH: (style.PINK, "D"),
    SKLEARN_GP: (style.ORANGE, "s"),
    NEAREST: (style.GOLD, "v"),
}
_NOMINAL = 0.6827


def draw(rows: Sequence[Row]) -> Figure:
    """RMSE, NLL and coverage against the seconds of a fit."""
    figure, axes = style.panels(1, 3, 4.4, 3.8)
    _panel(axes[0], rows, "rmse", "Held-out error", "RMSE of ln(price)")
    _panel(axes[1], rows, "nll", "Held-out density", "NLL")
    _panel(axes[2], rows, "coverage68", "Share within one std", "coverage of 68 %")
    axes[2].axhline(_NOMINAL, color=style.BLACK, linestyle=":", linewidth=1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], key: str, title: str, label: str) -> None:
    style.label(axes, title, "seconds of a fit", label)
    for row in rows:
        if row[key] is not None:
            name = str(row["method"])
            colour, marker = _METHODS[name]
            xs, ys = number(row, "fit_s"), number(row, key)
            axes.plot(
                [xs], [ys], linestyle="none", color=colour, marker=marker, markersize=7, label=name
            )
    axes.set_xscale("log")
