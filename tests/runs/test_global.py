"""Stars by the global engine: Gaussian, Student-t and log-normal, beside the exact one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from astropy import units as u

from dustmap.config import load
from dustmap.gp.features import CellResiduals
from dustmap.inference import PathwisePosterior
from dustmap.runs import StarMap, execute_run, open_run, prepare
from dustmap.sky import DustMap
from dustmap.sky.simulation import SimulatedSky, write_sky
from dustmap.sky.stars import ExactDistances
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.2
[grid]
size = [120, 80, 40]
spacing = 10
[model]
length = 40
std = 0.002
noise = "gaussian"
learn = []
[fit]
samples = 64
[export]
formats = ["zarr"]
figures = []
samples = 4
[compute]
dtype = "float64"
"""
#: Where the fit to all stars is not what a test is about.
NO_REFIT = "data.refit=false"


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 stars, a few of whose extinctions are spoilt in `spoilt.fits`."""
    path = tmp_path_factory.mktemp("global")
    sky = plain_sky(150, seed=2)
    write_plain_sky(path, sky)
    write_sky(path / "spoilt.fits", spoilt(sky), exact_distances=True)
    (path / "run.toml").write_text(CONFIG)
    return path


def spoilt(sky: SimulatedSky) -> SimulatedSky:
    extinction = sky.stars.extinction.copy()
    extinction[::20] += 2.0
    return replace(sky, stars=replace(sky.stars, extinction=extinction))


def run(sky: Path, name: str, *settings: str) -> Path:
    config = load(sky / "run.toml", settings)
    execute_run(prepare(config), sky / name, config, overwrite=False)
    return sky / name


def told(folder: Path) -> dict[str, dict[str, object]]:
    content: dict[str, dict[str, object]] = json.loads((folder / "report.json").read_text())
    return content


@pytest.fixture(scope="module")
def exact(sky: Path) -> Path:
    return run(sky, "exact", "fit.engine=exact", NO_REFIT)


@pytest.fixture(scope="module")
def gaussian(sky: Path) -> Path:
    return run(sky, "gaussian", "model.density=gaussian", NO_REFIT)


@pytest.fixture(scope="module")
def positive(sky: Path) -> Path:
    samples = "export.samples=64"  # from which the map's own integrals have their deviation
    return run(sky, "positive", "model.density=lognormal", "model.std=0.8", samples, NO_REFIT)


def test_a_gaussian_density_is_that_of_the_exact_engine(gaussian: Path, exact: Path) -> None:
    found, wanted = DustMap.open(gaussian), DustMap.open(exact)
    assert found.std is not None
    assert wanted.std is not None
    apart = np.abs(found.mean - wanted.mean) / wanted.std
    assert float(np.sqrt((apart**2).mean())) < 0.1
    # 64 draws: ±9 % for each node, less for the median of all.
    assert float(np.median(found.std / wanted.std)) == pytest.approx(1.0, abs=0.05)
    report = told(gaussian)
    assert report["fit"]["samples"] == 64
    assert report["fit"]["cg_columns_unconverged"] == 0


@pytest.mark.parametrize("kind", ["gaussian", "positive"])
def test_a_finished_run_answers_as_its_files_do(
    kind: str, request: pytest.FixtureRequest, sky: Path
) -> None:
    folder = request.getfixturevalue(kind)
    found = open_run(folder)
    assert isinstance(found, StarMap)
    nodes = DustMap.open(folder)
    x, y, z = (float(axis[1]) for axis in nodes.axes())
    here = found.at(np.array([[x, y, z]]))
    assert here["density_mean"][0] == pytest.approx(float(nodes.mean[1, 1, 1]), rel=1e-4)
    assert nodes.std is not None
    assert here["density_std"][0] == pytest.approx(float(nodes.std[1, 1, 1]), rel=1e-3)
    if kind == "positive":  # between the nodes, too, and along rays
        l, b, distance = np.array([30.0]), np.array([7.0]), np.array([33.0])
        beside = found.at_stars(l, b, ExactDistances(distance))
        place = (l * u.deg, b * u.deg, distance * u.pc)
        for integrated, name in ((False, "density"), (True, "extinction")):
            mean, std = (
                nodes.query_gal(*place, mode=mode, integrated=integrated)
                for mode in ("mean", "std")
            )
            assert mean[0] == pytest.approx(beside[f"{name}_mean"][0], rel=1e-3)
            # Along rays files know of what lies between the nodes by their samples alone.
            most = 1.4 if integrated else 1.05
            assert 1.0 / most < std[0] / beside[f"{name}_std"][0] < most
    again = found.evaluate(sky / "sky.fits")
    assert again["n"] == 150
    assert 0.5 < again["chi2"] < 2.0


def test_draws_of_an_earlier_version_share_no_residuals(gaussian: Path, tmp_path: Path) -> None:
    earlier = shutil.copytree(gaussian, tmp_path / "earlier")
    path = earlier / "checkpoint" / "posterior.npz"
    with np.load(path) as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "residual_seed"}
    np.savez(path, **kept)
    posteriors = []
    for folder in (gaussian, earlier):
        found = open_run(folder)
        assert isinstance(found, StarMap)
        assert isinstance(found.fit.posterior, PathwisePosterior)
        posteriors.append((found.fit.posterior, found.run.observed.batch.functional))
    (present, rays), (other, _) = posteriors
    assert other.residuals is None
    assert isinstance(present.residuals, CellResiduals)
    assert len(present.residuals.draws) == 64
    assert torch.equal(other.predict(rays).mean, present.predict(rays).mean)
    spread = present.model.features.operator(rays).matmul(present.deviations).square().mean(0)
    left = present.model.features.residual_variance(rays)
    torch.testing.assert_close(other.predict(rays).variance, spread + left)


def test_a_positive_density_is_positive_everywhere(positive: Path, gaussian: Path) -> None:
    density = DustMap.open(positive)
    assert float(density.mean.min()) > 0.0
    found = open_run(positive)
    assert isinstance(found, StarMap)
    rng = np.random.default_rng(0)
    places = rng.uniform([-60.0, -40.0, -20.0], [60.0, 40.0, 20.0], (200, 3))
    answers = found.at(places)
    assert float(answers["density_mean"].min()) > 0.0
    assert float(answers["extinction_mean"].min()) > 0.0
    assert DustMap.open(gaussian).mean.shape == density.mean.shape


def test_student_t_noise_forgives_spoilt_stars(sky: Path, gaussian: Path) -> None:
    gaussian_noise = ("model.density=gaussian", "fit.samples=16", NO_REFIT)
    noise = ("model.noise=student-t", *gaussian_noise)
    robust = run(sky, "robust", "data.catalog=" + str(sky / "spoilt.fits"), *noise)
    bent = run(sky, "bent", "data.catalog=" + str(sky / "spoilt.fits"), *gaussian_noise)
    clean = DustMap.open(gaussian)
    assert clean.std is not None
    moved = [np.abs(DustMap.open(path).mean - clean.mean) / clean.std for path in (robust, bent)]
    assert float(np.sqrt((moved[0] ** 2).mean())) < 0.5
    assert float(np.sqrt((moved[1] ** 2).mean())) > 1.0
    hyperparameters = told(robust)["hyperparameters"]
    assert 0.5 < float(str(hyperparameters["nu"])) < 10.0
    assert int(str(told(robust)["fit"]["outliers"])) >= 5
    # Outliers are what heavy tails expect: scores do not call the map bad for them.
    found, own = open_run(robust), told(robust)["held_out_stars"]
    for scores in (found.evaluate(sky / "spoilt.fits"), own):
        # Within three standard errors √(2/n) of one, from below.
        least = 1.0 - 3.0 * (2.0 / int(str(scores["n"]))) ** 0.5
        assert least < float(str(scores["chi2"])) < 2.0
        assert float(str(scores["loglike"])) > 0.5
    figures = found.held_out()  # type: ignore[attr-defined]
    assert float(np.mean(figures.standardised**2)) == pytest.approx(own["chi2"])
    assert np.mean(np.abs(figures.pit - 0.5) < 0.475) == pytest.approx(own["coverage95"])


def test_the_same_seed_gives_the_same_map(sky: Path) -> None:
    small = ("model.density=gaussian", "grid.spacing=20", "fit.samples=4", NO_REFIT)
    first, again = (DustMap.open(run(sky, name, *small)) for name in ("first", "again"))
    assert np.array_equal(again.mean, first.mean)
    other = DustMap.open(run(sky, "other", *small, "fit.seed=1"))
    assert first.std is not None
    assert other.std is not None
    assert not np.array_equal(other.std, first.std)


def test_rays_beyond_the_box_follow_the_policy(sky: Path) -> None:
    """A box of half the size: truncated, dropped or refused, and counted."""
    half = ("grid.size=[60, 40, 20]", "model.density=gaussian")
    counts = []
    for policy in ("truncate", "drop"):
        config = load(sky / "run.toml", (*half, f"grid.outside={policy}"))
        counts.append(prepare(config).plan().counts)
    assert int(str(counts[0]["rays_truncated_at_the_box"])) > 0
    assert int(str(counts[1]["stars_dropped_outside_the_box"])) > 0
    assert counts[0]["stars_beyond_the_box"] == counts[1]["stars_beyond_the_box"] > 0
    with pytest.raises(ValueError, match="leave the box"):
        prepare(load(sky / "run.toml", (*half, "grid.outside=error")))


@pytest.mark.slow
def test_learning_is_told_step_by_step(sky: Path) -> None:
    learn = 'model.learn=["length", "std", "mean"]'
    folder = run(sky, "learned", "model.density=gaussian", learn, "fit.learn_rows=80")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "learn"]
    assert len(steps) >= 1
    assert {"log_length", "log_variance", "gradient_length", "solver_steps"} <= set(steps[0])
    assert told(folder)["fit"]["learning_stars"] == 120
