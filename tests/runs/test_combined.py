"""Runs on the means of stars that the nodes cannot tell apart (data.combine)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dustmap.cli import BAD_INPUT, main
from dustmap.config import load
from dustmap.errors import UserError
from dustmap.runs import Stage, execute_run, open_star_map, prepare
from dustmap.sky.simulation import write_sky
from dustmap.sky.stars import open_star_store
from tests.skies import plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
system = "A_V"
refit = false
[grid]
size = [120, 80, 40]
spacing = 20
[model]
kernel = "matern32"
mean_density = 0.002
learn = []
[fit]
samples = 8
[export]
figures = []
"""
STARS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("combined")
    write_sky(path / "sky.fits", plain_sky(STARS, seed=3))
    (path / "run.toml").write_text(CONFIG)
    return path


def run(folder: Path, name: str, *settings: str) -> dict[str, Any]:
    config = load(folder / "run.toml", settings)
    execute_run(prepare(config), folder / name, config, overwrite=False)
    report: dict[str, Any] = json.loads((folder / name / "report.json").read_text())
    return report


def test_a_run_counts_stars_and_cells_and_opens_again(folder: Path) -> None:
    report = run(folder, "cells", "data.combine=1")
    told, counts = report["data"]["combined"], report["counts"]
    assert told["stars"] + counts["stars_held_out"] == STARS
    assert told["cells"] + counts["stars_held_out"] == counts["stars"] < STARS
    kept = open_star_store(folder / "cells" / "stars.zarr").read()
    assert kept.multiplicity is not None
    assert (kept.multiplicity[told["cells"] :] == 1.0).all()
    assert counts["stars_held_out"] == round(0.1 * STARS)
    # The map opens on the same cells, not on cells of cells.
    again = open_star_map(folder / "cells")
    l, b = np.array([[10.0], [5.0]])
    answers = again.at_stars(l, b, kept.distances[:1])
    assert np.isfinite(answers["extinction_mean"]).all()
    assert 0.3 < report["held_out_stars"]["coverage68"] <= 1.0
    # Means of stars do not tell which stars the map has seen.
    scored = again.evaluate(folder / "sky.fits")
    assert scored["stars_that_the_map_has_seen"] == "unknown"


def test_spacings_that_stars_choose_are_those_of_all_stars(folder: Path) -> None:
    """A run that goes on reads means, and keeps the nodes that the stars themselves asked for."""
    chosen = ["data.combine=1", 'grid.spacing="auto"']
    report = run(folder, "auto", *chosen)
    config = load(folder / "run.toml", chosen)
    again = prepare(config, folder / "auto")
    assert again.plan().counts["nodes"] == report["counts"]["nodes"]


def test_cells_narrower_than_the_stars_change_nothing_but_rounding(folder: Path) -> None:
    apart = run(folder, "apart", "data.combine=0.001")
    single = run(folder, "single")
    assert apart["counts"]["stars"] == STARS
    scores = (one["held_out_stars"]["rmse"] for one in (apart, single))
    assert next(scores) == pytest.approx(next(scores), rel=1e-3)


def test_all_stars_may_be_combined(folder: Path) -> None:
    config = load(folder / "run.toml", ["data.combine=1", "data.holdout=0"])
    counts = prepare(config).plan().counts
    assert counts["stars"] == counts["stars_fitted"] < STARS


def test_magnitudes_of_means_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "data.combine=1", "--set", "data.magnitude_limit=17"]
    out = str(folder / "none")
    assert main(["run", str(folder / "run.toml"), "--output", out, *settings]) == BAD_INPUT
    assert "does not go with data.magnitude_limit" in capsys.readouterr().err
    assert not Path(out).exists()


@pytest.mark.parametrize(
    "setting",
    ["scatter=0.1", "relative_scatter=0.1", "learn=['scatter']", "learn=['relative_scatter']"],
)
def test_scatter_of_means_is_refused(folder: Path, setting: str) -> None:
    with pytest.raises(UserError, match=r"combine = 1 does not go with model\..*of single stars"):
        load(folder / "run.toml", ["data.combine=1", f"model.{setting}"])
    assert load(folder / "run.toml", [f"model.{setting}"]).data.combine == 0.0


def test_scatter_of_stored_means_is_refused(folder: Path) -> None:
    config = load(folder / "run.toml", ["data.combine=1"])
    execute_run(prepare(config), folder / "means", config, overwrite=False, until=Stage.INGEST)
    stored = [f"data.catalog={folder / 'means' / 'stars.zarr'}"]
    assert prepare(load(folder / "run.toml", stored)).plan().counts["stars"] < STARS
    with pytest.raises(UserError, match=r"holds means of stars, does not go with model\.scatter"):
        prepare(load(folder / "run.toml", [*stored, "model.scatter=0.1"]))
