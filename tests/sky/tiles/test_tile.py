"""Tiles against brute force: distances, influences, stars and boxes."""

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky import galactic
from dustmap.sky.stars import ExactDistances, GaussianDistances
from dustmap.sky.tiles import SkyPixel, Tile
from tests.sky.maps.fields import positions

GRID = RegularGrid((-200.0, -160.0, -80.0), (20.0,) * 3, (21, 17, 9))
MARGIN = 45.0
TILES = tuple(Tile(p, MARGIN) for p in (SkyPixel(1, 0), SkyPixel(1, 5), SkyPixel(4, 70)))
#: X, Y, Z (N, 3) all over the box.
places = functools.partial(positions, grid=GRID)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: str(t.pixel))
def test_distance_to_the_cone(tile: Tile) -> None:
    found, points = tile.distances(places(300, 1)), places(300, 1)
    # The cone as many points: rays through it, 2 pc from one to the next.
    rays = places(30_000, 2) / 100.0
    rays = rays[tile.pixel.contains(rays)]
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
    # The nearest point of a ray is at r cos of the angle between.
    along = np.maximum(points @ rays.T, 0.0)
    squares = (points**2).sum(1)[:, None] - along**2
    brute = np.sqrt(np.maximum(squares, 0.0)).min(1)
    assert (found <= brute + 1e-6 + 1e-5 * np.linalg.norm(points, axis=1)).all()
    np.testing.assert_allclose(found, brute, atol=8.0)
    assert np.abs(found - brute).mean() < 1.5


def test_the_sun_belongs_to_every_tile() -> None:
    near = places(200, 3) / 10.0
    for pixel in range(12):
        tile = Tile(SkyPixel(1, pixel), MARGIN)
        assert (tile.distances(near) <= np.linalg.norm(near, axis=1) + 1e-9).all()
        assert tile.distances(np.zeros((1, 3)))[0] == 0.0
        np.testing.assert_array_equal(tile.influence(np.zeros((1, 3))), 1.0)


def _falling(t: NDArray[np.float64]) -> NDArray[np.float64]:
    t = np.minimum(t, 1.0)
    return np.asarray(1 - 10 * t**3 + 15 * t**4 - 6 * t**5)


def test_influences() -> None:
    points = np.concatenate([places(4000, 4), places(500, 5) / 8.0])
    tiles = [Tile(SkyPixel(1, p), MARGIN) for p in range(12)]
    reach, u = np.stack([tile.influence(points) for tile in tiles], axis=1)
    distance = np.stack([tile.distances(points) for tile in tiles])
    np.testing.assert_allclose(reach, _falling(distance / MARGIN), atol=1e-12)
    turned = distance / np.linalg.norm(points, axis=1) / np.sin(np.radians(10.0))
    inner = _falling(np.maximum(distance / MARGIN, turned))
    np.testing.assert_allclose(u, np.maximum(inner, 0.001 * reach), atol=1e-12)
    assert (u[distance >= MARGIN] == 0.0).all()
    assert (u.max(0) == 1.0).all()  # of the tile in whose cone a point is
    weights = u / u.sum(0)
    np.testing.assert_allclose(weights.sum(0), 1.0, rtol=1e-12)
    others = np.sort(distance, axis=0)[1]
    assert (weights.max(0)[others >= MARGIN] == 1.0).all()
    # However near the Sun a place is, the tile with the stars behind it counts there.
    assert (weights.max(0)[np.sort(turned, axis=0)[1] >= 1.0] > 0.98).all()


def test_weights_are_smooth_across_seams() -> None:
    tiles = [Tile(SkyPixel(1, p), MARGIN) for p in range(12)]
    for centre in ((60.0, 60.0, 3.0), (350.0, -300.0, 100.0), (-50.0, 10.0, 40.0)):
        line = np.linspace(-0.5, 0.5, 2001)[:, None] * [MARGIN, 0.6 * MARGIN, -0.2 * MARGIN]
        points = np.array(centre) + line
        u = np.stack([tile.influence(points)[1] for tile in tiles])
        # u' is at most 15/8 over the width of a seam, or nearer to the Sun over that of 10 degrees.
        near = np.linalg.norm(points, axis=1).min() * np.sin(np.radians(10.0))
        step = np.linalg.norm(points[1] - points[0])
        assert np.abs(np.diff(u / u.sum(0), axis=1)).max() < 2.0 * 15 / 8 * step / min(MARGIN, near)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: str(t.pixel))
def test_the_stars_of_a_tile(tile: Tile) -> None:
    points = places(2000, 6) * 1.5
    l, b, distance = galactic(points)
    needed = tile.needs(l, b, ExactDistances(distance), GRID)
    # By hand: the end of the ray, at the star or at the face of the box.
    with np.errstate(divide="ignore"):
        out = np.max(np.abs(points) / np.array(GRID.upper), axis=1)
    ends = points / np.maximum(out, 1.0)[:, None]
    np.testing.assert_array_equal(needed, tile.distances(ends) <= MARGIN)
    assert needed[distance < MARGIN].all()
    assert needed[tile.pixel.contains(points)].all()
    # With the star everything before it.
    for part in np.random.default_rng(7).uniform(size=5):
        assert (tile.distances(part * ends[needed]) <= MARGIN * (1 + 1e-9)).all()


def test_uncertain_stars_are_needed_as_far_as_they_may_be() -> None:
    tile = TILES[1]
    points = places(2000, 8) * 0.8
    l, b, distance = galactic(points)
    exact = tile.needs(l, b, ExactDistances(distance), GRID)
    sharp = tile.needs(l, b, GaussianDistances(distance, 1e-4 * distance), GRID)
    vague = tile.needs(l, b, GaussianDistances(distance, 0.3 * distance), GRID)
    assert (sharp != exact).sum() <= 5
    assert (vague <= exact).all()
    assert vague.sum() < exact.sum()
    farther = tile.needs(l, b, ExactDistances(distance * (1 + 3.0902 * 0.3)), GRID)
    assert (vague != farther).sum() <= 5
    assert vague[tile.pixel.contains(points)].all()


def test_no_stars() -> None:
    none = np.zeros(0)
    assert TILES[0].needs(none, none, ExactDistances(none), GRID).shape == (0,)


GRIDS = (
    GRID,
    RegularGrid((100.0, 50.0, -300.0), (10.0, 10.0, 12.0), (20, 30, 40)),  # beside the Sun
    RegularGrid((0.0, 0.0, 0.0), (25.0,) * 3, (9, 9, 9)),  # the Sun in a corner
    RegularGrid((-300.0, -300.0, -30.0), (15.0,) * 3, (41, 41, 5)),  # thin
)


@pytest.mark.parametrize("grid", GRIDS, ids=["around", "beside", "corner", "thin"])
@pytest.mark.parametrize("nside", [1, 2, 4])
def test_the_box_of_a_tile(nside: int, grid: RegularGrid) -> None:
    points = places(4000, 9, grid=grid)
    met = 0
    for pixel in range(0, 12 * nside**2, (1, 3, 17)[nside // 2]):
        tile = Tile(SkyPixel(nside, pixel), MARGIN)
        inside = points[tile.distances(points) <= MARGIN]
        part = _box_of(tile, grid)
        if part is None:
            assert not tile.pixel.contains(points).any()
            continue
        met += 1
        _are_nodes_of(part, grid)
        if len(inside):
            low, high = np.array(part.lower), np.array(part.upper)
            assert ((inside >= low - 1e-9) & (inside <= high + 1e-9)).all()
            # And not much larger: twice the margin, a cell, and what samples leave out.
            spare = 4.0 * MARGIN + 2 * max(grid.spacing)
            assert (inside.min(0) - low <= spare).all()
            assert (high - inside.max(0) <= spare).all()
    assert met > 0


def _box_of(tile: Tile, grid: RegularGrid) -> RegularGrid | None:
    """None for a tile that misses the box."""
    try:
        return tile.part_of(grid)
    except ValueError:
        return None


def _are_nodes_of(part: RegularGrid, grid: RegularGrid) -> None:
    assert part.spacing == grid.spacing
    first = (np.array(part.lower) - grid.lower) / grid.spacing
    np.testing.assert_allclose(first, np.round(first), atol=1e-9)
    assert (first >= 0).all()
    assert (np.round(first).astype(int) + part.shape <= grid.shape).all()


def test_a_tile_that_misses_the_box() -> None:
    with pytest.raises(ValueError, match="does not meet the box"):
        Tile(SkyPixel(1, 6), 20.0).part_of(GRIDS[1])  # pixel 6 lies around l = 180 degrees


@pytest.mark.parametrize("margin", [0.0, -1.0, np.nan, np.inf])
def test_margins(margin: float) -> None:
    with pytest.raises(ValueError, match="margin of a tile"):
        Tile(SkyPixel(1, 0), margin)
