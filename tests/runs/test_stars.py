"""A run on a small sky, from catalog to files, and its posterior brought back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from astropy.table import QTable, Table
from astropy.wcs import WCS
from numpy.typing import NDArray
from PIL import Image

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.config import load
from dustmap.errors import UserError
from dustmap.runs import StarMap, execute_run, open_run, prepare
from dustmap.runs.stars import _export
from dustmap.sky.catalogs import read_catalog
from dustmap.sky.maps import DustMap, MapRequest, Quantity
from dustmap.sky.stars import ExactDistances
from dustmap.tables import open_table, read_tables
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
truth = "truth.zarr"
holdout = 0.2
[grid]
size = [120, 80, 40]
spacing = 20
[model]
length = 40
std = 0.002
learn = ["length", "std", "mean"]
[fit]
engine = "exact"
learn_rows = 60
[export]
figures = ["slice", "slices", "calibration"]
pdf = true
"""
MEAN = MapRequest((Quantity.MEAN,))


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on 100 stars in a box with three different sides."""
    path = tmp_path_factory.mktemp("sky")
    write_plain_sky(path, plain_sky(100, seed=2))
    (path / "run.toml").write_text(CONFIG)
    config = load(path / "run.toml")
    report = execute_run(prepare(config), path / "run", config, overwrite=False)
    assert report.passed, report.as_markdown()
    return path


@pytest.fixture(scope="module")
def finished(sky: Path) -> StarMap:
    found = open_run(sky / "run")
    assert isinstance(found, StarMap)
    return found


def at(
    finished: StarMap, l: float, b: float, distance: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Predictions along one ray."""
    here = np.ones(len(distance))
    return finished.at_stars(l * here, b * here, ExactDistances(distance))


def test_the_run_directory_is_complete(sky: Path) -> None:
    names = {str(path.relative_to(sky / "run")) for path in (sky / "run").rglob("*")}
    expected = {
        "config.toml",
        "stars.zarr",
        "checkpoint/hyperparameters.json",
        "metrics.jsonl",
        "report.json",
        "report.md",
        "report.html",
        "view.html",
        "map.zarr",
        "map.fits",
        "plots/slice.png",
        "plots/slice.pdf",
        "plots/slices.png",
        "plots/calibration.png",
    }
    assert expected <= names
    assert not [name for name in names if "partial" in name]


def test_the_report_has_what_was_promised(sky: Path) -> None:
    report = json.loads((sky / "run" / "report.json").read_text())
    assert report["status"] == "done"
    assert report["counts"]["stars_fitted"] == 80
    assert {"rmse", "chi2", "coverage68", "loglike", "n"} <= set(report["held_out_stars"])
    assert report["held_out_stars"]["n"] == 20
    assert report["truth"]["n"] == 7 * 5 * 3
    assert report["grid"]["nodes"] == "7 × 5 × 3"
    told = (sky / "run" / "report.md").read_text()
    for name in ("box", "spacing", "nodes"):
        assert f"| {name.capitalize()} | {report['grid'][name]} |" in told
    stages = report["stages"]["stages"]
    assert [line["stage"] for line in stages] == [
        "ingest",
        "kernel",
        "fit",
        "evaluate",
        "refit",
        "export",
    ]
    assert all(line["seconds"] >= 0 and 0.1 < line["peak_gib"] < 8 for line in stages)
    assert {"torch", "numpy", "astropy", "dustmap", "python"} <= set(report["versions"])
    assert report["compute"]["dtype"] == "float64"
    assert np.isfinite(report["fit"]["log_evidence"])


def test_the_report_says_how_much_of_the_box_the_data_know(sky: Path) -> None:
    covered = DustMap.open(sky / "run" / "map.zarr").cube(Quantity.COVERAGE)
    told = json.loads((sky / "run" / "report.json").read_text())["coverage"]
    assert told["part_of_the_box_known_by_data"] == pytest.approx((covered > 0.5).mean())
    assert told["median"] == pytest.approx(np.median(covered), rel=1e-5)


def test_the_figures_say_of_which_run_they_are(sky: Path) -> None:
    config = json.loads((sky / "run" / "report.json").read_text())["config_sha256"]
    with Image.open(sky / "run" / "plots" / "slice.png") as picture:
        assert config in picture.info["Description"]


def test_metrics_tell_how_learning_went(sky: Path) -> None:
    lines = (sky / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    objective = [r["objective_per_star"] for r in records if r["stage"] == "learn"]
    assert max(objective) > objective[0]
    (fit,) = [r for r in records if r["stage"] == "fit" and "log_evidence" in r]
    assert fit["peak_bytes"] > 0
    assert [r["time"] for r in records] == sorted(r["time"] for r in records)
    assert all(r["rank"] == 0 for r in records)
    assert records[-1]["event"] == "finished"


def test_the_map_knows_more_than_the_prior(sky: Path) -> None:
    report = json.loads((sky / "run" / "report.json").read_text())
    assert report["truth"]["correlation"] > 0.5
    assert report["truth"]["rmse"] < report["hyperparameters"]["std"]
    density = DustMap.open(sky / "run" / "map.zarr")
    assert density.std is not None
    assert density.std.max() < 1.05 * report["hyperparameters"]["std"]
    sun = density.nearest_slice(0.0), 2, 3
    assert density.std[sun] < density.std[0, 0, 0]


def test_both_formats_carry_the_same_map_and_hash(sky: Path) -> None:
    a, b = DustMap.open(sky / "run" / "map.zarr"), DustMap.open(sky / "run" / "map.fits")
    np.testing.assert_array_equal(a.mean, b.mean)
    np.testing.assert_allclose(a.grid.lower, (-60.0, -40.0, -20.0))
    expected = json.loads((sky / "run" / "report.json").read_text())["config_sha256"]
    with xr.open_zarr(sky / "run" / "map.zarr", consolidated=False) as dataset:
        assert dataset.attrs["config_sha256"] == expected
    with fits.open(sky / "run" / "map.fits", checksum=True) as hdus:
        hdus.verify("exception")
        assert expected in list(hdus["MEAN"].header["HISTORY"])


def test_the_fits_map_answers_where_a_coordinate_points(sky: Path, finished: StarMap) -> None:
    where = SkyCoord(l=90 * u.deg, b=0 * u.deg, distance=20 * u.pc, frame="galactic")
    with fits.open(sky / "run" / "map.fits") as hdus:
        wcs = WCS(hdus["MEAN"].header)
        voxel = wcs.world_to_array_index_values(*where.cartesian.xyz.to_value(u.pc))
        density = hdus["MEAN"].data[tuple(int(i) for i in voxel)]
    assert finished.query(90.0, 0.0, 20.0)["density_mean"] == pytest.approx(density, rel=1e-6)


def test_the_echo_runs_to_the_same_map(sky: Path, tmp_path: Path) -> None:
    """The same seed, the same bits: from the echoed configuration, in another directory."""
    config = load(sky / "run" / "config.toml", ["export.figures=[]"])
    execute_run(prepare(config), tmp_path / "again", config, overwrite=False)
    again, first = (
        DustMap.open(tmp_path / "again" / "map.zarr"),
        DustMap.open(sky / "run" / "map.zarr"),
    )
    np.testing.assert_array_equal(again.mean, first.mean)
    assert again.std is not None
    assert first.std is not None
    np.testing.assert_array_equal(again.std, first.std)


def test_no_map_is_made_for_figures_that_nobody_asked_for(
    sky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> DustMap:
        raise AssertionError("a map was made")

    monkeypatch.setattr(_export, "drawn_map", refused)
    bare = ["export.figures=[]", "export.formats=[]", "model.learn=[]", "data.refit=false"]
    config = load(sky / "run" / "config.toml", bare)
    report = execute_run(prepare(config), tmp_path / "bare", config, overwrite=False)
    assert report.pictures == ()
    config = load(sky / "run" / "config.toml", [*bare[1:], 'export.figures=["slice"]'])
    with pytest.raises(AssertionError, match="a map was made"):
        execute_run(prepare(config), tmp_path / "drawn", config, overwrite=False)


def test_a_reopened_run_has_the_posterior_that_made_the_map(sky: Path, finished: StarMap) -> None:
    np.testing.assert_allclose(
        DustMap.from_field(finished.field(), finished.run.grid, MEAN).mean,
        DustMap.open(sky / "run" / "map.zarr").mean,
        rtol=1e-5,
        atol=1e-9,
    )


def test_maps_take_any_box_and_step(sky: Path, finished: StarMap) -> None:
    grid = finished.grid([-20.0, 20.0, 0.0, 40.0, -10.0, 0.0], 10.0)
    assert grid.shape == (5, 5, 2)
    part = DustMap.from_field(finished.field(), grid, MEAN)
    whole = DustMap.open(sky / "run" / "map.zarr")
    np.testing.assert_allclose(part.mean[1, 2, 0], whole.mean[1, 3, 2], rtol=1e-5)


@pytest.mark.parametrize(
    ("box", "step", "words"),
    [
        ([-20.0, 200.0, 0.0, 40.0, -10.0, 0.0], 10.0, "--box along X: expected -60"),
        ([20.0, -20.0, 0.0, 40.0, -10.0, 0.0], 10.0, "--box along X"),
        (None, 15.0, "--step 15: expected a part of 80 pc on Y"),
    ],
)
def test_impossible_exports_are_refused(
    finished: StarMap, box: list[float] | None, step: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        finished.grid(box, step)


def test_evaluate_scores_another_catalog(
    sky: Path, finished: StarMap, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["evaluate", str(sky / "run"), "--catalog", str(sky / "sky.fits"), "--json"]) == DONE
    )
    told = json.loads(capsys.readouterr().out)
    assert told["n"] == 100
    assert 0.4 < told["chi2"] < 2.0
    again = finished.evaluate(sky / "sky.fits", "generic", "")
    assert told["rows"] == again["rows"]
    assert told["chi2"] == pytest.approx(again["chi2"])


def test_evaluate_takes_the_system_that_the_run_was_given(
    sky: Path, finished: StarMap, tmp_path: Path
) -> None:
    stars = QTable.read(sky / "sky.fits")
    del stars.meta["EXTSYS"]
    stars.write(tmp_path / "stars.fits")
    with pytest.raises(UserError, match="nothing says which extinction this is"):
        finished.evaluate(tmp_path / "stars.fits")
    config = finished.run.config
    named = replace(config, data=replace(config.data, system=finished.system.name))
    known = replace(finished, run=replace(finished.run, config=named))
    assert known.evaluate(tmp_path / "stars.fits")["chi2"] == pytest.approx(
        finished.evaluate(sky / "sky.fits")["chi2"]
    )


def test_predict_adds_columns_and_keeps_rows(
    sky: Path, finished: StarMap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = QTable(
        {"name": ["here", "away"], "l": [90.0, 90.0], "b": [0.0, 0.0], "distance_pc": [20.0, 500.0]}
    )
    table.write(tmp_path / "places.ecsv")
    arguments = ["--catalog", str(tmp_path / "places.ecsv"), "--output", str(tmp_path / "out.fits")]
    assert main(["predict", str(sky / "run"), *arguments]) == DONE
    out = QTable.read(tmp_path / "out.fits")
    assert list(out["name"]) == ["here", "away"]
    assert out["density_std"].unit == u.mag / u.pc
    assert out["extinction_mean"].unit == u.mag
    assert out.meta["EXTSYS"] == finished.system.name
    assert out["extinction_mean"].info.description == f"mean of the extinction in {finished.system}"
    extinctions = fits.getdata(tmp_path / "out.fits")["extinction_mean"]
    np.testing.assert_array_equal(np.isnan(extinctions), [False, True])
    asked = ["--l", "90", "--b", "0", "--distance", "20pc", "--json"]
    capsys.readouterr()
    assert main(["query", str(sky / "run"), *asked]) == DONE
    assert out["coverage"][0] == pytest.approx(json.loads(capsys.readouterr().out)["coverage"])
    assert 0.0 < out["coverage"][0] < 1.0
    assert out["coverage"].mask.tolist() == [False, True]


@pytest.mark.parametrize(
    ("taken", "ending", "code"),
    [
        ("extinction_mean", "fits", BAD_INPUT),
        ("density_std", "csv", BAD_INPUT),
        ("coverage", "fits", BAD_INPUT),
        ("extinction_unit", "csv", BAD_INPUT),
        ("extinction_unit", "fits", DONE),
        ("distance_mean", "fits", DONE),
    ],
)
def test_predict_keeps_the_columns_of_the_table(
    sky: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    taken: str,
    ending: str,
    code: int,
) -> None:
    """It refuses a table with columns that answers would overwrite, and names them."""
    places, output = tmp_path / "places.csv", tmp_path / f"out.{ending}"
    places.write_text(f"l,b,distance_pc,{taken}\n90,0,20,99\n")
    arguments = ["--catalog", str(places), "--output", str(output)]
    assert main(["predict", str(sky / "run"), *arguments]) == code
    if code == DONE:
        assert read_tables(output)[taken][0] == 99
    else:
        assert f"columns {taken} already" in capsys.readouterr().err
        assert not output.exists()


@pytest.mark.parametrize("ending", ["fits", "ecsv", "vot", "parquet", "csv"])
def test_predicted_tables_say_which_extinction(
    sky: Path, finished: StarMap, tmp_path: Path, ending: str
) -> None:
    """As files that are read name it, and in a column where there is no header."""
    places, output = tmp_path / "places.csv", tmp_path / f"out.{ending}"
    places.write_text("l,b,distance_pc\n90,0,20\n")
    told = finished.predict(places, "generic", output, False)
    assert told["extinction_system"] == finished.system.name
    if ending == "csv":
        table = Table.read(output)
        assert (table["extinction_unit"][0], table["density_unit"][0]) == ("mag", "mag / pc")
        assert table["extinction_system"][0] == finished.system.name
    else:
        assert open_table(output).keyword("EXTSYS") == finished.system.name


def test_a_catalog_keeps_the_system_of_its_own_extinctions(
    sky: Path, finished: StarMap, tmp_path: Path
) -> None:
    places = "l,b,distance_pc,extinction\n90,0,20,0.1\n"
    (tmp_path / "places.csv").write_text(places)
    finished.predict(tmp_path / "places.csv", "generic", tmp_path / "out.fits", False)
    assert open_table(tmp_path / "out.fits").keyword("EXTSYS") == ""


def test_query_is_predict_of_one_place(
    sky: Path, finished: StarMap, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--l", "90", "--b", "0", "--distance", "0.02kpc", "--json"]
    assert main(["query", str(sky / "run"), *place]) == DONE
    told = json.loads(capsys.readouterr().out)
    columns = at(finished, 90.0, 0.0, np.array([20.0]))
    answers = {name: told[name] for name in columns}
    assert answers == pytest.approx({name: values[0] for name, values in columns.items()})
    assert told.keys() - answers.keys() == {
        "coverage",
        "extinction_system",
        "extinction_unit",
        "density_unit",
    }
    with pytest.raises(ValueError, match=r"distance = 500 pc is outside the box"):
        finished.query(90.0, 0.0, 500.0)


def test_query_integrates_the_density_it_gives(finished: StarMap) -> None:
    """A(<d) is the integral of the posterior mean density along the ray."""
    d = np.linspace(0.0, 30.0, 61)[1:] - 0.25
    density = at(finished, 53.13, 0.0, d)["density_mean"]
    extinction = at(finished, 53.13, 0.0, np.array([30.0]))["extinction_mean"]
    assert extinction[0] == pytest.approx(density.sum() * 0.5, rel=1e-3)


def test_plot_draws_a_run(sky: Path) -> None:
    output = sky / "slice.pdf"
    arguments = ["--slice", "z=-0.02kpc", "--truth", str(sky / "truth.zarr")]
    assert main(["plot", str(sky / "run"), *arguments, "--output", str(output)]) == DONE
    assert output.read_bytes().startswith(b"%PDF")


def test_nothing_to_learn_is_the_prior_as_configured(sky: Path, tmp_path: Path) -> None:
    config = load(
        sky / "run.toml", ["model.learn=[]", "model.mean_density=0.003", "export.figures=[]"]
    )
    report = execute_run(prepare(config), tmp_path / "run", config, overwrite=False)
    assert report.sections["fit"]["learning"] == "none"
    assert report.sections["hyperparameters"] == pytest.approx(
        {"length": 40.0, "std": 0.002, "mean": 0.003, "noise": 1.0}
    )


def test_estimators_of_the_line_integral_agree(sky: Path, tmp_path: Path) -> None:
    means = []
    for name in ("table", "quadrature"):
        config = load(
            sky / "run.toml", ["model.learn=[]", f"model.line_integral={name}", "export.figures=[]"]
        )
        execute_run(prepare(config), tmp_path / name, config, overwrite=False)
        means.append(DustMap.open(tmp_path / name / "map.zarr").mean)
    np.testing.assert_allclose(means[0], means[1], rtol=1e-3, atol=1e-6)


def test_stars_outside_the_box_are_dropped_and_counted(sky: Path) -> None:
    config = load(sky / "run.toml", ["grid.size=[80, 80, 40]", "grid.outside=drop"])
    counts = prepare(config).plan().counts
    stars = read_catalog(sky / "sky.fits").stars
    outside = int((np.abs(stars.positions()[:, 0]) > 40.0).sum())
    assert counts["stars_dropped_outside_the_box"] == outside > 0
    assert counts["stars_fitted"] + counts["stars_held_out"] == 100 - outside


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named(sky: Path) -> None:
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        prepare(load(sky / "run.toml", ["compute.device=cuda"]))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_map(sky: Path, tmp_path: Path) -> None:
    config = load(sky / "run" / "config.toml", ["compute.device=cuda"])
    execute_run(prepare(config), tmp_path / "run", config, overwrite=False)
    found, expected = (DustMap.open(path / "run" / "map.zarr") for path in (tmp_path, sky))
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-3, atol=1e-6)
    assert isinstance(open_run(tmp_path / "run"), StarMap)


def test_more_stars_than_the_engine_takes_are_refused(tmp_path: Path) -> None:
    write_plain_sky(tmp_path, plain_sky(20_002, seed=2))
    (tmp_path / "run.toml").write_text(CONFIG.replace('truth = "truth.zarr"', ""))
    with pytest.raises(ValueError, match=r"at most 20,000 stars, and 20,002 are to be fitted"):
        prepare(load(tmp_path / "run.toml", ["data.holdout=0"]))


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a run directory"):
        open_run(tmp_path)
