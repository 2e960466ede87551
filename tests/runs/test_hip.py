"""Stars by the hip engine, beside the exact one on the same sky."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dustmap.cli import BAD_INPUT, CHECK_FAILED, DONE, main
from dustmap.config import Config, load
from dustmap.runs import execute_run, open_run, prepare
from dustmap.sky import DustMap
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.2
refit = false
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
formats = ["zarr"]
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


@pytest.fixture(scope="module")
def automatic(sky: Path) -> Path:
    """The same sky by the engine's own choice of a family."""
    return run(sky, "automatic")


@pytest.mark.parametrize("whitening", ["cholesky", "ciq"])
def test_the_full_family_maps_what_the_exact_engine_does(sky: Path, whitening: str) -> None:
    found = DustMap.open(run(sky, f"full-{whitening}", family="full", whitening=whitening))
    exact = DustMap.open(sky / "exact")
    assert found.std is not None
    assert exact.std is not None
    # Two inducing points a length scale: what they leave unexplained is half a std at the most.
    assert float(np.abs(found.mean - exact.mean).max()) < 0.5 * float(exact.std.min())
    assert float(np.median(found.std / exact.std)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("family", "whitening", "line_integral"),
    [
        ("mean-field", "hip", "monte-carlo"),
        pytest.param("low-rank", "torus", "table", marks=pytest.mark.slow),
        ("block", "torus", "table"),
    ],
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
    execute_run(prepare(changed), sky / name, changed, overwrite=False)
    check_wider(sky, sky / name)


def test_the_chosen_family_agrees_in_the_mean_and_is_not_narrower(
    sky: Path, automatic: Path
) -> None:
    check_wider(sky, automatic)


def check_wider(sky: Path, path: Path) -> None:
    report = json.loads((path / "report.json").read_text())
    assert report["fit"]["rows_unconverged"] == 0
    found, exact = DustMap.open(path), DustMap.open(sky / "exact")
    assert found.std is not None
    assert exact.std is not None
    assert float(np.abs(found.mean - exact.mean).max()) < float(exact.std.max())
    assert float(np.median(found.std / exact.std)) > 0.95


def test_a_finished_run_comes_back_with_its_engine(sky: Path, automatic: Path) -> None:
    report = json.loads((automatic / "report.json").read_text())
    assert report["compute"]["dtype"] == "float64"
    assert report["fit"]["cg_residual"] < 1e-5
    stars = open_run(automatic)
    catalog = sky / "sky.fits"
    assert stars.evaluate(catalog)["n"] > 50


@pytest.mark.slow
def test_epochs_of_natural_gradients_approach_the_closed_form(
    sky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = json.loads((run(sky, "closed", family="block") / "report.json").read_text())
    path = run(sky, "epochs", family="block", epochs=15, batch=20)
    stepped = json.loads((path / "report.json").read_text())
    assert stepped["fit"]["epochs"] == 15
    assert stepped["fit"]["steps"] == 15 * 4
    assert stepped["fit"]["elbo"] <= closed["fit"]["elbo"]
    assert stepped["fit"]["elbo"] == pytest.approx(closed["fit"]["elbo"], abs=5.0)
    # Its posterior is kept: nothing is fitted when the run is asked again.
    monkeypatch.setattr("dustmap.inference.fit_svi", None)
    assert open_run(path).evaluate(sky / "sky.fits")["n"] > 50


def test_what_does_not_fit_in_memory_leaves_no_directory(
    sky: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["fit.engine=hip", "fit.family=full", "fit.whitening=hip", "compute.memory=64MiB"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    output = sky / "too-large"
    assert main(["run", str(sky / "run.toml"), "--output", str(output), *overrides]) == BAD_INPUT
    assert "needs" in capsys.readouterr().err
    assert not output.exists()


def test_the_papers_pipeline_maps_a_simulated_sky(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line: parallaxes, hyperparameters learned, integrals by Monte Carlo."""
    catalog, truth = str(tmp_path / "sky.fits"), str(tmp_path / "truth.zarr")
    box = ["--size", "200pc", "160pc", "120pc", "--error", "0.005"]
    made = ["simulate", "--stars", "150", "--seed", "1", "--output", catalog, "--truth", truth]
    assert main([*made, *box]) == DONE
    (tmp_path / "run.toml").write_text(
        "data = {catalog = 'sky.fits', truth = 'truth.zarr', holdout = 0.2}\n"
        "grid = {size = [200, 160, 120], spacing = 20}\n"
        "model = {length = 40, mean_density = 0.002, learn = ['std', 'mean']}\n"
        "fit = {learn_rows = 40, max_steps = 15}\n"
        "export = {figures = []}\n"
    )
    settings = ["--set", "fit.engine=hip", "--set", "model.line_integral=monte-carlo", "--json"]
    capsys.readouterr()
    code = main(["run", str(tmp_path / "run.toml"), "--output", str(tmp_path / "run"), *settings])
    assert code in (DONE, CHECK_FAILED)
    report = json.loads(capsys.readouterr().out)
    assert report["held_out_stars"]["n"] == 30
    assert 0.3 < report["held_out_stars"]["chi2"] < 3.0
    assert report["truth"]["correlation"] > 0.1
    assert report["hyperparameters"]["length"] > 0.0
    assert DustMap.open(tmp_path / "run").n_samples == 0
