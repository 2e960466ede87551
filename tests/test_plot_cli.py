"""dustmap plot and view: every picture and the page of a run and of a map, and what is refused."""

import json
from pathlib import Path

import pytest

from dustmap.cli import BAD_INPUT, DONE, main
from tests.sky.view.blob import Page

#: Arguments that draw a map.
OF_MAPS = (
    ["--slice", "z=0"],
    ["--slice", "x=-0.02kpc"],
    ["--top-down"],
    ["--side-on"],
    ["--sky", "15pc", "--zoom", "100", "-5", "10"],
    ["--sky", "15", "--integrated", "--zoom", "0", "0", "10"],
    ["--los", "100", "-5"],
)
#: Arguments that draw what only a run knows.
OF_RUNS = (
    ["--los", "100", "-5", "--beam", "60"],
    ["--extinctions"],
    ["--residuals"],
    ["--calibration"],
)


def plot(folder: Path, output: Path, *arguments: str, of: str = "run") -> int:
    """A picture, or a page by its ending."""
    command = "view" if output.suffix == ".html" else "plot"
    return main([command, str(folder / of), *arguments, "--output", str(output)])


@pytest.mark.parametrize("arguments", [*OF_MAPS, *OF_RUNS], ids=" ".join)
def test_a_run_is_drawn(positive_run: Path, tmp_path: Path, arguments: list[str]) -> None:
    assert plot(positive_run, tmp_path / "a.png", *arguments) == DONE
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("arguments", [OF_MAPS[3], OF_MAPS[6]], ids=" ".join)
def test_a_map_is_drawn_beside_the_truth(
    positive_run: Path, tmp_path: Path, arguments: list[str]
) -> None:
    truth = ["--truth", str(positive_run / "truth.zarr")]
    of = "run/map.zarr"
    assert plot(positive_run, tmp_path / "a.pdf", *arguments, *truth, of=of) == DONE
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("a.png", ["--slice", "w=3"], "--slice w=3: expected x, y or z=PC"),
        ("a.png", ["--slice", "z"], "--slice z: expected x, y or z=PC"),
        ("a.png", ["--slice", "y=300"], "y = 300 pc: expected -140 to 140 pc"),
        ("a.png", ["--sky", "5kpc"], "distance = 5000 pc: expected more than 0"),
        ("a.png", ["--sky", "30", "--zoom", "0", "89", "5"], "near the poles take the whole sky"),
        ("a.png", ["--los", "0", "95"], "b = 95: expected -90 to 90 degrees"),
        ("a.png", ["--los", "0", "0", "--beam", "0"], "beam: expected a radius of more than 0"),
        ("a.png", ["--zoom", "0", "0", "5"], "--zoom goes with --sky"),
        ("a.png", ["--integrated", "--top-down"], "--integrated goes with --sky"),
        ("a.png", ["--calibration", "--truth", "t.zarr"], "--truth goes with --slice"),
        ("a.png", ["--truth", "none.zarr"], "none.zarr: expected a run directory"),
        ("a.html", ["--points", "none.csv"], "none.csv"),
        ("a.html", ["--samples", "-1"], "samples: expected 0 or more, got -1"),
        ("a.html", ["--max-size", "0"], "--max-size 0: expected a number of MB"),
        ("a.html", ["--max-size", "0.01"], "expected room for"),
        ("a.html", ["--column", "l=GLON"], "--column and --schema go with --points"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    positive_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    words: str,
) -> None:
    assert plot(positive_run, tmp_path / name, *arguments) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dustmap: error: ")
    assert words in line
    assert not any(tmp_path.iterdir())


def test_held_out_stars_are_those_of_a_run(
    positive_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(positive_run, tmp_path / "a.png", "--residuals", of="run/map.zarr") == BAD_INPUT
    assert "expected a run directory with a config.toml" in capsys.readouterr().err
    beam = ["--los", "0", "0", "--beam", "2"]
    assert plot(positive_run, tmp_path / "a.png", *beam, of="run/map.zarr") == BAD_INPUT
    assert "--beam needs the stars of a run" in capsys.readouterr().err


def test_the_name_of_the_picture_is_checked_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(tmp_path, tmp_path / "a.gif", of="none") == BAD_INPUT
    assert "expected a picture that ends in .png or .pdf" in capsys.readouterr().err


def test_a_run_has_a_page(
    positive_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clouds.csv").write_text(
        "Name,l,b,distance\nTaurus,172,-15,60\n<b>,10,0,50\nfar,0,0,900\n"
    )
    points = ["--points", str(tmp_path / "clouds.csv"), "--samples", "3", "--json"]
    output = tmp_path / "view.html"
    assert plot(positive_run, output, *points) == DONE
    made = json.loads(capsys.readouterr().out)
    about = Page(output.read_text(encoding="utf-8")).about
    assert made["bytes"] == output.stat().st_size
    assert (made["samples"], made["coarsened"]) == (3, "no")
    assert (made["points"], made["points_outside_the_box"]) == (3, 1)
    assert made["voxels"] == [6, 7, 5] == about["volumes"][0]["shape"]
    assert [point[0] for point in about["points"]] == ["Taurus", "<b>", "far"]
    assert about["title"] == "Dust density of run"
    assert about["history"][0].startswith("dustmap view ")
    assert about["history"][1].startswith("sha256 of the configuration: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clouds.csv", "view.html"]


def test_a_map_has_a_page(
    exact_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("map.fits", "map.zarr"):
        output = tmp_path / f"{name}.html"
        assert plot(exact_run, output, "--title", "By <me>", of=f"run/{name}") == DONE
        page = Page(output.read_text(encoding="utf-8"))
        assert page.texts["title"] == "By <me>"
        assert not page.about["positive"]
    assert "coarsened: no" in capsys.readouterr().out


def test_the_page_is_checked_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", "none", "--output", str(tmp_path / "a.txt")]) == BAD_INPUT
    assert "expected a page that ends in .html" in capsys.readouterr().err
    (tmp_path / "a.html").write_text("mine")
    assert plot(tmp_path, tmp_path / "a.html", of="none") == BAD_INPUT
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "a.html").read_text() == "mine"
    assert plot(tmp_path, tmp_path / "b.html", of="none") == BAD_INPUT
    assert "none: expected a run directory" in capsys.readouterr().err
