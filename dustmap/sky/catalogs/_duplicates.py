"""Identifiers that occur twice, found in bounded memory."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.catalogs.readers import CatalogError

#: Identifiers that are compared at once; they and their order take 32 bytes each.
PART = 2**22
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def repeated(identifiers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows, in order, whose identifier an earlier row has."""
    order = np.argsort(identifiers, kind="stable")
    ordered = identifiers[order]
    return np.sort(order[1:][ordered[1:] == ordered[:-1]])


@final
class IdentifierLog:
    """Identifiers of all stars in order, in an unnamed file that the system removes.

    Gaia's files are sorted by identifier, so that usually nothing needs to be compared. Else the
    identifiers are compared in parts of equal hash, each part with one pass through the file.
    """

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # __exit__ closes it
        self._count = 0
        self._last = np.iinfo(np.int64).min
        self._increasing = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, identifiers: NDArray[np.int64]) -> None:
        if len(identifiers) == 0:
            return
        above = identifiers[0] > self._last or self._count == 0
        self._increasing &= bool(above and (np.diff(identifiers) > 0).all())
        self._last = identifiers[-1]
        self._count += len(identifiers)
        self._file.write(identifiers.astype(np.int64).tobytes())

    def repeated(self) -> NDArray[np.int64]:
        """The rows, in order, whose identifier an earlier row has."""
        if self._increasing:
            return np.empty(0, np.int64)
        bits = max(0, int(np.ceil(np.log2(2 * self._count / PART))))
        found = [self._repeated_in(part, bits) for part in range(2**bits)]
        return np.sort(np.concatenate(found))

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The identifiers of some rows."""
        found = np.empty(len(rows), np.int64)
        for i, row in enumerate(rows):
            self._file.seek(8 * int(row))
            found[i] = np.frombuffer(self._file.read(8), np.int64)[0]
        return found

    def _repeated_in(self, part: int, bits: int) -> NDArray[np.int64]:
        kept: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        count = 0
        for first, block in self._blocks():
            inside = np.flatnonzero(_hash(block, bits) == part)
            kept.append(block[inside])
            rows.append(first + inside)
            count += len(inside)
            if count > 4 * PART:
                raise CatalogError(
                    "most rows have one of a few source_id: is that column the right one? "
                    'identifiers = "row" in a card counts rows instead'
                )
        return np.asarray(np.concatenate(rows)[repeated(np.concatenate(kept))])

    def _blocks(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        self._file.seek(0)
        for first in range(0, self._count, PART):
            data = self._file.read(8 * min(PART, self._count - first))
            yield first, np.frombuffer(data, np.int64)


def _hash(identifiers: NDArray[np.int64], bits: int) -> NDArray[np.uint64]:
    """The upper `bits` bits of identifier · 2^64 / golden ratio."""
    if bits == 0:
        return np.zeros(len(identifiers), np.uint64)
    return (identifiers.view(np.uint64) * _GOLDEN) >> np.uint64(64 - bits)
