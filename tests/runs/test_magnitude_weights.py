"""Runs whose distances are weighted behind a magnitude limit: states, results, and where not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.config import load
from dustmap.errors import UserError
from dustmap.runs import Stage, StarMap, execute_run, open_run, open_star_map, prepare
from dustmap.runs.stars._distances import are_placed, predictions
from dustmap.runs.stars._run import prepare_stars
from dustmap.sky.simulation import (
    Measurements,
    Population,
    SkyModel,
    StructuredDust,
    simulate,
    write_sky,
)
from tests.run_outputs import differences
from tests.runs.test_resume import Killed, interrupted

CONFIG = """
[data]
catalog = "sky.fits"
system = "A_V"
holdout = 0.2
refit = false
[grid]
size = [160, 160, 80]
spacing = 20
[model]
mean_density = 0.005
length = 40
noise = "gaussian"
learn = ["mean"]
[fit]
samples = 4
max_steps = 50
[export]
formats = []
figures = []
[compute]
checkpoint = 0
"""
LIMIT = ("data.magnitude_limit=14", "data.magnitude_column=g_mag")


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 stars within a limit, parallaxes known to 30 % at 80 pc, behind 0.8 mag there."""
    path = tmp_path_factory.mktemp("weights")
    dust = StructuredDust(plane_density=0.01)
    measured = Measurements(parallax_scale=200.0, outliers=0.0)
    model = SkyModel(
        (160.0, 160.0, 80.0), dust=dust, population=Population(limit=14.0), measurements=measured
    )
    write_sky(path / "sky.fits", simulate(model, 150, 3))
    (path / "run.toml").write_text(CONFIG)
    return path


def run(sky: Path, path: Path, *settings: str) -> None:
    config = load(sky / "run.toml", settings)
    execute_run(prepare(config, path), path, config, False, Stage.EVALUATE, resume=True)


@pytest.fixture(scope="module")
def weighted(sky: Path) -> Path:
    run(sky, sky / "weighted", *LIMIT)
    return sky / "weighted"


@pytest.fixture(scope="module")
def free(sky: Path) -> Path:
    """Without a limit."""
    run(sky, sky / "free")
    return sky / "free"


def posterior(path: Path) -> dict[str, bytes]:
    """The arrays of the fit and of what distances add."""
    found = dict[str, bytes]()
    for name in ("posterior.npz", "distances.npz", "held_out.npz"):
        with np.load(path / "checkpoint" / name) as stored:
            found |= {f"{name}/{key}": stored[key].tobytes() for key in stored.files}
    return found


def test_weights_are_of_the_stars_and_in_the_report(sky: Path, weighted: Path) -> None:
    line, *_ = json.loads((weighted / "report.json").read_text())["distances"]["rounds"]
    assert line["refitted"]
    assert line["median_change_of_the_distances"] > 0.0
    assert 20 <= line["stars_of_the_luminosity_function"] <= 150
    assert "Median change of the distances" in (weighted / "report.md").read_text()
    with np.load(weighted / "checkpoint" / "distances.npz") as stored:
        log_weight = stored["selection_log_weight"]
    assert log_weight.shape[1] == 33
    assert (log_weight <= 0.0).all()
    assert log_weight.min() < -0.02
    found = open_run(weighted)
    assert isinstance(found, StarMap)
    rays = found.run.observed.batch.functional
    alone = prepare_stars(load(sky / "run.toml")).observed.batch.functional
    assert float((rays.moments() / alone.moments() - 1.0)[:, 0].abs().max()) > 1e-4


def test_without_weights_or_a_limit_the_bits_are_the_same(
    sky: Path, weighted: Path, free: Path, tmp_path: Path
) -> None:
    run(sky, tmp_path / "off", *LIMIT, "data.magnitude_weights=false")
    assert posterior(free) == posterior(tmp_path / "off")
    assert posterior(free) != posterior(weighted)


def test_a_reopened_run_predicts_with_weighted_distances(weighted: Path) -> None:
    found = open_run(weighted)
    assert isinstance(found, StarMap)
    assert found.unseen is not None
    again = predictions(found.fit, found.run.observed, found.run.holdout)
    np.testing.assert_array_equal(again.mean, found.unseen.mean)
    np.testing.assert_array_equal(again.std, found.unseen.std)


@pytest.mark.parametrize("states", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_rounds_with_weights_go_on_to_the_same_bits(
    sky: Path, weighted: Path, tmp_path: Path, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed again and again: after a first fit, its weights, a second fit, the result."""
    path, ends = tmp_path / "run", 0
    while interrupted(monkeypatch, states, lambda: run(sky, path, *LIMIT), Killed()):
        ends += 1
    assert ends >= 2
    assert differences(weighted, path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("model.noise=student-t",),
        ("model.density=gaussian", "model.std=0.005"),
        ("fit.engine=exact", "model.std=0.005"),
        ("fit.engine=hip", "model.std=0.005"),
        ("grid.outside=prior", "data.refit=true"),
        ("grid.levels=[{size=[160,160,80],spacing=20},{size=[80,80,40],spacing=10}]",),
        ("data.distance_prior=flat-parallax", "fit.distance_rounds=3"),
    ],
)
def test_every_engine_takes_weighted_distances(
    sky: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    run(sky, tmp_path / "run", *LIMIT, *settings)
    lines = json.loads((tmp_path / "run" / "report.json").read_text())["distances"]["rounds"]
    assert lines[0]["median_change_of_the_distances"] > 0.0
    assert isinstance(open_run(tmp_path / "run"), StarMap)


def test_few_stars_are_not_weighted(
    sky: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where hardly any is within the limit, with which there are up to three rounds."""
    run(sky, tmp_path / "run", *LIMIT, "data.magnitude_limit=6")
    assert "distances are not weighted" in caplog.text
    run(sky, tmp_path / "free", "fit.distance_rounds=3")
    assert posterior(tmp_path / "run") == posterior(tmp_path / "free")


def test_tiles_are_refused(sky: Path) -> None:
    with pytest.raises(UserError, match=r"data\.magnitude_weights = false"):
        load(sky / "run.toml", [*LIMIT, "data.tile=1/0"])
    load(sky / "run.toml", [*LIMIT, "data.tile=1/0", "data.magnitude_weights=false"])


def test_means_of_stars_are_predicted_at_no_one_place(free: Path) -> None:
    finished = open_star_map(free)
    fit, observed = finished.fit, finished.run.observed
    index = torch.arange(len(observed))
    placed = are_placed(fit, observed, index)
    assert placed.any()
    assert observed.spread is not None
    many = torch.where(index % 2 == 0, 3.0, 1.0).double()
    means = replace(observed, spread=replace(observed.spread, multiplicity=many))
    assert torch.equal(are_placed(fit, means, index), placed & (index % 2 == 1))
