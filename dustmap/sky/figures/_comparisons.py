"""Extinctions side by side: measured ones and their predictions, those of a map and of another.

Residuals on the sky, measured against predicted, and whether predictions keep what their standard
deviations promise: of a predictive distribution P that is right, the probability integral
transform P(less than measured) is uniform in (0, 1).
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy.stats import binom

from dustmap.errors import UserError
from dustmap.sky.agreement import Comparison, Pairs, distance_edges
from dustmap.sky.agreement._scores import INTEGRATED
from dustmap.sky.figures import _style as style
from dustmap.sky.figures._panels import Panel, quantity_of
from dustmap.sky.figures._sky_images import Pixels, SkyCells, graticule, whole_sky
from dustmap.sky.figures._style import Array

#: Ends of an axis across and of one up.
Extent: TypeAlias = tuple[float, float, float, float]

_PIT_BINS = 20
#: Chance that a point lies inside a grey range.
_CHANCE = 0.95
_LIKELY_RANGE: dict[str, Any] = {"color": "0.85", "linewidth": 0.0}
#: Where predictions keep what they promise.
_IDEAL: dict[str, Any] = {"color": "0.4", "linewidth": 0.8, "linestyle": (0, (4, 1.5))}
#: Nominal probabilities whose shares are printed: of ±1σ and of 95 %, as scores have them
#: (`dustmap.inference.Scores`, which this module does not import: pictures need no torch).
_PRINTED = (math.erf(math.sqrt(0.5)), 0.95)
#: Stars beyond which their number in cells is drawn instead of dots.
_MOST_DOTS = 3000
_GRID = 50
#: Standardised residuals that are drawn; how many lie beyond is printed.
_DRAWN_SIGMA = 6.0
#: Bins along the prediction at most, and stars in each at least.
_BINS, _PER_BIN = 8, 20
#: Where measured and predicted are the same.
_EQUAL = {**_IDEAL, "color": "0.2"}
#: Standard deviations that colours reach.
_COLOURED_SIGMA = 3.0
#: Stars in a cell, about.
_PER_CELL = 8
_PIXELS = Pixels.whole_sky(0.5)
#: Percentiles of the pairs that are shown.
_SHOWN = (0.1, 99.9)


def coverage_curve(pit: Array, nominal: Array) -> Array:
    """Return the share of transforms (N,) inside central intervals of `nominal` chances (K,)."""
    widths = np.sort(np.abs(2.0 * pit - 1.0))
    return np.searchsorted(widths, nominal, side="right") / len(pit)


@style.styled()
def calibration_figure(pit: Array) -> Figure:
    """Show whether N predictive distributions are as wide as they should be.

    pit (N,): probability integral transforms, the probability of less than what was measured.
    Their histogram is flat, and central intervals of nominal probability p hold a share p of the
    measurements: each point within its grey band 95 times in 100.
    """
    pit = np.asarray(pit, np.float64)
    if pit.ndim != 1 or len(pit) == 0 or not np.all((pit >= 0.0) & (pit <= 1.0)):
        raise UserError(f"pit: expected one or more numbers (N,) in 0 to 1, got {pit.shape}")
    figure = style.new_figure(style.TWO_COLUMNS, 3.1)
    axes = figure.subplot_mosaic(
        [["histogram", "coverage"], ["histogram", "difference"]], height_ratios=(2.2, 1.0)
    )
    _histogram(axes["histogram"], pit)
    _coverage(axes["coverage"], axes["difference"], pit)
    figure.suptitle(f"Calibration of predicted measurements: {len(pit):,} held-out stars")
    for axis in axes.values():
        style.fix_ticks(axis)
    return figure


def _histogram(axis: Axes, pit: Array) -> None:
    bins = min(_PIT_BINS, max(5, len(pit) // 15))
    counts, edges = np.histogram(pit, bins=bins, range=(0.0, 1.0))
    expected = len(pit) / bins
    low, high = (float(n) / expected for n in binom.interval(_CHANCE, len(pit), 1.0 / bins))
    axis.axhspan(low, high, label=f"{_CHANCE:.0%} of ideal bins", **_LIKELY_RANGE)
    axis.axhline(1.0, **_IDEAL)
    axis.stairs(
        counts / expected,
        edges,
        baseline=None,
        color=style.MODEL_COLOUR,
        linewidth=1.2,
        label="measured",
    )
    axis.set_xlim(0.0, 1.0)
    axis.set_ylim(0.0, 1.25 * max(float(counts.max() / expected), high))
    axis.set_xlabel("probability integral transform")
    axis.set_ylabel("stars in a bin / expected")
    axis.legend(loc="upper center", ncols=2)


def _coverage(above: Axes, below: Axes, pit: Array) -> None:
    nominal = np.linspace(0.0, 1.0, 101)
    curve = coverage_curve(pit, nominal)
    low, high = (edge / len(pit) for edge in binom.interval(_CHANCE, len(pit), nominal))
    for axis, base in ((above, 0.0 * nominal), (below, nominal)):
        axis.fill_between(nominal, low - base, high - base, **_LIKELY_RANGE)
        axis.plot(nominal, nominal - base, **_IDEAL)
        axis.plot(nominal, curve - base, color=style.MODEL_COLOUR)
        axis.set_xlim(0.0, 1.0)
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares = coverage_curve(pit, np.array(_PRINTED))
    above.plot(_PRINTED, shares, "o", markersize=3.5, color=style.TRUTH_COLOUR)
    below.plot(_PRINTED, shares - _PRINTED, "o", markersize=3.5, color=style.TRUTH_COLOUR)
    printed = [f"{p:.0%} intervals hold {s:.1%}" for p, s in zip(_PRINTED, shares, strict=True)]
    style.note(above, 0.97, 0.06, "\n".join(printed), ha="right", color=style.TRUTH_COLOUR)
    above.set_ylim(0.0, 1.0)
    above.tick_params(labelbottom=False)
    above.set_ylabel("share inside")
    below.set_ylabel("difference")
    below.set_xlabel("nominal probability of the central interval")


@style.styled()
def extinction_figure(compared: Comparison) -> Figure:
    """Draw measured against predicted extinctions, and their standardised difference."""
    figure = style.new_figure(style.TWO_COLUMNS, 3.1)
    left, right = figure.subplots(1, 2)
    symbol = f"{style.symbol_of(compared.system)} [{style.unit_of(compared.system)}]"
    _against_each_other(figure, left, compared)
    left.set_ylabel(f"measured {symbol}")
    _standardised(figure, right, compared)
    right.set_ylabel(compared.label)
    for axis in (left, right):
        axis.set_xlabel(f"predicted {symbol}")
        style.fix_ticks(axis)
    figure.suptitle(f"Extinctions of {len(compared):,} held-out stars")
    return figure


def _against_each_other(figure: Figure, axis: Axes, compared: Comparison) -> None:
    ends = _ends(np.concatenate([compared.predicted, compared.measured]))
    _dots(figure, axis, compared.predicted, compared.measured, (*ends, *ends), compared.std)
    axis.plot(ends, ends, **_EQUAL)
    axis.set_xlim(ends)
    axis.set_ylim(ends)
    axis.set_aspect("equal")


def _ends(values: Array) -> tuple[float, float]:
    """Return the limits of an axis that shows all values."""
    margin = 0.05 * float(np.ptp(values)) + 1e-9
    return float(values.min()) - margin, float(values.max()) + margin


def _standardised(figure: Figure, axis: Axes, compared: Comparison) -> None:
    x, z = compared.predicted, compared.standardised
    limit = min(_DRAWN_SIGMA, max(4.0, 1.1 * float(np.abs(z).max())))
    ends = _ends(x)
    _dots(figure, axis, x, z, (*ends, -limit, limit), None)
    axis.axhline(0.0, **_EQUAL)
    _running(axis, x, z)
    beyond = int((np.abs(z) > limit).sum())
    if beyond:
        style.note(axis, 0.03, 0.03, f"{beyond:,} beyond")
    axis.set_xlim(ends)
    axis.set_ylim(-limit, limit)
    axis.legend(loc="upper right")


def _numbers(figure: Figure, axis: Axes, x: Array, y: Array, extent: Extent, what: str) -> None:
    """Draw how many points lie in each hexagon, with a bar."""
    cells = axis.hexbin(x, y, gridsize=_GRID, extent=extent, mincnt=1, linewidths=0.1)
    scale = style.count_scale(np.asarray(cells.get_array(), np.float64))
    cells.set(**scale.look)
    cells.set_rasterized(True)
    scale.bar(figure, cells, axis, what)


def _dots(
    figure: Figure, axis: Axes, x: Array, y: Array, extent: Extent, error: Array | None
) -> None:
    """Draw dots with vertical errors, or the number of stars in hexagons if there are too many."""
    if len(x) > _MOST_DOTS:
        _numbers(figure, axis, x, y, extent, "stars")
        return
    if error is not None:
        bars = axis.vlines(
            x, y - error, y + error, color=style.MODEL_COLOUR, linewidth=0.4, alpha=0.35
        )
        bars.set_rasterized(True)
    (dots,) = axis.plot(x, y, ".", markersize=2.5, color=style.MODEL_COLOUR, alpha=0.8)
    dots.set_rasterized(True)


def _running(axis: Axes, x: Array, z: Array) -> None:
    """Draw mean and deviation in bins of equally many stars along the prediction."""
    order = np.argsort(x)
    bins = np.array_split(order, int(np.clip(len(order) // _PER_BIN, 1, _BINS)))
    mean = np.array([z[part].mean() for part in bins])
    spread = np.array([z[part].std() for part in bins])
    centre = [x[part].mean() for part in bins]
    dots: dict[str, Any] = {"fmt": "o", "markersize": 3.5, "color": style.TRUTH_COLOUR}
    axis.errorbar(centre, mean, spread, elinewidth=1.0, label="mean and deviation", **dots)


@style.styled()
def residual_figure(compared: Comparison) -> Figure:
    """Draw standardised residuals on the sky: every star, and cells of many.

    Of a cell with n stars their mean times √n is shown, which like a single residual is standard
    normal where all is well.
    """
    figure = style.new_figure(style.TWO_COLUMNS, 2.7)
    left, right = figure.subplots(1, 2, subplot_kw={"projection": "mollweide"})
    z = compared.standardised
    scale = style.signed_scale(_COLOURED_SIGMA, z)
    left.set_facecolor(style.OUTSIDE_COLOUR)
    dots = left.scatter(
        -np.radians((compared.l + 180.0) % 360.0 - 180.0),
        np.radians(compared.b),
        c=z,
        s=float(np.clip(4000.0 / len(z), 0.5, 9.0)),
        linewidths=0.0,
        **scale.look,
    )
    dots.set_rasterized(True)
    graticule(left)
    left.set_title("1 star" if len(z) == 1 else f"{len(z):,} stars")
    scale.bar_below(figure, dots, left, compared.label)
    panel = _cells(compared)
    mesh = whole_sky(right, _PIXELS, panel)
    right.set_title(panel.title)
    panel.scale.bar_below(figure, mesh, right, panel.quantity)
    figure.suptitle(f"Residuals of measured {style.symbol_of(compared.system)}")
    return figure


def _cells(compared: Comparison) -> Panel:
    """Put residuals of cells on the pixels of the sky; NaN where a cell has no stars."""
    cells = SkyCells.holding(len(compared), _PER_CELL)
    of_star = cells.of(compared.l, compared.b)
    counts = np.bincount(of_star, minlength=len(cells))
    total = np.bincount(of_star, compared.standardised, minlength=len(cells))
    values: Array = np.divide(
        total, np.sqrt(counts), out=np.full(len(cells), np.nan), where=counts > 0
    )
    l, b = np.meshgrid(_PIXELS.longitudes, _PIXELS.latitudes)
    shown = values[cells.of(l, b)]
    typical = int(np.median(counts[counts > 0]))
    title = f"cells of about {typical} (grey: no stars)"
    return Panel(
        title, shown, style.signed_scale(_COLOURED_SIGMA, values), "mean of a cell × √stars"
    )


@style.styled()
def agreement_figure(compared: Sequence[Pairs]) -> Figure:
    """Draw a row for each set of pairs: numbers of pairs, bias and RMSE, slope and correlation.

    The last two panels are by distance from the Sun, in the bins of the table that have pairs, at
    the mean distance of these.
    """
    if not compared:
        raise UserError("compare: expected one other map or catalog at least")
    figure = style.new_figure(style.TWO_COLUMNS, 2.35 * len(compared) + 0.2)
    rows = figure.subplots(len(compared), 3, squeeze=False)
    edges = distance_edges(compared)
    for (left, middle, right), pairs in zip(rows, compared, strict=True):
        _pairs(figure, left, pairs)
        _scores(middle, right, pairs, edges)
        for axis in (left, middle, right):
            style.fix_ticks(axis)
    for axis in rows[-1, 1:]:
        axis.set_xlabel("distance [pc]")
    return figure


def _pairs(figure: Figure, axis: Axes, pairs: Pairs) -> None:
    factor, quantity, unit = quantity_of(pairs.system, pairs.kind == INTEGRATED)
    both = factor * np.stack([pairs.theirs, pairs.ours])
    low, high = np.percentile(both, _SHOWN)
    low, high = min(float(low), 0.0), max(float(high), float(low) + 1e-9)
    _numbers(figure, axis, both[0], both[1], (low, high, low, high), "pairs")
    axis.plot((low, high), (low, high), **_EQUAL)
    score = pairs.score()
    words = f"slope {score.slope:.2f}, correlation {score.correlation:.2f}"
    axis.set_title(words.replace("-", "\N{MINUS SIGN}"))
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_aspect("equal")
    axis.set_xlabel(f"{pairs.name}: {quantity} [{unit}]")
    axis.set_ylabel(f"this map [{unit}]")


def _scores(spread: Axes, line: Axes, pairs: Pairs, edges: Sequence[float]) -> None:
    """Draw bias and RMSE on one axis, slope and correlation on the other, against distance."""
    factor, _, unit = quantity_of(pairs.system, pairs.kind == INTEGRATED)
    bins = [part for what, _, _, part in pairs.bins(edges) if what == "distance" and len(part)]
    middle = np.array([part.distance.mean() for part in bins])
    scores = [part.score() for part in bins]

    def curve(name: str) -> Array:
        return np.array([getattr(score, name) for score in scores], np.float64)

    looks: tuple[dict[str, Any], ...] = (
        {"color": style.MODEL_COLOUR, "marker": "o", "markersize": 3.0},
        {"color": style.TRUTH_COLOUR, "marker": "s", "markersize": 3.0},
    )
    for name, look in zip(("rmse", "bias"), looks, strict=True):
        label = "RMSE" if name == "rmse" else name
        spread.plot(middle, factor * curve(name), label=label, **look)
    for name, look in zip(("slope", "correlation"), looks, strict=True):
        line.plot(middle, curve(name), label=name, **look)
    spread.axhline(0.0, **_EQUAL)
    line.axhline(1.0, **_EQUAL)
    spread.set_ylabel(f"{pairs.kind} [{unit}]")
    low, high = line.get_ylim()
    line.set_ylim(min(0.0, low), max(1.08, high))
    for axis in (spread, line):
        axis.set_xlim(0.0, 1.04 * edges[-1])
        axis.legend(loc="best")


def held_out_figure(name: str, compared: Comparison) -> Figure:
    """Draw what a run says of stars that it has held out: extinctions, residuals or calibration."""
    match name:
        case "extinctions":
            return extinction_figure(compared)
        case "residuals":
            return residual_figure(compared)
        case _:
            return calibration_figure(compared.pit)
