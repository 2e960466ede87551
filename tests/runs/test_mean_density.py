"""The mean of the dust, its cavity and its plane, by skies of no model."""

import itertools
import json
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.config import load
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.reports import Report
from dustmap.runs.stars._model import model_of

Array: TypeAlias = NDArray[np.float64]

CONFIG = """
[data]
catalog = "stars.fits"
system = "A_V"
refit = false
[grid]
size = [400, 400, 200]
spacing = 40
[model]
kernel = "matern32"
noise = "gaussian"
[fit]
samples = 8
[export]
formats = []
figures = []
"""
DENSITY, RADIUS = 1e-3, 90.0
#: Of a thin disc, pc.
HEIGHT = 60.0


def sky(folder: Path, within: float) -> None:
    """800 stars, uniform in the box, behind DENSITY, and `within` times that around the Sun."""
    rng = np.random.default_rng(0)
    x, d = places(rng, 800)
    write(folder, x, DENSITY * (d - (1.0 - within) * np.minimum(d, RADIUS)), rng)


def thin_disc(folder: Path, plane: float) -> None:
    """800 stars behind DENSITY exp(−|Z − plane|/HEIGHT), and nothing else."""
    rng = np.random.default_rng(0)
    x, _ = places(rng, 800)
    write(folder, x, through_disc(x, plane), rng)


def places(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Places (N, 3) uniform in the box, and their distances."""
    x = (rng.random((count, 3)) - 0.5) * [400.0, 400.0, 200.0]
    return x, np.linalg.norm(x, axis=1)


def through_disc(x: Array, plane: float) -> Array:
    """∫ DENSITY exp(−|Z − plane|/HEIGHT) ds from the Sun to x (N, 3), by quadrature."""
    part = (np.arange(2000) + 0.5) / 2000
    rho = DENSITY * np.exp(-np.abs(x[:, 2:] * part - plane) / HEIGHT)
    return np.asarray(rho.mean(1) * np.linalg.norm(x, axis=1))


def write(folder: Path, x: Array, dust: Array, rng: np.random.Generator) -> None:
    """A catalog of these stars, with noise, and a configuration."""
    d = np.linalg.norm(x, axis=1)
    columns = {
        "l": np.degrees(np.arctan2(x[:, 1], x[:, 0])) % 360.0,
        "b": np.degrees(np.arcsin(x[:, 2] / d)),
        "distance": d,
        "extinction": dust + 0.03 * rng.standard_normal(len(x)),
        "extinction_error": np.full(len(x), 0.03),
    }
    Table(columns).write(folder / "stars.fits")
    (folder / "run.toml").write_text(CONFIG)


def finished(folder: Path, name: str, *settings: str) -> tuple[StarMap, Report]:
    config = load(folder / "run.toml", settings)
    report = execute_run(prepare(config), folder / name, config, False, Stage.EVALUATE)
    found = open_run(folder / name)
    assert isinstance(found, StarMap)
    return found, report


def near(found: StarMap) -> tuple[float, float]:
    """Mean extinction at 60 pc, and its std, over directions that see about the same."""
    rng = np.random.default_rng(1)
    places = [(360.0 * rng.random(), 120.0 * rng.random() - 60.0, 60.0) for _ in range(40)]
    answers = [found.query(*place) for place in places]
    mean, std = (np.mean([a[f"extinction_{q}"] for a in answers]) for q in ("mean", "std"))
    return float(mean), float(std)


@pytest.mark.parametrize("within", [0.05, pytest.param(1.0, marks=pytest.mark.slow)])
def test_dust_near_the_sun_is_as_the_stars_say(within: float, tmp_path: Path) -> None:
    sky(tmp_path, within)
    found, report = finished(tmp_path, "run")
    depth = report.sections["hyperparameters"].get("cavity")
    assert report.sections["mean_choice"]["name"] == ("bubble" if within < 1.0 else "disc")
    assert (depth is None) == (within == 1.0)
    assert depth is None or depth < 0.4
    mean, std = near(found)
    assert abs(mean - within * 60.0 * DENSITY) < 3.0 * std
    if within < 1.0:
        plain, _ = finished(tmp_path, "plain", "model.mean=disc")
        off = abs(near(plain)[0] - within * 60.0 * DENSITY)
        assert abs(mean - within * 60.0 * DENSITY) < 0.6 * off


@pytest.mark.parametrize(
    "plane", [-41.6, *(pytest.param(plane, marks=pytest.mark.slow) for plane in (0.0, -20.8))]
)
def test_the_plane_of_the_dust_is_where_the_stars_say(plane: float, tmp_path: Path) -> None:
    """Not where that of the Galaxy is: held there, errors were 0.012, 0.007 and 0.003 mag."""
    thin_disc(tmp_path, plane)
    found, report = finished(tmp_path, "run", "grid.spacing=20")
    error = report.sections["hyperparameter_errors"]["disc_plane"]
    assert error < 15.0
    assert abs(report.sections["hyperparameters"]["disc_plane"] - plane) < 3.0 * error
    x, d = places(np.random.default_rng(5), 60)
    l, b = np.degrees(np.arctan2(x[:, 1], x[:, 0])), np.degrees(np.arcsin(x[:, 2] / d))
    answers = [found.query(*place) for place in zip(l, b, d, strict=True)]
    mean, std = (np.array([a[f"extinction_{q}"] for a in answers]) for q in ("mean", "std"))
    off = mean - through_disc(x, plane)
    assert np.sqrt(np.mean(off**2)) < 0.006  # of stars with errors of 0.03
    assert np.sqrt(np.mean((off / std) ** 2)) < 2.0


@pytest.mark.parametrize("mean", ["disc", "bubble"])
def test_a_run_made_before_the_plane_was_learned_still_opens(mean: str, tmp_path: Path) -> None:
    """β had three coefficients then, or five, and the report no plane."""
    sky(tmp_path, 1.0)
    found, _ = finished(tmp_path, "run", f"model.mean={mean}", "model.learn=[]")
    folder, where = tmp_path / "run" / "checkpoint", (30.0, 2.0, 150.0)
    before = found.query(*where)
    values = json.loads((folder / "hyperparameters.json").read_text())
    del values["disc_plane"]
    (folder / "hyperparameters.json").write_text(json.dumps(values))
    with np.load(folder / "posterior.npz") as stored:
        arrays = dict(stored)
    run = found.run
    model = model_of(run.config, found.fit.hyperparameters, run.observed.batch)
    ahead = itertools.takewhile(lambda p: p.name != "mean", model.parameters())
    third = 3 + sum(p.value.numel() for p in ahead)
    arrays["parameters"] = np.delete(arrays["parameters"], [third, third + 1])
    np.savez(folder / "posterior.npz", **arrays)
    again = open_run(tmp_path / "run")
    assert isinstance(again, StarMap)
    assert again.query(*where) == before
