"""Every format of the one list: what is written is read back, and what is damaged is said."""

import base64
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from astropy.io.votable import from_table, writeto
from astropy.table import MaskedColumn, QTable, Table

from dustmap.errors import UserError
from dustmap.tables import (
    ColumnRef,
    ColumnType,
    _fits,
    _votable,
    open_table,
    read_tables,
    table_format,
    write_table,
)
from dustmap.tables._columns import translating
from dustmap.tables._formats import FORMATS

ENDINGS = [ending for each in FORMATS for ending in each.endings]


@pytest.mark.parametrize("ending", ENDINGS)
def test_lists_of_any_length(tmp_path: Path, ending: str) -> None:
    path, lists = tmp_path / f"lists{ending}", np.empty(2, object)
    lists[:] = [np.ones(1), np.ones(2)]
    table = Table({"id": [1, 2], "epochs": lists})
    try:
        write_table(path, table)
    except UserError as error:
        words = str(error)
        assert not path.exists()
    else:
        assert [len(each) for each in open_table(path).whole()["epochs"]] == [1, 2]
        return
    assert "columns epochs hold lists" in words
    assert ".parquet or .ecsv" in words
    assert ending not in (".parquet", ".pq", ".ecsv", ".fits", ".fit")


def sample() -> QTable:
    """Identifiers beyond what a float64 holds, units, text, truth values, a column with gaps."""
    return QTable(
        {
            "id": np.arange(5) + 2**60 + 1,
            "length": np.linspace(0.1, 7.3, 5) * u.pc,
            "name": ["a b", "", "0001", "-", "x"],
            "gap": MaskedColumn([1.5, 2.5, 3.5, 4.5, 5.5], mask=[False, True, False, False, False]),
        },
        meta={"EXTSYS": "A_V"},
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_written_is_read_back(tmp_path: Path, ending: str) -> None:
    table, path = sample(), tmp_path / f"t{ending}"
    write_table(path, table)
    reader = open_table(path)
    wanted = {
        ColumnRef("id"): ColumnType.INTEGER,
        ColumnRef("length"): ColumnType.NUMBER,
        ColumnRef("name"): ColumnType.TEXT,
    }
    (chunk,) = reader.chunks(10, wanted)
    np.testing.assert_array_equal(np.ma.getdata(chunk[ColumnRef("id")]), table["id"])
    np.testing.assert_allclose(chunk[ColumnRef("length")], table["length"].value, rtol=1e-15)
    assert chunk[ColumnRef("name")].tolist() == table["name"].tolist()
    bare = table_format(path).bare
    units = {column.name: column.unit for column in reader.columns}
    assert units["length"] == ("" if bare else "pc")
    assert reader.keyword("EXTSYS") == ("" if bare else "A_V")
    whole = reader.whole()
    assert whole.colnames == table.colnames
    assert whole["id"].tolist() == table["id"].tolist()
    assert bare or whole["length"].unit == u.pc


def test_masks_beside_values_are_read_in_text(tmp_path: Path) -> None:
    sample().write(tmp_path / "t.ecsv", serialize_method="data_mask")
    reader = open_table(tmp_path / "t.ecsv")
    (chunk,) = reader.chunks(10, {ColumnRef("gap"): ColumnType.NUMBER})
    assert np.isnan(chunk[ColumnRef("gap")]).tolist() == [False, True, False, False, False]


def test_labels_are_alike_in_every_format(tmp_path: Path) -> None:
    """Whole numbers beside a missing one are written with a point by pandas."""
    (tmp_path / "t.csv").write_text("survey\n1.0\n2.0\n<NA>\nDR2.0\n")
    ref = ColumnRef("survey")
    (chunk,) = open_table(tmp_path / "t.csv").chunks(10, {ref: ColumnType.LABEL})
    assert chunk[ref].tolist() == ["1", "2", "", "DR2.0"]
    Table({"survey": np.ma.array([1, 2, 3], mask=[False, False, True])}).write(tmp_path / "t.fits")
    (chunk,) = open_table(tmp_path / "t.fits").chunks(10, {ref: ColumnType.LABEL})
    assert chunk[ref].tolist() == ["1", "2", ""]


@pytest.mark.parametrize("ending", [e for e in ENDINGS if e != ".npz"])
def test_gaps_stay_gaps(tmp_path: Path, ending: str) -> None:
    write_table(tmp_path / f"t{ending}", sample())
    reader = open_table(tmp_path / f"t{ending}")
    (chunk,) = reader.chunks(10, {ColumnRef("gap"): ColumnType.NUMBER})
    np.testing.assert_array_equal(chunk[ColumnRef("gap")], [1.5, np.nan, 3.5, 4.5, 5.5])
    written = np.ma.filled(np.ma.asarray(reader.whole()["gap"]).astype(float), np.nan)
    np.testing.assert_array_equal(written, [1.5, np.nan, 3.5, 4.5, 5.5])


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, marks=pytest.mark.slow if ending != each.endings[0] else ())
        for each in FORMATS
        for ending in each.endings
    ],
)
def test_a_table_read_whole_is_written_in_every_format(tmp_path: Path, ending: str) -> None:
    """As predictions are: with all that came along, from any format into any other."""
    write_table(tmp_path / f"t{ending}", sample())
    for other in ENDINGS:
        table = read_tables(tmp_path / f"t{ending}")
        table["more"] = np.arange(5.0)
        write_table(tmp_path / f"o{other}", table, overwrite=True)
        again = read_tables(tmp_path / f"o{other}")
        assert again.colnames == table.colnames
        np.testing.assert_array_equal(again["more"], np.arange(5.0))
        assert again["id"].tolist() == table["id"].tolist()


@pytest.mark.parametrize("ending", [e for e in ENDINGS if e not in (".fits", ".fit")])
def test_letters_beyond_ascii(tmp_path: Path, ending: str) -> None:
    write_table(tmp_path / f"t{ending}", Table({"name": ["é", "ω"], "x": [1, 2]}))
    reader = open_table(tmp_path / f"t{ending}")
    (chunk,) = reader.chunks(10, {ColumnRef("name"): ColumnType.TEXT})
    assert chunk[ColumnRef("name")].tolist() == ["é", "ω"]
    assert reader.whole()["name"].tolist() == ["é", "ω"]
    with pytest.raises(UserError, match=r"column name: FITS holds ASCII .* \.ecsv"):
        write_table(tmp_path / "t.fits", reader.whole())
    assert not (tmp_path / "t.fits").exists()


def test_places_of_the_sky_in_one_column_are_written_as_their_parts(tmp_path: Path) -> None:
    table = Table({"where": SkyCoord([1.0, 2.0], [3.0, 4.0], unit="deg"), "n": [1, 2]})
    for ending in (".parquet", ".h5", ".ecsv"):
        write_table(tmp_path / f"t{ending}", table)
        reader = open_table(tmp_path / f"t{ending}")
        (chunk,) = reader.chunks(10, {ColumnRef("where.dec"): ColumnType.NUMBER})
        assert chunk[ColumnRef("where.dec")].tolist() == [3.0, 4.0]


def test_parquet_of_other_writers(tmp_path: Path) -> None:
    columns = {
        "n": pa.array([1, None, 2**62 + 1], pa.int64()),
        "t": pa.array(["0000", None, "1"]).dictionary_encode(),
        "d": pa.array([1.5, None, 2.5]).cast(pa.decimal128(5, 2)),
        "b": pa.array([True, None, False]),
        "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    table = read_tables(tmp_path / "t.parquet")
    assert table["n"].tolist() == [1, None, 2**62 + 1]
    assert table["t"].tolist() == ["0000", None, "1"]
    assert table["d"].tolist() == [1.5, None, 2.5]
    assert table["b"].tolist() == [True, None, False]
    np.testing.assert_array_equal(table["v"], np.arange(6.0).reshape(3, 2))
    write_table(tmp_path / "again.parquet", table)
    again = read_tables(tmp_path / "again.parquet")
    assert again["n"].tolist() == table["n"].tolist()
    np.testing.assert_array_equal(again["v"], table["v"])


def test_a_fault_of_ours_is_no_damage_of_the_file(tmp_path: Path) -> None:
    """An error of this package goes on as it is; what a library raises names the file."""

    def ours(error: Exception) -> None:
        # A frame of the package: what `words_of_damage` looks for.
        code = compile("raise error", _fits.__file__, "exec")
        with translating(tmp_path, "FITS"):
            exec(code, {"error": error})

    for fault in (AttributeError("x"), TypeError("x"), AssertionError(), KeyError("x")):
        with pytest.raises(type(fault)):
            ours(fault)
    with pytest.raises(UserError, match="cannot be read as FITS"):
        ours(ValueError("x"))
    with pytest.raises(UserError, match="cannot be read as FITS"), translating(tmp_path, "FITS"):
        raise TypeError("raised outside of the package")


def test_a_card_that_cannot_be_read(tmp_path: Path) -> None:
    write_table(tmp_path / "t.fits", sample())
    data = (
        (tmp_path / "t.fits")
        .read_bytes()
        .replace(b"EXTSYS  = 'A_V     '", b"EXTSYS  = 1.2.3.A_V  ")
    )
    (tmp_path / "t.fits").write_bytes(data)
    with pytest.raises(UserError, match=r"t\.fits: cannot be read as FITS"):
        open_table(tmp_path / "t.fits").keyword("EXTSYS")


def votable(rows: str, table: str = "<TABLE>", field: str = 'datatype="double"') -> str:
    return f'<VOTABLE><RESOURCE>{table}<FIELD name="l" {field}/>{rows}</TABLE></RESOURCE></VOTABLE>'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (votable("<DATA/>", '<TABLE nrows="99999999999">'), "cannot hold 99999999999 rows"),
        (votable("<DATA/>", field='datatype="int" arraysize="99999x99999"'), "cannot hold 99998"),
        (
            votable("<DATA><TABLEDATA><TR><TD>1</TD></TR></TABLEDATA></DATA>", '<TABLE nrows="2">'),
            "declares 2 rows and holds 1",
        ),
    ],
    ids=["rows", "elements", "fewer"],
)
def test_a_votable_promises_no_more_than_it_has(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "t.vot").write_text(content)
    with pytest.raises(UserError, match=words):
        open_table(tmp_path / "t.vot")


@pytest.mark.parametrize("cut", [1, 8, 17])
def test_binary_rows_of_a_votable_that_end_early(tmp_path: Path, cut: int) -> None:
    """astropy leaves the last row out, and says nothing."""
    data = struct.pack(">10d", *range(10))
    (tmp_path / "t.vot").write_text(stream(data))
    (chunk,) = open_table(tmp_path / "t.vot").chunks(10, {ColumnRef("l"): ColumnType.NUMBER})
    assert chunk[ColumnRef("l")].tolist() == list(range(10))
    (tmp_path / "t.vot").write_text(stream(data[:-cut]))
    if cut % 8:
        with pytest.raises(UserError, match="end inside a row"):
            open_table(tmp_path / "t.vot")


def stream(data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return votable(f'<DATA><BINARY><STREAM encoding="base64">{text}</STREAM></BINARY></DATA>')


def test_a_votable_beyond_the_limit_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "t.vot", sample())
    monkeypatch.setattr(_votable, "MOST_XML", 100)
    with pytest.raises(UserError, match="convert it to FITS or Parquet"):
        open_table(tmp_path / "t.vot")


def test_vectors_and_numbers_of_fits_go_into_parquet(tmp_path: Path) -> None:
    """FITS is big-endian, which Arrow does not take."""
    vectors = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    write_table(tmp_path / "t.fits", Table({"v": vectors, "n": np.arange(4)}))
    write_table(tmp_path / "t.parquet", read_tables(tmp_path / "t.fits"))
    again = read_tables(tmp_path / "t.parquet")
    np.testing.assert_array_equal(again["v"], vectors)
    assert (again["v"].dtype, again["n"].tolist()) == (np.float32, [0, 1, 2, 3])


def test_vectors_of_a_votable(tmp_path: Path) -> None:
    vectors = np.arange(12.0).reshape(4, 3)
    write_table(tmp_path / "t.vot", Table({"v": vectors}))
    reader = open_table(tmp_path / "t.vot")
    assert reader.columns[0].width == 3
    ref = ColumnRef("v", 2)
    (chunk,) = reader.chunks(10, {ref: ColumnType.NUMBER})
    np.testing.assert_array_equal(chunk[ref], vectors[:, 2])


def test_arrays_of_npz_must_be_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=np.zeros(3), b=np.zeros(4))
    with pytest.raises(UserError, match="arrays of one length"):
        open_table(tmp_path / "t.npz")
    np.savez(tmp_path / "t.npz", a=np.array([{}], dtype=object))
    with pytest.raises(UserError, match=r"t\.npz: cannot be read as npz"):
        open_table(tmp_path / "t.npz")


def test_files_of_one_table_have_the_same_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", Table({"x": [1.0]}))
    write_table(tmp_path / "b.fits", Table({"x": [2.0]}))
    assert read_tables(tmp_path / "a.csv", tmp_path / "b.fits")["x"].tolist() == [1.0, 2.0]
    write_table(tmp_path / "c.csv", Table({"y": [1.0]}))
    with pytest.raises(UserError, match=r"c\.csv: the columns are y, but those of .* are x"):
        read_tables(tmp_path / "a.csv", tmp_path / "c.csv")


@pytest.mark.parametrize(
    ("form", "scale", "zero"),
    [("I", 20, 0), ("I", 1, 100000), ("B", 1, -128), ("J", 0.5, 3), ("E", 2, 1)],
)
def test_scaled_columns_of_fits_are_those_of_astropy(
    tmp_path: Path, form: str, scale: float, zero: float
) -> None:
    """Whole numbers in a header, by which small integers of the rows leave their range."""
    raw = np.array([3, 100, 127], {"I": "i2", "B": "u1", "J": "i4", "E": "f4"}[form])
    if form == "I":
        raw = raw * 200
    table = fits.BinTableHDU.from_columns([fits.Column("x", form, array=raw)])
    table.header["TSCAL1"], table.header["TZERO1"] = scale, zero
    table.writeto(tmp_path / "scaled.fits")
    ref = ColumnRef("x")
    (chunk,) = open_table(tmp_path / "scaled.fits").chunks(10, {ref: ColumnType.NUMBER})
    np.testing.assert_array_equal(chunk[ref], Table.read(tmp_path / "scaled.fits")["x"])
    np.testing.assert_array_equal(chunk[ref], raw.astype(float) * scale + zero)


@pytest.mark.parametrize("ending", ["fits", "fits.gz", "vot"])
def test_tables_behind_the_first_are_counted(
    tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, table = tmp_path / f"two.{ending}", Table({"x": np.arange(40.0)})
    if ending == "vot":
        document = from_table(table[:30])
        document.resources.append(from_table(table[30:]).resources[0])
        writeto(document, str(path))
    else:
        parts = [fits.table_to_hdu(table[:30]), fits.table_to_hdu(table[30:])]
        fits.HDUList([fits.PrimaryHDU(), *parts]).writeto(path)
    with caplog.at_level("WARNING"):
        assert len(open_table(path).whole()) == 30
    assert "the first of 2 tables is read, of 30 rows" in caplog.text
    caplog.clear()
    write_table(tmp_path / "one.fits", table)
    with (tmp_path / "one.fits").open("ab") as stream:
        stream.write(b"not a header" * 1000)
    open_table(tmp_path / "one.fits")
    assert not caplog.records


def test_what_is_missing_is_no_zero_in_npz(tmp_path: Path) -> None:
    mask = [False, True, False]
    table = Table(
        {
            "d": MaskedColumn([1.5, 0.0, 2.5], mask=mask),
            "n": MaskedColumn([1, 0, 2], mask=mask),
            "name": MaskedColumn(["a", "0", "b"], mask=mask),
            "id": [2**60 + 1, 2**60 + 2, 2**60 + 3],
        }
    )
    write_table(tmp_path / "t.npz", table)
    with np.load(tmp_path / "t.npz") as arrays:
        np.testing.assert_array_equal(arrays["d"], [1.5, np.nan, 2.5])
        np.testing.assert_array_equal(arrays["n"], [1.0, np.nan, 2.0])
        assert arrays["name"].tolist() == ["a", "", "b"]
        assert arrays["id"].tolist() == table["id"].tolist()
    table["id"] = MaskedColumn(table["id"], mask=mask)
    with pytest.raises(UserError, match=r"column id lacks whole numbers in 1 rows .*\.parquet"):
        write_table(tmp_path / "t2.npz", table)
    assert not (tmp_path / "t2.npz").exists()


def test_the_binary_table_is_read_behind_one_in_ascii(tmp_path: Path) -> None:
    path, ours = tmp_path / "both.fits", np.array([10.0, 20.0])
    ascii_columns = [fits.Column("l", "E10.3", array=np.array([200.0, 210.0]), ascii=True)]
    parts = [
        fits.PrimaryHDU(),
        fits.TableHDU.from_columns(ascii_columns),
        fits.BinTableHDU(Table({"l": ours})),
    ]
    fits.HDUList(parts).writeto(path)
    reader = open_table(path)
    np.testing.assert_array_equal(reader.whole()["l"], ours)
    (chunk,) = reader.chunks(10, {ColumnRef("l"): ColumnType.NUMBER})
    np.testing.assert_array_equal(chunk[ColumnRef("l")], ours)


@pytest.mark.parametrize("ending", [".parquet", ".ecsv", ".fits"])
def test_gaps_in_vectors_stay_gaps(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"vectors{ending}"
    flags = np.ma.array([[1, 2, -99], [4, 5, 6]], mask=[[False, False, True], [False] * 3])
    write_table(path, Table({"flags": MaskedColumn(flags)}))
    found = open_table(path).whole()["flags"]
    values = np.asarray(np.ma.filled(np.ma.asarray(found, float), np.nan), np.float64)
    np.testing.assert_array_equal(values, [[1, 2, np.nan], [4, 5, 6]])


def test_unsigned_numbers_go_into_a_votable(tmp_path: Path) -> None:
    path = tmp_path / "unsigned.vot"
    columns = {f"u{8 * s}": np.array([1, 200], f"u{s}") for s in (1, 2, 4, 8)}
    write_table(path, Table(columns))
    found = open_table(path).whole()
    assert all(found[name].tolist() == [1, 200] for name in columns)
    with pytest.raises(UserError, match="column big holds numbers beyond"):
        write_table(tmp_path / "big.vot", Table({"big": np.array([2**63], np.uint64)}))
    assert not (tmp_path / "big.vot").exists()


def test_vectors_in_npz_are_columns_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "vectors.npz"
    write_table(path, Table({"a": [1.0, 2.0], "v": [[3.0, 4.0], [5.0, 6.0]]}))
    found = open_table(path).whole()
    assert found.colnames == ["a", "v_0", "v_1"]
    assert found["v_1"].tolist() == [4.0, 6.0]
