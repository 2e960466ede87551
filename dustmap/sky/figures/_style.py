"""How pictures look: sizes for print, fonts, labels with units, colours and their scales.

Limits of colour scales are percentiles of what is shown, and the scale is stretched to suit it.
`save_figure` writes a picture, whole or not at all.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import AsinhNorm, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from dustmap import __version__
from dustmap.errors import UserError
from dustmap.sky.systems import ExtinctionSystem
from dustmap.tables import replacing

#: Widths of the columns of journals, in inches. Text has the size in which it is printed.
ONE_COLUMN, TWO_COLUMNS = 3.5, 7.1
SMALL = 7.0
#: Perceptually uniform, and told apart by colour-blind eyes and in grey.
DENSITY_COLOURS = "inferno"
INTEGRAL_COLOURS = "magma"
SPREAD_COLOURS = "cividis"
SIGNED_COLOURS = "RdBu_r"
#: Where a map says nothing.
OUTSIDE_COLOUR = "0.8"
#: Colours of curves: blue, vermilion and grey of Okabe and Ito's palette.
MODEL_COLOUR, TRUTH_COLOUR, STAR_COLOUR = "#0072B2", "#D55E00", "0.35"
_PICTURES = (".png", ".pdf")
#: Dots per inch of PNG files, and of images in PDF files.
_DPI = 300
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 8.0,
    "figure.titlesize": 9.0,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "hatch.linewidth": 0.35,
    "axes.grid": False,
    "image.origin": "upper",
    "text.usetex": False,
    "figure.facecolor": "white",
    "savefig.bbox": None,
    # TrueType: text stays text, which editors and search find.
    "pdf.fonttype": 42,
}
Array: TypeAlias = NDArray[np.float64]
Extend: TypeAlias = Literal["neither", "min", "max", "both"]
#: Percentiles of the values within the limits.
_SHOWN_PERCENTILES = (0.5, 99.5)
#: A logarithmic scale spans no more than this factor, nor less than the other one.
MOST_SPAN, LEAST_SPAN = 300.0, 3.0
#: A linear scale that does not begin at zero spans at least this factor.
LEAST_RISE = 1.1
#: Part of a bar between ticks, at least.
_APART = 0.1
#: Below so many decades, the ticks within each.
_SUBDIVISIONS = (
    (1.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
    (1.8, (1.0, 2.0, 5.0)),
    (3.0, (1.0, 3.0)),
    (np.inf, (1.0,)),
)


#: Applies the style of this package; the user's settings are untouched afterwards.
styled = functools.partial(mpl.rc_context, _STYLE)


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, that no window knows."""
    return Figure(figsize=(width, height), layout="compressed", dpi=_DPI)


def fix_ticks(axis: Axes) -> None:
    """Fix the size of tick labels, which are made only when drawn."""
    axis.tick_params(labelsize=SMALL, width=0.6, length=2.5)


def note(axis: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Write small text at fractions of an axis."""
    axis.text(x, y, text, transform=axis.transAxes, fontsize=SMALL, va="bottom", **look)


def outlined(size: float = SMALL) -> dict[str, Any]:
    """Return properties of light text with a thin dark outline, which is read on any colour."""
    outline = [withStroke(linewidth=1.4, foreground="black")]
    return {"color": "white", "fontsize": size, "path_effects": outline}


def save_figure(
    figure: Figure, path: str | Path, overwrite: bool = False, history: Sequence[str] = ()
) -> None:
    """Write a PNG or PDF, by the name's ending, whole or not at all.

    history: lines on where it comes from, kept in the file beside the version of this package.
    """
    path = Path(path)
    check_picture(path)
    kind, creator = path.suffix[1:].lower(), f"dustmap {__version__}"
    names = ("Software", "Description") if kind == "png" else ("Creator", "Subject")
    metadata: dict[str, Any] = dict(zip(names, (creator, "\n".join(history)), strict=True))
    if kind == "pdf":
        metadata["CreationDate"] = None  # the same figure, the same bytes
    with replacing(path, overwrite) as partial, styled():
        figure.savefig(partial, dpi=_DPI, format=kind, metadata=metadata)


def check_picture(path: str | Path) -> None:
    """Refuse a name that `save_figure` would refuse, before anything is computed."""
    if Path(path).suffix.lower() not in _PICTURES:
        raise UserError(f"{path}: expected a picture that ends in {' or '.join(_PICTURES)}")


def symbol_of(system: ExtinctionSystem) -> str:
    """Return the name of a system: A_V becomes $A_V$, others stay words."""
    name = system.name.removeprefix("custom:")
    head, _, index = name.partition("_")
    if len(head) == 1 and index.isalnum():
        return f"${head}_\\mathrm{{{index}}}$" if len(index) > 1 else f"${head}_{index}$"
    words = name.replace("_", " ").replace("$", "")
    # The minus of a colour, B - V; other hyphens are hyphens.
    return re.sub(r"\((\w+)-(\w+)\)", "(\\1\N{MINUS SIGN}\\2)", words)


def unit_of(system: ExtinctionSystem) -> str:
    """Return the unit of extinctions."""
    return "e-folds" if system.name.startswith("e-folding") else "mag"


def density_of(system: ExtinctionSystem) -> str:
    """Return the symbol of a density."""
    return f"$\\rho$ in {symbol_of(system)}"


def density_unit(system: ExtinctionSystem) -> str:
    """Return the unit on axes and bars, which count thousandths."""
    return f"$10^{{-3}}$ {unit_of(system)} pc$^{{-1}}$"


def signed(value: float) -> str:
    """Format +5, −5 and 0, with a minus sign and not a hyphen."""
    return f"{value:+g}".replace("-", "\N{MINUS SIGN}") if value else "0"


def plain(value: float) -> str:
    """Format 5, 0.05, 1500 and −5, with a minus sign and no power of ten."""
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")


@final
@dataclass(frozen=True, eq=False)
class Scale:
    """Values to colours; `extend` tells on which sides values lie beyond the limits."""

    norm: Normalize
    colours: str
    extend: Extend

    @property
    def look(self) -> dict[str, Any]:
        """Norm and colours of an image, with the one of places without a value."""
        colours = ScalarMappable(cmap=self.colours).get_cmap().with_extremes(bad=OUTSIDE_COLOUR)
        return {"norm": self.norm, "cmap": colours}

    def bar(self, figure: Figure, image: ScalarMappable, axis: Axes, label: str) -> Colorbar:
        """Draw the labelled bar to the right of `axis`, as high as it."""
        place = axis.inset_axes((1.03, 0.0, 0.045, 1.0))
        return self._finish(figure.colorbar(image, cax=place, extend=self.extend), label)

    def bar_below(self, figure: Figure, image: ScalarMappable, axis: Axes, label: str) -> Colorbar:
        """Draw the labelled bar below `axis`."""
        place = axis.inset_axes((0.08, -0.1, 0.84, 0.045))
        bar = figure.colorbar(image, cax=place, extend=self.extend, orientation="horizontal")
        return self._finish(bar, label)

    def shared_bar(self, figure: Figure, axes: Sequence[Axes], label: str) -> Colorbar:
        """Draw the labelled bar below all of `axes`."""
        image = ScalarMappable(**self.look)
        look: dict[str, Any] = {"orientation": "horizontal", "shrink": 0.6, "aspect": 45.0}
        bar = figure.colorbar(image, ax=list(axes), extend=self.extend, pad=0.02, **look)
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
        bar.formatter = FuncFormatter(lambda value, _: plain(value))
        bar.minorlocator = NullLocator()
        bar.update_ticks()
        bar.outline.set_linewidth(0.6)
        fix_ticks(bar.ax)
        return bar


def density_scale(*values: Array, colours: str = DENSITY_COLOURS) -> Scale:
    """Make a logarithmic scale where all values are positive, as log-normal densities are; else
    asinh, which is linear about zero."""
    shown, low, high = _shown(values)
    if shown.size and shown.min() > 0.0:
        low = max(low, high / MOST_SPAN)
        if high < LEAST_SPAN * low:
            middle = np.sqrt(low * high)
            low, high = middle / np.sqrt(LEAST_SPAN), middle * np.sqrt(LEAST_SPAN)
        return _scale(LogNorm(low, high), colours, shown)
    low, high = min(low, 0.0), max(high, 0.0)
    if high <= low:
        high = 1.0
    return _scale(AsinhNorm(max(abs(low), abs(high)) / 10.0, low, high), colours, shown)


def spread_scale(*values: Array) -> Scale:
    """Make a linear scale, from zero, or where the values begin if they hardly vary; from zero,
    too, if they are alike, for that is what there is to see."""
    shown, low, high = _shown(values)
    if low < 0.5 * high or high < LEAST_RISE * low:
        low = 0.0
    if high <= low:
        low, high = 0.0, high or 1.0
    return _scale(Normalize(low, high), SPREAD_COLOURS, shown)


def signed_scale(limit: float, *values: Array) -> Scale:
    """Make a linear scale from −limit to limit, white at zero."""
    return _scale(Normalize(-limit, limit), SIGNED_COLOURS, _shown(values)[0])


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
    """Make a logarithmic scale from 1 to the largest of counts."""
    return Scale(LogNorm(1.0, max(10.0, float(counts.max()))), SPREAD_COLOURS, "neither")


def _shown(values: tuple[Array, ...]) -> tuple[Array, float, float]:
    """Join the finite values, and return the percentiles that a scale reaches; the extremes where
    all but few values are the same."""
    joined = np.concatenate([np.ravel(v) for v in values])
    shown = np.asarray(joined[np.isfinite(joined)], np.float64)
    low, high = np.percentile(shown, _SHOWN_PERCENTILES) if shown.size else (0.0, 1.0)
    if shown.size and low == high:
        low, high = shown.min(), shown.max()
    return shown, float(low), float(high)


def _scale(norm: Normalize, colours: str, shown: Array) -> Scale:
    """Make the scale of a norm, which says on which sides it leaves values out."""
    low, high = norm.vmin, norm.vmax
    assert low is not None
    assert high is not None
    below = bool(shown.size and shown.min() < low * (1 - 1e-9 * np.sign(low)))
    above = bool(shown.size and shown.max() > high * (1 + 1e-9 * np.sign(high)))
    extend: Extend = "max" if above else "neither"
    if below:
        extend = "both" if above else "min"
    return Scale(norm, colours, extend)
