"""New HDF5 files on disks that may fill: the library crashes where a write fails as it closes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, final

import h5py


@contextmanager
def new_hdf5(path: Path, cache: int = 2**20) -> "Iterator[tuple[h5py.File, SparedFile]]":
    """A new file, with `cache` bytes of chunks per dataset, and the bytes under it.

    A failed write is an OSError at the end, or before at the next `SparedFile.check`.
    """
    with path.open("w+b", buffering=0) as raw:
        spared = SparedFile(raw, path)
        with h5py.File(spared, "w", rdcc_nbytes=cache, rdcc_nslots=10_007) as file:
            yield file, spared
        spared.check()


@final
class SparedFile:
    """Bytes of a file for HDF5, whose writes seem to work: it must be able to close the file.

    After the first failure nothing is written, and `check` raises it.
    """

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._raw = raw
        self._path = path
        self._failed: OSError | None = None

    def check(self) -> None:
        """Raises what went wrong with a write since the beginning, in one line."""
        if self._failed is not None:
            number = self._failed.errno or 0
            raise OSError(number, os.strerror(number), str(self._path)) from self._failed

    def write(self, data: bytes) -> int:
        rest = memoryview(data).cast("B")
        count = len(rest)
        while len(rest) and self._failed is None:
            try:
                rest = rest[self._raw.write(rest) :]  # not all of it on a disk that is filling
            except OSError as error:
                self._failed = error
        return count

    def truncate(self, size: int) -> int:
        if self._failed is None:
            try:
                self._raw.truncate(size)
            except OSError as error:
                self._failed = error
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def read(self, size: int = -1) -> bytes:
        return self._raw.read(size)

    def readinto(self, buffer: bytearray) -> int:
        """Zeros where a write failed: HDF5 crashes on missing bytes too."""
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        if self._failed is not None:
            buffer[len(data) :] = bytes(len(buffer) - len(data))
            return len(buffer)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""
