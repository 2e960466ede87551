"""W u with the derivatives of both, through tables of weights: no stored W, no stored graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.gp.features._base import chunks
from dustmap.gp.features._local_weights import Sites


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

    def product(self, u: Tensor) -> Tensor:
        """W u for fields u (k, M_w): (k, count), differentiable in the table and in u."""
        result: Tensor = _TableProduct.apply(self.table, u, self)  # type: ignore[no-untyped-call]
        return result

    def dense(self, columns: int, dtype: torch.dtype) -> Tensor:
        """W as a matrix (count, columns), with the graph of the table."""
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
        for part in chunks(piece.count, piece.rows_at_once):
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
        for part in chunks(piece.count, piece.rows_at_once):
            sites = piece.sites(part)
            taps = sites.taps(weights)
            if to_table is not None:
                sites.add_table_gradient(taps.correlations(grad[part], fields), to_table)
            if to_fields is not None:
                taps.add_adjoint(grad[part], to_fields)
        return to_table, None if to_fields is None else to_fields.mT, None
