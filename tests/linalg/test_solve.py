import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from dustmap.linalg import (
    CirculantOperator,
    SolveStatus,
    ToeplitzOperator,
    UnconvergedWarning,
    toeplitz_solve,
)
from dustmap.linalg._toeplitz import toeplitz_bilinear_derivative
from tests.references import grid_indices, toeplitz_matrix

SHAPES = [(7,), (4, 3), (3, 2, 3)]


def _lags(shape: tuple[int, ...]) -> Tensor:
    distances = [math.dist(point, (0,) * len(shape)) for point in grid_indices(shape)]
    return torch.exp(-0.8 * torch.tensor(distances, dtype=torch.float64)).reshape(shape)


def _right_hand_sides(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _dense(lags: Tensor) -> Tensor:
    """K as a differentiable function of lags, by indexing."""
    points = torch.tensor(grid_indices(tuple(lags.shape)))
    lag = (points[:, None] - points[None]).abs()
    return lags[tuple(lag.unbind(-1))]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradcheck_in_lags_and_right_hand_side(shape: tuple[int, ...]) -> None:
    lags = _lags(shape).requires_grad_()
    b = _right_hand_sides(2, lags.numel()).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda k, right: toeplitz_solve(k, right, rtol=1e-14)[0], (lags, b), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_dense_autograd(shape: tuple[int, ...]) -> None:
    lags, b = _lags(shape).requires_grad_(), _right_hand_sides(5, 2, math.prod(shape))
    b.requires_grad_()
    weights = torch.linspace(-1, 1, b.numel(), dtype=torch.float64).reshape(b.shape)
    x, report = toeplitz_solve(lags, b, rtol=1e-12)
    exact = torch.linalg.solve(_dense(lags), b.reshape(-1, lags.numel()).mT).mT.reshape(b.shape)
    assert report.converged
    torch.testing.assert_close(x, exact, rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad((weights * x.sin()).sum(), (lags, b))
    expected = torch.autograd.grad((weights * exact.sin()).sum(), (lags, b))
    torch.testing.assert_close(gradients, expected, rtol=1e-8, atol=1e-8)


def test_the_references_agree_on_the_matrix() -> None:
    lags = _lags((3, 2, 3))
    np.testing.assert_array_equal(_dense(lags).numpy(), toeplitz_matrix(lags.numpy()))


def test_flattened_first_column_would_be_wrong() -> None:
    """The one-dimensional derivative applied to a flattened 2-D column is no approximation."""
    a, b = _right_hand_sides(2, 12).unbind(0)
    right = toeplitz_bilinear_derivative(a, b, (4, 3))
    flattened = toeplitz_bilinear_derivative(a, b, (12,)).reshape(4, 3)
    assert float((right - flattened).norm()) > 0.1 * float(right.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_another_operator_for_the_products_changes_nothing(shape: tuple[int, ...]) -> None:
    """The same matrix through a torus larger than the minimal one."""
    lags, b = _lags(shape).requires_grad_(), _right_hand_sides(2, math.prod(shape))
    torus = tuple(2 * m + 5 for m in shape)
    column = torch.zeros(torus, dtype=torch.float64)
    for point in np.ndindex(torus):
        lag = tuple(min(j, n - j) for j, n in zip(point, torus, strict=True))
        inside = all(ell < m for ell, m in zip(lag, shape, strict=True))
        column[point] = lags.detach()[lag] if inside else 0.0
    other = CirculantOperator(torch.fft.rfftn(column).real, torus, shape, shape)
    by_torus, _ = toeplitz_solve(lags, b, operator=other, rtol=1e-12)
    by_default, _ = toeplitz_solve(lags, b, rtol=1e-12)
    torch.testing.assert_close(by_torus, by_default, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(by_torus.square().sum(), lags),
        torch.autograd.grad(by_default.square().sum(), lags),
        rtol=1e-8,
        atol=1e-8,
    )


def test_chain_rule_reaches_a_hyperparameter() -> None:
    """lags = exp(−θ d): d(bᵀK⁻¹b)/dθ against a central difference."""
    distance = torch.arange(8, dtype=torch.float64)
    b = _right_hand_sides(8)

    def energy(theta: Tensor) -> Tensor:
        return b @ toeplitz_solve(torch.exp(-theta * distance), b, rtol=1e-13)[0]

    theta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(energy(theta), theta)
    h = 1e-5
    difference = (energy(theta.detach() + h) - energy(theta.detach() - h)) / (2 * h)
    torch.testing.assert_close(gradient, difference, rtol=1e-7, atol=1e-7)


def test_float32_right_hand_side_with_float64_lags() -> None:
    lags, b = _lags((6, 5)).requires_grad_(), _right_hand_sides(3, 30).float().requires_grad_()
    x, report = toeplitz_solve(lags, b, rtol=1e-5)
    assert report.converged
    grad_lags, grad_b = torch.autograd.grad(x.sum(), (lags, b))
    assert (x.dtype, grad_b.dtype, grad_lags.dtype) == (torch.float32, torch.float32, torch.float64)
    exact = torch.linalg.solve(_dense(lags), b.detach().double().mT).mT
    (expected,) = torch.autograd.grad(exact.sum(), lags)
    torch.testing.assert_close(grad_lags, expected, rtol=1e-3, atol=1e-3)


def test_forward_reports_and_backward_warns_once_when_unconverged() -> None:
    lags = torch.exp(-torch.arange(100, dtype=torch.float64) / 30).requires_grad_()
    x, report = toeplitz_solve(lags, _right_hand_sides(100), max_steps=2)
    assert report.worst is SolveStatus.MAX_STEPS
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autograd.grad(x.sum(), lags)
    assert [w.category for w in caught] == [UnconvergedWarning]
    message = str(caught[0].message)
    assert "gradient of toeplitz_solve: PCG stopped after 2 steps" in message
    assert "raise max_steps" in message


def test_operator_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"operator: expected shape \(6, 6\) for lags"):
        toeplitz_solve(_lags((6,)), torch.ones(6), operator=ToeplitzOperator(_lags((5,))))
