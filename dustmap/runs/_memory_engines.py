"""Bytes of a fit by each engine, and the chunks in which it fits the budget.

Numbers of arrays are those of the code at its fullest moment, checked against the peak memory that
`python -m pipelines.reproduce memory` measures.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from dustmap.config import Config
from dustmap.gp import RegularGrid, torus_for
from dustmap.gp.features import row_bytes
from dustmap.gp.functionals import LineIntegrals
from dustmap.inference import GridSettings
from dustmap.regression import plan_fit
from dustmap.runs._exact import MOST_NODES
from dustmap.runs._grid import coarse_grid, dtype_of, grid_of
from dustmap.runs._hip import POINTS_PER_LENGTH, hip_settings
from dustmap.runs._memory import MIB, Component, During, MemoryPlan, size
from dustmap.runs._parts import kernel_of, start_of

#: Bytes for each point of the torus while a prior is made beside the last one: tables, spectra and
#: transforms, float64 and complex.
_SPECTRA = 64
#: Vectors over the torus and over the data that one column of a block solve holds.
_FIELD_VECTORS, _DATA_VECTORS = 12, 3
#: Columns of a block at most, and its preconditioner's rank; vectors that making it takes a rank.
_WIDEST, _RANK, _RANK_VECTORS = 64, 200, 3
#: The log-normal engine: vectors over the torus a sample, where deviations are curved, and rank.
_DRAW_VECTORS, _LOGNORMAL_RANK = 8, 128
#: Sparse rows of more points than they are counted for: kriging weights on 4 nodes an axis.
_ORDER = 4
#: Chunks of transforms, of rows and of products, whatever the sizes.
_WORKING = 40 * MIB
_DOUBLE = 8


@final
@dataclass(frozen=True)
class Sizes:
    """Of a fit: rays N, nodes M, points of the torus M_w, samples S, bytes of a number."""

    rays: int
    nodes: int
    torus: int
    samples: int
    itemsize: int

    @staticmethod
    def of(config: Config, rays: LineIntegrals, grid: RegularGrid) -> "Sizes":
        """At the length scale where learning starts."""
        kernel = kernel_of(config.model, start_of(config.model))
        torus = math.prod(torus_for(kernel, grid, GridSettings().padding))
        itemsize = dtype_of(config.compute).itemsize
        return Sizes(len(rays), grid.size, torus, config.fit.samples, itemsize)


@final
@dataclass(frozen=True)
class Allotment:
    """Bytes that stored rows may take, and vectors that are solved for together."""

    rows: int
    vectors: int


def lognormal_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of metric Gaussian variational inference."""
    grid = grid_of(config.grid)
    s = Sizes.of(config, rays, grid)
    samples = s.samples + s.samples % 2
    rank = min(_LOGNORMAL_RANK, s.rays // 8)
    fixed = (
        _spectra(s),
        Component(
            "draws",
            size(_DRAW_VECTORS * samples * s.torus, s.itemsize),
            During.FIT,
            f"{samples} samples of {s.torus:,} variables, {_DRAW_VECTORS} vectors each",
        ),
        Component(
            "solver",
            size((_FIELD_VECTORS * samples + 3 * rank) * s.rays, s.itemsize),
            During.FIT,
            f"vectors over {s.rays:,} stars and a preconditioner of rank {rank}",
        ),
        _working(),
    )
    rows, how = _rows(config, rays, grid, 2, allotted(config, rays).rows)
    kept = Component(
        "samples",
        size(3 * samples * s.nodes, s.itemsize),
        During.WHOLE,
        f"{samples} densities at {s.nodes:,} nodes",
    )
    return MemoryPlan((kept, *fixed, rows), {"rows of the stars": how})


def whole_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of the global engine's solve, and of learning before it."""
    grid = grid_of(config.grid)
    s, allotment = Sizes.of(config, rays, grid), allotted(config, rays)
    columns = _columns(s, allotment.vectors)
    rank = min(_RANK, allotment.vectors // max(1, _RANK_VECTORS * s.torus * s.itemsize))
    rows, how = _rows(config, rays, grid, _ORDER, allotment.rows)
    parts = (
        _spectra(s),
        Component(
            "draws",
            size(2 * (1 + s.samples) * s.torus, s.itemsize),
            During.WHOLE,
            f"mean and {s.samples} draws of {s.torus:,} variables",
        ),
        Component(
            "solver",
            _column_bytes(s) * columns,
            During.SOLVING,
            f"{columns} columns of {_FIELD_VECTORS} vectors each",
        ),
        Component(
            "preconditioner",
            size(_RANK_VECTORS * rank * s.torus, s.itemsize),
            During.FIT,
            f"rank {rank}, {_RANK_VECTORS} vectors a rank while it is made",
        ),
        _working(),
    )
    chunks = {"rows of the stars": how, "columns solved together": f"{columns} of {1 + s.samples}"}
    return MemoryPlan((*parts, rows), chunks)


def hip_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of inducing points at the length scale where learning starts."""
    start = start_of(config.model)
    grid = coarse_grid(config.grid, start.length / POINTS_PER_LENGTH)
    plan = plan_fit(kernel_of(config.model, start), grid, len(rays), hip_settings(config))
    stored = plan.bytes_rows <= plan.max_memory // 2
    parts = (
        Component("inducing points", plan.bytes_prior, During.FIT, f"spectra of {grid.size:,}"),
        Component(
            "family",
            plan.bytes_family,
            During.FIT,
            f"{plan.family}, statistics of {plan.n_features:,} variables",
        ),
        Component(
            "rows",
            plan.bytes_rows if stored else 2**28,
            During.FIT,
            f"{len(rays):,} of {plan.n_features:,} features",
        ),
        *_dense_learning(config, rays),
        _working(),
    )
    how = "stored" if stored else "computed anew in every pass"
    return MemoryPlan(parts, {"rows of the stars": how})


def exact_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of a dense covariance in float64, whatever compute.dtype says."""
    n = len(rays)
    parts = (
        Component(
            "covariance", size(3 * n**2, _DOUBLE), During.SOLVING, f"dense, of {n:,} stars, factor"
        ),
        Component("factor", 0, During.WHOLE, f"of the covariance of {n:,} stars"),
        *_dense_learning(config, rays),
        Component(
            "draws",
            size(3 * MOST_NODES**2, _DOUBLE),
            During.EXPORT,
            "root of a covariance of nodes",
        ),
        _working(),
    )
    return MemoryPlan(parts)


def _dense_learning(config: Config, rays: LineIntegrals) -> tuple[Component, ...]:
    n = min(len(rays), config.fit.learn_rows)
    if not config.model.learn:
        return ()
    what = f"dense covariances of {n:,} stars and their gradients"
    return (Component("learning", size(8 * n**2, _DOUBLE), During.LEARNING, what),)


def allotted(config: Config, rays: LineIntegrals) -> Allotment:
    """What is left beside all that cannot be cut: rows first, if the rest leaves them room."""
    grid = grid_of(config.grid)
    s, budget = Sizes.of(config, rays, grid), config.compute.memory_bytes
    if config.density == "lognormal":
        held = size((_DRAW_VECTORS + 1) * s.samples * s.torus, s.itemsize) + _SPECTRA * s.torus
        return Allotment(max(0, budget - held - _WORKING), 0)
    held = size(2 * (1 + s.samples) * s.torus, s.itemsize) + _SPECTRA * s.torus + _WORKING
    left = max(0, budget - held)
    least = 2 * _column_bytes(s)
    rows = row_bytes(rays, grid, _ORDER, dtype_of(config.compute))
    kept = rows if rows + least <= left else 0
    return Allotment(kept, max(_column_bytes(s), left - kept))


def _column_bytes(s: Sizes) -> int:
    return size(_FIELD_VECTORS * s.torus + _DATA_VECTORS * s.rays, s.itemsize)


def _columns(s: Sizes, memory: int) -> int:
    return max(1, min(_WIDEST, 1 + s.samples, memory // _column_bytes(s)))


def _spectra(s: Sizes) -> Component:
    what = f"tables and spectra of a torus of {s.torus:,} points, float64"
    return Component("spectra", _SPECTRA * s.torus, During.FIT, what)


def _working() -> Component:
    return Component("working space", _WORKING, During.FIT, "chunks of rows and of transforms")


def _rows(
    config: Config, rays: LineIntegrals, grid: RegularGrid, order: int, allowed: int
) -> tuple[Component, str]:
    """Stored where they fit, else in chunks that are made anew."""
    needed = row_bytes(rays, grid, order, dtype_of(config.compute))
    if needed <= allowed:
        what = f"{len(rays):,} sparse rows and their transpose"
        return Component("rows", needed, During.FIT, what), "stored"
    what = f"of {len(rays):,} sparse rows, a chunk at a time"
    return Component("rows", 32 * MIB, During.FIT, what), "computed anew in every product"


#: How each engine is planned, by the name that fit.engine gives it.
EngineMemory: TypeAlias = Callable[[Config, LineIntegrals], MemoryPlan]
_ENGINES: Mapping[str, EngineMemory] = {
    "global": whole_memory,
    "hip": hip_memory,
    "exact": exact_memory,
}


def engine_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of the engine of a configuration, which has been checked."""
    if config.density == "lognormal":
        return lognormal_memory(config, rays)
    return _ENGINES[config.fit.engine](config, rays)
