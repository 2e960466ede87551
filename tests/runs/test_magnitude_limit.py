"""Runs on catalogs with a magnitude limit: what it hides is counted, and has no coverage."""

import json
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.config import load
from dustmap.errors import UserError
from dustmap.runs import StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._run import StarRun
from dustmap.sky import DustMap
from dustmap.sky.maps import MapRequest, Quantity
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
REQUEST = MapRequest((Quantity.COVERAGE,))
LIMIT = ("data.magnitude_limit=17.5", "data.magnitude_column=g_mag")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limit")
    write_sky(path / "sky.fits", plain_sky(120, seed=3), exact_distances=True)
    (path / "run.toml").write_text(CONFIG)
    return path


def run(folder: Path, name: str, *settings: str) -> Path:
    config = load(folder / "run.toml", settings)
    execute_run(prepare(config), folder / name, config, overwrite=False)
    return folder / name


def test_hidden_nodes_are_counted_and_have_no_coverage(folder: Path) -> None:
    """As if only the brightest tenth were seen: there is not much dust that it reaches through. The
    density of the map is that without a limit."""
    free = run(folder, "free")
    brightest = float(np.quantile(Table.read(folder / "sky.fits")["g_mag"], 0.1))
    limited = run(folder, "limited", *LIMIT, f"data.magnitude_limit={brightest:.3f}")
    section = json.loads((limited / "report.json").read_text())["magnitude_limit"]
    assert "magnitude_limit" not in json.loads((free / "report.json").read_text())
    assert "Nodes hidden" in (limited / "report.md").read_text()
    without, hidden = (DustMap.open(path / "map.zarr") for path in (free, limited))
    np.testing.assert_array_equal(without.mean, hidden.mean)
    before, after = (cubes.cube(Quantity.COVERAGE) for cubes in (without, hidden))
    assert 0 < section["nodes_hidden"] <= int((after == 0.0).sum())
    np.testing.assert_array_equal(after[after > 0.0], before[after > 0.0])
    assert section["reach"][-1]["extinction_mag"] < 0.5
    reopened = open_run(limited)
    assert isinstance(reopened, StarMap)
    again = DustMap.from_field(reopened.field(), reopened.run.grid, REQUEST)
    np.testing.assert_array_equal(again.cube(Quantity.COVERAGE), after)


def test_magnitudes_are_named_or_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"data\.magnitude_column"):
        prepare(load(folder / "run.toml", ["data.magnitude_limit=17"]))
    with pytest.raises(UserError, match="missing magnitude"):
        prepare(load(folder / "run.toml", [LIMIT[0], "data.magnitude_column=nothing"]))
    with pytest.raises(UserError, match="A_Q"):
        prepare(load(folder / "run.toml", [*LIMIT, "data.magnitude_band=A_Q"]))
    store = folder / "stars.zarr"
    ingest = ["ingest", str(folder / "sky.fits"), "--system", "A_V", "--output", str(store)]
    assert main(ingest) == DONE
    with pytest.raises(UserError, match="--magnitude"):
        prepare(load(folder / "run.toml", [LIMIT[0], f"data.catalog={store}"]))
    assert main([*ingest, "--overwrite", "--magnitude", ""]) == BAD_INPUT
    assert "--magnitude" in capsys.readouterr().err
    assert main([*ingest, "--overwrite", "--magnitude", "g_mag"]) == DONE
    magnitude = open_star_store(store).read().magnitude
    assert magnitude is not None
    assert magnitude.max() <= 17.5
    prepare(load(folder / "run.toml", [LIMIT[0], f"data.catalog={store}"]))


def test_a_limit_that_stars_are_beyond_is_none(folder: Path) -> None:
    """One of another band, or of no catalog: all stars fainter is an error, many a failed check."""
    magnitudes = Table.read(folder / "sky.fits")["g_mag"]
    column = LIMIT[1]
    with pytest.raises(UserError, match=r"every star is fainter than the limit; .* the faintest"):
        prepare(load(folder / "run.toml", [f"data.magnitude_limit={magnitudes.min() - 1}", column]))
    found = {}
    for quantile in (0.5, 1.0):
        limit = float(np.quantile(magnitudes, quantile)) + 1e-3
        run = prepare(load(folder / "run.toml", [f"data.magnitude_limit={limit}", column]))
        assert isinstance(run, StarRun)
        checks = {check.name: check for check in run.checks}
        found[quantile] = checks["share of stars fainter than the limit"]
    assert found[0.5].value == pytest.approx(0.5, abs=0.02)
    assert [found[quantile].passed for quantile in (0.5, 1.0)] == [False, True]


def test_magnitudes_that_no_star_has_are_refused(folder: Path, tmp_path: Path) -> None:
    table = Table.read(folder / "sky.fits")
    table["g_mag"][3] = -999.0
    table.write(tmp_path / "sky.fits")
    (tmp_path / "run.toml").write_text((folder / "run.toml").read_text())
    with pytest.raises(UserError, match="magnitude is not between -10 and 40 mag"):
        prepare(load(tmp_path / "run.toml", ["data.magnitude_limit=17", LIMIT[1]]))


@pytest.mark.parametrize(("further", "passed"), [(0.5, True), (3.0, False)])
def test_a_limit_far_beyond_the_stars_is_none(folder: Path, further: float, passed: bool) -> None:
    """One in other units, or of another catalog: it would hide nothing."""
    limit = float(np.max(Table.read(folder / "sky.fits")["g_mag"])) + further
    run = prepare(load(folder / "run.toml", [f"data.magnitude_limit={limit}", LIMIT[1]]))
    assert isinstance(run, StarRun)
    checks = {check.name: check for check in run.checks}
    assert checks["limit beyond the faintest star in mag"].passed is passed
