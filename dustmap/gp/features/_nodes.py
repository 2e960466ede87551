"""Data as weighted sums over points of the grid's torus: the common form behind local weights.

Rays that are cut where they enter another cell have exact integrals of a multilinear field.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import Wrapping
from dustmap.gp.features._base import refuse_outside

#: Steps per cell of a ray. With 2, kriging weights summed over the nodes differ from those summed
#: over very fine steps by a field whose prior std, for the worst of 40 rays of 0.3–9 cells in
#: 3-D, is 2.5 % of that of ∫ρ ds (Matérn-½, ℓ = h), 1.8 % (Matérn-3/2, -5/2, squared exponential,
#: ℓ = h) or 1.0 % (the same three, ℓ = 2h). The worst are shorter than a cell; beyond 3 cells it is
#: 1.8 %, 0.8 % and 0.5 %. The table of 32³ offsets brings the first two to 2.6 % and 2.2 %.
PER_CELL = 2.0
#: Points this close to a node of the grid, in cells, are taken for it.
_SNAP = 1e-9
#: Steps that hold less than this fraction of a ray's weight hold round-off.
_WEIGHTLESS = 1e-15
#: Half the distance of the two points of Gauss and Legendre, in lengths of their interval.
_GAUSS = 0.5 / math.sqrt(3.0)
#: Bits of a key that tell where on its ray a cut is.
_MOST_BITS = 52


@final
@dataclass(frozen=True, eq=False)
class Nodes:
    """f_n ≈ Σ_{q: row_q = n} weight_q ρ(lower + (cell_q + offset_q) · spacing).

    row (Q,) int64, ascending; cell (Q, D) int64: lower corner of the node's cell in indices of the
    torus; offset (Q, D) float64 in [0, 1): position in the cell; weight (Q,) float64;
    count: number of rows N, some of which may have no node.
    """

    row: Tensor
    cell: Tensor
    offset: Tensor
    weight: Tensor
    count: int

    def __len__(self) -> int:
        return len(self.row)


def nodes_of(
    functional: functionals.AbstractFunctional,
    grid: RegularGrid,
    torus_shape: tuple[int, ...],
    per_cell: float = PER_CELL,
) -> Nodes:
    """Return the functionals as sums over nodes; points of a measure as they are, rays by steps.

    A ray is cut into ⌈per_cell · its length in cells⌉ ≥ 2 equal steps; the weight of a step is
    ∫ w ds over it, exactly, and its node the centroid of that weight, so that the field's
    constants and gradients are integrated without error. Steps without weight are left out.

    Data outside the box are allowed up to half of the torus' padding. Functionals that
    differentiate are refused: they are no sums of values.
    """
    periods = tuple(length * h for length, h in zip(torus_shape, grid.spacing, strict=True))
    refuse_outside(functional, grid, Wrapping(periods))
    if isinstance(functional, functionals.Stacked):
        parts = [nodes_of(part, grid, torus_shape, per_cell) for part in functional.parts]
        return stacked_nodes(functional, parts)
    if isinstance(functional, functionals.LineIntegrals):
        row, position, weight = ray_steps(functional, grid, per_cell)
    else:
        row, points, weight = _points(functional)
        position = in_cells(points, grid)
        nearest = position.round()
        position = torch.where((position - nearest).abs() < _SNAP, nearest, position)
    corner = position.floor()
    lengths = torch.tensor(torus_shape, dtype=torch.int64, device=position.device)
    cell = corner.to(torch.int64).remainder(lengths)
    return Nodes(row, cell, position - corner, weight, len(functional))


def step_counts(
    rays: functionals.LineIntegrals, grid: RegularGrid, per_cell: float = PER_CELL
) -> Tensor:
    """Return the number of steps of every ray, at least two: (N,) int64."""
    spacing = torch.tensor(grid.spacing, dtype=torch.float64, device=rays.device)
    cells = (rays.edges[:, -1] - rays.edges[:, 0]) * (rays.direction / spacing).norm(dim=-1)
    steps: Tensor = (per_cell * cells - _SNAP).ceil().clamp_min(2).to(torch.int64)
    return steps


def node_count(
    observed: functionals.Observed, grid: RegularGrid, per_cell: float = PER_CELL
) -> int:
    """Count the nodes of rays, whether they have weight or not, or of points of measures."""
    if isinstance(observed, functionals.LineIntegrals):
        return int(step_counts(observed, grid, per_cell).sum())
    return observed.weights.numel()


def numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row (Q,) of every entry, and its number in that row, of counts (N,) in each."""
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return row, torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]


def _points(functional: functionals.AbstractFunctional) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (Q,), points (Q, D) and weights (Q,) of values at points, without weightless ones."""
    measure = functional.measure(functionals.GaussLegendre(1))
    if isinstance(functional, functionals.Derivatives) or measure.direction is not None:
        raise UserError(
            f"{type(functional).__name__} with a direction differentiates the field: it is no sum "
            "of values over nodes; use the stencil's derivative weights, or drop these data"
        )
    count, per_row = measure.weights.shape
    row = torch.arange(count, device=measure.device).repeat_interleave(per_row)
    weight = measure.weights.flatten()
    kept = weight != 0
    return row[kept], measure.points.flatten(0, 1)[kept], weight[kept]


def ray_steps(
    rays: functionals.LineIntegrals, grid: RegularGrid, per_cell: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (Q,), centroids (Q, D) in cells from the grid's lower corner, and weights of steps."""
    steps, total = step_counts(rays, grid, per_cell), rays.weights * rays.edges.diff(dim=-1)
    steps = torch.where(total.sum(-1) > 0, steps, 0)
    row, index = numbered(steps)
    width = (rays.edges[:, -1] - rays.edges[:, 0]) / steps.clamp_min(1)
    if rays.weights.shape[1] == 1:
        weight, middle = (width * rays.weights[:, 0])[row], (index + 0.5) * width[row]
    else:
        weight, moment = _masses(rays, steps, width)
        low = index * width[row]
        middle = moment / weight.clamp_min(torch.finfo(weight.dtype).tiny)
        middle = torch.minimum(torch.maximum(middle, low), low + width[row])
        kept = weight > _WEIGHTLESS * total.sum(-1)[row]
        if not bool(kept.all()):
            row, middle, weight = row[kept], middle[kept], weight[kept]
    spacing = torch.tensor(grid.spacing, dtype=torch.float64, device=rays.device)
    begin = in_cells(rays.origin + rays.edges[:, :1] * rays.direction, grid)
    along = (rays.direction / spacing).index_select(0, row)
    return row, torch.addcmul(begin.index_select(0, row), middle[:, None], along), weight


def _masses(rays: functionals.LineIntegrals, steps: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∫ w ds and ∫ w (s − s_0) ds over every step, (Q,) each, from the cumulative weight.

    Evaluated at the boundaries of the steps, whatever the number J of segments.
    """
    row, index = numbered(torch.where(steps > 0, steps + 1, 0))
    t = index * width[row]
    edges = rays.edges - rays.edges[:, :1]
    segment = _segment(edges, row, index / steps[row])
    density, begin = rays.weights[row, segment], edges[row, segment]
    share = rays.weights * edges.diff(dim=-1)
    moments = share * 0.5 * (edges[:, 1:] + edges[:, :-1])
    before, first_moment = (v.cumsum(-1) - v for v in (share, moments))
    mass = before[row, segment] + density * (t - begin)
    moment = first_moment[row, segment] + 0.5 * density * (t - begin) * (t + begin)
    inner = (index < steps[row])[:-1]
    return mass.diff()[inner].clamp_min(0.0), moment.diff()[inner]


def _segment(edges: Tensor, row: Tensor, fraction: Tensor) -> Tensor:
    """Return the segment of each ray that holds a fraction of its length: all rays in one search.

    Row n takes the keys [2n, 2n + 1]; a boundary within round-off of an edge may fall on either
    side of it, where the cumulative weight is the same.
    """
    count, columns = edges.shape
    length = edges[:, -1:].clamp_min(torch.finfo(edges.dtype).tiny)
    base = 2.0 * torch.arange(count, dtype=edges.dtype, device=edges.device)
    keys = (edges / length + base[:, None]).flatten()
    knot = torch.searchsorted(keys, base[row] + fraction, right=True) - 1
    return (knot - row * columns).clamp(0, columns - 2)


def in_cells(points: Tensor, grid: RegularGrid) -> Tensor:
    """Return the coordinates (Q, D) in cells from the grid's lower corner."""
    lower, spacing = (
        torch.tensor(v, dtype=torch.float64, device=points.device)
        for v in (grid.lower, grid.spacing)
    )
    return (points - lower) / spacing


def stacked_nodes(functional: functionals.Stacked, parts: Sequence[Nodes]) -> Nodes:
    """Return the nodes of stacked functionals, from those of each part."""
    starts = functional.offsets
    entry = torch.cat([part.row + start for part, start in zip(parts, starts, strict=False)])
    row, order = torch.sort(functional.order.argsort()[entry], stable=True)
    cell, offset, weight = (
        torch.cat(values)[order]
        for values in zip(*((p.cell, p.offset, p.weight) for p in parts), strict=True)
    )
    return Nodes(row, cell, offset, weight, len(functional))


def cell_nodes(rays: functionals.LineIntegrals, grid: RegularGrid) -> Nodes:
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
    rays: functionals.LineIntegrals, begin: Tensor, along: Tensor
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
    row, index = numbered((last - first + 1).clamp_min(0.0).to(torch.int64))
    return row, ((first[row] + index - begin[row]) / along[row]).clamp(0.0, 1.0)


def _keys(row: Tensor, share: Tensor, count: int, edge: bool) -> Tensor:
    """Integers in the order of (row, share), the last bit for edges: one sort, and no gathers.

    2^-42 of a ray's length at worst is lost where it is cut, which is second order in integrals.
    """
    bits = _bits(count)
    place = (share * ((1 << bits) - 1)).round().to(torch.int64)
    return (((row << bits) | place) << 1) | int(edge)


def _bits(count: int) -> int:
    """Count the bits of a fraction that fit beside the row in an int64 key."""
    return min(_MOST_BITS, 61 - count.bit_length())
