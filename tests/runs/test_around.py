"""Grids around the box: which stars ask for them, and that no map shows them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.cli import main
from dustmap.config import Config, from_mapping, load
from dustmap.errors import UserError
from dustmap.gp import NestedGrids
from dustmap.gp.functionals import PointValues
from dustmap.inference import LogNormalPosterior
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._grids import grid_of, nodes_of, whole_of, with_around, with_fewer_around
from dustmap.runs.stars._run import StarRun
from dustmap.sky import DustMap
from dustmap.sky.maps import MapRequest, Quantity
from dustmap.sky.stars import ExactDistances, StarTable
from dustmap.sky.systems import system_named
from tests.run_outputs import differences
from tests.runs.test_resume import Killed, interrupted
from tests.skies import plain_sky, write_plain_sky

Array = NDArray[np.float64]
CONFIG = """
[data]
catalog = "sky.fits"
[grid]
size = [80, 40, 40]
spacing = 10
[model]
kernel = "matern32"
length = 40
std = 0.8
mean = "constant"
mean_density = 0.002
learn = ["mean"]
[fit]
samples = 4
[export]
formats = ["zarr", "fits"]
figures = []
samples = 4
"""
COVERAGE = MapRequest((Quantity.COVERAGE,))
OUTER = {"size": [120, 80, 80], "spacing": 20}


def configured(**grid: object) -> Config:
    return from_mapping({"data": {"catalog": "stars.fits"}, "grid": grid})


def stars_at(places: Array) -> StarTable:
    n, distance = len(places), np.linalg.norm(places, axis=1)
    l = np.degrees(np.arctan2(places[:, 1], places[:, 0])) % 360.0
    b = np.degrees(np.arcsin(places[:, 2] / distance))
    distances, system = ExactDistances(distance), system_named("A_V")
    numbers = np.full(n, 0.1), np.full(n, 0.01)
    return StarTable(np.arange(n), l, b, distances, *numbers, system)


def uniform(reach: tuple[float, float, float], center: tuple[float, float, float]) -> StarTable:
    places = np.random.default_rng(0).uniform(-1.0, 1.0, (4000, 3)) * reach
    return stars_at(places + np.array(center))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("around")
    write_plain_sky(path, plain_sky(250, seed=2))
    (path / "run.toml").write_text(CONFIG)
    return path


@pytest.fixture(scope="module", params=["auto", "[{size=[120, 80, 40], spacing=20}]"])
def finished(folder: Path, request: pytest.FixtureRequest) -> Path:
    """In a box that is made larger, and in one with a coarser grid around it."""
    config = load(folder / "run.toml", [f"grid.around={request.param}"])
    path = folder / ("larger" if request.param == "auto" else "coarser")
    execute_run(prepare(config), path, config, overwrite=False)
    return path


@pytest.mark.parametrize(
    ("grid", "reach", "center", "around"),
    [
        # Stars within, or hardly beyond.
        ({}, (500.0, 500.0, 200.0), (0.0, 0.0, 0.0), ()),
        ({}, (500.0, 500.0, 250.0), (0.0, 0.0, 0.0), ()),
        # As far as the stars are; three cells of one are one of the grid around it.
        (
            {},
            (500.0, 500.0, 400.0),
            (0, 0, 0),
            (((1080.0, 1080.0, 840.0), 60.0), ((1080.0, 1080.0, 600.0), 20.0)),
        ),
        # Twice the sides.
        (
            {"size": [420, 420, 240], "spacing": 10},
            (480.0, 480.0, 300.0),
            (0, 0, 0),
            (((960.0, 960.0, 600.0), 30.0), ((480.0, 480.0, 300.0), 10.0)),
        ),
        # At once as wide as the stars, where that takes few nodes.
        (
            {"size": [420, 420, 240], "spacing": 10},
            (600.0, 600.0, 300.0),
            (0, 0, 0),
            (((1200.0, 1200.0, 600.0), 30.0), ((480.0, 480.0, 300.0), 10.0)),
        ),
        # Few nodes: the box is made larger before.
        (
            {"size": [240, 240, 240], "spacing": 20},
            (500.0, 500.0, 500.0),
            (0, 0, 0),
            (((960.0, 960.0, 960.0), 40.0), ((480.0, 480.0, 480.0), 20.0)),
        ),
        # The Sun is beyond, and the dust before the box on the way to every star.
        (
            {"size": [200, 200, 200], "spacing": 20, "center": [300, 0, 0]},
            (100.0, 100.0, 100.0),
            (300, 0, 0),
            None,
        ),
    ],
)
def test_stars_ask_for_grids_around_the_box(
    grid: dict[str, object],
    reach: tuple[float, float, float],
    center: tuple[float, float, float],
    around: tuple[object, ...] | None,
) -> None:
    config, stars = configured(**grid), uniform(reach, center)
    assert config.grid.around == "auto"
    chosen = with_around(config, stars)
    if around is not None:
        assert chosen.grid.around == around
    assert replace(chosen.grid, around="auto") == config.grid
    box, nodes = grid_of(config.grid), nodes_of(chosen.grid)
    assert grid_of(chosen.grid) == box
    if chosen.grid.around:
        own = nodes.grids[-1]  # of nested grids, which are refused where faces are no nodes
        assert own.spacing == box.spacing
        assert bool(own.contains(box.points()[[0, -1]]).all())
        steps = (np.array(box.lower) - own.lower) / box.spacing
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
        assert bool(whole_of(chosen.grid).contains(torch.zeros(1, 3, dtype=torch.float64)).all())
    again = configured(**grid, around=[list(each) for each in chosen.grid.around])
    assert again.grid == chosen.grid
    while chosen.grid.around:
        chosen = with_fewer_around(chosen, config)
        assert nodes_of(chosen.grid).size < nodes.size
    assert nodes_of(chosen.grid).size == box.size


def test_the_grid_around_a_far_box_is_as_narrow_as_its_stars() -> None:
    """A cone of 12° × 8° to 2.8 kpc, and a box in it at 2 kpc: the way there has nodes as near as
    those of the first grid around the box."""
    rng = np.random.default_rng(5)
    x = 2800.0 * rng.uniform(0.01, 1.0, 4000) ** 0.5
    tangent = np.tan(np.radians(rng.uniform(-1.0, 1.0, (4000, 2)) * [6.0, 4.0]))
    stars = stars_at(x[:, None] * np.column_stack([np.ones(4000), tangent]))
    config = configured(size=[320, 320, 240], spacing=16, center=[2000, 0, 0])
    around = with_around(config, stars).grid.around
    assert not isinstance(around, str)
    (size, spacing), (inner, finer) = around
    assert (spacing, finer) == (48.0, 16.0)
    assert size[0] >= 4000.0
    assert max(size[1:]) < 600.0
    assert min(inner) >= 320.0


def test_no_voxel_is_where_the_finest_grid_fades() -> None:
    """Of a box of moderate size; of a larger one the finest grid has a quarter of its variance or
    more at every face."""
    for size, wide, least in ((240, 600.0, 1.0), (1000, 1000.0, 0.25)):
        config = configured(size=[size] * 3, spacing=20)
        chosen = with_around(config, uniform((wide,) * 3, (0.0, 0.0, 0.0)))
        nodes = nodes_of(chosen.grid)
        assert isinstance(nodes, NestedGrids)
        shown = grid_of(config.grid).contains(nodes.grids[-1].points())
        variance = 1.0 - nodes.faded()[nodes.places[-1]][shown]
        assert least**3 - 1e-9 <= float(variance.min()) <= 1.0
        assert float((variance > 0.99).double().mean()) > 0.5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"grid": {"around": "some"}}, 'or "auto" or "none"'),
        ({"grid": {"around": [{**OUTER, "spacing": 15}]}}, "2, 3, .. times"),
        ({"grid": {"around": [{**OUTER, "size": [110, 80, 80]}]}}, "expected 110 or 70"),
        ({"grid": {"around": [OUTER], "spacing": "auto"}}, "name grid.spacing"),
        ({"grid": {"around": [OUTER]}, "data": {"tile": "1/3"}}, "data.tile"),
        ({"grid": {"around": [OUTER]}, "fit": {"engine": "hip"}}, 'engine "global"'),
    ],
)
def test_grids_that_do_not_go_around_the_box_are_refused(
    content: dict[str, dict[str, object]], words: str
) -> None:
    data = {"catalog": "stars.fits"} | content.get("data", {})
    grid = {"size": [80, 40, 40], "spacing": 10} | content["grid"]
    with pytest.raises(UserError, match=words):
        from_mapping({**content, "data": data, "grid": grid})


@pytest.mark.parametrize(
    "rest",
    [
        {"model": {"density": "gaussian"}},
        {"fit": {"engine": "hip"}},
        {"grid": {"outside": "truncate"}},
        {"data": {"tile": "1/3"}},
    ],
)
def test_nothing_is_around_other_boxes(rest: dict[str, dict[str, object]]) -> None:
    data = {"catalog": "stars.fits"} | rest.get("data", {})
    assert from_mapping({**rest, "data": data}).grid.around == ()


def test_the_map_is_of_the_box_alone(finished: Path) -> None:
    run = open_run(finished)
    assert isinstance(run, StarMap)
    assert isinstance(run.fit.posterior, LogNormalPosterior)
    report = json.loads((finished / "report.json").read_text())
    larger = finished.name == "larger"
    around = "10 pc in 120 × 80 × 40 pc" if larger else "20 pc in 120 × 80 × 40 pc"
    assert report["grid"]["around"] == around
    assert report["counts"]["nodes"] == [9, 5, 5]
    assert report["counts"]["nodes_around_1"] == ([13, 9, 5] if larger else [7, 5, 3])
    assert report["counts"]["stars_beyond_the_box_of_the_fit"] == 0
    nodes = 13 * 9 * 5 if larger else 9 * 5 * 5 + 7 * 5 * 3
    assert run.fit.posterior.log_samples.shape[1] == nodes
    density = DustMap.open(finished)
    assert density.grid == run.run.grid
    assert (density.finer, run.finer) == ((), ())
    x = np.random.default_rng(0).uniform(-1.0, 1.0, (60, 3)) * [40.0, 20.0, 20.0]
    answers = run.at(x)
    np.testing.assert_allclose(density.mean_at(x), answers["density_mean"], rtol=2e-4)
    outside = run.at(np.array([[50.0, 0.0, 0.0], [0.0, 30.0, 0.0]]))
    assert np.isnan(outside["density_mean"]).all()
    with pytest.raises(UserError, match="outside the box"):
        run.query(0.0, 0.0, 50.0)
    field = run.field()
    assert (field.lower, field.upper) == (run.run.grid.lower, run.run.grid.upper)
    with pytest.raises(UserError, match="lie outside the box"):
        field.evaluate(PointValues(torch.tensor([[50.0, 0.0, 0.0]])), COVERAGE)


@pytest.mark.parametrize("seed", [3, 6])
def test_held_out_stars_are_predicted_better_with_grids_around_the_box(
    tmp_path: Path, seed: int
) -> None:
    write_plain_sky(tmp_path, plain_sky(250, seed=seed))
    (tmp_path / "run.toml").write_text(CONFIG)
    scores = []
    for around in ("auto", "none"):
        config = load(tmp_path / "run.toml", ["data.holdout=0.3", f"grid.around={around}"])
        path = tmp_path / around
        execute_run(prepare(config), path, config, False, Stage.EVALUATE)
        report = json.loads((path / "report.json").read_text())
        scores.append(report["held_out_stars"]["loglike"])
    assert scores[0] > scores[1] + 0.05


def test_a_box_without_the_sun_knows_the_dust_before_it(folder: Path, tmp_path: Path) -> None:
    few = "grid.center=[60,0,0]", "grid.size=[60,40,40]", "export.formats=[]"
    answers = []
    for around in ("auto", "none"):
        config = load(folder / "run.toml", [*few, f"grid.around={around}"])
        execute_run(prepare(config), tmp_path / around, config, overwrite=False)
        run = open_run(tmp_path / around)
        assert isinstance(run, StarMap)
        place = np.zeros(1), np.zeros(1), ExactDistances(np.array([60.0]))
        answers.append((run.at_stars(*place), run.percentiles(*place, (0.5,))[0][0, 0]))
    (known, median), (_, unknown) = answers
    assert np.isnan(unknown)
    assert median == pytest.approx(known["extinction_mean"][0], rel=0.2)


def test_a_killed_run_goes_on_with_the_grids_that_it_began_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(folder / "run.toml", ["compute.checkpoint=0"])

    def run(path: Path) -> None:
        execute_run(prepare(config, path), path, config, False, resume=True)

    run(tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "checkpoint" / "grid.json").read_text())
    assert content == {"boxes": [[[80, 40, 40], 10]], "around": [[[120, 80, 40], 10]]}
    assert interrupted(monkeypatch, 2, lambda: run(tmp_path / "broken"), Killed())
    run(tmp_path / "broken")
    assert differences(tmp_path / "whole", tmp_path / "broken") == []


def test_early_runs_have_nothing_around_the_box(folder: Path, tmp_path: Path) -> None:
    config = load(folder / "run.toml", ["grid.around=none"])
    execute_run(prepare(config), tmp_path / "run", config, overwrite=False)
    asked = (tmp_path / "run" / "config.toml").read_text()
    early = "".join(line for line in asked.splitlines(True) if not line.startswith("around = "))
    assert early != asked
    (tmp_path / "run" / "config.toml").write_text(early)
    assert not (tmp_path / "run" / "checkpoint" / "grid.json").exists()
    run = open_run(tmp_path / "run")
    assert isinstance(run, StarMap)
    assert run.run.config.grid.around == ()
    assert np.isfinite(run.query(0.0, 0.0, 30.0)["density_mean"])


def test_grids_around_the_box_give_way_to_the_memory(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fine = "grid.spacing=1", "model.length=4"

    def prepared(*settings: str) -> StarRun:
        run = prepare(load(folder / "run.toml", [*fine, *settings]))
        assert isinstance(run, StarRun)
        return run

    plain, whole = (prepared(f"grid.around={around}") for around in ("none", "auto"))
    allowed = int(1.1 * plain.plan().bytes_needed)
    assert whole.plan().bytes_needed > 1.1 * allowed
    run = prepared(f"compute.memory={allowed}B")
    assert run.config.grid.around == whole.config.grid.around[1:]
    assert run.plan().bytes_needed <= allowed
    assert "no place for nodes 3 pc apart around the box" in caplog.text


def test_the_dry_run_and_exports_know_the_box(
    folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", str(folder / "run.toml"), "--dry-run", "--output", str(tmp_path / "run")]
    assert main(run) == 0
    assert "nodes_around_1" in capsys.readouterr().out
    out = str(tmp_path / "shells.fits")
    shells = ["--format", "healpix", "--nside", "8", "--shells", "10", "15", "--output", out]
    assert main(["export", str(finished), *shells]) == 0
    stars = Table.read(folder / "sky.fits")[:20]
    stars.write(tmp_path / "some.fits")
    capsys.readouterr()
    answer = ["--output", str(tmp_path / "out.csv"), "--json"]
    assert main(["predict", str(finished), "--catalog", str(tmp_path / "some.fits"), *answer]) == 0
    assert json.loads(capsys.readouterr().out)["rows_outside_the_box"] > 0
