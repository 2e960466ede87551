"""Scales of surveys: a sky that no model drew, one of two surveys 10 % too red."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from astropy.table import Table

from dustmap.config import load
from dustmap.errors import UserError
from dustmap.gp.functionals import groups_of
from dustmap.inference import LogNormalPosterior
from dustmap.runs import StarMap, open_run, prepare
from dustmap.runs.stars import of_no_group
from dustmap.runs.stars._beyond import prior_dust
from tests.run_outputs import differences
from tests.runs.test_resume import Killed, interrupted
from tests.runs.test_zero_points import CONFIG, DENSITIES, ERROR, OFFSET, run, stars

SCALE = 1.3
SETTINGS = ("model.group_scale=0.2", "model.group_std=0.01", "data.holdout=0.3")


def scaled(count: int, seed: int) -> Table:
    """The stars of two surveys, those of `red` with 1.3 times their extinction and no offset."""
    table = stars(count, seed)
    red = table["SURVEY"] == "red"
    table["extinction"] += np.where(red, (SCALE - 1.0) * table["TRUTH"] - OFFSET, 0.0)
    return table


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scales")
    scaled(500, 0).write(path / "sky.fits")
    more = scaled(200, 1)
    more["SURVEY"][:20] = "grey"
    more.write(path / "more.fits")
    (path / "run.toml").write_text(CONFIG)
    return path


@pytest.fixture(scope="module", params=DENSITIES)
def mapped(request: pytest.FixtureRequest, sky: Path) -> Path:
    """A run of each density."""
    return run(sky, sky / request.param, *DENSITIES[request.param], *SETTINGS)


def test_scales_are_recovered_and_reported(mapped: Path) -> None:
    section = json.loads((mapped / "report.json").read_text())["zero_points"]
    assert section["prior_std_of_scales"] == 0.2
    rows = {row["group"]: row for row in section["groups"]}
    ratio = rows["red"]["scale"] / rows["blue"]["scale"]
    assert ratio == pytest.approx(SCALE, abs=0.08)
    for name, true in (("blue", 1.0), ("red", SCALE)):
        assert abs(rows[name]["scale"] - true) < 2.0 * rows[name]["scale_error"]
        assert abs(rows[name]["zero_point"]) < 3.0 * rows[name]["error"]
    assert "| Scale |" in (mapped / "report.md").read_text()
    with np.load(mapped / "checkpoint" / "posterior.npz") as arrays:
        assert set(1.0 + arrays["scales"]) == {row["scale"] for row in rows.values()}


def test_stars_of_sight_lines_have_no_zero_points_and_scales(mapped: Path) -> None:
    finished = open_run(mapped)
    assert isinstance(finished, StarMap)
    groups = json.loads((mapped / "report.json").read_text())["zero_points"]["groups"]
    rows, stars = {row["group"]: row for row in groups}, finished.run.stars
    own = of_no_group(stars, finished.fit)
    assert stars.groups is not None
    for number, name in enumerate(finished.run.group_names):
        chosen, row = stars.groups == number, rows[name]
        expected = (stars.extinction[chosen] - row["zero_point"]) / row["scale"]
        np.testing.assert_allclose(own.extinction[chosen], expected, rtol=1e-9)
        errors = stars.extinction_error[chosen] / row["scale"]
        np.testing.assert_allclose(own.extinction_error[chosen], errors, rtol=1e-9)


def test_measurements_are_predicted_with_scales_and_the_map_is_free_of_them(
    sky: Path, mapped: Path
) -> None:
    finished = open_run(mapped)
    assert isinstance(finished, StarMap)
    scores = finished.evaluate(sky / "more.fits", system="A_V")
    assert scores["chi2"] == pytest.approx(1.0, abs=0.4)
    finished.predict(sky / "more.fits", "generic", mapped / "more.fits", False)
    table = Table.read(mapped / "more.fits")
    rows = {
        row["group"]: row
        for row in json.loads((mapped / "report.json").read_text())["zero_points"]["groups"]
    }
    known = np.arange(len(table)) >= 20
    scale = np.array([rows[name]["scale"] if name in rows else 1.0 for name in table["SURVEY"]])
    mean, measured = table["extinction_mean"], table["measurement_mean"]
    # The zero points are 0.01 mag at most.
    np.testing.assert_allclose(measured, scale * mean, atol=0.03)
    z = (table["extinction"] - measured) / np.hypot(table["measurement_std"], ERROR)
    assert float(np.square(z[known]).mean()) == pytest.approx(1.0, abs=0.4)
    variance = table["measurement_std"] ** 2 - table["extinction_std"] ** 2
    added = 0.01**2 + 0.2**2 * (mean**2)
    np.testing.assert_allclose(variance[~known], added[~known], rtol=0.1)
    # One field for both surveys: errors of the two sides differ less than the surveys.
    far = stars(1000, 9)
    places = [far[name] for name in ("l", "b", "distance")]
    l, b, distance = np.radians(places[0]), np.radians(places[1]), places[2]
    axes = np.cos(b) * np.cos(l), np.cos(b) * np.sin(l), np.sin(b)
    answers = finished.at(np.stack([distance * axis for axis in axes], axis=-1))
    ratio = answers["extinction_mean"] / far["TRUTH"]
    plenty = far["TRUTH"] > 0.1
    sides = [np.median(ratio[plenty & (side * axes[0] > 0.3)]) for side in (1.0, -1.0)]
    assert sides[0] / sides[1] == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("density", ["gaussian", pytest.param("lognormal", marks=pytest.mark.slow)])
def test_a_killed_fit_with_scales_goes_on_to_the_same_bits(
    sky: Path, density: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("model.noise=gaussian", "compute.checkpoint=0 s", "data.holdout=0.8", "grid.spacing=20")
    settings = (*DENSITIES[density], *SETTINGS, *few)
    run(sky, tmp_path / "whole", *settings)
    path = tmp_path / "run"

    def go() -> None:
        run(sky, path, *settings)

    assert interrupted(monkeypatch, 2, go, Killed())
    go()
    assert differences(tmp_path / "whole", path) == []


def test_a_run_without_scales_is_one_of_earlier_versions(sky: Path) -> None:
    """Zero points alone: no scales in its files, and its configuration need not name them."""
    few = ("model.noise=gaussian", "data.holdout=0.8")
    path = run(sky, sky / "without", *DENSITIES["gaussian"], *few)
    rows = json.loads((path / "report.json").read_text())["zero_points"]["groups"]
    assert set(rows[0]) == {"group", "stars", "zero_point", "error"}
    with np.load(path / "checkpoint" / "posterior.npz") as arrays:
        assert "scales" not in arrays
    text = (path / "config.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("group_scale")]
    assert len(lines) == len(text.splitlines()) - 1
    where = torch.tensor([[20.0, 10.0, 5.0]]).numpy()
    finished = open_run(path)
    assert isinstance(finished, StarMap)
    before = finished.at(where)
    (path / "config.toml").write_text("\n".join(lines) + "\n")
    finished = open_run(path)
    assert isinstance(finished, StarMap)
    assert finished.at(where) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("model.group_scale=-0.1",), r"model.group_scale.*>= 0"),
        (("model.group_scale=0.7",), r"model.group_scale.*<= 0.5"),
        (("model.group_scale=0.1", "data.groups="), "is for groups of stars: name their column"),
        (("model.group_scale=0.1", "fit.engine=hip"), 'is for .* fit.engine = "global"'),
        (("model.group_scale=0.1", "fit.engine=exact"), 'is for .* fit.engine = "global"'),
    ],
)
def test_what_has_no_scales_says_so(sky: Path, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(load(sky / "run.toml", settings))


@pytest.mark.slow
def test_dust_beyond_the_box_is_scaled_as_that_within(sky: Path, tmp_path: Path) -> None:
    """What is taken from a survey's measurements is so many times what the prior expects."""
    smaller = "grid.size=[60, 60, 40]", "grid.around=none", *DENSITIES["lognormal"], *SETTINGS
    finished = open_run(run(sky, tmp_path / "run", *smaller))
    assert isinstance(finished, StarMap)
    observed, fit = finished.run.observed, finished.fit
    expected = observed.expected(prior_dust(finished.run.config, fit.hyperparameters))
    known, groups = expected > 0.02, groups_of(observed.batch.functional)
    assert groups is not None
    taken = (observed.expected_beyond / expected)[known]
    gains = fit.gains(observed.batch.functional)[known]
    assert isinstance(fit.posterior, LogNormalPosterior)
    scales = fit.posterior.scales()
    assert scales is not None
    torch.testing.assert_close(gains, 1.0 + scales.mean.double()[groups[known]])
    # The last fit has moved the scales by a little.
    by_group = [float(taken[groups[known] == g].median()) for g in (0, 1)]
    assert max(by_group) / min(by_group) == pytest.approx(
        float(gains.max() / gains.min()), rel=0.03
    )
    assert float(gains.max() / gains.min()) > 1.15
