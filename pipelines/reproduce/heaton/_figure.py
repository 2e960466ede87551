"""The figure of `heaton`: data, mean and standard deviation of both scenes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from pipelines.reproduce import _figures as style
from pipelines.reproduce.heaton._problem import Scene

_TITLES = {"sat": "MODIS land temperature", "sim": "simulated twin"}


@final
@dataclass(frozen=True, eq=False)
class Maps:
    """Posterior mean and std of the field at every cell of a scene, in its shape."""

    scene: Scene
    mean: Tensor
    std: Tensor


def draw(found: Sequence[Maps]) -> Figure:
    """One line of panels per scene."""
    figure, axes = style.panels(len(found), 3, 5.0, 3.4)
    for line, maps in enumerate(found):
        _line(axes[3 * line : 3 * line + 3], maps)
    return figure


def _line(axes: Sequence[Axes], maps: Maps) -> None:
    scene, name = maps.scene, _TITLES[maps.scene.name]
    data = torch.where(scene.trained, scene.values, torch.nan)
    share = torch.tensor([0.002, 0.998], dtype=torch.float64)
    low, high = torch.quantile(scene.y[:: max(1, len(scene.y) // 50_000)], share).tolist()
    heat = Normalize(low, high)
    _image(axes[0], scene, data, f"{name}: data", "°C", "cividis", heat)
    _image(
        axes[1], scene, maps.mean, "posterior mean, held-out cells outlined", "°C", "cividis", heat
    )
    _outline(axes[1], scene)
    spread = Normalize(0.0, float(maps.std.max()))
    _image(axes[2], scene, maps.std, "posterior standard deviation", "°C", "viridis", spread)


def _image(
    axes: Axes, scene: Scene, values: Tensor, title: str, unit: str, colours: str, norm: Normalize
) -> None:
    style.label(axes, title, "east / km", "north / km")
    axes.grid(False)
    image = axes.imshow(
        values.numpy(), origin="lower", extent=_extent(scene), cmap=colours, norm=norm
    )
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=unit, shrink=0.85)


def _outline(axes: Axes, scene: Scene) -> None:
    north, east = scene.grid.axes()
    axes.contour(
        east, north, scene.held_out.double(), levels=[0.5], colors=style.ORANGE, linewidths=0.4
    )


def _extent(scene: Scene) -> tuple[float, float, float, float]:
    """Of the cells' outer edges."""
    north, east = scene.spacing
    top, right = scene.grid.upper
    return -0.5 * east, right + 0.5 * east, -0.5 * north, top + 0.5 * north
