"""Cubes of a map, in memory, FITS or zarr: a box of voxels at a time, and their names in files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
from astropy import units as u
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky.maps._between import CellVariance, read_between
from dustmap.sky.maps._quantities import (
    MapRequest,
    Quantity,
    dimensions_of,
    refuse_other_axes,
    variable_of,
)
from dustmap.sky.systems import ExtinctionSystem, system_named

if TYPE_CHECKING:
    from dustmap.sky._zarr import CheckedGroup

#: Cards of the map of one tile, the keys of `AbstractCubes.tile` that they hold, and comments.
TILE_CARDS = {
    "TILE": ("pixel", "HEALPix pixel that this map is of"),
    "MARGIN": ("margin_pc", "pc beyond it from where stars are"),
}
#: Bytes: every FITS file is a multiple of it.
BLOCK = 2880
#: start and stop of the voxels along z, y, x
Box: TypeAlias = tuple[slice, slice, slice]
#: Parses as a unit of FITS, VOUnit, CDS and astropy; `mag pc-1` does not in CDS.
DENSITY_UNIT = "mag.pc-1"
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

    def of(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return its part of the values (..., z, y, x) of the quantity."""
        return values[self.sample] if self.quantity is Quantity.SAMPLES else values


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """The contents of a map, and its voxels.

    grid: whose nodes are the voxels' centres; positive: whether percentiles are by the moments of
    ln ρ; samples: how many there are; between: variance of ln ρ beside that of what is
    interpolated, of all grids of the run, coarsest first; empty where it has none.
    """

    grid: RegularGrid
    system: ExtinctionSystem
    quantities: tuple[Quantity, ...]
    samples: int
    positive: bool
    between: tuple[CellVariance, ...] = ()

    def __post_init__(self) -> None:
        if self.grid.dim != 3:
            raise UserError(f"grid must have 3 axes (X, Y, Z), got {self.grid.dim}")
        if not self.quantities:
            raise UserError("a map needs at least one quantity, such as the mean")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels along z, y, x."""
        x, y, z = self.grid.shape
        return z, y, x

    @property
    def axes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Voxel centres x, y, z in pc."""
        corners = zip(self.grid.lower, self.grid.spacing, self.grid.shape, strict=True)
        x, y, z = (low + step * np.arange(count, dtype=np.float64) for low, step, count in corners)
        return x, y, z

    def nearest_slice(self, axis: int, level: float) -> int:
        """Find the voxels whose centres are nearest to `level` in pc along X, Y or Z; of two those
        nearer to 0."""
        half = self.grid.spacing[axis] / 2
        low, high = self.grid.lower[axis] - half, self.grid.upper[axis] + half
        if not low <= level <= high:
            raise UserError(f"{'xyz'[axis]} = {level:g} pc: expected {low:g} to {high:g} pc")
        away = np.abs(self.axes[axis] - level)
        nearest = np.flatnonzero(away <= away.min() + 1e-6 * half)
        return int(min(nearest, key=lambda voxel: abs(self.axes[axis][voxel])))

    @property
    def request(self) -> MapRequest:
        """Request all that the map has."""
        return MapRequest(self.quantities, self.samples)

    @property
    def cubes(self) -> tuple[Cube, ...]:
        """Every array there is."""
        samples = (Cube(Quantity.SAMPLES, k) for k in range(self.samples))
        return (*map(Cube, self.request.cubes), *samples)


class AbstractCubes(ABC):
    """The arrays of a map; reading is lazy, and the object may go to another process."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Quantities, voxels and system of the map."""

    @abstractmethod
    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        """Read the voxels of a box [z, y, x], float32 in the machine's byte order."""

    @property
    def finer(self) -> tuple["AbstractCubes", ...]:
        """The same quantities on finer levels, each within the box of the one before."""
        return ()

    @property
    def tile(self) -> Mapping[str, Any]:
        """The pixel and margin_pc of the map of one tile; empty of others."""
        return {}

    @property
    def name(self) -> str:
        """What messages call the map."""
        return "the map"


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
                raise UserError(
                    f"{quantity.value} must have shape (z, y, x) = {shape}, got {values.shape}"
                )

    @property
    def layout(self) -> Layout:
        return self.described

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        return cube.of(self.arrays[cube.quantity])[box]


def layout_of(
    path: object,
    shapes: Mapping[Quantity, tuple[int, ...]],
    samples: int,
    axes: Mapping[str, NDArray[np.float64]],
    system: object,
    percentiles: object,
    tables: object,
    nodes: object,
) -> Layout:
    """Describe what a file holds: the shapes [z, y, x] of its cubes and the axes x, y, z.

    tables, nodes: of `Layout.between`. UserError where the cubes do not lie on the axes, or the
    extinction system is unknown.
    """
    for name, axis in axes.items():
        steps = np.diff(axis) if axis.ndim == 1 and np.isfinite(axis).all() else np.empty(0)
        if steps.size == 0 or not np.allclose(steps, steps[0], rtol=1e-6):
            raise UserError(f"{path}: axis {name} must have two or more voxels, equally spaced")
        if not steps[0] > 0:
            raise UserError(f"{path}: axis {name} must ascend, got steps of {steps[0]:g} pc")
    ordered = [axes[name] for name in "xyz"]
    grid = RegularGrid(
        lower=tuple(float(axis[0]) for axis in ordered),
        spacing=tuple(float((axis[-1] - axis[0]) / (len(axis) - 1)) for axis in ordered),
        shape=tuple(len(axis) for axis in ordered),
    )
    positive = str(percentiles).startswith("log-normal")
    widths = positive, read_between(path, tables, nodes, grid)
    layout = Layout(grid, system_named(str(system)), tuple(shapes), samples, *widths)
    for quantity, shape in shapes.items():
        if shape != layout.shape:
            raise UserError(
                f"{path}: {variable_of(quantity)} must have shape (z, y, x) = "
                f"{layout.shape}, got {shape}"
            )
    return layout


@final
@dataclass(frozen=True)
class Described:
    """extension: of FITS, the names that readers of published maps look for (the dot of the
    second belongs to it); a sample's has its number behind."""

    extension: str
    meaning: str
    ucd: str = "phys.absorption"
    unit: str = DENSITY_UNIT


DESCRIPTIONS = {
    Quantity.MEAN: Described(
        "MEAN", "posterior mean of the dust density", "phys.absorption;stat.mean"
    ),
    Quantity.STD: Described(
        "STD.", "posterior standard deviation of the dust density", "stat.stdev;phys.absorption"
    ),
    Quantity.MEDIAN: Described(
        "MEDIAN", "posterior median of the dust density", "phys.absorption;stat.median"
    ),
    Quantity.P16: Described("P16", "16th percentile of the dust density"),
    Quantity.P84: Described("P84", "84th percentile of the dust density"),
    Quantity.COVERAGE: Described(
        "COVERAGE",
        "1 - posterior variance / prior variance; the data dominate above 0.5",
        "stat.value",
        unit="",
    ),
    Quantity.SAMPLES: Described("SAMPLE", "posterior samples of the dust density"),
}


def extension_of(cube: Cube, level: int = 0) -> str:
    """Name a cube's image in FITS, SAMPLE_01 for the first sample, MEAN_L1 of the first finer
    level."""
    name = DESCRIPTIONS[cube.quantity].extension
    name = f"{name}_{cube.sample + 1:02d}" if cube.quantity is Quantity.SAMPLES else name
    return f"{name.rstrip('.')}_L{level}" if level else name


def level_path(level: int) -> str:
    """Name the zarr group of a finer level, level_1 for the first."""
    return f"level_{level}"


@dataclass(frozen=True)
class AbstractFileCubes(AbstractCubes):
    """Cubes of a file, whose layout is checked at once."""

    path: Path

    def __post_init__(self) -> None:
        _ = self.layout

    @property
    def name(self) -> str:
        return f"the map {self.path.name}"


def refuse_other_unit(path: Path, name: str, given: object, expected: u.UnitBase | str) -> None:
    """Refuse a unit, where one is given, that is not the one of maps."""
    text, wanted = str(given).strip(), u.Unit(expected)
    if text and u.Unit(text, parse_strict="silent") != wanted:
        raise UserError(
            f"{path}: expected {name} in {wanted or 'numbers without unit'}, got {text!r}; convert "
            "the numbers and the unit"
        )


@final
class ZarrCubes(AbstractFileCubes):
    """density_mean and its like, (z, y, x), density_samples (sample, z, y, x)."""

    @cached_property
    def layout(self) -> Layout:
        held = self._group.names()
        quantities = tuple(q for q in DESCRIPTIONS if variable_of(q) in held)
        if Quantity.MEAN not in quantities and Quantity.SAMPLES not in quantities:
            raise UserError(
                f"{self.path}: expected a map of dust with density_mean, got {sorted(held)}"
            )
        missing = [name for name in "xyz" if name not in held]
        system = self._group.attributes.get("extinction_system")
        if missing or not isinstance(system, str):
            lacks = missing or ["the attribute extinction_system"]
            raise UserError(f"{self.path}: a map of dust must have {', '.join(lacks)}")
        samples, shapes = 0, {q: self._group.shape(variable_of(q)) for q in quantities}
        if Quantity.SAMPLES in shapes:
            samples, *rest = shapes[Quantity.SAMPLES] or (0,)
            shapes[Quantity.SAMPLES] = tuple(rest)
        units = dict.fromkeys("xyz", "pc") | {variable_of(q): DESCRIPTIONS[q].unit for q in shapes}
        for name, unit in units.items():
            refuse_other_unit(self.path, name, self._group.unit(name), unit)
        for q, name in ((q, variable_of(q)) for q in quantities):
            refuse_other_axes(self.path, name, self._group.dimensions(name), dimensions_of(q))
        axes = {name: self._group.read(name, ...).astype(np.float64) for name in "xyz"}
        names = "percentiles", "between", "between_grid"
        widths = (self._group.attributes.get(name, "") for name in names)
        return layout_of(self.path, shapes, samples, axes, system, *widths)

    @property
    def finer(self) -> tuple[AbstractCubes, ...]:
        levels = self._group.attributes.get("levels", [])
        known = isinstance(levels, list) and all(isinstance(each, dict) for each in levels)
        names = [each.get("path") for each in levels] if known else [None]
        if names != [level_path(number) for number in range(1, len(names) + 1)]:
            raise UserError(f"{self.path} is damaged, make it again: levels = {levels!r}")
        paths = [self.path / str(name) for name in names]
        for path in paths:
            if not path.exists():
                gone = f"a part of it is missing: {path.name}"
                raise UserError(f"{self.path}: {gone}; copy or make it again")
        return tuple(map(ZarrCubes, paths))

    @property
    def tile(self) -> Mapping[str, Any]:
        return self._group.tile or {}

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        index = (cube.sample, *box) if cube.quantity is Quantity.SAMPLES else box
        values = self._group.read(variable_of(cube.quantity), index)
        return values.astype(np.float32, copy=False)

    @cached_property
    def _group(self) -> "CheckedGroup":
        from dustmap.sky._zarr import CheckedGroup  # a FITS file waits for no zarr

        return CheckedGroup(self.path, "a zarr group of version 2 or 3")


def refuse_unknown(values: NDArray[np.float32], name: str = "") -> None:
    """Refuse a cube with voxels that have no density; name: of the cube."""
    unknown = values.size - int(np.isfinite(values).sum())
    if unknown:
        raise UserError(
            f"{name and name + ': '}{unknown} of {values.size} voxels have no density; merge the "
            "tiles that are missing, or export a part of the map"
        )
