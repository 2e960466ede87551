"""Every operator of linalg: products, adjoints, types, gradients, refusals."""

from collections.abc import Callable

import pytest

from tests.contracts.operators import OPERATOR_CASES, OPERATOR_CHECKS, OperatorCase


@pytest.mark.parametrize("check", OPERATOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", OPERATOR_CASES, ids=lambda case: case.name)
def test_contract(case: OperatorCase, check: Callable[[OperatorCase], None]) -> None:
    check(case)
