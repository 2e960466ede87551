"""dustmap run --ranks: what starts the processes, passes signals on, and ends as they do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dustmap.cli import BAD_INPUT, CHECK_FAILED, DONE, FAILED, PREEMPTED, main
from dustmap.cli._run import run_ranks
from dustmap.distributed import world_from_environment
from dustmap.errors import UserError

RANK = """
import json, os, signal, sys, time
rank = os.environ["RANK"]
def end(number, frame):
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
open(f"rank-{rank}.json", "w").write(json.dumps(dict(os.environ)))
then = sys.argv[1:][int(rank)]
if then == "wait":
    time.sleep(60)
if then == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if then == "late":
    time.sleep(0.3)
    sys.exit(1)
sys.exit(int(then))
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory where `python -m dustmap` is a rank that does as its argument says."""
    (tmp_path / "dustmap").mkdir()
    (tmp_path / "dustmap" / "__init__.py").touch()
    (tmp_path / "dustmap" / "__main__.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (("0", "0"), DONE),
        (("3", "0"), CHECK_FAILED),
        (("late", "2"), BAD_INPUT),
        (("late", "die"), FAILED),
        (("late", "9"), FAILED),
    ],
)
def test_the_first_that_fails_says_how_all_end(
    ranks: Path, ends: tuple[str, ...], code: int
) -> None:
    assert run_ranks(2, ends) == code


def test_ranks_know_each_other_and_share_the_processors(ranks: Path) -> None:
    assert run_ranks(3, ["0", "0", "0"]) == DONE
    told = [json.loads((ranks / f"rank-{k}.json").read_text()) for k in range(3)]
    assert [one["LOCAL_RANK"] for one in told] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in told} == {one["LOCAL_WORLD_SIZE"] for one in told} == {"3"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}) == 1
    assert told[0]["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 3))


def test_a_signal_reaches_every_rank(ranks: Path) -> None:
    program = "from dustmap.cli._run import run_ranks; exit(run_ranks(2, ['wait'] * 2))"
    package = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-P", "-c", program]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": package})
    while not all((ranks / f"rank-{k}.json").exists() for k in range(2)):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == PREEMPTED


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a signal of Linux")
def test_ranks_end_with_the_process_that_has_started_them(tmp_path: Path) -> None:
    rank = f"""
import pathlib, signal, time
from dustmap.cli import _run
def end(number, frame):
    pathlib.Path({str(tmp_path / "ended")!r}).touch()
    raise SystemExit(75)
signal.signal(signal.SIGTERM, end)
_run._end_with_launcher()
pathlib.Path({str(tmp_path / "started")!r}).touch()
time.sleep(60)
"""
    program = f"""
import os, subprocess, sys, time
from dustmap.cli._run import _environments
environment = _environments(2)[1]
subprocess.Popen([sys.executable, "-c", {rank!r}], env=environment, process_group=0)
time.sleep(60)
"""
    package = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", program]
    launcher = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": package})
    waited(tmp_path / "started")
    launcher.kill()
    launcher.wait()
    waited(tmp_path / "ended")


def waited(path: Path) -> None:
    """Until a file is there, which another process makes."""
    end = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_ranks_that_are_started_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("data = {catalog = 'stars.fits'}\n")
    run = ["run", str(tmp_path / "run.toml"), "--output", str(tmp_path / "run")]
    assert main([*run, "--ranks", "0"]) == BAD_INPUT
    assert "--ranks 0: expected 1 or more" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main([*run, "--ranks", "2"]) == BAD_INPUT
    assert "4 ranks are started already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' in the environment: expected a whole number"),
        ({"WORLD_SIZE": "2"}, "RANK = None in the environment"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected, but not set: start ranks by"),
    ],
)
def test_what_a_launcher_has_not_set_is_named(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(words)), world_from_environment(5.0, gpu=False):
        pass
