"""Panels of an image: mean, truth, uncertainty and difference, each with its scale; and clouds on
them, as outlines, with the names of those that have one.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dustmap.sky._coordinates import cartesian
from dustmap.sky.figures import _style as style
from dustmap.sky.figures._style import Array, Scale
from dustmap.sky.maps._quantities import DATA_DOMINATED, log_variance
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
_HATCH_COLOUR = "0.65"
#: Inches for the title of a figure, and for the legend of its marks.
_TITLE, _LEGEND = 0.3, 0.25
#: Inches for a bar that panels share; columns of up to so many of them.
_BAR = 0.55
#: Inches for the labels of the axes of the first column.
_LABELS = 0.5
_COLUMNS_OF_PANELS = ((1, 1), (2, 4), (3, 9), (4, 10_000))
#: Names on one panel, at most, those of the largest clouds; width and height of a letter of theirs,
#: as parts of a panel.
_MOST_NAMES, _LETTER = 20, (0.0185, 0.045)
#: Distance of the Sun's name from it, as a part of a panel.
_SUN = 0.035
#: Pale green stands out from the colours of densities, of spreads and of differences alike.
_OUTLINE_COLOUR = "#7CFFB2"


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

    def mesh(self, axis: Axes, across: Array, up: Array) -> QuadMesh:
        """Draw the values on pixels between edges (H + 1,), (V + 1,)."""
        mesh = axis.pcolormesh(across, up, self.values, **self.scale.look)
        mesh.set_rasterized(True)
        return mesh

    def label_for(self, length: float) -> str:
        """Return the label of a bar of so many inches: in two lines where it is short."""
        whole = f"{self.quantity} [{self.unit}]" if self.unit else self.quantity
        if _PER_LETTER * len(re.sub(_UNSEEN, "", whole)) <= length:
            return whole
        return f"{self.quantity}\n[{self.unit}]" if self.unit else whole.replace(" / ", "\n/ ")


@dataclass(frozen=True, eq=False)
class AbstractImage(ABC):
    """Values (V, H): densities in mag/pc, or integrals in mag; NaN outside the map.

    positive: whether the density of the map is a log-normal one; std, coverage and truth (V, H)
    where they are known.
    """

    integrated: bool
    positive: bool
    mean: Array
    std: Array | None
    coverage: Array | None
    truth: Array | None

    @abstractmethod
    def height(self, width: float, alone: bool) -> float:
        """Return inches of a panel of so many inches width; alone: with a bar of its own."""

    @abstractmethod
    def draw(
        self, figure: Figure, axis: Axes, panel: Panel, height: float | None
    ) -> tuple[Array, Array]:
        """Draw a panel and its bar, `height` inches high; return centres (H,), (V,) of pixels.

        height: None for one of many panels, without a bar and with few words.
        """

    @abstractmethod
    def label(self, axis: Axes, text: str) -> None:
        """Write what one of many panels is, in it or above it."""

    @abstractmethod
    def orient(self, axis: Axes) -> None:
        """Write on the first of many panels where directions are."""

    @abstractmethod
    def outline(self, place: Array, radius: float) -> Array | None:
        """Return the outline (P, 2) of a ball around X, Y, Z in pc; None where it is not shown."""


@final
@dataclass(frozen=True, eq=False)
class CloudMarks:
    """Clouds to be drawn: places (K, 3) in pc, radii (K,) in pc, names (K,), "" for none."""

    places: Array
    radii: Array
    names: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "CloudMarks":
        """Read a table of `dustmap clouds`, or another with l, b, distance, radius and name."""
        # Pictures without clouds wait for no reader of tables.
        from dustmap.tables import number_column, read_tables, text_column

        table = read_tables(path)
        l, b, distance, radii = (
            number_column(table, name, unit)
            for name, unit in (("l", "deg"), ("b", "deg"), ("distance", "pc"), ("radius", "pc"))
        )
        named = "name" in table.colnames
        names = text_column(table, "name") if named else ("",) * len(l)
        return cls(cartesian(l, b, distance), radii, names)

    def draw(self, axis: Axes, image: AbstractImage, named: bool) -> None:
        """Outline the clouds that an image shows; named: with the names of the largest, each in,
        below or above its outline, where it covers no other."""
        left, taken = _MOST_NAMES if named else 0, list[Array]()
        sun = image.outline(np.zeros(3), 1.0)
        if sun is not None:
            _free_place(axis, sun + np.abs(np.diff(axis.get_xlim())) * _SUN, len("Sun"), taken)
        for k in np.argsort(-self.radii, kind="stable"):
            outline = image.outline(self.places[k], float(self.radii[k]))
            if outline is None:
                continue
            line: dict[str, Any] = {"color": _OUTLINE_COLOUR, "linewidth": 0.7, "scalex": False}
            axis.plot(outline[:, 0], outline[:, 1], scaley=False, **line)
            # The first of several, as the others are lines through the same cloud.
            name = self.names[k].partition(";")[0]
            place = _free_place(axis, outline, len(name), taken) if name and left else None
            if place is not None:
                left -= 1
                words: dict[str, Any] = {"ha": "center", "va": "center"}
                axis.text(place[0], place[1], name, **words, **style.outlined(style.SMALL - 1.0))


def _free_place(
    axis: Axes, outline: Array, letters: int, taken: list[Array]
) -> tuple[float, float] | None:
    """Return a place for a name at an outline (P, 2), and add its box to those that are taken."""
    limits = np.sort(np.array([axis.get_xlim(), axis.get_ylim()])).T
    half = 0.5 * np.diff(limits, axis=0)[0] * np.array([letters * _LETTER[0], _LETTER[1]])
    low, high = outline.min(0), outline.max(0)
    middle = 0.5 * (low + high)
    for up in (middle[1], low[1] - half[1], high[1] + half[1]):
        centre = np.array([middle[0], up]).clip(limits[0] + half, limits[1] - half)
        box = np.stack([centre - half, centre + half])
        if not any(bool(((box[0] < b[1]) & (b[0] < box[1])).all()) for b in taken):
            taken.append(box)
            return float(centre[0]), float(centre[1])
    return None


def quantity_of(system: ExtinctionSystem, integrated: bool) -> tuple[float, str, str]:
    """Return the factor that numbers are shown with, their symbol and their unit."""
    if integrated:
        return 1.0, style.symbol_of(system), style.unit_of(system)
    return PER_MILLE, style.density_of(system), style.density_unit(system)


def panels_of(system: ExtinctionSystem, image: AbstractImage) -> tuple[Panel, ...]:
    """Show truth and mean on one scale, then the uncertainty and the difference in units of it.

    The uncertainty is relative to the mean where that is positive everywhere.
    """
    mean, std, truth = image.mean, image.std, image.truth
    factor, quantity, unit = quantity_of(system, image.integrated)
    shown = {_TRUTH: truth, _MEAN if std is not None else "map": mean}
    scaled = {title: factor * values for title, values in shown.items() if values is not None}
    colours = style.INTEGRAL_COLOURS if image.integrated else style.DENSITY_COLOURS
    scale = style.density_scale(*scaled.values(), colours=colours)
    panels = [
        Panel(title, values, scale, quantity, unit, of_mean=title != _TRUTH)
        for title, values in scaled.items()
    ]
    if std is not None:
        panels.append(_spread(factor, unit, mean, std))
        if truth is not None:
            panels.append(_difference(image, std, truth))
    return tuple(panels)


def _difference(image: AbstractImage, std: Array, truth: Array) -> Panel:
    """Return what is standard normal where all is well.

    Of a positive density that of logarithms, whose law with this mean and std is normal:
    ln x ~ N(ln μ − s²/2, s²) with s² = ln(1 + σ²/μ²). The values themselves are skewed, and a truth
    many σ above a small mean would be no surprise.
    """
    title, mean = f"posterior \N{MINUS SIGN} {_TRUTH}", image.mean
    none = np.full_like(mean, np.nan)
    if image.positive and _positive(mean) and _positive(truth):
        variance = log_variance(mean, std)
        ahead = np.log(mean / truth) - 0.5 * variance
        off = np.divide(ahead, np.sqrt(variance), out=none, where=variance > 0)
        words = "difference of ln / std. deviation"
    else:
        off = np.divide(mean - truth, std, out=none, where=std > 0)
        words = "difference / std. deviation"
    return Panel(title, off, style.signed_scale(_MOST_SIGMA, off), words)


def _positive(values: Array) -> bool:
    return bool(np.all(values[np.isfinite(values)] > 0))


def _spread(factor: float, unit: str, mean: Array, std: Array) -> Panel:
    if _positive(mean):
        ratio = std / mean
        return Panel(
            "relative uncertainty", ratio, style.spread_scale(ratio), "std. deviation / mean"
        )
    scaled = factor * std
    return Panel("uncertainty", scaled, style.spread_scale(scaled), "std. deviation", unit)


def panels_figure(
    system: ExtinctionSystem,
    image: AbstractImage,
    title: str,
    grey: str,
    marks: CloudMarks | None = None,
    **subplots: Any,
) -> Figure:
    """Draw mean, truth and uncertainty beside each other, hatched where the prior dominates.

    grey: the places without a value. marks: clouds, outlined on every panel and named on one.
    """
    panels = panels_of(system, image)
    rows, columns = -(-len(panels) // 2), min(len(panels), 2)
    width = style.ONE_COLUMN if columns == 1 else style.TWO_COLUMNS
    unknown = any(not np.isfinite(panel.values).all() for panel in panels)
    legend = _LEGEND if image.coverage is not None or unknown else 0.0
    each = image.height(width / columns, alone=True)
    figure = style.new_figure(width, rows * each + _TITLE + legend)
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    hatched = False
    for panel, axis in zip(panels, axes.ravel(), strict=True):
        across, up = image.draw(figure, axis, panel, each)
        axis.set_title(panel.title)
        if marks is not None:
            marks.draw(axis, image, named=panel.of_mean)
        if panel.of_mean:
            hatched = _hatch_prior(axis, across, up, image.coverage)
    figure.suptitle(f"{title} ({style.symbol_of(system)})")
    _legend_of_marks(figure, hatched, grey if unknown else None)
    return figure


@style.styled()
def sequence_figure(
    system: ExtinctionSystem,
    images: Sequence[AbstractImage],
    labels: Sequence[str],
    title: str,
    grey: str,
    marks: CloudMarks | None = None,
    **subplots: Any,
) -> Figure:
    """Draw the means of images beside each other, labelled, with one scale and one bar."""
    columns = next(c for c, most in _COLUMNS_OF_PANELS if len(images) <= most)
    rows = -(-len(images) // columns)
    means = [next(p for p in panels_of(system, image) if p.of_mean) for image in images]
    scale = style.density_scale(*(p.values for p in means), colours=means[0].scale.colours)
    unknown = any(not np.isfinite(p.values).all() for p in means)
    each = images[0].height((style.TWO_COLUMNS - _LABELS) / columns, alone=False)
    figure = style.new_figure(style.TWO_COLUMNS, rows * each + _TITLE + _LEGEND + _BAR)
    axes = figure.subplots(rows, columns, squeeze=False, **subplots).ravel()
    hatched = False
    for image, panel, label, axis in zip(images, means, labels, axes, strict=False):
        across, up = image.draw(figure, axis, replace(panel, scale=scale), None)
        image.label(axis, label)
        if marks is not None:
            marks.draw(axis, image, named=False)
        hatched |= _hatch_prior(axis, across, up, image.coverage)
    images[0].orient(axes[0])
    for k in range(len(images), len(axes)):
        axes[k].remove()
        above = axes[k - columns]  # now the lowest of its column
        above.tick_params(labelbottom=True)
        above.set_xlabel(axes[-columns].get_xlabel())
    what = f"{means[0].quantity} [{means[0].unit}]"
    scale.shared_bar(figure, list(axes[: len(images)]), what)
    figure.suptitle(f"{title} ({style.symbol_of(system)})")
    _legend_of_marks(figure, hatched, grey if unknown else None)
    return figure


def _hatch_prior(axis: Axes, across: Array, up: Array, coverage: Array | None) -> bool:
    """Hatch where the prior dominates, on pixels with centres (H,), (V,); False if never."""
    if coverage is None:
        return False
    prior = np.where(np.isfinite(coverage), coverage, 1.0) < DATA_DOMINATED
    if prior.any():
        values = prior.astype(np.float64)
        drawn: QuadContourSet = axis.contourf(
            across, up, values, levels=[0.5, 1.5], colors="none", hatches=[_HATCH]
        )
        drawn.set_edgecolor(_HATCH_COLOUR)
        drawn.set_linewidth(0.0)
    return bool(prior.any())


def _legend_of_marks(figure: Figure, hatched: bool, grey: str | None) -> None:
    """Explain hatching and grey below the panels."""
    handles: list[Artist] = []
    if hatched:
        label = f"the prior dominates (coverage < {DATA_DOMINATED:g})"
        hatches: dict[str, Any] = {"edgecolor": _HATCH_COLOUR, "hatch": 2 * _HATCH}
        handles.append(Patch(facecolor="0.35", linewidth=0.0, label=label, **hatches))
    if grey is not None:
        handles.append(Patch(facecolor=style.OUTSIDE_COLOUR, linewidth=0.0, label=grey))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
