"""How pictures look: sizes for print, fonts, colours; and how they are written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke

from dustmap import __version__
from dustmap.sky._outputs import replacing

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

#: Of curves: blue, vermilion and grey of Okabe and Ito's palette.
MODEL_COLOUR, TRUTH_COLOUR, STAR_COLOUR = "#0072B2", "#D55E00", "0.35"

FORMATS = (".png", ".pdf")
_DPI = 220
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


@contextmanager
def styled() -> Iterator[None]:
    """The style of this package, whatever the user's settings; they are untouched afterwards."""
    with mpl.rc_context(_STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that no window knows."""
    return Figure(figsize=(width, height), layout="compressed", dpi=_DPI)


def settle(axis: Axes) -> None:
    """Fixes the size of tick labels, which are made only when drawn."""
    axis.tick_params(labelsize=SMALL, width=0.6, length=2.5)


def outlined() -> list[AbstractPathEffect]:
    """A thin dark outline, for light text on any colour."""
    return [withStroke(linewidth=1.4, foreground="black")]


def rasterize(artist: Artist) -> None:
    """One bitmap in a PDF instead of a path for every cell; text and lines stay vectors."""
    artist.set_rasterized(True)


def save_figure(
    figure: Figure, path: str | Path, overwrite: bool = False, history: Sequence[str] = ()
) -> None:
    """Writes a PNG or PDF, by the name's ending, whole or not at all.

    history: lines on where it comes from, kept in the file beside the version of this package.
    """
    path = Path(path)
    check_picture(path)
    kind, creator = path.suffix[1:].lower(), f"dustmap {__version__}"
    names = ("Software", "Description") if kind == "png" else ("Creator", "Subject")
    metadata = dict(zip(names, (creator, "\n".join(history)), strict=True))
    with replacing(path, overwrite) as partial, styled():
        figure.savefig(partial, dpi=_DPI, format=kind, metadata=metadata)


def check_picture(path: str | Path) -> None:
    """Refuses a name that `save_figure` would refuse, before anything is computed."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: expected a picture that ends in {' or '.join(FORMATS)}")
