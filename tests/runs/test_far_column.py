"""Maps held to a far column: where hardly a star is, the column says how much dust there is."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import healpy
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap.config import load
from dustmap.errors import UserError
from dustmap.inference import LogNormalPosterior
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._model import model_of
from dustmap.runs.stars._run import prepare_stars
from dustmap.sky import DustMap, Provenance, cartesian, column_density, write_map
from dustmap.sky.simulation import Measurements, SimulatedSky
from dustmap.sky.simulation._sky import sky_table
from tests.run_outputs import differences
from tests.runs.test_resume import Killed, interrupted
from tests.skies import plain_sky

Array: TypeAlias = NDArray[np.float64]

SIZE = (200.0, 200.0, 120.0)
NEAR, NSIDE = 60.0, 4
CONFIG = """
[data]
catalog = "near.fits"
system = "A_V"
far_column_system = "A_V"
far_column_nside = 4
far_column_scatter = 0.05
refit = false
[grid]
size = [200, 200, 120]
spacing = 20
outside = "truncate"
[model]
kernel = "matern32"
mean = "constant"
std = 0.8
mean_density = 0.002
noise = "gaussian"
learn = ["mean"]
[fit]
samples = 8
[export]
formats = []
figures = []
"""


def faces(l: Array, b: Array) -> Array:
    """Where rays leave the box."""
    ahead = cartesian(l, b, np.ones(len(l)))
    far = (0.5 * np.array(SIZE) / np.abs(ahead).clip(1e-9)).min(1)
    return np.asarray(ahead * far[:, None] * (1.0 - 1e-9))


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stars within 60 pc alone; the columns through the box, and half as much more."""
    path = tmp_path_factory.mktemp("column")
    sky: SimulatedSky = plain_sky(600, 4, SIZE, Measurements(error=0.01, outliers=0.0))
    table = sky_table(sky, exact_distances=True)
    table[sky.true_distance < NEAR].write(path / "near.fits")
    write_map(path / "truth.zarr", sky.truth, Provenance(""))
    l, b = healpy.pix2ang(NSIDE, np.arange(12 * NSIDE**2), lonlat=True)
    density = sky.truth.mean.T.astype(np.float64)
    true = column_density(sky.truth.grid, density, faces(l, b))
    for name, factor in (("true", 1.0), ("high", 1.5)):
        healpy.write_map(path / f"{name}.fits", factor * true, dtype=np.float64)
    (path / "run.toml").write_text(CONFIG)
    return path


def mapped(sky: Path, name: str, *settings: str) -> tuple[StarMap, dict[str, float]]:
    """The run, and the errors of its log density at near and far nodes."""
    config = load(sky / "run.toml", settings)
    execute_run(prepare(config), sky / name, config, False, Stage.FIT)
    found = open_run(sky / name)
    assert isinstance(found, StarMap)
    places = found.run.grid.points().numpy()
    posterior = found.fit.posterior
    truth = DustMap.open(sky / "truth.zarr").mean_at(places)
    assert isinstance(posterior, LogNormalPosterior)
    off = np.log(posterior.at_nodes().mean.numpy()) - np.log(truth)
    near = np.linalg.norm(places, axis=1) < NEAR
    parts = {"near": off[near], "far": off[~near]}
    return found, {part: float(np.sqrt(np.mean(x**2))) for part, x in parts.items()}


@pytest.fixture(scope="module")
def without(sky: Path) -> dict[str, float]:
    return mapped(sky, "without")[1]


def test_a_column_lowers_the_error_where_no_stars_are(sky: Path, without: dict[str, float]) -> None:
    found, errors = mapped(sky, "about", f"data.far_column={sky / 'true.fits'}")
    assert errors["far"] < 0.93 * without["far"]
    assert errors["near"] < 1.05 * without["near"]
    report = json.loads((sky / "about" / "report.json").read_text())
    assert report["counts"]["pixels_of_the_far_column"] == 12 * NSIDE**2
    section = report["far_column"]
    assert section["kind"] == "about"
    assert section["pixels_that_say_something"] == section["pixels"] == 12 * NSIDE**2
    assert section["median_column_in_the_box_mag"] == pytest.approx(
        section["median_column_mag"], rel=0.1
    )
    (sky / "true.fits").rename(sky / "moved.fits")
    try:  # a finished run needs the map of the sky no more
        again = open_run(sky / "about")
    finally:
        (sky / "moved.fits").rename(sky / "true.fits")
    assert isinstance(again, StarMap)
    np.testing.assert_array_equal(again.query(30.0, 5.0, 90.0), found.query(30.0, 5.0, 90.0))


def test_a_bound_that_is_too_high_does_no_harm(sky: Path, without: dict[str, float]) -> None:
    bound = 'data.far_column_kind="at most"'
    _, errors = mapped(sky, "high", f"data.far_column={sky / 'high.fits'}", bound)
    assert errors["far"] < 1.02 * without["far"]
    assert errors["near"] < 1.02 * without["near"]
    about = mapped(sky, "misled", f"data.far_column={sky / 'high.fits'}")[1]
    assert about["far"] > 1.05 * errors["far"]


@pytest.mark.parametrize("engine", ["global", "hip"])
def test_plans_have_the_pixels(sky: Path, engine: str) -> None:
    """Of which there are many more than stars."""
    healpy.write_map(sky / "fine.fits", np.ones(12 * 64**2), dtype=np.float64, overwrite=True)
    density = "gaussian" if engine == "hip" else "lognormal"
    settings = (f"fit.engine={engine}", f"model.density={density}", "data.far_column_nside=64")
    column = f"data.far_column={sky / 'fine.fits'}"
    without, planned = (
        prepare(load(sky / "run.toml", [*settings, *more])).plan().bytes_needed
        for more in ([], [column])
    )
    assert planned > without + 12 * 64**2 * 8


def test_pixels_of_nothing_fail_a_check(sky: Path) -> None:
    values = healpy.read_map(sky / "true.fits", dtype=np.float64)
    values[::4] = 0.0
    healpy.write_map(sky / "cut.fits", values, dtype=np.float64, overwrite=True)
    for name, failed in (("true", False), ("cut", True)):
        run = prepare_stars(load(sky / "run.toml", [f"data.far_column={sky / name}.fits"]))
        found = {check.name for check in run.checks if not check.passed}
        assert ("share of far-column pixels of 0 or less" in found) is failed


@pytest.mark.parametrize("mean", ["constant", "disc", "bubble"])
def test_a_column_goes_on_behind_every_mean(sky: Path, mean: str) -> None:
    settings = (f"data.far_column={sky / 'high.fits'}", f"model.mean={mean}", "grid.outside=prior")
    column = prepare_stars(load(sky / "run.toml", settings)).observed.column
    assert column is not None
    assert bool((column.value > 0.0).all())


def test_what_cannot_have_a_column_is_refused(sky: Path) -> None:
    column = f"data.far_column={sky / 'true.fits'}"
    for settings, words in (
        (("fit.distance_rounds=0", 'data.far_column_kind="at most"'), "distance_rounds"),
        (("data.groups=SURVEY",), "data.groups"),
        (("data.far_column_nside=0",), "power of two"),
    ):
        with pytest.raises(UserError, match=words):
            load(sky / "run.toml", [column, *settings])
    with pytest.raises(UserError, match="the Sun is outside the box"):
        prepare(load(sky / "run.toml", [column, "grid.center=[150, 0, 0]"]))


@pytest.mark.parametrize(
    ("unit", "system", "factor", "words"),
    [
        ("mag", "A_V", 1.0, ""),
        ("", "", 1.0, ""),
        ("MJy/sr", "", 0.01, ""),
        ("MJy/sr", "", 1.0, "far_column_factor"),
        ("mag.pc-1", "A_V", 2.0, "expected a column"),
        ("mag", "E(B-V)", 1.0, "set it to E"),
    ],
)
def test_what_the_header_of_a_map_says_counts(
    sky: Path, unit: str, system: str, factor: float, words: str
) -> None:
    path = sky / "said.fits"
    label = [("EXTSYS", system)] if system else []
    ones = np.ones(12 * NSIDE**2)
    healpy.write_map(path, ones, column_units=unit, extra_header=label, overwrite=True)
    config = load(sky / "run.toml", [f"data.far_column={path}", f"data.far_column_factor={factor}"])
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        prepare(config)


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        ("about", 2),
        pytest.param("at most", 3, marks=pytest.mark.slow),
        pytest.param("at most", 5, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    sky: Path, tmp_path: Path, kind: str, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pixels left out, since the prior goes on behind the box, and a fit to all stars."""
    settings = (
        f"data.far_column={sky / 'true.fits'}",
        f'data.far_column_kind="{kind}"',
        "data.refit=true",
        "grid.outside=prior",
        "model.disc_height=70",
    )

    def run(path: Path) -> None:
        config = load(sky / "run.toml", settings)
        execute_run(prepare(config, path), path, config, False, resume=True)

    run(tmp_path / "whole")
    section = json.loads((tmp_path / "whole" / "report.json").read_text())["far_column"]
    assert (section["pixels_left_out"] > 0) == (kind == "about")
    path = tmp_path / "killed"
    assert interrupted(monkeypatch, states, lambda: run(path), Killed())
    run(path)
    assert differences(tmp_path / "whole", path) == []


def test_columns_have_no_scatter_of_stars_and_no_say_in_it(sky: Path) -> None:
    """Columns that are 30 % off from pixel to pixel leave the scatter that stars alone have, and
    the noise of the data is what `far_column_scatter` says, whatever the scatter."""
    true, rng = healpy.read_map(sky / "true.fits", dtype=np.float64), np.random.default_rng(0)
    rough = true * (1.0 + 0.3 * rng.standard_normal(len(true)))
    healpy.write_map(sky / "rough.fits", rough, dtype=np.float64)
    learn = ('model.learn=["mean", "scatter"]', "model.scatter=0.02")
    alone, held = (
        mapped(sky, name, *learn, *column)[0]
        for name, column in (
            ("scatter", ()),
            ("rough", (f"data.far_column={sky / 'rough.fits'}", "data.far_column_scatter=0.3")),
        )
    )
    observed = held.run.observed
    assert observed.column is not None
    assert observed.column.variance is not None
    at, before = held.fit.hyperparameters, alone.fit.hyperparameters
    data = observed.training(held.run.train)
    noise = model_of(held.run.config, replace(at, scatter=0.2), data).likelihood.noise_variance(
        data
    )
    count = len(observed.column)
    torch.testing.assert_close(noise[:count], observed.column.variance.to(noise))
    stars = observed.error_variance[held.run.train] + 0.2**2
    torch.testing.assert_close(noise[count:], stars.to(noise))
    assert at.scatter < 2.0 * before.scatter
