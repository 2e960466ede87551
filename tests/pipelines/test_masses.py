"""The experiment on masses of clouds: its clouds, its regions and goals, and the whole reduced."""

import math
from pathlib import Path

import numpy as np
import pytest

from pipelines.reproduce import Request, Row
from pipelines.reproduce.masses import experiment


def test_clouds_have_their_extinction_and_are_apart() -> None:
    clouds = experiment.Clouds.draw(experiment.QUICK)
    for centre, radius, depth in zip(clouds.centres, clouds.radii, clouds.depths, strict=True):
        line = experiment.line(centre, radius)
        step = np.linalg.norm(np.diff(line, axis=0), axis=1)[0]
        assert clouds.density(line).sum() * step == pytest.approx(depth, rel=0.01)
        tube = experiment.tube(centre, radius)
        assert np.linalg.norm(tube, axis=1).min() > 20.0
        assert (np.abs(tube) <= 0.5 * np.array(experiment.QUICK.box)).all()
    ahead = clouds.centres / np.linalg.norm(clouds.centres, axis=1, keepdims=True)
    apart = np.degrees(np.arccos(np.clip(ahead @ ahead.T, -1.0, 1.0)))
    assert apart[~np.eye(len(ahead), dtype=bool)].min() >= 20.0


def test_goals_take_the_base_case_alone() -> None:
    rows: list[Row] = [
        {"case": case, "radius": radius, "mass": mass, "off": off}
        for case, radius, mass, off in (
            ("as it comes", 8.0, 0.95, 1.0),
            ("as it comes", 4.0, 0.8, -3.0),
            ("2000 stars", 4.0, 0.1, -9.0),
        )
    ]
    small, large, held = experiment.goals(rows)
    assert (small.reached, small.met, large.met) == (0.8, False, True)
    assert held.reached == 0.5
    assert [goal.reached for goal in experiment.goals(rows[2:])] == [None] * 3


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    assert len(outcome.rows) == 2 * 18
    for row in outcome.rows:
        assert all(math.isfinite(float(str(row[key]))) for key in ("mass", "tube", "column", "off"))
