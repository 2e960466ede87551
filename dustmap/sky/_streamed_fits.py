"""FITS files whose images are larger than memory: laid out first, filled in pieces, then summed.

Ranks fill one file, each its own pieces, and sum each its share of the words.

CHECKSUM and DATASUM follow appendix J of the FITS standard 4.0: a sum of 32-bit words in ones'
complement, and its complement written in sixteen letters and digits, so that the whole unit sums to
zero.

`together` and `replacing_together` are for all files that ranks write together: steps that end at
once on all, under one temporary name.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Self, final

import numpy as np
import torch
from astropy.io import fits
from numpy.typing import ArrayLike

from dustmap.distributed import check_agreement
from dustmap.errors import UserError, one_line
from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld, Alone, out_of_memory
from dustmap.tables._outputs import followed, naming, replacing

ALONE = Alone()


@contextmanager
def together(world: AbstractWorld) -> Iterator[None]:
    """Run a step that every rank has done when any goes on.

    Where memory runs out on one, all raise MemoryError at the end of the step: they leave what
    they write, and begin again in smaller slabs, together. Any other failure ends the job.
    """
    if world.size == 1:
        yield
        return
    words = ""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        words = one_line(error)
    short = [f"rank {rank}: {text}" for rank, text in enumerate(world.texts(words)) if text]
    if short:
        raise MemoryError("; ".join(short))


@contextmanager
def replacing_together(target: Path, overwrite: bool, world: AbstractWorld) -> Iterator[Path]:
    """Replace what ranks write together: the first makes the name, and the file in place.

    The block ends with a step of all.
    """
    if world.rank == 0:
        with replacing(target, overwrite) as partial:
            world.texts(partial.name)
            yield partial
    else:
        partial = followed(target).with_name(world.texts("")[0])
        with naming(partial, target):
            yield partial
    world.texts("")


_BLOCK = 2880  # bytes: header and data are padded to a multiple
_NO_SUM = "0" * 16
_MODULUS = 2**32 - 1  # a carry out of 32 bits is added back at the right
_PIECE = _BLOCK * 4096  # bytes read at once
# Punctuation between the digits, the capitals and the small letters of ASCII.
_EXCLUDED = frozenset(range(0x3A, 0x41)) | frozenset(range(0x5B, 0x61))


def printable(text: str) -> str:
    r"""Write `text` in the printable ASCII that headers are confined to: é becomes \xe9."""
    escaped = text.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in escaped)


def axis_cards(
    grid: RegularGrid, names: Sequence[str], unit: str = "", meanings: Sequence[str] = ()
) -> fits.Header:
    """Return the linear WCS of an image whose pixels are the nodes of a grid, first axis first."""
    header = fits.Header()
    for i, name in enumerate(names):
        header[f"CTYPE{i + 1}"] = name
        if unit:
            header[f"CUNIT{i + 1}"] = unit
        header[f"CRPIX{i + 1}"] = (1.0, "centre of the first voxel")
        header[f"CRVAL{i + 1}"] = grid.lower[i]
        header[f"CDELT{i + 1}"] = grid.spacing[i]
        if meanings:
            header[f"CNAME{i + 1}"] = meanings[i]
    return header


@final
class StreamedImage:
    """Floating-point data of `shape` in an open file, of an image or a table (rows, columns).

    `header` may change the values of its cards until the end, not their number.
    """

    def __init__(self, file: BinaryIO, plan: "UnitPlan", start: int) -> None:
        self.header, self.shape, self.start = plan.header, plan.shape, start
        self.offset = start + len(plan.header.tostring())
        self._file, self._dtype = file, np.dtype(plan.dtype)

    def write(self, index: tuple[int, ...], values: ArrayLike) -> None:
        """Put `values` where the first of them has `index`, on in C order; missing ones are 0.

        An index shorter than the shape means the start of that slice.
        """
        data = np.ascontiguousarray(values, self._dtype)
        full = (*index, *(0,) * (len(self.shape) - len(index)))
        first = int(np.ravel_multi_index(full, self.shape))
        if first + data.size > math.prod(self.shape):
            raise UserError(f"{data.shape} at {index} does not fit into an image {self.shape}")
        self._file.seek(self.offset + self._dtype.itemsize * first)
        self._file.write(data.data)

    def part_sum(self, file: BinaryIO, world: AbstractWorld) -> int:
        """Sum the words in this rank's share of the data; the padding is zeros."""
        part, size = world.share(math.prod(self.shape)), self._dtype.itemsize
        return file_sum(file, self.offset + size * part.start, size * (part.stop - part.start))

    def finish(self, file: BinaryIO, data_sum: int) -> None:
        """Write the header with the sums of what the image has become."""
        self.header["DATASUM"] = str(data_sum)
        self.header["CHECKSUM"] = _NO_SUM
        self.header["CHECKSUM"] = encoded(words_sum(self._bytes(), data_sum))
        if len(self._bytes()) != self.offset - self.start:
            raise UserError("the header of a streamed image must keep its number of cards")
        file.seek(self.start)
        file.write(self._bytes())

    def _bytes(self) -> bytes:
        return str(self.header.tostring()).encode("ascii")


@final
@dataclass(frozen=True, eq=False)
class UnitPlan:
    """An image or a binary table to come: its name, its shape in C order, and its header.

    name "PRIMARY" makes an image the data of the first unit; dtype: ">f4" or ">f8".
    """

    name: str
    shape: tuple[int, ...]
    header: fits.Header
    dtype: str = ">f4"

    @classmethod
    def image(
        cls, name: str, shape: tuple[int, ...], cards: fits.Header, dtype: str = ">f4"
    ) -> Self:
        """Plan an image that `cards` describe."""
        bits = 8 * np.dtype(dtype).itemsize
        first: tuple[Any, ...] = ("XTENSION", "IMAGE", "Image extension")
        last: list[tuple[Any, ...]] = [("PCOUNT", 0), ("GCOUNT", 1), ("EXTNAME", name)]
        if name == "PRIMARY":
            first, last = ("SIMPLE", True, "conforms to FITS standard"), [("EXTEND", True)]
        axes = [(f"NAXIS{i + 1}", n) for i, n in enumerate(reversed(shape))]
        size = [("BITPIX", -bits, f"{bits}-bit floating point"), ("NAXIS", len(axes)), *axes]
        return cls(name, shape, _described([first, *size, *last], cards), dtype)

    @classmethod
    def table(
        cls, name: str, rows: int, columns: Sequence[tuple[str, str]], unit: str, cards: fits.Header
    ) -> Self:
        """Plan a table of `rows` rows and float32 columns, each a (name, comment).

        unit: of every column, empty for none.
        """
        first: list[tuple[Any, ...]] = [
            ("XTENSION", "BINTABLE", "binary table extension"),
            ("BITPIX", 8, "array data type"),
            ("NAXIS", 2),
            ("NAXIS1", 4 * len(columns), "bytes of a row"),
            ("NAXIS2", rows, "rows"),
            ("PCOUNT", 0),
            ("GCOUNT", 1),
            ("TFIELDS", len(columns)),
        ]
        for i, (column, comment) in enumerate(columns, 1):
            first += [(f"TTYPE{i}", column, comment), (f"TFORM{i}", "E")]
            first += [(f"TUNIT{i}", unit)] if unit else []
        return cls(name, (rows, len(columns)), _described([*first, ("EXTNAME", name)], cards))


@contextmanager
def streamed_fits(
    path: Path, units: Sequence[UnitPlan | fits.BinTableHDU], world: AbstractWorld = ALONE
) -> Iterator[dict[str, StreamedImage]]:
    """Lay out `units` in a new file and yield what is planned by name, to be filled by the block.

    Complete tables are written at once. An empty primary unit comes first where no image is
    PRIMARY. After the block every unit has its CHECKSUM and DATASUM. world: ranks that fill the
    file together; headers are those of the first.
    """
    planned, complete, size = _laid_out(units)
    check_agreement(world, {"the layout of a FITS file": f"{size} bytes"})
    with together(world):
        if world.rank == 0:
            with path.open("wb") as file:
                for start, data in complete:
                    file.seek(start)
                    file.write(data)
                file.truncate(size)
    with together(world), _opened_to_write(path) as file:
        images = {plan.name: StreamedImage(file, plan, start) for plan, start in planned}
        yield images
    with together(world), path.open("rb") as file:
        parts = [image.part_sum(file, world) for image in images.values()]
    sums = world.total(torch.tensor(parts, dtype=torch.int64)).tolist()
    with together(world):
        if world.rank == 0:
            with _opened_to_write(path) as file:
                for image, total in zip(images.values(), sums, strict=True):
                    image.finish(file, folded(total))


def _laid_out(
    units: Sequence[UnitPlan | fits.BinTableHDU],
) -> tuple[list[tuple[UnitPlan, int]], list[tuple[int, bytes]], int]:
    """Return what is planned and its first byte, first byte and bytes of all that is known at once,
    and the size of the file."""
    planned: list[tuple[UnitPlan, int]] = []
    complete: list[tuple[int, bytes]] = []
    end = 0
    if not any(isinstance(unit, UnitPlan) and unit.name == "PRIMARY" for unit in units):
        complete.append((0, _written([fits.PrimaryHDU()])))
        end = len(complete[0][1])
    for unit in units:
        if isinstance(unit, fits.BinTableHDU):
            complete.append((end, _written([fits.PrimaryHDU(), unit])[_BLOCK:]))
            end += len(complete[-1][1])
            continue
        planned.append((unit, end))
        data = np.dtype(unit.dtype).itemsize * math.prod(unit.shape)
        end += len(unit.header.tostring()) + -(-data // _BLOCK) * _BLOCK
    return planned, complete, end


def _opened_to_write(path: Path) -> BinaryIO:
    """To write only: clients of network file systems then send the bytes that were written, and
    no pages around them, in which another rank may have written."""
    return os.fdopen(os.open(path, os.O_WRONLY), "wb")


def _described(first: list[tuple[Any, ...]], cards: fits.Header) -> fits.Header:
    header = fits.Header(first)
    header.extend(cards, update=True)
    header["CHECKSUM"] = (_NO_SUM, "sum of the whole unit")
    header["DATASUM"] = ("0" * 10, "sum of the data")
    return header


def _written(units: list[fits.PrimaryHDU | fits.BinTableHDU]) -> bytes:
    """Write complete units, each with its sums, the same bytes at any time."""
    buffer, hdus = BytesIO(), fits.HDUList(units)
    hdus.update_extend()
    for unit in hdus:
        # The comments that astropy would put here say when.
        unit.add_checksum(when="of this unit")
    hdus.writeto(buffer)
    return buffer.getvalue()


def words_sum(data: bytes, start: int = 0) -> int:
    """Sum the big-endian words of `data`, of a length divisible by 4, on top of `start`."""
    return folded(int(np.frombuffer(data, ">u4").sum(dtype=np.uint64)) + start)


def folded(total: int) -> int:
    """Fold a plain sum of words, or of sums of parts, into ones' complement."""
    # Not a plain remainder: all ones stands for zero only where every word is.
    return (total - 1) % _MODULUS + 1 if total else 0


def file_sum(file: BinaryIO, offset: int, length: int) -> int:
    """Sum the words of `length` bytes of an open file from `offset`."""
    total = 0
    file.seek(offset)
    while length:
        piece = file.read(min(length, _PIECE))
        if not piece:
            raise OSError(f"{file.name} ends {length} bytes before the end of its data")
        total = words_sum(piece, total)
        length -= len(piece)
    return total


def encoded(total: int) -> str:
    """Encode the CHECKSUM that brings a unit of sum `total`, with sixteen zeros there, to zero.

    Each byte of the complement is shared by four characters, which stand four apart; one is
    raised as another is lowered until none is punctuation; the whole turns right by one, as the
    value starts in the last byte of a word.
    """
    columns = [_four_characters(byte) for byte in (_MODULUS - total).to_bytes(4, "big")]
    text = "".join(chr(columns[i][j]) for j in range(4) for i in range(4))
    return text[-1] + text[:-1]


def _four_characters(byte: int) -> list[int]:
    quarter, rest = divmod(byte, 4)
    codes = [quarter + rest + 0x30, quarter + 0x30, quarter + 0x30, quarter + 0x30]
    for i in (0, 2):
        while codes[i] in _EXCLUDED or codes[i + 1] in _EXCLUDED:
            codes[i] += 1
            codes[i + 1] -= 1
    return codes
