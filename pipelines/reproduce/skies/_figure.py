"""The picture of the experiment on simulated skies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._figures import BLUE, ORANGE, label, panels
from pipelines.reproduce.skies._problem import PRIOR, Fitted

_COLOURS = {PRIOR: BLUE}


@final
@dataclass(frozen=True, eq=False)
class Shown:
    """One sky: its kind, the plane of the Sun true and as found (x, y), and the PIT (K,)."""

    kind: str
    seed: int
    truth: NDArray[np.float64]
    found: NDArray[np.float64]
    extent: tuple[float, float, float, float]
    probability: NDArray[np.float64]

    @classmethod
    def of(cls, row: Row, fitted: Fitted, probability: NDArray[np.float64]) -> Self:
        """The median density of the slice nearest to z = 0, beside the truth."""
        grid = fitted.grid
        z = fitted.truth.nearest_slice(0.0)
        median = fitted.solution.posterior.node_log_moments()[0].double().exp().numpy()
        extent = (grid.lower[0], grid.upper[0], grid.lower[1], grid.upper[1])
        truth = np.asarray(fitted.truth.mean[z].T, np.float64)
        found = median.reshape(grid.shape)[:, :, z]
        return cls(str(row["sky"]), int(number(row, "seed")), truth, found, extent, probability)


def draw(rows: Sequence[Row], shown: Sequence[Shown], edges: Sequence[float]) -> Figure:
    """One sky of each kind, true and found; then PIT, coverage and correlation by distance."""
    first = {sky.kind: sky for sky in reversed(shown)}
    figure, axes = panels(2, 4)
    for pair, sky in zip((axes[0:2], axes[2:4]), reversed(first.values()), strict=False):
        _slices(pair, sky)
    _pit(axes[4], shown)
    _by_distance(axes[5], rows, edges, "density_coverage68_by_distance", "coverage of 68 %")
    axes[5].axhline(0.683, color="0.6", linewidth=1)
    _by_distance(axes[6], rows, edges, "density_correlation_by_distance", "correlation of ln ρ")
    _coverage(axes[7], rows)
    return figure


def _slices(axes: Sequence[Axes], sky: Shown) -> None:
    low, high = np.quantile(sky.truth, [0.01, 0.995])
    for axis, field, what in zip(axes, (sky.truth, sky.found), ("truth", "median"), strict=True):
        image = axis.imshow(
            field.T, origin="lower", extent=sky.extent, norm=LogNorm(low, high), cmap="inferno"
        )
        label(axis, f"{sky.kind} sky {sky.seed}: {what}", "X [pc]", "Y [pc]")
        axis.grid(False)
        axis.plot(0, 0, marker="o", color="white", markersize=3)
    assert axes[1].figure is not None
    axes[1].figure.colorbar(image, ax=axes[1], shrink=0.85, label="density [mag/pc]")


def _pit(axes: Axes, shown: Sequence[Shown]) -> None:
    for sky in shown:
        ordered = np.sort(sky.probability)
        fraction = (np.arange(len(ordered)) + 0.5) / len(ordered)
        axes.plot(ordered, fraction - ordered, color=_COLOURS.get(sky.kind, ORANGE), linewidth=1)
    axes.axhline(0.0, color="0.6", linewidth=1)
    label(axes, "PIT of held-out extinctions", "probability p", "fraction below p, less p")


def _by_distance(
    axes: Axes, rows: Sequence[Row], edges: Sequence[float], key: str, title: str
) -> None:
    centres = 0.5 * (np.array(edges[1:]) + np.array(edges[:-1]))
    for row in rows:
        values = np.asarray(row[key], np.float64)
        colour = _COLOURS.get(str(row["sky"]), ORANGE)
        axes.plot(centres, values, marker="o", color=colour, linewidth=1, markersize=3)
    label(axes, f"density: {title}", "distance from the Sun [pc]", title)


def _coverage(axes: Axes, rows: Sequence[Row]) -> None:
    places = np.arange(len(rows))
    marks = (("extinction_coverage68", "o", "noisy"), ("extinction_true_coverage68", "s", "true"))
    for key, marker, name in marks:
        values = [number(row, key) for row in rows]
        axes.plot(places, values, marker, label=name, color=BLUE if marker == "o" else ORANGE)
    axes.axhspan(0.64, 0.72, color="0.92")
    axes.set_xticks(places, [f"{str(row['sky'])[0]}{row['seed']}" for row in rows])
    label(axes, "extinctions: coverage of 68 %", "sky", "coverage")
    axes.legend(fontsize=7, frameon=False)
