"""Operators one by one: how they are made, and what they refuse."""

import pytest
import torch

from dustmap.linalg import DenseOperator, DiagonalOperator, SparseOperator


def test_dense_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"matrix must be \(m, n\), got shape \(3,\)"):
        DenseOperator(torch.ones(3))


def test_diagonal_refuses_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"diagonal must be \(n,\), got shape \(3, 3\)"):
        DiagonalOperator(torch.eye(3))


def test_sparse_refuses_a_dense_tensor_and_names_the_constructor() -> None:
    with pytest.raises(ValueError, match=r"SparseOperator\.from_coo"):
        SparseOperator(torch.eye(3))


def test_sparse_refuses_indices_outside_the_matrix() -> None:
    with pytest.raises(ValueError, match=r"cols: expected 0 <= index < 3, got 3"):
        SparseOperator.from_coo(torch.tensor([0]), torch.tensor([3]), torch.ones(1), (3, 3))


def test_sparse_from_csr_keeps_the_matrix() -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    rows, cols = dense.nonzero().unbind(1)
    csr = SparseOperator.from_coo(rows, cols, dense[rows, cols], (2, 3)).matrix
    assert torch.equal(SparseOperator(csr).to_dense(), dense)


def test_sparse_from_compressed_rows() -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 3.0]])
    starts, cols = torch.tensor([0, 1, 1, 3]), torch.tensor([1, 0, 2])
    A = SparseOperator.from_csr(starts, cols, torch.tensor([2.0, 1.0, 3.0]), (3, 3))
    assert torch.equal(A.to_dense(), dense)
    assert torch.equal(A.transpose().to_dense(), dense.mT)
    # Entries and indices of 4 bytes: 3 and 3, and 4 starts, twice.
    assert A.bytes == 2 * 4 * (3 + 3 + 4)


def test_sparse_from_compressed_rows_refuses_what_is_none() -> None:
    starts, cols, values = torch.tensor([0, 2]), torch.tensor([0, 1]), torch.ones(2)
    with pytest.raises(ValueError, match=r"expected starts \(3,\) and as many cols as values"):
        SparseOperator.from_csr(starts, cols, values, (2, 2))
    with pytest.raises(RuntimeError, match="col_indices"):
        SparseOperator.from_csr(starts, cols.flip(0), values, (1, 2))


@pytest.mark.parametrize("is_sorted", [False, True])
def test_sparse_entries_in_any_order_are_added_up(is_sorted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 30, (500,), generator=generator)
    cols = torch.randint(0, 20, (500,), generator=generator)
    values = torch.randn(500, generator=generator, dtype=torch.float64)
    dense = torch.zeros(30, 20, dtype=torch.float64)
    dense.index_put_((rows, cols), values, accumulate=True)
    if is_sorted:
        rows, cols = dense.nonzero().unbind(1)
        values = dense[rows, cols]
    A = SparseOperator.from_coo(rows, cols, values, (30, 20))
    torch.testing.assert_close(A.to_dense(), dense)
    torch.testing.assert_close(A.transposed.to_dense(), dense.mT)


@pytest.mark.parametrize("shape", [(4000, 300), (300, 4000), (1, 5), (5, 1)])
def test_sparse_transpose_by_groups_of_rows(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty rows and columns, and rows longer than a group."""
    monkeypatch.setattr("dustmap.linalg._sparse._SORTED", 50)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(shape, generator=generator)
    dense[torch.rand(shape, generator=generator) < 0.9] = 0.0
    dense[0] = 1.0
    dense[shape[0] // 2 :: 2] = 0.0
    rows, cols = dense.nonzero().unbind(1)
    A = SparseOperator.from_coo(rows, cols, dense[rows, cols], shape)
    assert torch.equal(A.transposed.to_dense(), dense.mT)
    # In order, as compressed rows must be.
    torch.sparse_csr_tensor(
        A.transposed.crow_indices(),
        A.transposed.col_indices(),
        A.transposed.values(),
        check_invariants=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 17, 20, 21, 40, 53])
def test_sparse_products_with_many_vectors(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(30, 20, generator=generator, dtype=torch.float64)
    dense[torch.rand(30, 20, generator=generator) < 0.5] = 0.0
    dense[7] = dense[:, 3] = 0.0
    rows, cols = dense.nonzero().unbind(1)
    A = SparseOperator.from_coo(rows, cols, dense[rows, cols].to(dtype), (30, 20))
    x = torch.randn(2, count, 20, generator=generator, dtype=torch.float64)
    y = torch.randn(2, count, 30, generator=generator, dtype=torch.float64)
    found, transposed = A.matmul(x.to(dtype)), A.rmatmul(y.to(dtype))
    accuracy = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double(), x @ dense.mT, rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(transposed.double(), y @ dense, rtol=accuracy, atol=accuracy)


def test_empty_sparse_operator() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    A = SparseOperator.from_coo(none, none, torch.zeros(0), (3, 4))
    assert torch.equal(A.to_dense(), torch.zeros(3, 4))
    assert torch.equal(A.rmatmul(torch.ones(2, 3)), torch.zeros(2, 4))


def test_mixed_precision_is_an_error_that_names_both() -> None:
    operator = DenseOperator(torch.eye(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x: expected torch.float64 .* got torch.float32"):
        operator.matmul(torch.ones(3))
