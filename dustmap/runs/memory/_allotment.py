"""What of the memory is for rows that are stored, and for vectors that are solved for together."""

import math
from dataclasses import dataclass
from typing import final

from dustmap.config import Config
from dustmap.gp import torus_for
from dustmap.gp.features import BeamTable, row_bytes
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals
from dustmap.inference import GridSettings
from dustmap.runs.memory._plan import MIB
from dustmap.runs.models import dtype_of, grid_of, kernel_of, start_of
from dustmap.sky.observations import HealpixBeams

#: Bytes for each point of the torus while a prior is made beside the last one: tables, spectra and
#: transforms, float64 and complex.
SPECTRA = 100
#: Chunks of transforms, of rows and of products, whatever the sizes.
WORKING = 50 * MIB
#: Vectors over the torus and over the data that one column of a block solve holds.
FIELD_VECTORS, DATA_VECTORS = 12, 3
#: Vectors a rank that making a preconditioner of the block solve takes, of which one is kept.
RANK_VECTORS = 7
#: Vectors over the torus a sample of the log-normal engine: where deviations follow the curvature,
#: those they start from, those drawn one by one, and these side by side.
DRAW_VECTORS = 3
#: Vectors over the torus of a step of one sample: what it starts from and is held by, iterate,
#: direction and trial. The allocator keeps their room while the samples are joined.
STEP_VECTORS = 15
#: Nodes per axis around a point of a ray: of the log-normal engine's rows, and of kriging weights.
LINEAR, KRIGING = 2, 4


@final
@dataclass(frozen=True)
class Sizes:
    """Of a fit: data N, nodes M, points of the torus M_w, samples S, bytes of a number."""

    data: int
    nodes: int
    torus: int
    samples: int
    itemsize: int

    @staticmethod
    def of(config: Config, n: int) -> "Sizes":
        """Of n data, at the length scale where learning starts."""
        grid = grid_of(config.grid)
        kernel = kernel_of(config.model, start_of(config.model))
        torus = math.prod(torus_for(kernel, grid, GridSettings().padding))
        samples, itemsize = config.fit.samples, dtype_of(config.compute).itemsize
        if config.density == "lognormal":
            samples += samples % 2
        return Sizes(n, grid.size, torus, samples, itemsize)

    @property
    def vector(self) -> int:
        """Bytes of a vector over the torus."""
        return self.torus * self.itemsize

    @property
    def drawing(self) -> int:
        """Bytes of all vectors of the log-normal engine's samples."""
        return (DRAW_VECTORS * self.samples + STEP_VECTORS) * self.vector

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


def allotted(config: Config, data: AbstractFunctional) -> Allotment:
    """What is left beside all that cannot be cut: rows first, where the rest leaves them room.

    Of a part of the data, whose rays are not at hand, half of the memory each.
    """
    budget = config.compute.memory_bytes
    if not isinstance(data, LineIntegrals):
        return Allotment(budget // 2, budget // 2)
    s, log_normal = Sizes.of(config, len(data)), config.density == "lognormal"
    draws = s.drawing if log_normal else 2 * (1 + s.samples) * s.vector
    left = max(0, budget - draws - SPECTRA * s.torus - WORKING)
    order = LINEAR if log_normal else KRIGING
    rows = rows_needed(config, data, order)
    kept = rows if rows + 2 * s.column <= left else 0
    # A preconditioner that is kept takes a seventh of what making it may take.
    return Allotment(kept, max(s.column, (left - kept) * RANK_VECTORS // (RANK_VECTORS + 1)))


def rows_needed(config: Config, rays: LineIntegrals, order: int) -> int:
    """Bytes of the rows of a fit with their transpose, those of shared beams included."""
    grid, dtype = grid_of(config.grid), dtype_of(config.compute)
    if config.density != "lognormal" or config.fit.beams == 0:
        return row_bytes(rays, grid, order, dtype)
    beams = HealpixBeams(config.fit.beams)
    return BeamTable.of(grid, beams, dtype=dtype, device=rays.device).planned_bytes(rays)
