"""Multilinear interpolation of data on the grid's box, for fields that must stay positive.

The bytes of its sparse rows are known before there is a grid prior or a row.
"""

import logging
from dataclasses import replace

import torch

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid
from dustmap.gp.features import _local_weights
from dustmap.gp.features._base import support
from dustmap.gp.features._nodes import Nodes, cell_nodes, nodes_of, stacked_nodes
from dustmap.linalg import AbstractOperator

log = logging.getLogger(__name__)


@torch.no_grad()
def interpolation(
    functional: functionals.AbstractFunctional,
    grid: RegularGrid,
    memory: int = 2**31,
    dtype: torch.dtype = torch.float32,
) -> AbstractOperator:
    """Return L (N, M) with f ≈ L ρ for ρ at the grid's nodes, multilinear between them.

    All entries are ≥ 0 where the functionals' weights are, and row n sums to L_n applied to the
    constant 1 (∫w for rays), so a positive ρ gives positive data. Rays are cut where they enter
    another cell (`cell_nodes`), so that up to rounding L ρ is ∫ w of the interpolant, the one
    that points and maps see. The data must lie in the box. Where L and its transpose need more
    than `memory` bytes, the same rows are computed anew in every product.
    """
    return functionals.operator_by_rows(
        functional, lambda f: _interpolation(f, grid, memory, dtype)
    )


def _interpolation(
    functional: functionals.AbstractFunctional, grid: RegularGrid, memory: int, dtype: torch.dtype
) -> AbstractOperator:
    """Build the multilinear rows of data in the box, of one kind or stacked."""
    for part in functional.parts if isinstance(functional, functionals.Stacked) else (functional,):
        measured = isinstance(part, functionals.PointMeasure) and part.direction is not None
        if measured or isinstance(part, functionals.Derivatives):
            raise UserError(
                "Derivatives cannot be interpolated: the slope of a multilinear field jumps at "
                "the nodes; drop these data or use a Gaussian link"
            )
    points = support(functional)
    outside = ~grid.contains(points)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise UserError(
            f"{int(outside.sum())} of {len(points)} points of the data lie outside the box "
            f"{grid.lower} to {grid.upper}, the first at {points[first].tolist()}: enlarge the "
            "grid, or clip or drop these data"
        )
    like = torch.empty(0, dtype=dtype, device=functional.device)
    shape = (len(functional), grid.size)

    def source(part: slice) -> _local_weights.Taps:
        return interpolation_taps(functional[part], grid, dtype)

    sample = functional[_local_weights.spread_rows(len(functional), functional.device)]
    taps = interpolation_taps(sample, grid, dtype)
    planned = _local_weights.planned_bytes(taps, shape)
    keep = planned <= memory
    how = "stored" if keep else "recomputed in every product"
    log.debug("L of %d data needs %d bytes: %s", shape[0], planned, how)
    per_row = max(1, taps.column.numel() // max(1, taps.count))
    build = _local_weights.stored_or_recomputed if keep else _local_weights.RecomputedOperator
    return build(source, shape, max(1, _local_weights.CHUNK_ENTRIES // per_row), like)


def interpolation_taps(
    functional: functionals.AbstractFunctional, grid: RegularGrid, dtype: torch.dtype
) -> _local_weights.Taps:
    """Rows of `interpolation` of few data, as they are made; the data are not checked."""
    nodes = _nodes(functional, grid)
    entry = torch.arange(len(nodes), device=nodes.cell.device)
    shifts = torch.arange(2, device=nodes.cell.device)
    sites = _local_weights.sites_of(
        nodes.row, nodes.cell, entry, nodes.weight, nodes.count, shifts, grid.shape
    )
    # Π_d (1 − δ_d or δ_d) on the 2^D corners of a cell in C order, for offsets δ: (Q, 2^D)
    corners = nodes.offset.new_ones(len(nodes), 1)
    for along in nodes.offset.unbind(-1):
        pair = torch.stack([1.0 - along, along], dim=-1)
        corners = (corners.unsqueeze(-1) * pair.unsqueeze(1)).flatten(1)
    return sites.taps(corners).to(dtype)


def _nodes(functional: functionals.AbstractFunctional, grid: RegularGrid) -> Nodes:
    """Return the nodes whose cells' upper corners are in the grid too, with offsets in [0, 1]."""
    if isinstance(functional, functionals.Stacked):
        return stacked_nodes(functional, [_nodes(part, grid) for part in functional.parts])
    if isinstance(functional, functionals.LineIntegrals):
        return cell_nodes(functional, grid)
    # one cell of padding, so that round-off beyond a face is told from the opposite face
    nodes = nodes_of(functional, grid, tuple(m + 1 for m in grid.shape))
    shape = torch.tensor(grid.shape, dtype=torch.int64, device=nodes.cell.device)
    corner = torch.where(nodes.cell == shape, -1, nodes.cell)
    position = torch.minimum((corner + nodes.offset).clamp_min(0.0), shape - 1.0)
    cell = torch.minimum(position.floor().to(torch.int64), shape - 2)
    return replace(nodes, cell=cell, offset=position - cell)


@torch.no_grad()
def row_bytes(
    rays: functionals.LineIntegrals, grid: RegularGrid, order: int, dtype: torch.dtype
) -> int:
    """Plan the bytes of the rows of N rays in the box, stored with their transpose, from a few.

    order: nodes per axis around a point, 2 for multilinear rows and 2 or 4 for kriging weights.
    """
    sample = rays[_local_weights.spread_rows(len(rays), rays.device)]
    nodes = cell_nodes(sample, grid)
    entry = torch.zeros(len(nodes), dtype=torch.int64, device=rays.device)
    shifts = torch.arange(1 - order // 2, 1 + order // 2, device=rays.device)
    sites = _local_weights.sites_of(
        nodes.row, nodes.cell, entry, nodes.weight, nodes.count, shifts, grid.shape
    )
    ones = torch.ones(1, order**grid.dim, dtype=dtype, device=rays.device)
    return _local_weights.planned_bytes(sites.taps(ones), (len(rays), grid.size))
