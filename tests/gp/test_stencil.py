"""Kriging weights of a stencil against dense algebra of the whole prior."""

import itertools

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import Stencil
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
)
from tests.gp.parameters import of_parameters

DIMS, ORDERS = [1, 2, 3], [2, 4]


def _grid(dim: int) -> RegularGrid:
    return RegularGrid((0.0,) * dim, (0.5, 1.0, 0.8)[:dim], (6, 5, 5)[:dim])


def _kernels(dim: int) -> list[AbstractKernel]:
    scales = (0.5, 0.8, 0.7)[:dim]
    return [Matern12(0.4, 0.7, dim=dim), Matern32(scales) + Matern52(0.9, 0.3, dim=dim)]


def _prior(kernel: AbstractKernel, nugget: float = 0.0) -> GridPrior:
    return GridPrior.padded(kernel, _grid(kernel.dim), padding=3.0, nugget=nugget)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", DIMS)
def test_a_node_takes_its_own_value(dim: int, order: int) -> None:
    for kernel in _kernels(dim):
        stencil = Stencil.of(_prior(kernel), order)
        corners = torch.tensor(list(itertools.product((0, 1), repeat=dim)))
        weights = stencil.weights(corners.double()).detach()
        unit = (stencil.shifts()[None] == corners[:, None]).all(-1).double()
        torch.testing.assert_close(weights, unit, rtol=0, atol=1e-10)


@pytest.mark.parametrize("nugget", [0.0, 1e-4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", DIMS)
def test_weights_against_the_priors_own_matrix(dim: int, order: int, nugget: float) -> None:
    for kernel in _kernels(dim):
        prior = _prior(kernel, nugget)
        offsets = torch.rand(5, dim, dtype=torch.float64, generator=torch.Generator())
        cell = 1  # the stencil of this cell lies in the box
        stencil = Stencil.of(prior, order)
        places = torch.zeros(stencil.size, dtype=torch.int64)
        for d, m in enumerate(prior.grid.shape):
            places = places * m + cell + stencil.shifts()[:, d]
        K_SS = prior.dense_covariance().detach()[places][:, places]
        x = (cell + offsets) * torch.tensor(prior.grid.spacing, dtype=torch.float64)
        k_S = ClosedForm().cross(kernel, PointValues(x), prior.grid, prior.wrapping)[:, places]
        expected = torch.linalg.solve(K_SS, k_S.detach().mT).mT
        torch.testing.assert_close(
            stencil.weights(offsets).detach(), expected, rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(stencil.K_SS().detach(), K_SS, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", DIMS)
def test_weights_of_derivatives_are_derivatives_of_weights(dim: int, order: int) -> None:
    stencil = Stencil.of(_prior(Matern52(1.5, dim=dim)), order)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.rand(4, dim, dtype=torch.float64, generator=generator)
    direction = torch.randn(4, dim, dtype=torch.float64, generator=generator)
    step = 1e-5 * direction / torch.tensor(stencil.spacing, dtype=torch.float64)
    ahead, behind = (stencil.weights(offsets + s).detach() for s in (step, -step))
    actual = stencil.weights(offsets, direction).detach()
    torch.testing.assert_close(actual, (ahead - behind) / 2e-5, rtol=0, atol=1e-6)


#: By how much E(f − wᵀu)² of the 4³ stencil may exceed the exact conditional variance.
ALLOWED = {"matern12": 0.01, "matern32": 0.06, "matern52": 0.35}
KERNELS = {"matern12": Matern12, "matern32": Matern32, "matern52": Matern52}


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("name", list(KERNELS))
def test_the_prior_error_is_close_to_the_exact_conditional(name: str, ratio: float) -> None:
    kernel = KERNELS[name](ratio, dim=3)
    grid = RegularGrid((0.0,) * 3, (1.0,) * 3, (8, 8, 8))
    offsets = torch.tensor([[0.5, 0.5, 0.5], [0.3, 0.1, 0.8], [0.5, 0.0, 0.0]]).double()
    with torch.no_grad():
        local = _prior_error(Stencil(kernel, grid.spacing, 4), offsets)
        rough = _prior_error(Stencil(kernel, grid.spacing, 2), offsets)
        K_uu = kernel(grid.points()[:, None] - grid.points())
        k_u = kernel((3 + offsets)[:, None] - grid.points())
        exact = 1.0 - (k_u * torch.linalg.solve(K_uu, k_u.mT).mT).sum(-1)
    assert bool((local >= exact * (1 - 1e-6)).all())
    assert bool((rough >= local * (1 - 1e-9)).all())
    assert float((local - exact).mean()) < 0.01  # of the prior variance
    assert float(local.mean() / exact.mean()) < 1 + ALLOWED[name]


def _prior_error(stencil: Stencil, offsets: Tensor) -> Tensor:
    """k(0) − wᵀ k_S."""
    return stencil.K_SS()[0, 0] - (stencil.weights(offsets) * stencil.covariances(offsets)).sum(-1)


@pytest.mark.parametrize(("dim", "steps"), [(1, 1024), (2, 128), (3, 32)])
def test_the_table_holds_the_weights_of_its_offsets(dim: int, steps: int) -> None:
    stencil = Stencil.of(_prior(Matern32(1.2, dim=dim)), 2)
    assert stencil.steps == steps
    offsets = torch.rand(50, dim, dtype=torch.float64, generator=torch.Generator())
    moved, entry = stencil.nearest(offsets)
    index = torch.zeros_like(moved)
    for d in range(dim):
        index[:, d] = entry // steps ** (dim - 1 - d) % steps
    near = moved + index / steps
    assert float((near - offsets).abs().max()) <= 0.5 / steps + 1e-12
    expected = stencil.weights(index / steps)
    torch.testing.assert_close(stencil.table()[entry], expected, rtol=0, atol=1e-9)


def test_an_offset_that_rounds_up_belongs_to_the_next_cell() -> None:
    stencil = Stencil.of(_prior(Matern32(1.2, dim=2)), 2)
    position = torch.tensor([[3.9999, -0.0001], [3.25, 9.9999]], dtype=torch.float64)
    moved, entry = stencil.nearest(position)
    assert moved.tolist() == [[4, 0], [3, 10]]
    assert entry.tolist() == [0, 32 * 128]


@pytest.mark.parametrize("nugget", [0.0, 1e-3])
@pytest.mark.parametrize("dim", DIMS)
def test_weights_are_differentiable_in_the_kernel(dim: int, nugget: float) -> None:
    offsets = torch.rand(2, dim, dtype=torch.float64, generator=torch.Generator())
    torus = _prior(Matern32(1.0, dim=dim)).torus_shape

    def weights(kernel: AbstractKernel) -> Tensor:
        prior = GridPrior.padded(kernel, _grid(dim), nugget=nugget, torus_shape=torus)
        return Stencil.of(prior, 4 if dim < 3 else 2).weights(offsets)

    objective = of_parameters(Matern32((1.0,) * dim), weights)
    scales = torch.linspace(-0.2, 0.2, dim, dtype=torch.float64, requires_grad=True)
    variance = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(objective, (scales, variance), atol=1e-6, fast_mode=True)


def test_a_field_too_smooth_for_its_stencil_asks_for_a_nugget() -> None:
    grid = RegularGrid((0.0,) * 3, (1.0,) * 3, (4, 4, 4))
    # Whose pivots fall to 1e-28 of the first: singular however K_SS is rounded.
    bare = GridPrior.padded(SquaredExponential(14.0, dim=3), grid, padding=0.3)
    with pytest.raises(ValueError, match="pass a nugget to the prior"):
        Stencil.of(bare, 4).weights(torch.full((1, 3), 0.5))
    prior = GridPrior.padded(SquaredExponential(8.0, dim=3), grid, padding=1.0, nugget=1e-8)
    weights = Stencil.of(prior, 4).weights(torch.full((1, 3), 0.5)).detach()
    assert abs(float(weights.sum()) - 1) < 1e-4


def test_wrong_arguments_are_refused() -> None:
    kernel = Matern32(1.0, dim=2)
    with pytest.raises(ValueError, match="expected 2 or 4, got 3"):
        Stencil(kernel, (1.0, 1.0), 3)
    with pytest.raises(ValueError, match="spacing must have 2 entries"):
        Stencil(kernel, (1.0,), 2)
    tiny = RegularGrid((0.0, 0.0), (1.0, 1.0), (2, 2))
    prior = GridPrior.padded(kernel, tiny, torus_shape=(3, 3))
    with pytest.raises(ValueError, match="does not fit the torus"):
        Stencil.of(prior, 4)
