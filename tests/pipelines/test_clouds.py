"""The experiment on clouds: its skies, its scores, and a reduced run."""

from pathlib import Path

import numpy as np
import pytest

from dustmap.gp import RegularGrid
from dustmap.sky.clouds import find_clouds
from dustmap.sky.maps import DustMap
from pipelines.reproduce import Request, Row
from pipelines.reproduce.clouds import _problem as problem
from pipelines.reproduce.clouds import experiment as clouds

GRID = RegularGrid((-220.0, -220.0, -100.0), (10.0,) * 3, (45, 45, 21))


def test_balls_are_where_they_should_be_and_apart() -> None:
    blobs = problem.Blobs.draw(clouds.FULL, seed=0)
    assert len(blobs.radii) == clouds.FULL.clouds
    assert (blobs.distance >= problem.NEAREST).all()
    assert (blobs.distance <= problem.FARTHEST).all()
    apart = np.linalg.norm(blobs.centres[:, None] - blobs.centres, axis=-1)
    assert apart[np.triu_indices(len(apart), 1)].min() >= problem.APART
    again = problem.Blobs.draw(clouds.FULL, seed=0)
    np.testing.assert_array_equal(blobs.centres, again.centres)


def test_balls_alone_are_recovered_at_their_distances() -> None:
    blobs = problem.Blobs.draw(clouds.QUICK, seed=1)
    nodes = 1e-3 + blobs.density(GRID.points().numpy())
    found = find_clouds(DustMap.from_nodes(GRID, nodes, None, "A_V"), known=blobs.places)
    owner = clouds.owners(found, blobs)
    assert min(owner) >= 0
    np.testing.assert_allclose(found.mean.distance[owner], blobs.distance, rtol=0.02)


def test_the_truth_is_averaged_over_voxels() -> None:
    """A linear density is its own average, and so is the integral of any."""
    fine = RegularGrid((-20.0,) * 3, (5.0,) * 3, (9,) * 3)
    coarse = RegularGrid((-20.0,) * 3, (10.0,) * 3, (5,) * 3)
    slope = np.array([1.0, 2.0, -0.5])
    linear = 100.0 + fine.points().numpy() @ slope
    averaged = problem._thinned(DustMap.from_nodes(fine, linear, None, "A_V"), coarse)
    inner = averaged.mean[1:-1, 1:-1, 1:-1]
    expected = (100.0 + coarse.points().numpy() @ slope).reshape(5, 5, 5).transpose(2, 1, 0)
    np.testing.assert_allclose(inner, expected[1:-1, 1:-1, 1:-1], rtol=1e-6)


def line(error: float | None, seen: int = 10) -> Row:
    row: Row = {"part": "sky", "density": clouds.MAP, "balls": 10, "balls_with_a_cloud": seen}
    return {**row, "median_relative_error": error}


def test_goals_take_the_worst_sky() -> None:
    median, share, *held = clouds.goals([line(0.02), line(0.07, seen=9)])
    assert not any(goal.met for goal in held)
    assert median.reached == 0.07
    assert not median.met
    assert share.reached == pytest.approx(0.95)
    assert share.met
    assert not clouds.goals([line(None, seen=0)])[0].met


def test_goals_of_errors_weigh_skies_by_their_clouds() -> None:
    shares: Row = {"clouds_within_one_error": 0.5, "clouds_compared": 30, "within_one_error": 0.9}
    more: Row = {"clouds_within_one_error": 0.8, "clouds_compared": 60, "within_one_error": 0.9}
    _, _, *held = clouds.goals([{**line(0.02), **shares}, {**line(0.02), **more}])
    assert [goal.reached for goal in held] == pytest.approx([0.7, 0.7, 0.9, 0.9])
    assert [goal.met for goal in held] == [True, True, True, False]


def test_balls_lie_in_the_basins_of_their_clouds() -> None:
    blobs = problem.Blobs.draw(clouds.QUICK, seed=1)
    nodes = 1e-3 + blobs.density(GRID.points().numpy())
    density = DustMap.from_nodes(GRID, nodes, None, "A_V")
    found = find_clouds(density, known=blobs.places)
    assert clouds.basins_at(found, blobs.centres).tolist() == clouds.owners(found, blobs)
    again = found.forms_in(density.mean)
    np.testing.assert_allclose(again.distance, found.mean.distance)


@pytest.mark.slow
def test_the_reduced_experiment_runs(tmp_path: Path) -> None:
    outcome = clouds.run(Request(True, tmp_path))
    (ours, truth) = (row for row in outcome.rows if row["part"] == "sky")
    assert (ours["density"], truth["density"]) == (clouds.MAP, clouds.TRUTH)
    assert ours["balls"] == clouds.QUICK.clouds
