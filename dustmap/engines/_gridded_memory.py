"""Bytes of the engines that solve on the map's own grid: what they hold, and what is left for rows.

Numbers of arrays are those of the code at its fullest moment.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dustmap.engines._memory_plan import MIB, WORKING, Component, During
from dustmap.gp import RegularGrid, torus_for
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import GridSettings

#: Bytes for each point of the torus while a prior is made beside the last one: tables, spectra and
#: transforms, float64 and complex.
SPECTRA = 100
#: Vectors over the torus and over the data that one column of a block solve holds.
FIELD_VECTORS, DATA_VECTORS = 12, 3
#: Vectors a rank that making a preconditioner of the block solve takes, of which one is kept.
RANK_VECTORS = 7
#: Nodes per axis around a point of a ray: of multilinear rows, and of kriging weights.
LINEAR, KRIGING = 2, 4
#: Of rows that are made anew, a chunk at a time.
_CHUNK = 32 * MIB

#: Bytes of the stored rows of rays, with their transpose.
RowBytes = Callable[[LineIntegrals], int]


@final
@dataclass(frozen=True)
class GriddedSizes:
    """Data N, nodes M, points of the torus M_w, samples S, bytes of a number."""

    data: int
    nodes: int
    torus: int
    samples: int
    itemsize: int

    @staticmethod
    def of(
        kernel: AbstractKernel, grid: RegularGrid, n: int, samples: int, itemsize: int
    ) -> "GriddedSizes":
        """Of n data, at the kernel's length scale."""
        torus = math.prod(torus_for(kernel, grid, GridSettings().padding))
        return GriddedSizes(n, grid.size, torus, samples, itemsize)

    @property
    def vector(self) -> int:
        """Bytes of a vector over the torus."""
        return self.torus * self.itemsize

    @property
    def column(self) -> int:
        """Bytes of all vectors of one column of a block solve."""
        return FIELD_VECTORS * self.vector + DATA_VECTORS * self.data * self.itemsize


@final
@dataclass(frozen=True)
class Allotment:
    """rows: bytes that stored rows may take, 0 where they are computed anew in every product.
    vectors: bytes of the columns that are solved for together."""

    rows: int
    vectors: int

    @staticmethod
    def of(
        budget: int,
        sizes: GriddedSizes,
        held: int,
        data: AbstractFunctional,
        row_bytes: RowBytes,
    ) -> "Allotment":
        """What is left of the budget beside `held` bytes of draws and all that cannot be cut: rows
        first, where the rest leaves them room.

        Of a part of the data, whose rays are not at hand, half of the memory each.
        """
        if not isinstance(data, LineIntegrals):
            return Allotment(budget // 2, budget // 2)
        left = max(0, budget - held - SPECTRA * sizes.torus - WORKING)
        rows = row_bytes(data)
        kept = rows if rows + 2 * sizes.column <= left else 0
        # A preconditioner that is kept takes a seventh of what making it may take.
        vectors = (left - kept) * RANK_VECTORS // (RANK_VECTORS + 1)
        return Allotment(kept, max(sizes.column, vectors))


def row_component(needed: int, allotted: int, n: int) -> tuple[Component, str]:
    """Rows that are stored where they are allotted room, else chunks that are made anew."""
    if needed <= allotted:
        what = f"{n:,} sparse rows and their transpose"
        return Component("rows", needed, During.FIT, what), "stored"
    what = f"of {n:,} sparse rows, a chunk at a time"
    return Component("rows", _CHUNK, During.FIT, what), "computed anew in every product"


def spectra_component(sizes: GriddedSizes) -> Component:
    """Of the prior on its torus."""
    what = f"tables and spectra of a torus of {sizes.torus:,} points, float64"
    return Component("spectra", SPECTRA * sizes.torus, During.FIT, what)


def working_component() -> Component:
    """Whatever the sizes."""
    return Component("working space", WORKING, During.WHOLE, "chunks of rows and of transforms")
