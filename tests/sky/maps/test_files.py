"""Cubes in files: the right voxel in the right place, for any reader, in bounded memory."""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from astropy.wcs import WCS

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky import Provenance
from dustmap.sky.maps import (
    DustMap,
    MapRequest,
    Quantity,
    Slabs,
    write_map,
)
from dustmap.sky.maps._between import CellVariance
from dustmap.sky.maps._write import halved
from tests.sky.maps.fields import A_V, FINE, NODES, node_field

PROVENANCE = Provenance(
    "0" * 64, ("400 stars",), "2026-01-02T03:04:05", catalog=("stars.fits",), seed=7
)
ALL = MapRequest(tuple(Quantity), samples=3)
#: More voxels than a chunk along two axes, and no multiples of one.
WIDE = RegularGrid(lower=(-40.0, -60.0, -10.0), spacing=(0.5, 20.0, 0.3), shape=(150, 6, 67))
NAMES = ("map.zarr", "map.fits")


def cloud(x: float, y: float, z: float) -> DustMap:
    """A map that is 1 at one node and 0 elsewhere."""
    points = NODES.points().numpy()
    mean = np.linalg.norm(points - [x, y, z], axis=-1) < 1e-6
    assert mean.sum() == 1
    return DustMap.from_nodes(NODES, mean.astype(np.float64), np.full(NODES.size, 0.25), A_V)


def assert_same(a: DustMap, b: DustMap) -> None:
    assert a.grid.shape == b.grid.shape
    np.testing.assert_allclose(a.grid.lower, b.grid.lower)
    np.testing.assert_allclose(a.grid.spacing, b.grid.spacing)
    assert a.available == b.available
    assert a.system == b.system
    assert a.n_samples == b.n_samples
    assert a.layout.positive == b.layout.positive
    for one, two in zip(a.layout.between, b.layout.between, strict=True):
        assert one.nodes == two.nodes
        assert one.table == pytest.approx(two.table, rel=1e-3)
    for cube in a.layout.cubes:
        mine, other = (of.cube(cube.quantity, cube.sample) for of in (a, b))
        np.testing.assert_array_equal(mine, other, err_msg=str(cube))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grid", [FINE, WIDE], ids=["fine", "wide"])
def test_fields_are_streamed_to_files_and_come_back(
    tmp_path: Path, name: str, grid: RegularGrid
) -> None:
    wanted = DustMap.from_field(node_field(), grid, ALL)
    write_map(tmp_path / name, Slabs.of_field(node_field(), grid, ALL), PROVENANCE)
    assert_same(DustMap.open(tmp_path / name), wanted)
    assert_same(DustMap.open(tmp_path), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_a_writer_does_not_change_the_numbers(tmp_path: Path, name: str) -> None:
    for folder, memory in (("a", 200_000), ("b", 2**30)):
        slabs = Slabs.of_field(node_field(), WIDE, ALL)
        write_map(tmp_path / folder / name, slabs, PROVENANCE, memory=memory)
    assert_same(*(DustMap.open(tmp_path / folder / name) for folder in "ab"))


@pytest.mark.parametrize("name", NAMES)
def test_maps_at_hand_are_written_whole(tmp_path: Path, name: str) -> None:
    wanted = DustMap.from_field(node_field(), NODES, ALL)
    write_map(tmp_path / name, wanted, PROVENANCE)
    assert_same(DustMap.open(tmp_path / name), wanted)
    negative = DustMap.from_nodes(NODES, np.linspace(-1, 1, NODES.size), None, "custom:mine")
    write_map(tmp_path / name, negative, PROVENANCE, overwrite=True)
    assert_same(DustMap.open(tmp_path / name), negative)
    assert DustMap.open(tmp_path / name).std is None
    with pytest.raises(ValueError, match=r"ends in \.zarr or \.fits"):
        write_map(tmp_path / "map.h5", negative, PROVENANCE)


def test_fits_puts_a_cloud_at_l90_on_the_y_axis(tmp_path: Path) -> None:
    """Where a SkyCoord points, the WCS finds the voxel: catches swapped axes and the sign of l."""
    write_map(tmp_path / "map.fits", cloud(0.0, 40.0, 0.0), PROVENANCE)
    where = SkyCoord(l=90 * u.deg, b=0 * u.deg, distance=40 * u.pc, frame="galactic")
    with fits.open(tmp_path / "map.fits", checksum=True) as hdus:
        hdus.verify("exception")
        wcs = WCS(hdus["MEAN"].header)
        voxel = wcs.world_to_array_index_values(*where.cartesian.xyz.to_value(u.pc))
        assert hdus["MEAN"].data[tuple(int(i) for i in voxel)] == 1.0
        assert hdus["MEAN"].data.sum() == 1.0
    assert DustMap.open(tmp_path).query(where) == pytest.approx(1.0)


def test_fits_finds_the_voxel_of_the_sun(tmp_path: Path) -> None:
    write_map(tmp_path / "map.fits", cloud(0.0, 0.0, 0.0), PROVENANCE)
    with fits.open(tmp_path / "map.fits") as hdus:
        header = hdus["MEAN"].header
        sun = [round((0.0 - header[f"CRVAL{i}"]) / header[f"CDELT{i}"]) for i in (3, 2, 1)]
        assert hdus["MEAN"].data[tuple(sun)] == 1.0


def test_fits_has_the_cards_that_readers_look_for(tmp_path: Path) -> None:
    write_map(tmp_path / "map.fits", Slabs.of_field(node_field(), FINE, ALL), PROVENANCE)
    images = ["MEAN", "STD.", "MEDIAN", "P16", "P84", "COVERAGE"]
    with fits.open(tmp_path / "map.fits", checksum=True) as hdus:
        hdus.verify("exception")
        assert [hdu.name for hdu in hdus] == [
            "PRIMARY",
            *images,
            *(f"SAMPLE_0{k}" for k in (1, 2, 3)),
        ]
        assert hdus[0].data is None
        for hdu in hdus[1:]:
            header = hdu.header
            if hdu.name != "COVERAGE":
                assert u.Unit(header["BUNIT"], format="cds") == u.mag / u.pc
            assert [header[f"CTYPE{i}"] for i in (1, 2, 3)] == ["X", "Y", "Z"]
            assert "CUNIT" not in header
            assert header["CNAME2"] == "heliocentric Galactic Y"
            assert header["EXTSYS"] == "A_V"
            assert {"CHECKSUM", "DATASUM", "DATE"} <= set(header)
            lines = list(header["HISTORY"])
            assert {"0" * 64, "400 stars", "catalog: stars.fits", "seed: 7"} <= set(lines)
            assert WCS(header).world_axis_units == ["pc", "pc", "pc"]
            assert hdu.data.shape == (4, 13, 11)


def test_zarr_opens_in_one_line_without_warnings(tmp_path: Path) -> None:
    write_map(tmp_path / "map.zarr", Slabs.of_field(node_field(), FINE, ALL), PROVENANCE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = xr.open_zarr(tmp_path / "map.zarr")
        again = xr.open_zarr(tmp_path / "map.zarr", consolidated=False)
    xr.testing.assert_identical(dataset, again)
    names = {"mean", "std", "median", "p16", "p84", "samples"}
    assert set(dataset.data_vars) == {f"density_{name}" for name in names} | {"coverage"}
    assert dataset.density_mean.dims == ("z", "y", "x")
    assert dataset.density_samples.dims == ("sample", "z", "y", "x")
    assert u.Unit(dataset.density_mean.attrs["units"]) == u.mag / u.pc
    assert dataset.x.attrs["units"] == "pc"
    assert dataset.attrs["config_sha256"] == "0" * 64
    assert dataset.attrs["seed"] == 7
    assert dataset.attrs["Conventions"].startswith("CF-")
    assert dataset.attrs["catalog"] == ["stars.fits"]
    assert "400 stars" in dataset.attrs["history"]


def test_zarr_puts_the_cloud_at_its_coordinates(tmp_path: Path) -> None:
    write_map(tmp_path / "map.zarr", cloud(0.0, 40.0, 0.0), PROVENANCE)
    with xr.open_zarr(tmp_path / "map.zarr") as dataset:
        assert float(dataset.density_mean.sel(x=0, y=40, z=0)) == 1.0
        assert float(dataset.density_mean.sum()) == 1.0


def test_zarr_is_sharded_and_every_shard_is_one_file(tmp_path: Path) -> None:
    write_map(tmp_path / "map.zarr", Slabs.of_field(node_field(), WIDE, ALL), PROVENANCE)
    array = zarr.open_group(tmp_path / "map.zarr", mode="r")["density_samples"]
    assert isinstance(array, zarr.Array)
    assert array.metadata.zarr_format == 3
    assert array.metadata.dimension_names == ("sample", "z", "y", "x")
    assert array.chunks == (1, 64, 6, 64)
    assert array.shards == (1, 128, 6, 192)
    files = [p for p in (tmp_path / "map.zarr" / "density_samples").rglob("*") if p.is_file()]
    assert len(files) == 3 + 1


def test_multiscale_averages_the_mean(tmp_path: Path) -> None:
    write_map(tmp_path / "map.zarr", Slabs.of_field(node_field(), WIDE, ALL), PROVENANCE)
    group = zarr.open_group(tmp_path / "map.zarr", mode="r")
    mean = DustMap.open(tmp_path).mean
    levels: Any = group["multiscale"].attrs["ome"]
    assert levels["version"] == "0.5"
    (described,) = levels["multiscales"]
    assert [axis["name"] for axis in described["axes"]] == ["z", "y", "x"]
    assert [entry["path"] for entry in described["datasets"]] == ["1", "2"]
    coarse: Any = group["multiscale/1"]
    assert coarse.shape == (34, 3, 75)
    wanted = mean[:66].reshape(33, 2, 3, 2, 75, 2).mean((1, 3, 5))
    np.testing.assert_allclose(coarse[:33], wanted, rtol=1e-6)
    # its first voxel's centre is the mean of the two that it covers
    scale, translation = described["datasets"][0]["coordinateTransformations"]
    assert scale["scale"] == pytest.approx([0.6, 40.0, 1.0])
    assert translation["translation"] == pytest.approx([-9.85, -50.0, -39.75])
    root: Any = group.attrs["ome"]
    paths = [entry["path"] for entry in root["multiscales"][0]["datasets"]]
    assert paths == ["density_mean", "multiscale/1", "multiscale/2"]
    assert all(isinstance(group[path], zarr.Array) for path in paths)


def test_halving_keeps_constants_and_means() -> None:
    values = np.random.default_rng(0).random((4, 6, 8)).astype(np.float32)
    assert halved(values).mean() == pytest.approx(values.mean(), rel=1e-6)
    np.testing.assert_array_equal(halved(np.full((3, 5, 1), 2.0, np.float32)), 2.0)
    assert halved(np.full((3, 5, 1), 2.0, np.float32)).shape == (2, 3, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_map_is_replaced_only_when_told_and_leaves_nothing_behind(
    tmp_path: Path, name: str
) -> None:
    write_map(tmp_path / name, cloud(0.0, 20.0, 0.0), PROVENANCE)
    with pytest.raises(FileExistsError, match="exists already"):
        write_map(tmp_path / name, cloud(0.0, 0.0, 0.0), PROVENANCE)
    assert_same(DustMap.open(tmp_path / name), cloud(0.0, 20.0, 0.0))
    write_map(tmp_path / name, cloud(0.0, 0.0, 0.0), PROVENANCE, overwrite=True)
    assert_same(DustMap.open(tmp_path / name), cloud(0.0, 0.0, 0.0))
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_write_leaves_the_old_map(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    write_map(tmp_path / name, cloud(0.0, 20.0, 0.0), PROVENANCE)
    monkeypatch.setattr("dustmap.sky.maps._field._planes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_map(tmp_path / name, cloud(0.0, 0.0, 0.0), PROVENANCE, overwrite=True)
    assert_same(DustMap.open(tmp_path / name), cloud(0.0, 20.0, 0.0))
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_what_is_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a run directory"):
        DustMap.open(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    with pytest.raises(FileNotFoundError, match="write one with dustmap export"):
        DustMap.open(tmp_path / "run")
    (tmp_path / "map.txt").write_text("l,b\n")
    with pytest.raises(ValueError, match=r"expected a run directory, a map\.zarr or a map.fits"):
        DustMap.open(tmp_path / "map.txt")
    fits.HDUList([fits.PrimaryHDU()]).writeto(tmp_path / "empty.fits")
    with pytest.raises(ValueError, match="expected a map with an image MEAN"):
        DustMap.open(tmp_path / "empty.fits")
    pixels = fits.BinTableHDU.from_columns([fits.Column("SHELL_000", "E", array=[0.0])])
    pixels.header["PIXTYPE"], pixels.name = "HEALPIX", "COVERAGE"
    fits.HDUList([fits.PrimaryHDU(), pixels]).writeto(tmp_path / "sky.fits")
    with pytest.raises(ValueError, match=r"tables of HEALPix pixels; healpy\.read_map"):
        DustMap.open(tmp_path / "sky.fits")
    (tmp_path / "text.fits").write_text("not a FITS file at all")
    with pytest.raises(ValueError, match="expected a FITS file"):
        DustMap.open(tmp_path / "text.fits")
    image = fits.ImageHDU(np.zeros((3, 4), np.float32), name="MEAN")
    fits.HDUList([fits.PrimaryHDU(), image]).writeto(tmp_path / "flat.fits")
    with pytest.raises(ValueError, match="expected a cube of 3 axes, got 2 in MEAN"):
        DustMap.open(tmp_path / "flat.fits")
    xr.Dataset({"other": ("x", [1.0])}).to_zarr(
        tmp_path / "other.zarr", zarr_format=3, consolidated=False
    )
    with pytest.raises(ValueError, match=r"density_mean, got \['other'\]"):
        DustMap.open(tmp_path / "other.zarr")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("BUNIT", "mag kpc-1", "expected MEAN in mag / pc, got 'mag kpc-1'"),
        ("CUNIT1", "kpc", "expected X in pc, got 'kpc'"),
        ("CUNIT2", "furlong", "expected Y in pc, got 'furlong'"),
    ],
)
def test_other_units_of_fits_are_refused(key: str, value: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    write_map(path, Slabs.of_field(node_field(), NODES, ALL), PROVENANCE, form="fits")
    with fits.open(path, mode="update") as hdus:
        hdus["MEAN"].header[key] = value
    with pytest.raises(UserError, match=re.escape(words)):
        DustMap.open(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("EXTSYS", "E(B-V)", "STD. has EXTSYS 'E(B-V)' and MEAN 'A_V': expected one"),
        ("CRVAL2", 500.0, "pc along y from those of MEAN: expected the same CRPIX"),
        ("CDELT3", 7.0, "pc along z from those of MEAN: expected the same CRPIX"),
        ("CUNIT1", "kpc", "expected X in pc, got 'kpc'"),
    ],
)
def test_cubes_of_other_systems_or_places_are_refused(
    key: str, value: object, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "map.fits"
    write_map(path, Slabs.of_field(node_field(), NODES, ALL), PROVENANCE, form="fits")
    for name in ("STD.", "SAMPLE_02"):
        with fits.open(path, mode="update") as hdus:
            right = hdus[name].header[key]
            hdus[name].header[key] = value
        with pytest.raises(UserError, match=re.escape(words.replace("STD.", name))):
            DustMap.open(path)
        with fits.open(path, mode="update") as hdus:
            hdus[name].header[key] = right
    DustMap.open(path)
    with fits.open(path, mode="update") as hdus:
        del hdus["MEAN"].header["EXTSYS"]
    with pytest.raises(UserError, match="MEAN has no card EXTSYS, which names the extinction"):
        DustMap.open(path)


def test_other_units_and_packed_numbers_of_zarr_are_refused(tmp_path: Path) -> None:
    write_map(tmp_path / "map.zarr", Slabs.of_field(node_field(), NODES, ALL), PROVENANCE)
    known = xr.open_zarr(tmp_path / "map.zarr").load().drop_encoding()
    far = known.assign_coords(x=("x", known.x.values / 1e3, {"units": "kpc"}))
    known.drop_encoding().to_zarr(tmp_path / "same.zarr", consolidated=False)
    assert DustMap.open(tmp_path / "same.zarr").grid == DustMap.open(tmp_path / "map.zarr").grid
    far.to_zarr(tmp_path / "far.zarr", consolidated=False)
    with pytest.raises(UserError, match="expected x in pc, got 'kpc'"):
        DustMap.open(tmp_path / "far.zarr")
    packed = {"density_mean": {"dtype": "int16", "scale_factor": 1e-6, "_FillValue": -1}}
    known.to_zarr(tmp_path / "packed.zarr", encoding=packed, consolidated=False)
    with pytest.raises(UserError, match="density_mean is packed by scale_factor, which is not"):
        DustMap.open(tmp_path / "packed.zarr")


def test_axes_in_another_order_are_refused(tmp_path: Path) -> None:
    """Shapes do not tell the axes of a cube apart."""
    grid = RegularGrid((-20.0,) * 3, (10.0,) * 3, (5,) * 3)
    nodes = grid.points().numpy()[:, 0] + 100.0
    density = DustMap.from_nodes(grid, nodes, None, A_V)
    write_map(tmp_path / "map.zarr", density, PROVENANCE)
    whole = xr.open_zarr(tmp_path / "map.zarr").load().drop_encoding()
    for version in (2, 3):
        path = tmp_path / f"turned{version}.zarr"
        whole.transpose("x", "y", "z").to_zarr(path, zarr_format=version, consolidated=False)
        with pytest.raises(UserError, match=r"expected the axes z, y, x of density_mean, got x"):
            DustMap.open(path)
        same = tmp_path / f"same{version}.zarr"
        whole.to_zarr(same, zarr_format=version, consolidated=False)
        np.testing.assert_array_equal(DustMap.open(same).mean, density.mean)
    write_map(tmp_path / "map.fits", density, PROVENANCE)
    with fits.open(tmp_path / "map.fits", mode="update") as hdus:
        hdus["MEAN"].header["CTYPE1"], hdus["MEAN"].header["CTYPE3"] = "Z", "X"
    with pytest.raises(UserError, match=r"expected the axes X of MEAN, got Z"):
        DustMap.open(tmp_path / "map.fits")


def test_damaged_files_are_told_in_one_line(tmp_path: Path) -> None:
    write_map(tmp_path / "map.fits", cloud(0.0, 20.0, 0.0), PROVENANCE)
    whole = (tmp_path / "map.fits").read_bytes()
    for lost in (100, 3000, len(whole) // 2):
        (tmp_path / "map.fits").write_bytes(whole[:-lost])
        with pytest.raises(ValueError, match="is damaged, make it again"):
            DustMap.open(tmp_path / "map.fits")
    (tmp_path / "map.fits").unlink()
    write_map(tmp_path / "map.zarr", cloud(0.0, 20.0, 0.0), PROVENANCE)
    (shard,) = [p for p in (tmp_path / "map.zarr/density_mean/c").rglob("*") if p.is_file()]
    shard.write_bytes(b"\x07" * shard.stat().st_size)
    with pytest.raises(ValueError, match=r"density_mean cannot be read .* damaged"):
        _ = DustMap.open(tmp_path / "map.zarr").mean
    (tmp_path / "map.zarr" / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match="expected a zarr group"):
        DustMap.open(tmp_path / "map.zarr")


_NODES = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("between", "nodes"),
    [
        ([1.0, 2.0], []),
        ([-1.0] * 64, []),
        ("x", []),
        ([[0.0]], []),
        ({"a": 1}, []),
        ([1.0] * 128, []),
        ([], _NODES),
        ([1.0] * 64, _NODES[:8]),
        ([1.0] * 64, 2 * _NODES),
        ([1.0] * 64, [0.0] * 9),
        ([1.0] * 64, [*_NODES[:8], math.nan]),
    ],
)
def test_variances_between_voxels_are_64_numbers(tmp_path: Path, between: Any, nodes: Any) -> None:
    write_map(tmp_path / "map.zarr", cloud(0.0, 20.0, 0.0), PROVENANCE)
    attributes = zarr.open_group(tmp_path / "map.zarr", mode="r+").attrs
    attributes["between"], attributes["between_grid"] = between, nodes
    with pytest.raises(UserError, match=r"map.zarr is damaged, .*: variances between voxels"):
        DustMap.open(tmp_path / "map.zarr")


def test_messages_name_the_file_of_a_map(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One question may be to several maps, a truth among them."""
    write_map(tmp_path / "truth.zarr", cloud(0.0, 20.0, 0.0), PROVENANCE)
    far = SkyCoord(l=0 * u.deg, b=0 * u.deg, distance=5 * u.kpc, frame="galactic")
    with caplog.at_level("INFO"):
        DustMap.open(tmp_path / "truth.zarr").query(far)
    assert "1 of 1 places lie outside the map truth.zarr (X" in caplog.text


def test_maps_of_before_have_the_variance_in_their_own_cells(tmp_path: Path) -> None:
    write_map(tmp_path / "map.zarr", cloud(0.0, 20.0, 0.0), PROVENANCE)
    zarr.open_group(tmp_path / "map.zarr", mode="r+").attrs["between"] = [0.5] * 64
    (rest,) = DustMap.open(tmp_path / "map.zarr").layout.between
    assert rest == CellVariance(NODES, (0.5,) * 64)


def test_a_system_that_is_unknown_is_refused(tmp_path: Path) -> None:
    write_map(tmp_path / "map.zarr", cloud(0.0, 20.0, 0.0), PROVENANCE)
    metadata = tmp_path / "map.zarr" / "zarr.json"
    content = json.loads(metadata.read_text())
    del content["attributes"]["extinction_system"]
    metadata.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="must have the attribute extinction_system"):
        DustMap.open(tmp_path / "map.zarr")


def test_a_map_checks_its_arrays() -> None:
    wrong = {Quantity.MEAN: np.zeros((9, 7, 5), np.float32)}
    with pytest.raises(ValueError, match=r"mean must have shape \(z, y, x\) = \(5, 7, 9\)"):
        DustMap.from_arrays(NODES, wrong, A_V)
    flat = {Quantity.MEAN: np.zeros((3, 3), np.float32)}
    with pytest.raises(ValueError, match="3 axes"):
        DustMap.from_arrays(RegularGrid((0, 0), (1, 1), (3, 3)), flat, A_V)


def test_slices_are_found_by_their_height() -> None:
    density = cloud(0.0, 0.0, 0.0)
    assert density.nearest_slice(1.0) == 2
    voxels = [density.nearest_slice(level) for level in (-7.5, -2.5, 2.5, 7.5)]  # all of them ties
    assert voxels == [1, 2, 2, 3]
    with pytest.raises(ValueError, match=r"z = 13 pc: expected -12\.5 to 12\.5 pc"):
        density.nearest_slice(13.0)
