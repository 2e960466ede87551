"""The seams experiment, reduced."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.reproduce import Request
from pipelines.reproduce.seams import experiment as seams


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = seams.run(Request(quick=True, data=Path()))
    parts = [row["part"] for row in outcome.rows]
    assert parts == ["interior", "seams", "sun", "times", "extinctions"]
    assert len(outcome.goals) == 3
    assert all(goal.met for goal in outcome.goals[:2])  # four samples say nothing of the third
    by_part = {row["part"]: row for row in outcome.rows}
    # The tiles are as good as the one fit, seams included.
    for part in ("interior", "seams"):
        told = by_part[part]
        assert isinstance(told["rms_error_tiles"], float)
        assert isinstance(told["rms_error_one_fit"], float)
        assert told["rms_error_tiles"] < 1.1 * told["rms_error_one_fit"]
    assert np.sum([int(str(row["voxels"])) for row in outcome.rows[:3]]) == 11 * 11 * 6
