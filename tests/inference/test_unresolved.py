"""What a grid leaves out of a log-normal density, against dense projections and drawn numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import NestedGrids, RegularGrid, ZeroPoints, features, variance_of_pairs
from dustmap.gp.features._grouped import GroupSamples
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, kernel_named
from dustmap.inference import LogNormalPosterior, Unresolved
from dustmap.linalg import AbstractOperator

BOX = RegularGrid.from_bounds((-4.0,) * 3, (4.0,) * 3, (9,) * 3)


def _left_by_projection(kernel: AbstractKernel, cells: int, finer: int) -> Tensor:
    """Covariance (n, n) by displacement, n = cells · finer, of what hats of spacing 1 leave of a
    field on a torus of cells × cells, mean over places; the lattice has `finer` places to a hat."""
    n = cells * finer
    step = torch.arange(n, dtype=torch.float64) / finer
    images = torch.cartesian_prod(*[torch.arange(-2.0, 3.0, dtype=torch.float64) * cells] * 2)
    lag = torch.cartesian_prod(step, step)
    wrapped = kernel(lag[:, None] + images).sum(1).reshape(n, n)
    away = (step[:, None] - torch.arange(cells) + cells / 2) % cells - cells / 2
    hat = (1.0 - away.abs()).clamp_min(0.0)
    hats = torch.kron(hat, hat)  # (n², cells²)
    q, _ = torch.linalg.qr(hats)
    index = torch.arange(n)
    shift = (index[:, None] - index) % n
    flat = (shift[:, None, :, None] * n + shift[None, :, None, :]).reshape(n * n, n * n)
    covariance = wrapped.flatten()[flat]
    explained = q @ (q.T @ covariance)
    left = covariance - explained - explained.T + q @ (q.T @ explained.T)
    mean = torch.zeros(n * n, dtype=torch.float64).index_add_(0, flat.flatten(), left.flatten())
    return (mean / n**2).reshape(n, n)


@pytest.mark.parametrize("kernel", [Matern32(2.0, 0.6, dim=2), Matern12(3.0, 0.3, dim=2)])
def test_integrals_lack_what_the_projection_on_multilinear_functions_leaves(
    kernel: AbstractKernel,
) -> None:
    cells, finer = 8, 6
    left = _left_by_projection(kernel, cells, finer)
    n = cells * finer
    step = ((torch.arange(n) + n // 2) % n - n // 2).double() / finer
    distance = torch.hypot(*torch.meshgrid(step, step, indexing="ij"))
    # Along a line of any direction ∫ c dt = (1/π) ∫ c(x)/|x| d²x; the mean of 1/|x| in the middle
    # cell of side a is 4 ln(1 + √2)/a.
    inverse = torch.where(distance > 0, 1.0 / distance, 4.0 * math.log(1.0 + math.sqrt(2)) * finer)
    expected = float((left.expm1() * inverse).sum()) / finer**2 / math.pi
    grid = RegularGrid.from_bounds((0.0,) * 2, (8.0,) * 2, (9, 9))
    assert Unresolved.of(kernel, grid).length == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_places_miss_what_the_interpolant_of_their_cell_leaves(dim: int) -> None:
    kernel = kernel_named("matern12", 2.0, 0.5, dim)
    grid = RegularGrid.from_bounds((-1.0,) * dim, (3.0,) * dim, (5,) * dim)
    lacking, nodes = Unresolved.of(kernel, grid), grid.points()
    x = 4.0 * torch.rand(50, dim, dtype=torch.float64, generator=torch.manual_seed(0)) - 1.0
    rows = features.interpolation(PointValues(x), grid, dtype=torch.float64)
    weights = rows.matmul(torch.eye(len(nodes), dtype=torch.float64)).T
    if weights.shape[0] != len(x):
        weights = weights.T
    between = kernel(nodes[:, None] - nodes)
    c = kernel.variance() - 2.0 * (weights * kernel(x[:, None] - nodes)).sum(-1)
    c = c + torch.einsum("ni,ij,nj->n", weights, between, weights)
    torch.testing.assert_close(lacking.relative(x), c.expm1())
    torch.testing.assert_close(lacking.relative(nodes), torch.zeros(len(nodes)).double())
    torch.testing.assert_close(lacking.scaled(0.5).log_variance(x), 0.5 * c)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_voxels_that_are_alike_lack_what_each_of_them_does(dim: int) -> None:
    """Those of a grid that repeats itself in every cell, from a corner of its own."""
    kernel = kernel_named("matern12", 2.0, 0.5, dim)
    lacking = Unresolved.of(kernel, RegularGrid((-1.0,) * dim, (1.0, 0.9, 1.1)[:dim], (5,) * dim))
    voxels = RegularGrid((-0.93,) * dim, (0.1,) * dim, (34,) * dim).points()
    some = torch.randperm(len(voxels), generator=torch.manual_seed(0))[:30]
    alone = torch.cat([lacking.log_variance(place) for place in voxels[some][:, None]])
    torch.testing.assert_close(lacking.log_variance(voxels)[some], alone, rtol=1e-9, atol=1e-9)


def _rays(count: int) -> LineIntegrals:
    generator = torch.manual_seed(1)
    start, end = 7.0 * torch.rand(2, count, 3, dtype=torch.float64, generator=generator) - 3.5
    return LineIntegrals.segment(start, end)


def test_numbers_at_the_nodes_give_integrals_their_variance() -> None:
    lacking, rays = Unresolved.of(Matern32(2.0, 0.5, dim=3), BOX), _rays(400)
    rows = features.interpolation(rays, BOX, dtype=torch.float64)
    drawn = torch.randn(500, BOX.size, dtype=torch.float64, generator=torch.manual_seed(2))
    found = rows.matmul(math.sqrt(lacking.levels[0].node_variance) * drawn).square().mean(0)
    length = (rays.edges[:, -1] - rays.edges[:, 0]).double()
    long = length > 4.0
    ratio = (found / (lacking.length * length))[long].mean()
    assert float(ratio) == pytest.approx(1.0, abs=0.1)


def _posterior(spread: float, unresolved: Unresolved | None) -> LogNormalPosterior:
    half = spread * torch.randn(8, BOX.size, dtype=torch.float64, generator=torch.manual_seed(3))
    logs = torch.stack([half, -half], 1).flatten(0, 1)

    def rows(functional: AbstractFunctional) -> AbstractOperator:
        return features.interpolation(functional, BOX, dtype=torch.float64)

    return LogNormalPosterior(rows, torch.zeros(BOX.size).double(), logs, unresolved=unresolved)


def test_what_data_know_well_they_know_between_the_nodes_by_halves_of_the_logarithm() -> None:
    lacking, rays = Unresolved.of(Matern32(2.0, 0.5, dim=3), BOX), _rays(20)
    plain = _posterior(0.05, None).predict(rays)
    more = _posterior(0.05, lacking).predict(rays)
    squares = torch.exp(2.0 * _posterior(0.05, None).log_samples).mean(0)
    whole = lacking.length * features.interpolation(rays, BOX, dtype=torch.float64).matmul(squares)
    assert bool((plain.variance < whole).all())
    added = (plain.variance * whole).sqrt()
    torch.testing.assert_close(more.variance, plain.variance + added)
    torch.testing.assert_close(more.mean, plain.mean)


def test_percentiles_of_measurements_may_be_below_zero() -> None:
    """Of rays whose draws of (1 + s) f + b are on both sides of 0: those of a normal distribution
    with the moments of `predict`; without groups, of the logarithms."""
    rays = _rays(20)
    points = ZeroPoints(2, 5.0, 0.3)
    white = torch.randn(16, points.n_variables, generator=torch.manual_seed(4)).double()
    posterior = replace(_posterior(0.05, None), groups=GroupSamples(points, white))
    seen, q = replace(rays, groups=torch.arange(20) % 2), torch.tensor([0.16, 0.5, 0.84])
    measured = posterior.predict(seen)
    low, middle, high = posterior.percentiles(seen, q)
    assert bool((low < 0.0).any())
    torch.testing.assert_close(middle, measured.mean)
    torch.testing.assert_close(high - low, 2.0 * 0.994458 * measured.std, rtol=1e-5, atol=0.0)
    assert bool((posterior.percentiles(rays, q) > 0.0).all())


@pytest.mark.parametrize(
    ("spread", "pairs"),
    [(0.7, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.01, 2), (0.3, 8)))],
)
def test_variances_of_pairs_are_right_on_average(spread: float, pairs: int) -> None:
    """Of rays through densities exp(±δ), of small deviations and of large ones: within three Monte
    Carlo errors. Divided by S − 1 the first is a third too large, by S the last too small."""
    rays = _rays(20)
    L = features.interpolation(rays, BOX, dtype=torch.float64)
    exact = L.to_dense().square().sum(1) * math.exp(spread**2) * math.expm1(spread**2)
    ratios = []
    for seed in range(400):
        generator = torch.manual_seed(seed)
        half = spread * torch.randn(pairs, BOX.size, generator=generator).double()
        logs = torch.stack([half, -half], 1).flatten(0, 1)
        plain = replace(_posterior(0.05, None), log_samples=logs)
        ratios.append((plain.predict(rays).variance / exact).mean())
    found = torch.stack(ratios)
    error = float(found.std()) / len(found) ** 0.5
    assert abs(float(found.mean()) - 1.0) < 3.0 * error < 0.1


def test_what_data_do_not_know_lacks_all_of_it() -> None:
    lacking, rays = Unresolved.of(Matern32(8.0, 0.5, dim=3), BOX), _rays(20)
    wide = _posterior(0.7, None)
    plain, more = wide.predict(rays), _posterior(0.7, lacking).predict(rays)
    squares = torch.exp(2.0 * wide.log_samples).mean(0)
    whole = lacking.length * features.interpolation(rays, BOX, dtype=torch.float64).matmul(squares)
    assert bool((plain.variance > whole).all())
    torch.testing.assert_close(more.variance, plain.variance + whole)


@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_zero_points_say_nothing_of_what_lies_between_the_nodes(scale: float) -> None:
    """Against the draws (1 + s)(f ± u) + b of measurements, with u² = √(S V) of the field f."""
    lacking, rays = Unresolved.of(Matern32(2.0, 0.5, dim=3), BOX), _rays(20)
    seen = replace(rays, groups=torch.arange(20) % 2)
    points = ZeroPoints(2, 0.4, scale)
    white = torch.randn(16, points.n_variables, generator=torch.manual_seed(4)).double()
    groups = GroupSamples(points, white)
    plain = replace(_posterior(0.05, None), groups=groups)
    more = replace(_posterior(0.05, lacking), groups=groups)
    u = (more.predict(rays).variance - plain.predict(rays).variance).sqrt()
    b, s = 0.4 * white[:, :2], scale * white[:, -2:]
    field = plain.sample(rays, 16, torch.manual_seed(0))
    drawn = torch.cat([(1.0 + s[:, seen.groups]) * (field + e * u) for e in (1, -1)])
    drawn = drawn + b[:, seen.groups].repeat(2, 1)
    measured = (1.0 + s[:, seen.groups]) * field + b[:, seen.groups]
    torch.testing.assert_close(plain.predict(seen).variance, variance_of_pairs(measured))
    between = more.predict(seen).variance - plain.predict(seen).variance
    spread = drawn.var(0, correction=0) - measured.var(0, correction=0)
    torch.testing.assert_close(spread, between)
    torch.testing.assert_close(more.covariance(seen).diagonal(), more.predict(seen).variance)


def test_without_a_factor_nothing_is_lacking() -> None:
    lacking, rays = Unresolved.of(Matern32(2.0, 0.5, dim=3), BOX, scale=0.0), _rays(5)
    plain, same = _posterior(0.1, None).predict(rays), _posterior(0.1, lacking).predict(rays)
    torch.testing.assert_close(same.variance, plain.variance)
    whole = Unresolved.of(Matern32(2.0, 0.5, dim=3), BOX)
    assert whole.scaled(2.0).scale == 2.0


@pytest.mark.parametrize("dim", [2, 3])
def test_what_a_grid_leaves_out_knows_no_order_of_the_axes(dim: int) -> None:
    """With random directions lengths of 2, 4 and 8 spacings were 30 % off."""
    lengths, spacing = [2.0, 4.0, 8.0][:dim], [1.0, 1.0, 3.0][:dim]
    found = []
    for turn in range(dim):
        order = [(turn + axis) % dim for axis in range(dim)]
        kernel = Matern32([lengths[axis] for axis in order], 1.0)
        grid = RegularGrid((0.0,) * dim, tuple(spacing[axis] for axis in order), (5,) * dim)
        (level,) = Unresolved.of(kernel, grid).levels
        found.append([level.length, level.node_variance])
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(found[:1]).expand(dim, 2), rtol=0.03, atol=0.0
    )


def test_a_face_lacks_what_the_coarser_grids_lack_there() -> None:
    """A grid that begins where the next coarser one has hardly begun itself: within its fading."""
    sides = ((54.0, 9.0), (36.0, 3.0), (33.0, 1.0))
    grids = tuple(
        RegularGrid.from_bounds((-side,) * 2, (side,) * 2, (round(2 * side / h) + 1,) * 2)
        for side, h in sides
    )
    lacking = Unresolved.of(Matern12(8.0, 0.5, dim=2), NestedGrids(grids))
    far, middle, _ = (level.length for level in lacking.levels)
    assert isinstance(lacking.length, Tensor)
    face = lacking.length[-67 * 67 :].reshape(67, 67)[0, 33]
    g = math.sin(0.5 * math.pi * 3.0 / 18.0) ** 2
    assert float(face) == pytest.approx(g**2 * middle + (1.0 - g**2) * far, rel=1e-6)
    assert far > 5.0 * middle
