"""Biases along rays through a dense cloud, distances given extinctions, and far columns."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, COLOURS, ORANGE, label, panels


def draw(rows: Sequence[Row]) -> Figure:
    """Three panels."""
    figure, (bias, distances, column) = panels(1, 3, width=3.8, height=3.2)
    sky = [row for row in rows if row["part"] == "bias"]
    for limited, style in ((False, "-"), (True, "--")):
        some = [row for row in sky if row["limited"] is limited]
        x = [100.0 * number(row, "precision") for row in some]
        for colour, part in zip(COLOURS, ("front", "cloud", "behind"), strict=False):
            y = [number(row, f"bias_{part}_mag") for row in some]
            name = f"{part}, {'limited' if limited else 'all stars'}"
            bias.plot(x, y, style, marker="o", color=colour, label=name)
    bias.axhline(0.0, color="0.6", linewidth=0.8)
    label(bias, "extinction through parts of rays", "error of parallaxes / %", "map − truth / mag")
    free = [row for row in sky if not row["limited"]]
    x = [100.0 * number(row, "precision") for row in free]
    for key, colour, name in (("_alone", BLUE, "parallax alone"), ("", ORANGE, "and extinction")):
        y = [number(row, f"error{key}") for row in free]
        distances.plot(x, y, marker="o", color=colour, label=name)
    label(distances, "distances of other stars", "error of parallaxes / %", "relative error, rms")
    bars = [row for row in rows if row["part"] == "column"]
    places = np.arange(len(bars))
    column.bar(places, [number(row, "far") for row in bars], color=BLUE)
    names = [str(row["column"]).replace(", ", ",\n") for row in bars]
    column.set_xticks(places, names, fontsize=7)
    label(column, "far column", "", "error of ln ρ beyond the stars")
    for axis in (bias, distances):
        if sky:
            axis.legend(fontsize=7, frameon=False)
    return figure
