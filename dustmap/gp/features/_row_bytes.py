"""Bytes of the sparse rows of rays, before there is a grid prior or a row."""

import torch

from dustmap.gp._grid import RegularGrid
from dustmap.gp.features._cell_rays import cell_nodes
from dustmap.gp.features._local_weights import planned_bytes, sites_of, spread_rows
from dustmap.gp.functionals import LineIntegrals


@torch.no_grad()
def row_bytes(rays: LineIntegrals, grid: RegularGrid, order: int, dtype: torch.dtype) -> int:
    """Of the rows of N rays, stored with their transpose, from what a few of them meet.

    order: nodes per axis around a point, 2 for multilinear rows and 2 or 4 for kriging weights.
    The rays must lie in the box.
    """
    sample = rays[spread_rows(len(rays), rays.device)]
    nodes = cell_nodes(sample, grid)
    entry = torch.zeros(len(nodes), dtype=torch.int64, device=rays.device)
    shifts = torch.arange(1 - order // 2, 1 + order // 2, device=rays.device)
    sites = sites_of(nodes.row, nodes.cell, entry, nodes.weight, nodes.count, shifts, grid.shape)
    ones = torch.ones(1, order**grid.dim, dtype=dtype, device=rays.device)
    return planned_bytes(sites.taps(ones), (len(rays), grid.size))
