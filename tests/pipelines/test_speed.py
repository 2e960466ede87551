"""The experiment on speed, reduced."""

from pathlib import Path

from pipelines.reproduce import Request
from pipelines.reproduce._experiment import number
from pipelines.reproduce.speed import experiment


def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    runs, products = outcome.rows[:2], outcome.rows[2:]
    assert [row["part"] for row in runs] == ["demo", "grid"]
    assert all(number(row, "cpu_s_now") > 0.0 for row in runs)
    for row in runs:
        # Without history there is nothing to hold it beside.
        assert ("ratio" in row) == ("cpu_s_before" in row)
    assert all(number(row, "limit_s") > 0.0 for row in products)
    assert len(outcome.goals) == len(outcome.rows)
