"""Cubes of a map, in memory or in a file: a box of voxels at a time, and their names in files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.maps._quantities import Quantity
from dustmap.sky.systems import ExtinctionSystem, system_named

#: start and stop of the voxels along z, y, x
Box: TypeAlias = tuple[slice, slice, slice]
#: Parses as a unit of FITS, VOUnit, CDS and astropy; `mag pc-1` does not in CDS.
DENSITY_UNIT = "mag.pc-1"
FRAME = "heliocentric Galactic cartesian: +X to l=0, +Y to l=90 deg, +Z to b=90 deg"
TITLE = "3D map of the interstellar dust density"
#: How percentiles come about, by whether the density is positive.
PERCENTILES_OF = {
    True: "log-normal: exp(mean + z std) of ln density over the samples",
    False: "normal: mean + z std of the density",
}


@final
@dataclass(frozen=True)
class Cube:
    """One array (z, y, x) of a map: a quantity, or one of its samples."""

    quantity: Quantity
    sample: int = 0


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """The contents of a map, and its voxels.

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
        """Quantities, voxels and system of the map."""

    @abstractmethod
    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        """Read the voxels of a box [z, y, x], float32 in the machine's byte order."""


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


def layout_of(
    path: object,
    shapes: Mapping[Quantity, tuple[int, ...]],
    samples: int,
    axes: Mapping[str, NDArray[np.float64]],
    system: object,
    percentiles: object,
) -> Layout:
    """Describe what a file holds: the shapes [z, y, x] of its cubes and the axes x, y, z.

    Raises
    ------
    ValueError
        Where the cubes do not lie on the axes, or the extinction system is unknown.
    """
    positive = str(percentiles).startswith("log-normal")
    grid, known = grid_of_axes(axes, path), system_named(str(system))
    layout = Layout(grid, known, tuple(shapes), samples, positive)
    for quantity, shape in shapes.items():
        if shape != layout.shape:
            raise ValueError(
                f"{path}: {DESCRIPTIONS[quantity].variable} must have shape (z, y, x) = "
                f"{layout.shape}, got {shape}"
            )
    return layout


def grid_of_axes(axes: Mapping[str, NDArray[np.float64]], path: object) -> RegularGrid:
    """Return the grid whose nodes are the voxel centres x, y, z of a file."""
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


@final
@dataclass(frozen=True)
class Described:
    """extension: of FITS, the names that readers of published maps look for (the dot of the
    second belongs to it); a sample's has its number behind. variable: of zarr."""

    extension: str
    variable: str
    meaning: str
    unit: str
    ucd: str


DESCRIPTIONS = {
    Quantity.MEAN: Described(
        "MEAN",
        "density_mean",
        "posterior mean of the dust density",
        DENSITY_UNIT,
        "phys.absorption;stat.mean",
    ),
    Quantity.STD: Described(
        "STD.",
        "density_std",
        "posterior standard deviation of the dust density",
        DENSITY_UNIT,
        "stat.stdev;phys.absorption",
    ),
    Quantity.MEDIAN: Described(
        "MEDIAN",
        "density_median",
        "posterior median of the dust density",
        DENSITY_UNIT,
        "phys.absorption;stat.median",
    ),
    Quantity.P16: Described(
        "P16", "density_p16", "16th percentile of the dust density", DENSITY_UNIT, "phys.absorption"
    ),
    Quantity.P84: Described(
        "P84", "density_p84", "84th percentile of the dust density", DENSITY_UNIT, "phys.absorption"
    ),
    Quantity.COVERAGE: Described(
        "COVERAGE",
        "coverage",
        "1 - posterior variance / prior variance; the data dominate above 0.5",
        "",
        "stat.value",
    ),
    Quantity.SAMPLES: Described(
        "SAMPLE",
        "density_samples",
        "posterior samples of the dust density",
        DENSITY_UNIT,
        "phys.absorption",
    ),
}


def axis_meaning(name: str) -> str:
    """Describe the axis x, y or z."""
    return f"heliocentric Galactic {name.upper()}"


def extension_of(cube: Cube) -> str:
    """Name a cube's image in FITS, SAMPLE_01 for the first sample."""
    name = DESCRIPTIONS[cube.quantity].extension
    return f"{name}_{cube.sample + 1:02d}" if cube.quantity is Quantity.SAMPLES else name
