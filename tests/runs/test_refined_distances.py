"""`predict --distances`: distances given extinctions, behind the map of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from astropy.table import QTable, Table
from scipy.integrate import cumulative_trapezoid, trapezoid

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.config import load
from dustmap.gp import Prediction
from dustmap.gp.functionals import OutsidePolicy
from dustmap.inference import LogNormalPosterior
from dustmap.runs import StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._distances import COLUMNS
from dustmap.sky.observations import predict_extinction, sight_lines, smoothed
from dustmap.sky.simulation import Measurements, SkyModel, simulate
from dustmap.sky.simulation._sky import sky_table
from dustmap.sky.stars import ExactDistances, ExponentialDensity, ParallaxDistances
from tests.skies import plain_sky

CONFIG = """
[data]
catalog = "stars.fits"
system = "A_V"
holdout = 0
distance_prior = "exponential-density"
distance_scale = 30
distance_max = 1000
[grid]
size = [160, 120, 80]
spacing = 20
[model]
kernel = "matern32"
mean_density = 0.002
learn = ["mean", "noise"]
[fit]
samples = 16
[export]
formats = []
figures = []
"""
CALIBRATED = """
[data]
catalog = "stars.fits"
system = "A_V"
[grid]
size = [400, 400, 240]
spacing = 20
[model]
kernel = "matern12"
mean = "disc"
[export]
formats = []
figures = []
"""
SURVEY = Measurements(error=0.01, parallax_scale=150.0, outliers=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A map, and a catalog of 20 stars of which it has seen the first ten."""
    path = tmp_path_factory.mktemp("refined")
    table = sky_table(plain_sky(200, seed=2, measurements=SURVEY))
    table[:150].write(path / "stars.fits")
    some = table[140:160]
    some["extinction"][3] = np.nan
    some.write(path / "all.fits")
    (path / "run.toml").write_text(CONFIG)
    config = load(path / "run.toml", [])
    execute_run(prepare(config), path / "run", config, overwrite=False)
    return path


def predict(folder: Path, catalog: str, output: str, *more: str) -> int:
    files = ["--catalog", str(folder / catalog), "--output", str(folder / output)]
    return main(["predict", str(folder / "run"), *files, *more, "--json"])


def test_columns_are_those_of_quadrature_behind_the_map(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(folder, "all.fits", "refined.fits", "--distances") == DONE
    told = json.loads(capsys.readouterr().out)
    assert told["rows_without_extinction"] == 1
    assert told["rows_that_the_map_has_seen"] == 9
    table = QTable.read(folder / "refined.fits")
    assert [str(table[name].unit) for name in COLUMNS] == ["pc"] * len(COLUMNS)
    assert [i for i in range(20) if np.ma.is_masked(table["distance_mean"][i])] == [3]
    finished = open_run(folder / "run")
    assert isinstance(finished, StarMap)
    for row in (0, 7, 12):
        star = table[row]
        expected = brute(finished, star)
        found = [float(star[name].value) for name in COLUMNS]
        np.testing.assert_allclose(found, expected, atol=0.04 * expected[1])


def brute(finished: StarMap, star: QTable.Row) -> list[float]:
    """Mean, deviation and percentiles of one star by 1,400 places along its ray."""
    d = np.linspace(0.5, 700.0, 1400)
    l, b = (np.full(len(d), float(star[name].value)) for name in ("l", "b"))
    grid, distances = finished.run.grid, finished.run.stars.distances
    assert isinstance(distances, ParallaxDistances)
    prior = distances.prior
    assert isinstance(prior, ExponentialDensity)
    lines = sight_lines(l, b, ExactDistances(d), grid, OutsidePolicy.PRIOR)
    along = predict_extinction(finished.fit.posterior, lines, finished._dust)
    at = finished.fit.hyperparameters
    y, errors = (
        torch.full((len(d),), float(star[name].value) ** power, dtype=torch.float64)
        for name, power in (("extinction", 1), ("extinction_error", 2))
    )
    posterior = finished.fit.posterior
    assert isinstance(posterior, LogNormalPosterior)
    draws, rest = smoothed(
        posterior.sample(lines.rays, 16, torch.Generator()).double().numpy(),
        along.mean.double().numpy(),
        along.variance.double().numpy(),
    )
    none = torch.zeros_like(errors)
    each = [
        at.log_density(y, errors, Prediction(torch.from_numpy(a), torch.from_numpy(rest)), none)
        for a in draws
    ]
    log_p = torch.stack(each).logsumexp(0).numpy()
    parallax, error = (float(star[name].value) for name in ("parallax", "parallax_error"))
    log_p += 2.0 * np.log(d) - d / prior.scale - 0.5 * ((parallax - 1e3 / d) / error) ** 2
    p = np.exp(log_p - log_p.max())
    p /= trapezoid(p, d)
    mean = float(trapezoid(p * d, d))
    std = float(np.sqrt(trapezoid(p * (d - mean) ** 2, d)))
    below = np.concatenate([[0.0], cumulative_trapezoid(p, d)])
    return [mean, std, *np.interp([0.16, 0.5, 0.84], below, d)]


def test_extinctions_that_are_missing_or_of_no_use(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the option a catalog needs no extinctions; with it, it does, and uncertain distances,
    and none of the new columns."""
    table = Table.read(folder / "all.fits")
    table.remove_columns(["extinction", "extinction_error"])
    table.write(folder / "bare.fits")
    assert predict(folder, "bare.fits", "bare-out.fits") == DONE
    assert predict(folder, "bare.fits", "no.fits", "--distances") == BAD_INPUT
    assert "extinctions" in capsys.readouterr().err
    table = Table.read(folder / "all.fits")
    table["distance"] = 50.0
    table.remove_columns(["parallax", "parallax_error"])
    table.write(folder / "exact.fits")
    assert predict(folder, "exact.fits", "no.fits", "--distances") == BAD_INPUT
    assert "uncertain distances" in capsys.readouterr().err
    assert predict(folder, "refined.fits", "no.fits", "--distances") == BAD_INPUT
    assert "rename" in capsys.readouterr().err


def test_extinctions_without_a_header_are_of_the_system_that_is_named(folder: Path) -> None:
    table = Table.read(folder / "all.fits")
    for name in ("extinction", "extinction_error"):
        table[name] /= 3.1
    table.write(folder / "reddening.csv")
    named = "--distances", "--system", "E(B-V)"
    assert predict(folder, "reddening.csv", "of-reddening.csv", *named) == DONE
    assert predict(folder, "all.fits", "of-extinction.csv", "--distances") == DONE
    found, expected = (
        Table.read(folder / f"of-{name}.csv") for name in ("reddening", "extinction")
    )
    np.testing.assert_allclose(found["distance_mean"], expected["distance_mean"], rtol=1e-6)
    assert predict(folder, "reddening.csv", "no.csv", "--system", "E(B-V)") == BAD_INPUT


@pytest.mark.slow
def test_refined_distances_are_calibrated_on_a_sky_that_no_model_drew(tmp_path: Path) -> None:
    """Parallaxes to some 15 %, turbulent dust with bubbles: 68 % hold the truth, of stars that the
    map has seen and of others, and distances are better known than by parallaxes alone."""
    model = SkyModel(
        size=(400.0, 400.0, 240.0), measurements=Measurements(parallax_scale=20.0, outliers=0.0)
    )
    sky = simulate(model, 4000, seed=5)
    table = sky_table(sky)
    table[:2500].write(tmp_path / "stars.fits")
    table.write(tmp_path / "all.fits")
    (tmp_path / "run.toml").write_text(CALIBRATED)
    config = load(tmp_path / "run.toml", [])
    execute_run(prepare(config), tmp_path / "run", config, overwrite=False)
    assert predict(tmp_path, "all.fits", "refined.fits", "--distances") == DONE
    refined = Table.read(tmp_path / "refined.fits")
    true, low, high = (
        np.asarray(refined[name])
        for name in ("true_distance_pc", "distance_percentile16", "distance_percentile84")
    )
    inside = (low < true) & (true < high)
    for part in (slice(0, 2500), slice(2500, None)):
        assert 0.64 < inside[part].mean() < 0.72
