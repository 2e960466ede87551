"""Skies that are finer than the grid of a map, and skies that are not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy.coordinates import SkyCoord
from astropy.table import Table

from dustmap.config import load
from dustmap.runs import Stage, execute_run, open_star_map, prepare, prior_sky
from dustmap.runs.stars._model import Hyperparameters
from dustmap.sky import DustMap, cartesian
from dustmap.sky.simulation import Measurements, simulate, write_sky
from dustmap.sky.stars import ExactDistances

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.4
refit = false
[grid]
size = [200, 200, 120]
spacing = 20
[model]
length = 60
std = 1.0
mean_density = 0.002
learn = []
[fit]
samples = 16
[export]
formats = ["zarr"]
quantities = ["mean", "std"]
samples = 16
figures = []
"""


def run(folder: Path, spacing: float, *settings: str, stars: int = 1200) -> dict[str, Any]:
    """The report of a run on a sky drawn from the run's own prior on a grid of this spacing."""
    (folder / "run.toml").write_text(CONFIG)
    config = load(folder / "run.toml", settings)
    measurements = Measurements(error=0.01, scatter=0.0, outliers=0.0)
    model = replace(prior_sky(config, spacing), measurements=measurements)
    write_sky(folder / "all.fits", simulate(model, stars, seed=4), exact_distances=True)
    table, seen = Table.read(folder / "all.fits"), 3 * stars // 4
    table[:seen].write(folder / "sky.fits")
    table[seen:].write(folder / "unseen.fits")
    execute_run(prepare(config), folder / "run", config, False, Stage.EXPORT)
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def finer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a sky four times as fine as its grid."""
    folder = tmp_path_factory.mktemp("finer")
    run(folder, 5.0)
    return folder


def truth_scores(folder: Path) -> dict[str, float]:
    scores = open_star_map(folder / "run").evaluate(
        folder / "unseen.fits", truth_column="true_extinction"
    )
    truth: dict[str, float] = scores["truth"]
    return truth


def test_a_sky_finer_than_the_grid_is_seen_in_stars_that_were_held_out(finer: Path) -> None:
    report = json.loads((finer / "run" / "report.json").read_text())
    section = report["unresolved"]
    assert section["stars"] == section["held_out"] == 360
    assert 0.6 < section["factor"] < 2.0
    held_out = report["held_out_stars"]
    assert 0.6 < held_out["coverage68"] < 0.76
    assert 0.7 < held_out["chi2"] < 1.3
    hyperparameters = json.loads((finer / "run" / "checkpoint/hyperparameters.json").read_text())
    assert hyperparameters["unresolved"] == section["factor"]


def test_without_its_variance_extinctions_would_be_too_sure_of_themselves(
    finer: Path, tmp_path: Path
) -> None:
    """On the average of two splits and their draws: of five, χ² by 16 samples is 0.9 to 1.5."""
    run(tmp_path, 5.0, "fit.seed=1", "export.formats=[]")
    honest, sure = list[dict[str, float]](), list[dict[str, float]]()
    for folder in (finer, tmp_path):
        path = folder / "run" / "checkpoint" / "hyperparameters.json"
        text = path.read_text()
        honest.append(truth_scores(folder))
        path.write_text(json.dumps(json.loads(text) | {"unresolved": 0.0}))
        try:
            sure.append(truth_scores(folder))
        finally:
            path.write_text(text)
        assert honest[-1]["rmse"] == sure[-1]["rmse"]

    def mean(scores: list[dict[str, float]], name: str) -> float:
        return float(np.mean([each[name] for each in scores]))

    assert mean(sure, "chi2") > 2.0
    assert mean(sure, "coverage68") < 0.6
    assert 0.8 < mean(honest, "chi2") < 1.25
    assert 0.62 < mean(honest, "coverage68") < 0.78
    assert mean(honest, "loglike") > mean(sure, "loglike") + 0.1


def test_a_map_says_of_extinctions_what_the_run_says(finer: Path) -> None:
    """From its samples, as any client of a map takes them; places of densities are its voxels."""
    table = Table.read(finer / "unseen.fits")
    l, b, d = (np.asarray(table[name], dtype=float) for name in ("l", "b", "distance_pc"))
    star_map, stored = open_star_map(finer / "run"), DustMap.open(finer / "run" / "map.zarr")
    predicted = star_map.at_stars(l, b, ExactDistances(d))
    places = SkyCoord(l, b, distance=d, unit=("deg", "deg", "pc"), frame="galactic")
    mean = stored.query(places, mode="mean", integrated=True)
    std = stored.query(places, mode="std", integrated=True)
    np.testing.assert_allclose(mean, predicted["extinction_mean"], rtol=1e-4)
    ratio = np.median(std / predicted["extinction_std"])
    assert ratio == pytest.approx(1.0, abs=0.1)


def test_a_sky_on_the_grid_stays_what_it_was(tmp_path: Path) -> None:
    report = run(tmp_path, 20.0, "export.formats=[]")
    assert report["unresolved"]["factor"] < 0.5
    truth = truth_scores(tmp_path)
    assert 0.8 < truth["chi2"] < 1.25


def test_without_stars_held_out_the_factor_is_one(tmp_path: Path) -> None:
    settings = ("data.holdout=0", "model.noise=gaussian", "fit.samples=4", "export.formats=[]")
    report = run(tmp_path, 20.0, *settings, stars=60)
    assert report["unresolved"]["factor"] == 1.0
    assert report["unresolved"]["stars"] == 0


def test_a_gaussian_density_has_no_such_part(tmp_path: Path) -> None:
    settings = ("model.density=gaussian", "model.std=0.002", "model.noise=gaussian")
    few = ("fit.samples=4", "export.formats=[]")
    assert "unresolved" not in run(tmp_path, 20.0, *settings, *few, stars=60)


def test_what_nodes_hold_is_learned_with_the_length_and_kept(tmp_path: Path) -> None:
    settings = ("data.holdout=0.1", "data.refit=true", "fit.samples=4", "export.formats=[]")
    learn = 'model.learn=["length", "std", "mean", "noise"]'
    report = run(tmp_path, 5.0, *settings, learn, "model.noise=gaussian", stars=200)
    found = report["hyperparameters"]["projection"]
    assert 0.0 < found < 1.0
    assert found != 0.9  # where it starts
    errors = report["hyperparameter_errors"]
    learned = {"length", "std", "mean", "disc_height", "disc_length", "disc_plane"}
    learned |= {"noise", "projection", "unresolved"}
    assert errors.keys() - {"nu", "held"} == learned
    assert errors["unresolved"] == report["unresolved"]["factor_std"]
    shown = (tmp_path / "run" / "report.md").read_text()
    assert "| Of | Value | Error | Unit |" in shown
    assert f"| {errors['length']:.5g} | pc |" in shown
    kept = json.loads((tmp_path / "run" / "checkpoint" / "refit.json").read_text())
    assert kept["projection"] == pytest.approx(found, abs=1e-9)


def test_held_lengths_and_earlier_runs_have_values_at_the_nodes(finer: Path) -> None:
    text = (finer / "run" / "checkpoint/hyperparameters.json").read_text()
    assert "projection" not in json.loads(text)
    assert Hyperparameters.from_dict(json.loads(text)).projection == 0.0


@pytest.mark.slow
def test_noise_of_outliers_does_not_take_its_place(tmp_path: Path) -> None:
    """Errors of 0.03 mag and outliers, where ν = 5 is as wide as noise and what is missing: four
    skies that the prior has drawn on finer nodes, each as uncertain as it is."""
    factors, chi2, within = list[float](), list[float](), list[float]()
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "run.toml").write_text(CONFIG)
        learn = "model.learn=['length','std','mean','noise']"
        config = load(folder / "run.toml", (learn, "export.formats=[]"))
        model = replace(prior_sky(config, 5.0), measurements=Measurements(error=0.03))
        write_sky(folder / "all.fits", simulate(model, 3000, seed=seed), exact_distances=True)
        table = Table.read(folder / "all.fits")
        table[:2000].write(folder / "sky.fits")
        table[2000:].write(folder / "unseen.fits")
        report = execute_run(prepare(config), folder / "run", config, False, Stage.EVALUATE)
        factors.append(report.sections["unresolved"]["factor"])
        scores = truth_scores(folder)
        chi2.append(scores["chi2"])
        within.append(scores["coverage68"])
    assert 0.5 < float(np.mean(factors)) < 2.0, factors
    assert 0.7 < float(np.mean(chi2)) < 1.4, chi2
    assert 0.6 < float(np.mean(within)) < 0.8, within


def test_a_learned_scale_of_the_noise_does_not_take_its_place(tmp_path: Path) -> None:
    learn = ('model.learn=["noise"]', "model.noise=gaussian", "export.formats=[]")
    report = run(tmp_path, 5.0, *learn, stars=2400)
    assert report["hyperparameters"]["noise"] > 1.1
    section = report["unresolved"]
    assert section["stars"] == section["held_out"] == 720
    assert section["factor"] > 4.0 * section["factor_std"]
    assert 0.6 < truth_scores(tmp_path)["chi2"] < 1.4


@pytest.mark.slow
def test_uncertain_distances_do_not_pass_for_dust_between_the_nodes(tmp_path: Path) -> None:
    """Parallaxes are off by 10 %: with one normal distribution for each star the factor is 18. Of a
    sky with little dust, as the first one, 350 stars say less."""
    factors, errors, gains, within = [], [], [], []
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "run.toml").write_text(CONFIG)
        config = load(folder / "run.toml", ("export.formats=[]",))
        parallaxes = Measurements(error=0.01, scatter=0.0, outliers=0.0, parallax_scale=60.0)
        model = replace(prior_sky(config, 5.0), measurements=parallaxes)
        write_sky(folder / "sky.fits", simulate(model, 1200, seed=seed))
        report = execute_run(prepare(config), folder / "run", config, False, Stage.EVALUATE)
        section = report.sections["unresolved"]
        assert 300 < section["held_out"] < 480  # the others may be behind the box
        factors.append(section["factor"])
        errors.append(section["factor_std"])
        # Measurements are scored at the places where their stars may be.
        found = open_star_map(folder / "run")
        assert found.unseen is not None
        alone = found.fit.predictions(found.run.observed, found.run.holdout).scores()
        scores = found.unseen.scores()
        assert scores.loglike > alone.loglike
        assert scores.crps < alone.crps
        assert scores.rmse == pytest.approx(alone.rmse, rel=0.01)
        gains.append(scores.loglike - alone.loglike)
        within.append(scores.coverage68)
    assert 0.5 < float(np.mean(factors)) < 2.0, factors
    assert (np.abs(np.subtract(factors, 1.0)) < 2.5 * np.array(errors)).all(), (factors, errors)
    assert float(np.median(errors)) < 1.0, errors
    assert float(np.mean(gains)) > 0.02, gains
    assert 0.62 < float(np.mean(within)) < 0.76, within


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["clouds", "errors"])
def test_outliers_are_told_from_stars_behind_clouds_that_the_grid_lacks(
    tmp_path: Path, cause: str
) -> None:
    """Clouds of 8 pc at 60 pc, or as many stars at random, on top of a sky on the grid."""
    run(tmp_path, 20.0, "export.formats=[]", stars=3000)
    table, generator = Table.read(tmp_path / "all.fits"), np.random.default_rng(0)
    if cause == "clouds":
        clouds = generator.standard_normal((8, 3))
        clouds /= np.linalg.norm(clouds, axis=1, keepdims=True)
        near = cartesian(table["l"], table["b"], 1.0) @ clouds.T > np.cos(8.0 / 60.0)
        spoilt = near.any(1) & np.asarray(table["distance_pc"] > 60.0)
    else:
        spoilt = generator.random(len(table)) < 0.05
    table["extinction"][spoilt] += 0.5
    table[:2250].write(tmp_path / "sky.fits", overwrite=True)
    config = load(tmp_path / "run.toml", ("export.formats=[]",))
    execute_run(prepare(config), tmp_path / "again", config, False, Stage.EXPORT)
    checks = json.loads((tmp_path / "again" / "report.json").read_text())["checks"]
    (check,) = (line for line in checks if line["name"] == "share of outliers with another behind")
    assert check["passed"] == (cause == "errors")
    # Some of the clouds are in the map: of outliers among all stars, not of held-out ones alone.
    assert check["value"] > 0.2 if cause == "clouds" else check["value"] < 0.1
