"""Where data meet the grid: nodes in cells, entries of tables of kriging weights."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp._grid import RegularGrid
from dustmap.gp.features._local_weights import CHUNK_ENTRIES, Sites, sites_of
from dustmap.gp.features._nodes import nodes_of, ray_steps, step_counts
from dustmap.gp.features._stencil import Stencil
from dustmap.gp.functionals import LineIntegrals, PointMeasure

Observed = PointMeasure | LineIntegrals

#: From so many rays on, rows of W are stored in the order of `neighbours_together`.
MANY_RAYS = 10_000
#: Bits of a direction's place along each axis.
_PLACE_BITS = 6


def neighbours_together(rays: LineIntegrals) -> Tensor:
    """An order (N,) in which rays of like origin, direction and length follow one another.

    Rows of W that share nodes are then near in memory. With 100,000 rays through 62,500 nodes a
    product of W with 17 vectors took half the time, one of Wᵀ 0.3 of it.
    """
    start = rays.origin + rays.edges[:, :1] * rays.direction
    place = _unit(start) if len(rays) > 1 else torch.zeros_like(start)
    code = torch.zeros(len(rays), dtype=torch.int64, device=rays.device)
    for values, bits in ((place, _PLACE_BITS - 3), (0.5 * (rays.direction + 1.0), _PLACE_BITS)):
        code = (code << (bits * rays.dim)) + _interleaved(values, bits)
    length = rays.edges[:, -1] - rays.edges[:, 0]
    by_length = length.argsort(stable=True)
    return by_length[code[by_length].argsort(stable=True)]


def _unit(x: Tensor) -> Tensor:
    """x (N, D) scaled to [0, 1] on every axis; a constant is 0."""
    low, extent = x.amin(0), x.amax(0) - x.amin(0)
    return (x - low) / torch.where(extent > 0, extent, 1.0)


def _interleaved(values: Tensor, bits: int) -> Tensor:
    """Morton code of values (N, D) in [0, 1]: the bits of all axes by turns."""
    cells = (values * (2**bits - 1)).round().to(torch.int64)
    code = torch.zeros_like(cells[:, 0])
    for bit in reversed(range(bits)):
        for axis in cells.unbind(-1):
            code = (code << 1) + ((axis >> bit) & 1)
    return code


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """A stencil on a grid's torus, and how finely rays are cut."""

    stencil: Stencil
    grid: RegularGrid
    torus_shape: tuple[int, ...]
    per_cell: float

    def ray_sites(self, rays: LineIntegrals) -> Sites:
        """Sites of rays on the stencil's table: nodes at the nearest of its offsets."""
        row, position, weight = ray_steps(rays, self.grid, self.per_cell)
        cell, entry = self.stencil.nearest(position)
        return self._sites(row, cell, entry, weight, len(rays))

    def measure_sites(self, measure: PointMeasure) -> tuple[Sites, Tensor]:
        """Sites of points with a table of their own, exact weights (Q, P) of every point."""
        values = PointMeasure(measure.points, measure.weights)
        nodes = nodes_of(values, self.grid, self.torus_shape, self.per_cell)
        direction = None if measure.direction is None else measure.direction[nodes.row]
        table = self.stencil.weights(nodes.offset, direction)
        entry = torch.arange(len(nodes), device=measure.device)
        return self._sites(nodes.row, nodes.cell, entry, nodes.weight, len(measure)), table

    def rows_at_once(self, observed: Observed) -> int:
        """Rows of a chunk, so that its nodes times P are about `CHUNK_ENTRIES`."""
        if isinstance(observed, LineIntegrals):
            nodes = int(step_counts(observed, self.grid, self.per_cell).sum())
        else:
            nodes = observed.weights.numel()
        per_row = max(1, nodes // max(1, len(observed)))
        return max(1, CHUNK_ENTRIES // (per_row * self.stencil.size))

    def _sites(self, row: Tensor, cell: Tensor, entry: Tensor, weight: Tensor, count: int) -> Sites:
        shifts = self.stencil.axis_shifts(row.device)
        return sites_of(row, cell, entry, weight, count, shifts, self.torus_shape)
