"""Runs on stars whose distances are uncertain: the noise they add, kept and brought back."""

import json
from pathlib import Path

import numpy as np
import pytest
from astropy.table import QTable, Table

from dustmap.cli import DONE, main
from dustmap.config import Config, load
from dustmap.gp.functionals import OutsidePolicy
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._distance_rounds import typical_density
from dustmap.runs.stars._grids import grid_of
from dustmap.sky import DustMap
from dustmap.sky.maps import MapRequest, Quantity
from dustmap.sky.observations import observe
from dustmap.sky.stars import GaussianDistances, StarTable, open_star_store
from dustmap.sky.systems import conversion, system_named
from tests.skies import plain_sky

CONFIG = """
[data]
catalog = "stars.ecsv"
system = "A_V"
holdout = 0.2
[grid]
size = [160, 120, 80]
spacing = 20
[model]
density = "gaussian"
length = 40
std = 0.002
mean_density = 0.002
learn = []
[fit]
samples = 4
distance_rounds = 2
[export]
figures = []
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 stars whose distances are known to 20 %, measured well otherwise."""
    path = tmp_path_factory.mktemp("distances")
    sky = plain_sky(80, seed=2)
    rng = np.random.default_rng(0)
    known = 0.2 * sky.true_distance
    table = Table(
        {
            "source_id": sky.stars.source_id,
            "l": sky.stars.l,
            "b": sky.stars.b,
            "distance_pc": np.abs(sky.true_distance + known * rng.standard_normal(80)) + 1.0,
            "distance_error_pc": known,
            "extinction": sky.true_extinction + 0.003 * rng.standard_normal(80),
            "extinction_error": np.full(80, 0.003),
            "noise_free": sky.true_extinction,
        }
    )
    table.write(path / "stars.ecsv")
    (path / "run.toml").write_text(CONFIG)
    return path


def configured(sky: Path, *settings: str) -> Config:
    return load(sky / "run.toml", settings)


@pytest.fixture(scope="module")
def finished(sky: Path) -> StarMap:
    config = configured(sky)
    execute_run(prepare(config), sky / "run", config, overwrite=False)
    found = open_run(sky / "run")
    assert isinstance(found, StarMap)
    return found


def test_every_round_reports_how_the_noise_changed(sky: Path, finished: StarMap) -> None:
    del finished
    told = json.loads((sky / "run" / "report.json").read_text())
    rounds = told["distances"]["rounds"]
    assert 1 <= len(rounds) <= 2
    assert rounds[0]["mean_change_of_the_noise"] > 0.05
    assert rounds[0]["refitted"]
    assert all(line["median_added_std_mag"] > 0 for line in rounds)
    last = rounds[-1]
    assert len(rounds) == 2 or last["mean_change_of_the_noise"] < 0.05
    assert "| Round |" in (sky / "run" / "report.md").read_text()


def test_a_reopened_run_has_the_noise_of_its_distances(sky: Path, finished: StarMap) -> None:
    """Its posterior is that of the map, and its held-out scores are those of the report."""
    mean, field = MapRequest((Quantity.MEAN,)), finished.field()
    again = DustMap.from_field(field, finished.run.grid, mean)
    first = DustMap.open(sky / "run" / "map.zarr")
    np.testing.assert_allclose(again.mean, first.mean, rtol=1e-4, atol=1e-7)
    observed = finished.run.observed
    assert observed.spread is not None
    with np.load(sky / "run" / "checkpoint" / "distances.npz") as kept:
        noise = kept["added_variance"] + observed.error_variance.numpy()
    assert noise.min() > 0.003**2
    assert len(noise) == len(observed)


def test_no_rounds_leave_the_start(sky: Path, tmp_path: Path) -> None:
    config = configured(sky, "fit.distance_rounds=0")
    done = execute_run(prepare(config), tmp_path / "run", config, False, Stage.EVALUATE)
    assert "distances" not in done.sections
    assert "outputs" not in done.sections
    assert done.sections["held_out_stars"]["n"] > 8
    assert not (tmp_path / "run" / "map.zarr").exists()
    assert (tmp_path / "run" / "checkpoint" / "distances.npz").is_file()


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("density", ["gaussian", "lognormal"])
def test_held_out_stars_have_the_noise_of_the_density_that_was_fitted(
    sky: Path, tmp_path: Path, rounds: int, density: str
) -> None:
    """The report scores them as `evaluate` does, though no round has settled what is added."""
    kernel, model = 'model.kernel="matern32"', f'model.density="{density}"'
    outside = 'grid.around="none"', "grid.size=[80, 80, 60]"
    ln = () if density == "gaussian" else ("model.std=0.5", 'model.noise="gaussian"')
    settings = f"fit.distance_rounds={rounds}", model, kernel, "data.refit=false", *outside, *ln
    config = configured(sky, *settings)
    report = execute_run(prepare(config), tmp_path / "run", config, False, Stage.EVALUATE)
    done = open_run(tmp_path / "run")
    assert isinstance(done, StarMap)
    assert done.run.observed.counts.truncated > 10
    table = Table.read(sky / "stars.ecsv")
    ids = done.run.stars.source_id[done.run.observed.rows[done.run.holdout.numpy()]]
    table[np.isin(table["source_id"], ids)].write(tmp_path / "held_out.ecsv")
    told = done.evaluate(tmp_path / "held_out.ecsv", system="A_V")
    for name in ("n", "rmse", "loglike", "chi2", "coverage68"):
        assert told[name] == pytest.approx(report.sections["held_out_stars"][name], rel=1e-6), name


def test_ignoring_the_errors_is_overconfident(sky: Path, finished: StarMap) -> None:
    told = finished.evaluate(sky / "stars.ecsv", system="A_V")
    assert 0.2 < told["chi2"] < 3.0
    predicted = finished.fit.posterior.predict(finished.run.observed.batch.functional)
    y = finished.run.observed.batch.y
    naive = ((y - predicted.mean) ** 2 / (predicted.variance + 0.003**2)).mean()
    assert float(naive) > 1.5 * told["chi2"]


def test_extinctions_without_a_label_are_of_no_system(
    sky: Path, finished: StarMap, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system of the run is not taken in silence; another that is named is converted to it."""
    arguments = ["evaluate", str(sky / "run"), "--catalog", str(sky / "stars.ecsv"), "--json"]
    assert main(arguments) == DONE
    told = capsys.readouterr()
    assert "stars.ecsv: extinctions are A_V\n" in told.err
    assert (
        json.loads(told.out)["rmse"] == finished.evaluate(sky / "stars.ecsv", system="A_V")["rmse"]
    )
    table = Table.read(sky / "stars.ecsv")
    factor = conversion(system_named("A_V"), system_named("A_G"))
    for name in ("extinction", "extinction_error", "noise_free"):
        table[name] *= factor
    table.write(sky / "in-a-g.ecsv", overwrite=True)
    found = finished.evaluate(sky / "in-a-g.ecsv", truth_column="noise_free", system="A_G")
    same = finished.evaluate(sky / "stars.ecsv", truth_column="noise_free", system="A_V")
    assert found["rmse"] == pytest.approx(same["rmse"])
    assert found["truth"]["rmse"] == pytest.approx(same["truth"]["rmse"])


def test_the_typical_density_is_that_of_the_paths_in_the_box(sky: Path) -> None:
    """Stars ten times as far, seen through the same box by the same dust, change nothing."""
    config, far = configured(sky), np.array([400.0, 4000.0])
    grid = grid_of(config.grid)
    for distance in far:
        size = 60
        l = np.linspace(1.0, 351.0, size)
        x, y = np.abs(np.cos(np.radians(l))), np.abs(np.sin(np.radians(l)))
        exits = np.minimum(80.0 / x, 60.0 / y)
        stars = StarTable(
            np.arange(size),
            l,
            np.zeros(size),
            GaussianDistances(np.full(size, distance), np.full(size, 0.1 * distance)),
            0.003 * exits,
            np.full(size, 0.01),
            system_named("A_V"),
        )
        observed = observe(stars, grid, OutsidePolicy.TRUNCATE)
        assert typical_density(config, observed) == pytest.approx(0.003, rel=1e-3)


def test_an_uncertain_distance_widens_a_prediction(sky: Path, finished: StarMap) -> None:
    place = {"l": [90.0, 90.0], "b": [0.0, 0.0], "distance_pc": [30.0, 30.0]}
    for name, errors in (("sure", [1e-4, 1e-4]), ("unsure", [1e-4, 8.0])):
        QTable(place | {"distance_error_pc": errors}).write(sky / f"{name}.ecsv")
    out = {}
    for name in ("sure", "unsure"):
        arguments = ["--catalog", str(sky / f"{name}.ecsv"), "--output", str(sky / f"{name}.csv")]
        assert main(["predict", str(sky / "run"), *arguments]) == DONE
        out[name] = Table.read(sky / f"{name}.csv")
    std, wide = (out[name]["extinction_std"] for name in ("sure", "unsure"))
    assert std[0] == pytest.approx(std[1], rel=1e-3)
    assert wide[0] == pytest.approx(std[0], rel=1e-3)
    assert wide[1] > 1.2 * std[1]
    assert np.isfinite(out["unsure"]["density_mean"]).all()


def test_noise_free_values_are_scored_beside_the_measured_ones(
    sky: Path, finished: StarMap, capsys: pytest.CaptureFixture[str]
) -> None:
    del finished
    arguments = ["--catalog", str(sky / "stars.ecsv"), "--truth-column", "noise_free", "--json"]
    arguments += ["--system", "A_V"]
    assert main(["evaluate", str(sky / "run"), *arguments]) == DONE
    told = json.loads(capsys.readouterr().out)
    names = {"mae", "mse", "rmse", "loglike", "chi2", "coverage68", "coverage95", "n"}
    assert names <= set(told["truth"])
    assert told["truth"]["rmse"] == pytest.approx(told["rmse"], rel=0.1)
    assert told["truth"]["loglike"] > 0.0


def test_the_map_is_in_the_system_that_was_asked_for(sky: Path, tmp_path: Path) -> None:
    """An ingested store in A_V, mapped in A_G: every extinction is multiplied."""
    config = configured(sky)
    execute_run(prepare(config), tmp_path / "first", config, False, Stage.INGEST)
    stored = str(tmp_path / "first" / "stars.zarr")
    assert not list((tmp_path / "first").rglob("posterior*"))
    again = prepare(configured(sky, f"data.catalog={stored}", "data.system=A_G"))
    counts = again.plan().counts
    assert counts["stars_fitted"] + counts["stars_held_out"] == 80
    path = tmp_path / "second"
    execute_run(again, path, configured(sky, "fit.distance_rounds=0"), False, Stage.INGEST)
    one, other = open_star_store(Path(stored)).read(), open_star_store(path / "stars.zarr").read()
    assert other.system.name == "A_G"
    np.testing.assert_allclose(
        other.extinction, conversion(one.system, other.system) * one.extinction
    )
