"""What every operator must satisfy: one list of cases times one list of checks.

An operator joins by adding a case to `OPERATOR_CASES` (or, with its own list of cases, by
parametrising over `OPERATOR_CHECKS` in its own test file).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from dustmap.linalg import (
    AbstractOperator,
    CirculantOperator,
    DenseOperator,
    DiagonalOperator,
    EnteredOperator,
    HartleyOperator,
    SparseGram,
    SparseOperator,
    ToeplitzOperator,
    entered_columns,
)
from tests.references import (
    circulant_matrix,
    half_spectrum,
    leading_block,
    symmetric_column,
    toeplitz_matrix,
)

Build = Callable[[torch.dtype], AbstractOperator]


@dataclass(frozen=True, eq=False)
class OperatorCase:
    """An operator and the matrix (m, n) that it stands for, in float64.

    parameters: what the operator is differentiable in; build_from(parameters) makes it.
    """

    name: str
    build: Build
    dense: Tensor
    parameters: Tensor | None = None
    build_from: Callable[[Tensor], AbstractOperator] | None = None


def _vectors(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def check_matmul_vector(case: OperatorCase) -> None:
    x = _vectors(case.dense.shape[1])
    torch.testing.assert_close(
        case.build(torch.float64).matmul(x), case.dense @ x, rtol=1e-12, atol=1e-12
    )


def check_matmul_batch(case: OperatorCase) -> None:
    x = _vectors(2, 3, case.dense.shape[1])
    product = case.build(torch.float64).matmul(x)
    torch.testing.assert_close(product, x @ case.dense.mT, rtol=1e-12, atol=1e-12)


def check_empty_batch(case: OperatorCase) -> None:
    m, n = case.dense.shape
    assert case.build(torch.float64).matmul(_vectors(0, n)).shape == (0, m)


def check_matmul_noncontiguous(case: OperatorCase) -> None:
    x = _vectors(case.dense.shape[1], 3).mT
    product = case.build(torch.float64).matmul(x)
    torch.testing.assert_close(product, x @ case.dense.mT, rtol=1e-12, atol=1e-12)


def check_argument_untouched(case: OperatorCase) -> None:
    x, y = _vectors(2, case.dense.shape[1]), _vectors(2, case.dense.shape[0])
    operator = case.build(torch.float64)
    operator.matmul(x)
    operator.rmatmul(y)
    assert torch.equal(x, _vectors(2, case.dense.shape[1]))
    assert torch.equal(y, _vectors(2, case.dense.shape[0]))


def check_rmatmul(case: OperatorCase) -> None:
    y = _vectors(2, case.dense.shape[0])
    product = case.build(torch.float64).rmatmul(y)
    torch.testing.assert_close(product, y @ case.dense, rtol=1e-12, atol=1e-12)


def check_transpose(case: OperatorCase) -> None:
    operator = case.build(torch.float64)
    transposed = operator.transpose()
    y, x = _vectors(2, case.dense.shape[0]), _vectors(2, case.dense.shape[1])
    assert transposed.shape == (case.dense.shape[1], case.dense.shape[0])
    assert torch.equal(transposed.matmul(y), operator.rmatmul(y))
    assert torch.equal(transposed.rmatmul(x), operator.matmul(x))


def check_to_dense(case: OperatorCase) -> None:
    operator = case.build(torch.float64)
    assert operator.shape == tuple(case.dense.shape)
    torch.testing.assert_close(operator.to_dense(), case.dense, rtol=1e-12, atol=1e-12)


def check_adjoint_identity(case: OperatorCase) -> None:
    operator = case.build(torch.float64)
    x, y = _vectors(case.dense.shape[1]), _vectors(case.dense.shape[0], seed=1)
    forward, backward = y @ operator.matmul(x), x @ operator.rmatmul(y)
    scale = float(x.norm() * y.norm() * case.dense.norm()) + 1.0
    assert abs(float(forward - backward)) < 1e-13 * scale


def check_dtype_and_device(case: OperatorCase) -> None:
    for dtype in (torch.float32, torch.float64):
        operator = case.build(dtype)
        x, y = _vectors(case.dense.shape[1]).to(dtype), _vectors(case.dense.shape[0]).to(dtype)
        assert operator.dtype == dtype
        for product in (operator.matmul(x), operator.rmatmul(y)):
            assert product.dtype == dtype
            assert product.device == operator.device == x.device


def check_float32_close_to_float64(case: OperatorCase) -> None:
    x = _vectors(3, case.dense.shape[1])
    product = case.build(torch.float32).matmul(x.float()).double()
    exact = x @ case.dense.mT
    assert float((product - exact).norm()) <= 1e-5 * float(case.dense.norm() * x.norm())


def check_wrong_length(case: OperatorCase) -> None:
    operator = case.build(torch.float64)
    m, n = operator.shape
    with pytest.raises(ValueError, match=f"length {n}"):
        operator.matmul(_vectors(n + 1))
    with pytest.raises(ValueError, match=f"length {m}"):
        operator.rmatmul(_vectors(m + 1))
    with pytest.raises(ValueError, match=f"length {n}"):
        operator.matmul(torch.tensor(1.0, dtype=torch.float64))


def check_integers_refused(case: OperatorCase) -> None:
    with pytest.raises(ValueError, match=r"expected .*float.* got torch.int64"):
        case.build(torch.float64).matmul(torch.ones(case.dense.shape[1], dtype=torch.int64))


def check_gradient_in_vector(case: OperatorCase) -> None:
    operator = case.build(torch.float64)
    x = _vectors(2, case.dense.shape[1]).requires_grad_()
    y = _vectors(2, case.dense.shape[0]).requires_grad_()
    assert torch.autograd.gradcheck(operator.matmul, (x,))
    assert torch.autograd.gradcheck(operator.rmatmul, (y,))
    assert torch.autograd.gradgradcheck(operator.matmul, (x,))


def check_gradient_in_parameters(case: OperatorCase) -> None:
    if case.parameters is None or case.build_from is None:
        return
    build = case.build_from
    x = _vectors(2, case.dense.shape[1]).requires_grad_()
    parameters = case.parameters.clone().requires_grad_()
    y = _vectors(2, case.dense.shape[0]).requires_grad_()
    assert torch.autograd.gradcheck(lambda p, v: build(p).matmul(v), (parameters, x))
    assert torch.autograd.gradcheck(lambda p, v: build(p).rmatmul(v), (parameters, y))
    assert torch.autograd.gradgradcheck(lambda p, v: build(p).matmul(v), (parameters, x))


OPERATOR_CHECKS: tuple[Callable[[OperatorCase], None], ...] = (
    check_matmul_vector,
    check_matmul_batch,
    check_empty_batch,
    check_matmul_noncontiguous,
    check_argument_untouched,
    check_rmatmul,
    check_transpose,
    check_to_dense,
    check_adjoint_identity,
    check_dtype_and_device,
    check_float32_close_to_float64,
    check_wrong_length,
    check_integers_refused,
    check_gradient_in_vector,
    check_gradient_in_parameters,
)


def dense_case() -> OperatorCase:
    matrix = _vectors(4, 6)
    return OperatorCase(
        "dense", lambda dtype: DenseOperator(matrix.to(dtype)), matrix, matrix, DenseOperator
    )


def diagonal_case() -> OperatorCase:
    diagonal = _vectors(5)
    return OperatorCase(
        "diagonal",
        lambda dtype: DiagonalOperator(diagonal.to(dtype)),
        torch.diag(diagonal),
        diagonal,
        DiagonalOperator,
    )


def sparse_case() -> OperatorCase:
    """Unsorted entries, one place named twice, an empty row and an empty column."""
    rows, cols = torch.tensor([3, 0, 2, 0, 3]), torch.tensor([1, 4, 0, 4, 5])
    values = _vectors(5)
    dense = torch.zeros(4, 7, dtype=torch.float64)
    for row, col, value in zip(rows, cols, values, strict=True):
        dense[row, col] += value
    return OperatorCase(
        "sparse",
        lambda dtype: SparseOperator.from_coo(rows, cols, values.to(dtype), (4, 7)),
        dense,
    )


def entered_case() -> OperatorCase:
    """The columns with entries of the same."""
    case = sparse_case()

    def make(dtype: torch.dtype) -> EnteredOperator:
        rows = case.build(dtype)
        assert isinstance(rows, SparseOperator)
        return EnteredOperator.of(rows)

    return OperatorCase("entered", make, case.dense)


def sparse_gram_case() -> OperatorCase:
    """Weighted rows that leave a column empty."""
    L, weights = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]).double(), torch.tensor([1.0, 0.5])
    row, col = L.nonzero(as_tuple=True)

    def make(dtype: torch.dtype) -> SparseGram:
        rows = SparseOperator.from_coo(row, col, L[row, col].to(dtype), (2, 3))
        return SparseGram.of(rows, weights, entered_columns(rows))

    return OperatorCase("sparse gram", make, torch.tensor([[5.5, 2.0], [2.0, 4.0]]).double())


def circulant_case(
    torus: tuple[int, ...],
    rows: tuple[int, ...] | None = None,
    columns: tuple[int, ...] | None = None,
) -> OperatorCase:
    column = symmetric_column(torus, np.random.default_rng(0))
    spectrum = torch.from_numpy(half_spectrum(column))
    block = leading_block(circulant_matrix(column), torus, rows or torus, columns or torus)
    return OperatorCase(
        f"circulant{torus}{rows or ''}{columns or ''}",
        lambda dtype: CirculantOperator(spectrum.to(dtype), torus, rows, columns),
        torch.from_numpy(block),
        spectrum,
        lambda s: CirculantOperator(s, torus, rows, columns),
    )


def hartley_case(torus: tuple[int, ...], box: tuple[int, ...]) -> OperatorCase:
    """A column that is symmetric in every axis."""
    column = np.random.default_rng(2).standard_normal(torus)
    for axis, length in enumerate(torus):
        column = column + column.take(-np.arange(length) % length, axis)
    spectrum = torch.from_numpy(half_spectrum(column))
    block = leading_block(circulant_matrix(column), torus, box, box)
    return OperatorCase(
        f"hartley{torus}{box}",
        lambda dtype: HartleyOperator.of(spectrum, torus, box, dtype),
        torch.from_numpy(block),
    )


def toeplitz_case(shape: tuple[int, ...]) -> OperatorCase:
    """Random lags: nothing about this matrix or its embedding is positive."""
    lags = np.random.default_rng(1).standard_normal(shape)
    tensor = torch.from_numpy(lags)
    return OperatorCase(
        f"toeplitz{shape}",
        lambda dtype: ToeplitzOperator(tensor, dtype),
        torch.from_numpy(toeplitz_matrix(lags)),
        tensor,
        ToeplitzOperator,
    )


def transposed_case() -> OperatorCase:
    matrix = _vectors(4, 6)
    return OperatorCase(
        "transposed", lambda dtype: DenseOperator(matrix.to(dtype)).transpose(), matrix.mT
    )


OPERATOR_CASES: tuple[OperatorCase, ...] = (
    dense_case(),
    transposed_case(),
    diagonal_case(),
    sparse_case(),
    entered_case(),
    sparse_gram_case(),
    circulant_case((8,)),
    circulant_case((7,), rows=(4,), columns=(5,)),
    circulant_case((4, 6), rows=(3, 2)),
    circulant_case((5, 6), rows=(3, 4), columns=(4, 5)),
    circulant_case((4, 3, 6), rows=(2, 2, 4), columns=(3, 3, 3)),
    hartley_case((7,), (4,)),
    hartley_case((5, 6), (3, 6)),
    hartley_case((4, 3, 6), (2, 1, 5)),
    hartley_case((8, 5, 4), (3, 4, 2)),
    toeplitz_case((1,)),
    toeplitz_case((9,)),
    toeplitz_case((4, 5)),
    toeplitz_case((3, 1, 4)),
    toeplitz_case((3, 4, 2)),
)
