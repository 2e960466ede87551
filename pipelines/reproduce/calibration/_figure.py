"""The picture of the experiment on what fits claim."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce._figures import BLUE, ORANGE, label, panels
from pipelines.reproduce.calibration._case import Claim

#: Half widths of the range beyond which a point is drawn at the edge, as an arrow.
EDGE = 30.0


def draw(claims: Sequence[Claim]) -> Figure:
    """A line for each claim: before and now, in half widths of the range where it is right."""
    figure, (axes,) = panels(1, 1, width=11.0, height=1.2 + 0.3 * max(4, len(claims)))
    heights = np.arange(len(claims))[::-1]
    axes.axvspan(-1.0, 1.0, color="0.9", zorder=0)
    _points(axes, [claim.deviation(claim.before) for claim in claims], heights, "before", ORANGE)
    _points(axes, [claim.deviation(claim.fitted) for claim in claims], heights, "now", BLUE)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(-1.2 * EDGE, 1.2 * EDGE)
    ticks = (-10, -1, 0, 1, 10)
    axes.set_xticks(ticks, [f"{tick}".replace("-", "−") for tick in ticks])
    axes.set_yticks(heights, [f"{claim.case}: {claim.quantity}" for claim in claims], fontsize=7)
    label(axes, "Right within the grey band", "distance from its middle in half widths", "")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _points(
    axes: Axes, deviations: Sequence[float], heights: np.ndarray, name: str, colour: str
) -> None:
    found = np.nan_to_num(np.asarray(deviations), nan=EDGE, posinf=EDGE, neginf=-EDGE)
    beyond = np.abs(found) >= EDGE
    axes.scatter(found[~beyond], heights[~beyond], s=24, color=colour, label=name)
    for side, marker in ((1, ">"), (-1, "<")):
        chosen = beyond & (np.sign(found) == side)
        at = np.full(chosen.sum(), side * EDGE)
        axes.scatter(at, heights[chosen], s=30, color=colour, marker=marker)
