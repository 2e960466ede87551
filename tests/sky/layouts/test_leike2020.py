"""The Leike layout, as the dustmaps package reads it."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord

from dustmap.sky.layouts import LeikeOptions, write_leike2020
from dustmap.sky.systems import conversion, system_named
from tests.sky.layouts.analytic import CLOUDS, PROVENANCE, AnalyticField
from tests.sky.layouts.readers import Leike2020Query

# One corner of every axis is off the voxels, and all sides differ.
FIELD = AnalyticField(CLOUDS, box=((-60.2, -30.0, -22.0), (21.0, 62.7, 9.5)))
SHAPE = (430, 450, 290)
PER_KPC = 1e3 / 1.0857362  # e-foldings per kpc of 1 mag/pc


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("leike") / "mean_std.h5"
    counts = write_leike2020(path, FIELD, LeikeOptions(SHAPE), PROVENANCE)
    assert counts.values == 2 * np.prod(SHAPE)
    assert counts.values - counts.outside == 2 * 81 * 93 * 32
    return path


def coordinates(x: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> SkyCoord:
    u_, v, w = x.T * u.pc
    return SkyCoord(u=u_, v=v, w=w, representation_type="cartesian", frame="galactic")


def test_dustmaps_returns_our_densities_at_voxels_and_nan_outside(path: Path) -> None:
    reader = Leike2020Query(map_fname=str(path))
    x = np.array([[-0.5, 50.5, 0.5], [15.5, 0.5, -0.5], [-20.5, 20.5, 8.5], [-59.5, -29.5, -21.5]])
    factor = conversion(system_named("A_V"), system_named("A_G")) * PER_KPC
    expected = FIELD.density(x) * factor
    np.testing.assert_allclose(reader(coordinates(x)), expected, rtol=1e-6)
    spread = np.std(1 + np.array(FIELD.scales), ddof=1)
    found = reader(coordinates(x), component="std")
    np.testing.assert_allclose(found, spread * expected, rtol=1e-6)
    outside = np.array([[-60.5, 0.5, 0.5], [21.5, 0.5, 0.5], [0.5, 63.5, 0.5], [0.5, 0.5, 10.5]])
    assert np.isnan(reader(coordinates(outside))).all()


def test_structure_and_provenance(path: Path) -> None:
    with h5py.File(path) as file:
        assert sorted(file) == ["mean", "std"]
        assert file["mean"].shape == SHAPE
        assert file["mean"].dtype == np.float32
        # Centres −59.5 to 20.5, −29.5 to 62.5, −21.5 to 9.5, on the face.
        block = np.isfinite(file["mean"][300:, 300:, 200:])
        assert block.sum() == 81 * 93 * 32
        assert block[10:91, 40:133, 48:80].all()
        assert "0" * 64 in file.attrs["history"]
        assert file.attrs["units"] == "kpc-1"
        assert file.attrs["extinction_system"] == "e-folding_G"
        assert "A_V" in file.attrs["comment"]
    assert path.stat().st_size < 40e6


def test_maps_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "mean_std.h5"
    with pytest.raises(ValueError, match="custom system, which converts to nothing"):
        write_leike2020(path, replace(FIELD, named="custom:mine"), LeikeOptions(), PROVENANCE)
    far = replace(FIELD, box=((500.0, 0.0, 0.0), (600.0, 50.0, 50.0)))
    with pytest.raises(ValueError, match="no voxel of the Leike2020 layout"):
        write_leike2020(path, far, LeikeOptions(), PROVENANCE)
    with pytest.raises(ValueError, match="shape: expected"):
        LeikeOptions((741, 740, 540))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_full_size(tmp_path: Path) -> None:
    path = tmp_path / "mean_std.h5"
    field = AnalyticField(CLOUDS[:1], box=((-370.0, -370.0, -270.0), (370.0, 370.0, 270.0)))
    counts = write_leike2020(path, field, LeikeOptions(), PROVENANCE)
    assert counts.values == 2 * 740 * 740 * 540
    assert counts.outside == 0
    with h5py.File(path) as file:
        y, z = np.unravel_index(file["mean"][370].argmax(), (740, 540))
    assert y in (569, 570)
    assert z in (269, 270)
