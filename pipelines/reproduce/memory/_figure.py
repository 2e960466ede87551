"""The figure of `memory`: measured peaks against planned ones."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

#: The band that is wanted.
_WITHIN = 1.25


def draw(rows: Sequence[Row]) -> Figure:
    """A point a run, and the band within which the plan is good enough."""
    figure, (axes,) = style.panels(1, 1, 5.6, 4.6)
    style.label(axes, "Peak memory of runs", "planned [MiB]", "measured [MiB]")
    planned, measured = ([number(row, f"{key}_mib") for row in rows] for key in _KEYS)
    ends = np.array([0.7 * min(planned), 1.4 * max(planned)])
    axes.plot(ends, ends, color=style.BLACK, linewidth=0.8)
    axes.fill_between(ends, ends / _WITHIN, ends * _WITHIN, color="0.9", label="within 25 %")
    for learns, marker, name in ((False, "o", "hyperparameters given"), (True, "^", "learned")):
        chosen = [i for i, row in enumerate(rows) if row["learns"] is learns]
        if chosen:
            axes.plot(
                [planned[i] for i in chosen], [measured[i] for i in chosen], marker, label=name
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        style.few_labels(axis)
    axes.legend()
    return figure


_KEYS = ("planned", "measured")
