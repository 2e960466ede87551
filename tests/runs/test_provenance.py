"""Tables and truths say which version, seed, configuration and command made them."""

from pathlib import Path

import pytest
import zarr
from astropy.io import fits
from astropy.table import Table

from dustmap import __version__, config
from dustmap.cli import DONE, main
from dustmap.config import load
from dustmap.runs import execute_run, prepare
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
[grid]
size = [120, 80, 40]
spacing = 20
[model]
length = 40
std = 0.002
learn = []
[fit]
engine = "exact"
[export]
formats = []
figures = []
"""


def simulate(path: Path, *more: str) -> list[str]:
    arguments = ["simulate", "--stars", "20", "--seed", "7", "--output", str(path / "made.fits")]
    arguments += ["--truth", str(path / "truth.zarr"), *more]
    assert main(arguments) == DONE
    return arguments


def test_a_simulated_sky_says_how_it_was_made(tmp_path: Path) -> None:
    arguments = simulate(tmp_path, "--size", "100", "100", "60")
    header = fits.getheader(tmp_path / "made.fits", 1)
    assert header["VERSION"] == __version__
    assert header["SEED"] == 7
    assert header["EXTSYS"] == "A_V"
    assert "CONFHASH" not in header
    # Long commands go on in the next lines.
    assert "".join(arguments) in "".join(header["HISTORY"]).replace(" ", "")
    attributes = zarr.open_group(tmp_path / "truth.zarr", mode="r").attrs
    assert attributes["seed"] == 7
    assert attributes["config_sha256"] == ""
    assert " ".join(arguments) in str(attributes["history"])


def test_a_sky_drawn_from_a_prior_names_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    simulate(tmp_path, "--from-prior", str(tmp_path / "run.toml"))
    catalog = f"data.catalog={tmp_path / 'made.fits'}"
    expected = config.sha256(load(tmp_path / "run.toml", [catalog]))
    attributes = zarr.open_group(tmp_path / "truth.zarr", mode="r").attrs
    assert attributes["config_sha256"] == expected
    assert fits.getheader(tmp_path / "made.fits", 1)["CONFHASH"] == expected


@pytest.mark.parametrize("ending", ["fits", "ecsv"])
def test_predictions_say_which_run_they_are_of(tmp_path: Path, ending: str) -> None:
    write_plain_sky(tmp_path, plain_sky(30, seed=2))
    (tmp_path / "run.toml").write_text(CONFIG)
    configured = load(tmp_path / "run.toml")
    execute_run(prepare(configured), tmp_path / "run", configured, overwrite=False)
    output = tmp_path / f"predicted.{ending}"
    catalog = ["--catalog", str(tmp_path / "sky.fits"), "--output", str(output)]
    assert main(["predict", str(tmp_path / "run"), *catalog]) == DONE
    meta = Table.read(output).meta
    assert meta["VERSION"] == __version__
    assert meta["CONFHASH"] == config.sha256(configured)
    assert any("sha256 of the configuration" in line for line in meta["HISTORY"])
