"""Residuals on the sky."""

import numpy as np
from matplotlib.figure import Figure

from dustmap.sky.figures._cells import Cells
from dustmap.sky.figures._comparisons import Array, Comparison
from dustmap.sky.figures._panels import Panel
from dustmap.sky.figures._scales import signed_scale
from dustmap.sky.figures._shells import graticule, whole_sky
from dustmap.sky.figures._sky_image import Pixels
from dustmap.sky.figures._style import (
    OUTSIDE_COLOUR,
    TWO_COLUMNS,
    new_figure,
    rasterize,
    styled,
)
from dustmap.sky.figures._words import symbol_of

#: Standard deviations that colours reach.
_MOST_SIGMA = 3.0
#: Stars in a cell, about.
_PER_CELL = 8


@styled()
def residual_figure(compared: Comparison) -> Figure:
    """Standardised residuals on the sky: every star, and cells of many.

    Of a cell with n stars their mean times √n is shown, which like a single residual is standard
    normal where all is well.
    """
    figure = new_figure(TWO_COLUMNS, 2.7)
    left, right = figure.subplots(1, 2, subplot_kw={"projection": "mollweide"})
    z = compared.standardised
    scale = signed_scale(_MOST_SIGMA, z)
    left.set_facecolor(OUTSIDE_COLOUR)
    dots = left.scatter(
        -np.radians((compared.l + 180.0) % 360.0 - 180.0),
        np.radians(compared.b),
        c=z,
        s=float(np.clip(4000.0 / len(z), 0.5, 9.0)),
        cmap=scale.colormap(),
        norm=scale.norm,
        linewidths=0.0,
    )
    rasterize(dots)
    graticule(left)
    left.set_title("1 star" if len(z) == 1 else f"{len(z):,} stars")
    scale.bar_below(figure, dots, left, compared.label)
    panel = _cells(compared)
    mesh = whole_sky(right, _PIXELS, panel)
    panel.scale.bar_below(figure, mesh, right, panel.quantity)
    figure.suptitle(f"Residuals of {symbol_of(compared.system)}")
    return figure


_PIXELS = Pixels.whole_sky(0.5)


def _cells(compared: Comparison) -> Panel:
    """Residuals of cells on the pixels of the sky; NaN where a cell has no stars."""
    cells = Cells.holding(len(compared), _PER_CELL)
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
    return Panel(title, shown, signed_scale(_MOST_SIGMA, values), "mean of a cell × √stars")
