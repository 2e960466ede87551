"""Banded double sums over the nodes of many rays through one table of residual covariances."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.gp._prior import GridPrior
from dustmap.gp.features._base import chunks
from dustmap.gp.features._nodes import Nodes
from dustmap.gp.features._residual_table import ResidualTable


@final
@dataclass(frozen=True, eq=False)
class NodeSource:
    """nodes: those of a slice of the data, made anew at every call; rows_at_once: of a slice."""

    nodes: Callable[[slice], Nodes]
    rows_at_once: int


@final
@dataclass(frozen=True, eq=False)
class PairWalk:
    """The pairs of nodes within the band, as positions in the values of a `ResidualTable`.

    entries: for each axis, of the pair (j, m) at j (2B + 1) + m + B, its share of the position;
    last, torus_shape: cells beyond (D,), on which axis lie on the other side of the torus;
    straight: whether nodes of a row only get farther apart with their distance in the row.
    """

    table: ResidualTable
    entries: tuple[Tensor, ...]
    last: tuple[float, ...]
    torus_shape: tuple[int, ...]
    straight: bool

    @staticmethod
    def of(table: ResidualTable, prior: GridPrior, straight: bool) -> "PairWalk":
        """The walk on the torus of a prior."""
        lattice, D = table.lattice, prior.grid.dim
        entry = lattice.entry_of().to(table.values.device)
        entries = [entry * lattice.entries ** (D - 1 - d) for d in range(D)]
        entries[0] = entries[0] + table.fine**D
        middle = zip(prior.grid.shape, prior.torus_shape, strict=True)
        last = tuple(0.5 * (m + length - 1) for m, length in middle)
        return PairWalk(table, tuple(entries), last, prior.torus_shape, straight)

    def visits(self, nodes: Nodes) -> Iterator[tuple[Tensor, Tensor]]:
        """For lags 0, 1, .. in the list of nodes: positions and weights, of as many first nodes.

        Weights v_q v_q', twice for two different nodes, are 0 for pairs of two rows or outside
        the band.
        """
        yield self._single(nodes.offset), nodes.weight.square()
        place = self._lattice_place(nodes)
        B, T = self.table.lattice.reach, self.table.lattice.steps
        key = [n.remainder(T) * (2 * B + 1) + B - n for n in place]
        for lag in range(1, len(nodes)):
            first = len(nodes) - lag
            paired = nodes.row[lag:] == nodes.row[:first]
            if not bool(paired.any()):
                return
            index: Tensor | None = None
            for n, k, entry in zip(place, key, self.entries, strict=True):
                low = n[:first] - B
                other = torch.minimum(torch.maximum(n[lag:], low), low + 2 * B)
                paired &= other == n[lag:]
                share = entry.index_select(0, k[:first] + other)
                index = share if index is None else index.add_(share)
            if bool(paired.any()):
                assert index is not None
                yield index, 2.0 * nodes.weight[lag:] * nodes.weight[:first] * paired
            elif self.straight:
                return

    def _single(self, offset: Tensor) -> Tensor:
        """Positions of the nodes' own variances on the finer lattice: (Q,)."""
        fine = self.table.fine
        j = (offset * fine).round().to(torch.int64).remainder(fine)
        flat = j[:, 0]
        for d in range(1, offset.shape[1]):
            flat = flat * fine + j[:, d]
        return flat

    def _lattice_place(self, nodes: Nodes) -> list[Tensor]:
        """Nearest lattice points, counted from the grid's lower corner, axis by axis."""
        T, found = self.table.lattice.steps, []
        for d, (last, length) in enumerate(zip(self.last, self.torus_shape, strict=True)):
            cell = nodes.cell[:, d]
            cell = cell - length * (cell > last)
            found.append(cell * T + (nodes.offset[:, d] * T).round().to(torch.int64))
        return found


def banded_sum(walk: PairWalk, source: NodeSource, count: int) -> Tensor:
    """Σ_qq' v_q v_q' c_r(x_q, x_q') over the band: (count,), differentiable in the table."""
    result: Tensor = _BandedSum.apply(  # type: ignore[no-untyped-call]
        walk.table.values, walk, source, count
    )
    return result


class _BandedSum(torch.autograd.Function):
    """`banded_sum`; its derivative spreads v_q v_q' over the entries of the table."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, walk: PairWalk, source: NodeSource, count: int) -> Tensor:
        ctx.walk, ctx.source, ctx.count, ctx.like = walk, source, count, values
        out = values.new_zeros(count)
        for part in chunks(count, source.rows_at_once):
            nodes = source.nodes(part)
            if len(nodes) == 0:
                continue
            total = torch.zeros_like(nodes.weight)
            for index, weight in walk.visits(nodes):
                total[: len(index)] += values.index_select(0, index).mul_(weight)
            out[part].index_add_(0, nodes.row, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        to_values = torch.zeros_like(ctx.like)
        for part in chunks(ctx.count, ctx.source.rows_at_once):
            nodes = ctx.source.nodes(part)
            if len(nodes) == 0:
                continue
            upstream = grads[0][part].index_select(0, nodes.row)
            for index, weight in ctx.walk.visits(nodes):
                to_values.index_add_(0, index, weight.mul_(upstream[: len(index)]))
        return to_values, None, None, None


def quadratic_form(lags: Tensor, a: Tensor, node: Tensor) -> Tensor:
    """Σ_ij a_i a_j lags[node_i − node_j] of every row: (N,), differentiable in lags and a.

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
    """Flat lags between points (K, D) of a torus: (K, K)."""
    flat = torch.zeros(1, dtype=torch.int64, device=node.device)
    for z, length in zip(node.unbind(-1), shape, strict=True):
        flat = flat * length + (z[:, None] - z).remainder(length)
    return flat
