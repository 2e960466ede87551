"""Bad input, each tried through the command line: one line, exit code 2, nothing half-written."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.cli import BAD_INPUT, CHECK_FAILED, DONE, FAILED, main

CONFIG = """
[data]
catalog = "stars.csv"
system = "A_V"
refit = false
[grid]
size = [120, 80, 40]
spacing = 20
[model]
density = "gaussian"
length = 40
std = 0.002
learn = []
[fit]
samples = 4
[export]
figures = []
samples = 0
"""
STORED = "data.catalog=made/stars.zarr"
COLUMNS = "source_id,l,b,distance_pc,extinction,extinction_error"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of 30 stars, a configuration, and a finished run."""
    path = tmp_path_factory.mktemp("bad")
    rng = np.random.default_rng(0)
    distance = rng.uniform(5.0, 39.0, 30)
    Table(
        {
            "source_id": np.arange(30),
            "l": rng.uniform(0.0, 360.0, 30),
            "b": rng.uniform(-30.0, 30.0, 30),
            "distance_pc": distance,
            "extinction": 0.002 * distance,
            "extinction_error": np.full(30, 0.01),
        }
    ).write(path / "stars.csv")
    (path / "run.toml").write_text(CONFIG)
    (path / "note.txt").write_text("not a map")
    (path / "broken.fits").write_bytes(b"SIMPLE  =                    T" + b" " * 50)
    assert main(["run", str(path / "run.toml"), "--output", str(path / "made")]) in (
        DONE,
        CHECK_FAILED,
    )
    (path / "cut.fits").write_bytes((path / "made" / "map.fits").read_bytes()[:6000])
    return path


@pytest.fixture(autouse=True)
def unchanged(folder: Path) -> Iterator[None]:
    """Nothing appears and nothing goes."""
    before = sorted(str(path) for path in folder.rglob("*"))
    yield
    assert sorted(str(path) for path in folder.rglob("*")) == before


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = BAD_INPUT) -> str:
    """The one line of a command that ends with this code."""
    capsys.readouterr()
    assert main(arguments) == code
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("dustmap: error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("dustmap: error: ")
    return lines[0]


def run(folder: Path, *settings: str, output: str = "new") -> list[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    return ["run", str(folder / "run.toml"), "--output", str(folder / output), *sets]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("grid.spaceing=3", "did you mean grid.spacing?"),
        ("data.schema=zgr32", "did you mean zgr23?"),
        ("data.system=AV", "did you mean A_V?"),
        ("data.cuts=edenhofer24", "cuts = 'edenhofer24': the card generic has"),
        ("grid.center=[2000, 0, 0]", "none of the 30 stars is seen through the box"),
        ("grid.outside=error", "rays leave the box"),
        ("data.truth=none.zarr", "none.zarr"),
        ("data.truth=note.txt", "note.txt"),
        ("data.truth=other.fits", "truth is in A_V and the stars are in A_G"),
        ("data.cuts=strict", "comes too late for the star store"),
    ],
)
def test_configurations(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    words: str,
) -> None:
    monkeypatch.chdir(folder)
    more = {
        "grid.outside=error": ("grid.size=[20, 20, 20]",),
        "data.truth=other.fits": ("data.truth=made/map.fits", "data.system=A_G", STORED),
        "data.cuts=strict": (STORED,),
    }
    assert words in refused(capsys, *run(folder, setting, *more.get(setting, ())))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("", "no star is left"),
        ("1,10,2,nan,0.1,0.01", "distance is not finite"),
        ("1,10,2,50,0.1,-0.01", "extinction_error is not > 0"),
        ("1,10,99,50,0.1,0.01", "b is not between -90 and 90 degrees"),
        ("1,10,2,fifty,0.1,0.01", "fifty"),
        ("1,10,2,50,0.1,0.01\n1,20,2,50,0.1,0.01", "source_id"),
    ],
)
def test_catalogs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, words: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"{COLUMNS}\n{row}\n" if row else f"{COLUMNS}\n")
    assert words in refused(capsys, *run(folder, f"data.catalog={path}"))
    missing = tmp_path / "missing.csv"
    missing.write_text("source_id,l,b,extinction,extinction_error\n1,2,3,0.1,0.1\n")
    assert "distance" in refused(capsys, *run(folder, f"data.catalog={missing}"))


@pytest.mark.parametrize("name", ["note.txt", "broken.fits", "cut.fits", "none.fits", "stars.csv"])
def test_unreadable_maps(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    place = ["--l", "1", "--b", "2", "--distance", "10"]
    assert name in refused(capsys, "query", str(folder / name), *place)
    output = ["--output", str(folder / "x.png")]
    assert name in refused(capsys, "plot", str(folder / name), *output)


def test_runs_that_are_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalog = ["--catalog", str(folder / "stars.csv")]
    assert "run directory" in refused(capsys, "evaluate", str(folder), *catalog)
    output = ["--output", str(folder / "out.csv")]
    assert "run directory" in refused(capsys, "predict", str(folder), *catalog, *output)
    export = ["--format", "fits", "--output", str(folder / "out.fits")]
    assert "run directory" in refused(capsys, "export", str(folder), *export)


def test_outputs_that_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a file" in refused(capsys, *run(folder, output="stars.csv/run"))
    assert "holds a run already" in refused(capsys, *run(folder, output="made"))
    catalog = ["--catalog", str(folder / "stars.csv")]
    wrong = ["--output", str(folder / "out.docx")]
    assert "out.docx" in refused(capsys, "predict", str(folder / "made"), *catalog, *wrong)
    taken = ["--output", str(folder / "stars.csv")]
    assert "is the input" in refused(capsys, "predict", str(folder / "made"), *catalog, *taken)
    truth = ["--truth-column", "no_such", "--system", "A_V", "--json"]
    words = refused(capsys, "evaluate", str(folder / "made"), *catalog, *truth)
    assert "no column no_such of noise-free extinctions; it has" in words


@contextmanager
def full_after(bytes_: int) -> Iterator[None]:
    """No file may grow beyond: what a full disk answers, an OSError, wherever it happens."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [100, 900, pytest.param(3000, marks=pytest.mark.slow), 6000])
def test_a_full_disk(folder: Path, capsys: pytest.CaptureFixture[str], room: int) -> None:
    """The echo, the stars, the checkpoint or the map: whatever does not fit, nothing stays."""
    with full_after(room):
        refused(capsys, *run(folder), code=FAILED)
    kept = (folder / "made" / "report.json").read_text()
    with full_after(room):
        refused(capsys, *run(folder, output="made"), "--overwrite", code=FAILED)
    assert (folder / "made" / "report.json").read_text() == kept
    with full_after(room):
        small = ["--stars", "200", "--seed", "1", "--size", "100", "100", "60"]
        refused(capsys, "simulate", *small, "--output", str(folder / "sky.fits"), code=FAILED)
        places = ["--catalog", str(folder / "stars.csv"), "--output", str(folder / "places.fits")]
        words = refused(capsys, "predict", str(folder / "made"), *places, code=FAILED)
    assert "places.fits" in words


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_answers_that_do_not_fit(folder: Path, tmp_path: Path, unbuffered: str) -> None:
    with (tmp_path / "answers.csv").open("w") as answers, full_after(3000):
        query = ("query", str(folder / "made"), "--l", "30", "--b", "5", "--profile")
        done = subprocess.run(
            [sys.executable, "-m", "dustmap", *query, "--step", "1"],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=answers,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == FAILED, done.stderr
    assert "stdout" in done.stderr


def test_a_place_that_may_not_be_written_to(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere but to what is mounted for reading."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    export = (
        "export",
        str(folder / "made"),
        "--format",
        "fits",
        "--output",
        str(folder / "x.fits"),
    )
    for command in (run(folder, output="x"), export):
        assert "may not be written to; choose another --output" in refused(capsys, *command)
