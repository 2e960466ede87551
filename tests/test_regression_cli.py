"""Regression on the command line: from a table to a report, predictions, maps and pictures."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
from astropy.io import fits
from astropy.table import Table
from astropy.wcs import WCS
from numpy.typing import NDArray

from dustmap import HIPGPRegressor, config
from dustmap.cli import BAD_INPUT, CHECK_FAILED, DONE, main
from dustmap.engines import most_exact
from dustmap.runs import prepare
from dustmap.runs.checkpoints._status import OWN
from dustmap.tables import read_tables
from dustmap.tables._outputs import foreign_entries

ROOT = Path(__file__).resolve().parents[1]
INPUTS = ("a", "b", "c")


def columns(dim: int, n: int = 90) -> dict[str, NDArray[np.float64]]:
    """Positive targets with noise of 5 per cent, on inputs of unlike units."""
    rng = np.random.default_rng(dim)
    X = rng.uniform(size=(n, dim))
    log_price = np.sin(5.0 * X[:, 0]) + X[:, 1:].sum(axis=1) + 0.05 * rng.standard_normal(n)
    table = {name: X[:, d] * 10.0**d for d, name in enumerate(INPUTS[:dim])}
    return table | {"price": np.exp(log_price), "error": np.full(n, 0.05)}


def write(folder: Path, dim: int, **sections: dict[str, Any]) -> Path:
    """A configuration with its CSV table beside it."""
    Table(columns(dim)).write(folder / "table.csv", format="ascii.csv", overwrite=True)
    content: dict[str, dict[str, Any]] = {
        "data": {
            "kind": "regression",
            "catalog": "table.csv",
            "inputs": list(INPUTS[:dim]),
            "target": "log(price)",
        },
        "fit": {"engine": "exact", "learn_rows": 60},
        # The run of one input has the choice.
        "model": {"kernel": "auto" if dim == 1 else "matern32"},
    }
    for name, section in sections.items():
        content.setdefault(name, {}).update(section)
    lines = []
    for name, section in content.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in section.items())]
    (folder / "run.toml").write_text("\n".join(lines))
    return folder


def run(folder: Path, *arguments: str) -> int:
    return main(["run", str(folder / "run.toml"), "--output", str(folder / "run"), *arguments])


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return content


def error(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with one input and the exact engine."""
    folder = write(tmp_path_factory.mktemp("curve"), 1)
    assert run(folder) == DONE
    return folder


def test_the_report_has_the_choice_of_the_kernel(curve: Path) -> None:
    choice = report(curve)["kernel_choice"]
    assert [c["name"] for c in choice["candidates"]] == ["matern12", "matern32", "matern52"]
    assert report(curve)["hyperparameters"]["profile"] == choice["name"]
    errors = report(curve)["hyperparameter_errors"]
    assert len(errors["length"]) == len(report(curve)["hyperparameters"]["length"])
    assert errors["std"] > 0
    assert errors["noise_std"] > 0
    shown = (curve / "run" / "report.md").read_text()
    assert "## Hyperparameter errors" in shown
    assert "| Name | Score | Difference | Standard error | Seconds |" in shown
    page = (curve / "run" / "report.html").read_text()
    assert "<h1>Regression</h1>" in page
    assert 'src="data:image/png;base64,' in page
    assert 'kernel = "auto"' in (curve / "run" / "config.toml").read_text()


def test_run_writes_report_model_maps_and_picture(curve: Path) -> None:
    told = report(curve)
    assert told["status"] == "done"
    assert told["counts"] == {
        "rows": 90,
        "rows_fitted": 81,
        "rows_held_out": 9,
        "rows_in_the_map": 90,
        "rows_dropped_incomplete": 0,
        "rows_dropped_outside_the_box": 0,
    }
    assert told["hyperparameters"]["noise_std"] == pytest.approx(0.05, rel=0.3)
    assert told["held_out_rows"]["rmse"] < 0.15
    assert told["fit"]["engine"] == "exact"
    for name in ("config.toml", "report.md", "map.fits", "map.zarr", "plots/regression.png"):
        assert (curve / "run" / name).exists()
    lines = (curve / "run" / "metrics.jsonl").read_text().splitlines()
    (fit,) = [line for line in map(json.loads, lines) if "log_evidence" in line]
    assert fit["log_evidence"] == pytest.approx(told["fit"]["log_evidence"])
    assert config.load(curve / "run" / "config.toml").data.target == "log(price)"
    assert foreign_entries(curve / "run", OWN) == []  # else --overwrite would refuse the run


def test_nothing_in_a_run_is_pickled(curve: Path) -> None:
    for path in (curve / "run").rglob("*.npz"):
        with np.load(path, allow_pickle=False) as stored:
            assert all(stored[name].dtype != object for name in stored.files)
    endings = {path.suffix for path in (curve / "run" / "checkpoint").rglob("*") if path.is_file()}
    assert endings == {".json", ".npz"}


def test_evaluate_scores_another_table(curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    table = str(curve / "table.csv")
    assert main(["evaluate", str(curve / "run"), "--catalog", table, "--json"]) == DONE
    told = json.loads(capsys.readouterr().out)
    names = ("mae", "mse", "rmse", "loglike", "chi2", "coverage68", "coverage95", "n")
    assert set(names) <= set(told)
    assert told["n"] == 90
    model = HIPGPRegressor.load(curve / "run" / "checkpoint" / "model")
    rows = columns(1)
    residual = np.log(rows["price"]) - model.predict(rows["a"][:, None])
    assert told["rmse"] == pytest.approx(np.sqrt(np.mean(residual**2)))


@pytest.mark.parametrize("ending", [".csv", ".fits", ".ecsv", ".npz", ".parquet", ".h5"])
def test_predict_needs_inputs_only_and_adds_columns(
    curve: Path, tmp_path: Path, ending: str
) -> None:
    Table({"a": [0.1, 0.2, 3.0], "name": ["x", "y", "z"]}).write(tmp_path / "new.csv")
    arguments = ["--catalog", str(tmp_path / "new.csv"), "--output", str(tmp_path / f"p{ending}")]
    assert main(["predict", str(curve / "run"), *arguments]) == DONE
    predicted = read_tables(tmp_path / f"p{ending}")
    assert predicted.colnames == ["a", "name", "target_mean", "target_std"]
    np.testing.assert_allclose(predicted["target_mean"][:2], np.sin([0.5, 1.0]), atol=0.15)
    assert predicted["target_std"][2] > 5 * predicted["target_std"][0]


def test_rows_without_inputs_are_predicted_as_nan_and_counted(
    curve: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("a,name\n0.5,x\n,y\ninf,z\n1.0,w\n")
    arguments = ["--catalog", str(tmp_path / "new.csv"), "--output", str(tmp_path / "p.csv")]
    assert main(["predict", str(curve / "run"), *arguments, "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["rows_without_inputs"] == 2
    predicted = np.ma.filled(read_tables(tmp_path / "p.csv")["target_mean"], np.nan)
    np.testing.assert_array_equal(np.isnan(predicted), [False, True, True, False])
    np.testing.assert_allclose(predicted[[0, 3]], np.sin([2.5, 5.0]), atol=0.15)


def test_predict_keeps_the_columns_of_the_table(
    curve: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Table({"a": [0.1], "target_std": [99.0]}).write(tmp_path / "new.csv")
    arguments = ["--catalog", str(tmp_path / "new.csv"), "--output", str(tmp_path / "p.csv")]
    assert main(["predict", str(curve / "run"), *arguments]) == BAD_INPUT
    assert "columns target_std already" in capsys.readouterr().err


def test_export_and_read_back(curve: Path, tmp_path: Path) -> None:
    for kind in ("zarr", "fits"):
        output = ["--format", kind, "--output", str(tmp_path / f"map.{kind}")]
        assert main(["export", str(curve / "run"), *output]) == DONE
    with xr.open_zarr(tmp_path / "map.zarr") as dataset:
        assert dataset["target_mean"].dims == ("a",)
        a, mean = dataset["a"].values, dataset["target_mean"].values
    model = HIPGPRegressor.load(curve / "run" / "checkpoint" / "model")
    np.testing.assert_allclose(mean, model.predict(a[:, None]), rtol=1e-9)
    with fits.open(tmp_path / "map.fits") as hdus:
        hdus.verify("exception")
        np.testing.assert_array_equal(hdus["TARGET_MEAN"].data, mean)
        assert hdus["TARGET_STD"].data.shape == mean.shape


def test_plot_is_a_picture(curve: Path, tmp_path: Path) -> None:
    picture = str(tmp_path / "curve.png")
    assert main(["plot", str(curve / "run"), "--output", picture]) == DONE
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_two_inputs_on_the_grid(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, data={"error": "error"}, fit={"engine": "hip"})
    assert run(folder) in (DONE, CHECK_FAILED)
    told = report(folder)
    assert told["fit"]["engine"] == "hip"
    assert told["fit"]["advice"] == []
    assert told["hyperparameters"]["noise_scale"] == pytest.approx(1.0, rel=0.3)
    assert told["held_out_rows"]["rmse"] < 0.25
    with xr.open_zarr(folder / "run" / "map.zarr") as dataset:
        assert dataset["target_mean"].dims == ("a", "b")
        mean = dataset["target_mean"].values
        a, b = dataset["a"].values, dataset["b"].values
    with fits.open(folder / "run" / "map.fits") as hdus:
        image = hdus["TARGET_MEAN"]
        np.testing.assert_allclose(image.data.T, mean)
        at = WCS(image.header).pixel_to_world_values(3, 5)
        assert [image.header["CTYPE1"], image.header["CTYPE2"]] == ["a", "b"]
    np.testing.assert_allclose(at, [a[3], b[5]])
    saved = ["--output", str(tmp_path / "again.fits"), "--format", "fits"]
    assert main(["export", str(folder / "run"), *saved]) == DONE
    with fits.open(tmp_path / "again.fits") as hdus:
        np.testing.assert_allclose(hdus["TARGET_MEAN"].data.T, mean, atol=1e-5)


def test_two_inputs_with_the_global_engine(tmp_path: Path) -> None:
    fit = {"engine": "global", "samples": 32, "learn_rows": 40}
    folder = write(tmp_path, 2, fit=fit, compute={"dtype": "float64"})
    assert run(folder) in (DONE, CHECK_FAILED)
    told = report(folder)
    assert told["fit"]["engine"] == "global"
    assert told["fit"]["samples"] == 32
    assert told["fit"]["advice"] == []
    assert told["solve"]["status"] == "converged"
    assert told["learning"]["n_data"] == 40
    n = told["counts"]["rows_fitted"]
    # The others decide whether the kernel stays.
    assert told["learning"]["neighbours_n_data"] == n - n // 4
    assert told["held_out_rows"]["rmse"] < 0.25
    names = [check["name"] for check in told["checks"]]
    assert {"learning converged", "solver converged"} <= set(names)
    with xr.open_zarr(folder / "run" / "map.zarr") as dataset:
        mean, std = dataset["target_mean"].values, dataset["target_std"].values
        a, b = dataset["a"].values, dataset["b"].values
    nodes = np.stack(np.meshgrid(a, b, indexing="ij"), axis=-1).reshape(-1, 2)
    again = HIPGPRegressor.load(folder / "run" / "checkpoint" / "model")
    reopened, spread = again.predict(nodes, return_std=True)
    np.testing.assert_allclose(mean.ravel(), reopened, rtol=1e-6)
    np.testing.assert_allclose(std.ravel(), spread, rtol=1e-6)


def test_the_global_engine_keeps_the_runs_grid(tmp_path: Path) -> None:
    box = {"center": [0.5], "size": [1.2], "spacing": 0.02}
    folder = write(tmp_path, 1, grid=box, fit={"engine": "global", "samples": 8})
    assert run(folder) in (DONE, CHECK_FAILED)
    assert report(folder)["fit"]["grid_shape"] == [61]
    rows = Table({"a": [0.1, 0.2, 30.0, -70.0]})
    rows.write(tmp_path / "new.csv")
    output = ["--catalog", str(tmp_path / "new.csv"), "--output", str(tmp_path / "p.csv")]
    assert main(["predict", str(folder / "run"), *output]) == DONE
    found = Table.read(tmp_path / "p.csv")
    np.testing.assert_allclose(found["target_mean"][:2], np.sin([0.5, 1.0]), atol=0.15)
    # Far away it is the prior's, and the error of the mean that was learned.
    prior = report(folder)["hyperparameters"]["std"]
    assert found["target_std"][2] == pytest.approx(found["target_std"][3], rel=1e-9)
    assert prior < found["target_std"][2] < 1.6 * prior


def test_three_inputs_in_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, 3, data={"target": "price"}, export={"formats": []})
    assert run(folder) in (DONE, CHECK_FAILED)
    plot = ["plot", str(folder / "run"), "--output", str(tmp_path / "slice.png")]
    assert main([*plot, "--slice", "c=50"]) == DONE
    assert main([*plot, "--slice", "c=500", "--overwrite"]) == BAD_INPUT
    assert "--slice c=500: expected" in error(capsys)
    assert main([*plot, "--slice", "c=top", "--overwrite"]) == BAD_INPUT
    assert "--slice c=top: expected c=NUMBER" in error(capsys)
    assert main([*plot, "--slice", "z=0", "--overwrite"]) == BAD_INPUT
    assert "--slice z=0: expected c=NUMBER" in error(capsys)


def test_npz_with_a_matrix_reads_as_the_csv_does(curve: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    rows = columns(1)
    np.savez(
        folder / "table.npz", data=np.stack(list(rows.values()), 1), columns=np.array(list(rows))
    )
    assert run(folder, "--set", f"data.catalog={folder / 'table.npz'}") == DONE
    ours, theirs = report(folder), report(curve)
    assert ours["fit"]["log_evidence"] == pytest.approx(theirs["fit"]["log_evidence"])
    np.savez(folder / "columns.npz", allow_pickle=False, **rows)
    again = ["--overwrite", "--set", f"data.catalog={folder / 'columns.npz'}"]
    assert run(folder, *again) == DONE
    assert report(folder)["fit"]["log_evidence"] == pytest.approx(theirs["fit"]["log_evidence"])


def test_several_tables_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, 1, data={"catalog": ["table.csv", "table.csv"]})
    assert run(folder, "--dry-run", "--json") == DONE
    assert json.loads(capsys.readouterr().out)["plan"]["rows"] == 180


def test_a_regression_has_one_stage(curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(curve / "run.toml"), "--output", str(curve / "part")]
    assert main([*arguments, "--until", "fit"]) == BAD_INPUT
    assert "--until fit: a run with data.kind" in error(capsys)
    assert not (curve / "part").exists()


def test_an_existing_run_is_refused(curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(curve) == BAD_INPUT
    assert "holds a run already" in error(capsys)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.target=cost", "missing column cost; the columns there are a, price, error"),
        ("data.target=log(cost)", "missing column cost"),
        ("data.target=sqrt(price)", "expected a column, or log(price) or log10(price)"),
        ("data.inputs=[a, z]", "missing column z"),
        ("data.target=log(bad)", "column bad: 1 of 90 rows are not > 0, as log needs"),
        ("data.target=pole", "column pole: 1 of 90 rows are not finite (first at row 4"),
        ("data.target=void", "none of the 90 rows has all its values; missing: void in 90"),
        ("data.target=name", "column name: expected numbers"),
        ("data.target=name", "in row 0 (counted from 0)"),
        ("data.error=bad", "column bad: 1 of 90 rows are not > 0"),
        ("data.holdout=0.99", "leaves 1 of 90 rows to fit"),
        ("data.catalog=none.csv", "none.csv: there is no such file"),
        ("data.catalog=run.toml", "expected a table that ends in .fits"),
        ("model.learn=[length, std, noise]", "a regression always learns its mean"),
        ("model.learn=[length, std, mean]", "expected a column of standard errors"),
        (
            "grid.spacing=0.1",
            "0.0, 0.0], the default, is for stars: expected 1 numbers, one for",
        ),
        ("compute.device=cuda", "regression runs on the CPU"),
        ("compute.memory=1KiB", "the run needs"),
        ("fit.block=[4, 4]", "fit.block = [4, 4]: expected 1 whole numbers"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, words: str
) -> None:
    folder = write(tmp_path, 1)
    table = Table(columns(1))
    table["bad"] = np.where(np.arange(90) == 3, -1.0, 1.0)
    table["pole"] = np.where(np.arange(90) == 4, np.inf, 1.0)
    table["void"] = np.full(90, np.nan)
    table["name"] = ["x"] * 90
    table.write(folder / "wider.csv", format="ascii.csv")
    catalog = ["--set", f"data.catalog={folder / 'wider.csv'}"]
    if "target=cost" in setting or "catalog" in setting:
        catalog = []
    given = setting.replace("data.catalog=", f"data.catalog={folder}/")
    assert run(folder, *catalog, "--set", given) == BAD_INPUT
    assert words in error(capsys)
    assert not (folder / "run").exists()


def test_rows_outside_the_box_are_refused_or_dropped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, 1, grid={"center": [0.25], "size": [0.5], "spacing": 0.05})
    assert run(folder) == BAD_INPUT
    assert re.search(r"\d+ of 90 rows lie outside the box \(0.0,\) to \(0.5,\) of a", error(capsys))
    assert run(folder, "--set", "grid.outside=drop", "--set", "fit.engine=hip") == DONE
    told = report(folder)
    assert told["counts"]["rows_dropped_outside_the_box"] > 30
    assert told["fit"]["grid_shape"] == [11]


def test_rows_that_lack_a_value_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, table = write(tmp_path, 1), Table(columns(1), masked=True)
    table["a"].mask[[3, 7]] = True
    table["price"].mask[[7, 8]] = True
    table["price"][3] = -1.0  # of no use to look at in a row that lacks another value
    table.write(folder / "table.csv", format="ascii.csv", overwrite=True)
    assert run(folder) == DONE
    said = capsys.readouterr().err
    assert "3 of 90 rows are left out, for values are missing: a in 2, price in 2" in said
    counts = report(folder)["counts"]
    assert counts["rows"] == 90 == counts["rows_in_the_map"] + counts["rows_dropped_incomplete"]
    capsys.readouterr()
    evaluate = ["evaluate", str(folder / "run"), "--catalog", str(folder / "table.csv"), "--json"]
    assert main(evaluate) == DONE
    scored = json.loads(capsys.readouterr().out)
    assert (scored["n"], scored["rows_dropped_incomplete"]) == (87, 3)


def test_words_for_missing_values_are_read_as_such_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, 1)
    header, *rows = (folder / "table.csv").read_text().splitlines()
    for row, word in enumerate(("NA", "null", "-", "")):
        rows[row] = ",".join([word, *rows[row].split(",")[1:]])
    (folder / "table.csv").write_text("\n".join([header, *rows]) + "\n")
    assert run(folder) == DONE
    assert report(folder)["counts"]["rows_dropped_incomplete"] == 4
    rows[5] = ",".join(["many", *rows[5].split(",")[1:]])
    (folder / "table.csv").write_text("\n".join([header, *rows]) + "\n")
    capsys.readouterr()
    assert run(folder, "--overwrite") == BAD_INPUT
    said = error(capsys)
    assert "expected numbers, got 'many' in row 5" in said
    assert "write NA" in said


def test_parquet_with_nulls_elsewhere_reads_as_the_csv_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, 1)
    arrays = {name: pa.array(values) for name, values in columns(1).items()}
    names = pa.array([None, *["x"] * 89])
    pq.write_table(pa.table(arrays | {"name": names}), folder / "table.parquet")
    assert run(folder, "--dry-run", "--json") == DONE
    from_csv = capsys.readouterr().out
    catalog = f"data.catalog={folder / 'table.parquet'}"
    assert run(folder, "--dry-run", "--json", "--set", catalog) == DONE
    assert json.loads(capsys.readouterr().out)["plan"] == json.loads(from_csv)["plan"]


def test_the_box_needs_two_nodes_along_every_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = {"center": [0.5, 5.0], "size": [1.0, 10.0], "spacing": 5.0}
    assert run(write(tmp_path, 2, grid=box)) == BAD_INPUT
    assert "at least two points on every axis, got (1, 3)" in error(capsys)


def test_a_grid_beyond_the_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = {"center": [0.5], "size": [1.0], "spacing": 1e-5}
    folder = write(tmp_path, 1, grid=box, fit={"engine": "hip", "family": "full"})
    assert run(folder) == BAD_INPUT
    assert re.search(r"the run needs [\d.,]+ GiB and compute.memory allows", error(capsys))
    assert not (folder / "run").exists()


@pytest.mark.parametrize("memory", ["150MiB", "250MiB", "400MiB"])
def test_an_automatic_grid_is_planned_within_the_memory(memory: str, tmp_path: Path) -> None:
    n, folder = 20_000, write(tmp_path, 2, fit={"engine": "hip", "learn_rows": 200})
    Table(columns(2, n)).write(folder / "table.csv", format="ascii.csv", overwrite=True)
    loaded = config.load(folder / "run.toml", [f"compute.memory={memory}"])
    assert prepare(loaded).plan().memory.peak <= loaded.compute.memory_bytes


@pytest.mark.parametrize("engine", ["auto", "exact"])
def test_rows_that_the_memory_holds_dense_are_planned_within_it(
    engine: str, tmp_path: Path
) -> None:
    n, folder = 10_000, write(tmp_path, 2, fit={"engine": engine})
    Table(columns(2, n)).write(folder / "table.csv", format="ascii.csv", overwrite=True)
    loaded = config.load(folder / "run.toml", ["compute.memory=1.9GiB", "data.holdout=0"])
    assert n < most_exact(loaded.compute.memory_bytes) < 1.2 * n
    needed = prepare(loaded).plan().memory.peak
    assert needed < loaded.compute.memory_bytes
    assert (needed > 16 * n**2) == (engine == "exact")  # auto takes a grid


def test_fixed_length_and_std(tmp_path: Path) -> None:
    model = {"learn": ["mean", "noise"], "length": 0.3, "std": 1.5}
    folder = write(tmp_path, 1, model=model)
    assert run(folder) == DONE
    told = report(folder)["hyperparameters"]
    assert told["length"] == pytest.approx([0.3])
    assert told["std"] == pytest.approx(1.5)


def test_the_shipped_example_runs_on_a_few_houses(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    long, lat = rng.uniform(-122.5, -121.5, 200), rng.uniform(47.2, 47.8, 200)
    price = 5e5 * np.exp(np.sin(9.0 * lat) + long + 122.0 + 0.2 * rng.standard_normal(200))
    table = Table({"price": price, "lat": lat, "long": long})
    table.write(tmp_path / "houses.csv", format="ascii.csv")
    arguments = ["--output", str(tmp_path / "run"), "--set", "fit.learn_rows=100"]
    arguments += ["--memory", "100MiB"]  # a small grid, soon done
    arguments += ["--set", f"data.catalog={tmp_path / 'houses.csv'}"]
    code = main(["run", str(ROOT / "pipelines" / "house_prices.toml"), *arguments])
    assert code in (DONE, CHECK_FAILED)
    told = report(tmp_path)
    assert told["fit"]["engine"] == "hip"
    assert told["held_out_rows"]["rmse"] < 0.5
