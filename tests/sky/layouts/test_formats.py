"""Layouts by name: each takes of a request what it has a place for."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from astropy.io import fits

from dustmap.gp import RegularGrid
from dustmap.sky.layouts import LAYOUTS, LayoutRequest, RadialBins
from dustmap.sky.maps import MapRequest, Quantity
from tests.sky.layouts.analytic import CLOUDS, PROVENANCE, AnalyticField

FIELD = AnalyticField(CLOUDS, box=((-30.0, -25.0, -20.0), (24.0, 27.0, 22.0)))
GRID = RegularGrid((-20.0, -20.0, -10.0), (10.0, 10.0, 10.0), (5, 4, 3))
EVERYTHING = MapRequest(tuple(Quantity), 3)


def asked(request: MapRequest) -> LayoutRequest:
    return LayoutRequest(request, GRID, nside=1, bins=RadialBins(5.0, 20.0, 4))


def units(path: Path) -> list[str]:
    with fits.open(path, checksum=True) as hdus:
        hdus.verify("exception")
        return [hdu.name for hdu in hdus]


def test_names_are_those_of_the_command_line() -> None:
    assert list(LAYOUTS) == ["healpix", "edenhofer2023", "leike2020", "bayestar", "gtomo"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_every_request(tmp_path: Path, name: str) -> None:
    path = tmp_path / "map"
    counts = LAYOUTS[name](path, FIELD, asked(EVERYTHING), PROVENANCE, False)
    assert counts.values >= counts.outside > 0 or name in ("gtomo", "edenhofer2023", "healpix")


def test_edenhofer2023_has_samples_or_moments(tmp_path: Path) -> None:
    path, write = tmp_path / "map.fits", LAYOUTS["edenhofer2023"]
    write(path, FIELD, asked(EVERYTHING), PROVENANCE, False)
    assert "MEAN" in units(path)
    write(path, FIELD, asked(MapRequest((Quantity.SAMPLES,), 2)), PROVENANCE, True)
    assert units(path)[1] == "SAMPLES"


def test_healpix_has_integrals_of_what_is_known(tmp_path: Path) -> None:
    path, write = tmp_path / "map.fits", LAYOUTS["healpix"]
    write(path, FIELD, asked(MapRequest((Quantity.P16,))), PROVENANCE, False)
    assert units(path)[1:4] == ["DENSITY_P16", "INTEGRATED_MEAN", "INTEGRATED_STD"]
    known = AnalyticField(CLOUDS, box=FIELD.box, scales=(0.0,))
    write(path, known, asked(MapRequest((Quantity.MEAN,))), PROVENANCE, True)
    assert units(path)[1:4] == ["DENSITY_MEAN", "INTEGRATED_MEAN", "RADIAL PIXEL CENTERS"]


@pytest.mark.parametrize("finer", [(), (RegularGrid((-8.0,) * 3, (1.0,) * 3, (17, 17, 17)),)])
def test_healpix_has_no_more_pixels_and_bins_than_voxels_resolve(
    tmp_path: Path, finer: tuple[RegularGrid, ...]
) -> None:
    """Nodes 10 pc apart as far as 20 pc: half a radian; and 1 pc as far as 8 pc."""
    path, request = tmp_path / "map.fits", MapRequest((Quantity.MEAN,))
    angle, nside = (0.125, 16) if finer else (0.5, 4)
    LAYOUTS["healpix"](path, FIELD, LayoutRequest(request, GRID, finer=finer), PROVENANCE, False)
    with fits.open(path) as hdus:
        assert hdus["DENSITY_MEAN"].header["NSIDE"] == nside
        edges = hdus["RADIAL PIXEL BOUNDARIES"].data.field(0)
    widths = np.diff(edges) / edges[:-1]
    assert edges[-1] == pytest.approx(30.0)
    assert 0.8 * angle < widths.max() <= angle
    assert np.sqrt(np.pi / 3.0) / nside <= angle < 2.0 * np.sqrt(np.pi / 3.0) / nside


def test_gtomo_has_the_one_cube_asked_for(tmp_path: Path) -> None:
    path, write = tmp_path / "cube.fits", LAYOUTS["gtomo"]
    write(path, FIELD, asked(MapRequest((Quantity.STD,))), PROVENANCE, False)
    assert any("std;" in line for line in fits.getheader(path)["HISTORY"])


def test_bayestar_has_as_many_samples_as_asked_for(tmp_path: Path) -> None:
    path, write = tmp_path / "map.h5", LAYOUTS["bayestar"]
    for request, expected in ((EVERYTHING, 3), (MapRequest((Quantity.MEAN,)), 4)):
        write(path, FIELD, asked(request), PROVENANCE, True)
        with h5py.File(path) as file:
            assert file["samples"].shape == (12, expected, 120)
