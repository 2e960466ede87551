"""Multilinear rows on the box: exact row sums, no negative entry, a slow twin."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.features import _local_weights, interpolation
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)
from dustmap.linalg import AbstractOperator
from tests.contracts import operators as contracts
from tests.contracts.operators import OperatorCase

SHAPES = [(9,), (5, 4), (4, 3, 5)]


def _grid(shape: tuple[int, ...]) -> RegularGrid:
    spacing = (0.5, 1.0, 0.8)[: len(shape)]
    return RegularGrid(tuple(-0.7 * h for h in spacing), spacing, shape)


def _inside(grid: RegularGrid, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(count, grid.dim, dtype=torch.float64, generator=generator)
    lower, upper = (torch.tensor(v, dtype=torch.float64) for v in (grid.lower, grid.upper))
    return lower + unit * (upper - lower)


def _data(grid: RegularGrid, count: int = 6) -> Stacked:
    plain = LineIntegrals.segment(_inside(grid, count, 1), _inside(grid, count, 2))
    edges = plain.edges[:, 1:] * torch.tensor([0.0, 0.2, 0.7, 1.0])
    weights = torch.tensor([1.0, 0.0, 0.4]).expand(count, -1)
    rays = LineIntegrals(plain.origin, plain.direction, edges, weights)
    corners = PointValues(grid.points()[[0, -1, 1]])
    stacked = Stacked((PointValues(_inside(grid, count, 0)), rays, plain, corners))
    return stacked[torch.randperm(len(stacked), generator=torch.Generator().manual_seed(0))]


def _slow_value(rho: Tensor, grid: RegularGrid, x: Tensor) -> float:
    """The multilinear interpolant at one point, corner by corner."""
    position = (x - torch.tensor(grid.lower)) / torch.tensor(grid.spacing)
    corner = [min(int(p), m - 2) for p, m in zip(position, grid.shape, strict=True)]
    total = 0.0
    for bits in itertools.product((0, 1), repeat=grid.dim):
        share = 1.0
        for p, c, bit in zip(position.tolist(), corner, bits, strict=True):
            share *= (p - c) if bit else (1 - (p - c))
        place = tuple(c + bit for c, bit in zip(corner, bits, strict=True))
        total += share * float(rho.reshape(grid.shape)[place])
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_points_against_loops(shape: tuple[int, ...]) -> None:
    grid = _grid(shape)
    rho = torch.rand(grid.size, dtype=torch.float64, generator=torch.Generator())
    x = torch.cat([_inside(grid, 20, 3), grid.points()])
    actual = interpolation(PointValues(x), grid, dtype=torch.float64).matmul(rho)
    expected = torch.tensor([_slow_value(rho, grid, point) for point in x], dtype=torch.float64)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual[20:], rho, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_constants_and_gradients_are_integrated_exactly(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    grid = _grid(shape)
    data = _data(grid)
    L = interpolation(data, grid, dtype=dtype)
    assert L.dtype == dtype
    assert L.shape == (len(data), grid.size)
    linear = torch.cat([torch.ones(grid.size, 1), grid.points()], dim=-1)
    found = L.matmul(linear.mT.to(dtype).contiguous()).mT.double()
    atol = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(found, data.moments(), rtol=0, atol=atol)
    assert float(L.to_dense().min()) >= 0


def _interpolant(rho: Tensor, grid: RegularGrid, x: Tensor) -> Tensor:
    """Values (N,) at points x (N, D), axis by axis."""
    lower, spacing = (torch.tensor(v, dtype=torch.float64) for v in (grid.lower, grid.spacing))
    shape = torch.tensor(grid.shape)
    position = (x - lower) / spacing
    corner = torch.minimum(position.floor().long().clamp_min(0), shape - 2)
    values = torch.zeros(len(x), dtype=torch.float64)
    for bits in itertools.product((0, 1), repeat=grid.dim):
        shift = torch.tensor(bits)
        share = torch.where(shift == 1, position - corner, 1 - (position - corner)).prod(-1)
        values += share * rho.reshape(grid.shape)[tuple((corner + shift).unbind(-1))]
    return values


def _fine_integral(rho: Tensor, grid: RegularGrid, rays: LineIntegrals, n: int) -> float:
    """∫ w ρ ds of one ray, 7 points between any two of its edges and planes of cells."""
    cuts = rays.edges[n].tolist()
    for d, axis in enumerate(grid.axes()):
        if float(rays.direction[n, d]) != 0:
            cuts += ((axis - rays.origin[n, d]) / rays.direction[n, d]).tolist()
    first, last = float(rays.edges[n, 0]), float(rays.edges[n, -1])
    cuts = sorted({cut for cut in cuts if first <= cut <= last})
    unit, share = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(7))
    total = 0.0
    for low, high in itertools.pairwise(cuts):
        s = 0.5 * (low + high) + 0.5 * (high - low) * unit
        segment = int((rays.edges[n] <= 0.5 * (low + high)).sum()) - 1
        values = _interpolant(rho, grid, rays.origin[n] + s[:, None] * rays.direction[n])
        total += float(rays.weights[n, segment]) * 0.5 * (high - low) * float(share @ values)
    return total


def _awkward_ends(grid: RegularGrid) -> tuple[Tensor, Tensor]:
    """Along axes, within planes and edges of cells, on faces, within one cell, of no length."""
    places = grid.points()
    start, end = _inside(grid, 12, 1), _inside(grid, 12, 2)
    end[0] = start[0] + torch.eye(grid.dim)[0] * 0.3  # along an axis
    start[1], end[1] = places[0], places[-1]  # from corner to corner
    start[2], end[2] = places[-1], places[0]
    start[3], end[3] = places[0], places[grid.shape[-1] - 1]  # along an edge of the box
    start[4], end[4] = places[-1], places[-grid.shape[-1]]
    start[5, 0], end[5, 0] = places[grid.size // 2, 0], places[grid.size // 2, 0]  # in a plane
    start[6, -1], end[6, -1] = grid.upper[-1], grid.upper[-1]  # in a face
    end[7] = start[7] + 1e-3  # shorter than a cell
    end[8] = start[8]  # nothing
    start[9] = places[grid.size // 2]  # from a node
    end[10] = places[grid.size // 2]
    upper = torch.tensor(grid.upper, dtype=torch.float64)
    return torch.minimum(start, upper), torch.minimum(end, upper)


@pytest.mark.parametrize("segments", [1, 2, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_rays_are_integrals_of_the_interpolant(shape: tuple[int, ...], segments: int) -> None:
    grid = _grid(shape)
    rho = torch.rand(grid.size, dtype=torch.float64, generator=torch.Generator())
    plain = LineIntegrals.segment(*_awkward_ends(grid))
    cuts = torch.linspace(0.2 * (segments > 1), 1, segments + 1, dtype=torch.float64)
    if segments > 2:
        cuts[3] = cuts[4]  # a segment of no length, and one of no weight
    weights = torch.rand(12, segments, dtype=torch.float64, generator=torch.Generator()) + 0.1
    weights[:, 1::4] = 0.0
    rays = LineIntegrals(plain.origin, plain.direction, plain.edges[:, 1:] * cuts, weights)
    L = interpolation(rays, grid, dtype=torch.float64)
    expected = [_fine_integral(rho, grid, rays, n) for n in range(12)]
    found = L.matmul(rho).tolist()
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-13)
    rows = L.to_dense()
    torch.testing.assert_close(rows.sum(-1), rays.moments()[:, 0], rtol=1e-13, atol=1e-15)
    assert float(rows.min()) >= 0
    assert not bool(rows[8].any())


def test_halves_of_a_ray_add_up() -> None:
    grid = _grid((4, 3, 5))
    start, end = _inside(grid, 40, 1), _inside(grid, 40, 2)
    rows = [
        interpolation(LineIntegrals.segment(a, b), grid, dtype=torch.float64).to_dense()
        for a, b in ((start, end), (start, 0.3 * start + 0.7 * end), (0.3 * start + 0.7 * end, end))
    ]
    torch.testing.assert_close(rows[0], rows[1] + rows[2], rtol=0, atol=1e-12)


def _case() -> OperatorCase:
    grid = _grid((5, 4))
    data = _data(grid)

    def build(dtype: torch.dtype) -> AbstractOperator:
        return interpolation(data, grid, dtype=dtype)

    return OperatorCase("interpolation", build, build(torch.float64).to_dense())


@pytest.mark.parametrize("check", contracts.OPERATOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", [_case()], ids=lambda case: case.name)
def test_operator_contract(case: OperatorCase, check: Callable[[OperatorCase], None]) -> None:
    check(case)


def test_recomputed_rows_in_chunks_are_the_stored_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = _grid((4, 3, 5))
    data = _data(grid, 30)
    kept = interpolation(data, grid, dtype=torch.float64).to_dense()
    monkeypatch.setattr(_local_weights, "CHUNK_ENTRIES", 500)
    streamed = interpolation(data, grid, 10, torch.float64).to_dense()
    torch.testing.assert_close(streamed, kept, rtol=0, atol=1e-15)


@pytest.mark.parametrize("memory", [2**31, 10])
def test_products_are_differentiable_in_the_field(memory: int) -> None:
    grid = _grid((5, 4))
    L = interpolation(_data(grid, 3), grid, memory, torch.float64)
    rho = torch.rand(2, grid.size, dtype=torch.float64, generator=torch.Generator())
    assert torch.autograd.gradcheck(L.matmul, (rho.requires_grad_(),))


def test_points_a_rounding_error_beyond_a_face_stay_at_it() -> None:
    grid = _grid((5, 4))
    lower, upper = (torch.tensor(v, dtype=torch.float64) for v in (grid.lower, grid.upper))
    x = torch.stack([lower - 1e-7, upper + 1e-7])
    L = interpolation(PointValues(x), grid, dtype=torch.float64).to_dense()
    expected = torch.zeros_like(L)
    expected[0, 0] = expected[1, -1] = 1.0
    torch.testing.assert_close(L, expected)


def _slopes(x: Tensor) -> list[AbstractFunctional]:
    slopes = Derivatives.partial(x, 0)
    measure = PointMeasure(x[:, None], torch.ones(len(x), 1), slopes.direction)
    return [slopes, measure, Stacked((PointValues(x), slopes))]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_derivatives_are_refused(kind: int) -> None:
    grid = _grid((5, 4))
    with pytest.raises(ValueError, match="Derivatives cannot be interpolated"):
        interpolation(_slopes(_inside(grid, 2, 0))[kind], grid)


def test_data_outside_the_box_are_refused() -> None:
    grid = _grid((5, 4))
    x = _inside(grid, 3, 0)
    x[1, 0] = grid.upper[0] + 0.1
    with pytest.raises(ValueError, match="1 of 3 points of the data lie outside the box"):
        interpolation(PointValues(x), grid)
