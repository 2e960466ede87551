"""Maps: the right voxel in the right place, in zarr and in FITS, for any other reader."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from astropy.wcs import WCS

from dustmap.gp import RegularGrid
from dustmap.sky import DensityMap, Provenance, read_map, write_fits, write_zarr

GRID = RegularGrid(lower=(-40.0, -60.0, -10.0), spacing=(10.0, 20.0, 5.0), shape=(9, 7, 5))
PROVENANCE = Provenance(config_sha256="0" * 64, steps=("400 stars",), date="2026-01-02T03:04:05")


def cloud(x: float, y: float, z: float) -> DensityMap:
    """A map that is 1 at one node and 0 elsewhere."""
    points = GRID.points().numpy()
    mean = np.linalg.norm(points - [x, y, z], axis=-1) < 1e-6
    assert mean.sum() == 1
    return DensityMap.from_nodes(GRID, mean.astype(np.float64), np.full(GRID.size, 0.25), "A_V")


def random_map() -> DensityMap:
    rng = np.random.default_rng(0)
    return DensityMap.from_nodes(GRID, rng.normal(size=GRID.size), rng.random(GRID.size), "A_V")


def assert_same(a: DensityMap, b: DensityMap) -> None:
    assert a.grid.shape == b.grid.shape
    np.testing.assert_allclose(a.grid.lower, b.grid.lower)
    np.testing.assert_allclose(a.grid.spacing, b.grid.spacing)
    np.testing.assert_array_equal(a.mean, b.mean)
    assert (a.std is None) == (b.std is None)
    if a.std is not None and b.std is not None:
        np.testing.assert_array_equal(a.std, b.std)
    assert a.system == b.system


def test_arrays_are_z_y_x() -> None:
    density = random_map()
    assert density.mean.shape == (5, 7, 9)
    values = np.random.default_rng(0).normal(size=GRID.size).reshape(GRID.shape)
    assert density.mean[4, 2, 7] == np.float32(values[7, 2, 4])


def test_fits_puts_a_cloud_at_l90_on_the_y_axis(tmp_path: Path) -> None:
    """Where a SkyCoord points, the WCS finds the voxel: catches swapped axes and the sign of l."""
    write_fits(tmp_path / "map.fits", cloud(0.0, 40.0, 0.0), PROVENANCE)
    where = SkyCoord(l=90 * u.deg, b=0 * u.deg, distance=40 * u.pc, frame="galactic")
    with fits.open(tmp_path / "map.fits", checksum=True) as hdus:
        hdus.verify("exception")
        wcs = WCS(hdus["MEAN"].header)
        voxel = wcs.world_to_array_index_values(*where.cartesian.xyz.to_value(u.pc))
        assert hdus["MEAN"].data[tuple(int(i) for i in voxel)] == 1.0
        assert hdus["MEAN"].data.sum() == 1.0


def test_fits_finds_the_voxel_of_the_sun(tmp_path: Path) -> None:
    write_fits(tmp_path / "map.fits", cloud(0.0, 0.0, 0.0), PROVENANCE)
    with fits.open(tmp_path / "map.fits") as hdus:
        header = hdus["MEAN"].header
        sun = [round((0.0 - header[f"CRVAL{i}"]) / header[f"CDELT{i}"]) for i in (3, 2, 1)]
        assert hdus["MEAN"].data[tuple(sun)] == 1.0


def test_fits_has_the_cards_that_readers_look_for(tmp_path: Path) -> None:
    write_fits(tmp_path / "map.fits", random_map(), PROVENANCE)
    with fits.open(tmp_path / "map.fits", checksum=True) as hdus:
        assert [hdu.name for hdu in hdus] == ["PRIMARY", "MEAN", "STD."]
        assert hdus[0].data is None
        for hdu in hdus[1:]:
            header = hdu.header
            assert u.Unit(header["BUNIT"], format="cds") == u.mag / u.pc
            assert [header[f"CTYPE{i}"] for i in (1, 2, 3)] == ["X", "Y", "Z"]
            assert "CUNIT" not in header
            assert header["CNAME2"] == "heliocentric Galactic Y"
            assert header["EXTSYS"] == "A_V"
            assert {"CHECKSUM", "DATASUM", "DATE"} <= set(header)
            assert "0" * 64 in list(header["HISTORY"])
            assert "400 stars" in list(header["HISTORY"])
            assert WCS(header).world_axis_units == ["pc", "pc", "pc"]


def test_zarr_opens_with_xarray_and_puts_the_cloud_at_its_coordinates(tmp_path: Path) -> None:
    write_zarr(tmp_path / "map.zarr", cloud(0.0, 40.0, 0.0), PROVENANCE)
    with xr.open_zarr(tmp_path / "map.zarr", consolidated=False) as dataset:
        assert dataset.density_mean.dims == ("z", "y", "x")
        assert float(dataset.density_mean.sel(x=0, y=40, z=0)) == 1.0
        assert float(dataset.density_mean.sum()) == 1.0
        assert dataset.density_mean.attrs["units"] == "mag.pc-1"
        assert dataset.x.attrs["units"] == "pc"
        assert dataset.attrs["config_sha256"] == "0" * 64


def test_zarr_is_version_3_and_names_its_dimensions(tmp_path: Path) -> None:
    write_zarr(tmp_path / "map.zarr", random_map(), PROVENANCE)
    group = zarr.open_group(tmp_path / "map.zarr", mode="r")
    array = group["density_std"]
    assert isinstance(array, zarr.Array)
    assert array.metadata.zarr_format == 3
    assert array.metadata.dimension_names == ("z", "y", "x")


@pytest.mark.parametrize("name", ["map.zarr", "map.fits"])
def test_maps_read_back_exactly(tmp_path: Path, name: str) -> None:
    write = write_zarr if name.endswith("zarr") else write_fits
    write(tmp_path / name, random_map(), PROVENANCE)
    assert_same(read_map(tmp_path / name), random_map())
    assert_same(read_map(tmp_path), random_map())
    truth = replace(random_map(), std=None)
    write(tmp_path / name, truth, PROVENANCE, overwrite=True)
    assert_same(read_map(tmp_path / name), truth)


@pytest.mark.parametrize("name", ["map.zarr", "map.fits"])
def test_a_map_is_replaced_only_when_told_and_leaves_nothing_behind(
    tmp_path: Path, name: str
) -> None:
    write = write_zarr if name.endswith("zarr") else write_fits
    write(tmp_path / name, random_map(), PROVENANCE)
    with pytest.raises(FileExistsError, match="exists already"):
        write(tmp_path / name, cloud(0.0, 0.0, 0.0), PROVENANCE)
    assert_same(read_map(tmp_path / name), random_map())
    write(tmp_path / name, cloud(0.0, 0.0, 0.0), PROVENANCE, overwrite=True)
    assert_same(read_map(tmp_path / name), cloud(0.0, 0.0, 0.0))
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_failed_write_leaves_the_old_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    write_zarr(tmp_path / "map.zarr", random_map(), PROVENANCE)
    monkeypatch.setattr(xr.Dataset, "to_zarr", fail)
    with pytest.raises(OSError, match="disk full"):
        write_zarr(tmp_path / "map.zarr", cloud(0.0, 0.0, 0.0), PROVENANCE, overwrite=True)
    assert_same(read_map(tmp_path / "map.zarr"), random_map())
    assert [entry.name for entry in tmp_path.iterdir()] == ["map.zarr"]


def test_what_is_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a run directory"):
        read_map(tmp_path)
    fits.HDUList([fits.PrimaryHDU()]).writeto(tmp_path / "empty.fits")
    with pytest.raises(ValueError, match="expected an image MEAN"):
        read_map(tmp_path / "empty.fits")
    xr.Dataset({"other": ("x", [1.0])}).to_zarr(
        tmp_path / "other.zarr", zarr_format=3, consolidated=False
    )
    with pytest.raises(ValueError, match=r"density_mean, got \[\"other\"\]"):
        read_map(tmp_path / "other.zarr")


def test_a_map_checks_its_arrays() -> None:
    with pytest.raises(ValueError, match=r"mean must have shape \(z, y, x\) = \(5, 7, 9\)"):
        DensityMap(GRID, np.zeros((9, 7, 5), np.float32), None, "A_V")
    with pytest.raises(ValueError, match="3 axes"):
        DensityMap(RegularGrid((0, 0), (1, 1), (3, 3)), np.zeros((3, 3), np.float32), None, "A_V")


def test_slices_are_found_by_their_height() -> None:
    density = random_map()
    assert density.nearest_slice(1.0) == 2
    assert density.nearest_slice(-12.5) == 0
    with pytest.raises(ValueError, match=r"z = 13 pc: expected -12\.5 to 12\.5 pc"):
        density.nearest_slice(13.0)
