"""Lines of sight through the centres of HEALPix pixels: NESTED, Galactic."""

import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

#: Numbers of one quantity that are made at once.
BLOCK = 2**20


def refuse_bad_nside(nside: int) -> None:
    """NESTED pixels need a power of two."""
    if nside < 1 or nside & (nside - 1) or nside > 8192:
        raise ValueError(f"nside: expected a power of two, 1 to 8192, got {nside}")


def pixel_blocks(nside: int, per_pixel: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of pixels that hold `BLOCK` numbers at `per_pixel` each."""
    pixels = 12 * nside**2
    step = max(1, BLOCK // per_pixel)
    for start in range(0, pixels, step):
        stop = min(start + step, pixels)
        log.info("pixels %d to %d of %d", start, stop, pixels)
        yield start, stop


def directions(nside: int, start: int, stop: int) -> NDArray[np.float64]:
    """Unit vectors (P, 3), along Galactic X, Y, Z, of the centres of pixels start <= p < stop."""
    import healpy

    vectors = healpy.pix2vec(nside, np.arange(start, stop), nest=True)
    return np.stack(vectors, axis=-1)
