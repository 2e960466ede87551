"""Bytes of a fit by each engine, and the chunks in which it fits the budget.

Numbers of arrays are those of the code at its fullest moment, checked against the peak memory that
`python -m pipelines.reproduce memory` measures.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from dustmap.config import Config
from dustmap.gp.features import HIPFeatures
from dustmap.gp.functionals import LineIntegrals
from dustmap.regression import HipPlan, plan_fit
from dustmap.runs.engines._exact import draw_grid
from dustmap.runs.engines._hip import POINTS_PER_LENGTH, hip_settings
from dustmap.runs.memory import (
    DRAW_VECTORS,
    FIELD_VECTORS,
    KRIGING,
    LINEAR,
    MIB,
    RANK_VECTORS,
    SPECTRA,
    WORKING,
    Component,
    During,
    MemoryPlan,
    Sizes,
    allotted,
    rows_needed,
)
from dustmap.runs.models import coarse_grid, kernel_of, start_of

#: Columns of a block at most, and the ranks of preconditioners.
_WIDEST, _RANK, _LOGNORMAL_RANK = 64, 200, 128
#: Arrays over the nodes for each sample of two iterates, and for each product of a preconditioner.
_DRAWN_FIELDS, _SKETCHED_FIELDS = 6, 4
#: Products that `nystrom` takes together.
_SKETCHED = 32
#: Of rows that are made anew, a chunk at a time.
_CHUNK = 32 * MIB
#: Of residual variances with their derivatives, where the Gaussian engine learns its kernel.
_RESIDUALS = 400 * MIB
#: Of the hip engine's dense rows, with the parts that are joined and products with them.
_ROW_COPIES = 2.75
_DOUBLE = 8
#: Of the exact engine: a table of antiderivatives, and covariances of rays a chunk at a time.
_TABLE, _PREDICTIONS = 18 * MIB, 4 * 16 * MIB


def lognormal_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of metric Gaussian variational inference."""
    s = Sizes.of(config, len(rays))
    rank = min(_LOGNORMAL_RANK, s.data // 8)
    rows, how = _rows(config, rays, LINEAR)
    parts = (
        Component(
            "samples",
            3 * s.samples * s.nodes * s.itemsize,
            During.WHOLE,
            f"{s.samples} densities at {s.nodes:,} nodes",
        ),
        _spectra(s),
        Component(
            "draws",
            s.drawing,
            During.DRAWING,
            f"{s.samples} samples of {s.torus:,} variables, {DRAW_VECTORS} vectors each",
        ),
        Component(
            "fields",
            _DRAWN_FIELDS * s.samples * s.nodes * s.itemsize,
            During.DRAWING,
            f"of {s.samples} samples at {s.nodes:,} nodes, {_DRAWN_FIELDS} each",
        ),
        Component(
            "making the preconditioner",
            s.samples * s.vector + _SKETCHED_FIELDS * _SKETCHED * s.nodes * s.itemsize,
            During.PREPARING,
            f"{_SKETCHED} products at {s.nodes:,} nodes, beside the samples",
        ),
        Component(
            "solver",
            (FIELD_VECTORS * s.samples + 3 * rank) * s.data * s.itemsize,
            During.FIT,
            f"vectors over {s.data:,} stars and a preconditioner of rank {rank}",
        ),
        rows,
        _working(),
    )
    return MemoryPlan(parts, {"rows of the stars": how})


def whole_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of the global engine's solve, and of learning before it."""
    s, vectors = Sizes.of(config, len(rays)), allotted(config, rays).vectors
    columns = max(1, min(_WIDEST, 1 + s.samples, vectors // s.column))
    rank = min(_RANK, vectors // (RANK_VECTORS * s.vector))
    rows, how = _rows(config, rays, KRIGING)
    parts = (
        Component(
            "draws",
            2 * (1 + s.samples) * s.vector,
            During.WHOLE,
            f"mean and {s.samples} draws of {s.torus:,} variables, and their solution",
        ),
        _spectra(s),
        Component(
            "making the preconditioner",
            RANK_VECTORS * rank * s.vector,
            During.PREPARING,
            f"{RANK_VECTORS} vectors for each of rank {rank}",
        ),
        Component("preconditioner", rank * s.vector, During.SOLVING, f"of rank {rank}"),
        Component(
            "solver",
            columns * s.column,
            During.SOLVING,
            f"{columns} columns of {FIELD_VECTORS} vectors each",
        ),
        rows,
        *_residual_learning(config),
        _working(),
    )
    chunks = {"rows of the stars": how, "columns solved together": f"{columns} of {1 + s.samples}"}
    return MemoryPlan(parts, chunks)


def hip_memory(config: Config, rays: LineIntegrals) -> MemoryPlan:
    """Of inducing points at the length scale where learning starts."""
    start = start_of(config.model)
    grid = coarse_grid(config.grid, start.length / POINTS_PER_LENGTH)
    plan = plan_fit(kernel_of(config.model, start), grid, len(rays), hip_settings(config))
    stored = plan.bytes_rows <= plan.max_memory // 2
    parts = (
        Component("inducing points", plan.bytes_prior, During.FIT, f"spectra of {grid.size:,}"),
        *_dense_whitening(plan),
        Component(
            "family",
            plan.bytes_family,
            During.FIT,
            f"{plan.family}, statistics of {plan.n_features:,} variables",
        ),
        Component(
            "rows",
            round(_ROW_COPIES * plan.bytes_rows) if stored else 2**28,
            During.FIT,
            f"{len(rays):,} of {plan.n_features:,} features, and what they are made of",
        ),
        *_dense_learning(config, rays),
        _working(),
    )
    how = "stored" if stored else "computed anew in every pass"
    return MemoryPlan(parts, {"rows of the stars": how})


def exact_memory(config: Config, rays: LineIntegrals, uncertain: bool) -> MemoryPlan:
    """Of a dense covariance in float64, whatever compute.dtype says."""
    n = len(rays)
    dense = n**2 * _DOUBLE
    parts = (
        Component("factor", dense, During.WHOLE, f"of the covariance of {n:,} stars"),
        Component("covariance", dense, During.SOLVING, f"dense, of {n:,} stars"),
        Component("tables", _TABLE, During.WHOLE, "antiderivatives of the kernel, float64"),
        *_dense_learning(config, rays),
        Component("predictions", _PREDICTIONS, During.EXPORT, "covariances with rays, in chunks"),
        *(_exact_draws(config) if uncertain else ()),
        _working(),
    )
    return MemoryPlan(parts)


def _exact_draws(config: Config) -> tuple[Component, ...]:
    """A covariance, its eigenvectors, and twice as much for finding them."""
    nodes = draw_grid(config, start_of(config.model).length).size
    what = f"root of a covariance of {nodes:,} nodes, for uncertain distances"
    return (Component("draws", 4 * nodes**2 * _DOUBLE, During.DRAWING, what),)


def _dense_whitening(plan: HipPlan) -> tuple[Component, ...]:
    """K_uu and its factor, where it is factorised rather than solved by PCG."""
    nodes = plan.grid.size
    if plan.whitening != "hip" or nodes > HIPFeatures.dense_below:
        return ()
    what = f"of the covariance of {nodes:,} inducing points, float64"
    return (Component("factor", 2 * nodes**2 * _DOUBLE, During.FIT, what),)


def _dense_learning(config: Config, rays: LineIntegrals) -> tuple[Component, ...]:
    n = min(len(rays), config.fit.learn_rows)
    if not config.model.learn:
        return ()
    what = f"dense covariances of {n:,} stars and their gradients"
    return (Component("learning", 8 * n**2 * _DOUBLE, During.LEARNING, what),)


def _residual_learning(config: Config) -> tuple[Component, ...]:
    """Of chunks whose size does not follow the data."""
    if not {"length", "std"} & set(config.model.learn):
        return ()
    what = "tables of residual variances and their derivatives, in chunks"
    return (Component("learning", _RESIDUALS, During.LEARNING, what),)


def _spectra(s: Sizes) -> Component:
    what = f"tables and spectra of a torus of {s.torus:,} points, float64"
    return Component("spectra", SPECTRA * s.torus, During.FIT, what)


def _working() -> Component:
    return Component("working space", WORKING, During.WHOLE, "chunks of rows and of transforms")


def _rows(config: Config, rays: LineIntegrals, order: int) -> tuple[Component, str]:
    """Stored where they are allotted room, else in chunks that are made anew."""
    needed = rows_needed(config, rays, order)
    if needed <= allotted(config, rays).rows:
        what = f"{len(rays):,} sparse rows and their transpose"
        return Component("rows", needed, During.FIT, what), "stored"
    what = f"of {len(rays):,} sparse rows, a chunk at a time"
    return Component("rows", _CHUNK, During.FIT, what), "computed anew in every product"


#: How each engine is planned, by the name that fit.engine gives it.
EngineMemory: TypeAlias = Callable[[Config, LineIntegrals], MemoryPlan]
_ENGINES: Mapping[str, EngineMemory] = {
    "global": whole_memory,
    "hip": hip_memory,
}


def engine_memory(config: Config, rays: LineIntegrals, uncertain: bool = False) -> MemoryPlan:
    """Of the engine of a configuration, which has been checked; uncertain: are the distances?"""
    if config.density == "lognormal":
        return lognormal_memory(config, rays)
    if config.fit.engine == "exact":
        return exact_memory(config, rays, uncertain)
    return _ENGINES[config.fit.engine](config, rays)
