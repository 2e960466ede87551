"""What the nodes of a division can hold of a true density, whatever the stars say.

one grid   its least-squares approximation by multilinear functions of the nodes, P ρ
levels     P ρ + g (ρ − P ρ): the coarse nodes, and where the fine level does not fade the truth
"""

from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from dustmap.gp import NestedGrids, RegularGrid
from dustmap.sky import DustMap


@final
class Limits:
    """Errors of the best approximations of a density ρ at places (n, 3) in pc."""

    def __init__(self, truth: DustMap) -> None:
        self._grid = truth.grid
        self._density = np.asarray(truth.mean, dtype=np.float64).transpose(2, 1, 0)

    def of_grid(self, spacing: float, places: NDArray[np.float64]) -> float:
        """Root mean square of P ρ − ρ for nodes so far apart."""
        return self._rmse(self._lost(spacing), places)

    def of_levels(
        self, coarse: float, inner: tuple[float, ...], places: NDArray[np.float64]
    ) -> float:
        """The same for coarse nodes and a level of size `inner` on the nodes of the truth."""
        grid, lost = self._grid, self._lost(coarse)
        low = tuple(-0.5 * side for side in inner)
        shape = tuple(round(side / h) + 1 for side, h in zip(inner, grid.spacing, strict=True))
        fine = RegularGrid(low, grid.spacing, shape)
        outer = RegularGrid(
            grid.lower,
            (coarse,) * 3,
            tuple(
                round((m - 1) * h / coarse) + 1
                for m, h in zip(grid.shape, grid.spacing, strict=True)
            ),
        )
        levels = NestedGrids((outer, fine))
        gain = (1.0 - levels.faded()[levels.places[1]]).sqrt().reshape(shape)
        first = (round((a - b) / h) for a, b, h in zip(low, grid.lower, grid.spacing, strict=True))
        lost[tuple(slice(i, i + m) for i, m in zip(first, shape, strict=True))] *= (
            1.0 - gain.numpy()
        )
        return self._rmse(lost, places)

    def _lost(self, spacing: float) -> NDArray[np.float64]:
        """P ρ − ρ at the nodes of the truth, for nodes at every so many of these."""
        held = self._density
        for axis, (count, fine) in enumerate(zip(held.shape, self._grid.spacing, strict=True)):
            every = round(spacing / fine)
            place = np.arange(count)[:, None] / every
            hats = np.maximum(0.0, 1.0 - np.abs(place - np.arange((count - 1) // every + 1)))
            projection = hats @ np.linalg.pinv(hats)
            held = np.moveaxis(np.tensordot(projection, held, (1, axis)), 0, axis)
        return held - self._density

    def _rmse(self, lost: NDArray[np.float64], places: NDArray[np.float64]) -> float:
        grid = self._grid
        axes = [
            low + h * np.arange(m)
            for low, h, m in zip(grid.lower, grid.spacing, grid.shape, strict=True)
        ]
        return float(np.sqrt(np.mean(RegularGridInterpolator(axes, lost)(places) ** 2)))
