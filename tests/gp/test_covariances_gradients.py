"""Gradients of all covariances with respect to the kernel's parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.gp.covariances import (
    AbstractEstimator,
    ClosedForm,
    MonteCarlo,
    Quadrature,
    Wrapping,
    plain_lags,
    wrapped_lags,
)
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
)
from tests.contracts.functionals import uniform
from tests.gp.parameters import check_one_direction, traced, with_values
from tests.gp.test_covariances import Make, grid, mixed, rays

#: Of few points a ray: their gradients need not be accurate integrals.
ESTIMATORS: list[AbstractEstimator] = [ClosedForm(), Quadrature(2), MonteCarlo(2, 0)]


def check_gradients(
    kernel: AbstractKernel,
    outputs: Callable[[AbstractKernel], tuple[Tensor, ...]],
    every: bool = True,
) -> None:
    """Compare random projections of a kernel's outputs with finite differences.

    every: in every number of every parameter, and with outputs of which no gradient is asked; else
    in one direction of each parameter, which takes a third of the time.
    """

    def of_parameters(*values: Tensor) -> tuple[Tensor, ...]:
        found = outputs(with_values(kernel, values))
        return tuple((uniform(*x.shape, seed=i) * x).sum() for i, x in enumerate(found))

    if every:
        assert torch.autograd.gradcheck(of_parameters, traced(kernel)[1], atol=1e-6, rtol=1e-5)
    else:
        check_one_direction(of_parameters, traced(kernel)[1], atol=1e-6, rtol=1e-5)


#: Every two of estimator, dimension and torus together.
PAIRS = [
    pytest.param(
        estimator, 1.8 if (i + dim) % 2 else None, dim, id=f"{type(estimator).__name__}-{dim}"
    )
    for i, estimator in enumerate(ESTIMATORS)
    for dim in (1, 2, 3)
]


@pytest.mark.parametrize(("estimator", "period", "dim"), PAIRS)
def test_gradcheck_of_kernel_parameters(
    estimator: AbstractEstimator, period: float | None, dim: int
) -> None:
    kernel = Matern52([0.2 + 0.1 * d for d in range(dim)], 1.3) + Matern32(0.25, 0.5, dim)
    data, other = mixed(dim, 2), mixed(dim, 1, seed=5)
    torus = None if period is None else Wrapping((period,) * dim, 1e-2)

    def covariances(kernel: AbstractKernel) -> tuple[Tensor, ...]:
        return (
            estimator.cross(kernel, data, grid(dim), torus),
            estimator.variance(kernel, data, torus),
            estimator.between(kernel, data, other, torus),
            estimator.between(kernel, data.parts[2], data.parts[2], torus),
        )

    check_gradients(kernel, covariances, every=dim == 1 and isinstance(estimator, ClosedForm))


@pytest.mark.parametrize("make", [Matern12, SquaredExponential])
def test_gradcheck_of_other_kernels_on_rays(make: Make) -> None:
    kernel = make([0.3, 0.5], 1.3)
    data = rays(3, 2)

    def covariances(kernel: AbstractKernel) -> tuple[Tensor, ...]:
        return (
            ClosedForm().cross(kernel, data, grid(2)),
            ClosedForm().variance(kernel, data),
            ClosedForm().between(kernel, data, data),
        )

    check_gradients(kernel, covariances)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gradcheck_of_lags(dim: int) -> None:
    kernel = Matern32([0.2 + 0.1 * d for d in range(dim)], 1.3)
    spacing, shape = (0.2, 0.25, 0.3)[:dim], (6, 5, 4)[:dim]

    def lags(kernel: AbstractKernel) -> tuple[Tensor, ...]:
        return plain_lags(kernel, spacing, shape), wrapped_lags(kernel, spacing, shape, 1e-3)

    check_gradients(kernel, lags)


@pytest.mark.parametrize("nu", [0.2, 1.0 / 3.0, 0.45, 0.8])
def test_variances_of_rays_have_gradients_for_rough_kernels(nu: float) -> None:
    kernel, f = Matern(nu, 0.7, 1.3, dim=2), rays(4, 2)

    def outputs(kernel: AbstractKernel) -> tuple[Tensor, ...]:
        estimator = ClosedForm()
        return estimator.variance(kernel, f), estimator.between(kernel, f, f)

    check_gradients(kernel, outputs, every=False)
