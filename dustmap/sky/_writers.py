"""Maps to files that other tools open: zarr (version 3, through xarray) and FITS cubes."""

from pathlib import Path

import numpy as np
import xarray as xr
from astropy.io import fits
from numpy.typing import NDArray

from dustmap import __version__
from dustmap.sky._atomic import replacing
from dustmap.sky._map import DensityMap
from dustmap.sky._provenance import Provenance

UNIT = "mag.pc-1"  # parses as FITS, VOUnit, CDS and generic unit; `mag pc-1` does not in CDS
CHUNK = 64  # voxels per axis
# The names the readers of published maps look for; the dot belongs to the second.
EXTENSIONS = {"mean": "MEAN", "std": "STD."}
LONG_NAMES = {"mean": "posterior mean of the dust density", "std": "its standard deviation"}


def write_zarr(
    path: str | Path, density: DensityMap, provenance: Provenance, overwrite: bool = False
) -> None:
    """Writes density_mean and density_std (z, y, x) with coordinates x, y, z in pc."""
    dataset = to_dataset(density, provenance)
    chunks = tuple(min(CHUNK, n) for n in density.mean.shape)
    encoding = {str(name): {"chunks": chunks} for name in dataset.data_vars}
    with replacing(Path(path), overwrite) as partial:
        # The version 3 specification has no consolidated metadata yet.
        dataset.to_zarr(partial, mode="w-", encoding=encoding, zarr_format=3, consolidated=False)


def to_dataset(density: DensityMap, provenance: Provenance) -> xr.Dataset:
    """The map as an xarray dataset, described by its attributes."""
    variables = {
        f"density_{name}": (("z", "y", "x"), values, _attributes(name, density.system))
        for name, values in density.quantities().items()
    }
    coordinates = {
        name: (name, axis, {"units": "pc", "axis": name.upper(), "long_name": _axis_name(name)})
        for name, axis in zip("xyz", density.axes(), strict=True)
    }
    return xr.Dataset(variables, coordinates, attrs=_global_attributes(density, provenance))


def _axis_name(name: str) -> str:
    return f"heliocentric Galactic {name.upper()}"


def _attributes(name: str, system: str) -> dict[str, str]:
    ucd = "phys.absorption;stat.mean" if name == "mean" else "stat.stdev;phys.absorption"
    return {
        "units": UNIT,
        "long_name": LONG_NAMES[name],
        "ucd": ucd,
        "extinction_system": system,
    }


def _global_attributes(density: DensityMap, provenance: Provenance) -> dict[str, str]:
    return {
        "title": "3D map of the interstellar dust density",
        "source": provenance.creator,
        "date_created": provenance.date,
        "history": "\n".join(provenance.history()),
        "config_sha256": provenance.config_sha256,
        "extinction_system": density.system,
        "frame": "heliocentric Galactic cartesian: +X to l=0, +Y to l=90 deg, +Z to b=90 deg",
    }


def write_fits(
    path: str | Path, density: DensityMap, provenance: Provenance, overwrite: bool = False
) -> None:
    """Writes one image [z, y, x] a quantity, with a linear WCS of X, Y, Z in pc."""
    images = [_image(density, name, values) for name, values in density.quantities().items()]
    primary = fits.PrimaryHDU()
    for hdu in (primary, *images):
        _describe(hdu.header, provenance)
    with replacing(Path(path), overwrite) as partial:
        fits.HDUList([primary, *images]).writeto(partial, checksum=True)


def _image(density: DensityMap, name: str, values: NDArray[np.float32]) -> fits.ImageHDU:
    image = fits.ImageHDU(values.astype(">f4"), name=EXTENSIONS[name])
    grid = density.grid
    for i, axis in enumerate("xyz"):
        image.header[f"CTYPE{i + 1}"] = axis.upper()
        image.header[f"CUNIT{i + 1}"] = "pc"
        image.header[f"CRPIX{i + 1}"] = (1.0, "centre of the first voxel")
        image.header[f"CRVAL{i + 1}"] = grid.lower[i]
        image.header[f"CDELT{i + 1}"] = grid.spacing[i]
        image.header[f"CNAME{i + 1}"] = _axis_name(axis)
    image.header["BUNIT"] = UNIT
    image.header["EXTSYS"] = (density.system, "band or curve of the extinction")
    return image


def _describe(header: fits.Header, provenance: Provenance) -> None:
    header["DATE"] = (provenance.date, "UTC")
    header["CREATOR"] = "dustmap"
    header["VERSION"] = __version__
    for line in provenance.history():
        header.add_history(line)
