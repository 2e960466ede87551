"""The experiment on selection, distances and far columns, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce.selection import experiment as selection


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = selection.run(Request(quick=True, data=Path()))
    assert [row["part"] for row in outcome.rows] == ["bias"] * 2 + ["again"] * 5 + ["column"] * 4
    free, limited = outcome.rows[:2]
    assert free["flagged_cloud"] == 0.0
    assert isinstance(limited["bias_cloud_mag"], float)
    assert len(outcome.goals) == 3
