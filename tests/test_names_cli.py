"""Clouds by name in queries and pictures, and cards with their queries on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.gp import RegularGrid
from dustmap.sky import Provenance
from dustmap.sky.maps import DustMap, write_map

GRID = RegularGrid((-200.0,) * 3, (20.0,) * 3, (21,) * 3)


@pytest.fixture(scope="module")
def density(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("names") / "map.fits"
    even = DustMap.from_nodes(GRID, np.full(GRID.size, 0.002), None, "A_V")
    write_map(path, even, Provenance(""))
    return str(path)


def test_a_place_by_name_has_the_published_distance(
    density: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", density, "--name", "corona australis", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["l"], found["b"], found["distance_pc"]) == (359.5, -17.8, 147.0)
    assert found["extinction_mean"] == pytest.approx(0.002 * 147.0, rel=1e-5)
    assert main(["query", density, "--name", "Taurus", "--distance", "50pc", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["distance_pc"] == 50.0


def test_a_table_of_names_keeps_its_columns(
    density: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "names.csv").write_text("name,note\nTaurus,a\nCorona Australis,b\n")
    assert main(["query", density, "--file", str(tmp_path / "names.csv"), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["note"] == ["a", "b"]
    assert found["distance_pc"] == [130.0, 147.0]
    np.testing.assert_allclose(found["extinction_mean"], [0.26, 0.294], rtol=1e-5)
    (tmp_path / "names.csv").write_text("name,distance_pc\nTaurus,60\n")
    assert main(["query", density, "--file", str(tmp_path / "names.csv"), "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["distance_pc"] == [60.0]


@pytest.mark.parametrize("column", ["distance", "distance_kpc", "in_kpc"])
def test_distances_of_a_table_of_names_are_in_its_units(
    density: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    """Where a place is empty the published distance counts."""
    names, values = ["Taurus", "Corona Australis"], np.ma.array([60.0, 0.0], mask=[False, True])
    table = Table({"name": names, "distance" if column == "in_kpc" else column: values})
    if column == "distance_kpc":
        table[column] = table[column] / 1000.0
    elif column == "in_kpc":
        table["distance"] = table["distance"] / 1000.0
        table["distance"].unit = "kpc"
    table.write(tmp_path / "names.ecsv")
    assert main(["query", density, "--file", str(tmp_path / "names.ecsv"), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["distance_pc"] == pytest.approx([60.0, 147.0])
    np.testing.assert_allclose(found["extinction_mean"], [0.12, 0.294], rtol=1e-5)


def test_names_by_a_card_without_distances_have_the_published_ones(
    density: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "names.csv").write_text("name\nTaurus\n")
    asked = ["query", density, "--file", str(tmp_path / "names.csv"), "--schema", "zgr23", "--json"]
    assert main(asked) == DONE
    assert json.loads(capsys.readouterr().out)["distance_pc"] == [130.0]


def test_vectors_of_a_table_are_kept(
    density: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table({"l": [0.0, 1.0], "b": [0.0, 1.0], "distance": [50.0, 60.0]})
    table["est"], table["note"] = [[1.0, np.inf], [3.0, np.nan]], [1.0, np.inf]
    table.write(tmp_path / "places.fits")
    asked = ["query", density, "--file", str(tmp_path / "places.fits")]
    assert main([*asked, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["est"] == [[1.0, None], [3.0, None]]
    assert found["note"] == [1.0, None]
    assert main(asked) == DONE
    header, first, _ = capsys.readouterr().out.splitlines()
    assert dict(zip(header.split(","), first.split(","), strict=True))["est_0"] == "1.0"


def test_coordinates_count_before_names(
    density: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "names.csv").write_text("name,l,b,distance_pc\nNowhere,10,0,80\n")
    assert main(["query", density, "--file", str(tmp_path / "names.csv"), "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["extinction_mean"] == pytest.approx([0.16])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "Ophiucus"], "'Ophiucus': no line of sight has this name; the nearest names"),
        (["--name", "Taurus", "--l", "3"], "--name for all three"),
        (["--name", "Taurus", "--profile", "--distance", "9"], "--name for all three"),
    ],
)
def test_names_that_are_none_are_one_line(
    density: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["query", density, *arguments]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    "picture",
    [
        ["--los", "Corona", "Australis"],
        ["--slices", "z=-100:100:100"],
        pytest.param(["--sky", "50", "100", "--zoom", "160", "-15", "10"], marks=pytest.mark.slow),
        ["--sky", "50", "100", "--integrated", "--zoom", "160", "-15", "10"],
    ],
    ids=" ".join,
)
def test_pictures_of_clouds_and_of_several(
    density: str, tmp_path: Path, picture: list[str]
) -> None:
    output = tmp_path / "a.pdf"
    assert main(["plot", density, *picture, "--output", str(output)]) == DONE
    written = output.read_bytes()
    assert written.startswith(b"%PDF")
    assert b"/FontFile2" in written  # TrueType, embedded
    assert b"/Type3" not in written


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (["--slices", "z=0"], "--slices z=0: expected x, y or z=FROM:TO:STEP"),
        (["--slices", "z=10:0:20"], "expected FROM <= TO and a STEP that makes 1 to"),
        (["--slices", "z=0:100:-5"], "a STEP that makes 1 to 36 slices, got 0"),
        (["--slices", "z=0:100:1"], "got 101"),
        (["--los", "1", "2", "3"], "--los 1 2 3: expected L and B in degrees"),
        (["--los", "Torus"], "'Torus': no line of sight has this name"),
        (["--sky", "50", "100", "--truth", "t.zarr"], "--truth: expected one distance"),
    ],
)
def test_pictures_that_cannot_be_are_one_line(
    density: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    picture: list[str],
    words: str,
) -> None:
    output = ["--output", str(tmp_path / "a.png")]
    assert main(["plot", density, *picture, *output]) == BAD_INPUT
    assert words in capsys.readouterr().err


def test_cards_are_listed_with_columns_and_queries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalogs"]) == DONE
    told = capsys.readouterr().out
    assert "columns: gdr3_source_id, ra, dec, l, b, stellar_params_est[:,4]" in told
    assert "query: no query known" in told
    assert main(["catalogs", "--json"]) == DONE
    cards = json.loads(capsys.readouterr().out)
    assert cards["zgr23"]["query"].startswith("SELECT x.source_id")
    assert cards["generic"]["service"] == ""
    assert main(["catalogs", "zgr23", "--query"]) == DONE
    assert "xpparams.main" in capsys.readouterr().out
    assert main(["catalogs", "ananke", "--query"]) == BAD_INPUT
    assert "catalogs ananke: no query known; dias2021" in capsys.readouterr().err
    assert main(["catalogs", "--query"]) == BAD_INPUT
