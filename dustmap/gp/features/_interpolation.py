"""Multilinear interpolation of data on the grid's box, for fields that must stay positive.

Rays have rows of their own, or sums along beams that they share. The bytes of the sparse rows are
known before there is a grid prior or a row.
"""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import NestedGrids, RegularGrid
from dustmap.gp.features import _local_weights
from dustmap.gp.features._base import support
from dustmap.gp.features._levels_of_rays import LevelPart, nested_taps
from dustmap.gp.features._nodes import Nodes, cell_nodes, nodes_of, numbered, stacked_nodes
from dustmap.gp.features._operators import ProductOperator
from dustmap.linalg import AbstractAdjointPair, AbstractOperator, SparseOperator, chunks

log = logging.getLogger(__name__)

#: Rays whose taps are made at once: should none of them find its beams, each has hundreds.
_RAYS = 2**13
#: Vectors that are summed along beams at once.
_TOGETHER = 8
#: Weight of the beams that reach a star, of all four, for it to be seen through them.
_LEAST = 0.05
#: A beam ends before the face of the box, whatever rounding does.
_INSIDE = 1.0 - 1e-9


@torch.no_grad()
def interpolation(
    functional: functionals.AbstractFunctional,
    grid: RegularGrid | NestedGrids,
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
    if isinstance(functional, functionals.Sharded):
        return functional.rows(interpolation(functional.local, grid, memory, dtype))
    for part in functional.parts if isinstance(functional, functionals.Stacked) else (functional,):
        measured = isinstance(part, functionals.PointMeasure) and part.direction is not None
        if measured or isinstance(part, functionals.Derivatives):
            raise UserError(
                "Derivatives cannot be interpolated: the slope of a multilinear field jumps at "
                "the nodes; drop these data or use a Gaussian link"
            )
    refuse_beyond(functional, grid)

    def taps(part: functionals.AbstractFunctional) -> _local_weights.Taps:
        return interpolation_taps(part, grid, dtype)

    return _local_weights.stored_within(memory, taps, functional, grid.size)


def refuse_beyond(
    functional: functionals.AbstractFunctional, grid: RegularGrid | NestedGrids
) -> None:
    """An error for data outside the box."""
    points = support(functional)
    outside = ~grid.contains(points)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise UserError(
            f"{int(outside.sum())} of {len(points)} points of the data lie outside the box "
            f"{grid.lower} to {grid.upper}, the first at {points[first].tolist()}: enlarge the "
            "grid, or clip or drop these data"
        )


def interpolation_taps(
    functional: functionals.AbstractFunctional,
    grid: RegularGrid | NestedGrids,
    dtype: torch.dtype,
) -> _local_weights.Taps:
    """Rows of `interpolation` of few data, as they are made; the data are not checked."""
    if isinstance(grid, NestedGrids):

        def taps_of(part: LevelPart) -> _local_weights.Taps:
            return interpolation_taps(part.functional, part.grid, dtype)

        return nested_taps(functional, grid, taps_of, dtype)
    nodes = box_nodes(functional, grid)
    entry = torch.arange(len(nodes), device=nodes.cell.device)
    shifts = torch.arange(2, device=nodes.cell.device)
    sites = _local_weights.sites_of_nodes(nodes, entry, shifts, grid.shape)
    # Π_d (1 − δ_d or δ_d) on the 2^D corners of a cell in C order, for offsets δ: (Q, 2^D)
    corners = nodes.offset.new_ones(len(nodes), 1)
    for along in nodes.offset.unbind(-1):
        pair = torch.stack([1.0 - along, along], dim=-1)
        corners = (corners.unsqueeze(-1) * pair.unsqueeze(1)).flatten(1)
    return sites.taps(corners).to(dtype)


def box_nodes(functional: functionals.AbstractFunctional, grid: RegularGrid) -> Nodes:
    """Return the nodes whose cells' upper corners are in the grid too, with offsets in [0, 1]."""
    if isinstance(functional, functionals.Stacked):
        return stacked_nodes(functional, [box_nodes(part, grid) for part in functional.parts])
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
    rays: functionals.LineIntegrals,
    grid: RegularGrid | NestedGrids,
    order: int,
    dtype: torch.dtype,
) -> int:
    """Plan the bytes of the rows of N rays in the box, stored with their transpose, from a few.

    order: nodes per axis around a point, 2 for multilinear rows and 2 or 4 for kriging weights.
    """
    taps = _ones(rays[_local_weights.spread_rows(rays)], grid, order, dtype)
    return _local_weights.planned_bytes(taps, (len(rays), grid.size))


def _ones(
    rays: functionals.AbstractFunctional,
    grid: RegularGrid | NestedGrids,
    order: int,
    dtype: torch.dtype,
) -> _local_weights.Taps:
    """Rows of the nodes that rays meet, of weight one."""
    if isinstance(grid, NestedGrids):

        def taps_of(part: LevelPart) -> _local_weights.Taps:
            return _ones(part.functional, part.grid, part.order, dtype)

        return nested_taps(rays, grid, taps_of, dtype, order)
    assert isinstance(rays, functionals.LineIntegrals)
    nodes = cell_nodes(rays, grid)
    entry = torch.zeros(len(nodes), dtype=torch.int64, device=rays.device)
    shifts = torch.arange(1 - order // 2, 1 + order // 2, device=rays.device)
    sites = _local_weights.sites_of_nodes(nodes, entry, shifts, grid.shape)
    return sites.taps(torch.ones(1, order**grid.dim, dtype=dtype, device=rays.device))


class AbstractBeams(ABC):
    """Directions in three dimensions, and how others are interpolated between them."""

    @property
    @abstractmethod
    def directions(self) -> Tensor:
        """Unit vectors (P, 3), float64."""

    @abstractmethod
    def around(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Beams (N, 4) int64 around directions (N, 3), and weights (N, 4) ≥ 0 that sum to 1."""


@final
@dataclass(frozen=True, eq=False)
class BeamTable:
    """Integrals A_p(r) = ∫₀^r ρ(s ω_p) ds along beams p at knots r = step, 2 step, .., as columns.

    A ray in direction ω sees the density through the four beams around it,

        ∫ w ρ(s ω) ds ≈ Σ_p β_p Σ_e Δ_e A_p(s_e),   Δ_e = w_{e−1} − w_e,  A linear between knots,

    so that a million rays in one part of the sky need the cells of a few beams. Σ β = 1: of a
    constant density the integral is exact, and no weight on the density is negative. Errors are
    of second order in the distance of beams and knots; of first order for rays that end so near a
    face of the box that some of their beams have left it, where the others count for them. A ray
    without any beam, or that starts elsewhere, has its own cells instead (`interpolation`). What
    is done with a ray depends on beams and box alone.

    reach (P,) int64: knots of each beam, 0 for one that is not needed. Columns are the knots,
    `knots` for each needed beam, then the M nodes of the grid, for rays with their own cells.
    """

    grid: RegularGrid | NestedGrids
    beams: AbstractBeams
    step: float
    reach: Tensor
    dtype: torch.dtype = torch.float32
    memory: int = 2**31

    @staticmethod
    def of(
        grid: RegularGrid | NestedGrids,
        beams: AbstractBeams,
        rays: functionals.LineIntegrals | None = None,
        dtype: torch.dtype = torch.float32,
        memory: int = 2**31,
        device: torch.device | None = None,
    ) -> "BeamTable":
        """Knots one cell of the finest grid apart, as far as these rays need them or to the faces
        of the box, on the device of the rays or on `device`."""
        step = min(grid.spacing)
        within = _within(grid, beams, step).to(device if rays is None else rays.device)
        whole = BeamTable(grid, beams, step, within, dtype, memory)
        if rays is None:
            return whole
        reach = torch.zeros_like(whole.reach)
        for few in chunks(len(rays), 2**18):
            part = rays[few]
            around, weight = whole._around(part)
            last = whole._last(part)[:, None] * (weight > 0)
            reach.scatter_reduce_(0, around.flatten(), last.flatten(), "amax")
        return BeamTable(grid, beams, step, reach, dtype, memory)

    @property
    def knots(self) -> int:
        """Number of columns of every needed beam."""
        return int(self.reach.max())

    @property
    def columns(self) -> int:
        """Number of columns of the table."""
        return self._sums + self.grid.size

    @property
    def _sums(self) -> int:
        return int((self.reach > 0).sum()) * self.knots

    def _around(self, rays: functionals.LineIntegrals) -> tuple[Tensor, Tensor]:
        """Beams (N, 4) around rays, and weights that sum to 1, or to 0 where a ray has none."""
        around, weight = self.beams.around(rays.direction)
        last = self._last(rays)[:, None]
        here = (last <= self._inside[around]) & (rays.origin == 0).all(1, keepdim=True)
        weight = weight * here
        total = weight.sum(1, keepdim=True)
        # A beam of next to no weight is no beam.
        return around, torch.where(total > _LEAST, weight / total.clamp_min(_LEAST), 0.0)

    def _last(self, rays: functionals.LineIntegrals) -> Tensor:
        """Return the last knot (N,) that a ray needs, counted from 1."""
        return (rays.edges[:, -1] / self.step).floor().to(torch.int64) + 1

    @torch.no_grad()
    def rows(self, rays: functionals.LineIntegrals) -> AbstractOperator:
        """Rays on the columns (N, columns), stored where that takes no more than `memory`."""
        shape, like = (len(rays), self.columns), torch.empty(0, dtype=self.dtype)
        taps = self.taps(rays[_local_weights.spread_rows(rays)])
        keep = _local_weights.planned_bytes(taps, shape) <= self.memory
        build = _local_weights.stored if keep else _local_weights.RecomputedOperator
        return build(lambda part: self.taps(rays[part]), shape, _RAYS, like.to(rays.device))

    def taps(self, rays: functionals.LineIntegrals) -> _local_weights.Taps:
        """Few rays on the columns."""
        around, weight = self._around(rays)
        shared = weight.sum(1) > 0
        mine = shared.nonzero().squeeze(-1)
        taps = [self._on_beams(rays[mine], around[mine], weight[mine], mine)]
        others = (~shared).nonzero().squeeze(-1)
        if len(others):
            own = interpolation_taps(rays[others], self.grid, self.dtype)
            taps.append((others[own.row], own.column.to(torch.int64) + self._sums, own.value))
        row, column, value = (torch.cat(parts) for parts in zip(*taps, strict=True))
        return _local_weights.Taps(row, column, value, len(rays))

    def _on_beams(
        self, rays: functionals.LineIntegrals, around: Tensor, weight: Tensor, number: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows (C,), columns and values (C, 8) of an edge on two knots of four beams."""
        drop = rays.jumps()
        row, edge = ((drop != 0) & (rays.edges > 0)).nonzero().unbind(-1)
        place = rays.edges[row, edge] / self.step
        knot = place.floor()
        share = (place - knot)[:, None]
        upper = self._place[around[row]] * self.knots + knot.to(torch.int64)[:, None]
        first = knot[:, None] == 0  # A_p(0) = 0
        full = drop[row, edge][:, None] * weight[row]
        lower = torch.where(first, 0.0, full * (1.0 - share))
        column = torch.cat([torch.where(first, upper, upper - 1), upper], 1)
        value = torch.cat([lower, full * share], 1).to(self.dtype)
        return number[row], column, value

    @cached_property
    def _inside(self) -> Tensor:
        """Knots (P,) of every beam within the box."""
        return _within(self.grid, self.beams, self.step).to(self.reach.device)

    @cached_property
    def _place(self) -> Tensor:
        """The number of every beam among those that are needed (P,)."""
        return ((self.reach > 0).cumsum(0) - 1).clamp_min(0)

    @torch.no_grad()
    def expansion(self) -> "BeamExpansion":
        """Map the density at the nodes to all columns, (columns, M): a piece for every knot of a
        needed beam, which ends there."""
        beam, knot = numbered(self.reach)
        rows = interpolation(self._between_knots(beam, knot), self.grid, self.memory, self.dtype)
        return BeamExpansion(rows, self._place[beam] * self.knots + knot, self._sums, self.knots)

    @torch.no_grad()
    def planned_bytes(self, rays: functionals.LineIntegrals) -> int:
        """Plan the bytes of `rows` and `expansion`, stored, and of a product with both."""
        beam, knot = numbered(self.reach)
        some = _local_weights.spread_rows(beam)
        pieces = self._between_knots(beam[some], knot[some])
        taps = interpolation_taps(pieces, self.grid, self.dtype)
        rows = self.taps(rays[_local_weights.spread_rows(rays)])
        work = 3 * _TOGETHER * self.columns * self.dtype.itemsize
        return (
            _local_weights.planned_bytes(rows, (len(rays), self.columns))
            + _local_weights.planned_bytes(taps, (len(beam), self.grid.size))
            + work
        )

    def _between_knots(self, beam: Tensor, knot: Tensor) -> functionals.LineIntegrals:
        direction = self.beams.directions.to(beam.device)[beam]
        edges = torch.stack([knot, knot + 1], 1) * self.step
        unit = torch.ones_like(edges[:, :1])
        return functionals.LineIntegrals(torch.zeros_like(direction), direction, edges, unit)


@torch.no_grad()
def beamed_interpolation(
    functional: functionals.AbstractFunctional,
    grid: RegularGrid | NestedGrids,
    beams: AbstractBeams,
    memory: int = 2**31,
    dtype: torch.dtype = torch.float32,
) -> AbstractOperator:
    """Interpolate as `interpolation` (N, M) does, rays through the beams that they share.

    Worth it where rays have more cells than the beams: N ≫ P.
    """

    def build(rays: functionals.AbstractFunctional) -> AbstractOperator:
        if isinstance(rays, functionals.LineIntegrals):
            table = BeamTable.of(grid, beams, rays, dtype, memory)
            if table.knots > 0:
                knots = table.columns - grid.size
                log.info("%d rays through %d knots of beams", len(rays), knots)
                return ProductOperator(table.rows(rays), table.expansion())
        return interpolation(rays, grid, memory, dtype)

    return functionals.operator_by_rows(functional, build)


def _within(grid: RegularGrid | NestedGrids, beams: AbstractBeams, step: float) -> Tensor:
    """Return the knots (P,) of every beam within the box."""
    direction = beams.directions
    lower, upper = (direction.new_tensor(face) for face in (grid.lower, grid.upper))
    face = torch.where(direction > 0, upper, lower)
    exits = torch.where(direction != 0, face / direction, torch.inf).amin(1)
    outside = bool((lower > 0).any() or (upper < 0).any())
    return (exits.clamp_min(0.0) / step * _INSIDE * (not outside)).floor().to(torch.int64)


@final
class BeamExpansion(AbstractAdjointPair):
    """Sums along beams, then the nodes themselves (columns, M).

    pieces (K, M): integrals over the steps of beams; place (K,): their knots among all `sums`,
    `knots` for each beam one after the other.
    """

    def __init__(self, pieces: AbstractOperator, place: Tensor, sums: int, knots: int) -> None:
        self._pieces, self._place, self._sums, self._knots = pieces, place, sums, knots

    @property
    def bytes(self) -> int:
        """Memory held, 0 where the pieces are computed anew in every product."""
        return self._pieces.bytes if isinstance(self._pieces, SparseOperator) else 0

    @property
    def shape(self) -> tuple[int, int]:
        return self._sums + self._pieces.shape[1], self._pieces.shape[1]

    def _made_of(self) -> AbstractOperator:
        return self._pieces

    def _product(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.shape[0], len(x))
        for few in chunks(len(x), _TOGETHER):
            part = x[few]
            steps = x.new_zeros(self._sums, len(part))
            steps.index_copy_(0, self._place, self._pieces.matmul(part).mT)
            along = steps.reshape(-1, self._knots, len(part)).cumsum(1)
            out[: self._sums, few] = along.reshape(self._sums, -1)
            out[self._sums :, few] = part.mT
        return out.mT

    def _adjoint(self, y: Tensor) -> Tensor:
        out = y.new_empty(self.shape[1], len(y))
        for few in chunks(len(y), _TOGETHER):
            part = y[few].mT
            along = part[: self._sums].reshape(-1, self._knots, part.shape[1])
            steps = along.flip(1).cumsum(1).flip(1).reshape(self._sums, -1)
            back = self._pieces.rmatmul(steps[self._place].mT)
            out[:, few] = back.mT + part[self._sums :]
        return out.mT
