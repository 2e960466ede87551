"""The experiment on boxes beyond which most stars are."""

import math
from pathlib import Path

import numpy as np
import pytest

from pipelines.reproduce import Request, Row
from pipelines.reproduce.around import experiment


def test_extinctions_are_integrals_of_the_density() -> None:
    sky = experiment.Sky(1)
    places = np.random.default_rng(0).uniform(-200.0, 200.0, (5, 3))
    for place, extinction in zip(places, sky.extinction(places), strict=True):
        steps = (np.arange(20_000) + 0.5)[:, None] / 20_000
        along = sky.density(steps * place).mean() * np.linalg.norm(place)
        assert extinction == pytest.approx(along, rel=1e-3)
    assert sky.density(np.array([15.0, -20.0, 5.0])) < 2e-4 < sky.density(sky.clouds[0, :3])


def test_goals_compare_boxes_with_and_without_nodes_around() -> None:
    rows: list[Row] = [
        {
            **{"box": box, "seed": 1, "around": around, "rmse": rmse, "median_error": rmse / 2},
            **{"loglike": y, "voxels_inside": part},
        }
        for box, around, rmse, y, part in (
            ("240", "none", 0.04, 0.6, 0.3),
            ("240", "auto", 0.02, 0.9, 0.8),
            ("1000", "none", 0.02, 0.9, 0.8),
            ("1000", "auto", 0.03, 0.8, 0.6),
        )
    ]
    found = experiment.goals(rows)
    assert [goal.reached for goal in found] == pytest.approx(
        [0.5, 0.5, 0.3, 0.8, 1.5, 1.5, -0.1, 0.6]
    )
    assert [goal.met for goal in found] == [True] * 4 + [False] * 4


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    assert [row["around"] for row in outcome.rows] == ["none", "auto"]
    for row in outcome.rows:
        assert all(math.isfinite(float(str(row[key]))) for key in ("rmse", "loglike", "std"))


@pytest.mark.slow
@pytest.mark.parametrize("box", ["240", "400"])
def test_maps_of_a_box_that_most_stars_are_beyond_are_right(box: str) -> None:
    """With dust beyond the box as noise 0.31 and 0.58 of the voxels are within one standard
    deviation, and errors of extinctions are half as large again."""
    scores = experiment.mapped(experiment.Size(samples=16), box, 1, experiment.AUTO)
    assert float(str(scores["voxels_inside"])) > 0.75
    assert float(str(scores["loglike"])) > 0.85
    assert float(str(scores["coverage68"])) > 0.6
