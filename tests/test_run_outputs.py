"""What compares two runs sees their numbers, and nothing of when they were made."""

import json
from pathlib import Path

import numpy as np
import zarr

from tests.run_outputs import differences, left_over


def a_run(path: Path, value: float) -> Path:
    (path / "checkpoint").mkdir(parents=True)
    group = zarr.create_group(path / "map.zarr")
    group.create_array("mean", shape=(2,), dtype="float32")[:] = value
    np.savez(path / "checkpoint" / "posterior.npz", mean=np.array([1.0]))
    (path / "report.json").write_text(json.dumps({"fit": value, "stages": {"seconds": path.name}}))
    return path


def test_outputs_differ_by_their_numbers_alone(tmp_path: Path) -> None:
    one, same, other = (
        a_run(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0))
    )
    assert differences(one, same) == []
    assert differences(one, other) == ["map.zarr/mean", "report.json/"]
    (same / "checkpoint" / "posterior.npz").unlink()
    assert differences(one, same) == ["posterior.npz/mean"]
    (same / "checkpoint" / ".partial-7-posterior.npz").touch()
    assert left_over(tmp_path) == ["b/checkpoint/.partial-7-posterior.npz"]
