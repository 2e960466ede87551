"""The experiment on levels: its goals, and the whole reduced."""

import math
from pathlib import Path

import pytest

from pipelines.reproduce import Request, Row
from pipelines.reproduce.levels import experiment as levels


def test_slopes_are_exponents() -> None:
    rows: list[Row] = [{"nodes": n, "fit_seconds": 3.0 * n**0.7} for n in (10, 100, 2000)]
    assert levels.slope(rows, "nodes", "fit_seconds") == pytest.approx(0.7)


def test_goals_compare_levels_with_one_grid() -> None:
    kinds = {levels.ONE: (2.0, 1.0), levels.LEVELS: (0.8, 1.2), levels.TILES: (9.0, 9.0)}
    rows: list[Row] = [
        {"part": "skies", "kind": kind, "near_rmse": near, "far_rmse": far}
        for kind, (near, far) in kinds.items()
    ]
    near, far, *slopes = levels.goals_of(rows)
    assert near.met
    assert near.reached == pytest.approx(0.4)
    assert not far.met
    assert far.reached == pytest.approx(1.2)
    assert [goal.reached for goal in slopes] == [None] * 4


def test_goals_are_of_every_number_of_stars() -> None:
    rows: list[Row] = [
        {"part": "dense", "stars": n, "kind": kind, "near_rmse": error, "far_rmse": error}
        for n, near in ((100, 0.9), (1000, 0.4))
        for kind, error in ((levels.ONE, 1.0), (levels.LEVELS, near))
    ]
    found = {goal.name: goal.reached for goal in levels.goals_of(rows)}
    near = "near: error of density, levels over one grid"
    assert found[near] is None
    assert found[f"{near}, 100 stars"] == pytest.approx(0.9)
    assert found[f"{near}, 1,000 stars"] == pytest.approx(0.4)


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = levels.run(Request(quick=True, data=Path()))
    assert [row["part"] for row in outcome.rows] == ["skies"] * 2 + ["dense"] * 2 + ["growth"] * 3
    assert all(math.isfinite(float(str(row["seconds"]))) for row in outcome.rows)
    assert outcome.rows[1]["nodes"] != outcome.rows[0]["nodes"]
