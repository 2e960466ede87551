"""Maps back from the files that `write_zarr` and `write_fits` make."""

import json
from pathlib import Path

import numpy as np
import xarray as xr
from astropy.io import fits
from astropy.wcs import WCS
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky._map import DensityMap
from dustmap.sky._writers import EXTENSIONS


def read_map(path: str | Path) -> DensityMap:
    """Reads a run directory's map, a map.zarr or a map.fits."""
    path = Path(path)
    if (path / "zarr.json").is_file():
        return _read_zarr(path)
    if path.is_file() and path.suffix.lower() in {".fits", ".fit"}:
        return _read_fits(path)
    for name in ("map.zarr", "map.fits"):
        if (path / name).exists():
            return read_map(path / name)
    raise FileNotFoundError(f"{path}: expected a run directory, a map.zarr or a map.fits")


def _read_zarr(path: Path) -> DensityMap:
    with xr.open_zarr(path, consolidated=False) as dataset:
        if "density_mean" not in dataset:
            known = json.dumps(sorted(map(str, dataset.data_vars)))
            raise ValueError(f"{path}: expected the variable density_mean, got {known}")
        grid = _grid([np.asarray(dataset[name].values, np.float64) for name in "xyz"], path)
        mean = dataset["density_mean"].values
        std = dataset["density_std"].values if "density_std" in dataset else None
        return DensityMap(grid, mean, std, str(dataset.attrs["extinction_system"]))


def _read_fits(path: Path) -> DensityMap:
    with fits.open(path, checksum=True) as hdus:
        if EXTENSIONS["mean"] not in hdus:
            raise ValueError(f"{path}: expected an image {EXTENSIONS['mean']}")
        header = hdus[EXTENSIONS["mean"]].header
        grid = _grid(_wcs_axes(header), path)
        mean = np.asarray(hdus[EXTENSIONS["mean"]].data, np.float32)
        std = hdus[EXTENSIONS["std"]].data if EXTENSIONS["std"] in hdus else None
        return DensityMap(
            grid, mean, None if std is None else np.asarray(std, np.float32), header["EXTSYS"]
        )


def _wcs_axes(header: fits.Header) -> list[NDArray[np.float64]]:
    wcs = WCS(header)
    axes = []
    for i in range(3):
        pixels = np.zeros((header[f"NAXIS{i + 1}"], 3))
        pixels[:, i] = np.arange(len(pixels))
        axes.append(np.asarray(wcs.wcs_pix2world(pixels, 0)[:, i], np.float64))
    return axes


def _grid(axes: list[NDArray[np.float64]], path: Path) -> RegularGrid:
    for name, axis in zip("XYZ", axes, strict=True):
        steps = np.diff(axis)
        if len(axis) < 2 or not np.allclose(steps, steps[0], rtol=1e-6):
            raise ValueError(f"{path}: axis {name} must have two or more voxels, equally spaced")
    return RegularGrid(
        lower=tuple(float(axis[0]) for axis in axes),
        spacing=tuple(float((axis[-1] - axis[0]) / (len(axis) - 1)) for axis in axes),
        shape=tuple(len(axis) for axis in axes),
    )
