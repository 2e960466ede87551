"""Catalogs: what is read, and what is refused with which words."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.sky import StarTable, read_stars, write_stars


def stars(count: int = 4, system: str = "A_V") -> StarTable:
    rng = np.random.default_rng(3)
    return StarTable(
        source_id=np.arange(count) + 2**60,
        l=rng.uniform(0, 360, count),
        b=rng.uniform(-90, 90, count),
        distance=rng.uniform(10, 300, count),
        extinction=rng.normal(0.3, 0.2, count),
        extinction_error=rng.uniform(0.01, 0.05, count),
        system=system,
    )


def assert_same(a: StarTable, b: StarTable) -> None:
    assert a.system == b.system
    for name in ("source_id", "l", "b", "distance", "extinction", "extinction_error"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def plain_table() -> Table:
    expected = stars()
    return Table(
        {
            "source_id": expected.source_id,
            "l": expected.l,
            "b": expected.b,
            "distance_pc": expected.distance,
            "extinction": expected.extinction,
            "extinction_error": expected.extinction_error,
        }
    )


def test_a_written_catalog_reads_back_exactly(tmp_path: Path) -> None:
    write_stars(tmp_path / "stars.fits", stars())
    assert_same(read_stars([tmp_path / "stars.fits"], "A_V"), stars())


@pytest.mark.parametrize("name", ["stars.csv", "stars.ecsv", "stars.fits"])
def test_every_format_gives_the_same_stars(tmp_path: Path, name: str) -> None:
    plain_table().write(tmp_path / name)
    assert_same(read_stars([tmp_path / name], "A_V"), stars())


def test_units_of_the_file_are_converted(tmp_path: Path) -> None:
    table = plain_table()
    table["distance_pc"] = table["distance_pc"] / 1000
    table["distance_pc"].unit = "kpc"
    table["l"] = np.radians(table["l"])
    table["l"].unit = "rad"
    table.write(tmp_path / "stars.fits")
    read = read_stars([tmp_path / "stars.fits"], "A_V")
    np.testing.assert_allclose(read.distance, stars().distance, rtol=1e-14)
    np.testing.assert_allclose(read.l, stars().l, rtol=1e-14)


def test_several_files_are_one_catalog(tmp_path: Path) -> None:
    write_stars(tmp_path / "a.fits", stars())
    plain_table().write(tmp_path / "b.csv")
    both = read_stars([tmp_path / "a.fits", tmp_path / "b.csv"], "A_V")
    assert_same(both[np.arange(4)], stars())
    assert_same(both[np.arange(8) >= 4], stars())


def test_positions_follow_the_galactic_axes() -> None:
    table = replace(
        stars(),
        l=np.array([0.0, 90.0, 0.0, 180.0]),
        b=np.array([0.0, 0.0, 90.0, 0.0]),
        distance=np.array([10.0, 20.0, 30.0, 40.0]),
    )
    expected = [[10, 0, 0], [0, 20, 0], [0, 0, 30], [-40, 0, 0]]
    np.testing.assert_allclose(table.positions(), expected, atol=1e-12)


def refusal(tmp_path: Path, table: Table, name: str = "stars.fits") -> str:
    table.write(tmp_path / name)
    with pytest.raises(ValueError, match="stars") as caught:
        read_stars([tmp_path / name], "A_V")
    return str(caught.value)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("extinction", np.nan, "column extinction: 1 of 4 rows are not finite (first at row 2"),
        ("l", np.inf, "column l: 1 of 4 rows are not finite"),
        ("distance_pc", 0.0, "column distance_pc: 1 of 4 rows are not > 0"),
        ("extinction_error", -0.1, "column extinction_error: 1 of 4 rows are not > 0"),
        ("extinction_error", 0.0, "column extinction_error: 1 of 4 rows are not > 0"),
        ("b", 91.0, "column b: 1 of 4 rows are not between -90 and 90 degrees"),
    ],
)
def test_rows_that_cannot_be_used_are_counted(
    tmp_path: Path, column: str, value: float, words: str
) -> None:
    table = plain_table()
    table[column][2] = value
    message = refusal(tmp_path, table)
    assert words in message
    assert str(tmp_path / "stars.fits") in message


def test_masked_entries_are_not_finite(tmp_path: Path) -> None:
    table = Table(plain_table(), masked=True)
    table["extinction"].mask[1] = True
    assert "column extinction: 1 of 4 rows are not finite" in refusal(tmp_path, table, "stars.ecsv")


def test_missing_columns_are_named(tmp_path: Path) -> None:
    table = plain_table()
    table.remove_columns(["b", "extinction_error"])
    words = "missing b, extinction_error; the columns there are source_id, l, distance_pc"
    assert words in refusal(tmp_path, table)


def test_columns_must_be_numbers_in_a_fitting_unit(tmp_path: Path) -> None:
    table = plain_table()
    table["distance_pc"].unit = "s"
    assert "column distance_pc: expected numbers in pc" in refusal(tmp_path, table)
    table["distance_pc"] = ["near"] * 4
    assert "column distance_pc: expected numbers in pc" in refusal(tmp_path, table, "stars.csv")


def test_identifiers_must_be_whole_numbers(tmp_path: Path) -> None:
    table = plain_table()
    table["source_id"] = [0.5] * 4
    assert "column source_id: expected whole numbers" in refusal(tmp_path, table)


def test_the_extinction_system_must_agree(tmp_path: Path) -> None:
    write_stars(tmp_path / "stars.fits", stars(system="A_G"))
    with pytest.raises(ValueError, match=r"A_G by the file's header and A_V by data\.system"):
        read_stars([tmp_path / "stars.fits"], "A_V")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.fits: there is no such catalog"):
        read_stars([tmp_path / "none.fits"], "A_V")
    with pytest.raises(ValueError, match=r"stars\.txt: expected a catalog that ends in \.fits"):
        read_stars([tmp_path / "stars.txt"], "A_V")


def test_an_empty_catalog_is_refused(tmp_path: Path) -> None:
    assert "no rows" in refusal(tmp_path, plain_table()[:0])


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        replace(stars(), l=np.zeros(3))


def test_an_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "stars.fits"
    write_stars(path, stars())
    with pytest.raises(FileExistsError, match="exists already"):
        write_stars(path, stars(5))
    write_stars(path, stars(5), overwrite=True)
    assert len(read_stars([path], "A_V")) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["stars.fits"]
