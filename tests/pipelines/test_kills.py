"""The kills experiment: what it compares, and the whole of it reduced."""

import json
from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce.kills import experiment as kills
from pipelines.reproduce.kills._process import windows


def test_windows_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    lines = [
        {"time": 1.0, "stage": "ingest", "event": "begins"},
        {"time": 1.5, "stage": "ingest", "event": "ends"},
        {"time": 2.0, "stage": "fit", "event": "begins"},
        {"time": 4.0, "stage": "learn", "part": "mean"},
        {"time": 7.0, "stage": "fit", "event": "ends"},
        {"time": 7.0, "stage": "evaluate", "event": "begins"},
        {"time": 8.0, "stage": "evaluate", "event": "ends"},
        {"time": 8.0, "stage": "export", "event": "begins"},
        {"time": 12.0, "stage": "export", "event": "ends"},
    ]
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = windows(run)
    assert [(w.name, w.seconds) for w in found[1:]] == [
        ("fit", 2.0),
        ("sampling", 3.0),
        ("export", 5.0),
    ]
    assert not any(w.begun(tmp_path) for w in found)
    run.rename(tmp_path / "run-killed")
    assert all(w.begun(tmp_path) for w in found)


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = kills.run(Request(quick=True, data=Path()))
    assert [row["part"] for row in outcome.rows] == ["run"] * 4 + ["ingest"] * 2
    assert all(goal.met for goal in outcome.goals[:3])
