"""Catalogs of simulated skies: read again by the card that any table is read by."""

from pathlib import Path

import numpy as np
import pytest
from astropy import units as u
from astropy.table import Table

from dustmap.sky import DustMap, Provenance, write_map
from dustmap.sky.catalogs import read_catalog
from dustmap.sky.simulation import SkyModel, simulate, write_sky
from dustmap.sky.simulation._sky import sky_table
from dustmap.sky.stars import StarTable
from dustmap.sky.systems import system_named

SKY = simulate(SkyModel(size=(120.0, 100.0, 60.0), system=system_named("A_G")), 40, seed=1)


def assert_same(found: StarTable, expected: StarTable) -> None:
    assert found.system == expected.system
    np.testing.assert_array_equal(found.source_id, expected.source_id)
    for name in ("l", "b", "extinction", "extinction_error"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-12)
    assert found.distances.columns().keys() == expected.distances.columns().keys()
    for name, values in expected.distances.columns().items():
        np.testing.assert_allclose(found.distances.columns()[name], values, rtol=1e-12)


@pytest.mark.parametrize("exact", [False, True], ids=["parallaxes", "distances"])
@pytest.mark.parametrize("ending", ["fits", "ecsv", "parquet", "vot", "h5", "npz", "csv", "tsv"])
def test_the_generic_card_reads_what_was_simulated(
    tmp_path: Path, ending: str, exact: bool
) -> None:
    path = tmp_path / f"sky.{ending}"
    write_sky(path, SKY, exact_distances=exact)
    # Some formats have no header to name the system in.
    system = system_named("A_G") if ending in ("csv", "tsv", "npz") else None
    found = read_catalog(path, "generic", system=system).stars
    assert_same(found, SKY.at_true_distances() if exact else SKY.stars)


def test_a_table_has_units_and_the_truth_beside_what_is_measured() -> None:
    table = sky_table(SKY)
    assert table.colnames[:5] == ["source_id", "l", "b", "parallax", "parallax_error"]
    assert table.colnames[-3:] == ["true_distance_pc", "true_extinction", "outlier"]
    assert table["parallax"].unit == u.mas
    assert table["true_distance_pc"].unit == u.pc
    assert table["g_mag"].unit == u.mag
    assert table.meta == {"EXTSYS": "A_G"}
    np.testing.assert_array_equal(table["true_extinction"].value, SKY.true_extinction)
    np.testing.assert_array_equal(table["outlier"], SKY.outlier)
    assert "parallax" not in sky_table(SKY, exact_distances=True).colnames


def test_fits_keeps_the_truth(tmp_path: Path) -> None:
    write_sky(tmp_path / "sky.fits", SKY)
    table = Table.read(tmp_path / "sky.fits")
    np.testing.assert_array_equal(table["true_distance_pc"], SKY.true_distance)
    np.testing.assert_array_equal(table["outlier"], SKY.outlier)
    assert table["source_id"].dtype.kind == "i"


def test_the_truth_is_a_map_that_opens_and_integrates_to_the_extinctions(tmp_path: Path) -> None:
    write_map(tmp_path / "truth.zarr", SKY.truth, Provenance(""))
    truth = DustMap.open(tmp_path / "truth.zarr")
    assert truth.system == SKY.stars.system
    stars = SKY.at_true_distances()
    found = truth.query_gal(stars.l, stars.b, SKY.true_distance * u.pc, integrated=True)
    np.testing.assert_allclose(found, SKY.true_extinction, rtol=1e-5)


def test_a_catalog_is_not_overwritten_unasked_nor_of_an_unknown_kind(tmp_path: Path) -> None:
    write_sky(tmp_path / "sky.csv", SKY)
    with pytest.raises(FileExistsError, match="exists already"):
        write_sky(tmp_path / "sky.csv", SKY)
    write_sky(tmp_path / "sky.csv", SKY, overwrite=True)
    with pytest.raises(ValueError, match=r"expected a table that ends in .fits"):
        write_sky(tmp_path / "sky.doc", SKY)
