from collections.abc import Callable

import pytest
import torch

from dustmap.linalg import DenseOperator, DiagonalOperator, SparseOperator
from tests.contracts import OPERATOR_CASES, OPERATOR_CHECKS, OperatorCase


@pytest.mark.parametrize("check", OPERATOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", OPERATOR_CASES, ids=lambda case: case.name)
def test_contract(case: OperatorCase, check: Callable[[OperatorCase], None]) -> None:
    check(case)


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


def test_mixed_precision_is_an_error_that_names_both() -> None:
    operator = DenseOperator(torch.eye(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x: expected torch.float64 .* got torch.float32"):
        operator.matmul(torch.ones(3))
