"""Text as VizieR and others write it."""

import time
from pathlib import Path

import numpy as np
import pytest

from dustmap.errors import UserError
from dustmap.tables import ColumnType, open_table
from dustmap.tables._text import _trimmed
from tests.sky.catalogs.test_readers import read_all

VIZIER = """#
#   VizieR Astronomical Server vizier.cds.unistra.fr
#Coosys	J2000:	eq_FK5 J2000

#RESOURCE=yCat_1354
#Name: I/354/starhorse2021
#Column	RA_ICRS	(F15.11)	Right ascension	[ucd=pos.eq.ra]
RA_ICRS	Source	dist50	sh_outflag	Note
deg	 	kpc	 	 
---------------	-----------------	------	----------	----
 68.12345678901	65220041234567890	 0.133	0000      	5" N
169.12345678901	65220041234567891	      	0100      	    
 69.5          	                 	 0.25 	          	5"  

#END#
"""


@pytest.mark.parametrize("block", [8 << 20, 64])
@pytest.mark.parametrize(("separator", "ending"), [("\t", "tsv"), (";", "csv"), ("|", "txt")])
def test_a_table_of_vizier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, ending: str, block: int
) -> None:
    """Units and dashes are below the names, fields are filled up with blanks."""
    monkeypatch.setattr("dustmap.tables._text._BLOCK", block)
    path = tmp_path / f"vizier.{ending}"
    path.write_text(VIZIER.replace("\t", separator))
    reader = open_table(path)
    units = {"RA_ICRS": "deg", "Source": "", "dist50": "kpc", "sh_outflag": "", "Note": ""}
    assert {column.name: column.unit for column in reader.columns} == units
    kinds = dict.fromkeys(("RA_ICRS", "dist50"), ColumnType.NUMBER)
    texts = dict.fromkeys(("sh_outflag", "Note"), ColumnType.TEXT)
    found = read_all(reader, {**kinds, **texts, "Source": ColumnType.INTEGER})
    assert found["RA_ICRS"].tolist() == [68.12345678901, 169.12345678901, 69.5]
    np.testing.assert_array_equal(found["dist50"], [0.133, np.nan, 0.25])
    assert found["sh_outflag"].tolist() == ["0000", "0100", ""]
    assert found["Note"].tolist() == ['5" N', "", '5"']
    assert found["Source"].tolist() == [65220041234567890, 65220041234567891, None]
    whole = reader.whole()
    assert whole["dist50"].unit == "kpc"
    np.testing.assert_array_equal(np.ma.filled(whole["dist50"], np.nan), found["dist50"])
    assert whole["Note"].tolist() == ['5" N', None, '5"']


def test_names_that_are_underlined_alone(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("l,b\n---,---\n1,2\n")
    found = read_all(open_table(path), {"b": ColumnType.NUMBER})
    assert found["b"].tolist() == [2.0]


def test_fields_that_are_empty_between_tabs(tmp_path: Path) -> None:
    path = tmp_path / "stars.tsv"
    path.write_text("a\tb\tc\td\n1\t\t3\t\n\t2\t\tx y\n")
    whole = open_table(path).whole()
    assert [whole[name].tolist() for name in "abcd"] == [
        [1, None],
        [None, 2],
        [3, None],
        [None, "x y"],
    ]


def test_very_many_blanks_take_no_time_of_their_own() -> None:
    row = b"a" + b" " * 100_000 + b"b\t1\n"
    start = time.process_time()
    assert _trimmed(20 * row, "\t") == 20 * row
    assert time.process_time() - start < 2.0


def test_text_that_is_not_utf8_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_bytes("name,l\nSté,1\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"stars.csv: its text is not UTF-8 \(byte 0xe9\).*iconv"):
        open_table(path).whole()
