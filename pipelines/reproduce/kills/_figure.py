"""The figure of `kills`: when each was, and what it took to go on."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number


def draw(rows: Sequence[Row]) -> Figure:
    """Seconds that going on took against the moment of the kill, by stage; losses ringed."""
    figure, (axis,) = style.panels(1, 1, 5.6, 4.0)
    stages = list(dict.fromkeys((str(row["part"]), str(row["stage"])) for row in rows))
    for (part, stage), colour, marker in zip(stages, style.COLOURS, style.MARKERS, strict=False):
        chosen = [row for row in rows if (row["part"], row["stage"]) == (part, stage)]
        x, y = ([number(row, name) for row in chosen] for name in ("after_s", "seconds_to_go_on"))
        name = stage if part == "run" else f"dustmap {part}"
        axis.plot(x, y, marker, color=colour, markersize=5, label=name)
    lost = [row for row in rows if number(row, "differences") + number(row, "unreadable") > 0]
    axis.plot(
        [number(row, "after_s") for row in lost],
        [number(row, "seconds_to_go_on") for row in lost],
        "o",
        color=style.BLACK,
        fillstyle="none",
        markersize=11,
        label=f"lost something: {len(lost)} of {len(rows)}",
    )
    style.label(axis, "kill -9", "seconds into the stage", "seconds to go on to the end")
    axis.set_ylim(bottom=0.0)
    axis.legend(fontsize=8)
    return figure
