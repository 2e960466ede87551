"""Bytes of a regression, by its engine."""

from dustmap.config import Config
from dustmap.engines import (
    MIB,
    Component,
    During,
    EvidenceSettings,
    InducingSettings,
    MemoryPlan,
    PointSettings,
    plan_fit,
    plan_points,
)
from dustmap.gp import RegularGrid
from dustmap.gp.kernels import kernel_named
from dustmap.runs._machine import dtype_of
from dustmap.runs.regression._data import Rows

#: Dense matrices of the rows that learn, or that are conditioned on: covariance, factor, gradient.
_DENSE = 3
#: Of the pictures and the libraries' own buffers.
_WORKING = 60 * MIB


def regression_memory(config: Config, rows: Rows, grid: RegularGrid | None) -> MemoryPlan:
    """Without a [grid] the estimator chooses one that fits; its own refusal has the last word."""
    n = len(rows)
    exact = config.fit.engine == "exact"
    dense = n if exact else min(n, config.fit.learn_rows)
    what = f"covariance of {dense:,} rows with its factor and gradient, float64"
    parts = [
        Component("rows", 2 * rows.X.nbytes + 3 * rows.y.nbytes, During.WHOLE, f"{n:,} rows"),
        Component("covariance", 8 * _DENSE * dense**2, During.LEARNING, what),
        Component("working space", _WORKING, During.WHOLE, "pictures, buffers of libraries"),
    ]
    if not exact and grid is not None:
        parts.append(_on_grid(config, grid, n))
    return MemoryPlan(tuple(parts))


def _on_grid(config: Config, grid: RegularGrid, n: int) -> Component:
    """At least what a fit on the user's grid takes: the learned kernel may ask for more padding."""
    fit, memory = config.fit, config.compute.memory_bytes
    shortest = kernel_named(config.model.kernel, list(grid.spacing))
    if fit.engine == "global":
        points = PointSettings(fit.samples, 1.0, dtype_of(config.compute), memory)
        needed = plan_points(shortest, grid, n, points).bytes_needed
    else:
        settings = InducingSettings(
            EvidenceSettings(fit.learn_rows),
            family=fit.family,
            block=fit.block or None,
            rank=fit.rank,
            whitening=fit.whitening,
            padding=1.0,
            max_memory=memory,
        )
        needed = plan_fit(shortest, grid, n, settings).bytes_needed
    what = f"{fit.engine} engine on {grid.size:,} nodes: draws, vectors, spectra, statistics"
    return Component("grid", needed, During.SOLVING, what)
