"""The experiment on levels: its goals, and the whole reduced."""

import math
from pathlib import Path

import numpy as np
import pytest

from dustmap.gp import RegularGrid
from dustmap.sky import DustMap
from dustmap.sky.systems import system_named
from pipelines.reproduce import Request, Row
from pipelines.reproduce.levels import experiment as levels
from pipelines.reproduce.levels._limits import Limits


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


def test_limits_are_of_what_nodes_cannot_hold() -> None:
    grid = RegularGrid((-80.0,) * 3, (10.0,) * 3, (17,) * 3)
    x, y, z = np.meshgrid(*3 * [np.abs(np.arange(-80.0, 81.0, 10.0))], indexing="ij")
    held, rough = 1.0 + x + x * y * z, (-1.0) ** (np.indices(grid.shape).sum(0))
    places = np.random.default_rng(0).uniform(-70.0, 70.0, (500, 3))
    on_nodes = np.round(places / 10.0) * 10.0
    smooth, both = (
        Limits(DustMap.from_nodes(grid, values.ravel(), None, system_named("A_V")))
        for values in (held, held + rough)
    )
    scale = np.abs(held).max()
    assert smooth.of_grid(20.0, places) < 1e-6 * scale  # A kink is on a node of the coarse grid.
    assert smooth.of_levels(40.0, (80.0,) * 3, places) < 1e-6 * scale
    assert both.of_grid(20.0, on_nodes) == pytest.approx(1.0, abs=0.3)
    near = on_nodes[(np.abs(on_nodes) <= 20.0).all(1)]
    assert both.of_levels(20.0, (120.0,) * 3, near) < 1e-6 * scale < both.of_grid(20.0, near)


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = levels.run(Request(quick=True, data=Path()))
    parts = {"skies": 2, "dense": 2, "limits": 2, "growth": 3}
    assert [row["part"] for row in outcome.rows] == [p for p, n in parts.items() for _ in range(n)]
    runs = [row for row in outcome.rows if row["part"] != "limits"]
    assert all(math.isfinite(float(str(row["seconds"]))) for row in runs)
    assert outcome.rows[1]["nodes"] != outcome.rows[0]["nodes"]
