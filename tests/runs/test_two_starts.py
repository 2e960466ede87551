"""Runs that begin in one directory at the same time, locks, and leftovers of other machines."""

import os
import time
from pathlib import Path

import pytest

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.linalg import Alone
from dustmap.runs.checkpoints import _directory
from dustmap.runs.checkpoints._state_file import Undisturbed
from dustmap.runs.checkpoints._status import Identity, holding
from dustmap.tables._outputs import clear_leftovers


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tables = {"data": {"catalog": str(tmp_path / "stars.fits")}, "grid": {"size": [80, 80, 40]}}
    return configuration.from_mapping(tables)


@pytest.mark.parametrize("overwrite", [False, True])
def test_only_one_of_two_starts_has_the_directory(
    overwrite: bool, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    if overwrite:
        with _directory.new_run(path, config, False, *_other()):
            pass
    # Both have looked before the first took its place.
    monkeypatch.setattr(_directory, "check_free", lambda path, overwrite: None)
    with _directory.new_run(path, config, overwrite, *_other()):
        (path / "mine").touch()
        second = _directory.new_run(path, config, overwrite, *_other())
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", os.getppid)
            with pytest.raises(BlockingIOError, match="is at work on this run"):
                second.__enter__()
        assert (path / "mine").exists()
    assert (path / "mine").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_run_that_ended_meanwhile_is_not_overwritten(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with _directory.new_run(path, config, False, *_other()):
        (path / "mine").touch()
    monkeypatch.setattr(_directory, "check_free", lambda path, overwrite: None)
    late = _directory.new_run(path, config, False, *_other())
    with pytest.raises(FileExistsError, match="a run that began at the same time"):
        late.__enter__()
    assert (path / "mine").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def _other() -> tuple[Undisturbed, Alone]:
    return Undisturbed(), Alone()


def test_what_another_machine_has_left_stays_for_a_day(tmp_path: Path) -> None:
    left = tmp_path / f".partial-{os.getpid()}.0a1b2c3d-stars.zarr"
    left.mkdir()
    assert clear_leftovers(tmp_path / "stars.zarr") == 0
    two_days_ago = time.time() - 2 * 86_400
    (left / "c").write_text("written just now")
    os.utime(left, (two_days_ago, two_days_ago))
    assert clear_leftovers(tmp_path / "stars.zarr") == 0
    os.utime(left / "c", (two_days_ago, two_days_ago))
    os.utime(left, (two_days_ago, two_days_ago))
    assert clear_leftovers(tmp_path / "stars.zarr") == 1
    assert not left.exists()


def test_who_may_write_a_run_may_lock_it(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with holding(tmp_path):
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_places_of_files_make_no_other_run(tmp_path: Path) -> None:
    identities = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files = {key: tmp_path / folder / f"{key}.fits" for key in ("catalog", "truth")}
        files["far_column"] = tmp_path / folder / "sky.fits"
        for key, file in files.items():
            file.write_text(key)
        data = {key: str(file) for key, file in files.items()}
        config = configuration.from_mapping({"data": data, "grid": {"size": [80, 80, 40]}})
        identities.append(Identity.of(config))
    identities[0].refuse_other(tmp_path, identities[1], read=False)
    assert identities[0].files == identities[1].files
