"""Reads the cubes of Lallement, Vergely and G-Tomo, published or made by `write_gtomo`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import h5py
import numpy as np
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky._hdf5 import open_hdf5
from dustmap.sky.layouts._gtomo import DATASET, SYSTEM
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.systems import ExtinctionSystem, system_named

#: The group of cubes older than 2021, which does not say what was mapped.
_OLD_DATASET = "stilism/cube_datas"
_UNIT_START = "a0(550nm)"


def read_gtomo(
    path: str | Path,
    system: ExtinctionSystem | None = None,
    quantity: Quantity = Quantity.MEAN,
) -> DustMap:
    """Reads FITS (STEP, SUN_POSX ...) or HDF5 (explore/cube_datas, stilism/cube_datas).

    quantity: what the cube is; those of densities' errors have the STD.
    system: what a file that has no UNIT is of: E(B-V) for STILISM of 2018, A0_550 from 2019 on.
    Where a FITS file lacks the Sun's position it is the middle of the cube.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    cube = _read_hdf5(path) if h5py.is_hdf5(path) else _read_fits(path)
    grid = RegularGrid(
        tuple((0.5 - cube.sun) * cube.step), (cube.step,) * 3, cube.values.shape[::-1]
    )
    return DustMap.from_arrays(grid, {quantity: cube.values}, _system(path, cube.unit, system))


@final
@dataclass(frozen=True, eq=False)
class _Cube:
    """What a file says: values [z, y, x], step in pc, SUN_POS of (x, y, z), unit ("" for none)."""

    values: NDArray[np.float32]
    step: float
    sun: NDArray[np.float64]
    unit: str


def _read_fits(path: Path) -> _Cube:
    with fits.open(path) as hdus:
        header, data = hdus[0].header, hdus[0].data
        if data is None or data.ndim != 3 or "STEP" not in header:
            raise ValueError(
                f"{path}: expected a cube in the primary unit with the card STEP, as G-Tomo's "
                "cubes have; open other maps with DustMap.open"
            )
        values = np.asarray(data, np.float32)
    shape = np.array(values.shape[::-1])
    sun = [header.get(f"SUN_POS{axis}", n / 2) for axis, n in zip("XYZ", shape, strict=True)]
    return _Cube(values, float(header["STEP"]), np.array(sun, float), str(header.get("UNIT", "")))


def _read_hdf5(path: Path) -> _Cube:
    with open_hdf5(path) as file:
        names = [name for name in (DATASET, _OLD_DATASET) if name in file]
        if not names:
            raise ValueError(
                f"{path}: expected the dataset {DATASET} or {_OLD_DATASET}, got {sorted(file)}"
            )
        cube = file[names[0]]
        for key in ("sun_position", "gridstep_values"):
            if key not in cube.attrs:
                raise ValueError(
                    f"{path}: {names[0]} has no attribute {key}, so its place is unknown"
                )
        values = np.ascontiguousarray(cube[:].transpose(2, 1, 0), np.float32)
        step = float(np.atleast_1d(cube.attrs["gridstep_values"])[0])
        sun = np.roll(cube.attrs["sun_position"], -1)
        if names[0] == _OLD_DATASET:
            sun = _nearest_to_middle(cube.attrs["sun_position"], cube.shape)
    unit = _UNIT_START if names[0] == DATASET else ""
    return _Cube(values, step, np.asarray(sun, np.float64), unit)


def _nearest_to_middle(sun: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Old cubes have the Sun in the middle, and its position as (x, y, z) or as (z, x, y)."""
    orders = [np.asarray(sun, np.float64), np.roll(np.asarray(sun, np.float64), -1)]
    return min(orders, key=lambda order: float(np.abs(order - np.array(shape) / 2).max()))


def _system(path: Path, unit: str, given: ExtinctionSystem | None) -> ExtinctionSystem:
    if unit.lower().replace(" ", "").startswith(_UNIT_START):
        labelled = system_named(SYSTEM)
        if given not in (None, labelled):
            raise ValueError(f"{path}: the file is in {labelled}, not in {given}")
        return labelled
    if given is None:
        raise ValueError(
            f"{path}: the file does not say which extinction it maps (UNIT {unit!r}); pass "
            "system: E(B-V) for STILISM of 2018, A0_550 for later cubes"
        )
    return given
