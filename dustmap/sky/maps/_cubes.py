"""Where the numbers of a map are: in memory or in a file, a box of voxels at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.maps._request import Quantity
from dustmap.sky.systems import ExtinctionSystem

#: start and stop of the voxels along z, y, x
Box: TypeAlias = tuple[slice, slice, slice]


@final
@dataclass(frozen=True)
class Cube:
    """One array (z, y, x) of a map: a quantity, or one of its samples."""

    quantity: Quantity
    sample: int = 0


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """What a map holds, and on which voxels.

    grid: whose nodes are the voxels' centres; positive: whether percentiles are by the moments of
    ln ρ; samples: how many there are.
    """

    grid: RegularGrid
    system: ExtinctionSystem
    quantities: tuple[Quantity, ...]
    samples: int
    positive: bool

    def __post_init__(self) -> None:
        if self.grid.dim != 3:
            raise ValueError(f"grid must have 3 axes (X, Y, Z), got {self.grid.dim}")
        if not self.quantities:
            raise ValueError("a map needs at least one quantity, such as the mean")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels along z, y, x."""
        x, y, z = self.grid.shape
        return z, y, x

    @property
    def cubes(self) -> tuple[Cube, ...]:
        """Every array there is."""
        plain = [Cube(q) for q in self.quantities if q is not Quantity.SAMPLES]
        return (*plain, *(Cube(Quantity.SAMPLES, k) for k in range(self.samples)))


class AbstractCubes(ABC):
    """The arrays of a map; reading is lazy, and the object may go to another process."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """What there is."""

    @abstractmethod
    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        """The voxels of a box [z, y, x], float32 in the machine's byte order."""


@final
@dataclass(frozen=True, eq=False)
class MemoryCubes(AbstractCubes):
    """Arrays at hand, (z, y, x), samples (S, z, y, x)."""

    described: Layout
    arrays: Mapping[Quantity, NDArray[np.float32]]

    def __post_init__(self) -> None:
        shape = self.described.shape
        for quantity, values in self.arrays.items():
            if values.shape[-3:] != shape or values.ndim != 3 + (quantity is Quantity.SAMPLES):
                raise ValueError(
                    f"{quantity.value} must have shape (z, y, x) = {shape}, got {values.shape}"
                )

    @property
    def layout(self) -> Layout:
        return self.described

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        array = self.arrays[cube.quantity]
        return (array[cube.sample] if cube.quantity is Quantity.SAMPLES else array)[box]


def grid_of_axes(axes: Mapping[str, NDArray[np.float64]], path: object) -> RegularGrid:
    """The grid whose nodes are the voxel centres x, y, z of a file."""
    for name, axis in axes.items():
        steps = np.diff(axis) if axis.ndim == 1 and np.isfinite(axis).all() else np.empty(0)
        if steps.size == 0 or not np.allclose(steps, steps[0], rtol=1e-6):
            raise ValueError(f"{path}: axis {name} must have two or more voxels, equally spaced")
        if not steps[0] > 0:
            raise ValueError(f"{path}: axis {name} must ascend, got steps of {steps[0]:g} pc")
    ordered = [axes[name] for name in "xyz"]
    return RegularGrid(
        lower=tuple(float(axis[0]) for axis in ordered),
        spacing=tuple(float((axis[-1] - axis[0]) / (len(axis) - 1)) for axis in ordered),
        shape=tuple(len(axis) for axis in ordered),
    )
