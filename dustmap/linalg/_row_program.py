"""Products of compressed rows with some vectors at once, on a GPU.

The libraries of a GPU multiply a sparse matrix by 8 vectors in some 20 times the time of one.
Here a program has a few pieces of rows: entries are read once, and what they pick of the vectors,
side by side in memory, comes in whole words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Pieces of a program, and entries of each at once, where pieces have at least so many on average,
#: and where they have fewer.
_LONG, _SHORT, _MANY = (1, 64), (8, 8), 64


@torch.no_grad()
def add_rows(
    out: Tensor, table: Tensor, x: Tensor, entries: tuple[Tensor, Tensor] | None = None
) -> None:
    """Set row `slot` of `out` to Σ_e values_e x[cols_e] over e = first … last − 1, for the pieces
    (slot, first, last) of a table (P, 3); without entries (cols, values), to Σ_e x_e.

    x (n, k) and out (m, k) in rows, k a power of two.
    """
    if len(table) == 0:
        return
    cols, values = entries or (table, x)
    rows, together = _LONG if len(values) >= _MANY * len(table) else _SHORT
    _add_rows[(triton.cdiv(len(table), rows),)](
        out,
        table,
        len(table),
        cols,
        values,
        x,
        VECTORS=x.shape[1],
        ROWS=rows,
        ENTRIES=together,
        IS_PICKED=entries is not None,
        num_warps=1,
    )


def probe(device: torch.device) -> None:
    """Compile and run the program for one row; raise what keeps it from that."""
    table = torch.tensor([[0, 0, 1]], dtype=torch.int32, device=device)
    x = torch.ones(1, 2, device=device)
    add_rows(torch.empty_like(x), table, x)


@triton.jit
def _add_rows(
    out,
    table,
    pieces,
    cols,
    values,
    x,
    VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    IS_PICKED: tl.constexpr,
):
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_piece = piece < pieces
    slot = tl.load(table + 3 * piece, mask=is_piece, other=0).to(tl.int64)
    first = tl.load(table + 3 * piece + 1, mask=is_piece, other=0)
    last = tl.load(table + 3 * piece + 2, mask=is_piece, other=0)
    vector = tl.arange(0, VECTORS)
    total = tl.zeros([ROWS, ENTRIES, VECTORS], dtype=out.dtype.element_ty)
    for start in range(0, tl.max(last - first, axis=0), ENTRIES):
        entry = first[:, None] + start + tl.arange(0, ENTRIES)[None, :]
        within = entry < last[:, None]
        if IS_PICKED:
            row = tl.load(cols + entry, mask=within, other=0).to(tl.int64)
        else:
            row = entry.to(tl.int64)
        place = row[:, :, None] * VECTORS + vector[None, None, :]
        picked = tl.load(x + place, mask=within[:, :, None], other=0.0)
        if IS_PICKED:
            picked *= tl.load(values + entry, mask=within, other=0.0)[:, :, None]
        total += picked
    place = slot[:, None] * VECTORS + vector[None, :]
    tl.store(out + place, tl.sum(total, axis=1), mask=is_piece[:, None])
