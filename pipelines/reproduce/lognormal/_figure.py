"""The picture of the log-normal experiment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, ORANGE, few_labels, label, panels
from pipelines.reproduce.lognormal._problem import Sky

_METHODS = (("dustmap", BLUE, "o"), ("nifty", ORANGE, "s"))


@final
@dataclass(frozen=True, eq=False)
class Maps:
    """One sky and the two posterior means of its log-density (M,)."""

    sky: Sky
    ours: Tensor
    theirs: Tensor


def draw(rows: Sequence[Row], maps: Mapping[str, Maps]) -> Figure:
    """Slices through the observer of one sky per truth, then scores against CPU time."""
    figure, axes = panels(len(maps) + 1, 3)
    for line, (truth, found) in enumerate(maps.items()):
        fields = (found.sky.log_density, found.ours, found.theirs)
        limits = (float(fields[0].min()), float(fields[0].max()))
        titles = (f"ln ρ, {truth} truth", "dustmap: posterior mean", "NIFTy.re: posterior mean")
        for axis, field, title in zip(axes[3 * line : 3 * line + 3], fields, titles, strict=True):
            _slice(axis, field, found.sky.grid.shape, limits, title)
    keys = (
        ("log_correlation", "correlation of ln ρ"),
        ("extinction_rmse", "RMSE of held-out extinction"),
        ("log_chi2", "χ² of ln ρ"),
    )
    for axis, (key, title) in zip(axes[3 * len(maps) :], keys, strict=True):
        _against_time(axis, rows, key, title)
    return figure


def _slice(
    axes: Axes,
    field: Tensor,
    shape: tuple[int, ...],
    limits: tuple[float, float],
    title: str,
) -> None:
    plane = field.reshape(shape)[:, :, shape[2] // 2].numpy()
    image = axes.imshow(
        plane.T, origin="lower", extent=(-0.5, 0.5, -0.5, 0.5), vmin=limits[0], vmax=limits[1]
    )
    label(axes, title, "x", "y")
    axes.grid(False)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, shrink=0.85)


def _against_time(axes: Axes, rows: Sequence[Row], key: str, title: str) -> None:
    for method, colour, marker in _METHODS:
        for truth, filled in (("prior", True), ("power law", False)):
            mine = [row for row in rows if (row["method"], row["truth"]) == (method, truth)]
            axes.plot(
                [number(row, "cpu_s") for row in mine],
                [number(row, key) for row in mine],
                marker=marker,
                color=colour,
                markerfacecolor=colour if filled else "white",
                linestyle="none",
                label=f"{method}, {truth}",
            )
    axes.set_xscale("log")
    few_labels(axes.xaxis)
    if key == "log_chi2":
        axes.set_yscale("log")
        axes.axhline(1.0, color="0.6", linewidth=1)
    label(axes, title, "CPU seconds", "")
    axes.legend(fontsize=7, frameon=False)
