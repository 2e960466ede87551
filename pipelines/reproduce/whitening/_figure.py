"""The figure of `whitening`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number

_METHODS = {
    "cholesky": ("Cholesky", style.ORANGE, "s"),
    "ciq": ("CIQ", style.PINK, "D"),
    "hip": ("HIP-GP", style.BLUE, "o"),
    "torus": ("torus", style.GREEN, "^"),
    "fft pair": ("bare FFT pair", style.BLACK, "P"),
}
#: Table 1 of the paper, on one V100 GPU.
_PUBLISHED = ((1_000, 0.0045), (10_000, 0.0185), (100_000, 0.3475), (1_000_000, 1.4595))


def draw(rows: Sequence[Row]) -> Figure:
    """Times, times in units of the bare pair, and accuracies."""
    figure, axes = style.panels(1, 3, 4.6, 3.9)
    _times(axes[0], _select(rows, "Matérn-5/2", "float32"))
    _pairs(axes[1], rows)
    _errors(axes[2], rows)
    return figure


def _times(axes: Axes, rows: Sequence[Row]) -> None:
    style.label(axes, "200 observations, Matérn-5/2, float32", "inducing points M", "seconds")
    for method, (name, colour, marker) in _METHODS.items():
        mine = [row for row in rows if row["method"] == method]
        xs, ys = ([number(row, key) for row in mine] for key in ("M", "seconds"))
        dashes = ":" if method == "fft pair" else "-"
        axes.plot(xs, ys, dashes, color=colour, marker=marker, markersize=5, label=name)
        scaled = [row for row in mine if number(row, "timed") < 200]
        xs, ys = ([number(row, key) for row in scaled] for key in ("M", "seconds"))
        axes.plot(xs, ys, marker, color=colour, markersize=5, mfc="white")
    axes.plot(*zip(*_PUBLISHED, strict=True), "--", color="0.6", label="HIP-GP, published, GPU")
    axes.plot([], [], "o", color="0.4", mfc="white", label="from fewer observations")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=50 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper left")


def _pairs(axes: Axes, rows: Sequence[Row]) -> None:
    style.label(axes, "In bare FFT pairs, float32", "inducing points M", "time / bare FFT pair")
    kernels = list(dict.fromkeys(str(row["kernel"]) for row in rows))
    for kernel, dashes in zip(kernels, ("-", "--", "-.", ":"), strict=False):
        found = _select(rows, kernel, "float32")
        pair = {row["M"]: number(row, "seconds") for row in found if row["method"] == "fft pair"}
        for method in ("hip", "torus"):
            name, colour, marker = _METHODS[method]
            mine = [row for row in found if row["method"] == method]
            xs = [number(row, "M") for row in mine]
            ys = [number(row, "seconds") / pair[row["M"]] for row in mine]
            axes.plot(
                xs,
                ys,
                dashes,
                color=colour,
                marker=marker,
                markersize=4,
                label=f"{name}, {kernel}",
            )
    axes.axhline(1.0, color=style.BLACK, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_ylim(0.8, 8 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=7, ncols=2)


def _errors(axes: Axes, rows: Sequence[Row]) -> None:
    title = "Matérn-5/2: largest relative error of kᵀk"
    style.label(axes, title, "inducing points M", "error")
    for dtype, dashes, fill in (("float32", "-", None), ("float64", "--", "white")):
        for method in ("hip", "cholesky", "ciq"):
            name, colour, marker = _METHODS[method]
            mine = [row for row in _select(rows, "Matérn-5/2", dtype) if row["method"] == method]
            xs, ys = ([number(row, key) for row in mine] for key in ("M", "explained_error"))
            axes.plot(
                xs,
                ys,
                dashes,
                color=colour,
                marker=marker,
                markersize=5,
                mfc=fill or colour,
                label=f"{name}, {dtype}",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=7.5)


def _select(rows: Sequence[Row], kernel: str, dtype: str) -> list[Row]:
    return [row for row in rows if (row["kernel"], row["dtype"]) == (kernel, dtype)]
