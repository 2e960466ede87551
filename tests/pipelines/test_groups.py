"""The experiment on zero points of surveys, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce.groups import experiment as groups


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = groups.run(Request(quick=True, data=Path()))
    assert [row["offset_mag"] for row in outcome.rows] == [0.0, 0.0, 0.05, 0.05, 0.1, 0.1]
    without, grouped = outcome.rows[-2:]
    assert without["apart_mag"] is None
    assert isinstance(grouped["tilt_mag"], float)
    assert isinstance(without["tilt_mag"], float)
    assert abs(grouped["tilt_mag"]) < 0.5 * abs(without["tilt_mag"])
    assert grouped["apart_mag"] == pytest.approx(0.1, abs=0.03)
    assert len(outcome.goals) == 3
