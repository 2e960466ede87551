"""The experiment on learned lengths, reduced."""

from pathlib import Path

from pipelines.reproduce import Request
from pipelines.reproduce._experiment import number
from pipelines.reproduce.between_nodes.experiment import FINER
from pipelines.reproduce.lengths import experiment


def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    (row,) = outcome.rows
    assert row["sky"] == FINER
    assert 0.0 < number(row, "projection") < 1.0
    assert 15.0 < number(row, "length") < 240.0
    assert 0.0 < number(row, "length_error") < number(row, "length")
    assert abs(number(row, "z")) < 5.0
    assert not outcome.goals  # they are for 2,000 stars
