"""The figure of `preconditioner`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number


@final
@dataclass(frozen=True)
class Curve:
    """(fraction of CG's steps, RMSE of the solution) after k steps, for CG and PCG."""

    M: int
    ratio: float
    cg: list[tuple[float, float]]
    pcg: list[tuple[float, float]]


_METHODS = {
    "cg": ("CG", style.BLACK),
    "pcg": ("PCG, padded torus", style.BLUE),
    "minimal": ("PCG, minimal embedding", style.GOLD),
    "published": ("PCG, as published", style.ORANGE),
}


def draw(curves: Sequence[Curve], box: Sequence[Row], sweep: Sequence[Row]) -> Figure:
    """Convergence in the plane, steps in the thin box, and the sweep of C.1."""
    figure, axes = style.panels(2, 2, 5.0, 3.6)
    _convergence(axes[0], curves)
    _thin_box(axes[1], box)
    for panel, scale in zip(axes[2:], (0.05, 0.5), strict=True):
        _sweep(panel, [row for row in sweep if row["ell"] == scale], scale)
    return figure


def _convergence(axes: Axes, curves: Sequence[Curve]) -> None:
    title = "2-D, Matérn-5/2, to 1e-10"
    style.label(axes, title, "steps / steps of CG", "RMSE of the solution")
    for curve, colour in zip(curves, style.COLOURS, strict=False):
        axes.plot(*zip(*curve.cg, strict=True), color=colour, linestyle="--")
        axes.plot(
            *zip(*curve.pcg, strict=True),
            color=colour,
            label=f"M = {curve.M:,}, ℓ/h = {curve.ratio}",
        )
    axes.plot([], [], color="0.4", label="PCG")
    axes.plot([], [], color="0.4", linestyle="--", label="CG")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _thin_box(axes: Axes, rows: Sequence[Row]) -> None:
    title = "15 × 15 × 5, Matérn-3/2, to 1e-6"
    style.label(axes, title, "ℓ (box 0.5 × 0.5 × 0.1)", "steps (median)")
    scales = (0.05, 0.1, 0.2)
    for shift, (method, (name, colour)) in enumerate(_METHODS.items()):
        found = [_row(rows, method, scale) for scale in scales]
        places = [i + 0.2 * (shift - 1.5) for i in range(len(scales))]
        steps = [number(row, "steps") for row in found]
        bars = axes.bar(places, steps, width=0.18, color=colour, label=name)
        capped = [row["worst_status"] == "max_steps" for row in found]
        signs = [f"{'>' if cut else ''}{n:.0f}" for n, cut in zip(steps, capped, strict=True)]
        axes.bar_label(bars, signs, fontsize=7, padding=1)
    axes.set_xticks(range(len(scales)), [str(scale) for scale in scales])
    axes.set_yscale("log")
    axes.set_ylim(10, 20_000)
    axes.legend(frameon=False, fontsize=7.5, loc="upper left", ncols=2)


def _row(rows: Sequence[Row], method: str, scale: float) -> Row:
    for row in rows:
        if row["rtol"] == 1e-6 and (row["method"], row.get("ell")) == (method, scale):
            return row
    raise KeyError((method, scale))


def _sweep(axes: Axes, rows: Sequence[Row], scale: float) -> None:
    title = f"1-D, [0, 2], ℓ = {scale}, to 1e-10"
    style.label(axes, title, "M", "r_pcg = PCG steps / CG steps")
    kernels = list(dict.fromkeys(str(row["kernel"]) for row in rows))
    for kernel, colour, marker in zip(kernels, style.COLOURS, style.MARKERS, strict=False):
        found = [row for row in rows if row["kernel"] == kernel and row["r_pcg"] is not None]
        xs, ys = ([number(row, key) for row in found] for key in ("M", "r_pcg"))
        axes.plot(xs, ys, color=colour, marker=marker, markersize=4, label=kernel)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, fontsize=8)
