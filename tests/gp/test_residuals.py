"""Residual variances of local weights against their definition by dense algebra."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior
from dustmap.gp.features._local import LocalFeatures
from dustmap.gp.features._nodes import Nodes, nodes_of
from dustmap.gp.features._residuals import PairWalk, banded_sum
from dustmap.gp.features._stencil import BAND, REACH, PairLattice, ResidualTable, Stencil
from dustmap.gp.functionals import (
    Derivatives,
    PointMeasure,
    PointValues,
)
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, Matern52
from tests.combinations import covering
from tests.gp.residual_cases import (
    F64,
    SHAPES,
    dense_residual,
    directions,
    inside,
    make_prior,
    rays,
    variance,
)
from tests.gp.residual_definition import ResidualCheck, residual_check


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
    walk, lattice = PairWalk.of(table, prior.grid, prior.torus_shape, None), table.lattice
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


@pytest.mark.parametrize(("order", "dim"), covering([2, 4], [1, 2, 3]))
def test_banded_sum_is_the_double_loop(dim: int, order: int) -> None:
    prior = make_prior(((30,), (16, 14), (10, 9, 9))[dim - 1])
    table = ResidualTable.of(Stencil.of(prior, order))
    walk = PairWalk.of(table, prior.grid, prior.torus_shape, 2.0)
    functional = rays(prior, 5)

    def source(part: slice) -> Nodes:
        return nodes_of(functional[part], prior.grid, prior.torus_shape)

    actual = banded_sum(walk, source, 2, 5).detach()
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
    lattice = PairLattice(5)
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


@pytest.mark.parametrize(
    ("order", "name", "shape"),
    covering([2, 4], KERNELS, [(40,), (16, 14), (12, 11, 9)], together=2),
)
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
