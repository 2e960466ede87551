"""The picture of `families`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_KINDS = ("auto", "full", "low-rank", "block", "mean-field")


def draw(rows: Sequence[Row]) -> Figure:
    """Widths of the density and of extinctions, a line a scene, from the median to the 90th
    percentile."""
    figure, axes = style.panels(1, 2, 6.4, 4.2)
    found = [row for row in rows if row["part"] == "families" and row["family"] != "exact"]
    _widths(axes[0], found, "places", "density at random places")
    _widths(axes[1], found, "rays", "extinctions of other stars")
    axes[1].legend(frameon=False, fontsize=7.5, loc="upper center")
    return figure


def _widths(axes: Axes, rows: Sequence[Row], what: str, title: str) -> None:
    style.label(axes, title, "", "std / exact std, median to 90th percentile")
    names = sorted({_family(row) for row in rows}, key=_place)
    scenes = list(dict.fromkeys(_scene(row) for row in rows))
    for place, scene in enumerate(scenes):
        mine = [row for row in rows if _scene(row) == scene]
        x = [names.index(_family(row)) + 0.14 * (place - 0.5 * (len(scenes) - 1)) for row in mine]
        low, high = ([number(row, f"{what}_{end}") for row in mine] for end in ("median", "p90"))
        colour = style.COLOURS[place % len(style.COLOURS)]
        axes.vlines(x, low, high, color=colour, linewidth=1.2)
        marker = style.MARKERS[place % len(style.MARKERS)]
        axes.plot(x, low, marker, color=colour, markersize=4, label=scene)
    axes.axhline(1.0, color=style.BLACK, linewidth=0.8)
    axes.axhline(1.3, color="0.5", linestyle="--", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7.5)


def _family(row: Row) -> str:
    """The family, blocks by the nodes along a tile."""
    name = str(row["family"])
    return f"block {name.split()[1].partition('x')[0]}" if name.startswith("block") else name


def _place(family: str) -> tuple[int, int]:
    """Kinds in the order of their structure, and sizes from small to large."""
    kind, _, size = family.partition(" ")
    return _KINDS.index(kind), int(size or 0)


def _scene(row: Row) -> str:
    ratio = f", ℓ/h = {number(row, 'ell_over_h'):g}"
    return f"{row['D']}-D, {row['stars']} stars{ratio}"
