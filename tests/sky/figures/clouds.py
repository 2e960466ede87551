"""Small maps whose pictures are known, and readings of what a figure shows."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.maps import DustMap, Quantity

Array = NDArray[np.float64]

#: Voxels differ in every axis, so that no two can be exchanged unseen.
GRID = RegularGrid(lower=(-40.0, -60.0, -10.0), spacing=(10.0, 20.0, 5.0), shape=(9, 7, 5))
SAMPLES = 4


def cloud(x: float, y: float, z: float) -> DustMap:
    """A density of 10⁻³ mag/pc, and fifty times that at the voxel (x, y, z); nothing else."""
    points = GRID.points().numpy()
    inside = np.linalg.norm(points - [x, y, z], axis=-1) < 1e-6
    return DustMap.from_nodes(GRID, np.where(inside, 5e-2, 1e-3), None, "A_V")


def posterior(seed: int = 0, positive: bool = True, left_out: tuple[Quantity, ...] = ()) -> DustMap:
    """A map with every other quantity, of random samples; coverage rises from 0 to 1 along X."""
    shape = (SAMPLES, *GRID.shape[::-1])
    samples = 2e-3 * np.random.default_rng(seed).lognormal(0.0, 0.5, shape)
    if not positive:
        samples -= 2e-3
    coverage = np.broadcast_to(np.linspace(0.0, 1.0, shape[-1]), shape[1:])
    arrays = {
        Quantity.MEAN: samples.mean(0),
        Quantity.STD: samples.std(0, ddof=1),
        Quantity.P16: np.quantile(samples, 0.16, axis=0),
        Quantity.P84: np.quantile(samples, 0.84, axis=0),
        Quantity.COVERAGE: coverage,
        Quantity.SAMPLES: samples,
    }
    held = {q: np.ascontiguousarray(v, np.float32) for q, v in arrays.items() if q not in left_out}
    return DustMap.from_arrays(GRID, held, "A_V", positive)


def titled(figure: Figure) -> dict[str, Axes]:
    """Panels by their titles."""
    return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}


def shown(drawn: ScalarMappable) -> Array:
    """The numbers behind the colours, NaN where there are none."""
    return np.ma.filled(np.ma.asarray(drawn.get_array(), np.float64), np.nan)


def bar_labels(figure: Figure) -> list[str]:
    """Labels of colour bars, which are axes within axes."""
    bars = [child for axis in figure.axes for child in axis.child_axes]
    return [bar.get_ylabel() or bar.get_xlabel() for bar in bars]


def every_text(figure: Figure) -> str:
    """All text of a figure."""
    return " | ".join(text.get_text() for text in figure.findobj(Text))
