"""The variance of the wrapped kernel at a node, whatever the length scale, against k(0)."""

import math

import pytest
import torch

from dustmap.errors import UserError
from dustmap.gp import GridPrior, RegularGrid, torus_for, wrap_inflation
from dustmap.gp.kernels import Matern12, Matern32, Matern52, SquaredExponential, StationaryKernel

KERNELS = [Matern12, Matern32, Matern52, SquaredExponential]
SHAPES = {1: (9,), 2: (6, 7), 3: (4, 5, 4)}


def make_grid(dim: int) -> RegularGrid:
    return RegularGrid((0.0,) * dim, (0.25, 0.3, 0.2)[:dim], SHAPES[dim])


def images_over_variance(
    kernel: StationaryKernel, grid: RegularGrid, torus: tuple[int, ...]
) -> float:
    """Σ_{j≠0} k(jL) / k(0) by brute force."""
    count = {1: 60, 2: 20, 3: 10}[grid.dim]
    j = torch.cartesian_prod(*(torch.arange(-count, count + 1),) * grid.dim).reshape(-1, grid.dim)
    periods = torch.tensor([n * h for n, h in zip(torus, grid.spacing, strict=True)])
    values = kernel(j.double() * periods.double()).detach()
    return float(values.sum() / kernel.variance().detach()) - 1.0


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", KERNELS)
@pytest.mark.parametrize("boxes", [0.3, 1.0, 2.5])
def test_the_variance_at_a_node_is_that_of_the_kernel(make: type, dim: int, boxes: float) -> None:
    grid = make_grid(dim)
    kernel = make(boxes * grid.spacing[0] * (grid.shape[0] - 1), 1.7, dim=dim)
    torus = torus_for(kernel, grid, 4.0)
    found = images_over_variance(kernel, grid, torus)
    assert found <= 0.0501
    assert wrap_inflation(kernel, grid, torus) == pytest.approx(found, abs=1e-3)
    nugget = 1e-6 if make is SquaredExponential else 0.0
    prior = GridPrior.padded(kernel, grid, nugget=nugget)
    assert prior.torus_shape == torus
    assert prior.report.wrap_inflation == pytest.approx(found, abs=1e-7)
    at_node = float(prior.lags.detach().view(-1)[0]) - prior.report.nugget
    assert at_node / 1.7 == pytest.approx(1.0, abs=0.0501)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_torus_that_is_asked_for_reports_its_inflation(dim: int) -> None:
    grid = make_grid(dim)
    kernel = Matern32(1.0, dim=dim)
    shape = tuple(m + 4 for m in grid.shape)
    report = GridPrior.padded(kernel, grid, torus_shape=shape).report
    expected = images_over_variance(kernel, grid, shape)
    assert report.wrap_inflation == pytest.approx(expected, rel=1e-3)
    assert report.wrap_inflation > 0.01


def test_a_length_that_no_memory_holds_is_refused_in_words() -> None:
    grid = RegularGrid((0.0,) * 3, (0.1,) * 3, (20,) * 3)
    with pytest.raises(MemoryError, match=r"the torus .* needs .* bytes"):
        GridPrior.padded(Matern32(math.e * 10, dim=3), grid)


def test_a_length_of_many_boxes_is_refused() -> None:
    """A damaged file may hold any length; its images would take for ever to count."""
    grid = make_grid(3)
    with pytest.raises(UserError, match="images on a torus"):
        GridPrior.padded(Matern32(1e20, 1.0, dim=3).fixed(), grid, torus_shape=(16, 16, 16))
