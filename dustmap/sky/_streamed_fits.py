"""FITS files whose images are larger than memory: laid out first, filled in pieces, then summed."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, final

import numpy as np
from astropy.io import fits
from numpy.typing import ArrayLike

from dustmap.sky._checksum import encoded, file_sum, words_sum

_BLOCK = 2880  # bytes: header and data are padded to a multiple
_NO_SUM = "0" * 16


@final
class StreamedImage:
    """Float32 data of `shape` at `offset` of an open file; `header` may change values, not cards."""

    def __init__(
        self, file: BinaryIO, header: fits.Header, shape: tuple[int, ...], start: int
    ) -> None:
        self.header = header
        self.shape = shape
        self.start = start
        self.offset = start + len(header.tostring())
        self.length = _padded(4 * math.prod(shape))
        self._file = file

    @property
    def end(self) -> int:
        """First byte after the data and their padding."""
        return self.offset + self.length

    def write(self, index: tuple[int, ...], values: ArrayLike) -> None:
        """Puts `values` where the first of them has `index`, on in C order; missing ones are 0.

        An index shorter than the shape means the start of that slice.
        """
        data = np.ascontiguousarray(values, ">f4")
        full = (*index, *(0,) * (len(self.shape) - len(index)))
        first = int(np.ravel_multi_index(full, self.shape))
        if first + data.size > math.prod(self.shape):
            raise ValueError(f"{data.shape} at {index} does not fit into an image {self.shape}")
        self._file.seek(self.offset + 4 * first)
        self._file.write(data.data)

    def finish(self) -> None:
        """Writes the header with the sums of what the image has become."""
        data = file_sum(self._file, self.offset, self.length)
        self.header["DATASUM"] = str(data)
        self.header["CHECKSUM"] = _NO_SUM
        self.header["CHECKSUM"] = encoded(words_sum(self._bytes(), data))
        if len(self._bytes()) != self.offset - self.start:
            raise ValueError("the header of a streamed image must keep its number of cards")
        self._file.seek(self.start)
        self._file.write(self._bytes())

    def _bytes(self) -> bytes:
        return self.header.tostring().encode("ascii")


@final
@dataclass(frozen=True, eq=False)
class ImagePlan:
    """An image extension to come: its name, its shape in C order, and the cards that describe it.

    name "PRIMARY" makes it the data of the first unit.
    """

    name: str
    shape: tuple[int, ...]
    cards: fits.Header


@contextmanager
def streamed_fits(
    path: Path, units: Sequence[ImagePlan | fits.BinTableHDU]
) -> Iterator[dict[str, StreamedImage]]:
    """Lays out `units` in a new file and yields the images by name, to be filled by the block.

    Tables are written at once. An empty primary unit comes first where no image is PRIMARY. After
    the block every unit has its CHECKSUM and DATASUM.
    """
    images: dict[str, StreamedImage] = {}
    with path.open("w+b") as file:
        if not any(isinstance(unit, ImagePlan) and unit.name == "PRIMARY" for unit in units):
            file.write(_written([fits.PrimaryHDU()]))
        for unit in units:
            if isinstance(unit, fits.BinTableHDU):
                file.write(_written([fits.PrimaryHDU(), unit])[_BLOCK:])
                continue
            image = StreamedImage(file, _header(unit), unit.shape, file.tell())
            images[unit.name] = image
            file.truncate(image.end)
            file.seek(image.end)
        yield images
        for image in images.values():
            image.finish()


def _header(plan: ImagePlan) -> fits.Header:
    primary = plan.name == "PRIMARY"
    header = fits.Header()
    if primary:
        header["SIMPLE"] = (True, "conforms to FITS standard")
    else:
        header["XTENSION"] = ("IMAGE", "Image extension")
    header["BITPIX"] = (-32, "32-bit floating point")
    header["NAXIS"] = len(plan.shape)
    for i, n in enumerate(reversed(plan.shape)):
        header[f"NAXIS{i + 1}"] = n
    if primary:
        header["EXTEND"] = True
    else:
        header["PCOUNT"] = 0
        header["GCOUNT"] = 1
        header["EXTNAME"] = plan.name
    header.extend(plan.cards, update=True)
    header["CHECKSUM"] = (_NO_SUM, "sum of the whole unit")
    header["DATASUM"] = ("0" * 10, "sum of the data")
    return header


def _written(units: list[fits.PrimaryHDU | fits.BinTableHDU]) -> bytes:
    """The bytes of complete units, each with its sums."""
    buffer = BytesIO()
    fits.HDUList(units).writeto(buffer, checksum=True)
    return buffer.getvalue()


def _padded(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
