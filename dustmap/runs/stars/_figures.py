"""The figures of a run on stars: one list, drawn into plots/ and shown in the report.

A figure that cannot be drawn of a run, such as the calibration of one without held-out stars,
gives None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from matplotlib.figure import Figure

from dustmap.config import Config
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import Picture, Predictions, Progress, comparison_of
from dustmap.sky import Provenance
from dustmap.sky.figures import (
    Axis,
    Comparison,
    busiest_direction,
    calibration_figure,
    extinction_figure,
    line_of_sight_figure,
    profile_of_map,
    projection_figure,
    residual_figure,
    save_figure,
    shell_figure,
    slice_figure,
)
from dustmap.sky.maps import DustMap
from dustmap.sky.stars import StarTable


@final
@dataclass(frozen=True, eq=False)
class Material:
    """What there is to draw. held_out: None where no stars were held out; made: of the run."""

    config: Config
    density: DustMap
    truth: DustMap | None
    stars: StarTable
    held_out: Predictions | None
    made: Provenance


Draw: TypeAlias = Callable[[Material], Figure | None]


def _slice(material: Material) -> Figure | None:
    level = material.config.grid.center[2]
    return slice_figure(material.density, Axis.Z, level, material.truth)


def _above(material: Material) -> Figure | None:
    return projection_figure(material.density, Axis.Z, material.truth)


def _shell(material: Material) -> Figure | None:
    """Halfway to the nearest face: a sphere that the map holds whole; none if the Sun is out."""
    faces = [*np.negative(material.density.grid.lower), *material.density.grid.upper]
    if min(faces) <= 0:
        return None
    return shell_figure(material.density, 0.5 * float(min(faces)), None, material.truth)


def _line(material: Material) -> Figure | None:
    """Towards the most stars; none if the Sun is not in the map."""
    density = material.density
    if not density.grid.contains(torch.zeros(1, 3, dtype=torch.float64)).item():
        return None
    l, b = busiest_direction(material.stars)
    profile = profile_of_map(density, l, b, material.truth)
    return line_of_sight_figure(profile, material.stars)


def _extinctions(material: Material) -> Figure | None:
    compared = _compared(material)
    return None if compared is None else extinction_figure(compared)


def _residuals(material: Material) -> Figure | None:
    compared = _compared(material)
    return None if compared is None else residual_figure(compared)


def _calibration(material: Material) -> Figure | None:
    compared = _compared(material)
    return None if compared is None else calibration_figure(compared.pit)


def _compared(material: Material) -> Comparison | None:
    """Held-out stars beside what is predicted of them, noise included."""
    if material.held_out is None:
        return None
    return comparison_of(material.stars, material.held_out)


@final
@dataclass(frozen=True)
class _RunFigure:
    """What it shows, and how it is drawn."""

    caption: str
    draw: Draw


#: By the name that export.figures and the file have.
FIGURES = {
    "slice": _RunFigure("Dust density and its uncertainty in the middle of the box", _slice),
    "above": _RunFigure("Extinction through the whole height of the map, from above", _above),
    "shell": _RunFigure("Dust density on a sphere around the Sun", _shell),
    "line": _RunFigure("Density and extinction towards the most stars", _line),
    "extinctions": _RunFigure("Held-out stars: measured and predicted extinctions", _extinctions),
    "residuals": _RunFigure("Held-out stars: standardised residuals on the sky", _residuals),
    "calibration": _RunFigure("Held-out stars: calibration of the predictions", _calibration),
}


def draw_figures(
    material: Material, directory: RunDirectory, progress: Progress
) -> tuple[Picture, ...]:
    """Draws those of export.figures that this run has."""
    pictures, names = [], material.config.export.figures
    for i, name in enumerate(names):
        progress("drawing figures", i, len(names))
        path = f"plots/{name}.png"
        # Pictures are written whole: one that is there was drawn before the run was interrupted.
        if not (directory.path / path).exists():
            figure = FIGURES[name].draw(material)
            if figure is None:
                continue
            save_figure(figure, directory.path / path, history=material.made.history())
        pictures.append(Picture(path, FIGURES[name].caption))
    if names:
        progress("drawing figures", len(names), len(names))
    return tuple(pictures)
