"""The layout of Leike, Glatzle & Enßlin (2020, A&A 639, A138): an HDF5 cube of voxels of 1 pc.

`dustmaps.leike2020.Leike2020Query(map_fname=...)` takes the lower edge (−370, −370, −270) pc and
the step for granted, so the voxels are always these; what lies outside the box of our map is NaN,
as that reader has it outside its own. Datasets mean, std [ix, iy, iz], in e-foldings of Gaia's G
per kpc.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import final

import h5py
import numpy as np

from dustmap.gp import RegularGrid
from dustmap.sky._provenance import Provenance, conversion_note, write_attributes
from dustmap.sky.layouts._places import LayoutCounts, counts
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from dustmap.sky.systems import conversion, system_named
from dustmap.tables import new_hdf5, replacing

EDGE = (-370.0, -370.0, -270.0)  # pc: lower edge of the first voxel
SHAPE = (740, 740, 540)
SYSTEM = "e-folding_G"
_PER_KPC = 1e3
_CHUNK = (64, 64, 16)
#: Bytes of a layer of chunks, which are held as slabs need not begin where chunks do.
_LAYER = 4 * _CHUNK[2] * (SHAPE[0] + _CHUNK[0]) * (SHAPE[1] + _CHUNK[1])


@final
@dataclass(frozen=True)
class LeikeOptions:
    """shape: voxels of 1 pc from the corner at (−370, −370, −270) pc.

    The published map has (740, 740, 540). dustmaps reads fewer in the right places; other readers
    may not.
    """

    shape: tuple[int, int, int] = SHAPE

    def __post_init__(self) -> None:
        if not all(2 <= n <= most for n, most in zip(self.shape, SHAPE, strict=True)):
            raise ValueError(f"shape: expected (2, 2, 2) to {SHAPE}, got {self.shape}")


def write_leike2020(
    path: str | Path,
    field: AbstractDensityField,
    options: LeikeOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Writes mean and std in float32; parts without a voxel of the map take no space on disk."""
    system = system_named(SYSTEM)
    factor = conversion(field.system, system) * _PER_KPC
    first, grid = _inside(field, options.shape)
    request = MapRequest((Quantity.MEAN, Quantity.STD))
    note = conversion_note(field.system, system, factor / _PER_KPC) + ", per kpc"
    inside = LayoutCounts()
    with replacing(Path(path), overwrite) as partial, new_hdf5(partial, _LAYER) as (file, disk):
        write_attributes(file, "kpc-1", system, provenance, note)
        file.attrs["lower_edge_pc"] = EDGE
        file.attrs["step_pc"] = 1.0
        datasets = {
            name: _dataset(file, name, options.shape) for name in (q.value for q in request.cubes)
        }
        x, y, z = (slice(i, i + n) for i, n in zip(first, grid.shape, strict=True))
        for slab in field.planes(grid, request):
            k = slice(z.start + slab.start, z.start + slab.stop)
            for name, dataset in datasets.items():
                values = slab.arrays[name].transpose(2, 1, 0) * np.float32(factor)
                dataset[x, y, k] = values
                inside += counts(values)
            disk.check()
    total = 2 * math.prod(options.shape)
    return LayoutCounts(total, total - inside.values + inside.outside)


def _inside(
    field: AbstractDensityField, shape: tuple[int, int, int]
) -> tuple[tuple[int, ...], RegularGrid]:
    """The voxels whose centres are in the box: index of the first of them, and their grid."""
    ranges = []
    for edge, n, low, high in zip(EDGE, shape, field.lower, field.upper, strict=True):
        centres = edge + 0.5 + np.arange(n)
        ranges.append(np.flatnonzero((centres >= low) & (centres <= high)))
    if min(len(indices) for indices in ranges) < 2:
        raise ValueError(
            f"box: {field.lower} to {field.upper} pc has no voxel of the Leike2020 layout, "
            f"{shape} of 1 pc from {EDGE}; export a cube (zarr, fits or gtomo) in its place"
        )
    first = tuple(int(indices[0]) for indices in ranges)
    lower = tuple(edge + 0.5 + i for edge, i in zip(EDGE, first, strict=True))
    return first, RegularGrid(lower, (1.0, 1.0, 1.0), tuple(len(indices) for indices in ranges))


def _dataset(file: h5py.File, name: str, shape: tuple[int, int, int]) -> h5py.Dataset:
    chunks = tuple(min(c, n) for c, n in zip(_CHUNK, shape, strict=True))
    return file.create_dataset(name, shape, "f4", chunks=chunks, fillvalue=np.nan)
