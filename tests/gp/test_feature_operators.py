"""The operators behind Φ pass the contract of all operators."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.gp.features import CrossCovariance, InverseOperator, ProductOperator
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference import PrecisionOperator
from dustmap.linalg import DenseOperator, DiagonalOperator, UnconvergedWarning
from tests.contracts import operators as contracts
from tests.contracts.operators import OperatorCase

CHECKS = (
    contracts.check_matmul_vector,
    contracts.check_matmul_batch,
    contracts.check_empty_batch,
    contracts.check_matmul_noncontiguous,
    contracts.check_argument_untouched,
    contracts.check_rmatmul,
    contracts.check_transpose,
    contracts.check_to_dense,
    contracts.check_adjoint_identity,
    contracts.check_dtype_and_device,
    contracts.check_float32_close_to_float64,
    contracts.check_wrong_length,
)


def _matrix(m: int, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, dtype=torch.float64, generator=generator)


def _product() -> OperatorCase:
    a, b = _matrix(4, 6, 0), _matrix(6, 5, 1)
    return OperatorCase(
        "product",
        lambda dtype: ProductOperator(DenseOperator(a.to(dtype)), DenseOperator(b.to(dtype))),
        a @ b,
    )


def _mixed_product() -> OperatorCase:
    a, b = _matrix(4, 6, 0), _matrix(6, 5, 1)
    return OperatorCase(
        "product through float64",
        lambda dtype: ProductOperator(DenseOperator(a.to(dtype)), DenseOperator(b)),
        a @ b,
    )


def _cross(name: str, budget: int) -> OperatorCase:
    table = _matrix(9, 4, 2)

    def build(dtype: torch.dtype) -> CrossCovariance:
        def rows(functional: AbstractFunctional) -> Tensor:
            assert isinstance(functional, PointValues)
            return table[functional.x.squeeze(-1).long()].to(dtype)

        index = PointValues(torch.arange(9, dtype=torch.float64)[:, None])
        return CrossCovariance(rows, index, 4, torch.empty(0, dtype=dtype), budget)

    return OperatorCase(name, build, table)


def _precision() -> OperatorCase:
    phi, weights = _matrix(5, 7, 3), torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    return OperatorCase(
        "precision",
        lambda dtype: PrecisionOperator(DenseOperator(phi.to(dtype)), weights),
        torch.eye(7, dtype=torch.float64) + phi.mT @ (weights[:, None] * phi),
    )


CASES = [
    _product(),
    _mixed_product(),
    _cross("stored", 2**20),
    _cross("streamed", 260),
    _precision(),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: OperatorCase, check: Callable[[OperatorCase], None]) -> None:
    check(case)


def test_products_need_matching_shapes() -> None:
    a = DenseOperator(_matrix(4, 6, 0))
    with pytest.raises(ValueError, match=r"cannot multiply operators of shapes \(4, 6\), \(4, 6\)"):
        ProductOperator(a, a)


def test_the_inverse_solves_and_says_when_it_did_not() -> None:
    root = _matrix(6, 6, 4)
    A = root @ root.mT + torch.eye(6, dtype=torch.float64)
    identity = DiagonalOperator(torch.ones(6, dtype=torch.float64))
    inverse = InverseOperator(DenseOperator(A), identity, 1e-12, 100)
    x = _matrix(3, 6, 5)
    torch.testing.assert_close(inverse.matmul(x), torch.linalg.solve(A, x.mT).mT)
    torch.testing.assert_close(inverse.rmatmul(x), inverse.matmul(x))
    short = InverseOperator(DenseOperator(A), identity, 1e-12, 1)
    with pytest.warns(UnconvergedWarning, match=r"product with the inverse of K_uu: .*1 steps"):
        short.matmul(x)
