"""The export_scale experiment, reduced."""

from pathlib import Path

import numpy as np

from pipelines.reproduce import Request
from pipelines.reproduce.export_scale import experiment as export_scale
from pipelines.reproduce.export_scale._measure import Scale


def test_the_whole_runs_reduced() -> None:
    outcome = export_scale.run(Request(quick=True, data=Path()))
    assert [row["part"] for row in outcome.rows] == ["zarr", "fits", "query"]
    assert all(goal.reached is not None for goal in outcome.goals)
    assert all(goal.met for goal in outcome.goals if "a second" not in goal.name)


def test_nodes_surround_the_voxels() -> None:
    for scale in (export_scale.FULL, export_scale.QUICK, Scale((7, 5, 4), 3.0, 4.0)):
        voxels, nodes = scale.voxels(), scale.nodes()
        assert (np.array(nodes.lower) <= voxels.lower).all()
        assert (np.array(nodes.upper) >= voxels.upper).all()
    assert np.prod(export_scale.FULL.shape) == 295_704_000
