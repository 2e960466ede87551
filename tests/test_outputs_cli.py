"""What commands may write, and where: no file of the user's is lost, whatever --output says."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dustmap.cli import BAD_INPUT, DONE, FAILED, main
from dustmap.runs.checkpoints._status import OWN
from dustmap.tables._outputs import foreign_entries
from tests.run_outputs import left_over


@pytest.fixture
def place(exact_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the working directory."""
    shutil.copytree(exact_run, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that is refused; it leaves everything as it was."""
    before = contents(Path.cwd())
    capsys.readouterr()
    assert main(command.split()) == BAD_INPUT
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert ".partial-" not in told
    assert contents(Path.cwd()) == before
    assert left_over(Path.cwd()) == []
    return told.removeprefix("dustmap: error: ").strip()


def fitted(command: str) -> None:
    assert main([*command.split(), "--until", "fit"]) == DONE


@pytest.fixture
def project(place: Path) -> Path:
    """A user's folder, which is full of a life's work."""
    folder = place / "proj"
    (folder / "data").mkdir(parents=True)
    shutil.copy("sky.fits", folder / "sky.fits")
    shutil.copy("run.toml", folder / "config.toml")
    (folder / "thesis.tex").write_text("years")
    (folder / "data" / "observed.csv").write_text("nights")
    return folder


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("option", ["", " --overwrite", " --resume"])
@pytest.mark.parametrize("config", ["proj/config.toml", "run.toml"])
def test_a_folder_with_a_configuration_is_no_run(
    option: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(f"run {config} --output proj{option}", capsys)
    assert "--overwrite" not in told
    words = ("is no run directory and not empty", "proj holds the input", "nothing can go on")
    assert any(word in told for word in words)


@pytest.mark.parametrize("foreign", ["thesis.tex", "data/x", "plots/mine.png", "map.zarr/notes"])
def test_what_no_run_has_written_is_not_removed(
    place: Path, foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run" / foreign).parent.mkdir(exist_ok=True)
    (place / "run" / foreign).write_text("years")
    told = refused("run run.toml --output run --overwrite", capsys)
    assert f"holds what no run has written ({foreign})" in told
    (place / "run" / foreign).unlink()
    fitted("run run.toml --output run --overwrite")
    assert not (place / "run" / "map.fits").exists()


@pytest.mark.usefixtures("place")
def test_a_run_that_may_not_be_removed_is_refused_before_the_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever runs the tests may be allowed to write anywhere."""
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "run" and allowed(path, mode)
    )
    assert "run may not be removed" in refused("run run.toml --output run --overwrite", capsys)


def test_all_that_a_run_writes_is_known(exact_run: Path) -> None:
    """Else --overwrite would refuse the run itself."""
    assert foreign_entries(exact_run / "run", OWN) == []


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run run.toml --output stars.zarr/run --set data.catalog=stars.zarr", "lies in the input"),
        ("run run.toml --output run --set data.catalog=run/stars.zarr", "run holds the input"),
        ("run run.toml --output run.toml", "is the input run.toml"),
        ("run run.toml --output link", "link is the input"),
        ("run run/config.toml --output run --overwrite", "run holds the input run/config.toml"),
        ("ingest sky.fits link --output dir.zarr", "dir.zarr holds the input sky.fits"),
        ("ingest sky.fits --schema card.toml --output dir.zarr", "holds the input"),
        ("export run --format zarr --output run", "run holds the input run/config.toml"),
        ("export run --format zarr --output run/stars.zarr", "is the input run/stars.zarr"),
        ("export run --format fits --output run/checkpoint/m.fits", "lies in the input"),
        ("predict run --catalog sky.fits --output sky.fits", "is the input sky.fits"),
        ("predict run --catalog sky.fits --output link.fits", "is the input sky.fits"),
        ("plot run/map.zarr --output run/map.zarr/a.png", "lies in the input"),
        ("plot run --truth run/a.png --output run/a.png", "is the input run/a.png"),
        ("simulate --stars 9 --seed 1 --output a.fits --truth a.fits", "is the input a.fits"),
        ("merge run/map.zarr --output run/map.zarr", "is the input run/map.zarr"),
        ("merge run/map.zarr --output run", "run holds the input"),
    ],
)
def test_inputs_are_never_outputs(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("link").symlink_to("stars.zarr" if "ingest" not in command else "sky.fits")
    Path("link.fits").symlink_to("sky.fits")
    Path("dir.zarr").symlink_to(".")
    if "--output link" in command and command.startswith("run "):
        command += " --set data.catalog=stars.zarr"
    overwrite = "" if "--overwrite" in command else " --overwrite"
    assert told in refused(command + overwrite, capsys)


@pytest.mark.usefixtures("place")
def test_a_dry_run_that_is_stopped_has_nothing_to_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("dustmap.runs.prepare", stopped)
    assert main(["run", "run.toml", "--output", "planned", "--dry-run"]) == FAILED
    assert "terminated (SIGTERM)" in capsys.readouterr().err
    assert not Path("planned").exists()


@pytest.mark.usefixtures("place")
def test_an_export_is_never_the_catalog_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path("run/config.toml")
    own = f'catalog = ["{Path.cwd()}/sky.fits"]'
    config.write_text(re.sub("(?m)^catalog = .*$", own, config.read_text()))
    told = refused("export run --format fits --output sky.fits --overwrite", capsys)
    assert told.startswith("sky.fits is the input")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "command",
    [
        "run run.toml",
        "export run --format fits",
        "export run --format zarr",
        "predict run --catalog sky.fits",
        "merge run/map.zarr",
    ],
)
def test_devices_and_packed_names_are_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "/dev/null is a device" in refused(f"{command} --output /dev/null --overwrite", capsys)
    assert Path("/dev/null").is_char_device()
    if not command.startswith("run "):
        told = refused(f"{command} --output a.fits.gz", capsys)
        assert "a.fits.gz: what dustmap writes is not compressed as .gz is; choose a name" in told


@pytest.mark.usefixtures("place")
def test_zarr_groups_of_others_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.zarr").mkdir()
    Path("theirs.zarr/zarr.json").write_text('{"attributes": {"source": "a telescope"}}')
    for command in ("ingest sky.fits", "export run --format zarr", "merge run/map.zarr"):
        told = refused(f"{command} --output theirs.zarr --overwrite", capsys)
        assert "not a zarr group that dustmap wrote" in told
    assert main(["ingest", "sky.fits", "--output", "stars.zarr", "--overwrite"]) == DONE


def test_a_run_lands_where_a_link_leads(place: Path) -> None:
    disk = place.parent / "disk"
    disk.mkdir()
    (place / "linked").symlink_to(disk / "run")
    for option in ("", " --overwrite"):
        fitted(f"run run.toml --output linked{option}")
        assert (place / "linked").is_symlink()
        assert foreign_entries(disk / "run", OWN) == []
        assert [path.name for path in disk.iterdir()] == ["run"]


@pytest.mark.usefixtures("place")
def test_a_link_to_a_disk_that_is_away_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("away").symlink_to("/mnt/away/run")
    told = refused("run run.toml --output away", capsys)
    assert told.startswith("away is a link to /mnt/away/run, which is not there; mend")


@pytest.mark.usefixtures("place")
def test_a_place_where_nothing_can_be_made_is_named_as_it_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no directory that takes nothing")
    assert main(["run", "run.toml", "--output", "/proc/run"]) == BAD_INPUT
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "dustmap: error: /proc/run: no such file or directory"


@pytest.mark.usefixtures("place")
def test_a_run_goes_on_with_its_own_configuration() -> None:
    fitted("run run.toml --output other")
    fitted("run other/config.toml --output other --resume")


def test_names_of_runs_may_be_long(place: Path) -> None:
    name = "r" * 240
    for option in ("", " --overwrite"):
        fitted(f"run run.toml --output {name}{option}")
    assert left_over(place) == []


def test_what_was_there_is_back_after_a_failure(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = contents(place / "run")
    monkeypatch.setattr("dustmap.runs.stars._parts.archive_stars", fail)
    assert main(["run", "run.toml", "--output", "run", "--overwrite"]) == FAILED
    assert contents(place / "run") == before
    assert left_over(place) == []


def test_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["config", "--example"]) == BAD_INPUT
    assert "the working directory is gone" in capsys.readouterr().err


def test_closed_streams(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert main(["config", "--example"]) == BAD_INPUT
    assert "stdout is closed, and answers go there" in capsys.readouterr().err
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        assert main(["config"]) == BAD_INPUT
        sys.stderr.close()


@pytest.mark.parametrize("command", ["config --example", "--help", "config --help"])
@pytest.mark.parametrize("stdout", ["reader gone", "/dev/full"])
def test_stdout_that_takes_nothing(command: str, stdout: str) -> None:
    """A reader that has seen enough is no error; a full disk is one."""
    if stdout == "reader gone":
        read, taken = os.pipe()
        os.close(read)
    else:
        taken = os.open(stdout, os.O_WRONLY)
    arguments = [sys.executable, "-m", "dustmap", *command.split()]
    called = subprocess.run(arguments, stdout=taken, stderr=subprocess.PIPE, text=True, check=False)
    os.close(taken)
    if stdout == "reader gone":
        assert (called.returncode, called.stderr) == (DONE, "")
    else:
        told = "dustmap: error: [Errno 28] No space left on device: 'stdout'\n"
        assert (called.returncode, called.stderr) == (FAILED, told)


@pytest.mark.parametrize(("level", "code"), [("1", DONE), ("2", BAD_INPUT)])
def test_python_without_docstrings(level: str, code: int) -> None:
    arguments = [sys.executable, "-m", "dustmap", "config", "--example"]
    environment = os.environ | {"PYTHONOPTIMIZE": level}
    called = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert called.returncode == code
    assert ("unset PYTHONOPTIMIZE" in called.stderr) == (code == BAD_INPUT)
    assert "# None" not in called.stdout
