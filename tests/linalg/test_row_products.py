"""Products of compressed rows in pieces, as a GPU's programs make them, against dense ones."""

import sys
import types

import pytest
import torch
from torch import Tensor

from dustmap.linalg import SparseOperator, _row_products, has_programs
from dustmap.linalg._row_products import RowPieces


def add_rows(
    out: Tensor, table: Tensor, x: Tensor, entries: tuple[Tensor, Tensor] | None = None
) -> None:
    """What the program promises, one piece after the other."""
    for slot, first, last in table.tolist():
        cols, values = entries or (torch.arange(len(x)), x.new_ones(len(x)))
        part = slice(first, last)
        out[slot] = values[part] @ x[cols[part].long()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vectors", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize("longest", [1, 7, 40, 1000])
def test_a_product_of_pieces_is_that_of_the_rows(
    vectors: int, longest: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without entries, with one, with all, and with as many as a piece takes."""
    program = types.SimpleNamespace(add_rows=add_rows)
    monkeypatch.setitem(sys.modules, "dustmap.linalg._row_program", program)
    generator = torch.Generator().manual_seed(0)
    A = torch.rand(30, 50, generator=generator, dtype=dtype)
    A *= torch.rand(30, 50, generator=generator) < 0.3
    A[3], A[4], A[4, 7], A[5], A[6, :7], A[6, 7:], A[29] = 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 4.0
    row, col = A.nonzero(as_tuple=True)
    matrix = SparseOperator.from_coo(row, col, A[row, col], (30, 50)).matrix
    pieces = RowPieces.of(matrix.crow_indices(), longest)
    x = torch.randn(vectors, 50, generator=generator, dtype=dtype)
    counts = (A != 0).sum(1)
    assert len(pieces.table) == int((-(-counts // longest)).sum())
    assert (pieces.table[:, 2] - pieces.table[:, 1]).max() <= longest
    assert len(pieces.rows) == int((counts > longest).sum())
    tight = 50 * torch.finfo(dtype).eps
    found = pieces.product(matrix, x.mT)
    torch.testing.assert_close(found, A @ x.mT, rtol=tight, atol=tight)


def test_a_gpu_without_a_compiler_is_said_once_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on the nodes of many clusters."""

    def probe(device: torch.device) -> None:
        raise RuntimeError(f"Failed to find C compiler\nfor {device}")

    name = "dustmap.linalg._row_program"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(probe=probe))
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: object())
    _row_products.has_programs.cache_clear()
    for _ in range(2):
        assert not has_programs(torch.device("cuda"))
    _row_products.has_programs.cache_clear()
    (said,) = caplog.messages
    assert "Failed to find C compiler for cuda): products of rows" in said
    assert "set CC" in said
