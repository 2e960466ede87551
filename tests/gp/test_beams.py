"""Rays that share the nodes of beams, against rays that have their own."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import NestedGrids, RegularGrid
from dustmap.gp.features import BeamTable, beamed_interpolation, interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.linalg import AbstractOperator, SparseOperator
from dustmap.sky.observations import HealpixBeams

HALF = torch.tensor([50.0, 40.0, 30.0], dtype=torch.float64)
GRID = RegularGrid((-50.0, -40.0, -30.0), (5.0, 5.0, 5.0), (21, 17, 13))


def positions(count: int, part: float = 1.0, seed: int = 0) -> Tensor:
    unit = torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return part * HALF * (2.0 * unit - 1.0)


def smooth(length: float) -> Tensor:
    """A density (M,) > 0 that varies over `length`."""
    x, y, z = (GRID.points() * (2.0 * math.pi / length)).unbind(-1)
    return 1.2 + torch.sin(x) * torch.cos(y + 0.3) + 0.1 * torch.sin(z)


def beamed(rays: LineIntegrals, nside: int = 16, dtype: torch.dtype = torch.float64) -> Tensor:
    return dense(beamed_interpolation(rays, GRID, HealpixBeams(nside), dtype=dtype))


def dense(operator: AbstractOperator) -> Tensor:
    """Rows (N, M), by the adjoint, of which there are fewer products."""
    return operator.rmatmul(torch.eye(operator.shape[0], dtype=operator.dtype))


def weighted(count: int) -> LineIntegrals:
    """Rays whose weight falls in three steps, as of stars with uncertain distances."""
    plain = LineIntegrals.from_observer(positions(count, 0.8))
    share = torch.tensor([0.0, 0.5, 0.8, 1.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.7, 0.2], dtype=torch.float64).expand(count, 3)
    return LineIntegrals(plain.origin, plain.direction, plain.edges[:, 1:] * share, weights)


def test_weights_are_positive_and_a_constant_is_exact() -> None:
    rays = LineIntegrals.from_observer(positions(300))
    rows = beamed(rays)
    assert rows.min() > -1e-12
    torch.testing.assert_close(rows.sum(1), rays.edges[:, 1], rtol=1e-12, atol=0.0)


def test_uncertain_distances_are_weights_along_the_beams() -> None:
    rays = weighted(100)
    rows = beamed(rays)
    assert rows.min() > -1e-12
    total = (rays.weights * rays.edges.diff(dim=1)).sum(1)
    torch.testing.assert_close(rows.sum(1), total, rtol=1e-12, atol=0.0)
    density = smooth(80.0).double()
    exact = interpolation(rays, GRID, dtype=torch.float64).matmul(density)
    torch.testing.assert_close(rows @ density, exact, rtol=2e-2, atol=0.0)


def test_a_ray_along_a_beam_to_a_knot_is_exact() -> None:
    beams = HealpixBeams(8)
    rays = LineIntegrals.from_observer(25.0 * beams.directions[::7])
    exact = interpolation(rays, GRID, dtype=torch.float64)
    torch.testing.assert_close(beamed(rays, 8), dense(exact), rtol=1e-9, atol=1e-9)


def test_errors_fall_with_the_square_of_the_distance_of_beams() -> None:
    places = positions(1000)
    rays = LineIntegrals.from_observer(25.0 * places / places.norm(dim=1, keepdim=True))  # a knot
    density = smooth(60.0).double()
    exact = interpolation(rays, GRID, dtype=torch.float64).matmul(density)
    errors = []
    for nside in (8, 16):
        rows = beamed_interpolation(rays, GRID, HealpixBeams(nside), dtype=torch.float64)
        errors.append(float((rows.matmul(density) / exact - 1.0).square().mean().sqrt()))
    assert errors[1] < 0.4 * errors[0]
    assert errors[1] < 3e-3


def test_the_adjoint_belongs_to_the_product() -> None:
    rays = LineIntegrals.from_observer(positions(200))
    rows = beamed_interpolation(rays, GRID, HealpixBeams(16), dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(11, GRID.size, dtype=torch.float64, generator=random)
    y = torch.randn(11, 200, dtype=torch.float64, generator=random)
    torch.testing.assert_close((rows.matmul(x) * y).sum(1), (rows.rmatmul(y) * x).sum(1))
    torch.testing.assert_close(rows.matmul(x[3]), rows.matmul(x)[3])


def test_rows_that_do_not_fit_the_memory_are_recomputed() -> None:
    rays = LineIntegrals.from_observer(positions(100))
    beams = HealpixBeams(8)
    kept = beamed_interpolation(rays, GRID, beams, dtype=torch.float64)
    anew = beamed_interpolation(rays, GRID, beams, memory=100, dtype=torch.float64)
    density = smooth(60.0).double()
    torch.testing.assert_close(anew.matmul(density), kept.matmul(density))


def test_rays_from_elsewhere_have_their_own_cells() -> None:
    start = positions(50, 0.5, seed=3)
    rays = LineIntegrals.segment(start, positions(50, 0.9, seed=4))
    exact = interpolation(rays, GRID, dtype=torch.float64)
    torch.testing.assert_close(beamed(rays), dense(exact))
    mixed = LineIntegrals.segment(
        torch.cat([start, torch.zeros_like(start)]), positions(100, 0.9, seed=4)
    )
    torch.testing.assert_close(beamed(mixed)[:50], dense(exact))


def test_what_becomes_of_a_ray_depends_on_no_other() -> None:
    rays = LineIntegrals.from_observer(positions(120))
    parts = [beamed(rays[:37]), beamed(rays[37:])]
    torch.testing.assert_close(torch.cat(parts), beamed(rays), rtol=1e-12, atol=1e-12)


def test_a_table_of_the_whole_box_gives_the_same_rows() -> None:
    rays = LineIntegrals.from_observer(positions(60))
    table = BeamTable.of(GRID, HealpixBeams(8), dtype=torch.float64)
    expanded = table.expansion().matmul(smooth(60.0).double())
    found = table.taps(rays).matmul(expanded[:, None])[:, 0]
    rows = beamed_interpolation(rays, GRID, HealpixBeams(8), dtype=torch.float64)
    torch.testing.assert_close(found, rows.matmul(smooth(60.0).double()))


def test_pixels_are_powers_of_two() -> None:
    with pytest.raises(ValueError, match="of beams: expected a power of two, 1 to 8192, got 12"):
        HealpixBeams(12)


def test_bytes_are_known_before_anything_is_built() -> None:
    rays = LineIntegrals.from_observer(positions(4000))
    table = BeamTable.of(GRID, HealpixBeams(16))
    rows, expansion = table.rows(rays), table.expansion()
    assert isinstance(rows, SparseOperator)
    work = 3 * 8 * table.columns * 4
    held = rows.bytes + expansion.bytes + work
    assert table.planned_bytes(rays) == pytest.approx(held, rel=0.1)


def test_beams_go_through_nested_grids() -> None:
    coarse = RegularGrid((-60.0, -40.0, -40.0), (10.0,) * 3, (13, 9, 9))
    nested = NestedGrids((coarse, RegularGrid((-20.0,) * 3, (2.5,) * 3, (17,) * 3)))
    rays, beams = weighted(200), HealpixBeams(16)
    x, y, z = (nested.points() * (2.0 * math.pi / 90.0)).unbind(-1)
    density = 1.2 + torch.sin(x) * torch.cos(y + 0.3) + 0.1 * torch.sin(z)
    rows = beamed_interpolation(rays, nested, beams, dtype=torch.float64)
    exact = interpolation(rays, nested, dtype=torch.float64)
    torch.testing.assert_close(rows.matmul(density), exact.matmul(density), rtol=2e-2, atol=0.0)
    total = (rays.weights * rays.edges.diff(dim=1)).sum(1)
    torch.testing.assert_close(rows.matmul(torch.ones_like(density)), total, rtol=1e-9, atol=0)
    table = BeamTable.of(nested, beams, rays, torch.float64)
    assert table.step == 2.5
    assert table.planned_bytes(rays) > 0
