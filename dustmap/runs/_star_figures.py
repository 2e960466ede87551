"""The figures of a run on stars: one list, drawn into plots/ and shown in the report.

A figure that cannot be drawn of a run, such as a truth that is not known, gives None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

from matplotlib.figure import Figure

from dustmap.config import Config
from dustmap.runs._calibration import Predictions
from dustmap.runs._directory import RunDirectory
from dustmap.runs._report import Picture
from dustmap.sky import plot_slice, save_figure
from dustmap.sky.maps import DustMap
from dustmap.sky.stars import StarTable


@final
@dataclass(frozen=True, eq=False)
class Material:
    """What there is to draw. held_out: None where no stars were held out."""

    config: Config
    density: DustMap
    truth: DustMap | None
    stars: StarTable
    held_out: Predictions | None


Draw: TypeAlias = Callable[[Material], Figure | None]


def _slice(material: Material) -> Figure | None:
    return plot_slice(material.density, _height(material), material.truth)


def _height(material: Material) -> float:
    """Of the map's slice nearest to the middle of the box, in pc."""
    density = material.density
    nearest = density.nearest_slice(material.config.grid.center[2])
    return float(density.axes()[2][nearest])


#: Name of the file, what it shows, how it is drawn.
FIGURES: tuple[tuple[str, str, Draw], ...] = (
    ("slice", "Dust density and its standard deviation in the middle of the box", _slice),
)


def draw_figures(material: Material, directory: RunDirectory) -> tuple[Picture, ...]:
    """Draws every figure that this run has."""
    pictures = []
    for name, caption, draw in FIGURES:
        figure = draw(material)
        if figure is not None:
            path = f"plots/{name}.png"
            save_figure(figure, directory.path / path)
            pictures.append(Picture(path, caption))
    return tuple(pictures)
