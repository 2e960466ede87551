"""The experiment on selection, distances and far columns, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce.selection import experiment as selection


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = selection.run(Request(quick=True, data=Path()))
    parts = {"bias": 2, "again": 5, "weights": 4, "column": 4}
    rows = [part for part, count in parts.items() for _ in range(count)]
    assert [row["part"] for row in outcome.rows] == rows
    free, limited = outcome.rows[:2]
    assert free["flagged_cloud"] == 0.0
    assert isinstance(limited["bias_cloud_mag"], float)
    assert len(outcome.goals) == 4
