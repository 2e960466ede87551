"""Ranks write the files of one process, byte for byte, or none."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from astropy.io import fits

from dustmap.sky import Provenance
from dustmap.sky.maps import DustMap, MapRequest, Quantity, Slabs, write_map
from tests.distributed.ranks import found_by
from tests.sky.maps.fields import FINE, node_field

KINDS = ("zarr", "fits")
#: Bytes of the empty first unit of a FITS file, where astropy notes the second of its making.
_DATED = 2880


def run_exports(folder: Path, jobs: list[str]) -> None:
    """Runs NAME:SIZE one after the other."""
    command = [sys.executable, "-m", "tests.distributed.exports", str(folder), *jobs]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | one_thread, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]


def files_in(folder: Path) -> dict[str, bytes]:
    """What every file below holds, by its path from there."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        found[name] = data[_DATED:] if path.suffix == ".fits" else data
    return found


def check_same(one: Path, other: Path) -> None:
    mine, theirs = files_in(one), files_in(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name] != theirs[name]] == []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By one process and by three ranks; and by three of which one is killed."""
    folder = tmp_path_factory.mktemp("exports")
    short = [f"short-{kind}:{size}" for kind in KINDS for size in (1, 3)]
    run_exports(folder, ["killed-1-zarr:3&", "maps:1", "maps:3", *short])
    return folder


def test_ranks_write_the_bytes_of_one_process(written: Path) -> None:
    found_by(written, "maps", 3)
    check_same(written / "maps-1", written / "maps-3")


def test_what_ranks_write_is_whole(written: Path) -> None:
    found_by(written, "maps", 3)
    for name in ("layers", "thin", "flat", "predicted"):
        with fits.open(written / "maps-3" / f"{name}.fits", checksum=True) as hdus:
            hdus.verify("exception")
        maps = [DustMap.open(written / "maps-3" / f"{name}.{kind}") for kind in KINDS]
        for cube in maps[0].layout.cubes:
            one, other = (m.cube(cube.quantity, cube.sample) for m in maps)
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_where_one_rank_runs_out_of_memory_all_begin_anew(written: Path, kind: str) -> None:
    ranks = found_by(written, f"short-{kind}", 3)
    assert [int(found["times"]) for found in ranks] == [2, 2, 2]
    assert all(len(found["planes"]) for found in ranks)
    assert np.concatenate([found["planes"] for found in ranks]).tolist() == list(range(150))
    check_same(written / f"short-{kind}-1", written / f"short-{kind}-3")


def check_nothing_is_left(folder: Path, job: str, said: str) -> None:
    assert list((folder / f"{job}-3").iterdir()) == []
    for rank in (0, 2):
        last = (folder / f"{job}-3-{rank}.txt").read_text().splitlines()[-1]
        assert said in last


def test_a_lost_rank_leaves_no_file(written: Path) -> None:
    check_nothing_is_left(written, "killed-1-zarr", "rank 1 has ended without a word")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("killed-1-fits", "rank 1 has ended without a word"),
        ("failed-1-zarr", "the disk is full"),
        ("failed-1-fits", "the disk is full"),
    ],
)
def test_a_rank_that_fails_leaves_no_file(tmp_path: Path, job: str, said: str) -> None:
    run_exports(tmp_path, [f"{job}:3"])
    check_nothing_is_left(tmp_path, job, said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_first_rank_leaves_goes_with_the_next_file(tmp_path: Path, kind: str) -> None:
    run_exports(tmp_path, [f"killed-0-{kind}:2"])
    folder = tmp_path / f"killed-0-{kind}-2"
    (left,) = folder.iterdir()
    assert left.name.startswith(".partial-")
    slabs = Slabs.of_field(node_field(), FINE, MapRequest((Quantity.MEAN,)))
    write_map(folder / f"map.{kind}", slabs, Provenance(""))
    assert [path.name for path in folder.iterdir()] == [f"map.{kind}"]
