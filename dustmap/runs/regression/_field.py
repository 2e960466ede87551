"""A regression's posterior on a regular grid, as zarr and FITS files."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import xarray as xr
from astropy.io import fits
from numpy.typing import NDArray

from dustmap import __version__
from dustmap.gp import RegularGrid
from dustmap.sky import Provenance
from dustmap.tables._outputs import replacing

CHUNK = 64  # nodes per axis


@final
@dataclass(frozen=True, eq=False)
class GriddedField:
    """Posterior mean and standard deviation of f at the nodes of a grid.

    mean, std: of the grid's shape; inputs: names of its axes; target: what f predicts.
    """

    grid: RegularGrid
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    inputs: tuple[str, ...]
    target: str

    def axes(self) -> tuple[NDArray[np.float64], ...]:
        """Coordinates of the nodes along each input."""
        return tuple(axis.numpy() for axis in self.grid.axes())

    def quantities(self) -> dict[str, NDArray[np.float64]]:
        """The arrays by the names they have in files."""
        return {"target_mean": self.mean, "target_std": self.std}

    def meaning(self, name: str) -> str:
        """What an array holds, in words."""
        what = "mean" if name == "target_mean" else "standard deviation"
        return f"posterior {what} of {self.target}"


def write_zarr(path: Path, field: GriddedField, provenance: Provenance, overwrite: bool) -> None:
    """Writes target_mean and target_std with the inputs as dimensions, in their order."""
    variables = {
        name: (field.inputs, values, {"long_name": field.meaning(name)})
        for name, values in field.quantities().items()
    }
    coordinates = dict(zip(field.inputs, field.axes(), strict=True))
    attributes = {
        "title": f"Gaussian process regression of {field.target}",
        "source": provenance.creator,
        "date_created": provenance.date,
        "history": "\n".join(provenance.history()),
        "config_sha256": provenance.config_sha256,
    }
    dataset = xr.Dataset(variables, coordinates, attrs=attributes)
    chunks = tuple(min(CHUNK, n) for n in field.grid.shape)
    encoding = {name: {"chunks": chunks} for name in field.quantities()}
    with replacing(path, overwrite) as partial:
        # The version 3 specification has no consolidated metadata yet.
        dataset.to_zarr(partial, mode="w-", encoding=encoding, zarr_format=3, consolidated=False)


def write_fits(path: Path, field: GriddedField, provenance: Provenance, overwrite: bool) -> None:
    """Writes one image a quantity with a linear WCS; the first input is the first FITS axis."""
    images = [_image(field, name) for name in field.quantities()]
    primary = fits.PrimaryHDU()
    for hdu in (primary, *images):
        hdu.header["DATE"] = (provenance.date, "UTC")
        hdu.header["CREATOR"] = "dustmap"
        hdu.header["VERSION"] = __version__
        for line in provenance.history():
            hdu.header.add_history(line)
    with replacing(path, overwrite) as partial:
        fits.HDUList([primary, *images]).writeto(partial, checksum=True)


def _image(field: GriddedField, name: str) -> fits.ImageHDU:
    values = np.ascontiguousarray(field.quantities()[name].transpose())
    image = fits.ImageHDU(values.astype(">f8"), name=name.upper())
    for i, axis in enumerate(field.inputs):
        image.header[f"CTYPE{i + 1}"] = axis
        image.header[f"CRPIX{i + 1}"] = (1.0, "the first node")
        image.header[f"CRVAL{i + 1}"] = field.grid.lower[i]
        image.header[f"CDELT{i + 1}"] = field.grid.spacing[i]
    image.header["OBJECT"] = (field.target, field.meaning(name).replace(field.target, "OBJECT"))
    return image


WRITERS = {"zarr": write_zarr, "fits": write_fits}
