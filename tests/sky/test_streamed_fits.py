"""Streamed FITS: the same bytes as astropy would check, whatever the pieces."""

from pathlib import Path

import numpy as np
import pytest
from astropy.io import fits

from dustmap.sky._streamed_fits import (
    UnitPlan,
    encoded,
    file_sum,
    streamed_fits,
    words_sum,
)


def cards() -> fits.Header:
    header = fits.Header()
    header["BUNIT"] = "mag"
    header["COUNT"] = (0, "known at the end")
    header.add_history("a line")
    return header


@pytest.mark.parametrize("seed", range(20))
def test_astropy_verifies_images_and_tables(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (3, int(rng.integers(1, 60)), 7)
    cube = rng.normal(size=shape).astype(np.float32)
    table = rng.normal(size=(11, 3)).astype(np.float32)
    column = fits.Column("distance", "D", unit="pc", array=rng.random(5))
    plans = [
        UnitPlan.image("CUBE", shape, cards()),
        fits.BinTableHDU.from_columns([column], name="DISTANCES"),
        UnitPlan.table("SHELLS", 11, [(f"S{k}", "pc") for k in range(3)], "mag", cards()),
        UnitPlan.image("TWICE", shape, cards()),
    ]
    path = tmp_path / "map.fits"
    with streamed_fits(path, plans) as units:
        for k in (2, 0, 1):
            units["CUBE"].write((k,), cube[k])
            units["TWICE"].write((k, 0, 0), 2 * cube[k])
        units["SHELLS"].write((6, 0), table[6:])
        units["SHELLS"].write((0, 0), table[:6])
        units["CUBE"].header["COUNT"] = int(rng.integers(0, 10**9))
    with fits.open(path, checksum=True) as hdus:
        hdus.verify("exception")
        assert [hdu.name for hdu in hdus] == ["PRIMARY", "CUBE", "DISTANCES", "SHELLS", "TWICE"]
        np.testing.assert_array_equal(hdus["CUBE"].data, cube)
        np.testing.assert_array_equal(hdus["TWICE"].data, 2 * cube)
        np.testing.assert_array_equal(hdus["SHELLS"].data["S1"], table[:, 1])
        np.testing.assert_array_equal(hdus["DISTANCES"].data["distance"], column.array)
        assert all("CHECKSUM" in hdu.header and "DATASUM" in hdu.header for hdu in hdus)
    assert path.stat().st_size % 2880 == 0


def test_primary_image(tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    with streamed_fits(path, [UnitPlan.image("PRIMARY", (2, 3), cards())]) as units:
        units["PRIMARY"].write((1,), [4, 5, 6])
    with fits.open(path, checksum=True) as hdus:
        hdus.verify("exception")
        np.testing.assert_array_equal(hdus[0].data, [[0, 0, 0], [4, 5, 6]])


def test_sum_is_that_of_all_words(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2880 * 5, np.uint8).tobytes()
    total = sum(int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4))
    while total >> 32:
        total = (total & 0xFFFFFFFF) + (total >> 32)
    assert words_sum(data) == total
    assert words_sum(data[2880:], words_sum(data[:2880])) == total
    assert words_sum(b"\0" * 2880) == 0
    assert words_sum(b"\xff" * 2880) == 0xFFFFFFFF
    path = tmp_path / "data"
    path.write_bytes(b"head" + data)
    with path.open("rb") as file:
        assert file_sum(file, 4, len(data)) == total
        with pytest.raises(OSError, match="before the end of its data"):
            file_sum(file, 8, len(data))


@pytest.mark.parametrize("total", [0, 1, 0xFFFFFFFF, 0x3A405B60, 868229149])
def test_checksum_is_letters_and_digits(total: int) -> None:
    assert encoded(total).isalnum()
    assert encoded(total).isascii()
    # The example of the standard.
    assert encoded(868229149) == "hcHjjc9ghcEghc9g"


def test_pieces_that_do_not_fit(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="does not fit"),
        streamed_fits(tmp_path / "map.fits", [UnitPlan.image("MEAN", (2, 3), cards())]) as units,
    ):
        units["MEAN"].write((1, 1), [1, 2, 3])
