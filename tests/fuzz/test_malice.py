"""Catalogs that name other files, or that are a thousand times larger than they look."""

import gzip
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest

from dustmap.errors import UserError
from dustmap.tables import ColumnRef, ColumnType, open_table, read_tables

#: A packed MiB of it stands for a GiB.
PIECE = 2**20


def read(path: Path, column: str = "l") -> None:
    for _ in open_table(path).chunks(1000, {ColumnRef(column): ColumnType.NUMBER}):
        pass


def votable(rows: str, before: str = "") -> str:
    return (
        f'<?xml version="1.0"?>{before}<VOTABLE><RESOURCE><TABLE>'
        f'<FIELD name="l" datatype="double"/>{rows}</TABLE></RESOURCE></VOTABLE>'
    )


LAUGHS = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 9))
TEXT = "<DATA><TABLEDATA><TR><TD>{}</TD></TR></TABLEDATA></DATA>"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (votable(TEXT.format("&a8;"), f'<!DOCTYPE v [<!ENTITY a0 "1">{LAUGHS}]>'), "entity a0"),
        (votable(TEXT.format("&f;"), '<!DOCTYPE v [<!ENTITY f SYSTEM "/etc/passwd">]>'), "entity"),
        (votable('<DATA><BINARY><STREAM href="file:///etc/passwd"/></BINARY></DATA>'), "remote"),
        (votable('<DATA><FITS><STREAM href="x.fits"/></FITS></DATA>'), "FITS"),
        (votable(TEXT.format('<xi:include href="/etc/passwd"/>')), "cannot be read|expected"),
    ],
    ids=["laughs", "external", "stream", "fits", "xinclude"],
)
def test_votables_that_name_other_things(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sky.vot"
    path.write_text(content)
    with pytest.raises(UserError, match=words):
        read(path)


def test_a_later_table_leads_nowhere_either(tmp_path: Path) -> None:
    """Whoever reads the table whole, for what is written beside predictions, would follow it."""
    path = tmp_path / "sky.vot"
    later = '<TABLE><DATA><BINARY><STREAM href="file:///etc/passwd"/></BINARY></DATA></TABLE>'
    path.write_text(votable(TEXT.format(1)).replace("</TABLE>", f"</TABLE>{later}"))
    with pytest.raises(UserError, match="remote"):
        read(path)


def test_rows_of_negative_length_end(tmp_path: Path) -> None:
    """A variable cell of −8 bytes: the next row would start before this one, for ever."""
    import base64

    rows = base64.b64encode((-8 & 0xFFFFFFFF).to_bytes(4, "big") * 8).decode()
    field = '<FIELD name="m" datatype="char" arraysize="*"/>'
    stream = f'<DATA><BINARY><STREAM encoding="base64">{rows}</STREAM></BINARY></DATA>'
    path = tmp_path / "sky.vot"
    path.write_text(votable(field + stream))
    with pytest.raises(UserError, match="bytes"):
        read(path)


@pytest.mark.parametrize("kind", ["link", "raw", "virtual"])
def test_hdf5_reads_no_other_file(kind: str, tmp_path: Path) -> None:
    other, path = tmp_path / "other.h5", tmp_path / "sky.h5"
    with h5py.File(other, "w") as file:
        file["l"] = np.arange(5.0)
    with h5py.File(path, "w") as file:
        file["b"] = np.arange(5.0)
        if kind == "link":
            file["l"] = h5py.ExternalLink(str(other), "/l")
        elif kind == "raw":
            raw = [(str(other), 0, 40)]
            file.create_dataset("l", (5,), "f8", external=raw)
        else:
            layout = h5py.VirtualLayout((5,), "f8")
            layout[:] = h5py.VirtualSource(str(other), "l", (5,))
            file.create_virtual_dataset("l", layout)
    with pytest.raises(UserError, match="other file"):
        read(path)


def test_hdf5_promises_no_more_than_it_has(tmp_path: Path) -> None:
    path = tmp_path / "sky.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("l", (10**15,), "f8", chunks=(1000,))
    with pytest.raises(UserError, match="0 bytes cannot hold"):
        read(path)


@pytest.mark.parametrize("change", [b"99999999999D", b"-1D         ", b"1Z          "])
def test_fits_rows_without_end(change: bytes, samples: Path, tmp_path: Path) -> None:
    path = tmp_path / "sky.fits"
    whole = (samples / "sky.fits").read_bytes()
    path.write_bytes(whole.replace(b"'D       '", b"'" + change[:8] + b"'", 1))
    with pytest.raises(UserError):
        read(path)


@pytest.mark.parametrize("parameters", ["-2880", "-5760", "-99999999999999999999"])
def test_fits_units_that_end_before_they_begin(parameters: str, tmp_path: Path) -> None:
    """Going back by PCOUNT to the same header, for ever."""
    cards = ["SIMPLE  =                    T", "BITPIX  =                    8"]
    cards += ["NAXIS   =                    0", f"PCOUNT  = {parameters:>20}", "GCOUNT  =  1"]
    header = "".join(card.ljust(80) for card in [*cards, "END"]).ljust(2880)
    path = tmp_path / "sky.fits"
    path.write_bytes(header.encode() * 3)
    with pytest.raises(UserError):
        read(path)


BOMBS = {
    "sky.fits.gz": (b"SIMPLE  =                    T".ljust(2880), b" " * PIECE),
    "blank.csv.gz": (b"l,b,", b"x" * PIECE),
    "line.csv.gz": (b"l,b\n1,2\n", b"1" * PIECE),
    "comment.ecsv.gz": (b"# %ECSV 1.0\n", (b"# " + b"x" * 1021 + b"\n") * (PIECE // 1024)),
    "blanks.dat.gz": (b"l b\n", b"1" * PIECE),
    "tag.vot.gz": (b"<VOTABLE ", b"a" * PIECE),
    "cell.vot.gz": (
        votable("<DATA><TABLEDATA><TR><TD>").partition("</TABLE>")[0].encode(),
        b"1" * PIECE,
    ),
    "header.vot.gz": (b"<VOTABLE>", b"<INFO>" + b" " * (PIECE - 13) + b"</INFO>"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "tag.vot.gz" else n for n in BOMBS],
)
def test_packed_files_without_end(name: str, tmp_path: Path) -> None:
    """512 MiB that are packed into half of one: refused before they are in memory."""
    start, piece = BOMBS[name]
    path = tmp_path / name
    path.write_bytes(gzip.compress(start) + 512 * gzip.compress(piece))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20, hard))
    try:
        with pytest.raises(UserError):
            read(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_found_tables_of_regressions(tmp_path: Path) -> None:
    """A cell of 100,000 brackets was quoted whole in the message."""
    path = tmp_path / "a.ecsv"
    columns = "# - {name: l, datatype: float64}\n# - {name: b, datatype: float64}"
    path.write_text(f"# %ECSV 1.0\n# ---\n# datatype:\n{columns}\nl b\n1 {'[' * 10_000}\n")
    with pytest.raises(ValueError, match=r"a\.ecsv: cannot be read as text to its end") as caught:
        read_tables(path)
    assert len(str(caught.value)) < 500
