"""The life of a run on the command line: refusals, locks, signals, and how far it is."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dustmap.cli import BAD_INPUT, DONE, PREEMPTED, _console, main
from dustmap.cli._console import Preempted, Terminated, preempting, terminating
from dustmap.runs import status_of
from dustmap.runs.checkpoints._status import holder, holding, lines_of
from tests.run_outputs import differences, left_over
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.2
refit = false
[grid]
size = [80, 80, 40]
spacing = 20
[model]
length = 40
std = 0.002
learn = ["mean", "noise"]
[fit]
engine = "exact"
learn_rows = 30
[export]
figures = []
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sky, and a run on it that ended with its fit."""
    path = tmp_path_factory.mktemp("sky")
    write_plain_sky(path, plain_sky(60, 2, (80.0, 80.0, 40.0)))
    (path / "run.toml").write_text(CONFIG)
    assert main([*command(path), "--until", "fit"]) == DONE
    return path


def command(sky: Path, *options: str) -> list[str]:
    return ["run", str(sky / "run.toml"), "--output", str(sky / "run"), *options]


@pytest.fixture
def fitted(sky: Path, tmp_path: Path) -> Path:
    """A copy with the run in it."""
    shutil.copytree(sky, tmp_path / "sky")
    return tmp_path / "sky"


@pytest.fixture
def unfinished(fitted: Path) -> Path:
    """The same, as if it had been killed after its fit."""
    for name in ("report.json", "report.md"):
        (fitted / "run" / name).unlink()
    return fitted


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == BAD_INPUT
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told.removeprefix("dustmap: error: ").strip()


def test_an_unfinished_run_is_not_begun_again_in_silence(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(command(unfinished), capsys)
    assert told.endswith(
        "holds a run that is not finished; go on with --resume, or start anew with --overwrite"
    )
    for other in (["query", "--l", "0", "--b", "0", "--distance", "20pc"], ["plot", "--output"]):
        arguments = [other[0], str(unfinished / "run"), *other[1:]]
        if other[0] == "plot":
            arguments.append(str(unfinished / "a.png"))
        assert "this run is not finished; see `dustmap status" in refused(arguments, capsys)


def test_resume_says_what_is_other_than_it_was(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "fit.seed=1", "--set", "grid.spacing=10pc", "--dtype", "float64"]
    told = refused(command(unfinished, "--resume", *settings), capsys)
    assert "cannot go on with --resume as another run: " in told
    assert "grid.spacing: 20.0 in RUN, 10.0 here; fit.seed: 0 in RUN, 1 here" in told
    assert 'compute.dtype: "float32" in RUN, "float64" here' in told
    assert told.endswith("give what it was started with, or start anew with --overwrite")
    write_plain_sky_again(unfinished)
    told = refused(command(unfinished, "--resume"), capsys)
    assert "as another run: data.catalog: another file than in RUN; give" in told


def write_plain_sky_again(folder: Path) -> None:
    """Another sky by the same name."""
    for name in ("sky.fits", "truth.zarr"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_plain_sky(folder, plain_sky(60, 3, (80.0, 80.0, 40.0)))


def test_resume_names_a_version_and_a_schema_that_it_does_not_know(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = unfinished / "run" / "checkpoint" / "identity.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"version": "0.0.9"}))
    assert "dustmap: 0.0.9 in RUN, " in refused(command(unfinished, "--resume"), capsys)
    path.write_text(json.dumps(content | {"schema": 9}))
    assert "has schema 9, and this dustmap reads 1" in refused(
        command(unfinished, "--resume"), capsys
    )
    path.write_text("{")
    assert "identity.json cannot be used" in refused(command(unfinished, "--resume"), capsys)
    path.unlink()
    told = refused(command(unfinished, "--resume"), capsys)
    assert "identity.json is missing, so that nothing can go on: " in told


def test_a_damaged_state_is_refused_with_what_to_do(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = unfinished / "run" / "checkpoint" / "kept"
    (kept / "fit.npz").write_bytes((kept / "fit.npz").read_bytes()[:-40])
    capsys.readouterr()
    assert main(command(unfinished, "--resume")) == BAD_INPUT
    told = capsys.readouterr().err.splitlines()[-1]
    assert "fit.npz is damaged" in told
    assert told.endswith(f"delete {kept} or start anew with --overwrite")
    shutil.rmtree(kept)
    assert main(command(unfinished, "--resume")) == DONE


def test_another_number_of_threads_or_a_lost_catalog_is_no_obstacle(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = unfinished / "run" / "checkpoint" / "identity.json"
    content = json.loads(path.read_text())
    content["setup"]["threads"] = 99
    path.write_text(json.dumps(content))
    (unfinished / "sky.fits").unlink()
    assert main(command(unfinished, "--resume")) == DONE
    told = capsys.readouterr().err
    assert "threads: 99 in RUN, " in told
    assert " here: the result is the same within rounding alone" in told


def test_finished_runs_say_so(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (fitted / "run" / "report.json").read_bytes()
    assert main(command(fitted, "--resume", "--until", "fit", "--json")) == DONE
    assert json.loads(capsys.readouterr().out)["stages"]["until"] == "fit"
    assert (fitted / "run" / "report.json").read_bytes() == before
    assert main(command(fitted, "--resume")) == DONE
    assert main(command(fitted, "--resume")) == DONE
    assert "holds a run already" in refused(command(fitted), capsys)


def test_resume_and_overwrite_exclude_each_other(sky: Path) -> None:
    with pytest.raises(SystemExit):
        main(command(sky, "--resume", "--overwrite"))


def test_a_run_is_worked_on_by_one_process(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unfinished / "run"
    with holding(run):
        for option in ("--resume", "--overwrite"):
            told = refused(command(unfinished, option), capsys)
            assert f"process {os.getpid()} on " in told
            assert "is at work on this run; wait for its end" in told
        assert status_of(run).state == "running"
    assert holder(run) is None
    assert status_of(run).state == "interrupted"


def test_status_tells_how_far_runs_are(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(fitted / "run")
    capsys.readouterr()
    assert main(["status", run]) == DONE
    told = capsys.readouterr().out
    assert f"run: {run}\nstate: finished\nstage: fit\nreport: done\n" in told
    assert "log_evidence: " in told
    assert main(["status", run, run]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"{run}: finished"] * 2
    assert main(["status", run, "--json"]) == DONE
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "finished"
    assert set(status["seconds"]) == {"ingest", "fit"}
    assert status["kept"] is not None
    assert {"length", "noise", "peak_bytes"} <= set(status["last"])
    assert "expected a run directory" in refused(["status", str(fitted)], capsys)
    assert main(["status", run, str(fitted), run]) == BAD_INPUT
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 2
    assert "expected a run directory" in found.err


def test_status_tells_how_a_run_ended(unfinished: Path) -> None:
    run = unfinished / "run"
    metrics = run / "metrics.jsonl"
    before = metrics.read_text()
    for event in ("failed", "pre-empted"):
        line = {"time": 0.0, "stage": "run", "event": event, "error": "No space left"}
        metrics.write_text(before + json.dumps(line) + "\n")
        assert status_of(run).state == event
        assert status_of(run).error == "No space left"
    metrics.write_text(before + '{"cut by a full dis')
    assert status_of(run).state == "interrupted"
    assert all("time" in line for line in lines_of(metrics))


def test_status_of_a_run_that_was_gone_on_with_and_killed(fitted: Path) -> None:
    run = fitted / "run"
    line = {"time": time.time() + 10.0, "rank": 0, "stage": "run", "event": "goes on"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert status_of(run).state == "interrupted"
    assert status_of(run).report == "done"


def test_the_log_is_kept_in_lines_of_json(fitted: Path) -> None:
    (fitted / "run" / "log.jsonl").unlink(missing_ok=True)
    assert main(command(fitted, "--resume")) == DONE
    lines = lines_of(fitted / "run" / "log.jsonl")
    assert {"time", "level", "rank", "message"} == set(lines[0])
    assert {"evaluate", "export"} <= {line["message"] for line in lines}


def test_help_says_how_to_be_pre_empted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    told = capsys.readouterr().out
    assert "exits with 75" in told
    assert "--resume" in told


def test_a_first_signal_waits_for_a_state_and_a_second_does_not() -> None:
    seen: list[object] = []

    def asked(first: signal.Signals, *others: signal.Signals) -> None:
        with preempting() as notice, notice.patiently():
            os.kill(os.getpid(), first)
            seen.append(notice.pending)
            for number in others:
                os.kill(os.getpid(), number)
            seen.append("a state is kept")
            notice.end()

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted):
        asked(signal.SIGTERM)
    assert seen == [True, "a state is kept"]
    with pytest.raises(Preempted):
        asked(signal.SIGUSR1, signal.SIGTERM)
    assert seen[2:] == [True]
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_signal_ends_at_once_what_keeps_no_state() -> None:
    with pytest.raises(Preempted), preempting():
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("context", "error"), [(preempting, Preempted), (terminating, Terminated)])
def test_a_signal_that_a_finalizer_swallows_is_raised_again(
    context: Callable[[], AbstractContextManager[object]],
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_console, "AGAIN", 0.05)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    cleared: list[str] = []

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def work() -> None:
        Finalized()
        cleared.append("went on")
        try:
            time.sleep(30.0)
        finally:
            # The clearing up is not interrupted, however long it takes.
            time.sleep(0.2)
            cleared.append("cleared")

    with pytest.raises(error), context():
        work()
    assert cleared == ["went on", "cleared"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def started(folder: Path, name: str) -> "subprocess.Popen[str]":
    arguments = ["run", "run.toml", "--output", name, "--resume"]
    return subprocess.Popen(
        [sys.executable, "-m", "dustmap", *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_run_with_75_and_it_goes_on_to_the_same_bits(
    unfinished: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.replace('engine = "exact"', "samples = 4").replace("0.002", "1.0")
    (unfinished / "run.toml").write_text(config)
    whole = str(unfinished / "whole")
    assert main(["run", str(unfinished / "run.toml"), "--output", whole]) == DONE
    path = unfinished / "signalled"
    with started(unfinished, "signalled") as process:
        deadline = time.monotonic() + 120.0
        while not (path / "stars.zarr").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, told = process.communicate(timeout=120)
    assert process.returncode == PREEMPTED, told
    assert told.splitlines()[-1] == "dustmap: pre-empted: go on with --resume"
    assert "Traceback" not in told
    assert (path / "config.toml").exists()
    assert not (path / "report.json").exists()
    assert status_of(path).state == "pre-empted"
    assert left_over(unfinished) == []
    monkeypatch.chdir(unfinished)
    assert main(["run", "run.toml", "--output", "signalled", "--resume"]) == DONE
    assert differences(unfinished / "whole", path) == []
