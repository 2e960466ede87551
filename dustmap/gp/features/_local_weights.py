"""W, the sparse rows that local weights make of data, stored or recomputed by chunks.

Products W u with the derivatives of both, through tables of weights, store neither W nor a graph.
Residuals of rays that share cells of the grid are alike along one beam.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap import linalg
from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid, flat_index
from dustmap.gp.features._nodes import Nodes, node_count, nodes_of
from dustmap.linalg import chunks, counter_normal

log = logging.getLogger(__name__)

#: Entries of a chunk: its arrays of 8-byte numbers stay below 32 MB, where memory is reused.
CHUNK_ENTRIES = 2**19
#: Numbers gathered at once in products with several vectors.
_GATHERED = 2**21
#: Rows whose entries are counted to plan the bytes of all.
_SAMPLED_ROWS = 512
#: Steps of rays, and random numbers, that are held at once.
_STEPS, _NUMBERS = 2**18, 2**24
#: Added to a seed, so that no other use of it meets these numbers.
_STREAM = 0x5CE11


@final
@dataclass(frozen=True, eq=False)
class Taps:
    """Rows W_n = Σ over the taps c of row n of value_c on the nodes column_c, P of them each.

    row (C,) int64; column (C, P) integer, flat indices of the torus or grid; value (C, P);
    count: number of rows. One node may be met by several taps of a row.
    """

    row: Tensor
    column: Tensor
    value: Tensor
    count: int

    def to(self, dtype: torch.dtype) -> "Taps":
        """Round the values to `dtype`."""
        return Taps(self.row, self.column, self.value.to(dtype), self.count)

    def matmul(self, x: Tensor) -> Tensor:
        """Return W x for x (M, k): (count, k)."""
        if x.shape[1] == 1:  # torch adds numbers many times faster than rows of one
            met = x[:, 0].index_select(0, self.column.flatten())
            seen = (self.value * met.reshape(self.column.shape)).sum(1)
            return x.new_zeros(self.count).index_add_(0, self.row, seen)[:, None]
        out = x.new_zeros(self.count, x.shape[1])
        for part in self._parts(x.shape[1]):
            met = _gathered(x, self.column[part])
            seen = torch.bmm(self.value[part].unsqueeze(1), met).squeeze(1)
            out.index_add_(0, self.row[part], seen)
        return out

    def add_adjoint(self, y: Tensor, out: Tensor) -> None:
        """out += Wᵀ y for y (count, k), out (M, k)."""
        if y.shape[1] == 1:
            spread = self.value * y[self.row]
            out[:, 0].index_add_(0, self.column.flatten(), spread.flatten())
            return
        for part in self._parts(y.shape[1]):
            spread = self.value[part].unsqueeze(-1) * y[self.row[part]].unsqueeze(1)
            out.index_add_(0, self.column[part].flatten(), spread.flatten(0, 1))

    def correlations(self, y: Tensor, x: Tensor) -> Tensor:
        """Return Σ_k y[row_c, k] x[column_cs, k], the derivative of yᵀ W x to value: (C, P)."""
        out = torch.empty_like(self.value)
        for part in self._parts(x.shape[1]):
            met = _gathered(x, self.column[part])
            out[part] = torch.bmm(met, y[self.row[part]].unsqueeze(-1)).squeeze(-1)
        return out

    def compressed(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return W in compressed rows, entries at one place added: starts, columns and values."""
        narrow = self.count * columns < 2**31
        index = torch.int32 if narrow else torch.int64
        place = self.column.to(index) + (self.row * columns).to(index).unsqueeze(-1)
        place, order = torch.sort(place.flatten())
        fresh = torch.ones_like(place, dtype=torch.bool)
        torch.ne(place[1:], place[:-1], out=fresh[1:])
        target = fresh.cumsum(0, dtype=torch.int32) - 1
        place = place[fresh]
        values = self.value.new_zeros(len(place))
        values.index_add_(0, target, self.value.flatten()[order])
        first = torch.arange(self.count + 1, dtype=torch.int64, device=place.device) * columns
        starts = torch.searchsorted(place.to(torch.int64), first)
        return starts, place.remainder(columns).to(torch.int32), values

    def _parts(self, k: int) -> Iterator[slice]:
        return linalg.chunks(len(self.row), max(1, _GATHERED // max(1, k * self.column.shape[1])))


@final
@dataclass(frozen=True, eq=False)
class Sites:
    """Weighted entries of a table on the stencils of cells: the structure of a row of W.

    row (C,), column (C, P): the taps, one for consecutive nodes in one cell; first (C,): their
    first nodes; entry (Q,): the row of the table of every node; weight (Q,); count: number of rows.
    """

    row: Tensor
    column: Tensor
    first: Tensor
    entry: Tensor
    weight: Tensor
    count: int

    def taps(self, table: Tensor) -> Taps:
        """value_c = Σ over the nodes q of tap c of weight_q table[entry_q], for table (T, P)."""
        value = torch.nn.functional.embedding_bag(
            self.entry,
            table,
            self.first,
            mode="sum",
            per_sample_weights=self.weight.to(table.dtype),
        )
        return Taps(self.row, self.column, value, self.count)

    @property
    def visit(self) -> Tensor:
        """The tap (Q,) of every node."""
        every = torch.arange(len(self.first), device=self.first.device)
        ends = torch.cat([self.first[1:], self.first.new_tensor([len(self.entry)])])
        return every.repeat_interleave(ends - self.first)


def sites_of(
    row: Tensor,
    cell: Tensor,
    entry: Tensor,
    weight: Tensor,
    count: int,
    axis_shifts: Tensor,
    shape: tuple[int, ...],
    mirrors: bool = False,
) -> Sites:
    """Sites of nodes in cells (Q, D) whose stencil lies at axis_shifts (p,) on every axis.

    shape: of the torus, around which cells and stencils wrap; mirrors: of a grid without one, whose
    cells have their stencils on it but for places on a node, which take the mirror image.
    """
    flat = flat_index(cell.unbind(1), shape)
    fresh = torch.ones_like(row, dtype=torch.bool)
    fresh[1:] = (row[1:] != row[:-1]) | (flat[1:] != flat[:-1])
    taps = fresh.nonzero().squeeze(-1)
    kind = torch.int32 if math.prod(shape) < 2**31 else torch.int64
    stencil = torch.cartesian_prod(*[axis_shifts] * len(shape)).reshape(-1, len(shape))
    apart = flat_index(stencil.unbind(1), shape)
    met, lengths = cell[taps], cell.new_tensor(shape)
    column = flat[taps].to(kind)[:, None] + apart.to(kind)
    around = (met + axis_shifts[0] < 0) | (met + axis_shifts[-1] >= lengths)
    wrapped = around.any(1).nonzero().squeeze(-1)
    if len(wrapped) > 0:
        nodes = met[wrapped, None] + stencil
        nodes = _mirrored(nodes, lengths) if mirrors else nodes.remainder(lengths)
        column[wrapped] = flat_index(nodes.unbind(-1), shape).to(kind)
    return Sites(row[taps], column, taps, entry, weight, count)


def _mirrored(nodes: Tensor, lengths: Tensor) -> Tensor:
    """Nodes (Q, P, D) of stencils, turned about the place on a node where they leave the grid."""
    first, last = nodes.amin(1, keepdim=True), nodes.amax(1, keepdim=True)
    nodes = torch.where(last >= lengths, first + last - nodes - 1, nodes)
    return torch.where(first < 0, first + last - nodes + 1, nodes)


def sites_of_nodes(
    nodes: Nodes, entry: Tensor, shifts: Tensor, shape: tuple[int, ...], mirrors: bool = False
) -> Sites:
    """`sites_of` nodes, with the entry (Q,) of each."""
    row, cell, weight, count = nodes.row, nodes.cell, nodes.weight, nodes.count
    return sites_of(row, cell, entry, weight, count, shifts, shape, mirrors)


def _gathered(x: Tensor, column: Tensor) -> Tensor:
    """Return x (M, k) at columns (C, P): (C, P, k)."""
    return x.index_select(0, column.flatten()).reshape(*column.shape, x.shape[1])


#: The taps of a slice of the data.
TapSource = Callable[[slice], Taps]


@final
class RecomputedOperator(linalg.AbstractAdjointPair):
    """W (N, M) whose rows are computed anew, a chunk at a time, in every product."""

    def __init__(
        self, source: TapSource, shape: tuple[int, int], rows_at_once: int, like: Tensor
    ) -> None:
        self._source, self._rows_at_once = source, rows_at_once
        self._like = like.new_empty(()).expand(shape)

    def _made_of(self) -> Tensor:
        return self._like

    @torch.no_grad()
    def _product(self, x: Tensor) -> Tensor:
        columns = x.mT.contiguous()
        out = x.new_empty(self.shape[0], len(x))
        for part in linalg.chunks(self.shape[0], self._rows_at_once):
            out[part] = self._source(part).matmul(columns)
        return out.mT

    @torch.no_grad()
    def _adjoint(self, y: Tensor) -> Tensor:
        columns = y.mT.contiguous()
        out = y.new_zeros(self.shape[1], len(y))
        for part in linalg.chunks(self.shape[0], self._rows_at_once):
            self._source(part).add_adjoint(columns[part], out)
        return out.mT


def spread_rows(data: functionals.AbstractFunctional | Tensor) -> Tensor:
    """Return the evenly spread rows that stand for all when the bytes of W are planned."""
    picked = min(len(data), _SAMPLED_ROWS)
    return torch.arange(picked, device=data.device) * len(data) // max(1, picked)


def planned_bytes(sample: Taps, shape: tuple[int, int]) -> int:
    """Bytes of W (N, M) and its transpose in compressed rows, from the taps of `spread_rows`."""
    values = sample.compressed(shape[1])[2]
    entries = len(values) * shape[0] // max(1, sample.count)
    return 2 * entries * (4 + values.element_size()) + 4 * (sum(shape) + 2)


def stored_within(
    memory: int,
    taps: Callable[[functionals.AbstractFunctional], Taps],
    functional: functionals.AbstractFunctional,
    columns: int,
) -> linalg.AbstractOperator:
    """Return W (N, M) stored where it needs no more than `memory`, or computed anew in every
    product; taps: of few data."""
    sample, shape = taps(functional[spread_rows(functional)]), (len(functional), columns)
    planned = planned_bytes(sample, shape)
    keep = planned <= memory
    how = "stored" if keep else "recomputed in every product"
    log.debug("rows of %d data need %d bytes: %s", shape[0], planned, how)
    per_row = max(1, sample.column.numel() // max(1, sample.count))
    build = stored_or_recomputed if keep else RecomputedOperator
    size = max(1, CHUNK_ENTRIES // per_row)
    return build(lambda part: taps(functional[part]), shape, size, sample.value.new_empty(0))


def stored_or_recomputed(
    source: TapSource, shape: tuple[int, int], rows_at_once: int, like: Tensor
) -> linalg.AbstractOperator:
    """Return W (N, M) stored, or computed anew in every product where memory runs out."""
    chunks_of_rows = linalg.AdaptiveBatch(
        "storing sparse rows", rows_at_once, "they are not stored"
    )
    try:
        return chunks_of_rows.attempt(lambda size: stored(source, shape, size, like))
    except linalg.OutOfMemory as error:
        log.warning("%s; they are computed anew in every product", error)
    return RecomputedOperator(source, shape, chunks_of_rows.size, like)


@torch.no_grad()
def stored(
    source: TapSource, shape: tuple[int, int], rows_at_once: int, like: Tensor
) -> linalg.SparseOperator:
    """Return W (N, M) in compressed rows."""
    starts = [torch.zeros(1, dtype=torch.int64, device=like.device)]
    columns, values = [like.new_empty(0, dtype=torch.int32)], [like]
    total = 0
    for part in linalg.chunks(shape[0], rows_at_once):
        first, column, value = source(part).compressed(shape[1])
        starts.append(first[1:] + total)
        columns.append(column)
        values.append(value)
        total += len(value)
    joined_columns = torch.cat(columns)
    columns.clear()  # what has been joined need not be held twice
    joined_values = torch.cat(values)
    values.clear()
    linalg.return_memory(joined_columns.nbytes + joined_values.nbytes)
    return linalg.SparseOperator.from_csr(torch.cat(starts), joined_columns, joined_values, shape)


@final
@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of W that share one table of weights.

    table (T, P) float64, with the graph of the kernel; sites: of a slice of the rows, made anew
    at every call; count: number of rows; rows_at_once: of a chunk.
    """

    table: Tensor
    sites: Callable[[slice], Sites]
    count: int
    rows_at_once: int

    @staticmethod
    def uncut(table: Tensor, sites: Sites, rows_at_once: int) -> "Piece":
        """Return a piece whose sites are at hand, and whose rows are never cut."""
        return Piece(table, lambda part: sites, sites.count, rows_at_once)

    def product(self, u: Tensor) -> Tensor:
        """Return W u for fields u (k, M_w): (k, count), differentiable in the table and in u."""
        result: Tensor = _TableProduct.apply(self.table, u, self)  # type: ignore[no-untyped-call]
        return result

    def dense(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Return W as a matrix (count, columns), with the graph of the table."""
        taps = self.sites(slice(0, self.count)).taps(self.table.to(dtype))
        place = taps.row.unsqueeze(-1) * columns + taps.column
        flat = taps.value.new_zeros(self.count * columns)
        return flat.index_add(0, place.flatten(), taps.value.flatten()).reshape(-1, columns)


class _TableProduct(torch.autograd.Function):
    """f_n = Σ_q weight_q table[entry_q] · u[stencil of q] with the derivatives

        ū = Wᵀ f̄,     table-bar[e] = Σ_{q: entry_q = e} weight_q Σ_k f̄_k[row_q] u_k[stencil of q]

    by one more pass over the sites, the k fields summed before anything is scattered.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, u: Tensor, piece: Piece) -> Tensor:
        ctx.piece = piece
        ctx.save_for_backward(table, u)
        fields, weights = u.mT.contiguous(), table.to(u.dtype)
        out = u.new_empty(piece.count, u.shape[0])
        for part in linalg.chunks(piece.count, piece.rows_at_once):
            out[part] = piece.sites(part).taps(weights).matmul(fields)
        return out.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        table, u = ctx.saved_tensors
        piece: Piece = ctx.piece
        fields, weights = u.mT.contiguous(), table.to(u.dtype)
        grad = grads[0].mT.contiguous()
        to_table = torch.zeros_like(table) if ctx.needs_input_grad[0] else None
        to_fields = torch.zeros_like(fields) if ctx.needs_input_grad[1] else None
        for part in linalg.chunks(piece.count, piece.rows_at_once):
            sites = piece.sites(part)
            taps = sites.taps(weights)
            if to_table is not None:
                to_values = taps.correlations(grad[part], fields)
                passed = to_values.index_select(0, sites.visit).to(table.dtype)
                weight = sites.weight.to(table.dtype).unsqueeze(-1)
                to_table.index_add_(0, sites.entry, weight * passed)
            if to_fields is not None:
                taps.add_adjoint(grad[part], to_fields)
        return to_table, None if to_fields is None else to_fields.mT, None


@final
@dataclass(frozen=True, eq=False)
class CellResiduals:
    """Draws of residuals of rays, from one normal number in every cell of the grid.

        r_sn = √(Var r_n) Σ_c b_nc ξ_sc / ‖b_n‖,   b_nc = ∫ w ds of ray n in cell c,   ξ ~ N(0, I)

    What kriging weights leave of a field vanishes at the nodes and changes its sign within a cell
    or so: to a ray through many cells it is white noise, of which rays in one beam see the same.
    `tests/inference/test_shared_residuals.py` holds the errors that follow against the exact prior.

    Attributes
    ----------
    grid, torus_shape : cells of the prior, those of the padding included
    seed : of ξ, whose number in cell c of draw s depends on (seed, s, c) alone
    draws : (S,) int64, numbers s of the draws

    Examples
    --------
    >>> from dustmap.gp.functionals import LineIntegrals
    >>> grid = RegularGrid.from_bounds((0.0,) * 3, (4.0,) * 3, (5,) * 3)
    >>> ends = torch.tensor([[3.9, 0.3, 0.3], [3.9, 0.4, 0.4], [0.3, 3.9, 0.3]]).double()
    >>> rays = LineIntegrals.from_observer(ends)
    >>> unit = CellResiduals.of(grid, (8, 8, 8), seed=1, count=4000).unit(rays, torch.float32)
    >>> torch.corrcoef(unit.mT)[0].round(decimals=1)
    tensor([1.0000, 1.0000, 0.2000])
    """

    grid: RegularGrid
    torus_shape: tuple[int, ...]
    seed: int
    draws: Tensor

    @staticmethod
    def of(
        grid: RegularGrid, torus_shape: tuple[int, ...], seed: int, count: int
    ) -> "CellResiduals":
        """Return draws 0, .., S − 1 of a seed."""
        return CellResiduals(grid, torus_shape, seed, torch.arange(count))

    def chosen(self, index: Tensor | slice) -> "CellResiduals":
        """Return some of the draws."""
        return replace(self, draws=self.draws[index])

    @torch.no_grad()
    def unit(self, rays: functionals.AbstractFunctional, dtype: torch.dtype) -> Tensor:
        """Return r_sn / √(Var r_n) (S, N) of rays."""
        return functionals.by_rows(rays, lambda own: self._columns(own, dtype)).mT

    def _columns(self, rays: functionals.LineIntegrals, dtype: torch.dtype) -> Tensor:
        """Return the same (N, S): numbers of all cells where many rays see them, else of a few."""
        steps = node_count(rays, self.grid)
        cells = math.prod(self.torus_shape)
        every = torch.arange(cells, device=rays.device) if steps > cells else None
        size = max(1, _STEPS * len(rays) // max(1, steps))
        out = torch.empty(len(rays), len(self.draws), dtype=dtype, device=rays.device)
        for some in chunks(len(self.draws), max(1, _NUMBERS // max(1, min(cells, steps)))):
            field = None if every is None else self._white(every, self.draws[some])
            for part in chunks(len(rays), size):
                taps = self._taps(rays[part])
                if field is None:
                    met, place = torch.unique(taps.column, return_inverse=True)
                    white = self._white(met, self.draws[some])
                    out[part, some] = replace(taps, column=place).matmul(white).to(dtype)
                else:
                    out[part, some] = taps.matmul(field).to(dtype)
        return out

    def _taps(self, rays: functionals.LineIntegrals) -> Taps:
        """Return b_n / ‖b_n‖ by the cells that a ray visits."""
        nodes = nodes_of(rays, self.grid, self.torus_shape)
        same = torch.zeros(len(nodes), dtype=torch.int64, device=rays.device)
        corner = torch.zeros(1, dtype=torch.int64, device=rays.device)
        sites = sites_of_nodes(nodes, same, corner, self.torus_shape)
        taps = sites.taps(nodes.weight.new_ones(1, 1))
        square = nodes.weight.new_zeros(nodes.count)
        square.index_add_(0, taps.row, taps.value[:, 0].square())
        return replace(taps, value=taps.value / square[taps.row, None].sqrt())

    def _white(self, cells: Tensor, draws: Tensor) -> Tensor:
        """Return ξ (C, S) of cells (C,)."""
        numbers = draws.to(cells.device)[None]
        return counter_normal(self.seed + _STREAM, cells.to(torch.int64)[:, None], numbers)
