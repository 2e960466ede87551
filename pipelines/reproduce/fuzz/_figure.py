"""The picture of the fuzz experiment: how many inputs of each kind were read, refused or worse."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, ORANGE, PINK, label, panels


def draw(rows: Sequence[Row]) -> Figure:
    """One bar a kind, from the top in the order of the table."""
    figure, (axes,) = panels(1, 1, width=8.0, height=0.28 * len(rows) + 1.2)
    names = [str(row["kind"]) for row in rows]
    left = [0.0] * len(rows)
    for column, colour, text in (
        ("read", BLUE, "read: the change did no harm"),
        ("refused", PINK, "refused in one line"),
        ("failures", ORANGE, "failures"),
    ):
        values = [number(row, column) for row in rows]
        axes.barh(names, values, left=left, color=colour, label=text)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.legend(loc="lower right", fontsize=8, framealpha=1.0)
    label(axes, "Broken inputs", "inputs", "")
    return figure
