"""The experiment on zero points of surveys, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce.groups import experiment as groups


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = groups.run(Request(quick=True, data=Path()))
    assert [row["offset_mag"] for row in outcome.rows] == 3 * [0.0] + 3 * [0.05] + 3 * [0.1]
    without, *grouped = outcome.rows[-3:]
    assert without["apart_mag"] is None
    assert isinstance(without["tilt_mag"], float)
    for row in grouped:
        assert isinstance(row["tilt_mag"], float)
        assert abs(row["tilt_mag"]) < 0.5 * abs(without["tilt_mag"])
        assert row["apart_mag"] == pytest.approx(0.1, abs=0.03)
    assert len(outcome.goals) == 6
