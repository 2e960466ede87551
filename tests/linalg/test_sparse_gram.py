"""Gram matrices of sparse rows against dense ones."""

import pytest
import torch
from torch import Tensor

from dustmap.linalg import SparseGram, SparseOperator, _sparse
from dustmap.linalg import entered_columns as entered
from dustmap.linalg import estimated_entries as estimated


def rows_of(dtype: torch.dtype) -> tuple[Tensor, SparseOperator]:
    """50 positive rows of some of 30 columns, two of which nobody has."""
    generator = torch.Generator().manual_seed(0)
    A = torch.rand(50, 30, generator=generator, dtype=torch.float64)
    A *= torch.rand(50, 30, generator=generator) < 0.1
    A[:, [3, 29]] = 0.0
    row, col = A.nonzero(as_tuple=True)
    return A, SparseOperator.from_coo(row, col, A[row, col].to(dtype), (50, 30))


@pytest.mark.parametrize(("together", "band"), [(7, 64), (64, 64), (7, 3), (64, 27)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gram_matrix_is_that_of_the_weighted_rows(
    dtype: torch.dtype, together: int, band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sparse, "_ROWS", together)
    monkeypatch.setattr(_sparse, "_BAND", band)
    A, L = rows_of(dtype)
    w = torch.linspace(0.0, 2.0, 50, dtype=torch.float64)
    columns = entered(L)
    assert set(columns.tolist()) == set(A.any(0).nonzero().squeeze(1).tolist())
    expected = ((A.mT * w) @ A)[columns][:, columns]
    G, tight = SparseGram.of(L, w.to(dtype), columns), 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(G.to_dense().double(), expected, rtol=tight, atol=tight)
    torch.testing.assert_close(G.diagonal().double(), expected.diagonal(), rtol=tight, atol=tight)
    x = torch.randn(2, 3, len(columns), generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.testing.assert_close(
        G.matmul(x).double(), x.double() @ expected, rtol=10 * tight, atol=10 * tight
    )
    assert (G.dtype, len(G.matrix.values())) == (dtype, int((A.mT @ A != 0).sum()))


def test_entries_of_few_columns_are_counted_and_of_many_estimated() -> None:
    A, L = rows_of(torch.float64)
    exact = int((A.mT @ A != 0).sum())
    assert estimated(L, entered(L)) == exact
    row = torch.arange(400)
    band = torch.stack([row, (row + 1) % 400], 1).flatten()
    L = SparseOperator.from_coo(row.repeat_interleave(2), band, torch.ones(800), (400, 400))
    assert estimated(L, entered(L)) == 3 * 400
