"""The experiment on ten million stars: its goals, and the whole reduced."""

import math
from pathlib import Path

import pytest

from pipelines.reproduce import Request, Row
from pipelines.reproduce.ten_million import experiment


def test_goals_compare_cells_with_stars() -> None:
    rows: list[Row] = [
        {"part": "cells", "width": width, "stars": 10, "near_rmse": near, "far_rmse": far}
        for width, near, far in ((0.0, 1.0, 2.0), (1.0, 1.04, 2.4))
    ]
    rows += [
        {"part": part, "stars": n, "cpu_s": 3.0 * n**0.7, "peak_gib": 30.0, "seconds": 7200.0}
        for part, n in (("growth", 10), ("whole", 1000))
    ]
    near, far, time, memory, hours, peak = experiment.goals_of(rows)
    assert near.met
    assert near.reached == pytest.approx(1.04)
    assert not far.met
    assert time.reached == pytest.approx(0.7)
    assert memory.reached == pytest.approx(0.0, abs=1e-12)
    assert hours.reached == 2.0
    assert not peak.met
    assert [goal.reached for goal in experiment.goals_of([])] == [None] * 6


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    parts = [row["part"] for row in outcome.rows]
    assert parts == ["cells"] * 2 + ["growth"] * 2 + ["whole"]
    assert all(math.isfinite(float(str(row["far_rmse"]))) for row in outcome.rows)
    assert int(str(outcome.rows[1]["data"])) < int(str(outcome.rows[0]["data"]))
