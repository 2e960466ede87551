"""dustmap view: a page of a run and of a map, and what is refused in one line."""

import json
from pathlib import Path

import pytest

from dustmap.cli import BAD_INPUT, DONE, main
from tests.sky.view.blob import Page


def view(folder: Path, output: Path, *arguments: str, of: str = "run") -> int:
    return main(["view", str(folder / of), *arguments, "--output", str(output)])


def test_a_run_has_a_page(
    positive_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clouds.csv").write_text(
        "Name,l,b,distance\nTaurus,172,-15,60\n<b>,10,0,50\nfar,0,0,900\n"
    )
    points = ["--points", str(tmp_path / "clouds.csv"), "--samples", "3", "--json"]
    output = tmp_path / "view.html"
    assert view(positive_run, output, *points) == DONE
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
        assert view(exact_run, output, "--title", "By <me>", of=f"run/{name}") == DONE
        page = Page(output.read_text(encoding="utf-8"))
        assert page.texts["title"] == "By <me>"
        assert not page.about["positive"]
    assert "coarsened: no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--points", "none.csv"], "none.csv"),
        (["--samples", "-1"], "samples: expected 0 or more, got -1"),
        (["--max-size", "0"], "--max-size 0: expected more than 0 MB"),
        (["--max-size", "0.01"], "expected room for"),
        (["--column", "l=GLON"], "--column and --schema go with --points"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    positive_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert view(positive_run, tmp_path / "a.html", *arguments) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dustmap: error: ")
    assert words in line
    assert not any(tmp_path.iterdir())


def test_the_output_is_checked_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert view(tmp_path, tmp_path / "a.txt", of="none") == BAD_INPUT
    assert "expected a page that ends in .html" in capsys.readouterr().err
    (tmp_path / "a.html").write_text("mine")
    assert view(tmp_path, tmp_path / "a.html", of="none") == BAD_INPUT
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "a.html").read_text() == "mine"
    assert view(tmp_path, tmp_path / "b.html", of="none") == BAD_INPUT
    assert "none: expected a run directory" in capsys.readouterr().err
