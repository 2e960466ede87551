"""Surfaces of constant density: closed, on their level, and of the area of what they surround."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.view import Surface, iso_surface

GRID = RegularGrid((-30.0, -42.0, -24.0), (5.0, 6.0, 4.0), (13, 15, 13))
LEVEL = 0.004


def ball(grid: RegularGrid, sigma: float) -> NDArray[np.float32]:
    """Return 0.02 exp(−r²/2σ²) (z, y, x), a little beside a node."""
    points = grid.points().numpy().reshape(*grid.shape, 3).transpose(2, 1, 0, 3)
    r2 = ((points - (0.7, -1.1, 0.4)) ** 2).sum(-1)
    return np.asarray(0.02 * np.exp(-0.5 * r2 / sigma**2), np.float32)


def rough() -> NDArray[np.float32]:
    """Return noise from voxel to voxel, which has every set of corners, in a shell of zeros."""
    density = np.zeros(GRID.shape[::-1], np.float32)
    inner = density[1:-1, 1:-1, 1:-1]
    inner[:] = 2.0 * LEVEL * np.random.default_rng(4).random(inner.shape)
    return density


def sides(surface: Surface) -> Counter[tuple[int, int]]:
    t = surface.triangles
    return Counter(map(tuple, np.concatenate([t[:, [0, 1]], t[:, [1, 2]], t[:, [2, 0]]]).tolist()))


@pytest.mark.parametrize("density", [ball(GRID, 9.0), rough()], ids=["ball", "rough"])
def test_every_vertex_is_on_the_level(density: NDArray[np.float32]) -> None:
    surface = iso_surface(density, LEVEL, GRID)
    between = DustMap.from_arrays(GRID, {Quantity.MEAN: density}, "A_V")
    np.testing.assert_allclose(between.mean_at(surface.vertices), LEVEL, rtol=1e-6)


@pytest.mark.parametrize("density", [ball(GRID, 9.0), rough()], ids=["ball", "rough"])
def test_surfaces_are_closed(density: NDArray[np.float32]) -> None:
    """Every side of a triangle is that of one other, in the opposite direction."""
    count = sides(iso_surface(density, LEVEL, GRID))
    assert set(count.values()) == {1}
    assert all((b, a) in count for a, b in count)


def test_surfaces_end_at_the_faces_of_the_box_alone() -> None:
    density = np.ascontiguousarray(rough()[2:-2, 2:-2, 2:-2])
    grid = RegularGrid((0.0,) * 3, (1.0,) * 3, density.shape[::-1])
    surface = iso_surface(density, LEVEL, grid)
    count = sides(surface)
    ends = np.array([side for side in count if side[::-1] not in count])
    x = surface.vertices[ends]
    at_face = (x == grid.lower) | (x == grid.upper)
    assert at_face.all(1).any(1).all()


def test_a_ball_has_its_area_one_piece_and_normals_that_point_out_of_it() -> None:
    grid = RegularGrid((-30.0,) * 3, (4.0,) * 3, (16,) * 3)
    surface = iso_surface(ball(grid, 9.0), LEVEL, grid)
    radius2 = 2.0 * 9.0**2 * np.log(0.02 / LEVEL)
    assert surface.area == pytest.approx(4.0 * np.pi * radius2, rel=0.05)
    pieces = len(surface.vertices) - len(sides(surface)) // 2 + len(surface.triangles)
    assert pieces == 2  # Euler's V − E + F
    outward = surface.vertices - (0.7, -1.1, 0.4)
    outward /= np.linalg.norm(outward, axis=1, keepdims=True)
    assert (surface.normals * outward).sum(1).min() > 0.95


def test_voxels_on_the_level_have_normals_of_length_one() -> None:
    density = np.zeros((3, 3, 3), np.float32)
    density[1, 1, 1] = 1.0
    surface = iso_surface(density, 1.0, RegularGrid((0.0,) * 3, (1.0,) * 3, (3, 3, 3)))
    assert surface.area == 0.0
    np.testing.assert_allclose(np.linalg.norm(surface.normals, axis=1), 1.0)


def test_levels_that_no_density_crosses_and_unknown_voxels_are_refused() -> None:
    density = ball(GRID, 9.0)
    with pytest.raises(UserError, match=r"level 0\.5: expected one between"):
        iso_surface(density, 0.5, GRID)
    density[0, 0, 0] = np.nan
    with pytest.raises(UserError, match="1 of 2535 voxels have no density"):
        iso_surface(density, LEVEL, GRID)
