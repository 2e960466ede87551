"""Bits of a flag column that have names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.catalogs.readers import CatalogError


@final
@dataclass(frozen=True)
class FlagBits:
    """Name -> bit, counted from 0, of one column of whole numbers."""

    bits: Mapping[str, int]

    def bit(self, name: str) -> int:
        if name not in self.bits:
            raise CatalogError(f"{name!r} is no flag; there are {', '.join(self.bits)}")
        return self.bits[name]

    def decode(self, values: NDArray[Any]) -> dict[str, NDArray[np.bool_]]:
        """Whether each named bit is set, by name, in the shape of `values`."""
        whole = np.asarray(values)
        if whole.dtype.kind not in "iu":
            raise ValueError(f"flags are whole numbers, got {whole.dtype}")
        return {name: (whole >> bit & 1).astype(bool) for name, bit in self.bits.items()}
