"""Residual variances of local weights against their definition by dense algebra."""

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm, MonteCarlo
from dustmap.gp.features import _residual_table as residual_table
from dustmap.gp.features import _residuals as residuals
from dustmap.gp.features._local import LocalFeatures
from dustmap.gp.features._nodes import nodes_of
from dustmap.gp.features._order import stencil_order
from dustmap.gp.features._residual_check import (
    ResidualCheck,
    exact_residual_variance,
    residual_check,
)
from dustmap.gp.features._residual_pairs import NodeSource, PairWalk, banded_sum
from dustmap.gp.features._residual_table import BAND, REACH, PairLattice, ResidualTable
from dustmap.gp.features._residuals import LocalResiduals, ResidualVariance
from dustmap.gp.features._stencil import Stencil
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, Matern52
from tests.gp.parameters import of_parameters

SHAPES = [(14,), (8, 7), (6, 5, 5)]
SPACING = (0.8, 1.0, 1.1)
F64 = torch.float64


def make_prior(
    shape: tuple[int, ...], kernel: AbstractKernel | None = None, dtype: torch.dtype = F64
) -> GridPrior:
    dim = len(shape)
    grid = RegularGrid((-1.5, 0.0, 2.0)[:dim], SPACING[:dim], shape)
    return GridPrior.padded(kernel or Matern32(2.0, 1.3, dim=dim), grid, padding=9.0, dtype=dtype)


def inside(prior: GridPrior, n: int, seed: int = 0) -> Tensor:
    """Points (n, D) of the box."""
    generator = torch.Generator().manual_seed(seed)
    lower = torch.tensor(prior.grid.lower, dtype=F64)
    upper = torch.tensor(prior.grid.upper, dtype=F64)
    fraction = torch.rand(n, prior.grid.dim, dtype=F64, generator=generator)
    return lower + (upper - lower) * fraction


def rays(prior: GridPrior, n: int, seed: int = 0) -> LineIntegrals:
    return LineIntegrals.segment(inside(prior, n, seed), inside(prior, n, seed + 1))


def directions(n: int, dim: int) -> Tensor:
    direction = torch.randn(n, dim, dtype=F64, generator=torch.Generator().manual_seed(3))
    unit: Tensor = direction / direction.norm(dim=-1, keepdim=True)
    return unit


def dense_weights(prior: GridPrior, measure: PointMeasure, order: int) -> Tensor:
    """Kriging weights of every row on the nodes of a large grid, point by point: (N, M)."""
    grid, kernel = wide_grid(prior), prior.kernel
    W = torch.zeros(len(measure), grid.size, dtype=F64)
    lower, spacing = (torch.tensor(v, dtype=F64) for v in (grid.lower, grid.spacing))
    points = grid.points()
    for n, q in itertools.product(range(len(measure)), range(measure.points.shape[1])):
        x = measure.points[n, q]
        corner = ((x - lower) / spacing).floor()
        axis = torch.arange(order) - (order // 2 - 1)
        node = (corner + torch.cartesian_prod(*[axis] * grid.dim).reshape(-1, grid.dim)).long()
        flat = torch.zeros(len(node), dtype=torch.long)
        for d, length in enumerate(grid.shape):
            flat = flat * length + node[:, d]
        S = points[flat]
        K_SS = kernel(S[:, None] - S[None])
        if measure.direction is None:
            k_S = kernel(x - S)
        else:
            k_S = kernel.derivative(x - S, measure.direction[n].expand_as(S))
        W[n, flat] += measure.weights[n, q] * torch.linalg.solve(K_SS, k_S)
    return W.detach()


def wide_grid(prior: GridPrior) -> RegularGrid:
    """The grid with four more nodes on every side, for stencils that stick out of the box."""
    grid = prior.grid
    lower = tuple(a - 4 * h for a, h in zip(grid.lower, grid.spacing, strict=True))
    return RegularGrid(lower, grid.spacing, tuple(m + 8 for m in grid.shape))


def dense_residual(
    prior: GridPrior, functional: AbstractFunctional, measure: PointMeasure, order: int
) -> Tensor:
    """k_ff − 2 wᵀ k_fu + wᵀ K w, k_ff and K_fu of the functional, w of the measure: (N,)."""
    W = dense_weights(prior, measure, order)
    met = (W != 0).any(0)
    W, points = W[:, met], wide_grid(prior).points()[met]
    k_ff = ClosedForm().variance(prior.kernel, functional).detach()
    K_fu = ClosedForm().cross(prior.kernel, functional, points).detach()
    K = prior.kernel(points[:, None] - points[None]).detach()
    residual: Tensor = k_ff - 2.0 * (W * K_fu).sum(-1) + ((W @ K) * W).sum(-1)
    return residual


def variance(prior: GridPrior, functional: AbstractFunctional, order: int) -> Tensor:
    return LocalResiduals(prior, ClosedForm(), order).variance(functional).value


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_points_are_exact(shape: tuple[int, ...], order: int) -> None:
    prior = make_prior(shape)
    functional = PointValues(inside(prior, 9))
    measure = PointMeasure(functional.x[:, None], torch.ones(9, 1, dtype=F64))
    expected = dense_residual(prior, functional, measure, order)
    torch.testing.assert_close(
        variance(prior, functional, order).detach(), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_are_exact(shape: tuple[int, ...], order: int) -> None:
    prior = make_prior(shape)
    functional = Derivatives(inside(prior, 7), directions(7, len(shape)))
    measure = PointMeasure(functional.x[:, None], torch.ones(7, 1, dtype=F64), functional.direction)
    expected = dense_residual(prior, functional, measure, order)
    torch.testing.assert_close(
        variance(prior, functional, order).detach(), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_measures_of_few_points_are_exact(shape: tuple[int, ...], directed: bool) -> None:
    prior, dim = make_prior(shape), len(shape)
    weights = torch.tensor([0.5, -1.0, 2.0], dtype=F64).expand(4, 3)
    direction = directions(4, dim) if directed else None
    measure = PointMeasure(inside(prior, 12).reshape(4, 3, dim), weights, direction)
    expected = dense_residual(prior, measure, measure, 2)
    torch.testing.assert_close(variance(prior, measure, 2).detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", [2, 4])
def test_nothing_is_left_at_the_nodes(order: int) -> None:
    prior = make_prior((6, 5, 5))
    left = variance(prior, PointValues(prior.grid.points()), order)
    assert float(left.detach().abs().max()) < 1e-9


def pair_covariance(prior: GridPrior, x: Tensor, order: int) -> float:
    """c_r(x_1, x_2) of two points x (2, D), by the definition."""
    both = PointMeasure(x[None], torch.ones(1, 2, dtype=F64))
    alone = PointMeasure(x[:, None], torch.ones(2, 1, dtype=F64))
    total = dense_residual(prior, both, both, order).sum()
    return 0.5 * float(total - dense_residual(prior, alone, alone, order).sum())


def at_cells(prior: GridPrior, position: Tensor) -> Tensor:
    """Coordinates of positions in cells from the grid's lower corner."""
    return torch.tensor(prior.grid.lower) + torch.tensor(prior.grid.spacing) * position.to(F64)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_table_holds_the_residual_covariance_of_pairs(dim: int, order: int) -> None:
    prior = make_prior(SHAPES[dim - 1])
    table = ResidualTable.of(Stencil.of(prior, order))
    walk, lattice = PairWalk.of(table, prior, None), table.lattice
    generator = torch.Generator().manual_seed(dim)
    for _ in range(4):
        # offsets inside cells: on a face the two stencils next to it differ a little
        cell = torch.randint(1, 3, (2, dim), generator=generator)
        step = torch.randint(1, lattice.steps, (2, dim), generator=generator)
        assert int((cell * lattice.steps + step).diff(dim=0).abs().max()) <= lattice.reach
        x = at_cells(prior, cell + step / lattice.steps)
        both = PointMeasure(x[None], torch.ones(1, 2, dtype=F64))
        index, weight = list(walk.visits(nodes_of(both, prior.grid, prior.torus_shape)))[1]
        actual = float((table.values[index] * weight).sum().detach())
        assert actual == pytest.approx(2.0 * pair_covariance(prior, x, order), abs=1e-6)


def test_tail_is_the_mean_over_offsets() -> None:
    prior = make_prior((14,))
    table = ResidualTable.of(Stencil.of(prior, 2))
    tail = table.values[-table.tail :].detach()
    assert table.tail == 2 * REACH + 1
    for half in (5, 9, 16):
        offsets = [torch.tensor([[2.0 + j / 4], [2.0 + j / 4 + half / 2]]) for j in range(4)]
        mean = sum(pair_covariance(prior, at_cells(prior, x), 2) for x in offsets) / 4
        assert float(tail[half]) == pytest.approx(mean, abs=1e-7)
    assert ResidualTable.of(Stencil.of(prior, 4)).tail == 0


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_banded_sum_is_the_double_loop(dim: int, order: int) -> None:
    prior = make_prior(((30,), (16, 14), (10, 9, 9))[dim - 1])
    table = ResidualTable.of(Stencil.of(prior, order))
    walk = PairWalk.of(table, prior, 2.0)
    functional = rays(prior, 5)
    source = NodeSource(lambda part: nodes_of(functional[part], prior.grid, prior.torus_shape), 2)
    actual = banded_sum(walk, source, 5).detach()
    nodes = nodes_of(functional, prior.grid, prior.torus_shape)
    lattice, values = table.lattice, table.values.detach()
    place = ((nodes.cell + nodes.offset) * lattice.steps).round().long().tolist()
    fine = ((nodes.offset * table.fine).round().long() % table.fine).tolist()
    expected = torch.zeros(5, dtype=F64)
    for q, r in itertools.combinations_with_replacement(range(len(nodes)), 2):
        if nodes.row[q] != nodes.row[r]:
            continue
        multiple, position = 1, flat_position(fine[q], [table.fine] * dim)
        if q < r:
            assert walk.dense is not None
            multiple = 2 if r - q <= walk.dense else 6 * ((r - q - walk.dense) % 3 == 2)
            position = pair_position(table, place[q], place[r])
        if position >= 0:
            weight = multiple * nodes.weight[q] * nodes.weight[r]
            expected[nodes.row[q]] += weight * values[position]
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)


def flat_position(index: list[int], sides: list[int]) -> int:
    position = 0
    for i, side in zip(index, sides, strict=True):
        position = position * side + i
    return position


def pair_position(table: ResidualTable, first: list[int], second: list[int]) -> int:
    """Where the covariance of two lattice points is tabulated, −1 out of reach."""
    lattice, dim = table.lattice, len(first)
    entry, half = lattice.entry_of(), lattice.steps // 2
    apart = [b - a for a, b in zip(first, second, strict=True)]
    if max(map(abs, apart)) <= lattice.reach:
        keys = [a % lattice.steps * (2 * lattice.reach + 1) for a in first]
        own = [int(entry[k + m + lattice.reach]) for k, m in zip(keys, apart, strict=True)]
        start: int = table.fine**dim
        return start + flat_position(own, [lattice.entries] * dim)
    if table.tail == 0 or max(map(abs, apart)) > (table.tail - 1) * half:
        return -1
    halves = [(abs(m) + half // 2) // half for m in apart]
    end: int = table.tail**dim
    return len(table.values) - end + flat_position(halves, [table.tail] * dim)


def test_pairs_of_an_axis_are_numbered_once() -> None:
    lattice = PairLattice(1, 5)
    entry = lattice.entry_of().reshape(5, 2 * lattice.reach + 1)
    offset, apart = lattice.representatives()
    assert lattice.reach == BAND * 5
    assert sorted(set(entry.flatten().tolist())) == list(range(lattice.entries))
    assert entry[offset, apart + lattice.reach].tolist() == list(range(lattice.entries))
    assert torch.equal(entry[1:], entry[1:].flip(0, 1))
    assert torch.equal(entry[0], entry[0].flip(0))


KERNELS: dict[str, Callable[..., AbstractKernel]] = {
    "matern12": Matern12,
    "matern32": Matern32,
    "matern52": Matern52,
}


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(40,), (16, 14), (12, 11, 9)])
def test_rays_agree_with_the_definition(shape: tuple[int, ...], name: str, order: int) -> None:
    check = checked(shape, name, order, 2.0, 40)
    assert check.count == 40
    # in one dimension every ray runs along the nodes, where nothing averages out
    assert check.median < (0.08 if len(shape) == 1 else 0.04)
    assert check.percentile95 < (0.25 if len(shape) == 1 else 0.12)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("name", ["matern12", "matern32"])
def test_a_thousand_rays_are_within_five_percent(name: str, order: int, scale: float) -> None:
    check = checked((25, 25, 13), name, order, scale, 1000)
    assert check.median < 0.05
    assert check.percentile95 < 0.1


def checked(
    shape: tuple[int, ...], name: str, order: int, scale: float, count: int
) -> ResidualCheck:
    prior = make_prior(shape, KERNELS[name](scale, 1.3, dim=len(shape)))
    return residual_check(LocalFeatures(prior, order=order), rays(prior, count, seed=2))


@pytest.mark.parametrize("shape", SHAPES)
def test_definition_is_the_dense_one(shape: tuple[int, ...]) -> None:
    prior = make_prior(shape)
    features = LocalFeatures(prior, order=2)
    points = PointValues(inside(prior, 5))
    measure = PointMeasure(points.x[:, None], torch.ones(5, 1, dtype=F64))
    expected = dense_residual(prior, points, measure, 2)
    exact = exact_residual_variance(features, points)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-6)
    stacked = Stacked((rays(prior, 3), points))[torch.tensor([4, 1, 7])]
    parts = exact_residual_variance(features, stacked)
    torch.testing.assert_close(parts[[0, 2]], expected[[1, 4]], rtol=0, atol=1e-6)
    alone = exact_residual_variance(features, rays(prior, 3)[1:2])
    torch.testing.assert_close(parts[1:2], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(9,), (6, 5), (4, 4, 4)])
def test_gradients_in_every_kernel_parameter(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual_table, "_STEPS", {1: 8, 2: 4, 3: 4})  # small tables are quick
    monkeypatch.setattr(residual_table, "REACH", 3)
    dim = len(shape)
    prior = make_prior(shape)
    functional = Stacked(
        (
            rays(prior, 2),
            PointValues(inside(prior, 2)),
            Derivatives(inside(prior, 2, seed=5), directions(2, dim)),
            PointMeasure(inside(prior, 2, seed=6)[None], torch.ones(1, 2, dtype=F64)),
        )
    )

    def outputs(kernel: AbstractKernel) -> Tensor:
        built = GridPrior.padded(kernel, prior.grid, torus_shape=prior.torus_shape)
        return variance(built, functional, 2)

    objective = of_parameters(Matern32((1.0,) * dim), outputs)
    scales = torch.linspace(0.5, 0.8, dim, dtype=F64, requires_grad=True)
    log_variance = torch.tensor(0.3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        objective, (scales, log_variance), atol=1e-6, rtol=1e-4, fast_mode=dim > 1
    )


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    prior = make_prior((6, 5, 5))
    functional = Stacked((rays(prior, 9), PointValues(inside(prior, 9))))
    whole = variance(prior, functional, 2).detach()
    monkeypatch.setattr(residuals, "_CHUNK_NODES", 20)
    monkeypatch.setattr(residuals, "_CHUNK_ENTRIES", 20)
    torch.testing.assert_close(variance(prior, functional, 2).detach(), whole, rtol=1e-12, atol=0)


def test_float32_is_the_rounded_float64() -> None:
    single = variance(make_prior((8, 7), dtype=torch.float32), rays(make_prior((8, 7)), 6), 4)
    double = variance(make_prior((8, 7)), rays(make_prior((8, 7)), 6), 4)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, double.float(), rtol=1e-6, atol=0)


def test_variance_scales_the_residuals() -> None:
    base = make_prior((8, 7), Matern32(2.0, 1.0, dim=2))
    scaled = make_prior((8, 7), Matern32(2.0, 7.0, dim=2))
    functional = Stacked((rays(base, 6), PointValues(inside(base, 3))))
    left = variance(base, functional, 4).detach()
    assert bool((left > 0).all())
    torch.testing.assert_close(
        variance(scaled, functional, 4).detach(), 7.0 * left, rtol=1e-8, atol=0
    )


def test_rays_through_the_padding_follow_the_torus() -> None:
    prior = make_prior((8, 7))
    start = torch.tensor([[-1.9, -0.6], [-1.9, 0.4]], dtype=F64)
    across = LineIntegrals.segment(start, start + 3.0)
    nodes = nodes_of(across, prior.grid, prior.torus_shape)
    assert int(nodes.cell.max()) >= max(prior.grid.shape)
    shift = torch.tensor(prior.grid.spacing, dtype=F64)
    within = LineIntegrals.segment(start + shift, start + shift + 3.0)
    torch.testing.assert_close(
        variance(prior, across, 2).detach(), variance(prior, within, 2).detach(), rtol=1e-9, atol=0
    )


def test_measures_of_many_points_take_the_table() -> None:
    prior = make_prior((16, 14), Matern32(2.0, dim=2))
    features = LocalFeatures(prior, MonteCarlo(12, seed=4), order=2)
    residual = LocalResiduals(prior, MonteCarlo(12, seed=4), 2)
    functional = rays(prior, 30)
    exact = exact_residual_variance(features, functional)
    error = residual.variance(functional).value.detach() / exact - 1.0
    assert float(error.abs().median()) < 0.1


def test_negative_values_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = ResidualVariance.of(torch.tensor([0.5, -1e-12, 2.0], dtype=F64), torch.float32)
    assert result.clamped == 1
    assert result.value.tolist() == [0.5, 0.0, 2.0]
    assert "1 of 3 residual variances were negative" in caplog.text


def test_rays_without_weight_leave_nothing() -> None:
    prior = make_prior((8, 7))
    ray = rays(prior, 2)
    empty = LineIntegrals(ray.origin, ray.direction, ray.edges, 0.0 * ray.weights)
    assert variance(prior, empty, 2).tolist() == [0.0, 0.0]


def test_points_take_four_nodes_per_axis() -> None:
    prior = make_prior((8, 7))
    chosen = stencil_order(prior, PointValues(inside(prior, 20)), torch.ones(20, dtype=F64))
    assert chosen.order == 4
    assert chosen.bytes4 > chosen.bytes2 > 0


@pytest.mark.parametrize(
    ("noise", "memory", "order", "words"),
    [
        (1e3, 2**31, 2, "only"),
        (1e-6, 2**31, 4, "lower"),
        (1e-6, 1000, 4, "lower"),
        (0.05, 1000, 2, "bytes"),
        (0.05, 2**31, 4, "lower"),
    ],
)
def test_rays_take_two_where_that_does_as_well(
    noise: float, memory: int, order: int, words: str
) -> None:
    prior = make_prior((10, 9), Matern52(2.5, dim=2))
    functional = rays(prior, 40)
    variances = torch.full((40,), noise, dtype=F64)
    chosen = stencil_order(prior, functional, variances, memory=memory, sample=30, gain=0.05)
    assert chosen.order == order
    assert words in chosen.reason
    assert chosen.ratio2 > chosen.ratio4 > 0


def test_stencil_order_refuses_noise_of_another_length() -> None:
    prior = make_prior((8, 7))
    with pytest.raises(ValueError, match=r"noise_variance must be \(3,\)"):
        stencil_order(prior, PointValues(inside(prior, 3)), torch.ones(2, dtype=F64))
