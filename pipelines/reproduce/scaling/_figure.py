"""The figure of `scaling`: fits over ranks, products against the model, projections."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number


def draw(rows: Sequence[Row]) -> Figure:
    """Seconds of fits against ranks; seconds of products against entries; projections."""
    figure, (over, times, beyond) = style.panels(1, 3)
    style.label(over, "Fit over ranks of one thread", "ranks", "seconds of the fit")
    kinds = ("strong", "o", style.BLUE), ("weak", "s", style.ORANGE), ("learned", "^", style.PINK)
    for kind, marker, colour in kinds:
        mine = [row for row in rows if row.get("kind") == kind]
        _points(over, mine, "ranks", "fit_s", marker, colour, _name(kind, mine))
    over.set_xticks(sorted({number(row, "ranks") for row in rows if "ranks" in row}))
    over.margins(x=0.3)
    over.set_ylim(bottom=0.0)
    style.label(times, "One product of the metric", "entries of L", "seconds, one core")
    style.label(beyond, "Projections (not measured)", "nodes M", "core hours of a fit")
    products = [row for row in rows if row["part"] == "products"]
    pairs = sorted({(str(row["device"]), number(row, "vectors")) for row in products})
    for (device, vectors), marker, colour in zip(pairs, style.MARKERS, style.COLOURS, strict=False):
        mine = [row for row in products if (row["device"], row["vectors"]) == (device, vectors)]
        name = f"{vectors:g} vectors, {device}"
        _points(times, mine, "entries", "product_s", marker, colour, name)
        _model(times, rows, mine, vectors, colour)
    for axes in (times, beyond):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    projected = [row for row in rows if row["part"] == "projection"]
    _points(beyond, projected, "M", "core_hours", "D", style.PINK, "54 million stars")
    for axes in (over, times, beyond):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    return figure


def _name(kind: str, rows: Sequence[Row]) -> str:
    if not rows:
        return kind
    stars = number(rows[0], "N")
    return f"weak: {stars:,.0f} a rank" if kind == "weak" else f"{kind}: {stars:,.0f} stars"


def _points(
    axes: Axes, rows: Sequence[Row], x: str, y: str, marker: str, colour: str, label: str
) -> None:
    places = [(number(row, x), number(row, y)) for row in rows]
    if places:
        axes.plot(*zip(*places, strict=True), marker, color=colour, label=label)


def _model(
    axes: Axes, rows: Sequence[Row], mine: Sequence[Row], vectors: float, colour: str
) -> None:
    """The model at the cases measured."""
    model = [row for row in rows if row["part"] == "model" and row["vectors"] == vectors]
    if not model or mine[0]["device"] != "cpu":
        return
    a, b = (1e-9 * number(model[0], key) for key in ("a_ns", "b_ns"))
    entries, torus = (np.array([number(row, key) for row in mine]) for key in ("entries", "torus"))
    seconds = a * entries + b * torus * np.log2(torus)
    axes.plot(entries, seconds, "_", color=colour, markersize=14)
