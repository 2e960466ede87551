"""HDF5 files of others: where the columns are, and their units."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import ColumnRef, ColumnType, open_table

COLUMNS = {"l": np.array([10.0, 20.0]), "dist": np.array([0.1, 0.2])}


def write(path: Path, group: str = "/", **attributes: Any) -> h5py.Group:
    """Put the columns into a group, attributes on it; the file is closed by the caller."""
    at = h5py.File(path, "a").require_group(group)
    for name, values in COLUMNS.items():
        at[name] = values
    at.attrs.update(attributes)
    return at


def units(path: Path) -> dict[str, str]:
    return {column.name: column.unit for column in open_table(path).columns}


def values(path: Path, name: str) -> NDArray[Any]:
    ref = ColumnRef(name)
    return np.concatenate([chunk[ref] for chunk in open_table(path).chunks(1, {ref: NUMBER})])


NUMBER = ColumnType.NUMBER


@pytest.mark.parametrize("group", ["/", "stars", "survey/dr3/stars"])
def test_columns_in_one_group(tmp_path: Path, group: str) -> None:
    path = tmp_path / "stars.h5"
    at = write(path, group, EXTSYS="A_V")
    at["dist"].attrs["units"] = "kpc"
    at.file["made_by"] = "a number without rows"
    at.file.close()
    assert units(path) == {"l": "", "dist": "kpc"}
    assert open_table(path).keyword("EXTSYS") == "A_V"
    np.testing.assert_array_equal(values(path, "dist"), COLUMNS["dist"])
    whole = open_table(path).whole()
    np.testing.assert_array_equal(whole["l"], COLUMNS["l"])
    assert whole["dist"].unit == "kpc"


def test_columns_at_the_root_come_first(tmp_path: Path) -> None:
    path = tmp_path / "stars.h5"
    write(path).file.close()
    at = write(path, "others")
    del at["dist"]
    at["dist"] = 7.0 * COLUMNS["dist"]
    at.file.close()
    np.testing.assert_array_equal(values(path, "dist"), COLUMNS["dist"])


def test_several_groups_and_tables_are_named(tmp_path: Path) -> None:
    path = tmp_path / "stars.h5"
    for group in ("north", "south"):
        write(path, group).file.close()
    with pytest.raises(UserError, match=r"columns in 2 places, north, south: expected them at the"):
        open_table(path)
    rows = np.zeros(2, [("l", float), ("dist", float)])
    with h5py.File(path, "a") as file:
        file["north/rows"] = rows
        file["notes"] = np.zeros(3, [("who", "S3")])
    assert set(units(path)) == {"l", "dist"}
    with h5py.File(path, "a") as file:
        file["south/rows"] = rows
    with pytest.raises(UserError, match=r"columns in 2 places, north/rows, south/rows: expected"):
        open_table(path)


def test_a_link_in_a_group_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stars.h5"
    at = write(path, "stars")
    at["b"] = h5py.ExternalLink("other.h5", "b")
    at.file.close()
    with pytest.raises(UserError, match=r"b is a link to another file, other\.h5; put a copy"):
        open_table(path)


@pytest.mark.parametrize("unit", ["kpc", b"kpc", ["kpc"], np.array([b"kpc"])])
def test_units_of_a_dataset(tmp_path: Path, unit: Any) -> None:
    path = tmp_path / "stars.h5"
    at = write(path)
    at["dist"].attrs["units"] = unit
    at.file.close()
    assert units(path) == {"l": "", "dist": "kpc"}


def test_units_in_one_list(tmp_path: Path) -> None:
    path = tmp_path / "stars.h5"
    write(path, units=["kpc", "deg"], columns=["dist", "l"]).file.close()
    assert units(path) == {"l": "deg", "dist": "kpc"}
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows"] = np.zeros(2, [("l", float), ("dist", float)])
        file["rows"].attrs["units"] = ["deg", "kpc"]
    assert units(tmp_path / "rows.h5") == {"l": "deg", "dist": "kpc"}


def test_a_list_of_units_without_names_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    """Groups have no order of their datasets."""
    path = tmp_path / "stars.h5"
    at = write(path, units=["deg", "kpc"])
    at.file.close()
    with pytest.raises(UserError, match=r"/ has 2 units in one attribute, and 0 names that they"):
        open_table(path)
    with h5py.File(path, "a") as file:
        file["l"].attrs["unit"], file["dist"].attrs["unit"] = "deg", "pc"
    assert units(path) == {"l": "deg", "dist": "pc"}
