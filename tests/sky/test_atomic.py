"""Files and directories take the place of others only where they may."""

from pathlib import Path

import pytest

from dustmap.sky._atomic import replacing


def test_directories_of_other_things_are_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    with (
        pytest.raises(FileExistsError, match="not a zarr group"),
        replacing(mine, overwrite=True) as partial,
    ):
        partial.write_text("a map")
    assert (mine / "thesis.tex").read_text() == "years"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_zarr_groups_and_empty_directories_are_replaced(tmp_path: Path) -> None:
    group, empty = tmp_path / "a.zarr", tmp_path / "b.zarr"
    group.mkdir()
    (group / "zarr.json").write_text("{}")
    empty.mkdir()
    for target in (group, empty):
        with replacing(target, overwrite=True) as partial:
            partial.write_text("new")
        assert target.read_text() == "new"
