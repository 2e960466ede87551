"""The kills experiment: what it compares, and the whole of it reduced."""

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipelines.reproduce import Request
from pipelines.reproduce.kills import experiment as kills
from pipelines.reproduce.kills._process import windows
from tests.run_outputs import differences, left_over


def a_run(path: Path, value: float) -> Path:
    (path / "checkpoint").mkdir(parents=True)
    group = zarr.create_group(path / "map.zarr")
    group.create_array("mean", shape=(2,), dtype="float32")[:] = value
    np.savez(path / "checkpoint" / "posterior.npz", mean=np.array([1.0]))
    (path / "report.json").write_text(json.dumps({"fit": value, "stages": {"seconds": path.name}}))
    return path


def test_outputs_differ_by_their_numbers_alone(tmp_path: Path) -> None:
    one, same, other = (
        a_run(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0))
    )
    assert differences(one, same) == []
    assert differences(one, other) == ["map.zarr/mean", "report.json/"]
    (same / "checkpoint" / "posterior.npz").unlink()
    assert differences(one, same) == ["posterior.npz/mean"]
    (same / "checkpoint" / ".partial-7-posterior.npz").touch()
    assert left_over(tmp_path) == ["b/checkpoint/.partial-7-posterior.npz"]


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
