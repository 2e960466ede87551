"""Errors of maps against the offset of a survey."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import COLOURS, label, panels

#: Columns of the rows that are drawn, with the words of their axes.
DRAWN = (("rmse_mag", "RMSE / mag"), ("tilt_mag", "tilt / mag"), ("chi2", "chi² of held-out stars"))
#: The groups of a row, in words.
ZEROS = {"none": "without groups", "prior": "zero points from 0", "mean": "from their mean"}


def draw(rows: Sequence[Row]) -> Figure:
    """One panel for each number, a line for each density and kind of zero points."""
    figure, axes = panels(1, len(DRAWN), width=3.6, height=3.2)
    densities = list(dict.fromkeys(str(row["density"]) for row in rows))
    for axis, (key, words) in zip(axes, DRAWN, strict=True):
        for colour, density in zip(COLOURS, densities, strict=False):
            for (zero, words_of), style in zip(ZEROS.items(), ("--", "-", ":"), strict=True):
                some = [r for r in rows if r["density"] == density and r["groups"] == zero]
                name = f"{density}, {words_of}"
                x, y = ([number(r, k) for r in some] for k in ("offset_mag", key))
                axis.plot(x, y, style, marker="o", color=colour, label=name)
        label(axis, words, "offset / mag", words)
    axes[0].legend(fontsize=7, frameon=False)
    return figure
