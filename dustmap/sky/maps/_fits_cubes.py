"""Cubes of a map.fits."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
from astropy.io import fits
from astropy.utils.exceptions import AstropyUserWarning
from astropy.wcs import WCS
from numpy.typing import NDArray

from dustmap.sky.maps._cubes import (
    DESCRIPTIONS,
    AbstractCubes,
    Box,
    Cube,
    Layout,
    extension_of,
    layout_of,
)
from dustmap.sky.maps._quantities import Quantity
from dustmap.tables import words_of_damage

#: Bytes: every FITS file is a multiple of it.
BLOCK = 2880


@final
@dataclass(frozen=True)
class FitsCubes(AbstractCubes):
    """One image [z, y, x] a quantity, by its name. The file is open only while it is read."""

    path: Path

    def __post_init__(self) -> None:
        _ = self.layout

    @cached_property
    def layout(self) -> Layout:
        with warnings.catch_warnings(), self._reading(), self._opened() as hdus:
            # Units that a file of which a part is missing no longer has are only warned of.
            warnings.simplefilter("error", AstropyUserWarning)
            held = {hdu.name for hdu in hdus}
            samples = 0
            while extension_of(Cube(Quantity.SAMPLES, samples)) in held:
                samples += 1
            present = {
                q: samples > 0 if q is Quantity.SAMPLES else named.extension in held
                for q, named in DESCRIPTIONS.items()
            }
            quantities = tuple(q for q, there in present.items() if there)
            if not {Quantity.MEAN, Quantity.SAMPLES} & set(quantities):
                names = ", ".join(sorted(held - {"", "PRIMARY"})) or "no named images"
                raise ValueError(
                    f"{self.path}: expected a map with an image MEAN, as `dustmap run` and "
                    f"`dustmap export --format fits` write it, got {names}"
                )
            return self._layout(hdus, quantities, samples)

    def _layout(self, hdus: fits.HDUList, quantities: tuple[Quantity, ...], samples: int) -> Layout:
        images = [hdus[extension_of(Cube(q))] for q in quantities]
        header = images[0].header
        if header.get("NAXIS") != 3 or "EXTSYS" not in header:
            raise ValueError(
                f"{self.path}: expected a cube of 3 axes with the card EXTSYS, got "
                f"{header.get('NAXIS')} axes in {images[0].name}"
            )
        # An axis without end beside one of no voxels takes no room in the file.
        if 0 in images[0].shape:
            raise ValueError(f"{self.path}: {images[0].name} has no voxels")
        shapes = {q: image.shape for q, image in zip(quantities, images, strict=True)}
        return layout_of(
            self.path, shapes, samples, _axes(header), header["EXTSYS"], header.get("PERCENT", "")
        )

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        with self._reading(), self._opened() as hdus:
            return np.asarray(hdus[extension_of(cube)].section[box], np.float32)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Whatever astropy has to say of a damaged file is one line that names it."""
        try:
            yield
        except Exception as error:
            if str(error).startswith(str(self.path)):
                raise
            words = words_of_damage(error)
            raise ValueError(f"{self.path} is damaged, make it again: {words}") from error

    def _opened(self) -> fits.HDUList:
        with self.path.open("rb") as file:
            start = file.read(6)
        if start != b"SIMPLE":  # astropy would unpack what is packed, into memory
            raise ValueError(f"{self.path}: expected a FITS file, which starts with SIMPLE")
        if self.path.stat().st_size % BLOCK:
            raise ValueError(
                f"{self.path} is damaged, make it again: expected a FITS file of whole blocks of "
                f"{BLOCK} bytes"
            )
        try:
            return fits.open(self.path, memmap=True)
        except OSError as error:
            raise ValueError(f"{self.path}: expected a FITS file: {error}") from error


def _axes(header: fits.Header) -> dict[str, NDArray[np.float64]]:
    """Voxel centres of the linear WCS."""
    wcs = WCS(header)
    axes = {}
    for i, name in enumerate("xyz"):
        pixels = np.zeros((header[f"NAXIS{i + 1}"], 3))
        pixels[:, i] = np.arange(len(pixels))
        axes[name] = np.asarray(wcs.wcs_pix2world(pixels, 0)[:, i], np.float64)
    return axes
