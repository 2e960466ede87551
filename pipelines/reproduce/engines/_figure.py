"""The figure of `engines`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_ENGINES = {
    "exact": (style.BLACK, "X"),
    "global": (style.SKY, "P"),
    "hip": (style.BLUE, "o"),
    "svgp": (style.GREEN, "^"),
    "sgpr": (style.ORANGE, "s"),
}


def draw(rows: Sequence[Row]) -> Figure:
    """NLPD against CPU seconds of a fit, a panel for each table; larger marks are more rows."""
    names = list(dict.fromkeys(str(row["table"]) for row in rows)) or [""]
    across = min(3, len(names))
    figure, axes = style.panels(-(-len(names) // across), across)
    for panel, name in zip(axes, names, strict=False):
        _panel(panel, name, [row for row in rows if row["table"] == name and "rmse" in row])
    for panel in axes[len(names) :]:
        panel.set_axis_off()
    handles = {
        label: h for a in axes for h, label in zip(*a.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _panel(axes: Axes, name: str, rows: Sequence[Row]) -> None:
    title = f"{name}, D = {rows[0]['D']}" if rows else name
    style.label(axes, title, "CPU seconds of a fit", "NLPD")
    axes.set_xscale("log")
    style.few_labels(axes.xaxis)
    sizes = sorted({number(row, "n") for row in rows})
    for row in rows:
        engine = str(row["engine"])
        colour, marker = _ENGINES[engine]
        axes.plot(
            [number(row, "fit_s")],
            [number(row, "nlpd")],
            linestyle="none",
            color=colour,
            marker=marker,
            markersize=4 + 2 * sizes.index(number(row, "n")),
            label=engine,
        )
