"""The figures of `paper_scale`, the plane of the Sun, and of `growth`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce.paper_scale._measure import Maps
from pipelines.reproduce.paper_scale._sky import LOWER, UPPER

_EXTENT = (LOWER[0], UPPER[0], LOWER[1], UPPER[1])


def draw(maps: Maps) -> Figure:
    """Truth, mean and std at z = 0."""
    figure, axes = style.panels(1, 3, 4.4, 3.7)
    density = Normalize(float(maps.truth.min()), float(maps.truth.max()))
    spread = Normalize(0.0, float(maps.std.max()))
    _plane(axes[0], maps.truth, "Truth, z = 0", "mag / kpc", "cividis", density)
    _plane(axes[1], maps.mean, "Posterior mean", "mag / kpc", "cividis", density)
    _plane(axes[2], maps.std, "Posterior standard deviation", "mag / kpc", "viridis", spread)
    return figure


def growth(rows: Sequence[Row]) -> Figure:
    """Seconds and peak memory against N and M."""
    figure, axes = style.panels(1, 3, 4.4, 3.7)
    _growth(axes[0], rows, "in N", "N", "stars N")
    _growth(axes[1], rows, "in M", "M", "grid points M")
    _memory(axes[2], rows)
    return figure


def _plane(
    axes: Axes, values: Tensor, title: str, unit: str, colours: str, norm: Normalize
) -> None:
    style.label(axes, title, "x / kpc", "y / kpc")
    axes.grid(False)
    image = axes.imshow(values.T.numpy(), origin="lower", extent=_EXTENT, cmap=colours, norm=norm)
    axes.plot(0, 0, "*", color="white", markeredgecolor=style.BLACK, markersize=11)
    axes.annotate("Sun", (0, 0), (6, 5), textcoords="offset points", color="white", fontsize=8)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=unit, shrink=0.85)


def _growth(axes: Axes, rows: Sequence[Row], part: str, key: str, label: str) -> None:
    mine = sorted((row for row in rows if row["part"] == part), key=lambda row: number(row, key))
    style.label(axes, f"Time, {mine[0]['steps_wanted']} block steps", label, "seconds")
    xs = [number(row, key) for row in mine]
    for column, colour, marker, name in (
        ("seconds", style.BLUE, "o", "with held-out stars"),
        ("fit_s", style.ORANGE, "s", "fit"),
    ):
        ys = [number(row, column) for row in mine]
        axes.loglog(xs, ys, color=colour, marker=marker, label=name)
    linear = [number(mine[0], "seconds") * x / xs[0] for x in xs]
    axes.loglog(xs, linear, ":", color=style.BLACK, linewidth=1, label="linear")
    axes.legend(frameon=False, fontsize=8)


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    style.label(axes, "Peak memory of the process", "N, or M / 10", "GiB")
    for part, key, scale, colour, marker in (
        ("in N", "N", 1.0, style.BLUE, "o"),
        ("in M", "M", 0.1, style.ORANGE, "s"),
    ):
        mine = [row for row in rows if row["part"] == part]
        xs = [scale * number(row, key) for row in mine]
        label = f"against {key}"
        axes.loglog(
            xs, [number(row, "peak_gib") for row in mine], color=colour, marker=marker, label=label
        )
    axes.legend(frameon=False, fontsize=8)
