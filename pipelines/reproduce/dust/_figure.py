"""The picture of the dust experiment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.gp import Prediction
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, COLOURS, GREEN, MARKERS, ORANGE, label, panels
from pipelines.reproduce.dust._problem import DENSITY_TO_EXTINCTION, Stars


@final
@dataclass(frozen=True, eq=False)
class Maps:
    """ρ on step × step points of z = 0, ρ at the held-out stars, ρ* of the held-out stars."""

    step: int
    plane: Prediction
    at_stars: Prediction
    extinction: Prediction
    length: float


def draw(stars: Stars, rows: Sequence[Row], maps: Maps) -> Figure:
    """ρ, its std, ρ* beside what was observed; widths of the families; time per epoch."""
    figure, axes = panels(2, 3)
    _slice(axes[0], maps.plane.mean, maps.step, "posterior mean of ρ at z = 0", "viridis")
    _slice(axes[1], maps.plane.std, maps.step, "posterior std of ρ at z = 0", "magma")
    _density(axes[2], stars, maps)
    _extinction(axes[3], stars, maps)
    _widths(axes[4], rows)
    _times(axes[5], rows)
    return figure


def _slice(axes: Axes, values: "object", step: int, title: str, colours: str) -> None:
    grid = values.reshape(step, step).numpy()  # type: ignore[attr-defined]
    image = axes.imshow(grid, origin="lower", extent=(-0.25, 0.25, -0.25, 0.25), cmap=colours)
    label(axes, title, "X [kpc]", "Y [kpc]")
    axes.grid(False)
    axes.plot(0, 0, marker="*", color="white", markeredgecolor="black", markersize=11)
    axes.annotate("Sun", (0.0, 0.0), (5, 5), textcoords="offset points", color="white")
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label="ρ [extinction / kpc]", shrink=0.85)


def _density(axes: Axes, stars: Stars, maps: Maps) -> None:
    truth = stars.density.numpy()
    axes.errorbar(
        truth,
        maps.at_stars.mean.numpy(),
        maps.at_stars.std.numpy(),
        fmt=".",
        color=BLUE,
        ecolor="0.85",
        markersize=3,
        linewidth=0.6,
    )
    top = float(truth.max())
    axes.plot([0, top], [0, top], color="black", linewidth=1)
    label(
        axes,
        "ρ at the held-out stars",
        f"true density × {DENSITY_TO_EXTINCTION} [1/kpc]",
        "posterior mean ± std",
    )


def _extinction(axes: Axes, stars: Stars, maps: Maps) -> None:
    y = stars.y.numpy()
    axes.errorbar(
        maps.extinction.mean.numpy(),
        y,
        stars.sigma.numpy(),
        fmt=".",
        color=GREEN,
        ecolor="0.85",
        markersize=3,
        linewidth=0.6,
    )
    axes.plot([0, y.max()], [0, y.max()], color="black", linewidth=1)
    label(axes, "ρ* of the held-out stars", "posterior mean", "noisy extinction ± σ")


def _widths(axes: Axes, rows: Sequence[Row]) -> None:
    """std ratio against √(leverage ratio): the explanation, point by point."""
    exact = {row["length"]: number(row, "leverage") for row in rows if row["method"] == "exact"}
    found = [row for row in rows if "std_ratio" in row]
    for place, family in enumerate(dict.fromkeys(str(row["family"]) for row in found)):
        mine = [row for row in found if row["family"] == family]
        axes.plot(
            [(number(row, "leverage") / exact[row["length"]]) ** 0.5 for row in mine],
            [number(row, "std_ratio") for row in mine],
            marker=MARKERS[place % len(MARKERS)],
            color=COLOURS[place % len(COLOURS)],
            linestyle="none",
            label=family,
        )
    top = max(number(row, "std_ratio") for row in found)
    axes.plot([1, top], [1, top], color="black", linewidth=1)
    label(axes, "width of the families", "√(leverage / exact)", "median std / exact std")
    axes.legend(fontsize=7, frameon=False)


def _times(axes: Axes, rows: Sequence[Row]) -> None:
    """Seconds per epoch against M_w."""
    for method, colour, marker in (("hip", BLUE, "o"), ("svgp", ORANGE, "s")):
        mine = [row for row in rows if row["method"] == method]
        axes.plot(
            [number(row, "M_w") for row in mine],
            [number(row, "epoch_of_20_s") for row in mine],
            marker=marker,
            color=colour,
            linestyle="none",
            label=method,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for seconds, name in ((16.9, "published 15×15×5"), (86.0, "published 20×20×8")):
        axes.axhline(seconds, color="0.6", linewidth=1, linestyle="--")
        axes.annotate(
            name,
            (0.02, seconds),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=7,
            color="0.4",
        )
    label(axes, "time per epoch", "M_w", "seconds, 1/20 of the rows' included")
    axes.legend(fontsize=8, frameon=False)
