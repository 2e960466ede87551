"""Every format gives back what the library that wrote it was given, in chunks of any size."""

import gzip
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from astropy.io import fits
from astropy.table import MaskedColumn, Table
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import (
    AbstractReader,
    ColumnRef,
    ColumnType,
    open_table,
    write_table,
)
from tests.sky.catalogs.files import FORMATS, WITH_UNITS, star_columns, write

KINDS = {"i": ColumnType.INTEGER, "f": ColumnType.NUMBER, "U": ColumnType.TEXT}
TEXTS = ["0000", "0100", "a b", "0000", "", "x", "0"]


MASKED = (
    *("fits", "hdf5 of astropy", "parquet", "votable tabledata", "votable binary2"),
    *("ecsv", "csv"),
)


def everything() -> Table:
    table = Table(star_columns())
    table["flag"] = TEXTS if len(table) == len(TEXTS) else [""] * len(table)
    return table


def read_all(
    reader: AbstractReader, wanted: dict[str, ColumnType], rows: int = 3
) -> dict[str, NDArray[Any]]:
    refs = {ColumnRef.parse(name): kind for name, kind in wanted.items()}
    chunks = list(reader.chunks(rows, refs))
    assert all(set(chunk) == set(refs) for chunk in chunks)
    assert all(len(values) <= rows for chunk in chunks for values in chunk.values())
    found: dict[str, NDArray[Any]] = {}
    for ref, kind in refs.items():
        # Only whole numbers are masked, and numpy's functions on masked arrays have no types.
        parts = [chunk[ref] for chunk in chunks]
        values = np.concatenate([np.ma.getdata(part) for part in parts])
        masked = kind is ColumnType.INTEGER
        mask = np.concatenate([np.ma.getmaskarray(part) for part in parts])
        found[str(ref)] = np.ma.MaskedArray(values, mask=mask) if masked else values
    return found


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("format_name", FORMATS)
def test_round_trip(tmp_path: Path, format_name: str, rows: int) -> None:
    table = everything()
    if format_name == "blanks":
        table.remove_column("flag")
    reader = open_table(write(tmp_path, format_name, table))
    assert {column.name for column in reader.columns} == set(table.colnames)
    wanted = {name: KINDS[table[name].dtype.kind] for name in table.colnames}
    found = read_all(reader, wanted, rows)
    for name in table.colnames:
        np.testing.assert_array_equal(np.ma.getdata(found[name]), np.asarray(table[name]))
    assert found["source_id"].dtype == np.int64


@pytest.mark.parametrize("format_name", WITH_UNITS)
def test_units_and_the_system_are_kept(tmp_path: Path, format_name: str) -> None:
    reader = open_table(write(tmp_path, format_name, star_columns()))
    units = {column.name: column.unit for column in reader.columns}
    assert units == {
        "source_id": "",
        "l": "deg",
        "b": "deg",
        "distance_pc": "pc",
        "extinction": "mag",
        "extinction_error": "mag",
    }
    assert reader.keyword("EXTSYS") == "A_V"


@pytest.mark.parametrize("format_name", FORMATS)
def test_only_the_wanted_columns_in_one_pass(tmp_path: Path, format_name: str) -> None:
    table = star_columns()
    reader = open_table(write(tmp_path, format_name, table))
    found = read_all(reader, {"b": ColumnType.NUMBER})
    np.testing.assert_array_equal(found["b"], np.asarray(table["b"].value))


@pytest.mark.parametrize("format_name", MASKED)
def test_missing_values(tmp_path: Path, format_name: str) -> None:
    table = Table(
        {
            "n": MaskedColumn([1, 2, 3], mask=[False, True, False]),
            "x": MaskedColumn([1.5, 2.5, 3.5], mask=[False, True, False]),
            "y": [1.0, np.nan, 2.0],
        }
    )
    reader = open_table(write(tmp_path, format_name, table))
    number = ColumnType.NUMBER
    found = read_all(reader, {"n": ColumnType.INTEGER, "x": number, "y": number})
    np.testing.assert_array_equal(np.ma.getmaskarray(found["n"]), [False, True, False])
    np.testing.assert_array_equal(found["x"], [1.5, np.nan, 3.5])
    np.testing.assert_array_equal(found["y"], [1.0, np.nan, 2.0])


def test_nulls_dictionaries_and_decimals_of_arrow(tmp_path: Path) -> None:
    path = tmp_path / "stars.parquet"
    columns = {
        "n": pa.array([1, None, 2**62 + 1], pa.int64()),
        "x": pa.array([1.5, None, 2.5], pa.float32()),
        "t": pa.array(["0000", None, "1"]).dictionary_encode(),
        "d": pa.array([1.5, None, 2.5]).cast(pa.decimal128(5, 2)),
    }
    pq.write_table(pa.table(columns), path)
    wanted = {"n": ColumnType.INTEGER, "t": ColumnType.TEXT}
    found = read_all(open_table(path), wanted | {"x": ColumnType.NUMBER, "d": ColumnType.NUMBER})
    assert found["n"].tolist() == [1, None, 2**62 + 1]
    assert found["t"].tolist() == ["0000", "", "1"]
    np.testing.assert_array_equal(found["x"], [1.5, np.nan, 2.5])
    np.testing.assert_array_equal(found["d"], [1.5, np.nan, 2.5])


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(5), pa.string_view()])
def test_bytes_of_arrow_are_text(tmp_path: Path, kind: pa.DataType) -> None:
    """As astropy writes the words of a FITS file to Parquet."""
    path = tmp_path / "stars.parquet"
    words = [b"HD 1\0", None, b"HD 22"] if kind != pa.string_view() else ["HD 1", None, "HD 22"]
    pq.write_table(pa.table({"name": pa.array(words, kind)}), path)
    reader = open_table(path)
    names = ["HD 1", "", "HD 22"]
    assert read_all(reader, {"name": ColumnType.TEXT})["name"].tolist() == names
    assert list(reader.whole()["name"].filled("")) == names


def test_bytes_that_are_no_text_stop_no_table(tmp_path: Path) -> None:
    path = tmp_path / "stars.parquet"
    hashes = pa.array([b"\xff\xfe", b"a", None], pa.binary())
    pq.write_table(pa.table({"hash": hashes, "x": pa.array([1.0, 2.0, 3.0])}), path)
    table = open_table(path).whole()
    assert list(table["x"]) == [1.0, 2.0, 3.0]
    assert table["hash"][1] == "a"


@pytest.mark.parametrize("ending", ["fits", "csv", "ecsv", "vot", "h5", "npz", "parquet"])
def test_times_and_other_columns_of_arrow_are_written_again(tmp_path: Path, ending: str) -> None:
    day = datetime(2001, 2, 3, 4, 5, tzinfo=UTC).replace(tzinfo=None)
    columns = {
        "seen": pa.array([day, None]),
        "day": pa.array([day.date(), day.date()]),
        "took": pa.array([timedelta(1), None]),
        "half": pa.array(np.array([1.5, 2.5], np.float16)),
        "none": pa.nulls(2),
    }
    pq.write_table(pa.table(columns), tmp_path / "stars.parquet")
    made = tmp_path / f"again.{ending}"
    write_table(made, open_table(tmp_path / "stars.parquet").whole())
    found = open_table(made).whole()
    assert str(found["seen"][0]).startswith("2001-02-03 04:05")
    assert str(found["day"][1]) == "2001-02-03"
    np.testing.assert_array_equal(found["half"], [1.5, 2.5])


@pytest.mark.parametrize("format_name", ["fits", "hdf5", "parquet"])
def test_entries_of_vectors(tmp_path: Path, format_name: str) -> None:
    est = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    path = tmp_path / f"stars.{format_name}"
    if format_name == "parquet":
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(est.ravel()), 5)
        pq.write_table(pa.table({"est": vectors}), path)
    else:
        path = write(tmp_path, format_name, Table({"est": est}))
    reader = open_table(path)
    assert reader.columns[0].width == 5
    found = read_all(reader, {"est[:,3]": ColumnType.NUMBER, "est[:,4]": ColumnType.NUMBER})
    np.testing.assert_array_equal(found["est[:,3]"], est[:, 3].astype(np.float64))
    np.testing.assert_array_equal(found["est[:,4]"], est[:, 4].astype(np.float64))


def test_fits_integers_without_sign_scaled_numbers_and_truth_values(tmp_path: Path) -> None:
    columns = [
        fits.Column("u2", "I", array=np.array([0, 40000], np.uint16), bzero=2**15),
        fits.Column("u8", "K", array=np.array([1, 2**62], np.uint64), bzero=2**63),
        fits.Column("scaled", "I", array=np.array([0, 3], np.int16)),
        fits.Column("yes", "L", array=np.array([True, False])),
        fits.Column("skipped", "3X", array=np.array([[1, 0, 1], [0, 0, 1]], bool)),
        fits.Column("last", "D", array=np.array([7.0, 8.0])),
    ]
    path = tmp_path / "columns.fits"
    image, table = fits.ImageHDU(np.zeros((3, 5))), fits.BinTableHDU.from_columns(columns)
    table.header.update(TSCAL3=0.5, TZERO3=1.0)
    fits.HDUList([fits.PrimaryHDU(), image, table]).writeto(path)
    integer, number = ColumnType.INTEGER, ColumnType.NUMBER
    wanted = {"u2": integer, "u8": integer, "scaled": number, "yes": integer, "last": number}
    found = read_all(open_table(path), wanted)
    assert found["u2"].tolist() == [0, 40000]
    assert found["u8"].tolist() == [1, 2**62]
    assert found["scaled"].tolist() == [1.0, 2.5]
    assert found["yes"].tolist() == [1, 0]
    assert found["last"].tolist() == [7.0, 8.0]


def test_a_file_of_bits_beyond_int64_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.h5"
    with h5py.File(path, "w") as file:
        file["source_id"] = np.array([2**63], np.uint64)
    with pytest.raises(UserError, match="above 2"):
        read_all(open_table(path), {"source_id": ColumnType.INTEGER})


@pytest.mark.parametrize("format_name", FORMATS)
def test_identifiers_in_floating_point_are_refused(tmp_path: Path, format_name: str) -> None:
    table = star_columns()
    table["source_id"] = np.asarray(table["source_id"], np.float64) + 0.5
    reader = open_table(write(tmp_path, format_name, table))
    with pytest.raises(UserError, match="column source_id: expected whole numbers"):
        read_all(reader, {"source_id": ColumnType.INTEGER})


@pytest.mark.parametrize("format_name", FORMATS)
def test_text_in_a_number_column(tmp_path: Path, format_name: str) -> None:
    table = Table(star_columns())
    table["b"] = ["1.0", "2.0", "oops", "3", "4", "5", "6"]
    reader = open_table(write(tmp_path, format_name, table))
    with pytest.raises(UserError, match="column b: expected numbers, got "):
        read_all(reader, {"b": ColumnType.NUMBER}, rows=10)


def long_table() -> Table:
    """Rows that do not compress, so that any cut hits the data."""
    return star_columns(3000)


@pytest.mark.parametrize("fraction", [0.999, 0.6])
@pytest.mark.parametrize("format_name", FORMATS)
def test_truncated(tmp_path: Path, format_name: str, fraction: float) -> None:
    path = write(tmp_path, format_name, long_table())
    data = path.read_bytes()
    cut = int(len(data) * fraction)
    if format_name == "fits":
        cut = int((len(data) - 2880) * fraction)  # what is cut off is more than the padding
    if format_name in ("csv", "ecsv", "blanks"):
        # A text file that ends at the end of a row cannot be told from a whole one.
        cut = data.rfind(b"\n", 0, cut) + 12
    path.write_bytes(data[:cut])
    with pytest.raises(UserError) as caught:
        read_all(open_table(path), {"b": ColumnType.NUMBER}, rows=10**6)
    assert str(path) in str(caught.value)
    assert "whole?" in str(caught.value) or "truncated" in str(caught.value)


@pytest.mark.parametrize("format_name", FORMATS)
def test_an_empty_file_and_none(tmp_path: Path, format_name: str) -> None:
    path = tmp_path / f"empty{FORMATS[format_name][0]}"
    with pytest.raises(UserError, match="there is no such file"):
        open_table(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="the file is empty"):
        open_table(path)


@pytest.mark.parametrize("format_name", FORMATS)
def test_another_kind_of_file_under_this_name(tmp_path: Path, format_name: str) -> None:
    path = tmp_path / f"picture{FORMATS[format_name][0]}"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20)
    with pytest.raises(UserError, match=r"picture"):
        read_all(open_table(path), {"b": ColumnType.NUMBER})


def test_an_unknown_ending() -> None:
    with pytest.raises(UserError, match=r"expected a table that ends in \.fits"):
        open_table("stars.doc")
    with pytest.raises(UserError, match=r"a run takes one alone"):
        open_table("stars.zarr")
    with pytest.raises(UserError, match=r'format="ascii\.ipac"\)\.write\("stars\.ecsv"\)'):
        open_table("stars.tbl")


def test_comments_delimiters_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text('# made by hand\n#\nname;l; b\n"a; b";1;2\nc;3;4\n')
    reader = open_table(path)
    assert [column.name for column in reader.columns] == ["name", "l", "b"]
    found = read_all(reader, {"name": ColumnType.TEXT, "b": ColumnType.NUMBER})
    assert found["name"].tolist() == ["a; b", "c"]
    assert found["b"].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(("separator", "header"), [(" ", "l b d"), (",", "l,b,d"), (",", "l b d")])
@pytest.mark.parametrize("rows", [1, 3])
def test_names_in_a_comment_above_numbers(
    tmp_path: Path, separator: str, header: str, rows: int
) -> None:
    """As numpy.savetxt writes them; no row is taken for names."""
    path, values = tmp_path / "stars.txt", np.arange(3.0 * rows).reshape(rows, 3)
    values[0, 1] = np.nan
    np.savetxt(path, values, delimiter=separator, header=f"of 2024\n{header}")
    reader = open_table(path)
    assert [column.name for column in reader.columns] == ["l", "b", "d"]
    found = read_all(reader, dict.fromkeys("lbd", ColumnType.NUMBER))
    np.testing.assert_array_equal(np.stack([found[name] for name in "lbd"], axis=1), values)
    whole = reader.whole()
    np.testing.assert_array_equal(np.array([whole[name] for name in "lbd"], float).T, values)


def test_names_in_a_comment_as_astropy_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "stars.dat"
    Table({"l": [1, 2], "b": [3.0, 4.5]}).write(path, format="ascii.commented_header")
    found = read_all(open_table(path), {"b": ColumnType.NUMBER})
    assert found["b"].tolist() == [3.0, 4.5]


@pytest.mark.parametrize("above", ["", "# made by hand of old lists\n", "# 1 2 3\n", "#\n"])
def test_numbers_without_names(tmp_path: Path, above: str) -> None:
    path = tmp_path / "stars.csv"
    path.write_text(f"{above}30,5,\n40,5,100\n")
    with pytest.raises(UserError, match=r"the first line holds numbers .* write a line of 3 names"):
        open_table(path)


def test_words_without_a_name_shift_no_column(tmp_path: Path) -> None:
    """Names of stars in two words behind the numbers, of which columns took the neighbours'."""
    path = tmp_path / "stars.txt"
    path.write_text("l b av star\n1.5 2.5 0.1 HD 12\n2.5 3.5 0.2 HD 13\n")
    with pytest.raises(UserError, match="4 names of columns and 5 words in the first row"):
        open_table(path)
    path.write_text('l b av\n"7" 1.5 2.5 0.1\n"9" 2.5 3.5 0.2\n')  # as R writes it
    assert [column.name for column in open_table(path).columns] == ["index", "l", "b", "av"]


def test_an_index_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "ananke.txt"
    path.write_text("    e   x\n0   0.5 1\n1  0.25   2 \n")
    reader = open_table(path)
    assert [column.name for column in reader.columns] == ["index", "e", "x"]
    found = read_all(reader, {"e": ColumnType.NUMBER, "x": ColumnType.NUMBER})
    assert found["e"].tolist() == [0.5, 0.25]
    assert found["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_one_column_may_have_blanks_in_its_values(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "clouds.csv"
    lines = ["name", "Northern Coalsack", '"Ophiuchus North"', "Taurus", "Pipe B59"]
    path.write_text(ending.join(lines) + ending)
    reader = open_table(path)
    assert [column.name for column in reader.columns] == ["name"]
    names = ["Northern Coalsack", "Ophiuchus North", "Taurus", "Pipe B59"]
    assert read_all(reader, {"name": ColumnType.TEXT})["name"].tolist() == names
    assert list(reader.whole()["name"]) == names
    path.write_text("  name\n0 Taurus\n1 Orion\n")
    assert [column.name for column in open_table(path).columns] == ["index", "name"]


def test_a_column_name_that_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("l,b,b\n1,2,3\n")
    assert read_all(open_table(path), {"l": ColumnType.NUMBER})["l"].tolist() == [1.0]
    with pytest.raises(UserError, match="two columns have the name b"):
        read_all(open_table(path), {"b": ColumnType.NUMBER})


def test_a_table_of_names_only_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("l,b\n")
    assert list(open_table(path).chunks(10, {ColumnRef("l"): ColumnType.NUMBER})) == []


def test_votables_that_are_not_read(tmp_path: Path) -> None:
    head = '<VOTABLE><RESOURCE><TABLE><FIELD name="l" datatype="double"/><DATA>'
    for body, words in (
        ("<FITS><STREAM/></FITS>", "inside a VOTable is not read"),
        ('<BINARY><STREAM href="http://x"/></BINARY>', "a remote http:"),
        ("<TABLEDATA><TR><TD>1</TD><TD>2</TD></TR></TABLEDATA>", "Data has more columns"),
    ):
        path = tmp_path / "stars.vot"
        path.write_text(f"{head}{body}</DATA></TABLE></RESOURCE></VOTABLE>")
        with pytest.raises(UserError, match=words):
            read_all(open_table(path), {"l": ColumnType.NUMBER})


def test_a_namespace_and_a_second_table(tmp_path: Path) -> None:
    table = (
        '<v:TABLE><v:FIELD name="l" datatype="double" unit="deg"/><v:DATA><v:TABLEDATA>'
        "<v:TR><v:TD>{}</v:TD></v:TR></v:TABLEDATA></v:DATA></v:TABLE>"
    )
    path = tmp_path / "stars.xml.gz"
    text = f"{table.format(1)}{table.format(2)}"
    text = f'<v:VOTABLE xmlns:v="http://x"><v:RESOURCE>{text}</v:RESOURCE></v:VOTABLE>'
    path.write_bytes(gzip.compress(text.encode()))
    assert read_all(open_table(path), {"l": ColumnType.NUMBER})["l"].tolist() == [1.0]


def test_hdf5_columns_of_different_lengths(tmp_path: Path) -> None:
    path = tmp_path / "stars.h5"
    with h5py.File(path, "w") as file:
        file["l"], file["b"] = np.zeros(3), np.zeros(4)
    with pytest.raises(UserError, match="different lengths"):
        open_table(path)


def test_a_fits_file_without_a_table(tmp_path: Path) -> None:
    path = tmp_path / "image.fits"
    fits.HDUList([fits.PrimaryHDU(np.zeros(3)), fits.ImageHDU(np.zeros(2))]).writeto(path)
    with pytest.raises(UserError, match="no binary table in this FITS file"):
        open_table(path)


class _Recorded:
    """A stream, and the threads that read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.threads: set[int] = set()

    def __enter__(self) -> "_Recorded":
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def readline(self, size: int) -> bytes:
        return self._stream.readline(size)

    def read(self, size: int) -> bytes:
        self.threads.add(threading.get_ident())
        return self._stream.read(size)


def test_no_thread_reads_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that still did when the process ends would abort it."""
    path = tmp_path / "stars.csv"
    path.write_text("l,b\n" + "1,2\n" * 50 + "1,x\n" + "1,2\n" * 50)
    monkeypatch.setattr("dustmap.tables._text._BLOCK", 64)
    reader, stream = open_table(path), _Recorded(path.open("rb"))
    monkeypatch.setattr("dustmap.tables._columns.opened", lambda path: stream)
    with pytest.raises(
        UserError, match="column b: expected numbers, got 'x'; write decimal degrees"
    ):
        read_all(reader, {"b": ColumnType.NUMBER})
    assert stream.threads == {threading.get_ident()}


def test_a_line_of_units_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "vizier.csv"
    path.write_text("l;b\ndeg;deg\n1;2\n")
    with pytest.raises(UserError, match=r"got 'deg'.*; a line of units, or of dashes, below the"):
        read_all(open_table(path), {"b": ColumnType.NUMBER})


def test_words_for_missing_values_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "missing.csv"
    words = ["\\N", " ", " " * 8, "-", "...", "*", "masked", "<NA>", "#N/A", "null", "NaN", ""]
    path.write_text("l,b\n" + "".join(f"1,{word}\n" for word in words) + "1,2\n")
    columns = read_all(open_table(path), {"b": ColumnType.NUMBER})
    np.testing.assert_array_equal(np.isnan(columns["b"]), [True] * len(words) + [False])


@pytest.mark.slow
def test_bad_text_never_aborts_the_process(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv.gz"
    rows = "".join(f"{i / 7},{i / 9}\n" for i in range(2_000_000))
    path.write_bytes(gzip.compress(f"l,b\n1,x\n{rows}".encode(), 1))
    script = (
        "import sys; from pathlib import Path\n"
        "from dustmap.tables import ColumnRef, ColumnType, open_table\n"
        "reader = open_table(Path(sys.argv[1]))\n"
        "try: list(reader.chunks(1000, {ColumnRef('b'): ColumnType.NUMBER}))\n"
        "except ValueError: sys.exit(2)\n"
    )
    for _ in range(5):
        assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == 2


def test_rows_that_are_wrong_are_counted_over_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("l,b\n" + "1,2\n" * 50 + "1,2,3\n")
    monkeypatch.setattr("dustmap.tables._text._BLOCK", 64)
    with pytest.raises(UserError, match="Row #51: Expected 2 columns, got 3"):
        read_all(open_table(path), {"b": ColumnType.NUMBER})


def test_very_many_columns(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    names = [f"column{i}" for i in range(100_000)]
    path.write_text(f"{','.join(names)}\n{','.join('1' * len(names))}\n")
    start = time.process_time()
    found = read_all(open_table(path), {"column7": ColumnType.NUMBER})
    assert found["column7"].tolist() == [1.0]
    assert time.process_time() - start < 5.0
