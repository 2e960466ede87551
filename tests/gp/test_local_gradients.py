"""Gradients of local features: through weights, root and residual variance."""

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior
from dustmap.gp.features import LocalFeatures
from dustmap.gp.kernels import AbstractKernel, Matern32
from tests.gp.local_cases import SHAPES, make_features, some_mixed, some_points, unit_grid
from tests.gp.parameters import of_parameters, traced


@pytest.mark.parametrize(("shape", "order"), [((9,), 4), ((4, 4), 4), ((3, 3, 3), 2)])
def test_gradients_of_products(shape: tuple[int, ...], order: int) -> None:
    dim, functional = len(shape), some_mixed(len(shape), 2)
    grid, torus = unit_grid(shape), tuple(m + 5 for m in shape)
    eps = torch.randn(2, _size(torus), dtype=torch.float64, generator=torch.Generator())

    def objective(log_lengthscale: Tensor, log_variance: Tensor, eps: Tensor) -> Tensor:
        def products(kernel: AbstractKernel) -> Tensor:
            prior = GridPrior.padded(kernel, grid, torus_shape=torus)
            return LocalFeatures(prior, order=order).products(functional, eps)

        evaluate = of_parameters(Matern32((1.0,) * dim), products)
        result: Tensor = evaluate(log_lengthscale, log_variance)
        return result

    scales = torch.linspace(-1.8, -1.5, dim, dtype=torch.float64, requires_grad=True)
    variance = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    eps.requires_grad_()
    assert torch.autograd.gradcheck(
        objective, (scales, variance, eps), atol=1e-5, rtol=1e-4, fast_mode=True
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_products_against_dense_autograd(shape: tuple[int, ...]) -> None:
    (features, leaves), functional = traced(make_features(shape, 2)), some_mixed(len(shape))
    eps = torch.randn(3, features.n_features, dtype=torch.float64, generator=torch.Generator())
    eps.requires_grad_()
    inputs = [eps, *leaves]
    dense = eps @ features.rows(functional).phi.mT
    expected = torch.autograd.grad(dense.square().sum(), inputs, retain_graph=True)
    products = features.products(functional, eps)
    actual = torch.autograd.grad(products.square().sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


def test_frozen_weights_lose_much_of_the_gradient() -> None:
    """∂ trace(Φ Φᵀ) / ∂ log ℓ at ℓ = h/2 needs the derivative of the weights."""
    kernel, (parameter, _) = traced(Matern32(1.0 / 12, dim=2))
    prior = GridPrior.padded(kernel, unit_grid((7, 7)), padding=3.0)
    features, points = LocalFeatures(prior, order=2), some_points(2, 40)
    eps = torch.eye(features.n_features, dtype=torch.float64)
    whole = features.products(points, eps).square().sum()
    u = prior.torus_root(0.5).matmul(eps)
    frozen = features.weights(points).matmul(u).square().sum()
    torch.testing.assert_close(whole, frozen)
    (full,) = torch.autograd.grad(whole, parameter, retain_graph=True)
    (partial,) = torch.autograd.grad(frozen, parameter)
    assert float((full - partial).abs()) > 0.2 * float(full.abs())
