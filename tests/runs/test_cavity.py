"""The cavity around the Sun: dust that is not there, and dust that is, by skies of no model."""

from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.config import load
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.reports import Report

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


def sky(folder: Path, within: float) -> None:
    """800 stars, uniform in the box, behind DENSITY, and `within` times that around the Sun."""
    rng = np.random.default_rng(0)
    x = (rng.random((800, 3)) - 0.5) * [400.0, 400.0, 200.0]
    d = np.linalg.norm(x, axis=1)
    dust = DENSITY * (d - (1.0 - within) * np.minimum(d, RADIUS))
    columns = {
        "l": np.degrees(np.arctan2(x[:, 1], x[:, 0])) % 360.0,
        "b": np.degrees(np.arcsin(x[:, 2] / d)),
        "distance": d,
        "extinction": dust + 0.03 * rng.standard_normal(800),
        "extinction_error": np.full(800, 0.03),
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


@pytest.mark.parametrize("within", [0.05, 1.0])
def test_dust_near_the_sun_is_as_the_stars_say(within: float, tmp_path: Path) -> None:
    sky(tmp_path, within)
    found, report = finished(tmp_path, "run")
    depth = report.sections["hyperparameters"]["cavity"]
    assert depth < 0.4 if within < 1.0 else 0.5 < depth < 2.0
    mean, std = near(found)
    assert abs(mean - within * 60.0 * DENSITY) < 3.0 * std
    if within < 1.0:
        plain, _ = finished(tmp_path, "plain", "model.mean=disc")
        off = abs(near(plain)[0] - within * 60.0 * DENSITY)
        assert abs(mean - within * 60.0 * DENSITY) < 0.6 * off
