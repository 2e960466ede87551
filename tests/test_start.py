"""Commands that compute nothing wait for nothing that computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dustmap
from dustmap import gp, runs
from dustmap.estimators import HIPGPRegressor
from dustmap.sky import Provenance
from dustmap.sky.maps import DustMap, MapRequest, Quantity, write_map
from tests.sky.maps.fields import NODES, node_field

#: Those that take the longest, from a tenth of a second to two.
HEAVY = {"torch", "sklearn", "scipy", "healpy", "h5py", "pyarrow", "xarray"}
ASTRONOMY = {"numpy", "astropy", "matplotlib", "zarr"}
#: What draws, sorts the sky and learns from tables, a second or two together.
PICTURES_AND_TABLES = {"matplotlib", "healpy", "sklearn", "scipy.stats"}

COMMANDS = """
import json, sys
from dustmap.cli import main
codes = []
for command in json.loads(sys.argv[1]):
    try:
        codes.append(main(command))
    except SystemExit as exit:
        codes.append(exit.code)
sys.stderr.write(json.dumps([codes, sorted(sys.modules)]))
"""


def imported(*commands: list[str]) -> set[str]:
    """What a process of its own has imported when the commands are done."""
    called = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
    )
    codes, modules = json.loads(called.stderr.splitlines()[-1])
    assert not any(codes), called.stderr.splitlines()[0]
    return set(modules)


@pytest.fixture
def maps(tmp_path: Path) -> Path:
    """A directory with one map in both formats."""
    request = MapRequest((Quantity.MEAN, Quantity.STD, Quantity.SAMPLES), samples=3)
    density = DustMap.from_field(node_field(), NODES, request)
    for name in ("map.fits", "map.zarr"):
        write_map(tmp_path / name, density, Provenance("0" * 64))
    return tmp_path


def test_the_package_itself_takes_nothing() -> None:
    code = "import dustmap, sys; print(*sys.modules)"
    called = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "dustmap" in called.stdout.split()
    assert not set(called.stdout.split()) & (HEAVY | ASTRONOMY)


def test_words_and_the_status_of_a_run_take_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "report.json").write_text('{"status": "done"}')
    words = [["--help"], ["--version"], ["run", "--help"], ["config", "--example"]]
    words.append(["completion", "bash"])
    assert not imported(*words, ["status", str(tmp_path)]) & (HEAVY | ASTRONOMY)


def test_a_map_is_asked_without_what_makes_maps(maps: Path) -> None:
    place = ["--l", "30", "--b", "5", "--distance", "20pc"]
    seen = imported(["query", str(maps / "map.fits"), *place])
    assert not seen & (HEAVY | {"matplotlib", "zarr"})


def test_a_run_is_asked_without_pictures_and_without_other_kinds_of_runs(exact_run: Path) -> None:
    place = ["--l", "30", "--b", "5", "--distance", "20pc"]
    assert not imported(["query", str(exact_run / "run"), *place]) & PICTURES_AND_TABLES


def test_a_map_is_drawn_without_what_makes_maps(maps: Path) -> None:
    output = ["--output", str(maps / "a.png"), "--overwrite"]
    pictures = (["--slice", "z=0"], ["--sky", "20"])
    drawn = imported(*(["plot", str(maps / "map.zarr"), *each, *output] for each in pictures))
    assert not drawn & HEAVY


def test_the_page_of_a_map_is_made_without_what_makes_maps(maps: Path) -> None:
    seen = imported(["view", str(maps / "map.fits"), "--output", str(maps / "a.html")])
    assert not seen & (HEAVY | {"zarr"})


def test_lines_of_sight_and_many_places_of_a_map_take_no_torch(maps: Path) -> None:
    (maps / "places.csv").write_text("l,b,distance_pc\n30,5,20\n")
    line = ["--los", "30", "5", "--output", str(maps / "a.png")]
    seen = imported(
        ["plot", str(maps / "map.fits"), *line],
        ["query", str(maps / "map.fits"), "--file", str(maps / "places.csv")],
    )
    assert "torch" not in seen


def test_packages_have_the_names_that_they_import_on_use() -> None:
    assert {"DustMap", "HIPGPRegressor"} <= set(dir(dustmap))
    assert {"LAYOUTS", "slice_figure"} <= set(dir(dustmap.sky))
    packages = (dustmap, gp, runs, dustmap.sky, dustmap.sky.maps, dustmap.sky.figures)
    for package in packages:
        for name in dir(package):
            assert getattr(package, name) is not None
    assert dustmap.DustMap is DustMap
    assert dustmap.HIPGPRegressor is HIPGPRegressor
    with pytest.raises(AttributeError, match=r"dustmap\.sky.*no attribute 'DustMop'"):
        getattr(dustmap.sky, "DustMop")  # noqa: B009
