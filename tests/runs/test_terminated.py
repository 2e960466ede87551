"""A command that is asked to end leaves nothing half written; runs are in test_resume_cli."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dustmap.cli import FAILED, main
from dustmap.tables._outputs import clear_leftovers, replacing


def test_sigterm_leaves_nothing_and_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ingest(catalogs: Any, schema: Any, output: Path, **options: Any) -> None:
        with replacing(output, overwrite=False) as partial:
            partial.mkdir()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("dustmap.sky.catalogs.ingest", ingest)
    output = tmp_path / "stars.zarr"
    assert main(["ingest", "sky.fits", "--output", str(output)]) == FAILED
    assert capsys.readouterr().err == "dustmap: error: terminated (SIGTERM)\n"
    assert list(tmp_path.iterdir()) == []


def gone() -> int:
    """The number of a process that has ended."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_what_a_killed_process_has_left_goes_with_the_next(tmp_path: Path) -> None:
    target, dead = tmp_path / "stars.zarr", gone()
    (tmp_path / f".partial-{dead}-stars.zarr").mkdir()
    (tmp_path / f".partial-{dead}-stars.zarr" / "half").write_text("half")
    others = {f".partial-{os.getppid()}-stars.zarr", f".partial-{dead}-other.zarr"}
    for name in others:
        (tmp_path / name).write_text("of somebody else")
    with replacing(target, overwrite=False) as partial:
        partial.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"stars.zarr", *others}


def test_what_was_moved_aside_is_put_back(tmp_path: Path) -> None:
    target = tmp_path / "stars.zarr"
    (tmp_path / f".replaced-{gone()}-stars.zarr").write_text("before")
    assert clear_leftovers(target) == 1
    assert target.read_text() == "before"
    (tmp_path / f".replaced-{gone()}-stars.zarr").write_text("long before")
    assert clear_leftovers(target) == 1
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["stars.zarr"]
