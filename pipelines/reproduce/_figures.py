"""One look for all figures: colours that survive colour blindness and grey printing."""

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

#: Okabe and Ito (2008), without its yellow, which is too light for lines.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
SKY = "#56B4E9"
GOLD = "#E69F00"
BLACK = "#000000"
COLOURS = (BLUE, ORANGE, GREEN, PINK, GOLD, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def panels(
    rows: int, columns: int, width: float = 4.2, height: float = 3.4
) -> tuple[Figure, list[Axes]]:
    """A figure of rows × columns panels of `width` × `height` inches, in reading order."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=120)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [axis for line in axes for axis in line]


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, axis labels, and a light grid behind the data."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    axes.grid(True, color="0.9", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def few_labels(axis: Axis) -> None:
    """Plain labels at 1, 2 and 5 of a logarithmic axis: more of them run into each other."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())
