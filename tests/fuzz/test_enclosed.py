"""Stores, maps and runs that lead elsewhere, name codecs, or promise more than they have."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.runs import open_run
from dustmap.sky import DustMap
from dustmap.sky.stars import open_star_store
from dustmap.tables._outputs import check_enclosed, named_beside, replacing

Open = Callable[[Path], Any]
OPENERS: tuple[tuple[str, str, Open], ...] = (
    ("stars.zarr", "l", open_star_store),
    ("map.zarr", "density_mean", DustMap.open),
    ("run", "checkpoint", open_run),
)


@pytest.fixture
def copied(samples: Path, tmp_path: Path) -> Path:
    """Copies of the store, the maps and the run."""
    for name, _, _ in OPENERS:
        shutil.copytree(samples / name, tmp_path / name)
    shutil.copyfile(samples / "map.fits", tmp_path / "map.fits")
    return tmp_path


@pytest.mark.parametrize(("name", "inside", "opened"), OPENERS)
def test_links_that_lead_out_are_refused(
    name: str, inside: str, opened: Open, copied: Path
) -> None:
    path, elsewhere = copied / name, copied / "elsewhere"
    (path / inside).rename(elsewhere)
    (path / inside).symlink_to(elsewhere)
    with pytest.raises(ValueError, match=rf"{name}: {inside} is a link to .*elsewhere, outside"):
        opened(path)
    # The same inside, and a path of the user that is a link itself, are fine.
    (path / inside).unlink()
    elsewhere.rename(path / f"{inside}.here")
    (path / inside).symlink_to(f"{inside}.here")
    link = copied / ("link" + Path(name).suffix)
    link.symlink_to(path)
    opened(link)


@pytest.mark.parametrize(("name", "inside", "opened"), OPENERS)
def test_pipes_are_not_waited_for(name: str, inside: str, opened: Open, copied: Path) -> None:
    os.mkfifo(copied / name / inside / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a directory"):
        opened(copied / name)


def test_dots_lead_out_as_links_do(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "up").symlink_to("../..")
    with pytest.raises(ValueError, match="b/up is a link to"):
        check_enclosed(tmp_path / "a")
    (tmp_path / "a" / "b" / "up").unlink()
    (tmp_path / "a" / "b" / "up").symlink_to("..")
    check_enclosed(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "array", "opened"),
    [
        ("stars.zarr", "l", lambda path: open_star_store(path).read()),
        ("map.zarr", "density_std", DustMap.open),
    ],
)
def test_missing_chunks_are_told(name: str, array: str, opened: Open, copied: Path) -> None:
    """zarr itself would answer with zeros or NaN."""
    shutil.rmtree(copied / name / array / "c")
    with pytest.raises(ValueError, match=rf"a part of it is missing: 1 of the 1 chunks of {array}"):
        opened(copied / name)


@pytest.mark.parametrize(
    "shape", [[10**18], [10**6], [0], [], [40, 40], [2**70]], ids=["E", "M", "0", "()", "2", "2^70"]
)
def test_stores_that_promise_more_than_they_have(shape: list[int], copied: Path) -> None:
    for name in ("zarr.json", "l/zarr.json"):
        path = copied / "stars.zarr" / name
        content = json.loads(path.read_text())
        content.get("attributes", {})["stars"] = shape[0] if shape else 0
        if "shape" in content:
            content["shape"] = shape
            content["chunk_grid"]["configuration"]["chunk_shape"] = [n or 1 for n in shape]
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"stars\.zarr"):
        open_star_store(copied / "stars.zarr").read()


class _Malice:
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_codecs_that_unpickle_are_not_used(tmp_path: Path) -> None:
    """numcodecs has one, which zarr of version 2 would use on whatever a store holds."""
    path, trap = tmp_path / "map.zarr", tmp_path / "trap"
    group = zarr.create_group(path, zarr_format=2, attributes={"extinction_system": "A_V"})
    for name in "xyz":
        group.create_array(name, data=np.array([0.0, 1.0]))
    group.create_array("density_mean", data=np.ones((2, 2, 2), np.float32), chunks=(2, 2, 2))
    DustMap.open(path)
    metadata = json.loads((path / "density_mean" / ".zarray").read_text())
    (path / "density_mean" / "0.0.0").write_bytes(pickle.dumps(_Malice(trap)))
    for key, value in (("compressor", {"id": "pickle"}), ("filters", [{"id": "pickle"}])):
        changed = metadata | {"compressor": None, key: value}
        (path / "density_mean" / ".zarray").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="pickle"):
            DustMap.open(path).query_gal(0.0, 0.0, 0.0005)
    assert not trap.exists()


def test_commands_tell_in_one_line(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--l", "1", "--b", "2", "--distance", "3"]
    assert main(["query", str(copied / "run"), *place]) == DONE
    (copied / "run" / "passwd").symlink_to("/etc/passwd")
    capsys.readouterr()
    assert main(["query", str(copied / "run"), *place]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "passwd is a link to /etc/passwd" in said
    assert said.count("\n") == 1


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """Whoever knows the name under which a file is written could have it written elsewhere."""
    precious, target = tmp_path / "precious", tmp_path / "map.fits"
    precious.write_text("years")
    named_beside(target, "partial").symlink_to(precious)
    with replacing(target, overwrite=False) as partial:
        partial.write_text("new")
    assert (precious.read_text(), target.read_text()) == ("years", "new")
    assert not target.is_symlink()
