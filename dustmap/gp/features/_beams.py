"""Rays from one place that share the nodes of a few beams: sums along beams, then interpolation."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.gp._grid import RegularGrid
from dustmap.gp.features._interpolation import interpolation, interpolation_taps
from dustmap.gp.features._local_weights import (
    RecomputedOperator,
    Taps,
    planned_bytes,
    spread_rows,
    stored,
)
from dustmap.gp.features._operators import ProductOperator
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, operator_by_rows
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

    grid: RegularGrid
    beams: AbstractBeams
    step: float
    reach: Tensor
    dtype: torch.dtype = torch.float32
    memory: int = 2**31

    @staticmethod
    def of(
        grid: RegularGrid,
        beams: AbstractBeams,
        rays: LineIntegrals | None = None,
        dtype: torch.dtype = torch.float32,
        memory: int = 2**31,
        device: torch.device | None = None,
    ) -> "BeamTable":
        """Knots one cell apart as far as these rays need them, or to the faces of the box, on the
        device of the rays or on `device`."""
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
        return self._sums + self.grid.size

    @property
    def _sums(self) -> int:
        return int((self.reach > 0).sum()) * self.knots

    def _around(self, rays: LineIntegrals) -> tuple[Tensor, Tensor]:
        """Beams (N, 4) around rays, and weights that sum to 1, or to 0 where a ray has none."""
        around, weight = self.beams.around(rays.direction)
        last = self._last(rays)[:, None]
        here = (last <= self._inside[around]) & (rays.origin == 0).all(1, keepdim=True)
        weight = weight * here
        total = weight.sum(1, keepdim=True)
        # A beam of next to no weight is no beam.
        return around, torch.where(total > _LEAST, weight / total.clamp_min(_LEAST), 0.0)

    def _last(self, rays: LineIntegrals) -> Tensor:
        """Return the last knot (N,) that a ray needs, counted from 1."""
        return (rays.edges[:, -1] / self.step).floor().to(torch.int64) + 1

    @torch.no_grad()
    def rows(self, rays: LineIntegrals) -> AbstractOperator:
        """Rays on the columns (N, columns), stored where that takes no more than `memory`."""
        shape, like = (len(rays), self.columns), torch.empty(0, dtype=self.dtype)
        sample = self.taps(rays[spread_rows(len(rays), rays.device)])
        keep = planned_bytes(sample, shape) <= self.memory
        build = stored if keep else RecomputedOperator
        return build(lambda part: self.taps(rays[part]), shape, _RAYS, like.to(rays.device))

    def taps(self, rays: LineIntegrals) -> Taps:
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
        return Taps(row, column, value, len(rays))

    def _on_beams(
        self, rays: LineIntegrals, around: Tensor, weight: Tensor, number: Tensor
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
        """Map the density at the nodes to all columns, (columns, M)."""
        beam, knot = self._pieces()
        rows = interpolation(self._between_knots(beam, knot), self.grid, self.memory, self.dtype)
        return BeamExpansion(rows, self._place[beam] * self.knots + knot, self._sums, self.knots)

    @torch.no_grad()
    def planned_bytes(self, rays: LineIntegrals) -> int:
        """Plan the bytes of `rows` and `expansion`, stored, and of a product with both."""
        beam, knot = self._pieces()
        some = spread_rows(len(beam), beam.device)
        pieces = self._between_knots(beam[some], knot[some])
        taps = interpolation_taps(pieces, self.grid, self.dtype)
        rows = self.taps(rays[spread_rows(len(rays), rays.device)])
        work = 3 * _TOGETHER * self.columns * self.dtype.itemsize
        return (
            planned_bytes(rows, (len(rays), self.columns))
            + planned_bytes(taps, (len(beam), self.grid.size))
            + work
        )

    def _pieces(self) -> tuple[Tensor, Tensor]:
        """Beam and knot (K,) that every step along a needed beam ends at, counted from 0."""
        needed = self.reach.nonzero().squeeze(-1)
        count = self.reach[needed]
        beam = needed.repeat_interleave(count)
        knot = torch.arange(len(beam), device=beam.device)
        return beam, knot - (count.cumsum(0) - count).repeat_interleave(count)

    def _between_knots(self, beam: Tensor, knot: Tensor) -> LineIntegrals:
        direction = self.beams.directions.to(beam.device)[beam]
        edges = torch.stack([knot, knot + 1], 1) * self.step
        unit = torch.ones_like(edges[:, :1])
        return LineIntegrals(torch.zeros_like(direction), direction, edges, unit)


@torch.no_grad()
def beamed_interpolation(
    functional: AbstractFunctional,
    grid: RegularGrid,
    beams: AbstractBeams,
    memory: int = 2**31,
    dtype: torch.dtype = torch.float32,
) -> AbstractOperator:
    """Interpolate as `interpolation` (N, M) does, rays through the beams that they share.

    Worth it where rays have more cells than the beams: N ≫ P.
    """

    def build(rays: AbstractFunctional) -> AbstractOperator:
        if isinstance(rays, LineIntegrals):
            table = BeamTable.of(grid, beams, rays, dtype, memory)
            if table.knots > 0:
                knots = table.columns - grid.size
                log.info("%d rays through %d knots of beams", len(rays), knots)
                return ProductOperator(table.rows(rays), table.expansion())
        return interpolation(rays, grid, memory, dtype)

    return operator_by_rows(functional, build)


def _within(grid: RegularGrid, beams: AbstractBeams, step: float) -> Tensor:
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
