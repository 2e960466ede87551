"""What decides an automatic grid: the variance it leaves, and the one that data leave."""

import math

import numpy as np
import pytest
import torch
from sklearn.exceptions import DataConversionWarning

from dustmap import HIPGPRegressor
from dustmap.engines._grids import (
    automatic_grid,
    expected_variance,
    lattice_of,
    posterior_variance,
    typical_density,
    unexplained_variance,
)
from dustmap.gp import ExactGP, RegularGrid
from dustmap.gp._means import ConstantMean
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    SquaredExponential,
    kernel_named,
)

KERNELS = [
    Matern32(0.3, 2.0, dim=1),
    Matern32([0.5, 0.8], 2.0),
    Matern12(0.4, 1.5, dim=2) + Matern32(1.5, 0.5, dim=2),
    SquaredExponential([0.6, 0.5, 0.9]),
]


@pytest.mark.parametrize(
    "kernel", KERNELS, ids=lambda kernel: f"{kernel.dim}-{len(kernel.terms())}"
)
def test_expected_variance_is_that_of_evenly_spread_data(kernel: AbstractKernel) -> None:
    side = {1: 400, 2: 24, 3: 8}[kernel.dim]
    spacing = {1: 0.02, 2: 0.12, 3: 0.3}[kernel.dim]
    grid = RegularGrid((0.0,) * kernel.dim, (spacing,) * kernel.dim, (side,) * kernel.dim)
    points = PointValues(grid.points())
    noise = torch.full((grid.size,), 0.5, dtype=torch.float64)
    gp = ExactGP(kernel, ConstantMean(learn=False))
    posterior = gp.condition(points, torch.zeros_like(noise), noise)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.rand((64, kernel.dim), generator=generator, dtype=torch.float64)
    inside = PointValues(spacing * (side // 2 + offsets))
    exact = float(posterior.predict(inside).variance.mean())
    endless = torch.full((kernel.dim,), 1e4, dtype=torch.float64)
    expected = expected_variance(kernel, 1.0 / spacing**kernel.dim, 0.5, endless)
    # Data on nodes are not quite data spread evenly.
    assert expected == pytest.approx(exact, rel=0.1)
    assert expected_variance(kernel, 0.0, 0.5, endless) == pytest.approx(
        float(kernel.variance().detach()), rel=1e-3
    )


@pytest.mark.parametrize(
    "kernel", KERNELS, ids=lambda kernel: f"{kernel.dim}-{len(kernel.terms())}"
)
def test_unexplained_variance_needs_the_nearest_nodes_only(kernel: AbstractKernel) -> None:
    spacing = 0.25
    side = {1: 60, 2: 20, 3: 9}[kernel.dim]
    grid = RegularGrid((0.0,) * kernel.dim, (spacing,) * kernel.dim, (side,) * kernel.dim)
    noise = torch.full((grid.size,), 1e-9, dtype=torch.float64)
    gp = ExactGP(kernel, ConstantMean(learn=False))
    known = PointValues(grid.points())
    posterior = gp.condition(known, torch.zeros_like(noise), noise)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.rand((64, kernel.dim), generator=generator, dtype=torch.float64)
    inside = PointValues(spacing * (side // 2 + offsets))
    exact = posterior.predict(inside).variance
    found = unexplained_variance(kernel, grid.spacing)
    assert float(found.median()) == pytest.approx(float(exact.median()), rel=0.05, abs=1e-5)


@pytest.mark.parametrize("name", ["matern12", "matern32", "matern52"])
@pytest.mark.parametrize(
    "lengths", [[0.1], [100.0], [1.0] * 2, [100.0] * 2, [0.1, 100.0], [3.0] * 3, [0.3, 3.0, 100.0]]
)
def test_expected_variance_is_that_of_a_box(lengths: list[float], name: str) -> None:
    generator, n, dim = torch.Generator().manual_seed(0), 800, len(lengths)
    x, new = torch.rand((2, n, dim), generator=generator, dtype=torch.float64)
    kernel, noise = kernel_named(name, lengths), torch.full((n,), 0.25, dtype=torch.float64)
    gp = ExactGP(kernel, ConstantMean(learn=False))
    posterior = gp.condition(PointValues(x), torch.zeros_like(noise), noise)
    exact = float(posterior.predict(PointValues(new)).variance.median())
    expected = expected_variance(kernel, float(n), 0.25, torch.ones(dim, dtype=torch.float64))
    # Without the box a kernel of 100 sides had a hundredth of this and less.
    assert 1 / 3 < expected / exact < 3


@pytest.mark.parametrize("noise_variance", [0.25, 1e-2, 1e-6])
@pytest.mark.parametrize("name", ["matern12", "matern32", "matern52"])
@pytest.mark.parametrize(
    "lengths", [[0.01], [3.0], [0.05] * 2, [1.0] * 2, [0.1] * 3, [1.0] * 3, [0.3] * 4, [5.0] * 4]
)
def test_posterior_variance_is_that_of_data_with_little_noise(
    lengths: list[float], name: str, noise_variance: float
) -> None:
    """Between the data, where it does not vanish with the noise."""
    generator, n, dim = torch.Generator().manual_seed(0), 800, len(lengths)
    x, new = torch.rand((2, n, dim), generator=generator, dtype=torch.float64)
    kernel = kernel_named(name, lengths)
    noise = torch.full((n,), noise_variance, dtype=torch.float64)
    gp = ExactGP(kernel, ConstantMean(learn=False))
    posterior = gp.condition(PointValues(x), torch.zeros_like(noise), noise)
    exact = float(posterior.predict(PointValues(new)).variance.median())
    box = torch.ones(dim, dtype=torch.float64)
    assert 1 / 4 < posterior_variance(kernel, float(n), noise_variance, box) / exact < 4


@pytest.mark.parametrize("engine", ["hip", "global", "auto"])
def test_a_grid_that_is_given_takes_a_column_of_one_value(engine: str) -> None:
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.uniform(size=300), np.full(300, 0.5)])
    y = np.sin(5.0 * X[:, 0]) + 0.1 * rng.standard_normal(300)
    grid = RegularGrid((-0.1, -0.1), (0.05, 0.2), (25, 7))
    model = HIPGPRegressor("matern32", engine=engine, grid=grid, n_learn=100).fit(X, y)
    assert model.report_["advice"] == []
    assert model.refit(X[:1], y[:1]).report_["n"] == 1
    with pytest.warns(DataConversionWarning):
        assert model.refit(X[:2], y[:2, None]).report_["n"] == 2
    assert np.sqrt(np.mean((model.predict(X) - np.sin(5.0 * X[:, 0])) ** 2)) < 0.05


def test_typical_density_is_that_of_the_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    even = torch.rand((4000, 2), generator=generator, dtype=torch.float64)
    lengths = torch.tensor([0.25, 0.25], dtype=torch.float64)
    assert typical_density(even, lengths) == pytest.approx(4000.0, rel=0.1)
    clustered = torch.cat([even[:400], 0.1 * even[400:]])
    assert typical_density(clustered, lengths) > 5 * 4000.0


def test_a_grid_within_its_budget_is_the_coarsest_that_is_fine_enough() -> None:
    x = torch.rand((500, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = Matern32([0.2, 0.4])
    fine = automatic_grid(kernel, x, 0.1, lambda grid: grid.size <= 10_000)
    assert fine.fine_enough
    assert fine.grid.spacing[1] == pytest.approx(2.0 * fine.grid.spacing[0])
    assert bool(fine.grid.contains(x).all())
    coarse = automatic_grid(kernel, x, 0.1, lambda grid: grid.size <= 100)
    assert not coarse.fine_enough
    assert coarse.grid.size <= 100
    assert coarse.noise_share > fine.noise_share
    assert math.isfinite(coarse.posterior_share)


def test_cells_of_an_image_are_a_lattice_whatever_is_missing() -> None:
    generator = torch.Generator().manual_seed(0)
    cells = RegularGrid((-95.9, 34.3), (0.0093, 0.0093), (60, 40))
    kept = torch.rand(cells.size, generator=generator) < 0.3
    x = cells.points()[kept].float().double()  # degrees are often stored in single precision
    found = lattice_of(x)
    assert found is not None
    assert found.shape == cells.shape
    assert found.spacing == pytest.approx(cells.spacing, rel=1e-4)
    steps = (x - torch.tensor(found.lower)) / torch.tensor(found.spacing)
    assert float((steps - steps.round()).abs().max()) < 5e-3
    assert bool(found.contains(x).all())
    assert lattice_of(x + 0.001 * torch.rand(x.shape, generator=generator)) is None


def test_scattered_places_have_no_lattice() -> None:
    x = torch.rand((500, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert lattice_of(x) is None
    assert lattice_of((1000 * x).round()) is None  # it would have a node for every place and more
    constant = torch.cat([x[:, :1].mul(9).round(), torch.ones(500, 1)], dim=1).double()
    assert lattice_of(constant) is None


def test_data_on_a_lattice_take_it_where_no_coarser_grid_will_do() -> None:
    cells = RegularGrid((0.0, 0.0), (0.1, 0.1), (30, 20))
    x = cells.points()
    rough = automatic_grid(Matern12([0.5, 0.5]), x, 1e-4, lambda grid: grid.size <= 10_000)
    assert rough.grid.shape == cells.shape
    assert (rough.noise_share, rough.posterior_share) == (0.0, 0.0)
    smooth = automatic_grid(Matern32([3.0, 3.0]), x, 0.1, lambda grid: grid.size <= 10_000)
    assert smooth.grid.size < cells.size
    assert smooth.fine_enough
    none = automatic_grid(Matern12([0.5, 0.5]), x, 1e-4, lambda grid: grid.size <= 500)
    assert none.grid.size <= 500


@pytest.mark.parametrize("width", [0.0, 1e-5, 1e-3])
def test_a_column_that_hardly_varies_asks_for_the_grid_of_the_others(width: float) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(0.0, 10.0, (600, 1)))
    flat = torch.from_numpy(3.0 + width * rng.random((600, 1)))

    def fits(grid: RegularGrid) -> bool:
        return grid.size < 10_000

    alone = automatic_grid(Matern32(1.0, dim=1), x, 0.04, fits)
    beside = automatic_grid(Matern32((1.0, 1.0)), torch.cat([x, flat], 1), 0.04, fits)
    assert beside.fine_enough
    assert beside.grid.shape[0] >= alone.grid.shape[0]
    assert beside.grid.shape[1] <= 4
