"""The figure of `spatial`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_METHODS = {
    "HIP-GP": (style.BLUE, "o", "-"),
    "Cholesky-SVGP": (style.ORANGE, "s", "--"),
    "HIP-GP mean by CG": (style.GREEN, "^", ":"),
    "gpytorch SVGP": (style.PINK, "D", ""),
}


@final
@dataclass(frozen=True, eq=False)
class Map:
    """Posterior mean and std (n, n) over the box, first axis east, and the data's places."""

    name: str
    quantity: str
    extent: tuple[float, float, float, float]
    mean: Tensor
    std: Tensor
    x: Tensor


def draw(found: Map, rows: Sequence[Row], quantities: Mapping[str, str]) -> Figure:
    """Maps of one data set; error against M for each; times; early stopping.

    quantities: what each data set measures, by its name.
    """
    figure, axes = style.panels(2, 3, 4.6, 3.7)
    _map(axes[0], found, found.mean, f"{found.name}: mean", found.quantity, "cividis")
    _map(axes[1], found, found.std, "Posterior standard deviation, and data", "std", "viridis")
    axes[1].plot(found.x[:, 0], found.x[:, 1], ",", color="white", alpha=0.3)
    axes[1].axis(found.extent)
    for panel, (name, unit) in zip(axes[2:4], quantities.items(), strict=True):
        _errors(panel, name, unit, [row for row in rows if row["data"] == name])
    _times(axes[4], found.name, [row for row in rows if row["data"] == found.name])
    _early_stop(axes[5], [row for row in rows if row["part"] == "early stop"])
    return figure


def _map(axes: Axes, found: Map, values: Tensor, title: str, unit: str, colours: str) -> None:
    style.label(axes, title, "east / km", "north / km")
    axes.grid(False)
    image = axes.imshow(
        values.T.numpy(), origin="lower", extent=found.extent, cmap=colours, aspect="equal"
    )
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=unit, shrink=0.85)


def _errors(axes: Axes, name: str, unit: str, rows: Sequence[Row]) -> None:
    style.label(axes, name, "inducing points M", f"test RMSE, {unit}")
    _lines(axes, rows, ("scaling", "mean"), "rmse")
    _sizes(axes, rows)
    axes.legend(frameon=False, fontsize=8)


def _times(axes: Axes, name: str, rows: Sequence[Row]) -> None:
    style.label(axes, f"{name}: time", "inducing points M", "seconds")
    for method, (colour, marker, dashes) in _METHODS.items():
        mine = [row for row in rows if row["method"] == method and row["part"] != "early stop"]
        if "direct_s" in (mine[0] if mine else {}):
            total = [number(row, "total_s") for row in mine]
            xs = [number(row, "M") for row in mine]
            axes.plot(xs, total, dashes, color=colour, marker=marker, label=f"{method}: everything")
        epochs = [row for row in mine if "epoch_s" in row]
        if epochs:
            xs, ys = ([number(row, key) for row in epochs] for key in ("M", "epoch_s"))
            label = f"{method}: SVI epoch"
            axes.plot(xs, ys, dashes, color=colour, marker=marker, mfc="white", lw=1, label=label)
    _sizes(axes, rows)
    axes.set_yscale("log")
    axes.set_ylim(top=20.0 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper left")


def _early_stop(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = " and ".join(sorted({f"{number(row, 'M'):,.0f}" for row in rows}))
    style.label(axes, f"PCG stopped early, M = {sizes}", "PCG steps", "test RMSE / converged")
    names = dict.fromkeys(str(row["data"]) for row in rows)
    for name, colour, marker in zip(names, style.COLOURS, style.MARKERS, strict=False):
        mine = [row for row in rows if row["data"] == name]
        (converged,) = [number(row, "rmse") for row in mine if row["pcg_steps"] is None]
        stopped = [row for row in mine if row["pcg_steps"] is not None]
        xs = [number(row, "pcg_steps") for row in stopped]
        ys = [number(row, "rmse") / converged for row in stopped]
        axes.plot(xs, ys, color=colour, marker=marker, label=name)
        axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:.0f}" for x in xs])
    axes.axhline(1.0, color=style.BLACK, linestyle=":", linewidth=1)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.99), max(high, 1.02))
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)


def _sizes(axes: Axes, rows: Sequence[Row]) -> None:
    """A logarithmic axis of M with a tick at every M there is."""
    sizes = sorted({number(row, "M") for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{m:,.0f}" for m in sizes], fontsize=8)
    axes.minorticks_off()


def _lines(axes: Axes, rows: Sequence[Row], parts: tuple[str, ...], key: str) -> None:
    for method, (colour, marker, dashes) in _METHODS.items():
        mine = [row for row in rows if row["method"] == method and row["part"] in parts]
        mine = [row for row in mine if key in row]
        if mine:
            xs, ys = ([number(row, name) for row in mine] for name in ("M", key))
            axes.plot(xs, ys, dashes, color=colour, marker=marker, label=method)
