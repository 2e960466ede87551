"""The star store holds what `read_catalog` reads; places; counts and provenance."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from astropy import units as u
from astropy.table import Table

from dustmap.sky.catalogs import Counts, ingest, read_catalog, read_places
from dustmap.sky.catalogs._catalog import IdentifierLog, repeated
from dustmap.sky.catalogs._systems import fingerprint
from dustmap.sky.stars import (
    SKY_ORDER,
    ParallaxDistances,
    StarTable,
    open_star_store,
)
from dustmap.sky.stars._store import sky_keys
from dustmap.sky.systems import system_named
from tests.sky.catalogs.files import FORMATS, star_columns, write

A_V = system_named("A_V")


def assert_same(a: StarTable, b: StarTable) -> None:
    assert a.system == b.system
    for name in ("source_id", "l", "b", "extinction", "extinction_error"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for name, values in a.distances.columns().items():
        np.testing.assert_array_equal(values, b.distances.columns()[name])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dustmap.sky.catalogs._selection.ROWS", 7)
    monkeypatch.setattr("dustmap.sky.stars._store.CHUNK", 25)
    monkeypatch.setattr("dustmap.sky.catalogs._catalog.PART", 16)
    monkeypatch.setattr("dustmap.sky.stars._store.ROWS", 4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("format_name", ["fits", "hdf5", "parquet", "votable.gz", "csv.gz"])
def test_a_store_is_the_catalog(tmp_path: Path, format_name: str) -> None:
    paths = []
    rng = np.random.default_rng(4)
    for i in range(2):
        table = Table(star_columns(60, seed=i))
        table["source_id"] = rng.integers(0, 80, 60) + 2**60
        table["distance_pc"][3 * i] = -1.0
        table["extinction_error"][[3, 5]] = np.nan
        paths.append(write(tmp_path, format_name, table, f"part{i}"))
    catalog = read_catalog(paths, system=A_V, invalid="drop")
    store = tmp_path / "stars.zarr"
    counts = ingest(paths, "generic", store, system=A_V, invalid="drop")
    assert counts == catalog.counts
    assert counts.rows == 120
    assert counts.duplicates > 10
    assert counts.kept == len(np.unique(catalog.stars.source_id))
    in_order = np.argsort(sky_keys(catalog.stars), kind="stable")
    assert_same(open_star_store(store).read(), catalog.stars[in_order])
    assert open_star_store(store).attributes["order"] == dict(SKY_ORDER)
    attributes = open_star_store(store).attributes["catalog"]
    assert attributes["counts"] == counts.as_dict()
    assert json.loads(json.dumps(attributes)) == json.loads(json.dumps(catalog.provenance))
    assert {entry.name for entry in tmp_path.iterdir()} == {
        store.name,
        *(path.name for path in paths),
    }


@pytest.mark.usefixtures("small_chunks")
def test_the_learned_prior_is_that_of_the_stars_that_are_kept(tmp_path: Path) -> None:
    table, rng = Table(star_columns(300)), np.random.default_rng(1)
    table["parallax"] = 1e3 / table["distance_pc"].value * u.mas
    table["parallax_error"] = 0.05 * table["parallax"]
    table.remove_column("distance_pc")
    again = table[np.concatenate([np.arange(300), rng.integers(0, 300, 90)])]
    once, twice = write(tmp_path, "csv", table, "once"), write(tmp_path, "csv", again, "twice")
    expected = read_catalog(once, system=A_V).provenance["distance_prior"]
    catalog = read_catalog(twice, system=A_V, invalid="drop")
    assert catalog.counts.duplicates == 90
    assert catalog.provenance["distance_prior"] == expected
    assert expected["stars"] == catalog.counts.kept == 300
    ingest(twice, "generic", tmp_path / "stars.zarr", system=A_V, invalid="drop")
    store = open_star_store(tmp_path / "stars.zarr")
    assert store.attributes["catalog"]["distance_prior"] == expected


@pytest.mark.usefixtures("small_chunks")
def test_row_numbers_go_on_over_files_and_chunks(tmp_path: Path) -> None:
    table = Table(star_columns(30))
    table.remove_column("source_id")
    table["b"][4] = 100.0
    paths = [write(tmp_path, "csv", table, name) for name in ("one", "two")]
    catalog = read_catalog(paths, system=A_V, invalid="drop")
    expected = np.delete(np.arange(60), [4, 34])
    np.testing.assert_array_equal(catalog.stars.source_id, expected)
    assert catalog.provenance["identifiers"] == "row"
    assert catalog.counts.invalid == {"b is not between -90 and 90 degrees": 2}


def test_provenance(tmp_path: Path) -> None:
    path = write(tmp_path, "fits", star_columns())
    found = read_catalog(path, system=system_named("E(B-V)")).provenance
    file = found["files"][0]
    assert file["name"] == path.name
    assert file["bytes"] == path.stat().st_size
    assert file["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file["extinction_factor"] == pytest.approx(1 / 3.1)
    assert file["columns"]["distance"] == "distance_pc [pc]"
    assert (found["card"], found["system"]) == ("generic", "E(B-V)")
    assert found["cuts"] == {"preset": "default", "rules": []}


def test_large_files_are_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dustmap.sky.catalogs._systems.HASHED_BYTES", 3)
    path = tmp_path / "large"
    path.write_bytes(b"four")
    assert set(fingerprint(path)) == {"name", "bytes", "modified"}


def test_counts_add_up_and_read_well() -> None:
    counts = Counts(10, {"a < 1": 3, "b > 2": 0}, {"l is not finite": 1}, 2)
    assert counts.kept == 4
    assert counts.lines() == [
        "rows read: 10",
        "cut, not a < 1: 3",
        "cut, not b > 2: 0",
        "invalid, l is not finite: 1",
        "duplicates: 2",
        "kept: 4",
    ]


@pytest.mark.parametrize("part", [4, 16, 10**6])
def test_repeated_identifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr("dustmap.sky.catalogs._catalog.PART", part)
    identifiers = np.random.default_rng(part).permutation(np.repeat(np.arange(-50, 50), 2))[:150]
    seen: set[int] = set()
    expected = []
    for row, identifier in enumerate(identifiers.tolist()):
        if identifier in seen:
            expected.append(row)
        seen.add(identifier)
    with (tmp_path / "log").open("w+b") as file:
        log = IdentifierLog(file)
        for piece in np.array_split(identifiers, 7):
            log.append(piece)
        np.testing.assert_array_equal(log.repeated(), expected)
        np.testing.assert_array_equal(log.at(np.array([3, 149])), identifiers[[3, 149]])
    np.testing.assert_array_equal(repeated(identifiers), expected)


def test_sorted_identifiers_have_no_duplicates(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as file:
        log = IdentifierLog(file)
        log.append(np.arange(5))
        log.append(np.arange(5, 9))
        assert log.repeated().size == 0
        log.append(np.array([8]))
        assert log.repeated().tolist() == [9]


@pytest.mark.parametrize("format_name", FORMATS)
def test_places_need_no_extinctions(tmp_path: Path, format_name: str) -> None:
    table = Table(star_columns())
    table.remove_columns(["extinction", "extinction_error"])
    table["note"] = np.arange(7) * 1.5
    places = read_places(write(tmp_path, format_name, table))
    np.testing.assert_allclose(places.l, table["l"])
    np.testing.assert_allclose(places.distances.median, table["distance_pc"])
    assert set(places.table.colnames) >= set(table.colnames)
    np.testing.assert_array_equal(places.table["source_id"], table["source_id"])
    np.testing.assert_array_equal(places.table["note"], table["note"])
    assert len(places) == len(places.table) == 7


def test_gaias_own_files_are_ecsv_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "GaiaSource_000000-003111.csv"
    path.write_text(
        "# %ECSV 1.0\n# ---\n# delimiter: ','\n# datatype:\n"
        "# - {name: source_id, datatype: int64}\n"
        "# - {name: l, unit: rad, datatype: float64}\n"
        "# - {name: b, unit: rad, datatype: float64}\n"
        "# - {name: parallax, unit: mas, datatype: float64}\n"
        "# - {name: parallax_error, unit: mas, datatype: float64}\n"
        "# - {name: ag_gspphot, unit: mag, datatype: float64}\n"
        "source_id,l,b,parallax,parallax_error,ag_gspphot\n"
        f"{2**62 + 1},1.0,0.5,2.0,0.1,null\n4,2.0,0.25,-1.0,0.2,0.5\n"
    )
    places = read_places(path)
    np.testing.assert_allclose(places.l, np.degrees([1.0, 2.0]))
    assert places.table["source_id"].tolist() == [2**62 + 1, 4]
    assert places.table["ag_gspphot"].mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "# a remark\nl,b,distance_pc,note\n10,1,50,x\n20,2,100,\n"),
        ("a.csv", "l;b;distance_pc;note\n10;1;50;x\n20;2;100;\n"),
        ("a.tsv", "l\tb\tdistance_pc\tnote\n10\t1\t50\tx\n20\t2\t100\t\n"),
        ("a.txt", "l,b,distance_pc,note\n10,1,50,x\n20,2,100,\n"),
        ("a.txt", " l b distance_pc note\n0 10 1 50 x\n1  20   2 100 null \n"),
    ],
)
def test_places_in_text_keep_all_their_columns(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    places = read_places(tmp_path / name)
    assert places.table.colnames[-4:] == ["l", "b", "distance_pc", "note"]
    np.testing.assert_array_equal(places.table["distance_pc"], [50, 100])
    assert places.table["note"].tolist() == ["x", None]


def test_places_with_parallaxes(tmp_path: Path) -> None:
    table = Table(star_columns())
    table.remove_columns(["extinction", "extinction_error", "distance_pc"])
    table["parallax"], table["parallax_error"] = -0.1, 0.2
    places = read_places(write(tmp_path, "csv", table), parallax_zero_point=-40 * u.uas)
    assert isinstance(places.distances, ParallaxDistances)
    np.testing.assert_allclose(places.distances.parallax, -0.06)
