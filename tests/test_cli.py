"""The command line: what it prints, what it writes, and how it ends."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import dustmap
from dustmap import config
from dustmap.cli import BAD_INPUT, CHECK_FAILED, DONE, FAILED, main
from dustmap.distributed import RankLost
from dustmap.errors import UserError


@pytest.fixture
def sky(tmp_path: Path) -> Path:
    """A directory with a simulated catalog of 40 stars, its truth, and a configuration."""
    path = str(tmp_path / "sky.fits")
    truth = str(tmp_path / "truth.zarr")
    box = ["--size", "120pc", "0.1kpc", "80", "--error", "0.002", "--exact-distances"]
    arguments = ["simulate", "--stars", "40", "--seed", "3", "--output", path, "--truth", truth]
    assert main([*arguments, *box]) == DONE
    (tmp_path / "run.toml").write_text(
        "data = {catalog = 'sky.fits', holdout = 0.25, refit = false}\n"
        "grid = {size = [120, 80, 40], spacing = 20}\n"
        "model = {length = 40, std = 0.002, noise = 'gaussian', learn = ['mean', 'std']}\n"
        "fit = {learn_rows = 20, samples = 4}\n"
        "export = {figures = ['slice']}\n"
    )
    return tmp_path


def run(sky: Path, *arguments: str) -> int:
    return main(["run", str(sky / "run.toml"), "--output", str(sky / "run"), *arguments])


def error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, which is all that a failing command says."""
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert lines[0].startswith("dustmap: error: ")
    return lines[0]


def test_the_first_line_of_help_says_what_this_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--help"])
    assert exited.value.code == 0
    first = capsys.readouterr().out.splitlines()[0]
    expected = "dustmap builds 3D dust maps; the dustmaps package queries published ones."
    assert first == expected
    assert dustmap.__doc__ is not None
    assert dustmap.__doc__.splitlines()[0] == expected


def test_python_m_dustmap_is_the_command() -> None:
    called = subprocess.run(
        [sys.executable, "-m", "dustmap", "--version"], capture_output=True, text=True, check=True
    )
    assert called.stdout == f"dustmap {dustmap.__version__}\n"


def test_an_error_in_a_process_is_one_line_and_a_code(tmp_path: Path) -> None:
    called = subprocess.run(
        [sys.executable, "-m", "dustmap", "config", str(tmp_path / "none.toml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert called.returncode == BAD_INPUT
    assert called.stderr == f"dustmap: error: {tmp_path}/none.toml: cannot be read " + (
        "(No such file or directory)\n"
    )


def test_config_example_prints_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--example"]) == DONE
    assert capsys.readouterr().out == config.example()


def test_config_resolves_a_file(sky: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["config", str(sky / "run.toml"), "--set", "grid.spacing=0.01kpc"]) == DONE
    assert "spacing = 10.0" in capsys.readouterr().out.splitlines()


def test_config_wants_one_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == BAD_INPUT
    assert "either --example or a configuration file" in error(capsys)


def test_a_run_ends_with_its_report(sky: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(sky, "--json", "--threads", "1", "--set", f"data.truth={sky / 'truth.zarr'}")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (DONE if report["status"] == "done" else CHECK_FAILED)
    assert report["counts"]["stars_held_out"] == 10
    assert report == json.loads((sky / "run" / "report.json").read_text())


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(
    sky: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(sky, "--dry-run", "--json", "--device", "cpu") == DONE
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["stars_fitted"] == 30
    assert told["plan"]["nodes"] == [7, 5, 3]
    assert "distance = distance_pc [pc]" in told["plan"]["columns"]
    assert told["bytes_needed"] < told["bytes_allowed"] == 8 * 2**30
    assert not (sky / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "grid.spaceing=3"], "did you mean grid.spacing?"),
        (["--memory", "1KiB"], "compute.memory allows 1,024 bytes; the largest part is"),
        (["--threads", "-1"], "compute.threads = -1: expected a whole number >= 0"),
        (["--set", "data.catalog=none.fits"], "none.fits: there is no such file"),
        (["--column", "l=GLON"], "sky.fits: missing l (card generic) for directions; or ra, dec"),
        (["--column", "lon=GLON"], "column lon=GLON: the card generic has no lon"),
        (["--set", "data.truth=none.zarr"], "none.zarr: expected a run directory"),
        (["--set", "grid.outside=error"], "rays leave the box"),
        (["--set", "data.holdout=0.999"], "leaves none of 40 stars to fit"),
        (["--set", "data.system=custom:mine"], "custom system, which converts to nothing"),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(
    sky: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(sky, *arguments) == BAD_INPUT
    assert words in error(capsys)
    assert not (sky / "run").exists()


def test_an_existing_run_is_kept_unless_told(sky: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sky / "run" / "checkpoint").mkdir(parents=True)
    (sky / "run" / "config.toml").write_text("")
    identity = {"schema": 1, "settings": {}, "files": {}}
    (sky / "run" / "checkpoint" / "identity.json").write_text(json.dumps(identity))
    assert run(sky) == BAD_INPUT
    assert "holds a run that is not finished" in error(capsys)
    (sky / "run" / "report.json").write_text('{"status": "done", "stages": {"until": "export"}}')
    assert run(sky) == BAD_INPUT
    assert "holds a run already" in error(capsys)
    (sky / "run" / "report.json").write_text("{}")
    assert run(sky) == BAD_INPUT
    assert "report.json is damaged" in error(capsys)
    assert run(sky, "--overwrite", "--set", "fit.max_steps=1") in (DONE, CHECK_FAILED)
    assert (sky / "run" / "report.md").is_file()


def test_what_is_no_run_is_never_overwritten(sky: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sky / "run").mkdir()
    (sky / "run" / "thesis.tex").write_text("")
    assert run(sky, "--overwrite") == BAD_INPUT
    assert "is no run directory and not empty" in error(capsys)
    assert (sky / "run" / "thesis.tex").is_file()


def test_a_failed_check_ends_with_3(sky: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step of learning cannot converge; the outputs are there all the same."""
    hard = ["fit.engine=exact", "fit.max_steps=1", "fit.tolerance=1e-9"]
    assert run(sky, *(word for key in hard for word in ("--set", key))) == CHECK_FAILED
    assert "learning converged" in capsys.readouterr().out
    report = json.loads((sky / "run" / "report.json").read_text())
    assert report["status"] == "checks failed"
    assert (sky / "run" / "map.fits").is_file()


def test_a_fault_shows_a_traceback_and_ends_with_1(
    sky: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("dustmap.runs.execute_run", fail)
    assert run(sky) == FAILED
    *shown, last = capsys.readouterr().err.splitlines()
    assert any(line.startswith("Traceback") for line in shown)
    assert last.startswith("dustmap: error: a fault of dustmap, please report it with the lines")
    assert last.endswith("RuntimeError('first line\\nsecond line')")


@pytest.mark.parametrize("kind", [UserError, OSError, MemoryError])
def test_what_the_user_can_mend_is_one_line(
    sky: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind("first line\nsecond line")

    monkeypatch.setattr("dustmap.runs.execute_run", fail)
    assert run(sky) == BAD_INPUT
    assert error(capsys) == "dustmap: error: first line second line"


def test_tracebacks_are_shown_where_they_are_asked_for(
    sky: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sky, "--set", "grid.spacing=-5pc") == BAD_INPUT
    assert "Traceback" not in capsys.readouterr().err
    assert run(sky, "--set", "grid.spacing=-5pc", "--verbose") == BAD_INPUT
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("dustmap: error: ")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.ESTALE])
def test_a_full_or_lost_disk_is_not_bad_input(
    sky: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("dustmap.runs.execute_run", fail)
    assert run(sky) == FAILED
    assert os.strerror(number) in error(capsys)


def test_a_lost_rank_is_not_bad_input(
    sky: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankLost("rank 0 of 2 cannot go on: rank 1 has ended without a word")

    monkeypatch.setattr("dustmap.runs.execute_run", fail)
    assert run(sky) == FAILED
    assert "rank 1 has ended" in error(capsys)


def test_an_interrupt_before_a_command_begins_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dustmap.cli.parser", interrupt)
    assert main(["run", "a.toml"]) == FAILED
    assert error(capsys) == "dustmap: error: interrupted"


def test_simulate_refuses_what_it_would_replace(
    sky: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--stars", "5", "--seed", "3", "--output", str(sky / "sky.fits")]
    assert main(arguments) == BAD_INPUT
    assert "exists already" in error(capsys)
    assert main([*arguments, "--overwrite"]) == DONE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stars", "0"], "stars must be at least 1"),
        (["--stars", "5", "--size", "3ly", "3", "3"], "3ly: expected a length"),
        (["--stars", "5", "--error", "-1"], "error must be positive"),
    ],
)
def test_simulate_refuses_impossible_skies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    output = str(tmp_path / "sky.fits")
    assert main(["simulate", "--seed", "0", "--output", output, *arguments]) == BAD_INPUT
    assert words in error(capsys)
    assert not any(tmp_path.iterdir())


def test_simulate_draws_from_the_prior_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its box, with its moments; where it is, and what there is, is the configuration's."""
    (tmp_path / "run.toml").write_text(
        "data = {catalog = 'sky.fits'}\n"
        "grid = {size = [800, 600, 400], center = [40, 0, 0], spacing = 20}\n"
        "model = {length = 20, std = 0.5, mean = 'constant', mean_density = 0.004}\n"
    )
    arguments = ["simulate", "--stars", "5", "--seed", "1", "--output", str(tmp_path / "sky.ecsv")]
    prior = ["--from-prior", str(tmp_path / "run.toml")]
    assert main([*arguments, *prior, "--truth", str(tmp_path / "truth.zarr")]) == DONE
    truth = dustmap.DustMap.open(tmp_path / "truth.zarr")
    assert truth.grid.lower == (-360.0, -300.0, -200.0)
    logs = np.log(truth.mean)
    assert logs.mean() == pytest.approx(np.log(0.004), abs=0.05)
    assert logs.std() == pytest.approx(0.5, rel=0.05)
    capsys.readouterr()
    assert main([*arguments, *prior, "--size", "1", "1", "1", "--overwrite"]) == BAD_INPUT
    assert "[grid] of the configuration says where" in error(capsys)


def test_a_sky_of_a_prior_has_finer_nodes_than_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quarter of the spacing, unless it is given: dust between the run's nodes is in the data."""
    (tmp_path / "run.toml").write_text(
        "data = {catalog = 'sky.fits'}\n"
        "grid = {size = [160, 160, 80], spacing = 20}\n"
        "model = {length = 20}\n"
    )
    arguments = ["simulate", "--stars", "5", "--seed", "1", "--output", str(tmp_path / "sky.ecsv")]
    arguments += ["--from-prior", str(tmp_path / "run.toml"), "--overwrite", "--json"]
    arguments += ["--truth", str(tmp_path / "truth.zarr")]
    for more, spacing in (([], 5.0), (["--step", "10pc"], 10.0)):
        assert main([*arguments, *more]) == DONE
        assert json.loads(capsys.readouterr().out)["spacing_of_the_dust_pc"] == spacing
        truth = dustmap.DustMap.open(tmp_path / "truth.zarr")
        assert truth.grid.spacing == (spacing,) * 3
        history = str(zarr.open_group(tmp_path / "truth.zarr", mode="r").attrs["history"])
        assert f"nodes {spacing:g} pc apart" in history
