"""A regression's posterior on a regular grid, as zarr and FITS files."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import zarr
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky import Provenance
from dustmap.sky._streamed_fits import ImagePlan, axis_cards, streamed_fits
from dustmap.sky._zarr import create_array, create_axis
from dustmap.tables import replacing

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
        """Return the coordinates of the nodes along each input."""
        return tuple(axis.numpy() for axis in self.grid.axes())

    def quantities(self) -> dict[str, NDArray[np.float64]]:
        """Return the arrays by the names they have in files."""
        return {"target_mean": self.mean, "target_std": self.std}

    def meaning(self, name: str) -> str:
        """Describe what an array holds."""
        what = "mean" if name == "target_mean" else "standard deviation"
        return f"posterior {what} of {self.target}"


def write_field(
    path: Path, form: str, field: GriddedField, provenance: Provenance, overwrite: bool
) -> None:
    """Write target_mean and target_std, as "zarr" or "fits".

    zarr: with the inputs as dimensions, in their order. FITS: one image a quantity with a linear
    WCS; the first input is the first FITS axis.
    """
    write = _write_zarr if form == "zarr" else _write_fits
    with replacing(path, overwrite) as partial:
        write(partial, field, provenance)


def _write_zarr(path: Path, field: GriddedField, provenance: Provenance) -> None:
    group = zarr.create_group(path, zarr_format=3)
    title = f"Gaussian process regression of {field.target}"
    group.attrs.update(provenance.attributes(title))
    for name, axis in zip(field.inputs, field.grid.axes(), strict=True):
        create_axis(group, name, axis.numpy(), {})
    chunks = tuple(min(CHUNK, n) for n in field.grid.shape)
    for name, values in field.quantities().items():
        said = {"long_name": field.meaning(name)}
        array = create_array(
            group, name, values.shape, field.inputs, "f8", chunks=chunks, attributes=said
        )
        array[...] = values


def _write_fits(path: Path, field: GriddedField, provenance: Provenance) -> None:
    plans = [_plan(field, name, provenance) for name in field.quantities()]
    with streamed_fits(path, plans) as images:
        for name, values in field.quantities().items():
            images[name.upper()].write((0,), values.transpose())


def _plan(field: GriddedField, name: str, provenance: Provenance) -> ImagePlan:
    cards = axis_cards(field.grid, field.inputs)
    cards["OBJECT"] = (field.target, field.meaning(name).replace(field.target, "OBJECT"))
    provenance.stamp(cards)
    return ImagePlan(name.upper(), field.grid.shape[::-1], cards, ">f8")
