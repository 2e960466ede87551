"""Stars by the hip engine, beside the exact one on the same sky."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dustmap.cli import BAD_INPUT, main
from dustmap.config import Config, load
from dustmap.runs import execute_run, open_run, prepare
from dustmap.sky import DustMap
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.2
[grid]
size = [120, 80, 40]
spacing = 20
[model]
length = 40
std = 0.002
learn = []
[fit]
engine = "exact"
[compute]
dtype = "float64"
[export]
figures = []
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 stars in a box with three different sides, mapped by the exact engine."""
    path = tmp_path_factory.mktemp("hip")
    write_plain_sky(path, plain_sky(100, seed=2))
    (path / "run.toml").write_text(CONFIG)
    config = load(path / "run.toml")
    execute_run(prepare(config), path / "exact", config, overwrite=False)
    return path


def run(sky: Path, name: str, **fit: object) -> Path:
    config = load(sky / "run.toml")
    changed: Config = replace(config, fit=replace(config.fit, engine="hip", **fit))  # type: ignore[arg-type]
    execute_run(prepare(changed), sky / name, changed, overwrite=False)
    return sky / name


def test_the_full_family_maps_what_the_exact_engine_does(sky: Path) -> None:
    found = DustMap.open(run(sky, "full", family="full", whitening="cholesky"))
    exact = DustMap.open(sky / "exact")
    assert found.std is not None
    assert exact.std is not None
    # Two inducing points a length scale: what they leave unexplained is half a std at the most.
    assert float(np.abs(found.mean - exact.mean).max()) < 0.5 * float(exact.std.min())
    assert float(np.median(found.std / exact.std)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("family", "whitening", "line_integral"),
    [("mean-field", "hip", "monte-carlo"), ("block", "torus", "table"), ("auto", "auto", "table")],
)
def test_structured_families_agree_in_the_mean_and_are_wider(
    sky: Path, family: str, whitening: str, line_integral: str
) -> None:
    config = load(sky / "run.toml")
    config = replace(config, model=replace(config.model, line_integral=line_integral))
    changed = replace(
        config, fit=replace(config.fit, engine="hip", family=family, whitening=whitening)
    )
    name = f"{family}-{whitening}"
    report = execute_run(prepare(changed), sky / name, changed, overwrite=False)
    assert report.sections["fit"]["rows_unconverged"] == 0
    found, exact = DustMap.open(sky / name), DustMap.open(sky / "exact")
    assert found.std is not None
    assert exact.std is not None
    assert float(np.abs(found.mean - exact.mean).max()) < float(exact.std.max())
    assert float(np.median(found.std / exact.std)) > 0.95


def test_a_finished_run_comes_back_with_its_engine(sky: Path) -> None:
    path = run(sky, "again")
    report = json.loads((path / "report.json").read_text())
    assert report["compute"]["dtype"] == "float64"
    assert report["fit"]["cg_residual"] < 1e-5
    stars = open_run(path)
    catalog = sky / "sky.fits"
    assert stars.evaluate(catalog)["n"] > 50


def test_epochs_of_natural_gradients_approach_the_closed_form(sky: Path) -> None:
    closed = json.loads((run(sky, "closed", family="block") / "report.json").read_text())
    path = run(sky, "epochs", family="block", epochs=60, batch=20)
    stepped = json.loads((path / "report.json").read_text())
    assert stepped["fit"]["epochs"] == 60
    assert stepped["fit"]["steps"] == 60 * 4
    assert stepped["fit"]["elbo"] <= closed["fit"]["elbo"]
    assert stepped["fit"]["elbo"] == pytest.approx(closed["fit"]["elbo"], abs=5.0)


def test_what_does_not_fit_in_memory_leaves_no_directory(
    sky: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["fit.engine=hip", "fit.family=full", "fit.whitening=hip", "compute.memory=64MiB"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    output = sky / "too-large"
    assert main(["run", str(sky / "run.toml"), "--output", str(output), *overrides]) == BAD_INPUT
    assert "needs" in capsys.readouterr().err
    assert not output.exists()
