"""Mean, truth, uncertainty and difference beside each other, each with its scale."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from dustmap.sky.figures._style import (
    DENSITY_COLOURS,
    INTEGRAL_COLOURS,
    OUTSIDE_COLOUR,
    Array,
    Scale,
    density_of,
    density_scale,
    density_unit,
    signed_scale,
    spread_scale,
    symbol_of,
    unit_of,
)
from dustmap.sky.maps._quantities import DATA_DOMINATED
from dustmap.sky.systems import ExtinctionSystem

#: Colour bars count densities in 10⁻³ mag/pc, their size near the Sun.
PER_MILLE = 1e3
#: Differences are shown up to so many standard deviations.
_MOST_SIGMA = 3.0
#: Inches of a letter, and what of a formula is no letter.
_PER_LETTER = 0.066
_UNSEEN = r"\\mathrm|\\rho|[${}^_]"
_TRUTH, _MEAN = "truth", "posterior mean"
_HATCH = "////"
_HATCH_COLOUR = "0.75"


@final
@dataclass(frozen=True, eq=False)
class Panel:
    """One image: values (V, H) on a scale, whose bar says what in which unit they are."""

    title: str
    values: Array
    scale: Scale
    quantity: str
    unit: str = ""
    of_mean: bool = False

    def label_for(self, length: float) -> str:
        """Label of a bar of so many inches: in two lines where it is short."""
        whole = f"{self.quantity} [{self.unit}]" if self.unit else self.quantity
        if _PER_LETTER * len(re.sub(_UNSEEN, "", whole)) <= length:
            return whole
        return f"{self.quantity}\n[{self.unit}]" if self.unit else whole.replace(" / ", "\n/ ")


def panels_of(
    system: ExtinctionSystem, integrated: bool, mean: Array, std: Array | None, truth: Array | None
) -> tuple[Panel, ...]:
    """The truth if there is one and the mean, on one scale; then, of a map that knows its
    uncertainty, that and how far the mean is from the truth.

    The uncertainty is relative to the mean where that is positive everywhere.
    """
    factor = 1.0 if integrated else PER_MILLE
    quantity = symbol_of(system) if integrated else density_of(system)
    unit = unit_of(system) if integrated else density_unit(system)
    shown = {_TRUTH: truth, _MEAN if std is not None else "map": mean}
    scaled = {title: factor * values for title, values in shown.items() if values is not None}
    colours = INTEGRAL_COLOURS if integrated else DENSITY_COLOURS
    scale = density_scale(*scaled.values(), colours=colours)
    panels = [
        Panel(title, values, scale, quantity, unit, of_mean=title != _TRUTH)
        for title, values in scaled.items()
    ]
    if std is not None:
        panels.append(_spread(factor, unit, mean, std))
        if truth is not None:
            panels.append(_difference(mean, std, truth))
    return tuple(panels)


def _difference(mean: Array, std: Array, truth: Array) -> Panel:
    """Standard normal where all is well.

    Of positive values it is that of their logarithms, whose law with this mean and std is normal:
    ln x ~ N(ln μ − s²/2, s²) with s² = ln(1 + σ²/μ²). The values themselves are skewed, and a truth
    many σ above a small mean would be no surprise.
    """
    title = f"posterior \N{MINUS SIGN} {_TRUTH}"
    none = np.full_like(mean, np.nan)
    if _positive(mean) and _positive(truth):
        variance = np.log1p((std / mean) ** 2)
        ahead = np.log(mean / truth) - 0.5 * variance
        off = np.divide(ahead, np.sqrt(variance), out=none, where=variance > 0)
        words = "difference of ln / std. deviation"
    else:
        off = np.divide(mean - truth, std, out=none, where=std > 0)
        words = "difference / std. deviation"
    return Panel(title, off, signed_scale(_MOST_SIGMA, off), words)


def _positive(values: Array) -> bool:
    return bool(np.all(values[np.isfinite(values)] > 0))


def _spread(factor: float, unit: str, mean: Array, std: Array) -> Panel:
    if _positive(mean):
        ratio = std / mean
        return Panel("relative uncertainty", ratio, spread_scale(ratio), "std. deviation / mean")
    scaled = factor * std
    return Panel("uncertainty", scaled, spread_scale(scaled), "std. deviation", unit)


def arranged(count: int) -> tuple[int, int]:
    """Rows and columns of so many panels."""
    columns = 1 if count == 1 else 2
    return -(-count // columns), columns


def hatch_prior(axis: Axes, across: Array, up: Array, coverage: Array | None) -> bool:
    """Hatches where the prior dominates; whether that is anywhere.

    across (H,), up (V,): coordinates of the pixels' centres.
    """
    if coverage is None:
        return False
    prior = np.where(np.isfinite(coverage), coverage, 1.0) < DATA_DOMINATED
    if not prior.any():
        return False
    drawn: QuadContourSet = axis.contourf(
        across, up, prior.astype(np.float64), levels=[0.5, 1.5], colors="none", hatches=[_HATCH]
    )
    drawn.set_edgecolor(_HATCH_COLOUR)
    drawn.set_linewidth(0.0)
    return True


def legend_of_marks(figure: Figure, hatched: bool, grey: str | None) -> None:
    """Says below the panels what hatching means, and what grey does if anything."""
    handles: list[Artist] = []
    if hatched:
        handles.append(
            Patch(
                facecolor="0.35",
                edgecolor=_HATCH_COLOUR,
                hatch=2 * _HATCH,
                linewidth=0.0,
                label=f"the prior dominates (coverage < {DATA_DOMINATED:g})",
            )
        )
    if grey is not None:
        handles.append(Patch(facecolor=OUTSIDE_COLOUR, linewidth=0.0, label=grey))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def anywhere_unknown(panels: Sequence[Panel]) -> bool:
    """Whether a panel has places without a value."""
    return any(not np.isfinite(panel.values).all() for panel in panels)


def each(panels: Sequence[Panel], axes: NDArray[np.object_]) -> Iterator[tuple[Panel, Axes]]:
    """Panels with their axes, in the order of reading."""
    yield from zip(panels, axes.ravel(), strict=True)
