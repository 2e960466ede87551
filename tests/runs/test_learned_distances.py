"""The distance prior that a run learns: reported, kept, and shared by all that comes after."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.cli import BAD_INPUT, CHECK_FAILED, DONE, main
from dustmap.config import Config, load
from dustmap.runs import Stage, StarMap, execute_run, open_run, places_of_map, prepare
from dustmap.runs.stars._run import StarRun
from dustmap.sky.stars import ExponentialDensity, ParallaxDistances, open_star_store

CONFIG = """
[data]
catalog = "stars.csv"
system = "A_V"
[grid]
size = [160, 120, 80]
spacing = 40
[model]
density = "gaussian"
length = 80
std = 0.002
mean_density = 0.002
learn = []
[fit]
samples = 4
distance_rounds = 0
[export]
figures = []
"""


def write_stars(path: Path, fraction: float, n: int = 240) -> None:
    rng = np.random.default_rng(0)
    d = 70.0 * rng.uniform(size=n) ** (1 / 3)
    error = fraction * np.median(1000.0 / d) * np.exp(0.3 * rng.standard_normal(n))
    columns = {
        "source_id": np.arange(n),
        "l": rng.uniform(0.0, 360.0, n),
        "b": np.degrees(np.arcsin(rng.uniform(-0.5, 0.5, n))),
        "parallax": 1000.0 / d + error * rng.standard_normal(n),
        "parallax_error": error,
        "extinction": 0.002 * d + 0.01 * rng.standard_normal(n),
        "extinction_error": np.full(n, 0.01),
    }
    Table(columns).write(path, overwrite=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learned")
    write_stars(path / "stars.csv", 0.2)
    (path / "run.toml").write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def finished(folder: Path) -> StarMap:
    config = configured(folder)
    execute_run(prepare(config), folder / "run", config, False, Stage.FIT)
    found = open_run(folder / "run")
    assert isinstance(found, StarMap)
    return found


def configured(folder: Path, *settings: str) -> Config:
    return load(folder / "run.toml", settings)


def prior_of(config: Config) -> object:
    run = prepare(config)
    assert isinstance(run, StarRun)
    assert isinstance(run.stars.distances, ParallaxDistances)
    return run.stars.distances.prior


def test_what_was_learned_is_reported(folder: Path, finished: StarMap) -> None:
    del finished
    told = json.loads((folder / "run" / "report.json").read_text())["data"]
    prior = told["distance_prior"]
    assert prior["nonparametric"]
    assert (prior["stars"], prior["stars_used"], prior["stars_too_negative"]) == (240, 240, 0)
    assert prior["distance_p50_pc"] == pytest.approx(70.0 * 0.5 ** (1 / 3), rel=0.1)
    assert told["median_parallax_error_over_parallax"] == pytest.approx(0.2, abs=0.03)
    assert "% of the parallaxes (median)" in told["warning"]
    assert "distance_p50_pc" in (folder / "run" / "report.md").read_text()


def test_all_that_comes_after_has_the_prior_of_the_run(
    folder: Path, finished: StarMap, caplog: pytest.LogCaptureFixture
) -> None:
    """The reopened run, the places of predict and query, other catalogs, tiles, an ingested store
    and a run on it."""
    kept = finished.run.stars.distances
    assert isinstance(kept, ParallaxDistances)
    assert isinstance(kept.prior, ExponentialDensity)
    assert kept.prior.ratio is not None
    assert prior_of(configured(folder)) == kept.prior
    assert prior_of(configured(folder, "data.tile=1/0")) == kept.prior
    write_stars(folder / "others.csv", 0.5, n=3)
    in_run = places_of_map(folder / "run/map.zarr", folder / "others.csv", "generic").distances
    assert isinstance(in_run, ParallaxDistances)
    assert in_run.prior == kept.prior
    # A copy of the configuration without the stars does not know of it, and says so.
    alone = folder / "alone"
    alone.mkdir(exist_ok=True)
    shutil.copy(folder / "run/config.toml", alone)
    with caplog.at_level("WARNING", "dustmap"):
        other = places_of_map(alone / "map.zarr", folder / "others.csv", "generic").distances
    assert isinstance(other, ParallaxDistances)
    assert other.prior != kept.prior
    assert "parallaxes have the default prior, not that of the run" in caplog.text
    places = places_of_map(folder / "run", folder / "others.csv", "generic")
    assert isinstance(places.distances, ParallaxDistances)
    assert places.distances.prior == kept.prior
    arguments = ["--catalog", str(folder / "others.csv"), "--output", str(folder / "answers.csv")]
    assert main(["predict", str(folder / "run"), *arguments]) == DONE
    expected = finished.at_stars(places.l, places.b, places.distances)["extinction_mean"]
    answers = Table.read(folder / "answers.csv")["extinction_mean"]
    np.testing.assert_allclose(np.ma.filled(answers, np.nan), expected, rtol=1e-6)
    store = str(folder / "stars.zarr")
    catalog = str(folder / "stars.csv")
    assert main(["ingest", catalog, "--system", "A_V", "--output", store]) == DONE
    ingested = next(open_star_store(store).chunks()).distances
    assert isinstance(ingested, ParallaxDistances)
    assert ingested.prior == kept.prior
    assert prior_of(configured(folder, f"data.catalog={store}")) == kept.prior


def test_a_prior_is_stated_when_stars_are_ingested(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, catalog = str(tmp_path / "flat.zarr"), str(folder / "stars.csv")
    options = ["--distance-prior", "flat-parallax", "--system", "A_V", "--output", store]
    assert main(["ingest", catalog, *options]) == DONE
    assert open_star_store(store).attributes["distance_prior"] == "flat-parallax"
    settings = [f"data.catalog={store}", "data.distance_prior=exponential-density"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    arguments += ["--output", str(tmp_path / "run")]
    assert main(["run", str(folder / "run.toml"), *arguments]) == BAD_INPUT
    told = capsys.readouterr().err
    assert "data.distance_prior" in told
    assert "dustmap ingest" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("fraction", "code"), [(0.1, DONE), (0.45, CHECK_FAILED)])
def test_poor_parallaxes_fail_a_check(tmp_path: Path, fraction: float, code: int) -> None:
    write_stars(tmp_path / "stars.csv", fraction)
    (tmp_path / "run.toml").write_text(CONFIG)
    config = configured(tmp_path)
    done = execute_run(prepare(config), tmp_path / "run", config, False, Stage.INGEST)
    (check,) = (c for c in done.checks if c.name == "median parallax error / parallax")
    assert check.value == pytest.approx(fraction, rel=0.2)
    assert done.passed == (code == DONE)
    assert ("warning" in done.sections["data"]) == (code != DONE)


def test_stars_to_compare_have_the_prior_of_the_run(folder: Path, finished: StarMap) -> None:
    own = finished.run.stars.distances
    distances = finished.read(folder / "stars.csv", "generic", "A_V").stars.distances
    assert isinstance(own, ParallaxDistances)
    assert isinstance(distances, ParallaxDistances)
    assert distances.prior == own.prior
