"""The picture of `ananke`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.gp import Prediction
from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_COLOURS = {
    "exact": style.BLACK,
    "global": style.BLUE,
    "HIP mean-field": style.GOLD,
    "HIP 2×2×2": style.ORANGE,
}
_HALF_WIDTH = 0.25


@final
@dataclass(frozen=True, eq=False)
class Maps:
    """By method: ρ on step × step points of z = 0, and the extinctions of the held-out stars."""

    step: int
    planes: Mapping[str, Prediction]
    held_out: Mapping[str, Prediction]


def draw(maps: Maps, rows: Sequence[Row]) -> Figure:
    """ρ at z = 0 by three methods on one scale; means, stds, and scores beside the exact ones."""
    figure, axes = style.panels(2, 3)
    top = max(float(plane.mean.max()) for plane in maps.planes.values())
    bottom = min(float(plane.mean.min()) for plane in maps.planes.values())
    for panel, (name, plane) in zip(axes[:3], maps.planes.items(), strict=True):
        _slice(panel, plane, maps.step, f"ρ at z = 0: {name}", (bottom, top))
    _means(axes[3], maps)
    _stds(axes[4], maps)
    _scores(axes[5], rows)
    return figure


def _slice(
    axes: Axes, plane: Prediction, step: int, title: str, limits: tuple[float, float]
) -> None:
    style.label(axes, title, "X [kpc]", "Y [kpc]")
    axes.grid(False)
    extent = (-_HALF_WIDTH, _HALF_WIDTH, -_HALF_WIDTH, _HALF_WIDTH)
    image = axes.imshow(
        plane.mean.reshape(step, step).numpy(),
        origin="lower",
        extent=extent,
        cmap="viridis",
        vmin=limits[0],
        vmax=limits[1],
    )
    axes.plot(0, 0, marker="*", color="white", markeredgecolor="black", markersize=11)
    axes.annotate("Sun", (0.0, 0.0), (5, 5), textcoords="offset points", color="white")
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label="mean ρ [extinction / kpc]", shrink=0.85)


def _means(axes: Axes, maps: Maps) -> None:
    """What the means of each method differ by, in units of the exact std, against the exact."""
    exact = maps.held_out["exact"]
    for name, found in reversed(list(maps.held_out.items())):
        if name == "exact":
            continue
        offset = (found.mean.double() - exact.mean) / exact.std
        axes.plot(exact.mean, offset, ".", markersize=3, color=_COLOURS[name], label=name)
    axes.axhline(0.0, color=style.BLACK, linewidth=1)
    style.label(
        axes,
        "held-out extinctions: means",
        "exact mean [extinction]",
        "(mean − exact mean) / exact std",
    )
    axes.legend(fontsize=7, frameon=False, markerscale=3)


def _stds(axes: Axes, maps: Maps) -> None:
    exact = maps.held_out["exact"].std
    for name, found in maps.held_out.items():
        if name != "exact":
            axes.plot(exact, found.std, ".", markersize=3, color=_COLOURS[name], label=name)
    ends = [float(exact[exact > 0].min()), float(exact.max())]
    axes.plot(ends, ends, color=style.BLACK, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    style.label(axes, "held-out extinctions: stds", "exact std [extinction]", "std [extinction]")
    axes.legend(fontsize=7, frameon=False, markerscale=3)


def _scores(axes: Axes, rows: Sequence[Row]) -> None:
    """Log-likelihood of the noise-free value on simulated skies, and seconds."""
    for name, marker in zip(_COLOURS, style.MARKERS, strict=False):
        mine = [row for row in rows if row["sky"] == "simulated" and row["method"] == name]
        axes.plot(
            [number(row, "seconds") for row in mine],
            [number(row, "truth_loglike") for row in mine],
            linestyle="none",
            marker=marker,
            color=_COLOURS[name],
            label=name,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    style.label(
        axes,
        "simulated skies: noise-free extinctions",
        "seconds (HIP: hyperparameters given)",
        "mean log-likelihood",
    )
    axes.legend(fontsize=7, frameon=False)
