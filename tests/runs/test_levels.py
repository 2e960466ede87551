"""Runs on nested grids, from the configuration to the answers; and levels that stars choose."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord

from dustmap.cli import main
from dustmap.config import Config, from_mapping, load
from dustmap.errors import UserError
from dustmap.gp import NestedGrids, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.inference import LogNormalPosterior, PathwisePosterior
from dustmap.runs import StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._grids import nodes_of
from dustmap.runs.stars._resolution import with_levels
from dustmap.sky import DustMap
from dustmap.sky.maps import MapRequest, Quantity
from dustmap.sky.stars import ExactDistances, StarTable
from dustmap.sky.systems import system_named
from tests.run_outputs import differences
from tests.runs.test_resume import Killed, interrupted
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.2
refit = false
[grid]
levels = [{size = [60, 40, 40], spacing = 5}, {size = [120, 80, 40], spacing = 10}]
[model]
kernel = "matern32"
length = 40
std = 0.8
mean_density = 0.002
learn = ["mean"]
[fit]
samples = 4
[export]
formats = ["zarr"]
figures = []
samples = 4
"""
COVERAGE = MapRequest((Quantity.COVERAGE,))
#: What makes the density Gaussian, beside the configuration.
GAUSSIAN = ("model.density=gaussian", "model.std=0.002", "model.noise=gaussian", "fit.samples=32")
LEVELS = [{"size": [60, 40, 40], "spacing": 5}, {"size": [120, 80, 40], "spacing": 10}]


def configured(**grid: object) -> Config:
    return from_mapping({"data": {"catalog": "stars.fits"}, "grid": grid})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("levels")
    write_plain_sky(path, plain_sky(250, seed=2))
    (path / "run.toml").write_text(CONFIG)
    config = load(path / "run.toml")
    execute_run(prepare(config), path / "run", config, overwrite=False)
    return path / "run"


@pytest.fixture(scope="module")
def gaussian(finished: Path) -> Path:
    """The same stars with a Gaussian density."""
    config = load(finished.parent / "run.toml", GAUSSIAN)
    execute_run(prepare(config), finished.parent / "gaussian", config, overwrite=False)
    return finished.parent / "gaussian"


def test_the_coarsest_level_is_the_box() -> None:
    config = configured(levels=LEVELS)
    assert (config.grid.size, config.grid.spacing) == ((120.0, 80.0, 40.0), 10.0)
    assert config.grid.finest == 5.0
    nodes = nodes_of(config.grid)
    assert isinstance(nodes, NestedGrids)
    assert [grid.shape for grid in nodes.grids] == [(13, 9, 5), (13, 9, 9)]
    one = configured(levels=LEVELS[1:])
    assert isinstance(nodes_of(one.grid), RegularGrid)
    written = configured(levels=LEVELS, size=[1000, 1000, 400], spacing=20)  # by config --example
    assert written.grid == config.grid


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"levels": [{"size": [60, 40, 40]}]}, "a list of levels"),
        ({"levels": [{"size": [60, 40, 40], "spacing": 0}]}, "positive length"),
        ({"levels": LEVELS, "spacing": 5}, "leave grid.spacing out"),
        ({"levels": LEVELS, "size": [40, 40, 40]}, "leave grid.size out"),
        ({"levels": [*LEVELS, {"size": [20, 20, 20], "spacing": 3}]}, "2, 3, .. times"),
        ({"levels": [{"size": [50, 40, 40], "spacing": 5}, LEVELS[1]]}, "expected 60 or 40"),
        ({"levels": [{"size": [240, 40, 40], "spacing": 5}, LEVELS[1]]}, "expected 120"),
        ({"levels": "auto", "spacing": "auto"}, "name a length"),
        ({"levels": "some"}, "a list of levels"),
    ],
)
def test_levels_that_do_not_fit_say_what_would(grid: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        configured(**grid)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"fit": {"engine": "hip"}, "model": {"density": "gaussian"}}, 'engine "global"'),
        ({"fit": {"engine": "exact"}, "model": {"density": "gaussian"}}, 'engine "global"'),
        ({"model": {"density": "gaussian", "line_integral": "quadrature"}}, 'take "table"'),
        ({"data": {"catalog": "stars.fits", "tile": "1/3"}}, "data.tile"),
    ],
)
def test_levels_are_for_whole_skies_and_the_global_engine(
    rest: dict[str, object], words: str
) -> None:
    content = {"data": {"catalog": "stars.fits"}, "grid": {"levels": LEVELS}, **rest}
    with pytest.raises(UserError, match=rf"grid\.levels.*{words}"):
        from_mapping(content)


def test_the_map_has_the_finest_density(finished: Path) -> None:
    run = open_run(finished)
    assert isinstance(run, StarMap)
    density = DustMap.open(finished)
    assert [level.grid.spacing[0] for level in density.finer] == [5.0]
    x = np.random.default_rng(0).uniform([-55, -35, -18], [55, 35, 18], (60, 3))
    at = SkyCoord(*x.T * u.pc, representation_type="cartesian", frame="galactic")
    answers = run.at(x)
    np.testing.assert_allclose(density.query(at), answers["density_mean"], rtol=2e-4)
    np.testing.assert_allclose(
        density.query(at, integrated=True), answers["extinction_mean"], rtol=2e-2
    )
    report = json.loads((finished / "report.json").read_text())
    assert report["grid"]["levels"] == "10 pc in 120 × 80 × 40 pc; 5 pc in 60 × 40 × 40 pc"
    assert report["counts"]["nodes_of_level_1"] == [13, 9, 9]
    assert report["held_out_stars"]["chi2"] < 2.0


def test_a_box_in_a_fine_level_has_its_spacing(finished: Path) -> None:
    opened = open_run(finished)
    assert isinstance(opened, StarMap)
    fine = opened.finer[-1]
    inner = [v for low, high in zip(fine.lower, fine.upper, strict=True) for v in (low, high)]
    assert opened.grid(inner, None) == fine
    whole = opened.run.grid
    outer = [v for low, high in zip(whole.lower, whole.upper, strict=True) for v in (low, high)]
    assert opened.grid(outer, None) == whole


def test_a_cube_of_one_spacing_says_that_it_is_the_coarsest(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(finished), "--format", "gtomo", "--output"]
    assert main([*arguments, str(tmp_path / "whole.h5")]) == 0
    assert "a cube of one spacing: 10 pc, the coarsest level's" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "fine.h5"), "--step", "5"]) == 0
    assert "in the cells where one level meets another" in capsys.readouterr().err
    opened = open_run(finished)
    assert isinstance(opened, StarMap)
    fine = opened.finer[-1]
    inner = [f"{v}" for low_high in zip(fine.lower, fine.upper, strict=True) for v in low_high]
    assert main([*arguments, str(tmp_path / "inner.h5"), "--box", *inner]) == 0
    assert "one spacing" not in capsys.readouterr().err
    scene = ["--format", "glb", "--iso", "0.001", "--output", str(tmp_path / "dust.glb")]
    assert main(["export", str(finished), *scene]) == 0
    assert "one spacing" not in capsys.readouterr().err


def test_a_scene_has_the_finest_density(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    surfaces = []
    level = float(np.nanmean(DustMap.open(finished).mean))
    (map_path,) = (path for path in finished.glob("map.*") if path.suffix in (".zarr", ".fits"))
    for number, source in enumerate((finished, map_path)):
        out = str(tmp_path / f"{number}.glb")
        options = ["--format", "glb", "--iso", str(level), "--json", "--output", out]
        assert main(["export", str(source), *options]) == 0
        surfaces.append(json.loads(capsys.readouterr().out)["triangles"])
    # On the coarse nodes alone there are a quarter of these.
    assert surfaces[0] == pytest.approx(surfaces[1], rel=0.02)


def test_a_finished_run_has_the_densities_of_all_levels(finished: Path) -> None:
    run = open_run(finished)
    assert isinstance(run, StarMap)
    posterior = run.fit.posterior
    assert isinstance(posterior, LogNormalPosterior)
    assert posterior.log_samples.shape == (4, 13 * 9 * 5 + 13 * 9 * 9)


def test_a_gaussian_map_has_the_finest_density(gaussian: Path) -> None:
    run, density = open_run(gaussian), DustMap.open(gaussian)
    assert isinstance(run, StarMap)
    assert isinstance(run.fit.posterior, PathwisePosterior)
    assert [level.grid.spacing[0] for level in density.finer] == [5.0]
    for level in (density, *density.finer):
        x = level.grid.points().numpy()
        x = x[np.random.default_rng(0).permutation(len(x))[:40]]
        finest = level.grid.spacing[0] == 5.0
        x = x if finest else x[(np.abs(x) > [30.0, 20.0, 20.0]).any(1)]
        at = SkyCoord(*x.T * u.pc, representation_type="cartesian", frame="galactic")
        answers = run.at(x)
        np.testing.assert_allclose(density.query(at), answers["density_mean"], rtol=1e-4)
        np.testing.assert_allclose(density.query(at, "std"), answers["density_std"], rtol=1e-3)
        seen = run.field().evaluate(PointValues(torch.from_numpy(x)), COVERAGE)["coverage"]
        assert 0.0 <= seen.min() < seen.max() <= 1.0
        assert density.query(at, "samples").shape == (len(x), 4)
    x = np.random.default_rng(0).uniform([-55, -35, -18], [55, 35, 18], (60, 3))
    at = SkyCoord(*x.T * u.pc, representation_type="cartesian", frame="galactic")
    np.testing.assert_allclose(
        density.query(at, integrated=True), run.at(x)["extinction_mean"], rtol=3e-2, atol=1e-3
    )
    report = json.loads((gaussian / "report.json").read_text())
    assert report["grid"]["levels"] == "10 pc in 120 × 80 × 40 pc; 5 pc in 60 × 40 × 40 pc"
    assert report["held_out_stars"]["chi2"] < 2.0


@pytest.mark.slow
def test_a_gaussian_map_is_that_of_one_fine_grid_where_both_resolve(gaussian: Path) -> None:
    config = load(gaussian.parent / "run.toml", GAUSSIAN)
    fine = replace(config, grid=replace(config.grid, levels=(), spacing=5.0))
    execute_run(prepare(fine), gaussian.parent / "fine", fine, overwrite=False)
    runs = [open_run(path) for path in (gaussian, gaussian.parent / "fine")]
    x = np.random.default_rng(0).uniform(-18, 18, (200, 3))
    answers = []
    for run in runs:
        assert isinstance(run, StarMap)
        answers.append(run.at(x))
    levelled, one = answers
    for quantity in ("density", "extinction"):
        apart = (levelled[f"{quantity}_mean"] - one[f"{quantity}_mean"]) / one[f"{quantity}_std"]
        assert np.sqrt(np.mean(apart**2)) < 0.1
        # Of 32 draws each a standard deviation is known to 12 %; their mean over places better.
        ratio = levelled[f"{quantity}_std"] / one[f"{quantity}_std"]
        assert np.mean(ratio) == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_a_killed_gaussian_fit_goes_on_to_the_same_bits(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*GAUSSIAN, 'model.learn=["mean","std"]', "compute.checkpoint=0")
    config = load(finished.parent / "run.toml", settings)
    whole, broken = finished.parent / "whole", tmp_path / "broken"

    def run(path: Path) -> None:
        execute_run(prepare(config, path), path, config, False, resume=True)

    run(whole)
    assert interrupted(monkeypatch, 3, lambda: run(broken), Killed())
    run(broken)
    assert differences(whole, broken) == []


def stars_at(distances: np.ndarray) -> StarTable:
    n = len(distances)
    generator = np.random.default_rng(0)
    l, b = 360.0 * generator.random(n), np.degrees(np.arcsin(2.0 * generator.random(n) - 1.0))
    return StarTable(
        source_id=np.arange(n),
        l=l,
        b=b,
        distances=ExactDistances(distances),
        extinction=np.full(n, 0.1),
        extinction_error=np.full(n, 0.01),
        system=system_named("A_V"),
    )


def test_stars_choose_levels_by_their_density() -> None:
    config = configured(levels="auto", size=[3000, 3000, 800], spacing=5)
    distances = 1500.0 * np.random.default_rng(1).random(20_000) ** (1 / 3)
    chosen = with_levels(config, stars_at(distances)).grid
    sizes, spacings = zip(*chosen.boxes, strict=True)
    assert spacings == (80.0, 20.0, 5.0)
    assert chosen.size == sizes[0] == (3040.0, 3040.0, 800.0)
    # Where a level ends, 4π (d / 2h)² stars are beyond it.
    for (size, spacing), around in zip(chosen.boxes[1:], spacings, strict=False):
        reach = 0.5 * max(size)
        apart = reach * np.sqrt(4.0 * np.pi / (distances > reach).sum())
        assert apart == pytest.approx(2.0 * spacing, rel=2.0 * around / reach)
    assert isinstance(nodes_of(chosen), NestedGrids)
    again = from_mapping(
        {"data": {"catalog": "stars.fits"}, "grid": {"levels": [list(v) for v in chosen.levels]}}
    )
    assert again.grid.boxes == chosen.boxes


def test_few_stars_or_a_small_box_need_one_grid() -> None:
    config = configured(levels="auto", size=[100, 100, 100], spacing=10)
    chosen = with_levels(config, stars_at(np.linspace(10.0, 50.0, 5000)))
    assert chosen.grid.levels == ()
    assert chosen.grid == replace(config.grid, levels=())
