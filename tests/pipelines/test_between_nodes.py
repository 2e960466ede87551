"""The experiment on skies finer than the grid, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce.between_nodes import experiment


def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    row, gaussian = outcome.rows
    assert row["sky"] == experiment.FINER
    assert number(row, "chi2") < number(row, "chi2_without")
    assert number(row, "loglike") > number(row, "loglike_without")
    assert number(row, "coverage68") == pytest.approx(0.68, abs=0.15)
    assert not outcome.goals  # they are for 2,000 stars
    assert gaussian["part"] == "gaussian"
    std, without = number(gaussian, "std_over_exact"), number(gaussian, "std_over_exact_without")
    assert std == pytest.approx(1.0, abs=0.1)
    assert std < without
    assert number(gaussian, "nodes") + number(gaussian, "residual") > 1.0
    assert 1.0 <= number(gaussian, "errors_over_exact") < 1.1


def test_rows_of_the_other_part_are_kept() -> None:
    kept: Row = {
        "sky": experiment.FINER,
        "stars": 300,
        "error_percent": 5.0,
        "kernel_of_the_sky": "matern32",
        "kernel_of_the_fit": "matern32",
        "coverage68": 0.7,
        "coverage68_without": 0.5,
    }
    measured: Row = {"sky": experiment.FINER, "part": "gaussian", "stars": 10}
    request = Request(quick=True, data=Path(), only=("gaussian",), earlier=(kept, measured))
    rows = experiment.run(request).rows
    assert rows[0] == kept
    assert [row.get("stars") for row in rows] == [300, 200]
