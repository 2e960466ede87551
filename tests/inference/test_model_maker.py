"""The torus that follows the length scale: the variance of the prior stays that of the kernel."""

from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, FitStatus, GPModel, GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import LocalFeatures
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, Matern52
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalSettings, GridSettings, ModelMaker, fit_global

NODES = {1: 80, 2: 26, 3: 23}


def unit_box(dim: int, nodes: int) -> RegularGrid:
    return RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, (nodes,) * dim)


def maker_of(dim: int) -> ModelMaker:
    settings = GridSettings(order=2, dtype=torch.float64)
    return ModelMaker(unit_box(dim, NODES[dim]), settings, ClosedForm())


def prior_of(maker: ModelMaker, kernel: AbstractKernel) -> GridPrior:
    model = maker.build(GPModel(kernel, ConstantMean(), GaussianLikelihood(jitter=0.1)))
    assert isinstance(model.features, LocalFeatures)
    return model.features.prior


def inflation(prior: GridPrior) -> float:
    """Variance of the prior at a node over k(0), minus 1, from R Rᵀ itself."""
    first = torch.zeros(1, prior.grid.size, dtype=torch.float64)
    first[0, 0] = 1.0
    with torch.no_grad():
        at_node = float(prior.root().rmatmul(first).square().sum())
        return at_node / float(prior.kernel.variance()) - 1.0


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Matern12, Matern32, Matern52])
def test_a_length_of_the_box_and_more_keeps_the_variance(make: type, dim: int) -> None:
    for length in {1: (1.0, 5.0), 2: (1.0, 3.0), 3: (1.0,)}[dim]:
        assert -1e-9 < inflation(prior_of(maker_of(dim), make(length, dim=dim))) < 0.0501


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Matern12, Matern32, Matern52])
def test_the_ceiling_is_the_longest_length_on_the_largest_torus(make: type, dim: int) -> None:
    kernel = make(0.2, dim=dim)
    maker = maker_of(dim)
    (limit,) = maker.ceilings(kernel).values()
    assert limit <= 0.0
    kernel = kernel.with_value("length", torch.full_like(kernel.length.value, limit))
    prior = prior_of(maker, kernel)
    assert inflation(prior) < 0.0501
    assert max(prior.torus_shape) <= 3.2 * NODES[dim]


@pytest.mark.slow
def test_learning_that_ends_at_the_ceiling_says_so() -> None:
    """A plane in place of a field: no length scale is long enough."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 2, generator=generator, dtype=torch.float64)
    y = 2.0 * x.sum(1) + 0.02 * torch.randn(120, generator=generator, dtype=torch.float64)
    kernel, likelihood = Matern32(0.5, dim=2), GaussianLikelihood()
    model = GPModel(kernel.learning("length"), ConstantMean(), likelihood)
    settings = GlobalSettings(samples=8, dtype=torch.float64, order=2)
    batch = Batch(PointValues(x), y, torch.full_like(y, 4e-4))
    fit = fit_global(model, batch, unit_box(2, 26), settings)
    assert fit.learned is not None
    assert fit.learned.status is FitStatus.AT_BOUND
    assert "bound" in fit.learned.message()
    assert fit.report["wrap_inflation"] < 0.0501


def test_the_model_of_the_kernel_that_stencils_were_chosen_for_has_their_tables() -> None:
    grid, kernel = unit_box(2, 12), Matern32(0.4, dim=2)
    ends = torch.rand((20, 2), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = LineIntegrals.from_observer(ends, torch.tensor([0.1, 0.1], dtype=torch.float64))
    noise = torch.full((20,), 0.01, dtype=torch.float64)
    maker = ModelMaker(grid, GridSettings(dtype=torch.float64), ClosedForm())
    model = GPModel(kernel, ConstantMean(), GaussianLikelihood())
    maker.choose_order(model, Batch(data, noise, noise))
    chosen, again = maker.build(model).features, maker.build(model).features
    assert again is chosen
    assert isinstance(chosen, LocalFeatures)
    assert maker.stencils is not None
    assert chosen.order == maker.stencils.order
    fresh = LocalFeatures(chosen.prior, chosen.estimator, chosen.order)
    assert torch.equal(chosen.residual_variance(data), fresh.residual_variance(data))
    other = maker.build(replace(model, kernel=Matern32(0.5, dim=2))).features
    assert isinstance(other, LocalFeatures)
    assert float(other.prior.kernel.terms()[0].lengthscale[0]) == pytest.approx(0.5)
