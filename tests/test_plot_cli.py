"""dustmap plot: every picture of a run and of a map, and what is refused in one line."""

from pathlib import Path

import pytest

from dustmap.cli import BAD_INPUT, DONE, main

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
    return main(["plot", str(folder / of), *arguments, "--output", str(output)])


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
    ("arguments", "words"),
    [
        (["--slice", "w=3"], "--slice w=3: expected x, y or z=PC"),
        (["--slice", "z"], "--slice z: expected x, y or z=PC"),
        (["--slice", "y=300"], "y = 300 pc: expected -140 to 140 pc"),
        (["--sky", "5kpc"], "distance = 5000 pc: expected more than 0"),
        (["--sky", "30", "--zoom", "0", "89", "5"], "near the poles take the whole sky"),
        (["--los", "0", "95"], "b = 95: expected -90 to 90 degrees"),
        (["--los", "0", "0", "--beam", "0"], "beam: expected a radius of more than 0"),
        (["--zoom", "0", "0", "5"], "--zoom goes with --sky"),
        (["--integrated", "--top-down"], "--integrated goes with --sky"),
        (["--calibration", "--truth", "t.zarr"], "--truth goes with --slice"),
        (["--truth", "none.zarr"], "none.zarr: expected a run directory"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    positive_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert plot(positive_run, tmp_path / "a.png", *arguments) == BAD_INPUT
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
