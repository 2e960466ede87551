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
    _map(axes[1], found, found.std, "Posterior standard deviation", "std", "viridis")
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
    axes.plot(found.x[:, 0], found.x[:, 1], ",", color="white", alpha=0.25)
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
            axes.plot(xs, total, dashes, color=colour, marker=marker, label=f"{method}, all")
        epochs = [row for row in mine if "epoch_s" in row]
        if epochs:
            xs, ys = ([number(row, key) for row in epochs] for key in ("M", "epoch_s"))
            label = f"{method}, an epoch"
            axes.plot(xs, ys, dashes, color=colour, marker=marker, mfc="white", lw=1, label=label)
    _sizes(axes, rows)
    axes.set_yscale("log")
    axes.set_ylim(top=20.0 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper left")


def _early_stop(axes: Axes, rows: Sequence[Row]) -> None:
    size = f"{number(rows[0], 'M'):,.0f}" if rows else "?"
    style.label(axes, f"PCG stopped early, M = {size}", "PCG steps", "test RMSE")
    stopped = [row for row in rows if row["pcg_steps"] is not None]
    xs, ys = ([number(row, key) for row in stopped] for key in ("pcg_steps", "rmse"))
    axes.plot(xs, ys, color=style.BLUE, marker="o", label="HIP-GP")
    for row in rows:
        if row["pcg_steps"] is None:
            text = "HIP-GP, converged" if row["method"] == "HIP-GP" else str(row["method"])
            colour, dashes = (
                (style.BLACK, ":") if row["method"] == "HIP-GP" else (style.ORANGE, "--")
            )
            axes.axhline(number(row, "rmse"), color=colour, linestyle=dashes, label=text)
    axes.set_xscale("log")
    axes.set_xticks(xs, [f"{x:.0f}" for x in xs])
    axes.minorticks_off()
    axes.set_ylim(0.99 * min(ys), max(1.01 * min(ys), axes.get_ylim()[1]))
    axes.legend(frameon=False, fontsize=8)


def _sizes(axes: Axes, rows: Sequence[Row]) -> None:
    """A logarithmic axis of M with a tick at every M there is."""
    sizes = sorted({number(row, "M") for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{m / 1000:g}k" for m in sizes])
    axes.minorticks_off()


def _lines(axes: Axes, rows: Sequence[Row], parts: tuple[str, ...], key: str) -> None:
    for method, (colour, marker, dashes) in _METHODS.items():
        mine = [row for row in rows if row["method"] == method and row["part"] in parts]
        mine = [row for row in mine if key in row]
        if mine:
            xs, ys = ([number(row, name) for row in mine] for name in ("M", key))
            axes.plot(xs, ys, dashes, color=colour, marker=marker, label=method)
