"""dustmap merge on maps that say of themselves that they are tiles."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
from astropy.io import fits

from dustmap import config as configuration
from dustmap.cli import main
from dustmap.runs.stars._parts import tile_of
from dustmap.sky import Provenance, galactic, write_map
from dustmap.sky.maps import DustMap, Quantity
from tests.sky.tiles.cases import GRID, different, expected, nodes

HYPERPARAMETERS = {"length": 12.0, "std": 1.0, "mean": 2e-3}


def configured(pixel: int, **overrides: str) -> configuration.Config:
    """Of a tile of the box `GRID`, margin 25 pc."""
    box = {"center": [0.0, -5.0, 0.0], "size": [120.0, 130.0, 80.0], "spacing": 10.0}
    data = {"catalog": "stars.fits", "tile": f"1/{pixel}", "tile_margin": 25.0}
    extra = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    tables = {"data": data, "grid": box, "model": {"length": 12.0}}
    return configuration.from_mapping(tables, extra)


def write_tile(
    path: Path,
    pixel: int,
    hyperparameters: Mapping[str, float] = HYPERPARAMETERS,
    system: str = "A_V",
    **overrides: str,
) -> Path:
    """map.zarr of a tile whose mean and std are known."""
    config = configured(pixel, **overrides)
    tile = tile_of(config)
    assert tile is not None
    part = tile.part_of(GRID)
    arrays = {
        q: different(pixel, nodes(part), q, 0).reshape(part.shape[::-1]).astype(np.float32)
        for q in (Quantity.MEAN, Quantity.STD)
    }
    told: dict[str, Any] = {
        "pixel": str(tile.pixel),
        "margin_pc": tile.margin,
        "stars": 100 + pixel,
        "hyperparameters": dict(hyperparameters),
        "configuration": dataclasses.asdict(config),
    }
    provenance = Provenance(configuration.sha256(config), ("a test",), tile=told)
    write_map(path, DustMap.from_arrays(part, arrays, system), provenance)
    return path


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All 12."""
    folder = tmp_path_factory.mktemp("tiles")
    return [str(write_tile(folder / f"{pixel}.zarr", pixel)) for pixel in range(12)]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Of a command that refuses its input."""
    capsys.readouterr()
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("dustmap: error: ")
    assert len(told.splitlines()) == 1
    return told


@pytest.mark.parametrize("form", ["zarr", "fits"])
def test_all_tiles(
    form: str, tiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / f"map.{form}"
    assert main(["merge", *tiles[::-1], "--output", str(output), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tiles"] == [f"1/{pixel}" for pixel in range(12)]
    assert (told["voxels"], told["voxels_in_no_tile"]) == ([13, 14, 9], 0)
    density = DustMap.open(output)
    assert density.grid == GRID
    for quantity in (Quantity.MEAN, Quantity.STD):
        reference = expected(different, range(12), quantity)
        np.testing.assert_allclose(density.cube(quantity), reference, rtol=1e-5)
    assert main(["query", str(output), "--l", "30", "--b", "5", "--distance", "40pc"]) == 0
    plot = ["plot", str(output), "--slice", "z=0", "--output", str(tmp_path / "a.png")]
    assert main(plot) == 0


def test_where_the_map_comes_from(tiles: list[str], tmp_path: Path) -> None:
    assert main(["merge", *tiles, "--output", str(tmp_path / "map.zarr")]) == 0
    assert main(["merge", *tiles, "--output", str(tmp_path / "map.fits")]) == 0
    with xarray.open_zarr(tmp_path / "map.zarr") as opened:
        attributes = dict(opened.attrs)
    whole = configuration.from_mapping(dataclasses.asdict(configured(0)), ["data.tile="])
    assert attributes["config_sha256"] == configuration.sha256(whole)
    assert attributes["seed"] == 0
    assert "tile" not in attributes  # a merged map is no tile
    with fits.open(tmp_path / "map.fits") as opened_fits:
        cards = "".join(str(opened_fits["MEAN"].header["HISTORY"]).split())
    for pixel in range(12):
        sha = configuration.sha256(configured(pixel))
        line = f"tile 1/{pixel}: {100 + pixel} stars, seed 0, config sha256 {sha}"
        assert line in attributes["history"]
        assert "".join(line.split()) in cards
    for words in ("upper bound in seams", "samples are independent", "length 12"):
        assert words in attributes["history"]


@pytest.mark.parametrize("form", ["zarr", "fits"])
def test_a_tile_alone_warns(
    form: str, tmp_path: Path, tiles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    alone, merged = (tmp_path / f"{name}.{form}" for name in ("alone", "merged"))
    write_tile(alone, 4)
    assert main(["merge", *tiles, "--output", str(merged)]) == 0
    warning = "the map of tile 1/4 alone, which has no stars beyond it and its margin of 25.0 pc"
    for path, warns in ((alone, True), (merged, False)):
        capsys.readouterr()
        assert main(["query", str(path), "--l", "30", "--b", "5", "--distance", "40pc"]) == 0
        assert (warning in capsys.readouterr().err) is warns
    tile = DustMap.open(alone).cubes.tile
    assert (tile["pixel"], tile["margin_pc"]) == ("1/4", 25.0)


def test_parts_of_a_sky(
    tiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "map.zarr")
    told = error_of(["merge", *tiles[1:], "--output", output], capsys)
    assert "voxels lie in no tile given; missing: 1/0." in told
    assert not Path(output).exists()
    assert main(["merge", *tiles[1:], "--output", output, "--partial", "--json"]) == 0
    missing = json.loads(capsys.readouterr().out)["voxels_in_no_tile"]
    density = DustMap.open(output)
    assert np.isnan(density.mean).sum() == missing > 0
    # Places that no tile has are rows without answers.
    nodes_of_map = density.grid.points().numpy().reshape(*density.grid.shape, 3)
    rows = []
    for gap in (True, False):
        z, y, x = np.argwhere(np.isnan(density.mean) == gap)[0]
        rows.append(",".join(f"{float(v):.9f}" for v in galactic(nodes_of_map[x, y, z])))
    (tmp_path / "places.csv").write_text("\n".join(["l,b,distance_pc", *rows]) + "\n")
    assert main(["query", output, "--file", str(tmp_path / "places.csv"), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [value is None for value in answers["density_mean"]] == [True, False]


def test_refusals(tiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = ["--output", str(tmp_path / "map.fits"), "--partial"]
    twice = error_of(["merge", tiles[3], tiles[3], *end], capsys)
    assert "are both tile 1/3: leave one out" in twice

    hotter = HYPERPARAMETERS | {"length": 13.0}
    other = write_tile(tmp_path / "a.zarr", 5, hyperparameters=hotter)
    told = error_of(["merge", tiles[3], str(other), *end], capsys)
    assert "hyperparameter length = 13.0, and 12.0 in" in told
    disc = HYPERPARAMETERS | {"disc_height": 90.0}
    other = write_tile(tmp_path / "b.zarr", 5, hyperparameters=disc)
    assert "hyperparameter disc_height = 90.0, and none in" in error_of(
        ["merge", tiles[3], str(other), *end], capsys
    )
    other = write_tile(tmp_path / "c.zarr", 5, fit__samples="16")
    told = error_of(["merge", tiles[3], str(other), *end], capsys)
    assert "fit.samples = 16, and 32 in" in told
    other = write_tile(tmp_path / "d.zarr", 5, system="E(B-V)")
    assert "extinction system" in error_of(["merge", tiles[3], str(other), *end], capsys)
    # The noise is each tile's own.
    noise = {"noise": 1.2, "nu": 4.0, "beyond": 1.1, "beyond_std": 0.2}
    other = write_tile(tmp_path / "f.zarr", 5, hyperparameters=HYPERPARAMETERS | noise)
    assert main(["merge", tiles[3], str(other), *end]) == 0
    Path(end[1]).rename(tmp_path / "first.zarr")
    # Where a tile was computed does not matter.
    other = write_tile(tmp_path / "e.zarr", 5, compute__threads="3", compute__memory="2GiB")
    assert main(["merge", tiles[3], str(other), *end]) == 0


def test_what_is_no_tile(
    tiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ["--output", str(tmp_path / "map.zarr")]
    ones = np.ones(GRID.shape[::-1], np.float32)
    plain = DustMap.from_arrays(GRID, {Quantity.MEAN: ones}, "A_V")
    write_map(tmp_path / "plain.zarr", plain, Provenance(""))
    assert "not that of a tile" in error_of(["merge", str(tmp_path / "plain.zarr"), *end], capsys)
    write_map(tmp_path / "odd.zarr", plain, Provenance("", tile={"pixel": "1/3"}))
    told = error_of(["merge", str(tmp_path / "odd.zarr"), *end], capsys)
    assert "its attribute tile should have hyperparameters of the run, got None" in told
    write_map(tmp_path / "plain.fits", plain, Provenance(""))
    assert "expected a run of a tile" in error_of(
        ["merge", str(tmp_path / "plain.fits"), *end], capsys
    )
    assert "expected a run of a tile" in error_of(["merge", str(tmp_path / "none"), *end], capsys)
    (tmp_path / "file.zarr").mkdir()
    assert main(["merge", str(tmp_path / "file.zarr"), *end]) == 2
    kept = Path(tiles[0])
    told = error_of(["merge", *tiles, "--output", str(kept)], capsys)
    assert "is the input" in told
    told = error_of(["merge", *tiles, "--output", "map.txt"], capsys)
    assert "map.txt: expected a name that ends in .zarr or .fits" in told
    told = error_of(["merge", *tiles, "--output", "map.fits", "--format", "zarr"], capsys)
    assert "--format zarr is no .fits" in told
