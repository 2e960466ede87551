"""The experiment on the Local Bubble, on maps of our own, and the pipeline on a coarse grid."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import RegularGrid
from dustmap.sky import DustMap
from dustmap.sky.maps import Quantity
from pipelines.reproduce import Row
from pipelines.reproduce.local_bubble import _clouds as clouds
from pipelines.reproduce.local_bubble import experiment
from pipelines.reproduce.local_bubble._problem import cavity, fit

GRID = RegularGrid((-300.0, -300.0, -150.0), (10.0,) * 3, (61, 61, 31))


def positions() -> np.ndarray:
    """X, Y, Z (Z, Y, X, 3) of the voxels."""
    axes = [np.asarray(axis) for axis in GRID.axes()]
    z, y, x = np.meshgrid(axes[2], axes[1], axes[0], indexing="ij")
    return np.stack([x, y, z], -1)


def map_of(densities: list[np.ndarray]) -> DustMap:
    """A map whose samples these are."""
    samples = np.stack(densities).astype(np.float32)
    arrays = {Quantity.MEAN: samples.mean(0), Quantity.SAMPLES: samples}
    return DustMap.from_arrays(GRID, arrays, "E(B-V)", True)


def blob(l: float, b: float, distance: float, width: float = 15.0) -> np.ndarray:
    """A Gaussian cloud above a thin medium."""
    cloud = clouds.Cloud("C", l, b, distance, 5.0)
    apart = np.linalg.norm(positions() - cloud.position(), axis=-1)
    return np.asarray(1e-4 + 5e-3 * np.exp(-0.5 * (apart / width) ** 2))


def test_a_cloud_is_found_where_it_is() -> None:
    """Samples have it at 150, 160 and 170 pc: median and half of the central 68 %."""
    density = map_of([blob(170.0, -15.0, d) for d in (150.0, 160.0, 170.0)])
    found = clouds.profile(density, clouds.Cloud("C", 170.0, -15.0, 160.0, 5.0))
    peak, error = found.peak()
    assert peak == pytest.approx(160.0, abs=3.0)
    assert error == pytest.approx(0.5 * 0.68 * 20.0, abs=2.5)
    half, _ = found.half_rise()
    assert half == pytest.approx(160.0, abs=8.0)


def test_the_half_rise_of_one_density_is_half_way() -> None:
    s = np.arange(30.0, 330.0, 2.5)
    profile = clouds.Profile(s, np.full((len(s), 4), 1e-3))
    half, error = profile.half_rise()
    assert half == pytest.approx(180.0, abs=3.0)
    assert error == 0.0
    assert profile.extinction() == pytest.approx(0.3, rel=1e-6)


def test_clouds_near_the_faces_do_not_count(tmp_path: Path) -> None:
    density = map_of([blob(0.0, 0.0, 100.0)])
    path = tmp_path / "clouds.csv"
    path.write_text(
        "name,l,b,distance_p16,distance_pc,distance_p84\nA,0,0,95,100,105\nB,0,0,280,290,300\n"
    )
    read = clouds.read_clouds(path)
    assert [cloud.error for cloud in read] == [5.0, 10.0]
    assert [cloud.name for cloud in clouds.inside(density, read)] == ["A"]


def test_the_cavity_is_measured() -> None:
    """A hole of 80 pc in a medium of 1 mag/kpc."""
    radius = np.linalg.norm(positions(), axis=-1)
    near, ring = cavity(map_of([np.where(radius < 80.0, 1e-4, 1e-3)]))
    assert near == pytest.approx(1e-4, rel=1e-4)
    assert ring == pytest.approx(1e-3, rel=1e-4)


def test_clouds_are_joined_by_name() -> None:
    values = {"peak_error": 5.0, "half_rise": 100.0, "half_rise_error": 5.0}
    lines: list[Row] = [
        {"part": "sight line", "name": name, "distance": distance, "peak": peak, **values}
        for name, distance, peak in (
            ("A", 100.0, 110.0),
            ("A B1", 120.0, 130.0),
            ("B", 200.0, 100.0),
        )
    ]
    rows = experiment.by_name(lines)
    assert [(row["name"], row["lines"], row["peak"]) for row in rows] == [
        ("A", 2, 120.0),
        ("B", 1, 100.0),
    ]
    assert experiment.share(rows, "cloud", "peak", 150.0) == pytest.approx(10 / 110)
    assert experiment.share(rows, "cloud", "peak") == pytest.approx(0.5 * (10 / 110 + 0.5))


@pytest.mark.slow
def test_a_coarse_map_has_the_cavity(tmp_path: Path) -> None:
    """On nodes 40 pc apart in a small box, nothing learned."""
    torch.set_num_threads(1)
    fitted = fit(tmp_path, (*experiment.QUICK, "model.learn=[]"))
    near, ring = cavity(fitted.density)
    assert near < 0.6 * ring
