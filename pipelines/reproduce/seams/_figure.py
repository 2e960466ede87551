"""Where tiles and one fit differ: a plane through the Sun, and how often by how much."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipelines.reproduce._figures import COLOURS, label, panels

Array = NDArray[np.float64]


def draw(
    plane: Array, edges: tuple[Array, Array], parts: Mapping[str, Mapping[str, Array]]
) -> Figure:
    """plane (y, x): differences in posterior standard deviations at Z = 0, with the faces of its
    voxels; parts: case -> part of the sky -> differences."""
    figure, (left, right) = panels(1, 2, width=5.0, height=4.2)
    image = left.pcolormesh(
        edges[0], edges[1], np.maximum(plane, 1e-3), norm=LogNorm(1e-3, 1.0), cmap="viridis"
    )
    figure.colorbar(image, ax=left, label="|tiles − one fit| / posterior std")
    label(left, "Gaussian density, Z = 0", "X / pc", "Y / pc")
    left.set_aspect("equal")
    left.grid(False)
    styles = ("-", "--", ":")
    for colour, (case, values) in zip(COLOURS, parts.items(), strict=False):
        for style, (part, differences) in zip(styles, values.items(), strict=False):
            ordered = np.sort(differences)
            above = 1.0 - np.arange(len(ordered)) / len(ordered)
            right.loglog(
                ordered, above, style, color=colour, label=f"{case}, {part}", linewidth=1.2
            )
    right.axvline(0.3, color="0.4", linewidth=0.8)
    right.set_xlim(1e-3, 3.0)
    right.set_ylim(1e-5, 1.0)
    right.legend(fontsize=7, frameon=False)
    label(right, "voxels that differ by more", "|tiles − one fit| / posterior std", "share")
    return figure
