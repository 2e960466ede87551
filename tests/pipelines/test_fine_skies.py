"""The experiment on skies finer than the grid of their starting length."""

import math
from pathlib import Path

import numpy as np
import pytest

from dustmap.gp import RegularGrid
from pipelines.reproduce import Request, Row
from pipelines.reproduce.fine_skies import experiment


@pytest.mark.parametrize("kind", experiment.KINDS)
def test_skies_have_their_mean_and_structure_of_a_cell(kind: str) -> None:
    grid = RegularGrid((-30.0,) * 3, (2.5,) * 3, (25, 25, 25))
    made = experiment.FineDust(kind).density(grid, seed=3)
    assert made.shape == grid.shape
    assert made.min() > 0.0
    assert made.mean() == pytest.approx(0.002)
    assert np.array_equal(made, experiment.FineDust(kind).density(grid, seed=3))
    assert not np.array_equal(made, experiment.FineDust(kind).density(grid, seed=4))
    steps = np.diff(np.log(made), axis=0)
    assert steps.std() > 0.1


def test_goals_compare_the_grids_of_a_sky() -> None:
    rows: list[Row] = [
        {"sky": sky, "seed": 0, "grid": grid, "rmse": rmse, "coverage68": inside}
        for sky, grid, rmse, inside in (
            ("clouds", "20 pc", 0.1, 0.4),
            ("clouds", "auto", 0.08, 0.7),
            ("cascade", "20 pc", 0.1, 0.7),
            ("cascade", "auto", 0.1, 0.5),
        )
    ]
    found = experiment.goals(rows)
    assert [goal.reached for goal in found] == pytest.approx([0.8, 0.7, 1.0, 0.5])
    assert [goal.met for goal in found] == [True, True, False, False]


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    coarse, asked = outcome.rows
    assert (coarse["spacing"], coarse["grid"]) == (20.0, "20 pc")
    assert float(str(asked["spacing"])) < 20.0
    for row in outcome.rows:
        assert all(math.isfinite(float(str(row[key]))) for key in ("rmse", "coverage68", "chi2"))
