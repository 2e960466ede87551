"""One star in a hundred is wild: the scores are those of the Student-t predictive distribution.

The reference is the definition, by quadrature: y = f + s t_ν with f ~ N(mean, variance).
"""

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from astropy.table import Table
from numpy.typing import NDArray
from scipy import stats

from dustmap.config import load
from dustmap.runs import Stage, StarMap, execute_run, open_star_map, prepare
from dustmap.runs._machine import predicted
from tests.skies import plain_sky, write_plain_sky

Array: TypeAlias = NDArray[np.float64]

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.5
refit = false
[grid]
size = [160, 160, 80]
spacing = 20
[model]
length = 60
noise = "student-t"
learn = ["std", "mean", "noise"]
[fit]
samples = 8
[export]
formats = []
figures = []
"""


@pytest.fixture(scope="module")
def skies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 400 calm stars, and on the same with every hundredth off by 80 errors."""
    path = tmp_path_factory.mktemp("skies")
    write_plain_sky(path, plain_sky(400, 5, (160.0, 160.0, 80.0)))
    table = Table.read(path / "sky.fits")
    for name, size in {"calm": 0.0, "wild": 80.0}.items():
        changed = table.copy()
        off = np.where(np.arange(400) % 100 == 2, size, 0.0) * np.resize([1.0, 1.0, -1.0], 400)
        changed["extinction"] = table["extinction"] + off * table["extinction_error"]
        changed.write(path / f"{name}.fits")
        (path / "run.toml").write_text(CONFIG.replace("sky.fits", f"{name}.fits"))
        config = load(path / "run.toml")
        execute_run(prepare(config), path / name, config, False, Stage.EVALUATE)
    return path


@pytest.fixture(scope="module")
def wild(skies: Path) -> StarMap:
    return open_star_map(skies / "wild")


@pytest.fixture(scope="module")
def reference(wild: StarMap) -> dict[str, Array]:
    """Log-density and normal score of every held-out star, and f + s t_ν on 4,001 nodes of f."""
    observed, held_out = wild.run.observed, wild.run.holdout
    rays, at = observed.batch.functional[held_out], wild.fit.hyperparameters
    prediction = predicted(wild.fit.posterior, rays)
    mean, std = (v.double().numpy() for v in (prediction.mean, prediction.std))
    assert at.nu is not None
    width = at.noise * observed.error_variance[held_out].sqrt().numpy()
    nodes = np.linspace(-8.0, 8.0, 4001)
    weights = stats.norm.pdf(nodes) * (nodes[1] - nodes[0])
    y = observed.measured[held_out].numpy()
    scaled = (y[:, None] - mean[:, None] - std[:, None] * nodes) / width[:, None]
    density = (stats.t.pdf(scaled, at.nu) / width[:, None]) @ weights
    below, above = (stats.t.cdf(side * scaled, at.nu) @ weights for side in (1.0, -1.0))
    normal = np.where(below < 0.5, stats.norm.ppf(below), stats.norm.isf(above))
    return {"log_density": np.log(density), "normal": normal, "residual": y - mean, "mean": mean}


def report(skies: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((skies / name / "report.json").read_text())
    return content


def test_scores_look_like_those_of_a_good_map(skies: Path, reference: dict[str, Array]) -> None:
    assert np.sum(np.abs(reference["residual"]) > 0.5) >= 2
    wild, calm = (report(skies, name)["held_out_stars"] for name in ("wild", "calm"))
    assert wild["n"] == calm["n"] == 200
    assert wild["chi2"] == pytest.approx(1.0, abs=0.3)
    assert wild["loglike"] > calm["loglike"] - 0.3
    assert wild["coverage68"] == pytest.approx(0.68, abs=0.12)
    # Of the mean's errors rmse is that of the wild stars alone; the scatter is that of the others.
    assert wild["rmse"] > 3.0 * calm["rmse"]
    assert wild["robust_scatter"] == pytest.approx(calm["robust_scatter"], rel=0.2)
    checks = {check["name"]: check for check in report(skies, "wild")["checks"]}
    assert checks["coverage68 of held-out stars"]["value"] == wild["coverage68"]
    assert checks["coverage68 of held-out stars"]["passed"]


def test_the_report_has_the_student_t_scores(skies: Path, reference: dict[str, Array]) -> None:
    told, normal = report(skies, "wild"), reference["normal"]
    scores = told["held_out_stars"]
    assert scores["y"] == told["calibration"]["y"] == told["quality_proxies"]["y"] == "measured"
    assert scores["loglike"] == pytest.approx(reference["log_density"].mean(), abs=1e-4)
    assert scores["chi2"] == pytest.approx(np.mean(normal**2), rel=1e-3)
    assert scores["coverage68"] == np.mean(np.abs(normal) <= 1.0)
    assert scores["coverage95"] == np.mean(np.abs(normal) <= stats.norm.ppf(0.975))
    off = np.abs(reference["residual"] - np.median(reference["residual"]))
    assert scores["robust_scatter"] == pytest.approx(np.median(off) / stats.norm.ppf(0.75))
    counts, _ = np.histogram(stats.norm.cdf(normal), bins=10, range=(0.0, 1.0))
    assert told["calibration"]["pit_histogram"] == counts.tolist()


def test_so_have_the_bins(skies: Path, reference: dict[str, Array]) -> None:
    bins = {row["bin"]: row for row in report(skies, "wild")["quality_proxies"]["bins"]}
    chosen = reference["mean"] < 0.05
    assert bins["A_V_below_0.05"]["n"] == chosen.sum() > 0
    expected = np.mean(reference["normal"][chosen] ** 2)
    assert bins["A_V_below_0.05"]["chi2"] == pytest.approx(expected, rel=1e-3)


def test_so_have_the_figures(wild: StarMap, reference: dict[str, Array]) -> None:
    drawn = wild.held_out()
    np.testing.assert_allclose(drawn.standardised, reference["normal"], atol=1e-3)
    np.testing.assert_allclose(drawn.pit, stats.norm.cdf(reference["normal"]), atol=1e-3)


def test_so_has_evaluate_which_tells_measured_from_noise_free(
    skies: Path, wild: StarMap, reference: dict[str, Array]
) -> None:
    rows = wild.run.observed.rows[wild.run.holdout.numpy()]
    Table.read(skies / "wild.fits")[rows].write(skies / "held_out.fits", overwrite=True)
    told = wild.evaluate(skies / "held_out.fits", truth_column="true_extinction")
    expected = report(skies, "wild")["held_out_stars"]
    assert {name: told[name] for name in expected if name != "y"} == pytest.approx(
        {name: value for name, value in expected.items() if name != "y"}
    )
    assert told["y"] == "measured"
    truth = told["truth"]
    assert truth["y"] == "noise-free"
    # What is free of noise is not wild.
    assert truth["rmse"] < 0.3 * told["rmse"]
    assert truth["robust_scatter"] <= told["robust_scatter"]
