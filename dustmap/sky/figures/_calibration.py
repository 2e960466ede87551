"""Whether predictions keep what their standard deviations promise, as pictures."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy.stats import binom

from dustmap.sky.figures._comparisons import Array, coverage_curve
from dustmap.sky.figures._style import (
    MODEL_COLOUR,
    SMALL,
    TRUTH_COLOUR,
    TWO_COLUMNS,
    new_figure,
    settle,
    styled,
)

_PIT_BINS = 20
#: Chance that a point lies inside a grey band.
_CHANCE = 0.95
_BAND: dict[str, Any] = {"color": "0.85", "linewidth": 0.0}
_IDEAL: dict[str, Any] = {"color": "0.4", "linewidth": 0.8, "linestyle": (0, (4, 1.5))}
#: Nominal probabilities that are told in numbers.
_TOLD = (0.68, 0.95)


@styled()
def calibration_figure(pit: Array, of: str = "held-out stars") -> Figure:
    """Whether N predictive distributions are as wide as they should be.

    pit (N,): probability integral transforms, the probability of less than what was measured.
    Their histogram is flat, and central intervals of nominal probability p hold a share p of the
    measurements: each point within its grey band 95 times in 100.
    """
    pit = np.asarray(pit, np.float64)
    if pit.ndim != 1 or len(pit) == 0 or not np.all((pit >= 0.0) & (pit <= 1.0)):
        raise ValueError(f"pit: expected one or more numbers (N,) in 0 to 1, got {pit.shape}")
    figure = new_figure(TWO_COLUMNS, 3.1)
    axes = figure.subplot_mosaic(
        [["histogram", "coverage"], ["histogram", "difference"]], height_ratios=(2.2, 1.0)
    )
    _histogram(axes["histogram"], pit)
    _coverage(axes["coverage"], axes["difference"], pit)
    figure.suptitle(f"Calibration: {len(pit):,} {of}")
    for axis in axes.values():
        settle(axis)
    return figure


def _histogram(axis: Axes, pit: Array) -> None:
    bins = min(_PIT_BINS, max(5, len(pit) // 15))
    counts, edges = np.histogram(pit, bins=bins, range=(0.0, 1.0))
    expected = len(pit) / bins
    low, high = (float(n) / expected for n in binom.interval(_CHANCE, len(pit), 1.0 / bins))
    axis.axhspan(low, high, label=f"{_CHANCE:.0%} of ideal bins", **_BAND)
    axis.axhline(1.0, **_IDEAL)
    axis.stairs(
        counts / expected, edges, baseline=None, color=MODEL_COLOUR, linewidth=1.2, label="measured"
    )
    axis.set_xlim(0.0, 1.0)
    axis.set_ylim(0.0, 1.25 * max(float(counts.max() / expected), high))
    axis.set_xlabel("probability integral transform")
    axis.set_ylabel("stars in a bin / expected")
    axis.legend(loc="upper center", ncols=2)


def _coverage(above: Axes, below: Axes, pit: Array) -> None:
    nominal = np.linspace(0.0, 1.0, 101)
    found = coverage_curve(pit, nominal)
    low, high = (edge / len(pit) for edge in binom.interval(_CHANCE, len(pit), nominal))
    for axis, base in ((above, 0.0 * nominal), (below, nominal)):
        axis.fill_between(nominal, low - base, high - base, **_BAND)
        axis.plot(nominal, nominal - base, **_IDEAL)
        axis.plot(nominal, found - base, color=MODEL_COLOUR)
        axis.set_xlim(0.0, 1.0)
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares = coverage_curve(pit, np.array(_TOLD))
    above.plot(_TOLD, shares, "o", markersize=3.5, color=TRUTH_COLOUR)
    below.plot(_TOLD, shares - _TOLD, "o", markersize=3.5, color=TRUTH_COLOUR)
    told = [f"{p:.0%} intervals hold {s:.1%}" for p, s in zip(_TOLD, shares, strict=True)]
    above.text(
        0.97,
        0.06,
        "\n".join(told),
        transform=above.transAxes,
        ha="right",
        va="bottom",
        color=TRUTH_COLOUR,
        fontsize=SMALL,
    )
    above.set_ylim(0.0, 1.0)
    above.tick_params(labelbottom=False)
    above.set_ylabel("share inside")
    below.set_ylabel("difference")
    below.set_xlabel("nominal probability of the central interval")
