"""The figure of `flights`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._estimators_gpytorch import ALTERNATING
from pipelines.reproduce._estimators_gpytorch import NAME as GPYTORCH
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce.flights import _problem as problem

_METHODS = {
    problem.SVGP: (style.BLUE, "o", "-"),
    GPYTORCH: (style.PINK, "D", "none"),
    ALTERNATING: (style.PINK, "v", "none"),
}
_LEVELS = {
    problem.MEAN: (style.BLACK, ":"),
    problem.LINEAR: (style.GOLD, "-."),
    problem.SUBSET: (style.GREEN, "--"),
    problem.BOOSTED: (style.ORANGE, (0, (5, 1))),
}


def draw(rows: Sequence[Row]) -> Figure:
    """RMSE, NLL and seconds against M; what has no M is a level."""
    figure, axes = style.panels(1, 3, 4.4, 3.8)
    _panel(axes[0], rows, "rmse", "Held-out error", "RMSE / minutes")
    _panel(axes[1], rows, "nll", "Held-out density", "NLL")
    _panel(axes[2], rows, "fit_s", "Time of a fit", "seconds")
    axes[2].set_yscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], key: str, title: str, label: str) -> None:
    style.label(axes, title, "inducing points M", label)
    for name, (colour, marker, dashes) in _METHODS.items():
        part = "sizes" if name == problem.SVGP else "gpytorch"
        mine = [row for row in rows if (row["method"], row["part"]) == (name, part)]
        mine = [row for row in mine if row[key] is not None]
        if mine:
            xs, ys = ([number(row, k) for row in mine] for k in ("M", key))
            axes.plot(xs, ys, linestyle=dashes, color=colour, marker=marker, label=name)
    both = [row for row in rows if (row["method"], row["part"]) == (problem.SVGP, "gpytorch")]
    for row in both:
        at = [number(row, "M")], [number(row, key)]
        axes.plot(*at, "o", color=style.BLUE, mfc="white", label="SVGP, trained as gpytorch's")
    for name, (colour, line) in _LEVELS.items():
        mine = [row for row in rows if row["method"] == name]
        sizes = sorted(number(row, "n_train") for row in mine)
        many = f"{name} ({', '.join(f'{n:,.0f}' for n in sizes)})" if len(mine) > 1 else name
        for index, row in enumerate(mine):
            axes.axhline(
                number(row, key),
                color=colour,
                linestyle=line,
                linewidth=1.2,
                label="_" if index else many,
            )
    axes.set_xscale("log")
    style.few_labels(axes.xaxis)
