"""Cubes of G-Tomo: the Sun in the right voxel, in FITS and in HDF5, written and read."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits

from dustmap.gp import RegularGrid
from dustmap.sky.layouts import GTomoOptions, read_gtomo, write_gtomo
from dustmap.sky.maps import Quantity
from dustmap.sky.systems import conversion, system_named
from tests.sky.layouts.analytic import CLOUDS, PROVENANCE, AnalyticField

FIELD = AnalyticField(CLOUDS)
GRID = RegularGrid((-50.0, -150.0, -75.0), (25.0, 25.0, 25.0), (17, 18, 9))
OPTIONS = GTomoOptions(GRID, resolution=50.0)
FACTOR = conversion(system_named("A_V"), system_named("A0_550"))


def expected() -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
    """[z, y, x]."""
    return FACTOR * FIELD.density(GRID.points().numpy()).reshape(GRID.shape).transpose()


def test_fits_cube(tmp_path: Path) -> None:
    path = tmp_path / "cube.fits"
    counts = write_gtomo(path, FIELD, OPTIONS, PROVENANCE)
    assert counts.values == GRID.size
    with fits.open(path, checksum=True) as hdus:
        hdus.verify("exception")
        header, data = hdus[0].header, hdus[0].data
        assert len(hdus) == 1
        np.testing.assert_allclose(data, expected(), rtol=1e-6)
    assert header["STEP"] == 25.0
    assert header["RESOL"] == 50.0
    assert header["UNIT"] == "A0(550nm)/parsec"
    # A reader's own arithmetic for the cloud at l = 90°, 200 pc: edge convention.
    sun = np.array([header[f"SUN_POS{axis}"] for axis in "XYZ"])
    np.testing.assert_allclose(sun, [2.5, 6.5, 3.5])
    i, j, k = (np.array([0.0, 200.0, 0.0]) / header["STEP"] + sun - 0.5).astype(int)
    np.testing.assert_allclose(data[k, j, i], FACTOR * 0.021, rtol=1e-4)
    assert "0" * 64 in "".join(header["HISTORY"])


def test_hdf5_cube_as_g_tomo_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "cube.h5"
    write_gtomo(path, FIELD, OPTIONS, PROVENANCE)
    with h5py.File(path) as file:
        cube = file["explore/cube_datas"]
        np.testing.assert_allclose(cube[:], expected().transpose(), rtol=1e-6)
        stored = cube.attrs["sun_position"]
        turned = np.append(stored[1:], stored[0])
        np.testing.assert_allclose(turned, [2.5, 6.5, 3.5])
        np.testing.assert_allclose(cube.attrs["gridstep_values"], 25.0)
        np.testing.assert_allclose(cube.attrs["resolution_values"], 50.0)
        assert "0" * 64 in file.attrs["history"]


@pytest.mark.parametrize("name", ["cube.fits", "cube.hdf5"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_gtomo(path, FIELD, replace(OPTIONS, quantity=Quantity.STD), PROVENANCE)
    cube = read_gtomo(path, quantity=Quantity.STD)
    spread = np.std(1 + np.array(FIELD.scales), ddof=1)
    assert cube.std is not None
    np.testing.assert_allclose(cube.std, spread * expected(), rtol=1e-6)
    np.testing.assert_allclose(cube.grid.lower, GRID.lower, atol=1e-9)
    assert cube.grid.spacing == GRID.spacing
    assert cube.grid.shape == GRID.shape
    assert cube.system == system_named("A0_550")


def test_published_cubes(tmp_path: Path) -> None:
    """The header of the 50-pc cube of Vergely et al. (2022), and an older HDF5 cube."""
    data = np.zeros((5, 7, 9), ">f4")
    data[2, 3, 4] = 1.0
    header = fits.Header()
    header.update(CREATION="2022", CREATOR="EXPLORE (ACRI-ST)", VERSION="v2", STEP=20.0)
    header.update(RESOL=50.0, UNIT="A0(550nm)/parsec", SUN_POSX=4.5, SUN_POSY=3.5, SUN_POSZ=2.5)
    fits.PrimaryHDU(data, header).writeto(tmp_path / "explore.fits")
    cube = read_gtomo(tmp_path / "explore.fits")
    assert cube.grid.lower == (-80.0, -60.0, -40.0)
    sun = SkyCoord([0] * u.deg, [0] * u.deg, [1e-6] * u.pc, frame="galactic")
    np.testing.assert_allclose(cube.query(sun), 1.0)
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["stilism/cube_datas"] = data.transpose()
        file["stilism/cube_datas"].attrs["sun_position"] = [4.5, 3.5, 2.5]
        file["stilism/cube_datas"].attrs["gridstep_values"] = [5.0, 5.0, 5.0]
    with pytest.raises(ValueError, match=r"E\(B-V\) for STILISM of 2018"):
        read_gtomo(tmp_path / "old.h5")
    cube = read_gtomo(tmp_path / "old.h5", system_named("E(B-V)"))
    np.testing.assert_allclose(cube.grid.lower, (-20.0, -15.0, -10.0))
    assert cube.mean[2, 3, 4] == 1.0
    with pytest.raises(ValueError, match="the file is in A0_550"):
        read_gtomo(tmp_path / "explore.fits", system_named("E(B-V)"))


def test_errors_name_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of one step"):
        GTomoOptions(RegularGrid((0.0, 0.0, 0.0), (1.0, 2.0, 1.0), (3, 3, 3)))
    with pytest.raises(ValueError, match="expected a density"):
        GTomoOptions(GRID, quantity=Quantity.COVERAGE)
    too_large = GTomoOptions(RegularGrid((-500.0, 0.0, 0.0), (10.0, 10.0, 10.0), (3, 3, 3)))
    with pytest.raises(ValueError, match="grid along X"):
        write_gtomo(tmp_path / "cube.fits", FIELD, too_large, PROVENANCE)
    assert list(tmp_path.iterdir()) == []
    fits.PrimaryHDU(np.zeros((2, 2))).writeto(tmp_path / "image.fits")
    with pytest.raises(ValueError, match="the card STEP"):
        read_gtomo(tmp_path / "image.fits")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["mean"] = [1.0]
    with pytest.raises(ValueError, match="expected the dataset explore/cube_datas"):
        read_gtomo(tmp_path / "other.h5")
