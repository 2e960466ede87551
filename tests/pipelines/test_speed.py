"""The experiment on speed, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce._experiment import MissingData, number
from pipelines.reproduce.speed import experiment

SIMULATED = ("demo", "grid", "many", "millions", "products")


def test_the_parts_without_data_files_run_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path(), only=SIMULATED))
    runs, products = outcome.rows[:4], outcome.rows[4:]
    assert [row["part"] for row in runs] == list(SIMULATED[:4])
    assert all(number(row, "cpu_s_now") > 0.0 and number(row, "peak_gib_now") > 0.0 for row in runs)
    for row in runs:
        # Without history there is nothing to hold it beside.
        assert ("ratio" in row) == ("cpu_s_before" in row)
    assert all(number(row, "limit_s") > 0.0 for row in products)
    assert len(outcome.goals) == len(outcome.rows) + 1


def test_the_others_ask_for_their_data(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"ananke_train\.csv not found"):
        experiment.run(Request(quick=True, data=tmp_path, only=("ananke",)))
