"""Products of compressed rows with some vectors at once, and the programs of a GPU."""

import functools
import importlib.util
import logging
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# Vectors multiplied at once. More share each read of the entries, until the rows of vectors that
# the entries pick no longer stay in cache; sums of rows fetch these ahead of their use.
_TOGETHER, _SUMMED_TOGETHER = 20, 32
# Vectors from which on sums of rows are faster than MKL's products of sparse matrices.
_SUMMED = 12
# Of a GPU's program: vectors at once, a power of two, the fewest, and entries of a piece of a row.
_MOST_THERE, _FEWEST_THERE, _LONGEST = 16, 4, 1024


def sparse_product(matrix: Tensor, x: Tensor, pieces: "RowPieces | None" = None) -> Tensor:
    """Products (k, m) with vectors x (k, n), laid out with neighbouring vectors side by side, as
    the next product wants them.

    pieces: of the rows, for products of several vectors on a GPU.
    """
    if 0 in (len(x), len(matrix)):
        return x.new_empty(len(x), len(matrix))
    if len(x) == 1:
        return (matrix @ x[0])[None]
    product, most = _way(matrix, x, pieces)
    count = -(-len(x) // most)
    if count <= 1:
        return product(matrix, x.mT).mT
    columns = x.new_empty(matrix.shape[0], len(x))
    for out, part in zip(columns.tensor_split(count, 1), x.tensor_split(count), strict=True):
        out.copy_(product(matrix, part.mT))
    return columns.mT


def _way(
    matrix: Tensor, x: Tensor, pieces: "RowPieces | None"
) -> tuple[Callable[[Tensor, Tensor], Tensor], int]:
    """Return what multiplies by columns (n, k), and how many vectors (k, n) it takes at once."""
    if pieces is not None and not (x.requires_grad and torch.is_grad_enabled()):
        return pieces.product, _MOST_THERE
    if len(x) >= _SUMMED and x.dtype == torch.float32 and x.device.type == "cpu":
        return _summed, _SUMMED_TOGETHER
    return torch.matmul, _TOGETHER


def _summed(matrix: Tensor, columns: Tensor) -> Tensor:
    """Product (m, k) with columns (n, k): of row i the weighted sum of the rows of `columns` that
    its entries pick, Σ_j A_ij columns_j."""
    return torch.nn.functional.embedding_bag(
        matrix.col_indices(),
        columns.contiguous(),
        matrix.crow_indices(),
        mode="sum",
        per_sample_weights=matrix.values(),
        include_last_offset=True,
    )


@final
@dataclass(frozen=True, eq=False)
class RowPieces:
    """Rows of a matrix on a GPU in pieces of at most `_LONGEST` entries, one program's each.

    A row of hundreds of thousands of entries, as the node at the Sun has, would be the last to end.
    table (P, 3): the place of the sum of each piece, its first entry and the one after its last;
    rows (L, 3): those of several pieces, whose sums are at places from m on.
    """

    table: Tensor
    rows: Tensor
    sums: int

    @staticmethod
    def of(starts: Tensor, longest: int = _LONGEST) -> "RowPieces":
        """Cut rows whose entries start at `starts` (m + 1,)."""
        starts, m = starts.long(), len(starts) - 1
        counts = -(-starts.diff() // longest)
        row = torch.arange(m, device=starts.device).repeat_interleave(counts)
        nth = torch.arange(len(row), device=starts.device) - (counts.cumsum(0) - counts)[row]
        first = starts[row] + longest * nth
        last = torch.minimum(first + longest, starts[row + 1])
        is_part = counts[row] > 1
        place = torch.where(is_part, m + is_part.cumsum(0) - 1, row)
        long = (counts > 1).nonzero().squeeze(1)
        ends = m + counts[long].cumsum(0)
        index = torch.int32 if int(starts[-1]) < 2**31 else torch.int64
        table = torch.stack([place, first, last], 1).to(index)
        rows = torch.stack([long, ends - counts[long], ends], 1).to(index)
        return RowPieces(table, rows, int(is_part.sum()))

    def product(self, matrix: Tensor, columns: Tensor) -> Tensor:
        """Product (m, k) with columns (n, k), k of at most `_MOST_THERE`."""
        from dustmap.linalg import _row_program

        k, m = columns.shape[1], matrix.shape[0]
        width = max(_FEWEST_THERE, 1 << (k - 1).bit_length())
        x = torch.nn.functional.pad(columns, (0, width - k)).contiguous()
        out = x.new_zeros(m + self.sums, width)
        entries = matrix.col_indices(), matrix.values()
        _row_program.add_rows(out, self.table, x, entries)
        _row_program.add_rows(out, self.rows, out)
        return out[:m, :k]


def row_pieces(matrix: Tensor) -> RowPieces | None:
    """Return the pieces of a CSR tensor on a GPU that programs can be made for, None elsewhere."""
    if matrix.device.type != "cuda" or not has_programs(matrix.device):
        return None
    return RowPieces.of(matrix.crow_indices())


@functools.cache
def has_programs(device: torch.device) -> bool:
    """Whether Triton, which comes with Torch for GPUs, can make programs here: it needs a C
    compiler and a folder to write to."""
    if importlib.util.find_spec("triton") is None:
        return False
    from dustmap.linalg import _row_program

    try:
        _row_program.probe(device)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        log.warning(
            "Triton cannot compile for %s (%s): products of rows and their covariances take "
            "operations of Torch, many times as long; install a C compiler, or set CC",
            device,
            " ".join(str(error).split())[:200],
        )
        return False
    return True
