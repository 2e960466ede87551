"""What is wrong is said in one line that names the file, and nothing is left behind."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.config import DataConfig
from dustmap.errors import UserError
from dustmap.runs import places_of
from dustmap.sky.catalogs import card_named, ingest, read_catalog, read_places
from dustmap.sky.systems import system_named
from tests.sky.catalogs.files import FORMATS, star_columns, write

A_V = system_named("A_V")
#: One format that keeps types and one that does not.
TWO = ("fits", "csv")


def plain(count: int = 7) -> Table:
    return Table(star_columns(count), meta={})


def refused(path: Path, words: str) -> None:
    """Both ways to read refuse the file, in one line, and the directory is as it was."""
    before = sorted(path.parent.rglob("*"))
    for read in (
        lambda: read_catalog(path, system=A_V),
        lambda: ingest(path, "generic", path.parent / "stars.zarr", system=A_V),
    ):
        with pytest.raises(UserError) as caught:
            read()
        message = str(caught.value)
        assert words in message
        assert str(path) in message
        assert "\n" not in message
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize("format_name", FORMATS)
def test_missing_columns(tmp_path: Path, format_name: str) -> None:
    table = plain()
    table.rename_column("extinction_error", "sigma")
    path = write(tmp_path, format_name, table)
    refused(
        path,
        "missing extinction_error (card generic) for extinctions; or extinction, "
        "extinction_error_lower, extinction_error_upper; or extinction_p16, extinction_p50, "
        "extinction_p84; the other columns, closest first, are sigma; name it, "
        "such as --column extinction_error=sigma or [data.columns] extinction_error",
    )


def test_a_column_of_errors_is_not_taken_for_one_of_values(tmp_path: Path) -> None:
    table = plain()
    table.rename_columns(["extinction", "extinction_error"], ["EJK", "e_EJK"])
    path = write(tmp_path, "csv", table)
    refused(path, 'such as --column extinction=EJK or [data.columns] extinction = "EJK"')
    table.rename_column("EJK", "extinction")
    table.remove_column("e_EJK")
    path.unlink()
    table["EJK"] = 0.1
    refused(write(tmp_path, "csv", table), "such as --column extinction_error=NAME or")


@pytest.mark.parametrize("names", [("A_G", "A_Ks"), ("ext_g", "e_ext_g"), ("EBV2", "E(BP-RP)")])
def test_extinctions_are_not_taken_for_distances(tmp_path: Path, names: tuple[str, str]) -> None:
    table = plain()
    table.remove_column("distance_pc")
    table[names[0]] = table[names[1]] = 0.1
    refused(write(tmp_path, "csv", table), "missing distance (card generic) for distances; or")
    refused(tmp_path / "stars.csv", "such as --column distance=NAME or")
    table["r_med"] = 100.0
    refused(write(tmp_path, "fits", table), "such as --column distance=r_med or")


def test_extinctions_without_errors(tmp_path: Path) -> None:
    """The advice of the error works."""
    table = plain()
    table.remove_column("extinction_error")
    path = write(tmp_path, "csv", table)
    refused(path, "a card of your own gives all extinctions the same: [constants] extinction_error")
    card = tmp_path / "card.toml"
    card.write_text('inherits = "generic"\n[constants]\nextinction_error = 0.1\n')
    assert set(read_catalog(path, card, system=A_V).stars.extinction_error) == {0.1}


def test_advice_names_no_column_where_all_have_a_use(tmp_path: Path) -> None:
    table = plain()
    table.remove_column("extinction_error")
    refused(
        write(tmp_path, "csv", table), "extinction_p84; all other columns of the table are taken; "
    )


def test_a_column_of_the_name_that_the_card_gives_it_comes_first(tmp_path: Path) -> None:
    (tmp_path / "card.toml").write_text(
        'inherits = "generic"\npositions = ["galactic"]\n[columns.l]\nnames = ["glon_deg"]\n'
    )
    table = plain()
    table["dec"] = table["glon"] = 0.0
    with pytest.raises(UserError, match=r"looked for as l = glon_deg; .* such as --column l=l or"):
        read_catalog(write(tmp_path, "csv", table), tmp_path / "card.toml", system=A_V)


def test_of_ways_that_lack_columns_the_one_that_the_user_names_comes_first(tmp_path: Path) -> None:
    """The median of percentiles has the name of a distance, too."""
    card = card_named("generic", columns={"distance": "FOO"})
    with pytest.raises(UserError, match=r"missing distance \(card .* looked for as distance = FOO"):
        read_catalog(write(tmp_path, "csv", plain()), card, system=A_V)


@pytest.mark.parametrize("kiloparsecs", [0.3, 8.0])
def test_places_in_kiloparsecs_are_not_read_as_parsecs_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kiloparsecs: float
) -> None:
    column = np.full(30, kiloparsecs)
    table = Table({"l": np.arange(30.0), "b": np.zeros(30), "distance": column})
    path = write(tmp_path, "csv", table)
    if kiloparsecs < 1.0:
        with pytest.raises(
            UserError, match=r"half of 30 places are nearer than 1\.3 pc, .*\[kpc\]"
        ):
            places_of(DataConfig(), path, "generic")
    else:
        places_of(DataConfig(), path, "generic")
        assert "half of 30 places are within 8 pc: their distances are taken for pc" in caplog.text
    card = card_named("generic", columns={"distance": "distance [kpc]"})
    assert places_of(DataConfig(), path, card).distances.median[0] == 1000.0 * kiloparsecs


def test_of_ways_that_lack_columns_the_likeliest_is_named(tmp_path: Path) -> None:
    table = plain()
    table.rename_columns(["distance_pc"], ["plx_mas"])
    table["plx_err"] = 0.1
    path = write(tmp_path, "csv", table)
    refused(path, "missing parallax, parallax_error (card generic) for distances")
    refused(path, "such as --column parallax=plx_mas or")
    table.rename_columns(["plx_mas", "plx_err"], ["DM", "e_DM"])
    (tmp_path / "moduli").mkdir()
    path = write(tmp_path / "moduli", "csv", table)
    refused(path, "of distance moduli make distances first, 10^(modulus")


@pytest.mark.parametrize("own", ["", "e_plx_hip2"])
def test_errors_of_another_column_are_not_proposed(tmp_path: Path, own: str) -> None:
    table = plain()
    table.rename_columns(["distance_pc"], ["plx_hip2"])
    table["plx_gaia"], table["plx_gaia_error"] = 1.0, 0.1
    if own:
        table[own] = 0.1
    path = write(tmp_path, "csv", table)
    card = card_named("generic", columns={"parallax": "plx_hip2"})
    with pytest.raises(UserError, match=f"such as --column parallax_error={own or 'NAME'} or"):
        read_catalog(path, card, system=A_V)


def test_of_many_columns_the_closest_are_named(tmp_path: Path) -> None:
    """In few words."""
    table = plain()
    for i in range(100):
        table[f"column{i}"] = 1.0
    table.rename_columns(["l", "b"], ["lon_deg", "lat_deg"])
    with pytest.raises(UserError, match=r"closest first, are l\w+_deg, l\w+_deg, col") as caught:
        read_catalog(write(tmp_path, "csv", table), system=A_V)
    assert ", ...; name it, such as --column l=l" in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def worse(name: str, value: float) -> Callable[[Table], None]:
    def spoil(table: Table) -> None:
        table[name][4] = value

    return spoil


@pytest.mark.parametrize("format_name", TWO)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (worse("l", np.nan), "l is not finite in row 4"),
        (worse("b", 91.0), "b is not between -90 and 90 degrees in row 4"),
        (worse("distance_pc", np.inf), "distance is not finite in row 4"),
        (worse("distance_pc", 0.0), "distance is not > 0 in row 4"),
        (worse("distance_pc", -1.0), "distance is not > 0 in row 4"),
        (worse("extinction", np.nan), "extinction is not finite in row 4"),
        (worse("extinction_error", -0.1), "extinction_error is not > 0 in row 4"),
        (worse("extinction_error", 0.0), "extinction_error is not > 0 in row 4"),
        (worse("l", -999.0), "l is not between -540 and 540 degrees in row 4"),
        (worse("l", 1e9), "l is not between -540 and 540 degrees in row 4"),
        (worse("distance_pc", 1e300), "distance is beyond 1e+07 pc in row 4"),
        (worse("extinction", 1e300), "extinction is beyond 1000 mag in row 4"),
        (worse("extinction_error", 1e-30), "extinction_error is below 1e-09 mag in row 4"),
        (worse("extinction_error", 1e300), "extinction_error is above 1e+06 mag in row 4"),
    ],
)
def test_a_bad_row(
    tmp_path: Path, format_name: str, spoil: Callable[[Table], None], words: str
) -> None:
    table = plain()
    spoil(table)
    path = write(tmp_path, format_name, table)
    refused(path, words)
    catalog = read_catalog(path, system=A_V, invalid="drop")
    assert catalog.counts.invalid == {words.removesuffix(" in row 4"): 1}
    assert catalog.counts.kept == len(catalog.stars) == 6


@pytest.mark.parametrize("text", ["n/a", "null", ""])
def test_text_in_the_place_of_a_number_is_quoted(tmp_path: Path, text: str) -> None:
    """With its row in its own file."""
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    rows = ["l,b,distance_pc,extinction,extinction_error", *["30,5,100,0.1,0.01"] * 3]
    good.write_text("\n".join(rows) + "\n")
    bad.write_text("\n".join([*rows, f"30,5,100,{text},0.01"]) + "\n")
    quoted = f'"{text}"' if text else "nothing"
    words = rf"bad\.csv: extinction is not finite in row 3 .*, where the table has {quoted}; "
    with pytest.raises(UserError, match=words):
        read_catalog([good, bad], system=A_V)


@pytest.mark.parametrize(
    ("parallax", "words"),
    [
        (-999.0, "parallax is more than 100 errors below 0 in row 4"),
        (9999.0, "parallax is above 770 mas in row 4"),
        (-49.0, ""),
        (772.0, ""),
    ],
)
def test_parallaxes_that_are_sentinels(tmp_path: Path, parallax: float, words: str) -> None:
    """Noise is data, however unlikely."""
    table = plain()
    table.rename_column("distance_pc", "parallax")
    table["parallax_error"] = np.full(7, 0.5)
    table["parallax"].unit = table["parallax_error"].unit = "mas"
    worse("parallax", parallax)(table)
    path = write(tmp_path, "fits", table)
    if words:
        refused(path, words)
    kept = read_catalog(path, system=A_V, invalid="drop").counts.kept
    assert kept == (6 if words else 7)


@pytest.mark.parametrize(
    ("error", "words"),
    [(1e-300, "parallax_error is below 1e-09 mas"), (1e160, "parallax_error is above 1e+06 mas")],
)
def test_errors_of_parallaxes_that_none_has(tmp_path: Path, error: float, words: str) -> None:
    table = plain(40)
    table["parallax"], table["parallax_error"] = np.full(40, 5.0), np.full(40, 0.1)
    table["parallax_error"][3] = error
    table.remove_columns([name for name in table.colnames if name.startswith("distance")])
    refused(write(tmp_path, "fits", table), words)


@pytest.mark.parametrize("what", ["extinction", "distance"])
def test_percentiles_are_no_errors(tmp_path: Path, what: str) -> None:
    table, rng = plain(60), np.random.default_rng(0)
    table.remove_columns([name for name in table.colnames if name.startswith(what)])
    value, unit = (0.3, "mag") if what == "extinction" else (300.0, "pc")
    middle = value * rng.uniform(0.5, 2.0, 60)
    for end, factor in (("", 1.0), ("_error_lower", 0.8), ("_error_upper", 1.3)):
        table[what + end] = factor * middle
        table[what + end].unit = unit
    words = f"60 of 60 rows, as it is of percentiles and not of errors: name them {what}_p50"
    refused(write(tmp_path, "fits", table), words)
    for end in ("_error_lower", "_error_upper"):
        table[what + end] = 0.1 * middle
    path = write(tmp_path, "fits", table, "right")
    assert read_catalog(path, system=A_V).counts.kept == 60


def test_sentinels_are_dropped_whatever_the_system(tmp_path: Path) -> None:
    """-999 in E(B-V) is -3097 in A_V, which no star has."""
    table = plain(40)
    table["extinction"][7] = -999.0
    table.rename_columns(["extinction", "extinction_error"], ["ebv", "ebv_error"])
    path = write(tmp_path, "fits", table)
    catalog = read_catalog(path, system=A_V, invalid="drop")
    assert dict(catalog.counts.invalid) == {"extinction is beyond 1000 mag": 1}
    assert catalog.counts.kept == 39


def test_positions_beyond_all_numbers(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("x,y,z,extinction,extinction_error\n1e200,2,3,0.1,0.1\n")
    refused(path, "the distance of x, y, z is beyond 1e+07 pc in row 0")


def test_a_negative_extinction_is_data(tmp_path: Path) -> None:
    table = plain()
    table["extinction"][:] = -0.1
    assert len(read_catalog(write(tmp_path, "fits", table), system=A_V).stars) == 7


@pytest.mark.parametrize("format_name", TWO)
def test_duplicated_identifiers(tmp_path: Path, format_name: str) -> None:
    table = plain()
    table["source_id"][[5, 6]] = table["source_id"][2]
    path = write(tmp_path, format_name, table)
    twice = table["source_id"][2]
    refused(path, f"2 stars have the source_id of an earlier one, such as {twice}")
    catalog = read_catalog(path, system=A_V, invalid="drop")
    np.testing.assert_array_equal(catalog.stars.source_id, table["source_id"][:5])
    assert (catalog.counts.duplicates, catalog.counts.kept) == (2, 5)


def test_a_missing_identifier(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("source_id,l,b,distance,extinction,extinction_error\n,1,2,3,0.1,0.1\n")
    refused(path, "source_id is missing in row 0")
    refused(path, "or have rows counted: --column source_id=none")


@pytest.mark.parametrize("format_name", FORMATS)
def test_no_row_left_after_cuts(tmp_path: Path, format_name: str) -> None:
    table = plain()
    table["ruwe"], table["parallax"] = np.linspace(1.3, 2.5, 7), 1.0
    table["parallax_error"] = 0.9
    for part, shift in (("_lower", -0.1), ("", 0.0), ("_upper", 0.1)):
        table[f"azero_gspphot{part}"] = 0.3 + shift
    path = write(tmp_path, format_name, table)
    with pytest.raises(UserError) as caught:
        ingest(path, "gaia-gspphot", tmp_path / "stars.zarr")
    assert str(caught.value) == (
        f"{path}: no star is left (rows read: 7; cut, not ruwe < 1.4: 6; "
        f"cut, not parallax / parallax_error > 5: 1; kept: 0)"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("format_name", FORMATS)
def test_no_rows_at_all(tmp_path: Path, format_name: str) -> None:
    if format_name == "blanks":
        (tmp_path / "stars.txt").write_text(" ".join(plain().colnames) + "\n")
        path = tmp_path / "stars.txt"
    else:
        path = write(tmp_path, format_name, plain()[:0])
    refused(path, "no star is left (rows read: 0; kept: 0)")


@pytest.mark.parametrize("format_name", FORMATS)
def test_truncated_and_text_and_empty(tmp_path: Path, format_name: str) -> None:
    table = Table(star_columns(4000))
    path = write(tmp_path, format_name, table)
    data = path.read_bytes()
    cut = len(data) // 2
    if format_name in ("csv", "ecsv", "blanks"):
        cut = data.rfind(b"\n", 0, cut) + 12
    path.write_bytes(data[:cut])
    refused(path, str(path))
    path.write_bytes(b"")
    refused(path, "the file is empty")
    path.unlink()
    words = table[:5]
    words["extinction"] = ["0.1", "much", "0.3", "0.4", "0.5"]
    refused(write(tmp_path, format_name, words), "column extinction: expected numbers, got")


def test_the_second_file_is_bad_after_the_first_was_read(tmp_path: Path) -> None:
    first = write(tmp_path, "fits", plain(), "first")
    other = plain()
    other["source_id"] += 1
    other["extinction_error"][3] = -1.0
    second = write(tmp_path, "fits", other, "second")
    with pytest.raises(UserError, match=r"second.fits: extinction_error is not > 0 in row 3"):
        ingest([first, second], "generic", tmp_path / "new" / "stars.zarr", system=A_V)
    assert not list((tmp_path / "new").iterdir())


def test_an_existing_store_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "fits", plain())
    ingest(path, "generic", tmp_path / "stars.zarr", system=A_V)
    with pytest.raises(FileExistsError, match="--overwrite"):
        ingest(path, "generic", tmp_path / "stars.zarr", system=A_V)
    ingest(path, "generic", tmp_path / "stars.zarr", system=A_V, overwrite=True)
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "stars.zarr"}


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = write(tmp_path, "fits", plain())
    monkeypatch.setattr("dustmap.sky.stars.StarStoreWriter.append", full)
    with pytest.raises(OSError, match=r"No space left on device, writing: .*stars.zarr"):
        ingest(path, "generic", tmp_path / "stars.zarr", system=A_V)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_no_such_preset_policy_and_path(tmp_path: Path) -> None:
    path = write(tmp_path, "fits", plain())
    with pytest.raises(UserError, match="the card generic has default, none"):
        read_catalog(path, system=A_V, cuts="strict")
    with pytest.raises(UserError, match='expected "error" or "drop"'):
        read_catalog(path, system=A_V, invalid="ignore")
    with pytest.raises(UserError, match="at least one catalog"):
        read_catalog([], system=A_V)


def test_places_without_a_direction(tmp_path: Path) -> None:
    """Rows without one have no answers; a table of none is refused, as impossible ones are."""
    table = plain()
    table["l"][2] = table["distance_pc"][4] = np.nan
    places = read_places(write(tmp_path, "fits", table))
    others = np.setdiff1d(np.arange(len(table)), [2, 4])
    np.testing.assert_array_equal(places.l, np.asarray(table["l"])[others])
    np.testing.assert_array_equal(places.distances.median, np.asarray(table["distance_pc"])[others])
    assert (len(places), places.missing) == (len(others), 2)
    filled = places.filled({"twice": 2.0 * places.l})["twice"]
    np.testing.assert_array_equal(filled, 2.0 * np.asarray(table["l"] + 0.0 * table["distance_pc"]))
    table["b"][5] = 91.0
    with pytest.raises(UserError, match=r"b is not between -90 and 90 degrees in row 5"):
        read_places(write(tmp_path, "parquet", table))
    table["distance_pc"] = np.nan
    with pytest.raises(
        UserError, match=r"place; l is .* in 1 of them, b .* in 1 of them, distance .* 7 of"
    ):
        read_places(write(tmp_path, "ecsv", table))
    with pytest.raises(
        UserError, match=r"no row is a place; b .* in 1 of them, distance is .* 3 of"
    ):
        read_places(write(tmp_path, "hdf5", table[3:6]))
    table.remove_column("distance_pc")
    with pytest.raises(UserError, match=r"missing distance \(card generic\) for distances"):
        read_places(write(tmp_path, "csv", table))


def test_impossible_places_have_no_answers_where_the_card_drops_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dias et al. (2021) print errors of distances as whole pc: those of the nearest are 0."""
    table = plain()
    table["distance_error"] = 5.0
    table["distance_error"][3], table["b"][5], table["distance_pc"][6] = 0.0, 91.0, np.nan
    table["l"][6] = 999.0  # of a row that has no distance anyway
    path = write(tmp_path, "fits", table)
    with pytest.raises(UserError, match="b is not between -90 and 90 degrees in row 5"):
        read_places(path, invalid="error")
    places = read_places(path, invalid="drop")
    np.testing.assert_array_equal(places.rows, np.setdiff1d(np.arange(len(table)), [3, 5, 6]))
    reasons = [record.getMessage() for record in caplog.records]
    assert any("distance_error is not > 0 in 1 rows, such as row 3" in each for each in reasons)
    assert any(
        "b is not between -90 and 90 degrees in 1 rows, such as row 5" in each for each in reasons
    )
    table["distance_error"] = -1.0
    with pytest.raises(UserError, match=r"no row is a place; .*distance_error is not > 0 in"):
        read_places(write(tmp_path, "parquet", table), invalid="drop")


def test_most_identifiers_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dustmap.sky.catalogs._catalog.PART", 16)
    table = plain(200)
    table["source_id"] = 5
    with pytest.raises(UserError, match="is that column the right one"):
        ingest(write(tmp_path, "fits", table), "generic", tmp_path / "s.zarr", system=A_V)


def test_places_of_a_table_with_too_many_columns(tmp_path: Path) -> None:
    """All columns are kept beside the answers, which takes minutes for 10⁵ of them."""
    path = tmp_path / "wide.csv"
    others = ",".join(f"c{number}" for number in range(5000))
    path.write_text(f"l,b,distance_pc,{others}\n10,5,100,{',' * 4999}\n")
    with pytest.raises(UserError, match=r"at most 5,000 columns.* got 5,003; select"):
        read_places(path)


@pytest.mark.parametrize("format_name", ["csv", "fits", "parquet", "hdf5", "votable binary2"])
def test_identifiers_of_text_need_not_be_read(tmp_path: Path, format_name: str) -> None:
    table = plain()
    table["source_id"] = [f"KIC {row}" for row in range(len(table))]
    path = write(tmp_path, format_name, table)
    refused(path, "column source_id: expected whole numbers, got ")
    refused(path, '--column source_id=none, or [data.columns] source_id = "none"')
    card = card_named("generic", {"source_id": "none"})
    assert read_catalog(path, card, system=A_V).stars.source_id.tolist() == list(range(len(table)))


def test_words_in_other_columns_name_no_identifiers(tmp_path: Path) -> None:
    table = plain()
    table["extinction"] = ["0.1"] * (len(table) - 1) + ["?"]
    path = write(tmp_path, "csv", table)
    with pytest.raises(UserError, match=r"column extinction: .*name another column$"):
        read_catalog(path, system=A_V)
