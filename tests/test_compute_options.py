"""--device, --dtype, --threads, --memory, --json and --dry-run of the commands."""

import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dustmap.cli import main, parser
from dustmap.gp import RegularGrid
from dustmap.sky import Provenance, write_map
from dustmap.sky.maps import DustMap, Quantity

#: Which of the options each command has; the others make no sense for it.
OPTIONS = {
    "run": {"device", "dtype", "threads", "memory", "json", "dry_run"},
    "evaluate": {"device", "dtype", "threads", "memory", "json"},
    "predict": {"device", "dtype", "threads", "memory", "json"},
    "query": {"device", "dtype", "threads", "memory", "json"},
    "plot": {"device", "dtype", "threads", "memory", "json"},
    "clouds": {"memory", "json"},
    "compare": {"device", "dtype", "threads", "memory", "json"},
    "export": {"device", "dtype", "threads", "memory", "json", "dry_run"},
    "simulate": {"threads", "memory", "json", "dry_run"},
    "ingest": {"threads", "json"},
}


@pytest.fixture(autouse=True)
def _threads_as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(exact_run: Path) -> Path:
    return exact_run / "run"


@pytest.mark.parametrize("command", OPTIONS)
def test_each_command_has_those_that_make_sense(command: str) -> None:
    subparsers = next(
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    have = {action.dest for action in subparsers.choices[command]._actions}
    known = {"device", "dtype", "threads", "memory", "json", "dry_run"}
    assert have & known == OPTIONS[command]


def test_a_finished_run_computes_as_it_is_asked(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--l", "30", "--b", "5", "--distance", "60pc", "--json"]
    assert main(["query", str(finished), *place]) == 0
    usual = json.loads(capsys.readouterr().out)
    options = ["--threads", "2", "--memory", "1GiB", "--device", "cpu", "--dtype", "float32"]
    assert main(["query", str(finished), *place, *options]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(usual)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "float64"], "was fitted in float32"),
        (["--dtype", "float16"], "compute.dtype"),
        (["--memory", "much"], "compute.memory"),
        (["--threads", "-1"], "compute.threads"),
        (["--threads", "1000000"], "4 for each core of this machine"),
        (["--threads", str(10**12)], "4 for each core of this machine"),
    ],
)
def test_what_cannot_be_is_refused(
    finished: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--l", "30", "--b", "5", "--distance", "60pc"]
    assert main(["query", str(finished), *place, *options]) == 2
    assert message in capsys.readouterr().err


def test_exports_are_planned_and_keep_their_origin(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "map.zarr"
    export = ["export", str(finished), "--format", "zarr", "--output", str(output)]
    assert main([*export, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["voxels"] == [6, 6, 4]
    assert told["chunks"] == {"planes of the map written at once": "4 of 4"}
    assert main([*export, "--dry-run"]) == 0
    assert "slabs" in capsys.readouterr().out
    assert not output.exists()
    assert main([*export, "--memory", "1GiB", "--threads", "1"]) == 0
    # Where it is computed does not change what made it.
    mine, own = (_sha256(path) for path in (output, finished / "map.zarr"))
    assert mine == own != ""


def test_exports_that_nothing_holds_are_refused(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "map.zarr"
    export = ["export", str(finished), "--format", "zarr", "--output", str(output)]
    for step in ("1e-6pc", "0.01pc"):
        assert main([*export, "--step", step]) == 2
        assert "it would fit with a larger --step or a smaller --box" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert main([*export, "--step", "10pc"]) == 2
    assert "21 x 21 x 13 voxels take up to" in capsys.readouterr().err
    assert not output.exists()


def test_simulate_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sky = ["simulate", "--stars", "10", "--seed", "1", "--output", str(tmp_path / "sky.fits")]
    assert main([*sky, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["nodes"] == [41, 41, 25]
    assert main([*sky, "--step", "1pc", "--memory", "100MiB"]) == 2
    assert "it would fit with a larger --step" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_map_knows_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _map(tmp_path)
    place = ["--l", "30", "--b", "5", "--distance", "60pc", "--json"]
    assert main(["query", str(path), *place, "--threads", "1", "--memory", "100MiB"]) == 0
    assert main(["query", str(path), *place, "--device", "cpu"]) == 2
    assert "--device is for runs" in capsys.readouterr().err


def test_an_integrated_sky_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = _map(tmp_path), str(tmp_path / "sky.png")
    assert main(["plot", str(path), "--sky", "90", "--integrated", "--output", output]) == 0
    assert capsys.readouterr().err.count("outside the map") == 1


def _map(folder: Path) -> Path:
    """Two samples around the Sun, to 100 pc in the plane and 60 pc above it."""
    grid = RegularGrid((-100.0, -100.0, -60.0), (20.0,) * 3, (11, 11, 7))
    samples = np.random.default_rng(0).uniform(1.0, 2.0, (2, 7, 11, 11)).astype(np.float32)
    arrays = {Quantity.MEAN: samples.mean(0), Quantity.SAMPLES: samples}
    path = folder / "map.zarr"
    write_map(path, DustMap.from_arrays(grid, arrays, "A_V", True), Provenance("", ()), False)
    return path


def _sha256(path: Path) -> str:
    content = json.loads((path / "zarr.json").read_text(encoding="utf-8"))
    return str(content["attributes"]["config_sha256"])
