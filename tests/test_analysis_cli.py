"""dustmap clouds and compare: tables, pictures, and what is refused in one line."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy.table import QTable, Table

from dustmap.cli import BAD_INPUT, DONE, _analysis, main
from dustmap.gp import RegularGrid
from dustmap.sky import Provenance, galactic
from dustmap.sky.agreement import MapSource
from dustmap.sky.figures import CloudMarks
from dustmap.sky.maps import DustMap, Quantity, write_map

GRID = RegularGrid((-100.0, -100.0, -60.0), (10.0,) * 3, (21, 21, 13))
CENTRE = np.array([50.0, 20.0, -10.0])


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """map.fits with a ball and samples; twice.zarr with twice of it, in another system."""
    folder = tmp_path_factory.mktemp("maps")
    r2 = ((GRID.points().numpy() - CENTRE) ** 2).sum(-1).reshape(GRID.shape).transpose(2, 1, 0)
    mean = np.asarray(1e-3 + 0.03 * np.exp(-0.5 * r2 / 15.0**2), np.float32)
    samples = np.stack([0.8 * mean, 1.2 * mean])
    arrays = {Quantity.MEAN: mean, Quantity.SAMPLES: samples}
    write_map(folder / "map.fits", DustMap.from_arrays(GRID, arrays, "A_V", True), Provenance(""))
    twice = DustMap.from_arrays(GRID, {Quantity.MEAN: 2.0 * mean / 3.1}, "E(B-V)")
    write_map(folder / "twice.zarr", twice, Provenance(""))
    l, b, _ = galactic(CENTRE)
    Table({"name": ["Ball"], "l": [float(l)], "b": [float(b)]}).write(folder / "names.csv")
    return folder


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == DONE
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("kind", ["ecsv", "fits"])
def test_clouds_of_a_map(
    maps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    output = tmp_path / f"clouds.{kind}"
    command = ["clouds", str(maps / "map.fits"), "--output", str(output)]
    found = told(capsys, *command, "--names", str(maps / "names.csv"))
    assert found["clouds"] == found["clouds_with_a_name"] == 1
    assert found["clouds_in_nine_of_ten_samples"] == 1
    assert found["samples"] == 2
    (row,) = QTable.read(output)
    assert row["name"] == "Ball"
    assert row["distance"].to_value("pc") == pytest.approx(np.linalg.norm(CENTRE), rel=0.01)
    assert row["mass"].to_value("Msun") == pytest.approx(found["mass_in_suns"], rel=1e-6)
    assert main(command) == BAD_INPUT
    assert "exists already" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--threshold", "1"]) == DONE
    assert len(QTable.read(output)) == 0
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_clouds_of_a_run_and_their_outlines(positive_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "clouds.ecsv"
    assert main(["clouds", str(positive_run / "run"), "--output", str(output)]) == DONE
    assert "probability" in QTable.read(output).colnames


def test_clouds_without_a_name_have_none_on_pictures(maps: Path, tmp_path: Path) -> None:
    for name in ("clouds.ecsv", "clouds.fits"):
        (tmp_path / "other.csv").write_text("name,l,b\nFar,200,0\n")
        names = ["--names", str(tmp_path / "other.csv")]
        output = ["--output", str(tmp_path / name)]
        assert main(["clouds", str(maps / "map.fits"), *names, *output]) == DONE
        assert CloudMarks.read(tmp_path / name).names == ("",)
        points = ["--points", str(tmp_path / name), "--output", str(tmp_path / f"{name}.html")]
        assert main(["view", str(maps / "map.fits"), *points]) == DONE
        assert '"--"' not in (tmp_path / f"{name}.html").read_text()


@pytest.mark.parametrize(
    "picture",
    [
        ["--slice", "z=-10"],
        pytest.param(["--top-down"], marks=pytest.mark.slow),
        ["--sky", "50"],
        pytest.param(
            ["--sky", "60", "--integrated", "--zoom", "22", "-10", "10"], marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
)
def test_clouds_are_drawn(maps: Path, tmp_path: Path, picture: list[str]) -> None:
    table, names = tmp_path / "clouds.ecsv", ["--names", str(maps / "names.csv")]
    assert main(["clouds", str(maps / "map.fits"), *names, "--output", str(table)]) == DONE
    drawn = []
    for options in ([], ["--clouds", str(table)]):
        output = tmp_path / f"{len(options)}.png"
        what = ["plot", str(maps / "map.fits"), *picture, *options, "--output", str(output)]
        assert main(what) == DONE
        drawn.append(output.read_bytes())
    assert drawn[0] != drawn[1]


def test_a_map_beside_itself_and_another(
    maps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, figure = tmp_path / "scores.ecsv", tmp_path / "scores.png"
    others = [str(maps / name) for name in ("map.fits", "twice.zarr")]
    options = ["--nside", "4", "--output", str(output), "--figure", str(figure)]
    found = told(capsys, "compare", str(maps / "map.fits"), *others, *options)
    for kind in ("integrated", "differential"):
        same, twice = (found[f"{other}, {kind}"] for other in others)
        assert same["slope"] == pytest.approx(1.0)
        assert same["rmse"] == 0.0
        assert twice["slope"] == pytest.approx(0.5, rel=1e-5)
    assert found["extinction_system"] == "A_V"
    table = QTable.read(output)
    assert set(table["bin"]) == {"all", "distance", "latitude"}
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def test_files_of_one_published_map_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they are called on the command line; one alone has the name of its map."""
    cube = DustMap.from_nodes(GRID, np.ones(GRID.size), None, "A_V")

    def published(name: str, *_: object) -> MapSource:
        return MapSource(name, cube)

    monkeypatch.setattr("dustmap.sky.agreement.published_source", published)
    others = ["bayestar=a.h5", "bayestar=b.h5", "leike2020=c.h5"]
    names = [each.name for each in _analysis._sources(argparse.Namespace(others=others, system=""))]
    assert names == ["bayestar=a.h5", "bayestar=b.h5", "leike2020"]


def test_stars_beside_a_run_and_its_map(
    positive_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = str(positive_run / "sky.fits")
    for name in ("run", "run/map.zarr"):
        options = ["--catalog", catalog, "--output", str(tmp_path / "scores.csv"), "--overwrite"]
        found = told(capsys, "compare", str(positive_run / name), *options)
        score = found[f"{catalog}, integrated"]
        assert score["n"] == 60
        assert score["correlation"] > 0.9
        assert abs(score["bias"]) < score["rmse"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clouds", "map.fits", "--output", "a.csv"], "expected .ecsv, .fits or another"),
        (["clouds", "none.fits", "--output", "a.ecsv"], "none.fits"),
        (["clouds", "map.fits", "--threshold", "-1", "--output", "a.ecsv"], "more than 0 mag/pc"),
        (["clouds", "map.fits", "--names", "twice.zarr", "--output", "a.ecsv"], "twice.zarr"),
        (["clouds", "map.fits", "--output", "map.fits", "--overwrite"], "is the input"),
        (["compare", "map.fits", "--output", "a.ecsv"], "expected an OTHER or a --catalog"),
        (
            ["compare", "map.fits", "map.fits", "--dtype", "float64", "--output", "a.ecsv"],
            "--dtype is for runs, and none is asked for extinctions of stars here: leave it out",
        ),
        (["compare", "map.fits", "bayestart", "--output", "a.ecsv"], "one of bayestar"),
        (["compare", "map.fits", "none.fits", "--output", "a.ecsv"], "none.fits"),
        (["compare", "map.fits", "iphas=no.h5", "--output", "a.ecsv"], "give their file as iphas"),
        (
            ["compare", "map.fits", "map.fits", "--step", "0pc", "--output", "a.ecsv"],
            "expected 0 < step <= distance",
        ),
        (
            ["compare", "map.fits", "map.fits", "--output", "a.ecsv", "--figure", "a.gif"],
            "expected a picture that ends in",
        ),
        (
            ["plot", "map.fits", "--los", "0", "0", "--clouds", "c.ecsv", "--output", "a.png"],
            "--clouds goes with --slice",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    maps: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(maps)
    before = sorted(path.name for path in maps.iterdir())
    assert main(arguments) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dustmap: error: ")
    assert words in line
    assert sorted(path.name for path in maps.iterdir()) == before
