"""Data as nodes on the torus: exact moments, steps of rays, wrapping, order of the rows."""

import pytest
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.features import Nodes, nodes_of
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)

SHAPES = [(14,), (7, 6), (5, 4, 6)]


def _grid(shape: tuple[int, ...]) -> RegularGrid:
    spacing = (0.5, 1.0, 2.0)[: len(shape)]
    return RegularGrid(tuple(-0.3 * h for h in spacing), spacing, shape)


def _torus(grid: RegularGrid) -> tuple[int, ...]:
    return tuple(m + 4 for m in grid.shape)


def _points(grid: RegularGrid, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(count, grid.dim, dtype=torch.float64, generator=generator)
    extent = torch.tensor(grid.upper) - torch.tensor(grid.lower)
    return torch.tensor(grid.lower, dtype=torch.float64) + unit * extent


def _rays(grid: RegularGrid, segments: int, count: int = 9) -> LineIntegrals:
    plain = LineIntegrals.segment(_points(grid, count, 1), _points(grid, count, 2))
    generator = torch.Generator().manual_seed(3)
    cuts = torch.rand(count, segments - 1, dtype=torch.float64, generator=generator).sort(-1)[0]
    cuts = torch.nn.functional.pad(cuts, (1, 1))
    cuts[:, -1] = 1.0
    weights = torch.rand(count, segments, dtype=torch.float64, generator=generator)
    weights[:, ::3] = 0.0
    edges = 0.1 + plain.edges[:, 1:] * cuts * 0.9
    return LineIntegrals(plain.origin, plain.direction, edges, weights + (segments == 1))


def _positions(nodes: Nodes, grid: RegularGrid) -> Tensor:
    """Coordinates of nodes that lie in the box."""
    lower = torch.tensor(grid.lower, dtype=torch.float64)
    return lower + (nodes.cell + nodes.offset) * torch.tensor(grid.spacing, dtype=torch.float64)


def _moments(nodes: Nodes, grid: RegularGrid) -> Tensor:
    ones = torch.ones(len(nodes), 1, dtype=torch.float64)
    terms = nodes.weight[:, None] * torch.cat([ones, _positions(nodes, grid)], dim=-1)
    return torch.zeros(nodes.count, 1 + grid.dim, dtype=torch.float64).index_add_(
        0, nodes.row, terms
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_points_are_their_own_nodes(shape: tuple[int, ...]) -> None:
    grid = _grid(shape)
    x = _points(grid, 20, 0)
    nodes = nodes_of(PointValues(x), grid, _torus(grid))
    torch.testing.assert_close(_positions(nodes, grid), x, rtol=0, atol=1e-12)
    assert nodes.row.tolist() == list(range(20))
    assert bool((nodes.weight == 1).all())
    assert bool(((nodes.offset >= 0) & (nodes.offset < 1)).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_points_of_the_grid_have_no_offset(shape: tuple[int, ...]) -> None:
    grid = _grid(shape)
    nodes = nodes_of(PointValues(grid.points()), grid, _torus(grid))
    assert bool((nodes.offset == 0).all())
    index = torch.cartesian_prod(*(torch.arange(m) for m in shape)).reshape(-1, grid.dim)
    assert torch.equal(nodes.cell, index)


def test_points_below_the_box_wrap_around_the_torus() -> None:
    grid = RegularGrid((0.0,), (1.0,), (5,))
    nodes = nodes_of(PointValues(torch.tensor([[-0.25], [4.5]]).double()), grid, (9,))
    assert nodes.cell.tolist() == [[8], [4]]
    torch.testing.assert_close(nodes.offset, torch.tensor([[0.75], [0.5]]).double())


@pytest.mark.parametrize("segments", [1, 2, 7, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_rays_keep_their_weight_and_its_centroid(shape: tuple[int, ...], segments: int) -> None:
    grid = _grid(shape)
    rays = _rays(grid, segments)
    nodes = nodes_of(rays, grid, _torus(grid))
    torch.testing.assert_close(_moments(nodes, grid), rays.moments(), rtol=1e-12, atol=1e-12)
    assert bool((nodes.weight > 0).all())


def _slow_steps(rays: LineIntegrals, grid: RegularGrid, per_cell: float) -> list[list[float]]:
    """[row, track coordinate, weight] of every step by loops over rays, steps and segments."""
    found = []
    for n in range(len(rays)):
        edges, weights = rays.edges[n].tolist(), rays.weights[n].tolist()
        cells = float((rays.direction[n] / torch.tensor(grid.spacing)).norm())
        cells *= edges[-1] - edges[0]
        steps = max(2, int(torch.tensor(per_cell * cells).ceil()))
        for i in range(steps):
            low = edges[0] + i * (edges[-1] - edges[0]) / steps
            high = edges[0] + (i + 1) * (edges[-1] - edges[0]) / steps
            mass = moment = 0.0
            for a, b, w in zip(edges[:-1], edges[1:], weights, strict=True):
                first, last = max(a, low), min(b, high)
                if last > first:
                    mass += w * (last - first)
                    moment += 0.5 * w * (last**2 - first**2)
            if mass > 0:
                found.append([n, moment / mass, mass])
    return found


@pytest.mark.parametrize("segments", [1, 5, 60])
@pytest.mark.parametrize("per_cell", [0.7, 2.0])
def test_steps_of_rays_against_loops(segments: int, per_cell: float) -> None:
    grid = _grid((7, 6))
    rays = _rays(grid, segments)
    nodes = nodes_of(rays, grid, _torus(grid), per_cell)
    slow = torch.tensor(_slow_steps(rays, grid, per_cell), dtype=torch.float64)
    assert nodes.row.tolist() == slow[:, 0].long().tolist()
    torch.testing.assert_close(nodes.weight, slow[:, 2], rtol=1e-9, atol=1e-12)
    points = rays.origin[nodes.row] + slow[:, 1:2] * rays.direction[nodes.row]
    torch.testing.assert_close(_positions(nodes, grid), points, rtol=0, atol=1e-9)


def test_the_number_of_nodes_does_not_grow_with_the_segments() -> None:
    grid = _grid((7, 6))
    few, many = (nodes_of(_weighted(grid, j), grid, _torus(grid)) for j in (2, 500))
    assert len(few) == len(many)


def _weighted(grid: RegularGrid, segments: int) -> LineIntegrals:
    plain = LineIntegrals.segment(_points(grid, 9, 1), _points(grid, 9, 2))
    edges = plain.edges[:, 1:] * torch.linspace(0, 1, segments + 1, dtype=torch.float64)
    weights = torch.linspace(2, 1, segments, dtype=torch.float64).expand(9, -1)
    return LineIntegrals(plain.origin, plain.direction, edges, weights)


def test_rays_of_no_weight_have_no_nodes() -> None:
    grid = _grid((7, 6))
    start, end = _points(grid, 3, 1), _points(grid, 3, 2)
    end[1] = start[1]
    nodes = nodes_of(LineIntegrals.segment(start, end), grid, _torus(grid))
    assert set(nodes.row.tolist()) == {0, 2}
    assert nodes.count == 3


def test_stacked_data_keep_the_order_of_their_rows() -> None:
    grid = _grid((7, 6))
    stacked = Stacked((PointValues(_points(grid, 4, 0)), _rays(grid, 5), _measure(grid)))
    order = torch.randperm(len(stacked), generator=torch.Generator().manual_seed(0))
    nodes = nodes_of(stacked[order], grid, _torus(grid))
    assert bool((nodes.row.diff() >= 0).all())
    torch.testing.assert_close(_moments(nodes, grid), stacked.moments()[order])


def _measure(grid: RegularGrid) -> PointMeasure:
    points = _points(grid, 6, 5).reshape(2, 3, grid.dim)
    return PointMeasure(points, torch.tensor([[1.0, -2.0, 0.0], [0.5, 0.0, 1.0]]))


def test_derivatives_are_no_sums_of_values() -> None:
    grid = _grid((7, 6))
    slopes: AbstractFunctional = Derivatives.partial(_points(grid, 2, 0), 0)
    with pytest.raises(ValueError, match="differentiates the field"):
        nodes_of(slopes, grid, _torus(grid))


def test_data_beyond_the_padding_are_refused() -> None:
    grid = RegularGrid((0.0,), (1.0,), (5,))
    with pytest.raises(ValueError, match="1 of 1 points of the data lie outside the grid"):
        nodes_of(PointValues(torch.tensor([[6.9]]).double()), grid, (9,))
