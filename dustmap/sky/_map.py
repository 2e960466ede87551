"""The map a run makes: densities on a regular grid of heliocentric Galactic X, Y, Z."""

from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from dustmap.gp import RegularGrid


@final
@dataclass(frozen=True, eq=False)
class DensityMap:
    """Dust density in mag/pc on voxels whose centres are the nodes of `grid`.

    mean, std (z, y, x): what astronomical readers expect of an array, x running fastest. A field
    that is known, such as a simulated truth, has no std. `system` is the extinctions', as A_V.
    """

    grid: RegularGrid
    mean: NDArray[np.float32]
    std: NDArray[np.float32] | None
    system: str

    def __post_init__(self) -> None:
        shape = self.grid.shape[::-1]
        if self.grid.dim != 3:
            raise ValueError(f"grid must have 3 axes (X, Y, Z), got {self.grid.dim}")
        for name, values in self.quantities().items():
            if values.shape != shape:
                raise ValueError(f"{name} must have shape (z, y, x) = {shape}, got {values.shape}")

    @classmethod
    def from_nodes(
        cls,
        grid: RegularGrid,
        mean: NDArray[np.float64],
        std: NDArray[np.float64] | None,
        system: str,
    ) -> Self:
        """From values mean, std (M,) at the nodes, flattened in the C order of (x, y, z)."""
        return cls(grid, _cube(grid, mean), None if std is None else _cube(grid, std), system)

    def quantities(self) -> dict[str, NDArray[np.float32]]:
        """Arrays by name, those there are."""
        return {"mean": self.mean} | ({} if self.std is None else {"std": self.std})

    def axes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Voxel centres x, y, z in pc."""
        x, y, z = (axis.numpy() for axis in self.grid.axes())
        return x, y, z

    def mean_at(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Trilinear interpolation of the mean at X, Y, Z (N, 3); NaN outside the nodes' box."""
        interpolate = RegularGridInterpolator(
            self.axes(), self.mean.transpose().astype(np.float64), bounds_error=False
        )
        return np.asarray(interpolate(points), np.float64)

    def nearest_slice(self, z: float) -> int:
        """Index of the slice whose centre is nearest to z in pc; z must lie inside the map."""
        lower, upper = self.grid.lower[2], self.grid.upper[2]
        half = self.grid.spacing[2] / 2
        if not lower - half <= z <= upper + half:
            raise ValueError(f"z = {z:g} pc: expected {lower - half:g} to {upper + half:g} pc")
        return int(np.abs(self.axes()[2] - z).argmin())


def _cube(grid: RegularGrid, values: NDArray[np.float64]) -> NDArray[np.float32]:
    cube = np.asarray(values, np.float32).reshape(grid.shape).transpose()
    return np.ascontiguousarray(cube)
