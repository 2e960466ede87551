"""Merged tiles against sums over all tiles, node by node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky import Provenance
from dustmap.sky.maps import DustMap, Quantity, write_map
from dustmap.sky.tiles import Merged, SkyPixel, Tile, TileMap, merged
from tests.sky.tiles.cases import ARRAYS, GRID, MARGIN, Field, different, expected, nodes, same

SAMPLES = 2


def tile_map(
    pixel: int,
    field: Field,
    nside: int = 1,
    system: str = "A_V",
    positive: bool = True,
    samples: int = SAMPLES,
) -> TileMap:
    """A tile on its part of the box."""
    tile = Tile(SkyPixel(nside, pixel), MARGIN)
    part = tile.part_of(GRID)
    shape, points = part.shape[::-1], nodes(part)
    arrays = {q: field(pixel, points, q, 0).reshape(shape).astype(np.float32) for q in ARRAYS[:2]}
    draws = [field(pixel, points, ARRAYS[2], k).reshape(shape) for k in range(samples)]
    arrays[ARRAYS[2]] = np.stack(draws).astype(np.float32)
    cubes = DustMap.from_arrays(part, arrays, system, positive=positive).cubes
    return TileMap(f"tile{pixel}", tile, cubes)


def tiles(field: Field, pixels: Sequence[int] = range(12), **options: Any) -> list[TileMap]:
    """Of nside 1."""
    return [tile_map(pixel, field, **options) for pixel in pixels]


def whole(found: Merged, depth: int = 4) -> dict[str, NDArray[np.float32]]:
    """All slabs."""
    slabs = [slab.arrays for slab in found.slabs.walk(depth)]
    return {name: np.concatenate([slab[name] for slab in slabs], axis=-3) for name in slabs[0]}


def test_what_tiles_agree_upon_is_kept() -> None:
    found = whole(merged(tiles(same), GRID, partial=False))
    for quantity in ARRAYS[:2]:
        np.testing.assert_allclose(
            found[quantity.value], expected(same, range(12), quantity), rtol=1e-6
        )


def test_weighted_sums_of_every_quantity() -> None:
    found = whole(merged(tiles(different), GRID, partial=False))
    for quantity in ARRAYS[:2]:
        reference = expected(different, range(12), quantity)
        np.testing.assert_allclose(found[quantity.value], reference, rtol=1e-5)


@pytest.mark.parametrize("positive", [True, False])
def test_samples_deviate_from_their_mean_as_those_of_one_tile_do(positive: bool) -> None:
    """g_k = ḡ + Σ w (g_tk − ḡ_t) / √Σ w² of ln ρ, or of ρ, node by node; the mean is Σ w ρ̄_t."""
    found = whole(merged(tiles(different, positive=positive), GRID, partial=False))["samples"]
    points = nodes(GRID)
    influence = np.stack([Tile(SkyPixel(1, p), MARGIN).influence(points)[1] for p in range(12)])
    weight = influence / influence.sum(0)
    drawn = [[different(p, points, Quantity.SAMPLES, k) for p in range(12)] for k in range(SAMPLES)]
    draws = np.log(drawn) if positive else np.array(drawn)  # (S, tiles, N)
    off = (weight * (draws - draws.mean(0))).sum(1) / np.sqrt((weight**2).sum(0))
    mean = (weight * np.mean(drawn, axis=0)).sum(0)
    reference = mean * np.exp(off) / np.exp(off).mean(0) if positive else mean + off
    np.testing.assert_allclose(found.reshape(SAMPLES, -1), reference, rtol=2e-5, atol=2e-5)


def test_integrals_through_a_merged_map_scatter_as_those_of_one_tile(tmp_path: Path) -> None:
    """Draws of tiles are independent. Weighted means of all around the Sun, where every ray has a
    part of its way, would scatter 0.37 times as much. Rays cross seams in their first voxels."""
    count, random = 200, np.random.default_rng(5)
    waves = random.normal(0.0, 0.04, (12, count, 3))
    heights = random.normal(0.0, 0.5, (12, count, 2))

    def drawn(pixel: int, x: NDArray[np.float64], q: Quantity, k: int) -> NDArray[np.float64]:
        if q is not Quantity.SAMPLES:
            return np.ones(len(x))
        phase = x @ waves[pixel, k]
        return np.asarray(np.exp(np.stack([np.cos(phase), np.sin(phase)], -1) @ heights[pixel, k]))

    found = merged(tiles(drawn, samples=count), GRID, partial=False)
    write_map(tmp_path / "map.zarr", found.slabs, Provenance("", ("x",)))
    directions = random.standard_normal((300, 3))
    ends = 35.0 * directions / np.linalg.norm(directions, axis=1)[:, None]
    places = SkyCoord(*ends.T, unit="pc", frame="galactic", representation_type="cartesian")
    std = DustMap.open(tmp_path / "map.zarr").query(places, "std", integrated=True)

    s = (np.arange(200) + 0.5) / 200
    along = (ends[:, None] * s[:, None]).reshape(-1, 3)
    one = [drawn(0, along, Quantity.SAMPLES, k).reshape(300, 200).mean(1) for k in range(count)]
    wanted = 35.0 * np.std(one, axis=0)
    # Around the Sun voxels of 10 pc mix several tiles: 0.82 here.
    assert 0.75 < np.median(std / wanted) < 1.05
    assert (std / wanted).min() > 0.5


def test_slabs_and_the_order_of_tiles_do_not_matter() -> None:
    reference = whole(merged(tiles(different), GRID, partial=False), depth=9)
    found = merged(tiles(different), GRID, partial=False)
    for depth in (1, 2, 5):
        for name, values in whole(found, depth).items():
            np.testing.assert_array_equal(values, reference[name])
    turned = whole(merged(tiles(different, range(11, -1, -1)), GRID, partial=False))
    np.testing.assert_allclose(turned["mean"], reference["mean"], rtol=1e-6)


def test_what_a_tile_has_beyond_its_margin_does_not_count() -> None:
    def bad(pixel: int, x: NDArray[np.float64], q: Quantity, k: int) -> NDArray[np.float64]:
        beyond = Tile(SkyPixel(1, pixel), MARGIN).distances(x) >= MARGIN
        return np.where(beyond, np.nan, same(pixel, x, q, k))

    found = whole(merged(tiles(bad), GRID, partial=False))
    np.testing.assert_allclose(found["mean"], expected(same, range(12), Quantity.MEAN), rtol=1e-6)


def test_missing_tiles() -> None:
    pixels = [0, 4, 5, 9]
    inside = np.zeros(len(nodes(GRID)), bool)
    points = nodes(GRID)
    away = (points != 0.0).any(1)
    inside[~away] = True
    for p in pixels:
        inside[away] |= SkyPixel(1, p).contains(points[away])
    missing = int((~inside).sum())
    told = rf"{missing} of {GRID.size} voxels lie in no tile given; missing: 1/1, 1/2, .* --partial"
    with pytest.raises(ValueError, match=told):
        merged(tiles(same, pixels), GRID, partial=False)
    influences = [Tile(SkyPixel(1, p), MARGIN).influence(points)[0] for p in pixels]
    known = np.sum(influences, axis=0) >= 0.5
    assert (known & ~inside).any()
    assert known[inside].all()
    found = merged(tiles(different, pixels), GRID, partial=True)
    assert found.uncovered == (~known).sum()
    values = whole(found)
    np.testing.assert_array_equal(np.isnan(values["mean"]).ravel(), ~known)
    reference = expected(different, pixels, Quantity.MEAN).ravel()
    np.testing.assert_allclose(values["mean"].ravel()[known], reference[known], rtol=1e-5)


def test_lines_of_sight_within_the_cones_of_some_tiles_are_known(tmp_path: Path) -> None:
    pixels, grid = [0, 4, 5, 9], RegularGrid((-60.0,) * 3, (5.0,) * 3, (25,) * 3)
    made = []
    for pixel in pixels:
        tile = Tile(SkyPixel(1, pixel), MARGIN)
        part = tile.part_of(grid)
        ones = np.ones(part.shape[::-1], np.float32)
        cubes = DustMap.from_arrays(part, {Quantity.MEAN: ones}, "A_V").cubes
        made.append(TileMap(str(pixel), tile, cubes))
    found = merged(made, grid, partial=True)
    write_map(tmp_path / "part.zarr", found.slabs, Provenance("", ("x",)), False, 100_000)
    directions = np.random.default_rng(0).standard_normal((500, 3))
    own = np.any([SkyPixel(1, pixel).contains(directions) for pixel in pixels], axis=0)
    assert 100 < own.sum() < 300
    ends = 55.0 * directions[own] / np.linalg.norm(directions[own], axis=1)[:, None]
    places = SkyCoord(*ends.T, unit="pc", frame="galactic", representation_type="cartesian")
    extinction = DustMap.open(tmp_path / "part.zarr").query(places, integrated=True)
    np.testing.assert_allclose(extinction, 55.0, rtol=1e-3)


def test_a_pixel_that_misses_the_box_is_not_missed() -> None:
    beside = RegularGrid((60.0, -10.0, -10.0), (10.0,) * 3, (5, 3, 3))
    tile = Tile(SkyPixel(1, 4), MARGIN)  # of l = 0, b = 0
    part = tile.part_of(beside)
    ones = np.ones(part.shape[::-1], np.float32)
    cubes = DustMap.from_arrays(part, {Quantity.MEAN: ones}, "A_V").cubes
    found = merged([TileMap("one", tile, cubes)], beside, partial=False)
    assert found.uncovered == 0
    np.testing.assert_array_equal(whole(found)["mean"], 1.0)


def test_files(tmp_path: Path) -> None:
    found = merged(tiles(different), GRID, partial=False)
    write_map(tmp_path / "a.zarr", found.slabs, Provenance("", ("x",)), False, 10_000)
    write_map(tmp_path / "a.fits", found.slabs, Provenance("", ("x",)), False, 10_000)
    reference = whole(found)
    for name in ("a.zarr", "a.fits"):
        density = DustMap.open(tmp_path / name)
        assert density.grid == GRID
        assert density.n_samples == SAMPLES
        np.testing.assert_array_equal(density.mean, reference["mean"])
        np.testing.assert_array_equal(density.cube(Quantity.SAMPLES, 1), reference["samples"][1])


def test_memory_of_slabs_leaves_room_for_the_work() -> None:
    found = merged(tiles(same), GRID, partial=False)
    # mean, std and 2 samples, two more of the writer, seven of the merge.
    assert found.memory(1300) == 600


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no tiles to merge"):
        merged([], GRID, partial=True)
    with pytest.raises(ValueError, match="tile3 and tile3 are both tile 1/3"):
        merged(tiles(same, [3, 4, 3]), GRID, partial=True)
    with pytest.raises(ValueError, match="tile5: extinction system E\\(B-V\\) and A_V in tile3"):
        merged([*tiles(same, [3]), tile_map(5, same, system="E(B-V)")], GRID, partial=True)
    with pytest.raises(ValueError, match="tile5: nside 2 and 1 in tile3"):
        merged([*tiles(same, [3]), tile_map(5, same, nside=2)], GRID, partial=True)
    shifted = RegularGrid((-57.0, -70.0, -40.0), (10.0,) * 3, (13, 14, 9))
    with pytest.raises(ValueError, match=r"along X its nodes start at .* expected nodes of"):
        merged(tiles(same, [4]), shifted, partial=True)
    finer = RegularGrid((-60.0, -70.0, -40.0), (5.0,) * 3, (25, 27, 17))
    with pytest.raises(ValueError, match="10 pc apart: expected nodes of the whole grid"):
        merged(tiles(same, [4]), finer, partial=True)
    larger = RegularGrid((-60.0, -170.0, -140.0), (10.0,) * 3, (33, 34, 29))
    with pytest.raises(ValueError, match="expected those of tile 1/4"):
        merged(tiles(same, [4]), larger, partial=True)
