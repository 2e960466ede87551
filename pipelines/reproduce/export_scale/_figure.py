"""The figure of `export_scale`: the plane of the Sun, as the file has it."""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipelines.reproduce import _figures as style
from pipelines.reproduce.export_scale._measure import Scale


def draw(planes: tuple[NDArray[np.float32], NDArray[np.float32]], scale: Scale) -> Figure:
    """Mean and std at the plane nearest to Z = 0, (y, x) in mag/pc."""
    figure, axes = style.panels(1, 2, 4.6, 3.9)
    x, y = (0.5 * scale.spacing * (n - 1) for n in scale.shape[:2])
    for panel, values, title in zip(
        axes, planes, ("Mean of the samples, Z = 0", "Their standard deviation"), strict=True
    ):
        style.label(panel, title, "X / pc", "Y / pc")
        panel.grid(False)
        low, high = np.percentile(values, [1.0, 99.8])
        image = panel.imshow(
            values,
            origin="lower",
            extent=(-x, x, -y, y),
            cmap="cividis",
            norm=LogNorm(float(low), float(high)),
        )
        panel.plot(0, 0, "*", color="white", markeredgecolor=style.BLACK, markersize=11)
        figure.colorbar(image, ax=panel, label="mag / pc", shrink=0.85)
    return figure
