"""The experiment on skies finer than the grid, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce._experiment import number
from pipelines.reproduce.between_nodes import experiment


def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    (row,) = outcome.rows
    assert row["sky"] == experiment.FINER
    assert number(row, "chi2") < number(row, "chi2_without")
    assert number(row, "loglike") > number(row, "loglike_without")
    assert number(row, "coverage68") == pytest.approx(0.68, abs=0.15)
    assert not outcome.goals  # they are for 2,000 stars
