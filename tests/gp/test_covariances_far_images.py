"""Distant images by Chebyshev polynomials: the same numbers as their direct sum."""

from collections.abc import Callable

import pytest
import torch

from dustmap.gp import RegularGrid
from dustmap.gp.covariances import ClosedForm, Wrapping
from dustmap.gp.covariances._estimators import FarImages, far_images
from dustmap.gp.covariances._measures import measure_cross
from dustmap.gp.covariances._wrapping import (
    Interval,
    Nodes,
    WrappedKernel,
    analysis,
    chebyshev,
    chebyshev_slope,
)
from dustmap.gp.functionals import Derivatives, LineIntegrals, PointMeasure, PointValues
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
    StationaryKernel,
)
from tests.contracts.functionals import uniform
from tests.gp.parameters import traced

Make = Callable[..., StationaryKernel]
CPU = torch.device("cpu")
SHAPES = {1: (4000,), 2: (40, 30), 3: (12, 10, 8)}
ROWS = {1: 4000, 2: 1500, 3: 3000}


def grid(dim: int) -> RegularGrid:
    return RegularGrid.from_bounds((-0.2,) * dim, (0.8,) * dim, SHAPES[dim])


def torus(dim: int, scale: float) -> Wrapping:
    """Box of one plus four length scales of padding."""
    return Wrapping((1 + 4 * scale,) * dim)


def values(dim: int) -> PointMeasure:
    x = uniform(ROWS[dim], dim) - 0.2
    return PointMeasure(x[:, None], torch.ones_like(x[:, :1]))


def field(kernel: AbstractKernel, measure: PointMeasure, wrapping: Wrapping) -> FarImages:
    wrapped = WrappedKernel.of(kernel, wrapping)
    found = far_images(wrapped, measure, Nodes.of_axes(grid(measure.dim).axes(CPU)))
    assert found is not None
    return found


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", [Matern12, Matern32, Matern52])
def test_polynomials_are_the_sum_of_the_images(make: Make, dim: int) -> None:
    kernel, wrapping = make([0.3, 0.25, 0.35][:dim], 1.3), torus(dim, 0.3)
    measure, nodes = values(dim), Nodes.of_axes(grid(dim).axes(CPU))
    found = field(kernel, measure, wrapping)
    some = measure[torch.arange(0, len(measure), 97)]
    approximate = found.cross(some, nodes).flatten(1).detach()
    wrapped = WrappedKernel.of(kernel, wrapping)
    every = measure_cross(wrapped, some, nodes, torch.float64)
    others = measure_cross(wrapped.without(found.shifts), some, nodes, torch.float64)
    assert (every - others).abs().max() > 1e-3
    torch.testing.assert_close(approximate, (every - others).detach(), rtol=0, atol=1e-6)


def test_the_estimator_uses_them_for_every_kind() -> None:
    """Values, rays and derivatives; a grid and a list of the same points; both dtypes."""
    kernel, wrapping = Matern52(0.3, 1.3, 2), torus(2, 0.3)
    x = uniform(1500, 2) - 0.2
    direction = torch.nn.functional.normalize(uniform(1500, 2, seed=1) + 0.1, dim=-1)
    some = torch.arange(0, 1500, 70)  # so few that direct sums are cheaper
    for functional, tolerance in (
        (PointValues(x), 5e-7),
        (LineIntegrals.from_observer(x), 5e-7),
        (Derivatives(x, direction), 1e-5),
    ):
        direct = ClosedForm().cross(kernel, functional[some], grid(2), wrapping).detach()
        for nodes in (grid(2), grid(2).points()):
            K = ClosedForm().cross(kernel, functional, nodes, wrapping).detach()
            torch.testing.assert_close(K[some], direct, rtol=0, atol=tolerance)
        single = ClosedForm().cross(kernel, functional, grid(2), wrapping, torch.float32)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single[some].double(), direct, rtol=1e-5, atol=2e-6)


def test_gradients_are_those_of_the_direct_sum() -> None:
    kernel, wrapping = Matern32([0.3, 0.2], 1.3), Wrapping((2.2, 1.8))
    measure, nodes = values(2), Nodes.of_axes(grid(2).axes(CPU))
    kernel, parameters = traced(kernel)
    wrapped = WrappedKernel.of(kernel, wrapping)
    found = field(kernel, measure, wrapping)
    some = measure[:30]
    weights = uniform(30, nodes.size, seed=3)
    far = (weights * found.cross(some, nodes).flatten(1)).sum()
    every = measure_cross(wrapped, some, nodes, torch.float64)
    others = measure_cross(wrapped.without(found.shifts), some, nodes, torch.float64)
    direct = (weights * (every - others)).sum()
    for a, b in zip(
        torch.autograd.grad(far, parameters), torch.autograd.grad(direct, parameters), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_images_that_touch_the_data_are_summed_directly() -> None:
    """The nodes of the whole torus: images across the upper faces are neighbours of the data."""
    kernel, wrapping = Matern32(0.25, 1.0, 2), Wrapping((2.0, 2.0))
    nodes = RegularGrid((-0.2, -0.2), (0.05, 0.05), (40, 40))
    measure = values(2)
    found = far_images(WrappedKernel.of(kernel, wrapping), measure, Nodes.of_axes(nodes.axes(CPU)))
    assert found is not None
    near = {(2.0, 0.0), (0.0, 2.0), (2.0, 2.0), (0.0, 0.0)}
    assert not found.shifts & near
    x = PointValues(measure.points[:, 0])
    K = ClosedForm().cross(kernel, x, nodes, wrapping).detach()
    some = torch.arange(0, len(measure), 101)
    direct = ClosedForm().cross(kernel, x[some], nodes, wrapping).detach()
    torch.testing.assert_close(K[some], direct, rtol=0, atol=5e-7)


def test_long_boxes_and_small_batches_are_summed_directly() -> None:
    kernel = Matern32(0.01, 1.0, 2)
    wrapped = WrappedKernel.of(kernel, torus(2, 0.01))
    nodes = Nodes.of_axes(grid(2).axes(CPU))
    assert far_images(wrapped, values(2), nodes) is None
    near = WrappedKernel.of(Matern32(0.3, 1.0, 2), torus(2, 0.3))
    assert far_images(near, values(2)[:3], nodes) is None


@pytest.mark.parametrize("count", [1, 2, 9])
def test_chebyshev_analysis_inverts_evaluation(count: int) -> None:
    interval = Interval(-0.5, 2.0)
    coefficients = uniform(count)
    at_nodes = chebyshev(interval.local(interval.points(count, CPU)), count) @ coefficients
    torch.testing.assert_close(analysis(count, CPU) @ at_nodes, coefficients)


def test_chebyshev_slopes_are_derivatives() -> None:
    t = (2 * uniform(7) - 1).requires_grad_()
    for a in range(6):
        (slope,) = torch.autograd.grad(chebyshev(t, 6)[:, a].sum(), t, retain_graph=True)
        torch.testing.assert_close(chebyshev_slope(t, 6)[:, a], slope)


def test_a_smooth_kernel_needs_more_than_the_estimate() -> None:
    """The squared exponential has no singularity to size the polynomials by: the check at random
    pairs does."""
    kernel, wrapping = SquaredExponential(0.4, 1.0, 2), torus(2, 0.4)
    measure, nodes = values(2), Nodes.of_axes(grid(2).axes(CPU))
    found = field(kernel, measure, wrapping)
    wrapped = WrappedKernel.of(kernel, wrapping)
    some = measure[:50]
    every = measure_cross(wrapped, some, nodes, torch.float64)
    others = measure_cross(wrapped.without(found.shifts), some, nodes, torch.float64)
    approximate = found.cross(some, nodes).flatten(1)
    torch.testing.assert_close(approximate, every - others, rtol=0, atol=3e-7)
