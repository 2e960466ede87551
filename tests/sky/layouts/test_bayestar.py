"""The Bayestar layout, as the dustmaps package reads it."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.sky.layouts import BayestarOptions, write_bayestar
from tests.sky.layouts.analytic import CLOUDS, PLACES, PROVENANCE, AnalyticField, place
from tests.sky.layouts.readers import BayestarQuery

FIELD = AnalyticField(CLOUDS)
NSIDE = 16
MODULI = np.linspace(4.0, 18.875, 120)
SCALES = 1 + np.array(FIELD.scales)
NATIVE = 1 / (3.1 * 0.884)  # of 1 mag of A_V


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bayestar") / "map.h5"
    counts = write_bayestar(path, FIELD, BayestarOptions(NSIDE, samples=4), PROVENANCE)
    assert counts.values == 12 * NSIDE**2 * 120 * 5
    assert 0 < counts.outside < counts.values
    return path


def pixel_centres() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nearest to the places: l, b in degrees."""
    import healpy

    l, b, _ = np.array(PLACES).T
    l, b = healpy.pix2ang(NSIDE, healpy.ang2pix(NSIDE, l, b, lonlat=True), lonlat=True)
    return np.asarray(l), np.asarray(b)


def expected(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    l, b = pixel_centres()
    x = np.array([place(*where) for where in zip(l, b, distance, strict=True)])
    return NATIVE * FIELD.integral(np.zeros_like(x), x)


def at(distance: NDArray[np.float64]) -> SkyCoord:
    l, b = pixel_centres()
    return SkyCoord(l * u.deg, b * u.deg, distance * u.pc, frame="galactic")


@pytest.mark.parametrize("k", [0, 20, 30])
def test_dustmaps_returns_our_integrals_at_the_distance_moduli(path: Path, k: int) -> None:
    query = BayestarQuery(map_fname=str(path))
    distance = np.full(len(PLACES), 10 ** (MODULI[k] / 5 + 1))
    truth = expected(distance)
    where = at(distance * (1 + 1e-12))
    np.testing.assert_allclose(query(where, mode="mean"), SCALES.mean() * truth, rtol=1e-5)
    np.testing.assert_allclose(query(where, mode="median"), np.median(SCALES) * truth, rtol=1e-5)
    np.testing.assert_allclose(query(where, mode="best"), SCALES.mean() * truth, rtol=1e-5)
    samples = query(where, mode="samples")
    np.testing.assert_allclose(samples, np.multiply.outer(truth, SCALES), rtol=1e-5)


def test_dustmaps_interpolates_our_integrals(path: Path) -> None:
    """Steps of 1/8 mag in the modulus are 6 % in distance."""
    query = BayestarQuery(map_fname=str(path))
    distance = np.array([d for _, _, d in PLACES])
    np.testing.assert_allclose(query(at(distance), mode="best"), expected(distance), rtol=2e-2)


def test_nothing_is_added_beyond_the_box(path: Path) -> None:
    query = BayestarQuery(map_fname=str(path))
    far, farther = (query(at(np.full(len(PLACES), d)), mode="best") for d in (900.0, 5e4))
    np.testing.assert_array_equal(far, farther)
    # Towards l = 90° the box ends at 410 pc.
    edge = expected(np.array([410.0, 390.0, 1.0, 1.0]) / np.cos(np.deg2rad(2.0)))
    np.testing.assert_allclose(far[:2], edge[:2], rtol=3e-3)


def test_reliable_distances_are_those_of_the_coverage(path: Path) -> None:
    query = BayestarQuery(map_fname=str(path))
    distance = np.array([100.0, 297.0, 300.0, 1000.0])  # the table has 298.5, covered to 300
    _, flags = query(at(distance), mode="mean", return_flags=True)
    assert flags["converged"].all()
    np.testing.assert_array_equal(flags["reliable_dist"], [True, True, False, False])
    inside = MODULI[5 * np.log10(30.0) > MODULI]
    with h5py.File(path) as file:
        info = file["pixel_info"][:]
    np.testing.assert_allclose(info["DM_reliable_max"], inside[-1], rtol=1e-6)
    np.testing.assert_allclose(info["DM_reliable_min"], 4.0)


def test_structure_and_provenance(path: Path) -> None:
    with h5py.File(path) as file:
        assert sorted(file) == ["best_fit", "pixel_info", "samples"]
        assert file["samples"].shape == (12 * NSIDE**2, 4, 120)
        assert file["samples"].dtype == file["best_fit"].dtype == np.float32
        assert file["pixel_info"].dtype.names == (
            "nside",
            "healpix_index",
            "converged",
            "DM_reliable_min",
            "DM_reliable_max",
            "n_stars",
        )
        assert (file["pixel_info"]["n_stars"] == -1).all()
        np.testing.assert_array_equal(file["pixel_info"].attrs["DM_bin_edges"], MODULI)
        assert "0.884" in file.attrs["comment"]
        assert file.attrs["extinction_system"] == "Bayestar19"
        assert "0" * 64 in file.attrs["history"]


def test_pixels_without_coverage_and_numbers_of_stars(tmp_path: Path) -> None:
    path = tmp_path / "map.h5"
    stars = np.arange(12, dtype=np.int64)
    options = BayestarOptions(1, samples=1, n_stars=stars)
    write_bayestar(path, replace(FIELD, covered=0.0), options, PROVENANCE)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["pixel_info"]["n_stars"], stars)
        assert np.isnan(file["pixel_info"]["DM_reliable_max"]).all()
    where = SkyCoord([0.0] * u.deg, [0.0] * u.deg, [200.0] * u.pc, frame="galactic")
    _, flags = BayestarQuery(map_fname=str(path))(where, mode="mean", return_flags=True)
    assert not flags["reliable_dist"].any()


def test_errors_name_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "map.h5"
    with pytest.raises(ValueError, match="ask for fewer"):
        write_bayestar(path, FIELD, BayestarOptions(1, samples=5), PROVENANCE)
    with pytest.raises(ValueError, match="custom system"):
        write_bayestar(path, replace(FIELD, named="custom:x"), BayestarOptions(1), PROVENANCE)
    with pytest.raises(ValueError, match="one number for each of 12 pixels"):
        BayestarOptions(1, n_stars=np.zeros(5, np.int64))
    with pytest.raises(ValueError, match="samples: expected at least 1"):
        BayestarOptions(1, samples=0)
    assert list(tmp_path.iterdir()) == []
