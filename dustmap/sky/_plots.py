"""Pictures of maps."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from dustmap.sky._atomic import replacing
from dustmap.sky.maps import DustMap

PER_MILLE = 1e3  # colour bars count in 10⁻³ mag/pc, the size of densities near the Sun
UNIT = r"$10^{-3}$ mag pc$^{-1}$"
DENSITY_COLOURS = "inferno"
STD_COLOURS = "viridis"


@final
@dataclass(frozen=True, eq=False)
class _Panel:
    """One image (y, x) of the slice, on the grid of `density`."""

    title: str
    density: DustMap
    values: NDArray[np.float64]
    colours: str
    scale: Normalize


def plot_slice(density: DustMap, z: float = 0.0, truth: DustMap | None = None) -> Figure:
    """Mean and standard deviation on the plane nearest to z in pc, the truth first if given.

    Truth and mean share one colour scale. X grows to the Galactic centre, Y to l = 90°.
    """
    shown = float(density.axes()[2][density.nearest_slice(z)])
    panels = _density_panels(density, shown, truth)
    shared = len(panels)
    if density.std is not None:
        std = _plane(density, density.std, shown)
        scale = Normalize(0.0, float(std.max()))
        panels.append(_Panel("posterior standard deviation", density, std, STD_COLOURS, scale))
    figure = Figure(figsize=(4.3 * len(panels) + 0.6, 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    images = [_draw(axis, panel) for axis, panel in zip(axes, panels, strict=True)]
    axes[0].set_ylabel("heliocentric Galactic Y [pc]")
    _set_limits(axes[0], density)
    figure.colorbar(images[0], ax=axes[:shared], label=f"density [{UNIT}]", shrink=0.84)
    if len(panels) > shared:
        figure.colorbar(
            images[-1], ax=axes[shared:], label=f"standard deviation [{UNIT}]", shrink=0.84
        )
    figure.suptitle(f"Dust density ({density.system}) at Z = {shown:+.0f} pc")
    return figure


def _density_panels(density: DustMap, z: float, truth: DustMap | None) -> list[_Panel]:
    named = [("density" if density.std is None else "posterior mean", density)]
    if truth is not None:
        named.insert(0, ("truth", truth))
    planes = [_plane(of, of.mean, z) for _, of in named]
    scale = Normalize(
        float(min(plane.min() for plane in planes)), float(max(plane.max() for plane in planes))
    )
    return [
        _Panel(title, of, plane, DENSITY_COLOURS, scale)
        for (title, of), plane in zip(named, planes, strict=True)
    ]


def _plane(density: DustMap, values: NDArray[np.float32], z: float) -> NDArray[np.float64]:
    plane = values[density.nearest_slice(z)]
    return np.asarray(plane, np.float64) * PER_MILLE


def _draw(axis: Axes, panel: _Panel) -> AxesImage:
    image = axis.imshow(
        panel.values,
        origin="lower",
        extent=_extent(panel.density),
        cmap=panel.colours,
        norm=panel.scale,
        interpolation="nearest",
    )
    axis.plot(0.0, 0.0, marker="o", markersize=6, color="white", markeredgecolor="black")
    axis.annotate(
        "Sun",
        (0.0, 0.0),
        xytext=(5, 5),
        textcoords="offset points",
        color="white",
        path_effects=[withStroke(linewidth=2.0, foreground="black")],
    )
    axis.set_title(panel.title)
    axis.set_xlabel("heliocentric Galactic X [pc]")
    return image


def _extent(density: DustMap) -> tuple[float, float, float, float]:
    """Outer faces of the first and last voxels: left, right, bottom, top."""
    (x0, y0, _), (x1, y1, _) = density.grid.lower, density.grid.upper
    dx, dy, _ = density.grid.spacing
    return x0 - dx / 2, x1 + dx / 2, y0 - dy / 2, y1 + dy / 2


def _set_limits(axis: Axes, density: DustMap) -> None:
    left, right, bottom, top = _extent(density)
    axis.set_xlim(left, right)
    axis.set_ylim(bottom, top)


def save_figure(figure: Figure, path: str | Path, overwrite: bool = False) -> None:
    """Writes a PNG or PDF, by the name's ending."""
    path = Path(path)
    if path.suffix.lower() not in {".png", ".pdf"}:
        raise ValueError(f"{path}: expected a picture that ends in .png or .pdf")
    with replacing(path, overwrite) as partial:
        figure.savefig(partial, dpi=150, format=path.suffix[1:].lower())
