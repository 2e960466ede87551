"""The layouts by name, as a command line asks for them, and those of cubes.

Leike, Glatzle & Enßlin (2020, A&A 639, A138): HDF5, voxels of 1 pc.
`dustmaps.leike2020.Leike2020Query(map_fname=...)` takes the lower edge (−370, −370, −270) pc and
the step for granted, so the voxels are always these; what lies outside the box of our map is NaN,
as that reader has it outside its own. Datasets mean, std [ix, iy, iz], in e-foldings of Gaia's G
per kpc.

G-Tomo (Lallement, Vergely and others), which is read, too: FITS or HDF5, in A0(550 nm) per pc.
FITS: the primary unit holds [z, y, x], with STEP, RESOL, UNIT and SUN_POSX/Y/Z. HDF5: the dataset
explore/cube_datas [x, y, z] with the same as attributes; there the Sun's position is stored as
(z, x, y), as the readers of these files turn it back. Positions of the Sun are of pixel *edges*:

    index (0-based) = coordinate / STEP + SUN_POS − 0.5.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final

import h5py
import numpy as np
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._provenance import Provenance, conversion_note, density_cards, write_attributes
from dustmap.sky._streamed_fits import UnitPlan, streamed_fits
from dustmap.sky.layouts import _shells
from dustmap.sky.layouts._places import LayoutCounts, RadialBins, Shells, resolving_nside
from dustmap.sky.maps import AbstractDensityField, DustMap, MapRequest, Quantity
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from dustmap.tables import new_hdf5, open_hdf5, replacing, translating

#: Bayestar files have five, where the density has as many.
_BAYESTAR_SAMPLES = 5
#: Pixels of skies by default, of HEALPix tables at most.
_NSIDE = 64
_EDGE = (-370.0, -370.0, -270.0)  # pc: lower edge of the first voxel
_SHAPE = (740, 740, 540)
_PER_KPC = 1e3
_CHUNK = (64, 64, 16)
#: Bytes of a layer of chunks, which are held as slabs need not begin where chunks do.
_LAYER = 4 * _CHUNK[2] * (_SHAPE[0] + _CHUNK[0]) * (_SHAPE[1] + _CHUNK[1])


@final
@dataclass(frozen=True)
class LeikeOptions:
    """Settings of `write_leike2020`: `shape`, voxels of 1 pc from the corner (−370, −370, −270) pc.

    The published map has (740, 740, 540). dustmaps reads fewer in the right places; other readers
    may not.
    """

    shape: tuple[int, int, int] = _SHAPE

    def __post_init__(self) -> None:
        if not all(2 <= n <= most for n, most in zip(self.shape, _SHAPE, strict=True)):
            raise UserError(f"shape: expected (2, 2, 2) to {_SHAPE}, got {self.shape}")


def write_leike2020(
    path: str | Path,
    field: AbstractDensityField,
    options: LeikeOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Write mean and std in float32; parts without a voxel of the map take no space on disk."""
    system = system_named("e-folding_G")
    factor = conversion(field.system, system) * _PER_KPC
    first, grid = _inside(field, options.shape)
    request = MapRequest((Quantity.MEAN, Quantity.STD))
    note = conversion_note(field.system, system) + ", per kpc"
    inside = LayoutCounts()
    with replacing(Path(path), overwrite) as partial, new_hdf5(partial, _LAYER) as (file, disk):
        write_attributes(file, "kpc-1", system, provenance, note)
        file.attrs["lower_edge_pc"] = _EDGE
        file.attrs["step_pc"] = 1.0
        shape = options.shape
        chunks = tuple(min(c, n) for c, n in zip(_CHUNK, shape, strict=True))
        datasets = {
            name: file.create_dataset(name, shape, "f4", chunks=chunks, fillvalue=np.nan)
            for name in ("mean", "std")
        }
        x, y, z = (slice(i, i + n) for i, n in zip(first, grid.shape, strict=True))
        for slab in field.planes(grid, request):
            k = slice(z.start + slab.start, z.start + slab.stop)
            for name, dataset in datasets.items():
                values = slab.arrays[name].transpose(2, 1, 0) * np.float32(factor)
                dataset[x, y, k] = values
                inside += LayoutCounts.of(values)
            disk.check()
    total = 2 * math.prod(options.shape)
    return LayoutCounts(total, total - inside.values + inside.outside)


def _inside(
    field: AbstractDensityField, shape: tuple[int, int, int]
) -> tuple[tuple[int, ...], RegularGrid]:
    """Find the voxels whose centres are in the box: index of the first, and their grid."""
    ranges = []
    for edge, n, low, high in zip(_EDGE, shape, field.lower, field.upper, strict=True):
        centres = edge + 0.5 + np.arange(n)
        ranges.append(np.flatnonzero((centres >= low) & (centres <= high)))
    if min(len(indices) for indices in ranges) < 2:
        raise UserError(
            f"box: {field.lower} to {field.upper} pc has no voxel of the Leike2020 layout, "
            f"{shape} of 1 pc from {_EDGE}; export a cube (zarr, fits or gtomo) in its place"
        )
    first = tuple(int(indices[0]) for indices in ranges)
    lower = tuple(edge + 0.5 + i for edge, i in zip(_EDGE, first, strict=True))
    return first, RegularGrid(lower, (1.0, 1.0, 1.0), tuple(len(indices) for indices in ranges))


_GTOMO_SYSTEM = "A0_550"
_GTOMO_UNIT = "A0(550nm)/parsec"
_DATASET = "explore/cube_datas"
_GTOMO_CHUNK = 64  # voxels per axis of a chunk in HDF5
#: Puts planes [z, y, x] from a z on into a file.
Put: TypeAlias = Callable[[int, NDArray[np.float32]], None]
#: Endings of the files that are written as HDF5; all others are FITS.
_HDF5_SUFFIXES = (".h5", ".hdf5")
#: The group of cubes older than 2021, which does not say what was mapped.
_OLD_DATASET = "stilism/cube_datas"
_UNIT_START = "a0(550nm)"


@final
@dataclass(frozen=True)
class GTomoOptions:
    """Settings of `write_gtomo`: a file has one quantity, as those of the published maps.

    Attributes
    ----------
    grid : centres of the voxels, one step for all axes
    quantity : MEAN, STD or another cube
    resolution : what the map resolves, in pc; None for the step
    """

    grid: RegularGrid
    quantity: Quantity = Quantity.MEAN
    resolution: float | None = None

    def __post_init__(self) -> None:
        if self.grid.dim != 3 or not np.allclose(self.grid.spacing, self.grid.spacing[0]):
            raise UserError(
                f"grid: expected three axes of one step, got steps {self.grid.spacing} pc"
            )
        if self.quantity in (Quantity.SAMPLES, Quantity.COVERAGE):
            raise UserError(f"quantity: expected a density, got {self.quantity.value}")
        if self.resolution is not None and not self.resolution > 0:
            raise UserError(f"resolution: expected more than 0 pc, got {self.resolution:g}")

    @property
    def step(self) -> float:
        """Edge of a voxel in pc."""
        return self.grid.spacing[0]

    @property
    def sun(self) -> NDArray[np.float64]:
        """SUN_POS of the axes (x, y, z)."""
        return 0.5 - np.array(self.grid.lower) / self.step


def write_gtomo(
    path: str | Path,
    field: AbstractDensityField,
    options: GTomoOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Write HDF5 if the name ends in .h5 or .hdf5, else FITS."""
    system = system_named(_GTOMO_SYSTEM)
    factor = conversion(field.system, system)
    field.check_grid(options.grid)
    note = f"{options.quantity.value}; {conversion_note(field.system, system)}"
    opened = _hdf5 if Path(path).suffix.lower() in _HDF5_SUFFIXES else _fits
    slabs = field.planes(options.grid, MapRequest((options.quantity,)))
    total = LayoutCounts()
    with (
        replacing(Path(path), overwrite) as partial,
        opened(partial, options, provenance, note) as put,
    ):
        for slab in slabs:
            values = slab.arrays[options.quantity.value] * np.float32(factor)
            put(slab.start, values)
            total += LayoutCounts.of(values)
    return total


@contextmanager
def _fits(path: Path, options: GTomoOptions, provenance: Provenance, note: str) -> Iterator[Put]:
    """Open a new FITS file; yield what puts planes [z, y, x] into it."""
    cards = density_cards("", system_named(_GTOMO_SYSTEM), provenance, (note,))
    cards["STEP"] = (options.step, "pc")
    cards["RESOL"] = (options.resolution or options.step, "pc")
    cards["UNIT"] = _GTOMO_UNIT
    for axis, position in zip("XYZ", options.sun, strict=True):
        cards[f"SUN_POS{axis}"] = (position, "0-based index = coordinate/STEP + this - 0.5")
    plan = UnitPlan.image("PRIMARY", options.grid.shape[::-1], cards)
    with streamed_fits(path, [plan]) as images:
        yield lambda start, values: images["PRIMARY"].write((start,), values)


@contextmanager
def _hdf5(path: Path, options: GTomoOptions, provenance: Provenance, note: str) -> Iterator[Put]:
    """Open a new HDF5 file; yield what puts planes [z, y, x] into it."""
    shape = options.grid.shape
    with new_hdf5(path, 4 * 2 * _GTOMO_CHUNK * shape[0] * shape[1]) as (file, disk):
        write_attributes(file, _GTOMO_UNIT, system_named(_GTOMO_SYSTEM), provenance, note)
        chunks = tuple(min(_GTOMO_CHUNK, n) for n in shape)
        cube = file.create_dataset(_DATASET, shape, "f4", chunks=chunks, fillvalue=np.nan)
        cube.attrs["sun_position"] = np.roll(options.sun, 1)  # z, x, y
        cube.attrs["gridstep_values"] = np.full(3, options.step)
        cube.attrs["resolution_values"] = np.full(3, options.resolution or options.step)
        cube.attrs["cube_version"] = provenance.creator
        cube.attrs["creation_date"] = provenance.date

        def put(start: int, values: NDArray[np.float32]) -> None:
            cube[:, :, start : start + len(values)] = values.transpose(2, 1, 0)
            disk.check()

        yield put


def read_gtomo(
    path: str | Path, system: ExtinctionSystem | None = None, quantity: Quantity = Quantity.MEAN
) -> DustMap:
    """Read FITS (STEP, SUN_POSX ...) or HDF5 (explore/cube_datas, stilism/cube_datas).

    quantity: what the cube is; those of densities' errors have the STD.
    system: what a file that has no UNIT is of: E(B-V) for STILISM of 2018, A0_550 from 2019 on.
    Where a FITS file lacks the Sun's position it is the middle of the cube.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with translating(path, "a cube of G-Tomo"):
        read = _read_hdf5 if h5py.is_hdf5(path) else _read_fits
        values, step, sun, unit = read(path)
    grid = RegularGrid(tuple((0.5 - sun) * step), (step,) * 3, values.shape[::-1])
    return DustMap.from_arrays(grid, {quantity: values}, _system(path, unit, system))


#: Values [z, y, x], the step in pc, SUN_POS of (x, y, z), the unit or "" for none.
_Cube: TypeAlias = tuple[NDArray[np.float32], float, NDArray[np.float64], str]


def _read_fits(path: Path) -> _Cube:
    with fits.open(path) as hdus:
        header, data = hdus[0].header, hdus[0].data
        if data is None or data.ndim != 3 or "STEP" not in header:
            raise UserError(
                f"{path}: expected a cube in the primary unit with the card STEP, as G-Tomo's "
                "cubes have; open other maps with DustMap.open"
            )
        values = np.asarray(data, np.float32)
    shape = np.array(values.shape[::-1])
    sun = [header.get(f"SUN_POS{axis}", n / 2) for axis, n in zip("XYZ", shape, strict=True)]
    return values, float(header["STEP"]), np.array(sun, float), str(header.get("UNIT", ""))


def _read_hdf5(path: Path) -> _Cube:
    with open_hdf5(path) as file:
        names = [name for name in (_DATASET, _OLD_DATASET) if name in file]
        if not names:
            raise UserError(
                f"{path}: expected the dataset {_DATASET} or {_OLD_DATASET}, got {sorted(file)}"
            )
        cube = file[names[0]]
        for key in ("sun_position", "gridstep_values"):
            if key not in cube.attrs:
                raise UserError(
                    f"{path}: {names[0]} has no attribute {key}, so its place is unknown"
                )
        values = np.ascontiguousarray(cube[:].transpose(2, 1, 0), np.float32)
        step = float(np.atleast_1d(cube.attrs["gridstep_values"])[0])
        sun = np.roll(cube.attrs["sun_position"], -1)
        if names[0] == _OLD_DATASET:
            sun = _nearest_to_middle(cube.attrs["sun_position"], cube.shape)
    unit = _UNIT_START if names[0] == _DATASET else ""
    return values, step, np.asarray(sun, np.float64), unit


def _nearest_to_middle(sun: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Old cubes have the Sun in the middle, and its position as (x, y, z) or as (z, x, y)."""
    orders = [np.asarray(sun, np.float64), np.roll(np.asarray(sun, np.float64), -1)]
    return min(orders, key=lambda order: float(np.abs(order - np.array(shape) / 2).max()))


def _system(path: Path, unit: str, declared: ExtinctionSystem | None) -> ExtinctionSystem:
    if unit.lower().replace(" ", "").startswith(_UNIT_START):
        labelled = system_named(_GTOMO_SYSTEM)
        if declared not in (None, labelled):
            raise UserError(f"{path}: the file is in {labelled}, not in {declared}")
        return labelled
    if declared is None:
        raise UserError(
            f"{path}: the file does not say which extinction it maps (UNIT {unit!r}); pass "
            "system: E(B-V) for STILISM of 2018, A0_550 for later cubes"
        )
    return declared


@final
@dataclass(frozen=True)
class LayoutRequest:
    """Quantities, voxels, pixels and bins for a layout; each takes what it has a place for.

    Attributes
    ----------
    request : quantities and samples
    grid : the voxels of a cube
    nside, bins : of pixels and shells; None for 64 and for 516 out to the farthest face of the
        box, or, of HEALPix tables, for no more of both than voxels resolve
    shells : in place of bins
    finer : grids in that of the voxels
    """

    request: MapRequest
    grid: RegularGrid
    nside: int | None = None
    bins: RadialBins | None = None
    shells: Shells | None = None
    finer: tuple[RegularGrid, ...] = ()

    @property
    def pixels(self) -> int:
        """nside, 64 by default."""
        return _NSIDE if self.nside is None else self.nside

    @property
    def finest_angle(self) -> float:
        """The least of h/d, over all grids, for the distance h of nodes and d of the farthest face
        from the Sun, as which no structure within that distance is narrower."""
        grids = (self.grid, *self.finer)
        return min(min(g.spacing) / float(np.abs([g.lower, g.upper]).max()) for g in grids)


#: Writes what is requested of a field; returns the counts of numbers.
Writer: TypeAlias = Callable[
    [Path, AbstractDensityField, LayoutRequest, Provenance, bool], LayoutCounts
]


def _writer(
    write: Callable[[Path, AbstractDensityField, Any, Provenance, bool], LayoutCounts],
    options: Callable[[AbstractDensityField, LayoutRequest], Any],
) -> Writer:
    """Join a writer with how its options follow from a field and a request."""
    return lambda path, field, asked, provenance, overwrite: write(
        path, field, options(field, asked), provenance, overwrite
    )


def _healpix(field: AbstractDensityField, asked: LayoutRequest) -> _shells.HealpixOptions:
    """Add A(<d), and its standard deviation where the density has samples."""
    integrated = (Quantity.MEAN, Quantity.STD) if field.n_samples > 1 else (Quantity.MEAN,)
    angle = asked.finest_angle
    bins = asked.shells or asked.bins or RadialBins.resolving(field, angle)
    nside = min(_NSIDE, resolving_nside(angle)) if asked.nside is None else asked.nside
    return _shells.HealpixOptions(bins, nside, asked.request, integrated)


def _edenhofer2023(_: AbstractDensityField, asked: LayoutRequest) -> _shells.EdenhoferOptions:
    """Choose the file of samples if only these are asked for, else that of mean and std."""
    samples = 0 if asked.request.cubes else asked.request.samples
    return _shells.EdenhoferOptions(asked.bins, asked.pixels, samples)


def _bayestar(field: AbstractDensityField, asked: LayoutRequest) -> _shells.BayestarOptions:
    samples = asked.request.samples or min(_BAYESTAR_SAMPLES, max(1, field.n_samples))
    return _shells.BayestarOptions(asked.pixels, samples)


def _gtomo(_: AbstractDensityField, asked: LayoutRequest) -> GTomoOptions:
    """Choose the one cube that is requested, or the mean where there are several."""
    cubes = asked.request.cubes
    return GTomoOptions(asked.grid, cubes[0] if len(cubes) == 1 else Quantity.MEAN)


#: Writers of the layouts by the names that `dustmap export --format` takes.
LAYOUTS: Mapping[str, Writer] = MappingProxyType(
    {
        "healpix": _writer(_shells.write_healpix, _healpix),
        "edenhofer2023": _writer(_shells.write_edenhofer2023, _edenhofer2023),
        "leike2020": _writer(write_leike2020, lambda field, asked: LeikeOptions()),
        "bayestar": _writer(_shells.write_bayestar, _bayestar),
        "gtomo": _writer(write_gtomo, _gtomo),
    }
)
