"""Rays cut where they enter another cell: their integrals of a multilinear field are exact."""

import math

import torch
from torch import Tensor

from dustmap.gp._grid import RegularGrid
from dustmap.gp.features._nodes import Nodes, in_cells
from dustmap.gp.functionals import LineIntegrals

#: Half the distance of the two points of Gauss and Legendre, in lengths of their interval.
_GAUSS = 0.5 / math.sqrt(3.0)
#: Bits of a key that tell where on its ray a cut is.
_MOST_BITS = 52


def cell_nodes(rays: LineIntegrals, grid: RegularGrid) -> Nodes:
    """Two points of Gauss and Legendre for every segment of a ray in every cell that it meets.

    There the weight is constant and the multilinear interpolant in D dimensions a polynomial of
    degree D in s, so that Σ_q weight_q ρ(s_q) = ∫ w ρ ds but for rounding, for D ≤ 3. Cells lie
    within the grid, offsets in [0, 1], weights are > 0; both points are in the cell of their
    middle. Rays must lie in the box.
    """
    length = rays.edges[:, -1] - rays.edges[:, 0]
    shape = torch.tensor(grid.shape, dtype=torch.int64, device=rays.device)
    spacing = torch.tensor(grid.spacing, dtype=torch.float64, device=rays.device)
    begin = in_cells(rays.origin + rays.edges[:, :1] * rays.direction, grid)
    along = rays.direction / spacing * length[:, None]
    row, low, width, weight = _pieces(rays, begin, along)
    start, step = begin.index_select(0, row), along.index_select(0, row)
    middle = torch.addcmul(start, (low + 0.5 * width)[:, None], step)
    corner = middle.floor().clamp_min(0.0).minimum(shape - 2.0)
    aside = (_GAUSS * width)[:, None] * step
    offset = torch.stack([middle - aside, middle + aside], dim=1) - corner[:, None]
    cell = corner.to(torch.int64).repeat_interleave(2, dim=0)
    half = (0.5 * weight * width * length[row]).repeat_interleave(2)
    row = row.repeat_interleave(2)
    return Nodes(row, cell, offset.flatten(0, 1).clamp(0.0, 1.0), half, len(rays))


def _pieces(
    rays: LineIntegrals, begin: Tensor, along: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, starts and widths as fractions of their rays, and w of the parts between cuts, (Q,).

    begin (N, D): where rays begin, in cells; along (N, D): cells from there to the end.
    """
    count, edges = rays.edges.shape
    length = rays.edges[:, -1:] - rays.edges[:, :1]
    some = length > 0
    shares = torch.where(some, (rays.edges - rays.edges[:, :1]) / torch.where(some, length, 1), 0)
    every = torch.arange(count, device=rays.device)
    cuts = [_keys(every.repeat_interleave(edges), shares.flatten(), count, edge=True)]
    for axis in range(rays.dim):
        row, share = _crossings(begin[:, axis], along[:, axis])
        cuts.append(_keys(row, share, count, edge=False))
    keys = torch.cat(cuts).sort().values
    bits = _bits(count)
    row = keys >> (bits + 1)
    fraction = ((keys >> 1) & ((1 << bits) - 1)).double() / ((1 << bits) - 1)
    segment = (keys & 1).cumsum(0) - 1 - row * edges
    # the last edge of a ray is followed by another ray
    inner = segment[:-1].clamp_max(edges - 2)
    weight = rays.weights[row[:-1], inner]
    width = fraction.diff()
    kept = ((row[1:] == row[:-1]) & (width > 0) & (weight > 0)).nonzero().squeeze(-1)
    return row[kept], fraction[kept], width[kept], weight[kept]


def _crossings(begin: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (C,) of rays and fractions of their lengths where they cross planes of one axis."""
    end = begin + along
    first = torch.minimum(begin, end).floor() + 1
    last = torch.maximum(begin, end).ceil() - 1
    number = (last - first + 1).clamp_min(0.0).to(torch.int64)
    row = torch.arange(len(begin), device=begin.device).repeat_interleave(number)
    index = torch.arange(len(row), device=begin.device) - (number.cumsum(0) - number)[row]
    return row, ((first[row] + index - begin[row]) / along[row]).clamp(0.0, 1.0)


def _keys(row: Tensor, share: Tensor, count: int, edge: bool) -> Tensor:
    """Integers in the order of (row, share), the last bit for edges: one sort, and no gathers.

    2^-42 of a ray's length at worst is lost where it is cut, which is second order in integrals.
    """
    bits = _bits(count)
    place = (share * ((1 << bits) - 1)).round().to(torch.int64)
    return (((row << bits) | place) << 1) | int(edge)


def _bits(count: int) -> int:
    return min(_MOST_BITS, 61 - count.bit_length())
