"""scripts/sky_slices.py: the whole tour of a small map."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dustmap.gp import RegularGrid
from dustmap.sky import DustMap, Provenance
from dustmap.sky.maps import Quantity, write_map

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "sky_slices.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    if not SCRIPT.is_file():
        pytest.skip("the scripts are in the repository, not in the package")
    found = importlib.util.spec_from_file_location("sky_slices", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    grid = RegularGrid((-20.0, -30.0, -10.0), (10.0, 10.0, 5.0), (5, 7, 5))
    mean = np.random.default_rng(0).lognormal(-6.0, 0.5, grid.size)
    path = tmp_path / "map.zarr"
    write_map(path, DustMap.from_nodes(grid, mean, 0.3 * mean, "A_V"), Provenance("0" * 64))
    assert Quantity.STD in DustMap.open(path).available
    return path


def test_it_draws_planes_projections_and_skies(
    script: ModuleType, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plots"
    asked = ["--slices", "5", "--distances", "8", "--format", "png"]
    assert script.main([str(stored), str(folder), *asked]) == 0
    names = {
        "slice_z+5.png",
        "slice_x+0.png",
        "slice_y+0.png",
        "top_down.png",
        "side_on.png",
        "shell_8pc.png",
        "extinction_8pc.png",
    }
    assert {path.name for path in folder.iterdir()} == names
    assert len(capsys.readouterr().out.splitlines()) == len(names)
    assert script.main([str(stored), str(folder), *asked]) == 2
    assert "exists already" in capsys.readouterr().err


def test_its_skies_reach_the_largest_sphere_inside(script: ModuleType, stored: Path) -> None:
    drawn = script.pictures(DustMap.open(stored), None, None, None)
    names = [picture.name for picture in drawn]
    assert [name for name in names if "pc" in name] == [
        "shell_3pc",
        "shell_7pc",
        "shell_10pc",
        "extinction_10pc",
    ]
    assert names[:3] == ["slice_z-5", "slice_z+0", "slice_z+5"]


def test_a_map_that_is_not_there_is_one_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(tmp_path / "none"), str(tmp_path / "plots")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sky_slices: error: ")
