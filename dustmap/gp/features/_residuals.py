"""Var r_n, what local kriging weights leave unexplained of each datum.

A ray's is a banded double sum over its nodes through one table of residual covariances.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid, flat_index
from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features._nodes import PER_CELL, Nodes, node_count, nodes_of
from dustmap.gp.features._stencil import (
    BAND,
    ResidualTable,
    Stencil,
    explained_variance,
    point_variance,
)
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import chunks

log = logging.getLogger(__name__)
F = TypeVar("F", bound=functionals.AbstractFunctional)

#: Beyond the band c_r is smooth: every third lag stands for its neighbours.
_STRIDE = 3
#: Share of the position of a pair outside the band: negative whatever the other axes add.
_OUTSIDE = -(2**27)
#: Steps per cell of rays under a kernel without a derivative, whose c_r has a cusp at x = x'.
ROUGH_PER_CELL = 4.0
#: Nodes of rays whose arrays stay in the processor's cache together.
_CHUNK_NODES = 2**16
#: Covariances evaluated at once for points.
_CHUNK_ENTRIES = 2**19
#: Measures of more points than this take the table of pairs.
_FEW_POINTS = 8
#: Var r over k(0) of a point at a node, which is 0 but for rounding.
_ROUND_OFF = 1e-9


@final
@dataclass(frozen=True, eq=False)
class PairWalk:
    """The pairs of nodes within reach, as positions in the values of a `ResidualTable`.

    entries: for each axis, of the pair (j, m) at j (2B + 3) + m + B + 1, its share of the position,
    hugely negative for |m| = B + 1; last, torus_shape: cells beyond (D,), on which axis lie on the
    other side of the torus; dense: lags after which only every third is visited, and then no pair
    is looked for within the band; None for points in no order, which are all paired.
    """

    table: ResidualTable
    entries: tuple[Tensor, ...]
    last: tuple[float, ...]
    torus_shape: tuple[int, ...]
    dense: int | None

    @staticmethod
    def of(
        table: ResidualTable,
        grid: RegularGrid,
        torus_shape: tuple[int, ...],
        per_cell: float | None,
    ) -> "PairWalk":
        """The walk on the cells of a torus; per_cell: steps of straight rays, None for points."""
        lattice, D = table.lattice, grid.dim
        entry = lattice.entry_of().to(torch.int32).reshape(lattice.steps, -1)
        shares = [entry * lattice.entries ** (D - 1 - d) for d in range(D)]
        entries = [pad(share, (1, 1), value=_OUTSIDE).flatten() for share in shares]
        middle = zip(grid.shape, torus_shape, strict=True)
        last = tuple(0.5 * (m + length - 1) for m, length in middle)
        dense = None
        if per_cell is not None:  # a step is at least m / (m + 1) of 1 / per_cell, m its lag
            dense = 1 + int(per_cell * math.sqrt(D) * (BAND + 1.0 / lattice.steps))
        moved = tuple(e.to(table.values.device) for e in entries)
        return PairWalk(table, moved, last, torus_shape, dense)

    def visits(self, nodes: Nodes) -> Iterator[tuple[Tensor, Tensor]]:
        """For lags 0, 1, .. in the list of nodes: positions and weights, of as many first nodes.

        Weights v_q v_q', twice for two different nodes, are 0 for pairs of two rows or out of
        reach.
        """
        fine, single = self.table.fine, torch.zeros_like(nodes.row, dtype=torch.int32)
        for along in nodes.offset.unbind(-1):  # a node's own variance is on the finer lattice
            single = single * fine + (along * fine).round().to(torch.int32).remainder(fine)
        yield single, nodes.weight.square()
        place, row = self._lattice_place(nodes), nodes.row.to(torch.int32)
        B, T = self.table.lattice.reach, self.table.lattice.steps
        key = [n.remainder(T) * (2 * B + 3) + B + 1 for n in place]
        for lag, every in self._lags(len(nodes)):
            first = len(nodes) - lag
            paired = row[lag:] == row[:first]
            if not bool(paired.any()):
                return
            if every == 1:
                index = self._near(place, key, lag)
                near = index >= 0
                if self.table.tail > 0 and not bool((near | ~paired).all()):
                    index = torch.where(near, index, self._far(place, lag))
            else:
                index = self._far(place, lag)
            paired &= index >= 0
            if self.dense is not None and not bool(paired.any()):
                return
            weight = (2.0 * every) * nodes.weight[lag:] * nodes.weight[:first]
            yield index.clamp_(min=0), weight.mul_(paired)

    def _lags(self, count: int) -> Iterator[tuple[int, int]]:
        """Return the lags with the number of lags that each stands for."""
        dense = count - 1 if self.dense is None else self.dense
        for lag in range(1, min(dense, count - 1) + 1):
            yield lag, 1
        if self.table.tail > 0:
            for lag in range(dense + 1 + _STRIDE // 2, count, _STRIDE):
                yield lag, _STRIDE

    def _near(self, place: Sequence[Tensor], key: Sequence[Tensor], lag: int) -> Tensor:
        """Return the positions of pairs by their offsets; negative outside the band."""
        B, first = self.table.lattice.reach, len(place[0]) - lag
        index = torch.full_like(place[0][lag:], self.table.fine ** len(place))
        for n, k, entry in zip(place, key, self.entries, strict=True):
            apart = (n[lag:] - n[:first]).clamp_(-B - 1, B + 1)
            index.add_(entry.index_select(0, apart.add_(k[:first])))
        return index

    def _far(self, place: Sequence[Tensor], lag: int) -> Tensor:
        """Positions of pairs by their displacement to half a cell; negative out of reach."""
        half, side = self.table.lattice.steps // 2, self.table.tail
        first = len(place[0]) - lag
        index = torch.full_like(place[0][lag:], len(self.table.values) - side ** len(place))
        largest = torch.zeros_like(index)
        for d, n in enumerate(place):
            apart = (n[lag:] - n[:first]).abs_()
            torch.maximum(largest, apart, out=largest)
            apart.add_(half // 2).div_(half, rounding_mode="floor")
            index.add_(apart, alpha=side ** (len(place) - 1 - d))
        return index.masked_fill_(largest > (side - 1) * half, -1)

    def _lattice_place(self, nodes: Nodes) -> list[Tensor]:
        """Return the nearest lattice points, counted from the grid's lower corner, axis by axis."""
        T, positions = self.table.lattice.steps, []
        for d, (last, length) in enumerate(zip(self.last, self.torus_shape, strict=True)):
            cell = nodes.cell[:, d]
            cell = cell - length * (cell > last)
            positions.append((cell * T + (nodes.offset[:, d] * T).round()).to(torch.int32))
        return positions


#: The nodes of a slice of the data, made anew at every call.
NodeSource = Callable[[slice], Nodes]


def banded_sum(walk: PairWalk, source: NodeSource, rows_at_once: int, count: int) -> Tensor:
    """Return Σ_qq' v_q v_q' c_r(x_q, x_q') over the band: (count,), differentiable in the table."""
    parts = tuple(chunks(count, rows_at_once))
    result: Tensor = _BandedSum.apply(  # type: ignore[no-untyped-call]
        walk.table.values, walk, source, parts, count
    )
    return result


class _BandedSum(torch.autograd.Function):
    """`banded_sum`; its derivative spreads v_q v_q' over the entries of the table."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        walk: PairWalk,
        source: NodeSource,
        parts: tuple[slice, ...],
        count: int,
    ) -> Tensor:
        ctx.walk, ctx.source, ctx.parts, ctx.like = walk, source, parts, values
        out = values.new_zeros(count)
        for part in parts:
            nodes = source(part)
            if len(nodes) == 0:
                continue
            total = torch.zeros_like(nodes.weight)
            for index, weight in walk.visits(nodes):
                total[: len(index)] += values.index_select(0, index).mul_(weight)
            out[part].index_add_(0, nodes.row, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        to_values = torch.zeros_like(ctx.like)
        for part in ctx.parts:
            nodes = ctx.source(part)
            if len(nodes) == 0:
                continue
            upstream = grads[0][part].index_select(0, nodes.row)
            for index, weight in ctx.walk.visits(nodes):
                to_values.index_add_(0, index, weight.mul_(upstream[: len(index)]))
        return to_values, None, None, None, None


def banded_variance(
    table: ResidualTable,
    grid: RegularGrid,
    torus_shape: tuple[int, ...],
    observed: functionals.Observed,
    kernel: AbstractKernel,
) -> Tensor:
    """`banded_sum` of rays or of the points of measures: (N,).

    Steps of rays are finer than those of W where the kernel's c_r has a cusp.
    """
    rough = any(term.profile.derivatives < 1 for term in kernel.terms())
    per_cell = ROUGH_PER_CELL if rough else PER_CELL
    straight = isinstance(observed, functionals.LineIntegrals)
    walk = PairWalk.of(table, grid, torus_shape, per_cell if straight else None)
    nodes = node_count(observed, grid, per_cell)
    size = max(1, _CHUNK_NODES * len(observed) // max(1, nodes))

    def source(part: slice) -> Nodes:
        return nodes_of(observed[part], grid, torus_shape, per_cell)

    return banded_sum(walk, source, size, len(observed))


def quadratic_form(lags: Tensor, a: Tensor, node: Tensor) -> Tensor:
    """Return Σ_ij a_i a_j lags[node_i − node_j] of every row: (N,), differentiable in lags and a.

    lags: covariances at the lags of a torus; a (N, K); node (N, K, D): indices of its points.
    """
    result: Tensor = _QuadraticForm.apply(lags, a, node)  # type: ignore[no-untyped-call]
    return result


class _QuadraticForm(torch.autograd.Function):
    """`quadratic_form` a row at a time, forward and backward: K² numbers are held."""

    @staticmethod
    def forward(ctx: Any, lags: Tensor, a: Tensor, node: Tensor) -> Tensor:
        ctx.save_for_backward(lags, a, node)
        flat = lags.flatten()
        rows = zip(a, node, strict=True)
        return torch.stack([w @ (flat[_lag_index(z, lags.shape)] @ w) for w, z in rows])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        lags, a, node = ctx.saved_tensors
        flat, to_lags, to_a = lags.flatten(), torch.zeros_like(lags).flatten(), []
        for upstream, w, z in zip(grads[0], a, node, strict=True):
            index = _lag_index(z, lags.shape)
            to_a.append(2.0 * upstream * (flat[index] @ w))
            to_lags.index_add_(0, index.flatten(), (upstream * torch.outer(w, w)).flatten())
        return to_lags.reshape(lags.shape), torch.stack(to_a), None


def _lag_index(node: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the flat lags between points (K, D) of a torus: (K, K)."""
    axes = zip(node.unbind(-1), shape, strict=True)
    return flat_index([(z[:, None] - z).remainder(length) for z, length in axes], shape)


@final
@dataclass(frozen=True, eq=False)
class ResidualVariance:
    """value (N,) = Var r_n ≥ 0; clamped: how many were negative and set to 0."""

    value: Tensor
    clamped: int

    @staticmethod
    def of(raw: Tensor, dtype: torch.dtype, prior: float = 0.0) -> "ResidualVariance":
        """Negative values set to 0, counted and logged: round-off, or the band's truncation.

        What is negative by less than 1e-9 of the prior k(0) is round-off, and no warning.
        """
        negative = raw.detach() < 0
        clamped = int(negative.sum())
        if clamped > 0:
            least = float(raw.detach().min())
            level = logging.DEBUG if least > -_ROUND_OFF * prior else logging.WARNING
            text = "%d of %d residual variances were negative, down to %.2e, and set to 0"
            log.log(level, text, clamped, len(raw), least)
        return ResidualVariance(raw.clamp_min(0.0).to(dtype), clamped)


@final
@dataclass(frozen=True, eq=False)
class LocalResiduals:
    """Var r_n of local weights: f_n − w_nᵀu with w on stencils of `order` nodes per axis.

    Points and derivatives exactly, k_ff − k_Sᵀ K_SS⁻¹ k_S, and so measures of up to 8 points. Rays
    by the banded double sum

        Var r_n = Σ_qq' v_q v_q' c_r(x_q, x_q')   over nodes at most two cells apart,

    with c_r at the nearest offsets of a table (`ResidualTable`) and, for p = 2, its tail up to
    eight cells. All in float64, differentiable in the kernel; memory is that of the result, the
    table and one chunk of nodes, and the backward pass visits the nodes once more.

    In 3-D, ℓ/h = 1, 2, 4, p = 2 and 4, rays of random direction: the median error is 1–3 % and 95 %
    are within 6 % for Matérn-1/2 and -3/2, 1–6 % and 5–24 % for Matérn-5/2. In a plane of nodes
    the median is up to 7 % (12 % for Matérn-5/2), along a line of nodes mostly 8–30 %, at worst
    60 % for p = 2: there the coarse offsets and the averaged tail miss what little is left.
    `tests/gp/residual_definition.py` measures it.

    prior, estimator: as in `LocalFeatures`.
    """

    prior: GridPrior
    estimator: AbstractEstimator
    order: int = 4

    def variance(self, functional: functionals.AbstractFunctional) -> ResidualVariance:
        """Return Var r_n (N,) in the prior's dtype, with the count of clamped values."""
        prior = float(self.prior.lags.detach().flatten()[0])
        return ResidualVariance.of(self._raw(functional), self.prior.dtype, prior)

    def _raw(self, functional: functionals.AbstractFunctional) -> Tensor:
        if isinstance(functional, functionals.Stacked):
            return functional.arrange([self._raw(part) for part in functional.parts])
        stencil = Stencil.of(self.prior, self.order)
        if isinstance(functional, functionals.PointValues | functionals.Derivatives):
            return _by_parts(functional, stencil.size, lambda f: self._points(f, stencil))
        observed = self.estimator.observed(functional, self.prior.kernel)
        if isinstance(observed, functionals.PointMeasure):
            points = observed.points.shape[1]
            if observed.direction is not None or points <= _FEW_POINTS:
                entries = (points * stencil.size) ** 2
                return _by_parts(observed, entries, lambda f: self._measure(f, stencil))
        return self._pairs(observed, stencil)

    def _points(
        self, points: functionals.PointValues | functionals.Derivatives, stencil: Stencil
    ) -> Tensor:
        nodes = self._nodes(points.x)
        if isinstance(points, functionals.PointValues):
            return point_variance(stencil, nodes.offset)
        k_ff = ClosedForm().variance(stencil.kernel, points, stencil.wrapping)
        return k_ff - explained_variance(stencil, nodes.offset, points.direction)

    def _measure(self, measure: functionals.PointMeasure, stencil: Stencil) -> Tensor:
        """k_ff − 2 aᵀk_fu + aᵀ K a with the weights a on the stencils of all points: (n,)."""
        n, q, D = measure.points.shape
        nodes = self._nodes(measure.points.flatten(0, 1))
        direction = measure.direction
        turned = None if direction is None else direction.repeat_interleave(q, dim=0)
        w = stencil.weights(nodes.offset, turned).reshape(n, q, -1)
        a = (measure.weights[..., None] * w).flatten(1)  # (n, QP)
        met = (nodes.cell[:, None] + stencil.shifts()).reshape(n, -1, D)
        place = (nodes.cell + nodes.offset).reshape(n, q, D)
        k_ff = ClosedForm().variance(stencil.kernel, measure, stencil.wrapping)
        k_fu = self._cross(place[:, :, None] - met[:, None], measure, stencil)
        lags = torch.fft.irfftn(self.prior.spectrum, s=self.prior.torus_shape)  # with the nugget
        return k_ff - 2.0 * (a * k_fu).sum(-1) + quadratic_form(lags, a, met)

    def _cross(self, apart: Tensor, measure: functionals.PointMeasure, stencil: Stencil) -> Tensor:
        """Cov(f_n, ρ(z)) at displacements (n, Q, K, D), in cells, of the points from z: (n, K)."""
        n, q, k, D = apart.shape
        lengths = torch.tensor(self.prior.torus_shape, dtype=apart.dtype, device=apart.device)
        spacing = torch.tensor(stencil.spacing, dtype=apart.dtype, device=apart.device)
        nearest = (apart - lengths * (apart / lengths).round()) * spacing
        weight = measure.weights[..., None].expand(n, q, k).reshape(-1, 1)
        direction = measure.direction
        if direction is not None:
            direction = direction.repeat_interleave(q * k, dim=0)
        pairs = functionals.PointMeasure(nearest.reshape(-1, 1, D), weight, direction)
        values = ClosedForm().cross(stencil.kernel, pairs, stencil.origin.x, stencil.wrapping)
        return values.reshape(n, q, k).sum(1)

    def _pairs(self, observed: functionals.Observed, stencil: Stencil) -> Tensor:
        table = ResidualTable.of(stencil) if stencil.has_graph else self._detached_table
        prior = self.prior
        return banded_variance(table, prior.grid, prior.torus_shape, observed, prior.kernel)

    @cached_property
    def _detached_table(self) -> ResidualTable:
        return ResidualTable.of(Stencil.of(self.prior, self.order))

    def _nodes(self, points: Tensor) -> Nodes:
        values = functionals.PointValues(points)
        return nodes_of(values, self.prior.grid, self.prior.torus_shape)


def _by_parts(functional: F, entries: int, evaluate: Callable[[F], Tensor]) -> Tensor:
    """Return evaluate(functional) (N,), of few rows at once; entries: covariances of a row."""
    size = max(1, _CHUNK_ENTRIES // entries)
    parts = [evaluate(functional[rows]) for rows in chunks(len(functional), size)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
