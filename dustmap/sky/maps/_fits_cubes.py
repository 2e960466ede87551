"""Cubes of a map in a FITS file, an image a quantity."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from astropy import units as u
from astropy.io import fits
from astropy.utils.exceptions import AstropyUserWarning
from astropy.wcs import WCS
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky.maps._cubes import (
    BLOCK,
    DESCRIPTIONS,
    TILE_CARDS,
    AbstractCubes,
    AbstractFileCubes,
    Box,
    Cube,
    Layout,
    extension_of,
    layout_of,
    refuse_other_unit,
)
from dustmap.sky.maps._quantities import Quantity, refuse_other_axes
from dustmap.tables import words_of_damage

#: Parts of a voxel that the centres of two cubes may be apart.
_APART = 1e-3


@final
@dataclass(frozen=True)
class FitsCubes(AbstractFileCubes):
    """One image [z, y, x] a quantity, by its name. The file is open only while it is read.

    level: 0 for the map itself, 1 and on for finer levels.
    """

    level: int = 0

    @cached_property
    def layout(self) -> Layout:
        with warnings.catch_warnings(), self._opened() as hdus:
            # Units that a file of which a part is missing no longer has are only warned of.
            warnings.simplefilter("error", AstropyUserWarning)
            held = {hdu.name for hdu in hdus}
            if any(hdu.header.get("PIXTYPE") == "HEALPIX" for hdu in hdus):
                raise UserError(
                    f"{self.path}: expected a map with an image MEAN, got tables of HEALPix "
                    "pixels; healpy.read_map reads these, and the run that they are of answers here"
                )
            samples = 0
            while self._name(Cube(Quantity.SAMPLES, samples)) in held:
                samples += 1
            quantities = tuple(q for q in DESCRIPTIONS if self._name(Cube(q)) in held)
            if not {Quantity.MEAN, Quantity.SAMPLES} & set(quantities):
                names = ", ".join(sorted(held - {"", "PRIMARY"})) or "no named images"
                raise UserError(
                    f"{self.path}: expected a map with an image MEAN, as `dustmap run` and "
                    f"`dustmap export --format fits` write it, got {names}"
                )
            shapes = {q: self._image(hdus, Cube(q)).shape for q in quantities}
            first = self._image(hdus, Cube(quantities[0]))
            cards = "EXTSYS", "PERCENT", "BETWEEN", "BETWGRID"
            system, *widths = (first.header.get(card, "") for card in cards)
            if len(first.shape) != 3:
                raise UserError(
                    f"{self.path}: expected a cube of 3 axes, got {len(first.shape)} in "
                    f"{first.name}"
                )
            if not system:
                raise UserError(
                    f"{self.path}: {first.name} has no card EXTSYS, which names the extinction "
                    "system, such as A_V"
                )
            # An axis without end beside one of no voxels takes no room in the file.
            if 0 in first.shape:
                raise UserError(f"{self.path}: {first.name} has no voxels")
            self._refuse_other_axes(first)
            axes = _axes(first.header)
            others = (Cube(Quantity.SAMPLES, k) for k in range(1, samples))
            for cube in (*map(Cube, quantities), *others):
                image = self._image(hdus, cube)
                unit = image.header.get("BUNIT", "")
                refuse_other_unit(self.path, image.name, unit, DESCRIPTIONS[cube.quantity].unit)
                self._refuse_other_cube(image, first, axes)
            return layout_of(self.path, shapes, samples, axes, system, *widths)

    def _refuse_other_axes(self, image: fits.ImageHDU) -> None:
        """Refuse axes in another order or unit than X, Y, Z in pc, where they say so."""
        for i, axis in enumerate("XYZ"):
            refuse_other_unit(self.path, axis, image.header.get(f"CUNIT{i + 1}", ""), u.pc)
            named = {*str(image.header.get(f"CTYPE{i + 1}", ""))} & {*"XYZ"}
            refuse_other_axes(self.path, image.name, tuple(named), (axis,))

    def _refuse_other_cube(
        self, image: fits.ImageHDU, first: fits.ImageHDU, axes: dict[str, NDArray[np.float64]]
    ) -> None:
        """Refuse a cube that names another system, or other places, than the first."""
        system, given = first.header["EXTSYS"], image.header.get("EXTSYS", first.header["EXTSYS"])
        if system != given:
            raise UserError(
                f"{self.path}: {image.name} has EXTSYS {given!r} and {first.name} {system!r}: "
                "expected one extinction system"
            )
        self._refuse_other_axes(image)
        if image.shape != first.shape or "CRVAL1" not in image.header:
            return  # other shapes `layout_of` refuses
        for name, centres in _axes(image.header).items():
            apart = np.abs(centres - axes[name]).max()
            if not apart <= _APART * abs(centres[-1] - centres[0]) / max(1, len(centres) - 1):
                raise UserError(
                    f"{self.path}: voxels of {image.name} are {apart:.4g} pc along {name} from "
                    f"those of {first.name}: expected the same CRPIX, CRVAL and CDELT"
                )

    @cached_property
    def tile(self) -> Mapping[str, Any]:
        with self._opened() as hdus:
            header = self._image(hdus, self.layout.cubes[0]).header
            return {key: header[card] for card, (key, _) in TILE_CARDS.items() if card in header}

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        with self._opened() as hdus:
            return np.asarray(self._image(hdus, cube).section[box], np.float32)

    @cached_property
    def finer(self) -> tuple[AbstractCubes, ...]:
        if self.level > 0:
            return ()
        with self._opened() as hdus:
            held = {hdu.name for hdu in hdus}
        first = Cube(self.layout.quantities[0])
        numbers = itertools.takewhile(lambda n: extension_of(first, n) in held, itertools.count(1))
        levels = tuple(FitsCubes(self.path, number) for number in numbers)
        for number, level in enumerate(levels, start=1):
            if level.layout.system != self.layout.system:
                raise UserError(
                    f"{self.path}: level {number} has EXTSYS {level.layout.system.name!r} and the "
                    f"map {self.layout.system.name!r}: expected one extinction system"
                )
        return levels

    def _name(self, cube: Cube) -> str:
        return extension_of(cube, self.level)

    def _image(self, hdus: fits.HDUList, cube: Cube) -> fits.ImageHDU:
        """Return the unit of a cube; UserError where it is no image, as damage makes of it."""
        unit = hdus[self._name(cube)]
        if not isinstance(unit, fits.ImageHDU | fits.CompImageHDU):
            raise UserError(f"{self.path}: {self._name(cube)} is no image; is the file whole?")
        return unit

    @contextmanager
    def _opened(self) -> Iterator[fits.HDUList]:
        """Open the file; what astropy says of a damaged one becomes one line that names it."""
        try:
            with self.path.open("rb") as file:
                start = file.read(6)
            if start != b"SIMPLE":  # astropy would unpack what is packed, into memory
                raise UserError(f"{self.path}: expected a FITS file, which starts with SIMPLE")
            if self.path.stat().st_size % BLOCK:
                raise UserError(
                    f"{self.path} is damaged, make it again: expected a FITS file of whole blocks "
                    f"of {BLOCK} bytes"
                )
            try:
                units = fits.open(self.path, memmap=True)
            except OSError as error:
                raise UserError(f"{self.path}: expected a FITS file: {error}") from error
            with units as hdus:
                yield hdus
        except Exception as error:
            if str(error).startswith(str(self.path)):
                raise
            words = words_of_damage(error)
            raise UserError(f"{self.path} is damaged, make it again: {words}") from error


def _axes(header: fits.Header) -> dict[str, NDArray[np.float64]]:
    """Voxel centres of the linear WCS."""
    wcs = WCS(header)
    axes = {}
    for i, name in enumerate("xyz"):
        pixels = np.zeros((header[f"NAXIS{i + 1}"], 3))
        pixels[:, i] = np.arange(len(pixels))
        axes[name] = np.asarray(wcs.wcs_pix2world(pixels, 0)[:, i], np.float64)
    return axes
