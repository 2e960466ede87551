"""The stars of a run come back as they were."""

from pathlib import Path

import numpy as np

from dustmap.sky import SkyModel, read_archive, simulate, write_archive


def test_stars_read_back_exactly(tmp_path: Path) -> None:
    stars, _ = simulate(SkyModel(size=(60.0, 60.0, 60.0), system="A_G"), 7, seed=1)
    write_archive(tmp_path / "stars.zarr", stars)
    again = read_archive(tmp_path / "stars.zarr")
    assert again.system == "A_G"
    for name in ("source_id", "l", "b", "distance", "extinction", "extinction_error"):
        np.testing.assert_array_equal(getattr(again, name), getattr(stars, name))
