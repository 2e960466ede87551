"""Runs on tiles: their stars, their boxes, what they say of themselves, and merged maps."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dustmap import config as configuration
from dustmap.cli import main
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.gp.functionals import LineIntegrals
from dustmap.runs import open_star_map, prepare
from dustmap.runs.stars._grids import grid_of
from dustmap.runs.stars._input import read_input
from dustmap.runs.stars._parts import tile_of
from dustmap.runs.stars._run import StarRun
from dustmap.sky import star_store
from dustmap.sky.maps import DustMap, Quantity
from tests.skies import plain_sky, write_plain_sky

SIZE = (160.0, 160.0, 80.0)
MODEL = {"length": 12.0, "std": 0.8, "mean_density": 2e-3, "learn": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sky.fits of 300 stars, and sky.zarr of the same."""
    path = tmp_path_factory.mktemp("tiles")
    write_plain_sky(path, plain_sky(300, 6, SIZE))
    given = read_input(configured(path, "").data)
    with star_store(path / "sky.zarr") as store:
        store.append(given.stars)
        store.describe({"catalog": dict(given.provenance)})
    return path


def configured(folder: Path, tile: str, *overrides: str) -> Config:
    """Of that sky."""
    tables: dict[str, Any] = {
        "data": {"catalog": str(folder / "sky.fits"), "holdout": 0.1, "tile": tile},
        "grid": {"size": list(SIZE), "spacing": 20.0},
        "model": MODEL,
        "fit": {"samples": 4},
        "export": {"formats": ["zarr"], "figures": [], "samples": 2},
    }
    return configuration.from_mapping(tables, overrides)


def prepared(config: Config) -> StarRun:
    """As `dustmap run` has it before it starts."""
    run = prepare(config)
    assert isinstance(run, StarRun)
    return run


def test_stars_and_box_of_a_tile(folder: Path) -> None:
    whole, run = prepared(configured(folder, "")), prepared(configured(folder, "1/4"))
    tile = tile_of(run.asked)
    assert tile is not None
    assert tile.margin == 24.0
    assert run.grid.spacing == whole.grid.spacing
    offset = (np.array(run.grid.lower) - whole.grid.lower) / whole.grid.spacing
    np.testing.assert_array_equal(offset, np.round(offset))
    assert run.grid.size < whole.grid.size
    stars = whole.stars
    needed = tile.needs(stars.l, stars.b, stars.distances, whole.grid)
    np.testing.assert_array_equal(run.stars.source_id, stars.source_id[needed])
    counts = run.counts()
    assert counts["tile"] == "1/4"
    assert counts["stars_of_the_whole_sky"] == len(stars) == 300
    assert counts["stars_beyond_the_tile"] == 300 - int(needed.sum()) > 0
    assert run.plan().counts["stars_beyond_the_tile"] == counts["stars_beyond_the_tile"]


def test_rays_are_those_of_the_whole_sky(folder: Path) -> None:
    whole, run = prepared(configured(folder, "")), prepared(configured(folder, "1/9"))
    row = {star: k for k, star in enumerate(whole.stars.source_id[whole.observed.rows])}
    index = [row[star] for star in run.stars.source_id[run.observed.rows]]
    mine, all_rays = run.observed.batch.functional, whole.observed.batch.functional
    assert isinstance(mine, LineIntegrals)
    assert isinstance(all_rays, LineIntegrals)
    np.testing.assert_allclose(mine.edges, all_rays.edges[index], atol=1e-9)
    np.testing.assert_allclose(mine.weights, all_rays.weights[index], atol=1e-9)


def test_a_store_is_read_in_parts(folder: Path) -> None:
    run = prepared(configured(folder, "1/4"))
    stored = prepared(configured(folder, "1/4", f"data.catalog={folder / 'sky.zarr'}"))
    assert stored.counts() == run.counts()
    assert sorted(stored.stars.source_id) == sorted(run.stars.source_id)


def test_what_a_tile_does_not_change(folder: Path) -> None:
    run = prepared(configured(folder, ""))
    assert run.tile is None
    assert run.config.grid.around == ()  # few of its stars are beyond the box
    assert dataclasses.replace(run.config, grid=run.asked.grid) == run.asked
    assert "tile" not in run.counts()


def test_configuration_of_a_tile(folder: Path) -> None:
    assert configured(folder, "2/17").data.tile == "2/17"
    assert configured(folder, "02/017").data.tile == "2/17"
    assert configured(folder, "1/0").tile_margin == 24.0
    assert configured(folder, "1/0", "data.tile_margin=0.05kpc").tile_margin == 50.0
    for bad in ("1/12", "3/1", "8/0", "2", "a/b", "1/-1", 3):
        with pytest.raises(UserError, match=r'data.tile = .*: expected "" or "NSIDE/PIXEL"'):
            configured(folder, bad)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"at least 2 x model.length = 24 pc"):
        configured(folder, "1/0", "data.tile_margin=20")
    with pytest.raises(UserError, match="expected a length >= 0"):
        configured(folder, "1/0", "data.tile_margin=-1")
    configured(folder, "", "data.tile_margin=20")  # of no tile
    data = {"kind": "regression", "catalog": "a", "inputs": ["x"], "target": "y", "tile": "1/0"}
    with pytest.raises(UserError, match=r'is for data.kind = "stars"'):
        configuration.from_mapping({"data": data})


@pytest.mark.parametrize("length", [9.0, 12.0, 24.0, 30.0, 100.0])
def test_a_margin_of_two_lengths_is_enough(folder: Path, length: float) -> None:
    """As the fit has the length, from its logarithm."""
    tile = prepared(configured(folder, "1/4")).tile
    assert tile is not None
    margin = dataclasses.replace(tile, tile=dataclasses.replace(tile.tile, margin=2.0 * length))
    assert margin.check(math.exp(math.log(length))).passed
    assert not margin.check(1.001 * length).passed


def test_tiles_that_learn_by_themselves_say_that_they_cannot_be_merged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(configured(folder, "1/4", 'model.learn=["noise"]'))
    assert "learn" not in caplog.text
    prepare(configured(folder, "1/4", 'model.learn=["length", "noise"]', "model.kernel=matern32"))
    assert "model.learn has length: tiles that learn these" in caplog.text


def test_tiles_without_stars_or_box(folder: Path) -> None:
    few = ("grid.center=[60, 0, 0]", "grid.size=[40, 40, 40]")
    with pytest.raises(ValueError, match="tile 1/6: its cone does not meet the box"):
        prepare(configured(folder, "1/6", *few))
    far = ("grid.center=[-1000, 0, 0]", "grid.size=[100, 100, 100]")
    with pytest.raises(ValueError, match=r"none of .* stars is"):
        prepare(configured(folder, "1/6", *far, "data.tile_margin=24", "data.holdout=0"))


def test_from_runs_to_the_merged_map(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(configuration.echo(configured(folder, "")))
    tiles = [str(tmp_path / f"1-{pixel}") for pixel in (4, 5)]
    for pixel, path in zip((4, 5), tiles, strict=True):
        assert main(["run", str(config), "--output", path, "--set", f"data.tile=1/{pixel}"]) == 0
    run = open_star_map(Path(tiles[0]))
    asked = configuration.load(Path(tiles[0]) / "config.toml")
    assert run.run.asked == asked == configured(folder, "1/4")
    told = zarr.open_group(Path(tiles[0]) / "map.zarr", mode="r").attrs["tile"]
    assert isinstance(told, dict)
    assert told["stars"] == len(run.run.stars)
    assert json.loads(json.dumps(dataclasses.asdict(asked))) == told["configuration"]
    report = json.loads((Path(tiles[0]) / "report.json").read_text())
    assert report["config_sha256"] == configuration.sha256(asked)
    assert report["counts"]["tile"] == "1/4"
    assert run.run.counts() == {**run.run.counts(), **_of(report["counts"], "tile", "stars_of")}

    # It says of places that its stars know nothing of that they are those.
    for longitude, warned in (("180", True), ("0", False)):
        capsys.readouterr()
        place = ["--l", longitude, "--b", "0", "--distance", "40pc"]
        assert main(["query", tiles[0], *place]) == 0
        words = "1 of 1 places lie beyond tile 1/4 and its margin of 24 pc"
        assert (words in capsys.readouterr().err) == warned

    # What is exported again is the same tile; the map.zarr stands for its run.
    again = str(tmp_path / "again.zarr")
    quantities = ["--quantity", "mean,std,median,p16,p84,coverage,samples", "--samples", "2"]
    assert main(["export", tiles[0], "--format", "zarr", "--output", again, *quantities]) == 0
    output = tmp_path / "map.zarr"
    capsys.readouterr()
    command = ["merge", again, tiles[1] + "/map.zarr", "--output", str(output), "--json"]
    assert main(command) == 2
    assert main([*command, "--partial"]) == 0
    merged, tile = DustMap.open(output), tile_of(asked)
    assert merged.grid == grid_of(asked.grid)
    assert tile is not None
    known = ~np.isnan(merged.mean)
    assert 0.2 < known.mean() < 0.5
    # Where the other tile has no say it is this tile's map.
    x, y, z = merged.axes()
    points = np.stack(np.meshgrid(z, y, x, indexing="ij"), axis=-1)[..., ::-1].reshape(-1, 3)
    other = tile_of(configured(folder, "1/5"))
    assert other is not None
    alone = (tile.influence(points)[1] == 1.0) & (other.influence(points)[1] == 0.0) & known.ravel()
    assert alone.sum() > 5
    mine = DustMap.open(tiles[0]).mean_at(points[alone])
    np.testing.assert_allclose(merged.mean.ravel()[alone], mine, rtol=1e-5)


def test_draws_of_tiles_are_independent(folder: Path, tmp_path: Path) -> None:
    # Margins as wide as the box: both tiles have its nodes, and nearly the same stars.
    config = tmp_path / "run.toml"
    config.write_text(configuration.echo(configured(folder, "", "data.tile_margin=300")))
    deviations = []
    for pixel in (4, 5):
        path = str(tmp_path / f"1-{pixel}")
        settings = (f"data.tile=1/{pixel}", "fit.samples=16", "export.samples=16")
        assert main(["run", str(config), "--output", path, *_set(*settings)]) == 0
        tile = DustMap.open(path)
        logs = np.log(np.stack([tile.cube(Quantity.SAMPLES, k) for k in range(16)]))
        deviations.append(logs - logs.mean(0))
    assert deviations[0].shape == deviations[1].shape
    # They stood at 0.9 with one seed; drawn anew those of 16 samples at 405 voxels are at 0.00(3).
    assert abs(np.corrcoef(deviations[0].ravel(), deviations[1].ravel())[0, 1]) < 0.15


def _set(*settings: str) -> list[str]:
    """Options that set keys."""
    return [word for setting in settings for word in ("--set", setting)]


def _of(counts: dict[str, Any], *starts: str) -> dict[str, Any]:
    """Those of which the name begins so."""
    return {name: value for name, value in counts.items() if name.startswith(starts)}
