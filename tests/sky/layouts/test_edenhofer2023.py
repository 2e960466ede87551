"""The Edenhofer layout, as the dustmaps package reads it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.sky.layouts import EdenhoferOptions, RadialBins, write_edenhofer2023
from dustmap.sky.systems import system_named
from tests.sky.layouts.analytic import CLOUDS, PLACES, PROVENANCE, AnalyticField, place
from tests.sky.layouts.readers import Edenhofer2023Query

FIELD = AnalyticField(CLOUDS)
BINS = RadialBins(40.0, 350.0)
OPTIONS = EdenhoferOptions(BINS, nside=32)


@pytest.fixture(scope="module")
def mean_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edenhofer") / "mean_and_std_healpix.fits"
    counts = write_edenhofer2023(path, FIELD, OPTIONS, PROVENANCE)
    assert counts.values == 2 * 516 * 12 * 32**2
    assert counts.outside == counts.raised == 0
    return path


def coordinates() -> SkyCoord:
    l, b, d = np.array(PLACES).T
    return SkyCoord(l * u.deg, b * u.deg, d * u.pc, frame="galactic")


def pixel_centres(nside: int = 32) -> SkyCoord:
    """Nearest to the places, where nothing is interpolated."""
    import healpy

    l, b, d = np.array(PLACES).T
    l, b = healpy.pix2ang(nside, healpy.ang2pix(nside, l, b, lonlat=True), lonlat=True)
    k = np.abs(BINS.centres - d[:, None]).argmin(-1)
    return SkyCoord(l * u.deg, b * u.deg, BINS.centres[k] * u.pc, frame="galactic")


def truth(where: SkyCoord) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Density and A(<d)."""
    x = where.cartesian.xyz.to_value(u.pc).T
    return FIELD.density(x), FIELD.integral(np.zeros_like(x), x)


def test_dustmaps_returns_our_densities_at_pixel_centres(mean_file: Path) -> None:
    query = Edenhofer2023Query(map_fname=str(mean_file))
    where = pixel_centres()
    density, _ = truth(where)
    np.testing.assert_allclose(query(where, mode="mean"), density, rtol=2e-5)
    spread = np.std(1 + np.array(FIELD.scales), ddof=1)
    np.testing.assert_allclose(query(where, mode="std"), spread * density, rtol=2e-5)
    np.testing.assert_allclose(query.distances.value, BINS.centres)
    np.testing.assert_allclose(query.distance_bounds.value, BINS.boundaries)


def test_dustmaps_interpolates_our_densities(mean_file: Path) -> None:
    """Clouds are 8° wide and pixels 1.8°: what its interpolation on the sky leaves."""
    query = Edenhofer2023Query(map_fname=str(mean_file))
    density, _ = truth(coordinates())
    np.testing.assert_allclose(query(coordinates(), mode="mean"), density, rtol=1.5e-2)


def test_dustmaps_integrates_to_half_a_bin_more(mean_file: Path) -> None:
    query = Edenhofer2023Query(map_fname=str(mean_file), integrated=True)
    where = pixel_centres()
    density, integral = truth(where)
    found = query(where)
    half = where.distance.value * np.log(BINS.farthest / BINS.nearest) / (2 * BINS.count)
    np.testing.assert_allclose(found, integral + half * density, rtol=2e-4)
    np.testing.assert_allclose(found, integral, rtol=1.5e-2)
    np.testing.assert_allclose(found[-1], integral[-1], rtol=4e-3)  # an even density


def test_places_outside_are_nan(mean_file: Path) -> None:
    query = Edenhofer2023Query(map_fname=str(mean_file))
    outside = SkyCoord([90, 90] * u.deg, [0, 0] * u.deg, [30, 360] * u.pc, frame="galactic")
    assert np.isnan(query(outside)).all()


def test_file_is_strict_fits_with_provenance(mean_file: Path) -> None:
    with fits.open(mean_file, checksum=True) as hdus:
        hdus.verify("exception")
        names = [hdu.name for hdu in hdus]
        assert names == [
            "PRIMARY",
            "MEAN",
            "RADIAL PIXEL CENTERS",
            "RADIAL PIXEL BOUNDARIES",
            "STD.",
            "MEAN OF INTEGRATED INNER 40 PC",
            "STD. OF INTEGRATED INNER 40 PC",
        ]
        header = hdus["MEAN"].header
        assert hdus["MEAN"].data.shape == (516, 12288)
        assert u.Unit(header["BUNIT"], format="fits") == u.mag / u.pc
        assert header["EXTSYS"] == "A_V"
        assert "0" * 64 in "".join(header["HISTORY"])


def test_healpy_reads_a_shell(mean_file: Path) -> None:
    import healpy

    with fits.open(mean_file) as hdus:
        k = int(np.abs(hdus[2].data["radial pixel centers"] - 200).argmin())
        shell = hdus["MEAN"].data[k].astype(np.float64)
    peak = healpy.pix2ang(32, int(shell.argmax()), nest=True, lonlat=True)
    np.testing.assert_allclose(peak, (120, 45), atol=2)
    at = healpy.get_interp_val(shell, 90.0, 0.0, nest=True, lonlat=True)
    np.testing.assert_allclose(at, FIELD.density(place(90, 0, 200)), rtol=1.5e-2)


def test_dustmaps_reads_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.fits"
    write_edenhofer2023(path, FIELD, replace(OPTIONS, nside=16, samples=3), PROVENANCE)
    with fits.open(path, checksum=True) as hdus:
        hdus.verify("exception")
        assert [hdu.name for hdu in hdus][-1] == "INTEGRATED INNER 40 PC"
    where = pixel_centres(16)
    density, integral = truth(where)
    scales = 1 + np.array(FIELD.scales)[:3]
    query = Edenhofer2023Query(map_fname=str(path), load_samples=True)
    found = query(where, mode="samples")
    np.testing.assert_allclose(found, np.multiply.outer(density, scales), rtol=2e-5)
    query = Edenhofer2023Query(map_fname=str(path), load_samples=True, integrated=True)
    np.testing.assert_allclose(query(where, mode="std"), integral * scales.std(), rtol=1.5e-2)


def test_beyond_the_box_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    options = EdenhoferOptions(bins=RadialBins(40.0, 800.0, 20), nside=4)
    counts = write_edenhofer2023(path, FIELD, options, PROVENANCE)
    with fits.open(path) as hdus:
        missing = np.isnan(hdus["MEAN"].data)
    assert counts.outside == 2 * missing.sum() > 0
    assert not missing[:14].any()


def test_bins_of_the_box_reach_its_farthest_face() -> None:
    bins = RadialBins.of_box(FIELD)
    assert bins == RadialBins(21.0, 420.0, 516)


def test_another_system(tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    options = EdenhoferOptions(RadialBins(40.0, 350.0, 30), 4, system=system_named("E(ZGR23)"))
    write_edenhofer2023(path, FIELD, options, PROVENANCE)
    with fits.open(path) as hdus:
        assert hdus["MEAN"].header["EXTSYS"] == "E(ZGR23)"
        np.testing.assert_allclose(hdus["MEAN"].data.min(), 1e-3 / 2.8, rtol=1e-4)


def test_densities_that_are_not_positive(tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    negative = replace(FIELD, background=-1e-4)
    options = EdenhoferOptions(RadialBins(40.0, 350.0, 30), 4)
    with pytest.raises(ValueError, match=r"model\.density = 'lognormal'"):
        write_edenhofer2023(path, negative, options, PROVENANCE)
    assert list(tmp_path.iterdir()) == []
    counts = write_edenhofer2023(path, negative, replace(options, floor=1e-9), PROVENANCE)
    with fits.open(path, checksum=True) as hdus:
        raised = hdus["MEAN"].data == np.float32(1e-9)
        assert hdus["MEAN"].header["NRAISED"] == counts.raised == raised.sum() > 0


def test_errors_name_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    with pytest.raises(ValueError, match="nside: expected a power of two"):
        EdenhoferOptions(nside=48)
    with pytest.raises(ValueError, match="expected 0 < nearest < farthest"):
        RadialBins(100.0, 50.0)
    with pytest.raises(ValueError, match="ask for fewer"):
        write_edenhofer2023(path, FIELD, EdenhoferOptions(samples=9), PROVENANCE)
    away = replace(FIELD, box=((10.0, -10.0, -10.0), (90.0, 10.0, 10.0)))
    with pytest.raises(ValueError, match="the Sun"):
        write_edenhofer2023(path, away, EdenhoferOptions(), PROVENANCE)
