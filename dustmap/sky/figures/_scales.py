"""Colour scales: limits from percentiles, stretched to suit what is shown."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import AsinhNorm, Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from dustmap.sky.figures._style import (
    DENSITY_COLOURS,
    OUTSIDE_COLOUR,
    SIGNED_COLOURS,
    SPREAD_COLOURS,
    settle,
)

Array: TypeAlias = NDArray[np.float64]
Extend: TypeAlias = Literal["neither", "min", "max", "both"]

#: Percentiles of the values within the limits.
PERCENTILES = (0.5, 99.5)
#: A logarithmic scale spans no more than this factor, nor less than the other one.
MOST_SPAN, LEAST_SPAN = 300.0, 3.0
#: Part of a bar between ticks, at least.
_APART = 0.1
#: Below so many decades, the ticks within each.
_SUBDIVISIONS = (
    (1.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
    (1.8, (1.0, 2.0, 5.0)),
    (3.0, (1.0, 3.0)),
    (np.inf, (1.0,)),
)


@final
@dataclass(frozen=True, eq=False)
class Scale:
    """Values to colours; `extend` tells on which sides values lie beyond the limits."""

    norm: Normalize
    colours: str
    extend: Extend

    def colormap(self) -> Colormap:
        """The colours, with the one of places without a value."""
        return ScalarMappable(cmap=self.colours).get_cmap().with_extremes(bad=OUTSIDE_COLOUR)

    def bar(self, figure: Figure, image: ScalarMappable, axis: Axes, label: str) -> Colorbar:
        """The labelled bar to the right of `axis`, as high as it."""
        place = axis.inset_axes((1.03, 0.0, 0.045, 1.0))
        return self._finish(figure.colorbar(image, cax=place, extend=self.extend), label)

    def bar_below(self, figure: Figure, image: ScalarMappable, axis: Axes, label: str) -> Colorbar:
        """The labelled bar below `axis`."""
        place = axis.inset_axes((0.08, -0.1, 0.84, 0.045))
        bar = figure.colorbar(image, cax=place, extend=self.extend, orientation="horizontal")
        return self._finish(bar, label)

    def _finish(self, bar: Colorbar, label: str) -> Colorbar:
        bar.set_label(label)
        if isinstance(self.norm, LogNorm):
            assert self.norm.vmin is not None
            assert self.norm.vmax is not None
            decades = np.log10(self.norm.vmax / self.norm.vmin)
            subs = next(subs for most, subs in _SUBDIVISIONS if decades < most)
            bar.locator = LogLocator(subs=subs, numticks=50)
        elif isinstance(self.norm, AsinhNorm):
            bar.locator = FixedLocator(_asinh_ticks(self.norm))
        else:
            bar.locator = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
        bar.formatter = FuncFormatter(_plain)
        bar.minorlocator = NullLocator()
        bar.update_ticks()
        bar.outline.set_linewidth(0.6)
        settle(bar.ax)
        return bar


def density_scale(*values: Array, colours: str = DENSITY_COLOURS) -> Scale:
    """Logarithmic where every value is positive, as log-normal densities are; otherwise asinh,
    which is linear about zero."""
    shown = _finite(values)
    low, high = _percentiles(shown)
    if shown.size and shown.min() > 0.0:
        low = max(low, high / MOST_SPAN)
        if high < LEAST_SPAN * low:
            middle = np.sqrt(low * high)
            low, high = middle / np.sqrt(LEAST_SPAN), middle * np.sqrt(LEAST_SPAN)
        return Scale(LogNorm(low, high), colours, _extend(shown, low, high))
    low, high = min(low, 0.0), max(high, 0.0)
    if high <= low:
        high = 1.0
    width = max(abs(low), abs(high)) / 10.0
    return Scale(AsinhNorm(width, low, high), colours, _extend(shown, low, high))


def spread_scale(*values: Array) -> Scale:
    """Linear, from zero or where the values begin."""
    shown = _finite(values)
    low, high = _percentiles(shown)
    if low < 0.5 * high:
        low = 0.0
    if high <= low:
        low, high = 0.0, high or 1.0
    return Scale(Normalize(low, high), SPREAD_COLOURS, _extend(shown, low, high))


def signed_scale(limit: float, *values: Array) -> Scale:
    """Linear from −limit to limit, white at zero."""
    return Scale(Normalize(-limit, limit), SIGNED_COLOURS, _extend(_finite(values), -limit, limit))


def _asinh_ticks(norm: AsinhNorm) -> list[float]:
    """Zero, the ends' round numbers, and towards zero those that stay apart on the bar."""
    assert norm.vmin is not None
    assert norm.vmax is not None
    decade = np.floor(np.log10(max(-norm.vmin, norm.vmax)))
    sizes = np.outer(10.0 ** np.arange(decade - 2, decade + 1), (1.0, 2.0, 5.0)).ravel()[::-1]
    ticks = [0.0] if norm.vmin <= 0.0 <= norm.vmax else []
    for value in (sign * size for size in sizes for sign in (1.0, -1.0)):
        far = all(abs(float(norm(value)) - float(norm(tick))) > _APART for tick in ticks)
        if norm.vmin <= value <= norm.vmax and far:
            ticks.append(float(value))
    return sorted(ticks)


def count_scale(counts: Array) -> Scale:
    """Logarithmic from 1 to the largest of counts."""
    return Scale(LogNorm(1.0, max(10.0, float(counts.max()))), SPREAD_COLOURS, "neither")


def _finite(values: tuple[Array, ...]) -> Array:
    joined = np.concatenate([np.ravel(v) for v in values])
    return np.asarray(joined[np.isfinite(joined)], np.float64)


def _percentiles(shown: Array) -> tuple[float, float]:
    if shown.size == 0:
        return 0.0, 1.0
    low, high = np.percentile(shown, PERCENTILES)
    return float(low), float(high)


def _extend(shown: Array, low: float, high: float) -> Extend:
    below = bool(shown.size and shown.min() < low * (1 - 1e-9 * np.sign(low)))
    above = bool(shown.size and shown.max() > high * (1 + 1e-9 * np.sign(high)))
    if below:
        return "both" if above else "min"
    return "max" if above else "neither"


def _plain(value: float, _: object) -> str:
    """0.05, 3, 20, 1500: no powers of ten for numbers that people read."""
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")
