"""The figure of `derivatives`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Figure
from torch import Tensor

from dustmap.gp import Prediction
from pipelines.reproduce import _figures as style

_STYLES = {"HIP-GP": (style.BLUE, "-"), "SVGP": (style.ORANGE, "--"), "exact": (style.BLACK, ":")}
_SEGMENT = 0.012  # half the length of a drawn slope, in x


@final
@dataclass(frozen=True, eq=False)
class Scene:
    """The truth on a fine axis x, and the data: values (x, y), slopes (x, dy) drawn at height f."""

    x: Tensor
    truth: Tensor
    value_x: Tensor
    value_y: Tensor
    slope_x: Tensor
    slope_y: Tensor
    slope_f: Tensor


def draw(scene: Scene, bands: Mapping[bool, Mapping[str, Prediction]]) -> Figure:
    """Data; posterior errors without and with derivatives; standard deviations."""
    figure, axes = style.panels(2, 2, 5.0, 3.2)
    _data(axes[0], scene)
    _spread(axes[1], scene, bands)
    for panel, with_derivatives in zip(axes[2:], (False, True), strict=True):
        _band(panel, scene, bands[with_derivatives], with_derivatives)
    limit = max(abs(v) for panel in axes[2:] for v in panel.get_ylim())
    for panel in axes[2:]:
        panel.set_ylim(-limit, limit)
    return figure


def _data(axes: Axes, scene: Scene) -> None:
    style.label(axes, "A drawn function and its data", "x", "f(x)")
    axes.plot(scene.x, scene.truth, color="0.5", linewidth=1.2, label="truth")
    axes.plot(scene.value_x, scene.value_y, ".", color=style.BLUE, markersize=4, label="100 values")
    for x, f, dy in zip(scene.slope_x, scene.slope_f, scene.slope_y, strict=True):
        rise = _SEGMENT * dy
        axes.plot([x - _SEGMENT, x + _SEGMENT], [f - rise, f + rise], color=style.ORANGE, lw=2)
    axes.plot([], [], color=style.ORANGE, lw=2, label="20 derivatives (slopes)")
    axes.legend(frameon=False, fontsize=8)


def _spread(axes: Axes, scene: Scene, bands: Mapping[bool, Mapping[str, Prediction]]) -> None:
    style.label(axes, "Posterior standard deviation", "x", "std of f(x)")
    for with_derivatives, width in ((False, 1.0), (True, 2.0)):
        for name, (colour, dashes) in _STYLES.items():
            std = bands[with_derivatives][name].std
            text = f"{name}, {'with' if with_derivatives else 'without'} derivatives"
            axes.plot(scene.x, std, dashes, color=colour, linewidth=width, label=text)
    axes.set_ylim(0.0, 1.35 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper center")


def _band(
    axes: Axes, scene: Scene, bands: Mapping[str, Prediction], with_derivatives: bool
) -> None:
    kind = "with" if with_derivatives else "without"
    style.label(axes, f"Error ± 1 std, {kind} derivatives", "x", "mean − truth")
    hip = bands["HIP-GP"]
    error = hip.mean - scene.truth
    axes.axhline(0.0, color="0.5", linewidth=1.2)
    axes.fill_between(scene.x, error - hip.std, error + hip.std, color=style.SKY, alpha=0.4, lw=0)
    for name, (colour, dashes) in _STYLES.items():
        mean = bands[name].mean - scene.truth
        axes.plot(scene.x, mean, dashes, color=colour, linewidth=1.4, label=name)
    if with_derivatives:
        places = scene.slope_x
        axes.plot(places, 0.0 * places, "|", color=style.ORANGE, markersize=9, label="derivatives")
    axes.legend(frameon=False, fontsize=8, ncols=2)
