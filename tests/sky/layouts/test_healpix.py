"""Shells of HEALPix pixels, as healpy reads them."""

from dataclasses import replace
from pathlib import Path

import healpy
import numpy as np
import pytest
from astropy import units as u
from astropy.io import fits

from dustmap.sky.layouts import HealpixOptions, RadialBins, write_healpix
from dustmap.sky.maps import MapRequest, Quantity
from tests.sky.layouts.analytic import CLOUDS, PROVENANCE, AnalyticField, Cloud

# Samples of both signs: this layout takes no logarithm.
FIELD = AnalyticField(CLOUDS, background=-1e-4)
NSIDE = 8
BINS = RadialBins(20.0, 500.0, 12)
CUBES = (Quantity.MEAN, Quantity.P84, Quantity.COVERAGE, Quantity.SAMPLES)
OPTIONS = HealpixOptions(BINS, NSIDE, MapRequest(CUBES, 2), (Quantity.MEAN, Quantity.STD))
SCALES = 1 + np.array(FIELD.scales)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("healpix") / "map.fits"
    counts = write_healpix(path, FIELD, OPTIONS, PROVENANCE)
    assert counts.values == 7 * 12 * 12 * NSIDE**2
    assert counts.outside > 0
    return path


def directions() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.stack(healpy.pix2vec(NSIDE, np.arange(12 * NSIDE**2), nest=True), axis=-1)


def test_healpy_reads_densities_and_integrals(path: Path) -> None:
    for k in (0, 8):
        x = BINS.centres[k] * directions()
        density, integral = FIELD.density(x), FIELD.integral(np.zeros_like(x), x)
        expected = {
            "DENSITY_MEAN": SCALES.mean() * density,
            "DENSITY_P84": 1.2 * density,
            "SAMPLE_02": SCALES[1] * density,
            "INTEGRATED_MEAN": SCALES.mean() * integral,
            "INTEGRATED_STD": SCALES.std(ddof=1) * np.abs(integral),
        }
        for hdu, values in expected.items():
            found = healpy.read_map(path, hdu=hdu, field=k, nest=True, dtype=np.float64)
            np.testing.assert_allclose(found, values, rtol=2e-5, atol=1e-8)
    nested = healpy.read_map(path, hdu="DENSITY_MEAN", field=8, nest=True)
    ring = healpy.read_map(path, hdu="DENSITY_MEAN", field=8)
    np.testing.assert_array_equal(ring, healpy.reorder(nested, n2r=True))


def test_outside_the_box_is_nan_in_densities_and_integrals(path: Path) -> None:
    x = BINS.centres[-1] * directions()
    outside = ((x < FIELD.lower) | (x > FIELD.upper)).any(-1)
    assert 0 < outside.sum() < len(outside)
    with fits.open(path) as hdus:
        for name in ("DENSITY_MEAN", "INTEGRATED_MEAN", "INTEGRATED_STD", "COVERAGE"):
            np.testing.assert_array_equal(np.isnan(hdus[name].data["SHELL_011"]), outside)


@pytest.mark.parametrize("count", [12, 120])
@pytest.mark.parametrize("background", [1e-3, 1e-5])
def test_integrated_std_is_that_of_whole_rays(
    tmp_path: Path, count: int, background: float
) -> None:
    """Not the spread of the samples, which lack some of it; of many shells within a per cent, and
    behind a dense cloud between two of the distances where rays are whole."""
    directions = np.stack(healpy.pix2vec(2, np.arange(48), nest=True), axis=-1)[:, None]
    cloud = Cloud(150.0 * directions[7, 0], 8.0, 0.02)
    field = replace(FIELD, clouds=(*CLOUDS, cloud), background=background, lack=1e-5)
    bins = RadialBins(20.0, 330.0, count)
    options = HealpixOptions(bins, 2, MapRequest((Quantity.MEAN,)), (Quantity.STD,))
    write_healpix(tmp_path / "map.fits", field, options, PROVENANCE)
    x = directions * bins.centres[:, None]
    from_sun = field.integral(np.zeros_like(x).reshape(-1, 3), x.reshape(-1, 3)).reshape(48, count)
    spread = SCALES.std(ddof=1) * from_sun
    expected = np.sqrt(spread**2 + 1e-5 * bins.centres)
    with fits.open(tmp_path / "map.fits") as hdus:
        rows = hdus["INTEGRATED_STD"].data
        found = np.stack([rows[name] for name in rows.names], axis=1)
    assert (spread / expected).min() < 0.5
    np.testing.assert_allclose(found, expected, rtol=2e-5 if count <= 32 else 0.01)


def test_file_is_strict_fits(path: Path) -> None:
    with fits.open(path, checksum=True) as hdus:
        hdus.verify("exception")
        assert [hdu.name for hdu in hdus][1:] == [
            "DENSITY_MEAN",
            "DENSITY_P84",
            "COVERAGE",
            "SAMPLE_01",
            "SAMPLE_02",
            "INTEGRATED_MEAN",
            "INTEGRATED_STD",
            "RADIAL PIXEL CENTERS",
            "RADIAL PIXEL BOUNDARIES",
        ]
        header = hdus["DENSITY_MEAN"].header
        assert header["EXTSYS"] == "A_V"
        assert u.Unit(header["TUNIT3"], format="fits") == u.mag / u.pc
        assert hdus["INTEGRATED_STD"].header["TUNIT3"] == "mag"
        assert "TUNIT3" not in hdus["COVERAGE"].header
        assert "0" * 64 in "".join(header["HISTORY"])
        np.testing.assert_allclose(hdus[-1].data["radial pixel boundaries"], BINS.boundaries)


def test_errors_name_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 999"):
        HealpixOptions(RadialBins(1.0, 2.0, 1000))
    with pytest.raises(ValueError, match="mean, std, both or none"):
        HealpixOptions(integrated=(Quantity.P16,))
    known = replace(FIELD, scales=())
    options = HealpixOptions(BINS, 1, MapRequest((Quantity.MEAN,)), (Quantity.STD,))
    with pytest.raises(ValueError, match=r"fit\.samples"):
        write_healpix(tmp_path / "map.fits", known, options, PROVENANCE)
    assert list(tmp_path.iterdir()) == []
