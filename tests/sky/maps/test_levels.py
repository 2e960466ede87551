"""Densities on nested grids: fields, maps in memory and in files, and what they answer."""

import functools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import healpy
import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from astropy.wcs import WCS

from dustmap.errors import UserError
from dustmap.gp import NestedGrids, NestedPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.inference import LogNormalPosterior, Unresolved
from dustmap.sky import Provenance
from dustmap.sky.figures._planes import Axis, projection_of, slice_of
from dustmap.sky.maps import (
    DustMap,
    MapRequest,
    NestedField,
    Quantity,
    Slabs,
    finest_grid,
    write_map,
)
from dustmap.sky.maps._cubes import AbstractCubes, Box, Cube, Layout, MemoryCubes
from dustmap.sky.maps._trilinear import variance_between
from dustmap.sky.systems import system_named

NESTED = NestedGrids(
    (
        RegularGrid((-80.0, -60.0, -40.0), (20.0,) * 3, (9, 7, 5)),
        RegularGrid((-40.0, -40.0, -20.0), (10.0,) * 3, (9, 9, 5)),
        RegularGrid((-20.0, -20.0, -10.0), (5.0,) * 3, (9, 9, 5)),
    )
)
#: The finer box is far wider than its fading.
WIDE = NestedGrids(
    (
        RegularGrid((-160.0,) * 3, (20.0,) * 3, (17,) * 3),
        RegularGrid((-80.0,) * 3, (10.0,) * 3, (17,) * 3),
    )
)
ASKED = MapRequest((Quantity.MEAN, Quantity.STD, Quantity.SAMPLES), 6)
Array = np.ndarray


def field(unresolved: float | None = None) -> NestedField:
    """Samples of the prior, whose levels agree at the nodes of their faces.

    unresolved: length of a kernel that leaves something between the nodes.
    """
    lacking = Unresolved.of(Matern32(unresolved, dim=3), NESTED) if unresolved else None
    return NestedField(posterior(NESTED, 6, 1.0, lacking), NESTED, system_named("A_V"), 1.0)


def posterior(
    nested: NestedGrids, count: int, part: float, lacking: Unresolved | None
) -> LogNormalPosterior:
    """Samples with a part of the prior's standard deviation."""
    prior = NestedPrior.of(Matern32(30.0, dim=3), nested, padding=2.0)
    generator = torch.Generator().manual_seed(3)
    white = torch.randn(count, prior.n_white, dtype=torch.float64, generator=generator)
    logs = -5.0 + part * prior.root().matmul(white)
    rows = functools.partial(interpolation, grid=nested, dtype=torch.float64)
    known = logs.var(0, correction=0).mean().expand(logs.shape[1])
    return LogNormalPosterior(
        rows, logs.mean(0), logs, unresolved=lacking, log_variance=known.clone()
    )


def places(count: int, seed: int = 0) -> torch.Tensor:
    low, high = np.array(NESTED.lower), np.array(NESTED.upper)
    found = np.random.default_rng(seed).uniform(low, high, (count, 3))
    found[: count // 2] /= 5.0  # half of them in the finest box
    return torch.from_numpy(found)


def coordinates(x: torch.Tensor) -> SkyCoord:
    return SkyCoord(*x.numpy().T * u.pc, representation_type="cartesian", frame="galactic")


def test_places_and_rays_have_what_the_posterior_predicts() -> None:
    made, x = field(), places(200)
    for functional in (PointValues(x), LineIntegrals.from_observer(x)):
        found = made.evaluate(functional, ASKED)
        expected = made.posterior.predict(functional)
        np.testing.assert_allclose(found["mean"], expected.mean, rtol=2e-6)
        np.testing.assert_allclose(found["std"], expected.std, rtol=2e-5)


def test_planes_are_the_finest_density_at_every_voxel() -> None:
    made = field()
    grid = RegularGrid((-75.0, -55.0, -35.0), (7.5, 10.0, 5.0), (20, 12, 14))
    slabs = [slab.arrays for slab in made.planes(grid, ASKED, depth=3)]
    found = np.concatenate([slab["mean"] for slab in slabs], axis=-3)
    expected = made.posterior.predict(PointValues(grid.points())).mean
    np.testing.assert_allclose(
        found, expected.numpy().reshape(grid.shape).transpose(2, 1, 0), rtol=3e-6
    )


def test_what_lies_between_the_nodes_is_in_the_samples_of_every_level() -> None:
    made = field(unresolved=8.0)
    plain = field().evaluate(PointValues(places(300)), ASKED)
    widened = made.evaluate(PointValues(places(300)), ASKED)
    np.testing.assert_allclose(widened["mean"], plain["mean"], rtol=0.2)
    assert (widened["std"] > plain["std"]).mean() > 0.7
    lengths = [level.length for level in made.posterior.unresolved.levels]  # type: ignore[union-attr]
    assert lengths[0] > lengths[1] > lengths[2]


@pytest.mark.parametrize("unresolved", [None, 8.0])
def test_the_spread_at_nodes_is_the_known_one_and_what_lies_between(
    unresolved: float | None,
) -> None:
    """Whatever samples at the nodes have."""
    made, grid = field(unresolved), NESTED.grids[2]
    found = made.evaluate(
        PointValues(grid.points()), MapRequest((Quantity.MEAN, Quantity.STD, Quantity.P16))
    )
    known = made.posterior.node_log_variance[NESTED.places[2]]
    if made.fields[2].between is not None:
        known = known + made.fields[2].between.spread
    relative = np.log1p(np.square(found["std"] / found["mean"]))
    np.testing.assert_allclose(relative, known, rtol=1e-4)
    assert (made.fields[2].between is None) == (unresolved is None)


def noisy(nested: NestedGrids, count: int) -> NestedField:
    """Samples that have little but what lies between the nodes."""
    lacking = Unresolved.of(Matern32(30.0, dim=3), nested, scale=3.0)
    return NestedField(posterior(nested, count, 0.2, lacking), nested, system_named("A_V"), 1.0)


@pytest.mark.parametrize("level", [1, 2])
def test_what_lies_between_the_nodes_does_not_jump_at_a_face(level: int) -> None:
    """ln ρ of samples on both sides of it."""
    asked, rng = MapRequest((Quantity.SAMPLES,), 40), np.random.default_rng(0)
    made, grid = noisy(NESTED, 40), NESTED.grids[level]
    beside = rng.uniform(-0.9, 0.9, (50, 2)) * np.array(grid.upper[1:])

    def logs(off: float) -> Array:
        x = np.column_stack([np.full(50, grid.upper[0] + off), beside])
        return np.log(made.evaluate(PointValues(torch.from_numpy(x)), asked)["samples"])

    jump, cell = logs(1e-3) - logs(-1e-3), logs(1e-3) - logs(NESTED.grids[level - 1].spacing[0])
    assert jump.std() < 0.3 * cell.std()


def test_integrals_of_samples_have_what_lies_between_the_nodes() -> None:
    """As much as the posterior predicts along rays through both levels."""
    made, x = noisy(WIDE, 300), np.random.default_rng(1).uniform(-159.0, 159.0, (300, 3))
    rays = LineIntegrals.from_observer(torch.from_numpy(x))
    found = made.evaluate(rays, MapRequest((Quantity.STD,)))["std"]
    expected = made.posterior.predict(rays).std.numpy()
    without = replace(made.posterior, unresolved=None).predict(rays).std.numpy()
    assert np.median(without / expected) < 0.8
    assert np.median(found / expected) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("form", ["zarr", "fits"])
def test_files_keep_every_level(form: str, tmp_path: Path) -> None:
    made, path = field(), tmp_path / f"map.{form}"
    slabs = Slabs.of_field(made, NESTED.outer, ASKED, NESTED.grids[1:])
    write_map(path, slabs, Provenance("a run"), form=form)
    density = DustMap.open(path)
    assert "finer levels of 10, 5 pc" in repr(density)
    for level, grid in zip((density, *density.finer), NESTED.grids, strict=True):
        assert level.grid.shape == grid.shape
        np.testing.assert_allclose(level.grid.lower, grid.lower)
        expected = made.posterior.predict(PointValues(grid.points())).mean
        shaped = expected.numpy().reshape(grid.shape).transpose(2, 1, 0)
        np.testing.assert_allclose(level.mean, shaped, rtol=3e-6)
    again = tmp_path / f"again.{form}"
    write_map(again, density, Provenance("a copy"), form=form)
    for level, copied in zip(density.finer, DustMap.open(again).finer, strict=True):
        np.testing.assert_array_equal(
            level.cube(Quantity.SAMPLES, 2), copied.cube(Quantity.SAMPLES, 2)
        )


def test_other_readers_open_the_levels(tmp_path: Path) -> None:
    slabs = Slabs.of_field(field(), NESTED.outer, ASKED, NESTED.grids[1:])
    for form in ("zarr", "fits"):
        write_map(tmp_path / f"map.{form}", slabs, Provenance("a run"), form=form)
    with xr.open_zarr(tmp_path / "map.zarr") as outer:
        named = outer.attrs["levels"]
    with xr.open_zarr(tmp_path / "map.zarr", group="level_2") as finest:
        assert finest["density_mean"].shape == (5, 9, 9)
        np.testing.assert_allclose(finest["x"], np.linspace(-20.0, 20.0, 9))
    assert [each["path"] for each in named] == ["level_1", "level_2"]
    for each in named:
        array = zarr.open_array(tmp_path / "map.zarr" / each["path"] / "density_mean", mode="r")
        assert list(array.shape) == each["shape"]
    with fits.open(tmp_path / "map.fits") as hdus:
        assert {"MEAN", "MEAN_L1", "STD_L2", "SAMPLE_06_L2"} <= {hdu.name for hdu in hdus}
        corner = WCS(hdus["MEAN_L2"].header).wcs_pix2world([[0, 0, 0]], 0)[0]
        np.testing.assert_allclose(corner, NESTED.grids[-1].lower)
        assert all(hdu.verify_checksum() == 1 for hdu in hdus[1:])


def test_a_level_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "map.zarr"
    slabs = Slabs.of_field(field(), NESTED.outer, ASKED, NESTED.grids[1:])
    write_map(path, slabs, Provenance("a run"))
    shutil.rmtree(path / "level_2")
    with pytest.raises(UserError, match="a part of it is missing: level_2; copy or make it again"):
        DustMap.open(path)


@pytest.mark.parametrize("form", ["zarr", "fits"])
def test_questions_have_the_finest_level(form: str, tmp_path: Path) -> None:
    made, x = field(), places(300)
    path = tmp_path / f"map.{form}"
    slabs = Slabs.of_field(made, NESTED.outer, ASKED, NESTED.grids[1:])
    write_map(path, slabs, Provenance("a run"), form=form)
    density, at = DustMap.open(path, seed=1), coordinates(x)
    expected = made.posterior.predict(PointValues(x))
    np.testing.assert_allclose(density.query(at), expected.mean, rtol=1e-5)
    np.testing.assert_allclose(density.query(at, "std"), expected.std, rtol=1e-4)
    integrals = made.posterior.predict(LineIntegrals.from_observer(x))
    np.testing.assert_allclose(density.query(at, integrated=True), integrals.mean, rtol=1e-5)
    np.testing.assert_allclose(density.query(at, "std", integrated=True), integrals.std, rtol=1e-4)
    samples = density.query(at, "samples")
    one = density.query(at, "random_sample")
    assert min(np.abs(one - samples[:, k]).max() for k in range(6)) < 1e-7
    profile = density.profile(at[0], [5, 20, 35] * u.pc)
    assert np.isfinite(profile.extinction_mean).all()
    shells = [30, 10, 35, 10, 20] * u.pc  # all from the Sun, in any order
    sky = density.to_healpix(4, shells)
    lon, lat = healpy.pix2ang(4, np.arange(192), lonlat=True) * u.deg
    for distance, mean, std in zip(shells, sky.extinction_mean, sky.extinction_std, strict=True):
        pixels = SkyCoord(lon, lat, distance, frame="galactic").cartesian.xyz.to_value(u.pc)
        columns = LineIntegrals.from_observer(torch.from_numpy(pixels.T.copy()))
        expected = made.posterior.predict(columns)
        np.testing.assert_allclose(mean, expected.mean, rtol=1e-5)
        np.testing.assert_allclose(std, expected.std, rtol=1e-4)


def test_percentiles_of_places_have_what_lies_between_the_nodes() -> None:
    made, at = field(unresolved=True), PointValues(places(100))
    cubes = made.evaluate(at, MapRequest((Quantity.P16, Quantity.P84)))
    low, high = made.percentiles(at, [0.16, 0.84])
    np.testing.assert_allclose(low, cubes["p16"], rtol=1e-5)
    np.testing.assert_allclose(high, cubes["p84"], rtol=1e-5)


def test_reach_and_spread_are_those_of_the_finest_level(tmp_path: Path) -> None:
    asked = MapRequest((Quantity.MEAN, Quantity.STD, Quantity.COVERAGE, Quantity.SAMPLES), 6)
    slabs = Slabs.of_field(field(), NESTED.outer, asked, NESTED.grids[1:])
    write_map(tmp_path / "map.zarr", slabs, Provenance("a run"))
    density = DustMap.open(tmp_path / "map.zarr")
    whole = density.on_one_grid()
    nodes = coordinates(whole.grid.points())
    expected = density.query(nodes, "std").reshape(whole.grid.shape).transpose()
    np.testing.assert_allclose(whole.cube(Quantity.STD), expected, rtol=1e-5)

    directions = coordinates(places(60))
    least = float(np.median(density.coverage(nodes)))
    ranges = density.reliable_distances(directions, least).to_value(u.pc)
    known = np.isfinite(ranges).all(-1)
    assert known.mean() > 0.5
    for direction, (near, far) in zip(directions[known], ranges[known], strict=True):
        s = np.linspace(near, far, 101)[1:-1] * u.pc
        l, b = direction.spherical.lon, direction.spherical.lat
        along = SkyCoord(l=l, b=b, distance=s, frame="galactic")
        # Between steps of half a voxel coverage is not quite linear.
        assert density.coverage(along).min() > least - 0.1


def written(path: Path) -> DustMap:
    """The map of the field with its levels, from a file."""
    slabs = Slabs.of_field(field(), NESTED.outer, ASKED, NESTED.grids[1:])
    write_map(path, slabs, Provenance("a run"))
    return DustMap.open(path)


@pytest.mark.parametrize("axis", list(Axis))
def test_pictures_have_the_finest_level(tmp_path: Path, axis: Axis) -> None:
    density = written(tmp_path / "map.zarr")
    whole = density.on_one_grid()
    for found, expected in (
        (slice_of(density, axis, 0.0), slice_of(whole, axis, 0.0)),
        (projection_of(density, axis), projection_of(whole, axis)),
    ):
        np.testing.assert_array_equal(found.mean, expected.mean)
        assert found.std is not None
        np.testing.assert_array_equal(found.std, expected.std)
    assert found.mean.size > NESTED.outer.size ** (2 / 3)
    along = density.profile(coordinates(torch.tensor([[30.0, 10.0, 5.0]])))["distance"].to_numpy()
    assert np.diff(along).max() <= 0.5 * density.finest_spacing * (1 + 1e-9)


def test_cubes_of_a_map_with_levels_are_said_to_be_the_coarsest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    density = written(tmp_path / "map.zarr")
    with caplog.at_level("WARNING"):
        density.on_one_grid().to_xarray()
        assert "coarsest level" not in caplog.text
        assert density.to_xarray().sizes["x"] == NESTED.outer.shape[0]
        assert "cubes of the coarsest level alone" in caplog.text


def test_a_map_that_names_levels_it_has_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.zarr"
    slabs = Slabs.of_field(field(), NESTED.outer, ASKED, NESTED.grids[1:])
    write_map(path, slabs, Provenance("a run"))
    group = zarr.open_group(path, mode="r+")
    group.attrs["levels"] = [{"path": "../elsewhere"}]
    with pytest.raises(UserError, match="damaged"):
        DustMap.open(path)


def test_dust_between_the_nodes_is_in_the_spread_between_voxels_of_every_level(
    tmp_path: Path,
) -> None:
    """Without it a map's standard deviations are 0.42 to 0.98 of the field's here (5 to 95 %)."""
    made, asked = field(unresolved=8.0), ASKED
    slabs = Slabs.of_field(made, NESTED.outer, asked, NESTED.grids[1:])
    for name in ("map.zarr", "map.fits"):
        write_map(tmp_path / name, slabs, Provenance("a run"))
        at = places(200)
        found = DustMap.open(tmp_path / name).query(coordinates(at), "std")
        wanted = made.evaluate(PointValues(at), asked)["std"]
        np.testing.assert_allclose(found, wanted, rtol=0.005)
        inner = slice(0, len(at) // 2)  # whose voxels stay what they are
        whole = DustMap.open(tmp_path / name).on_one_grid().query(coordinates(at[inner]), "std")
        assert np.median(whole / wanted[inner]) == pytest.approx(1.0, abs=0.02)


def test_what_samples_lack_is_that_of_the_finest_grid_at_a_place() -> None:
    """Whatever level, or other grid, the voxels are of."""
    rest = Unresolved.of(Matern32(20.0, dim=3), NESTED, scale=0.7)
    made = NestedField(posterior(NESTED, 6, 1.0, rest), NESTED, system_named("A_V"), 1.0)
    at = places(400)
    exact = rest.log_variance(at).numpy()
    own = Slabs.of_field(made, NESTED.outer, ASKED, NESTED.grids[1:])
    other = RegularGrid((-75.0, -52.0, -31.0), (7.0,) * 3, (19, 15, 9))
    for layout in (own.layout, own.finer[-1].layout, DustMap.from_field(made, other, ASKED).layout):
        found = variance_between(layout.between, at.numpy())
        np.testing.assert_allclose(found, exact, atol=0.005 * exact.max())
        at_nodes = variance_between(layout.between, NESTED.grids[-1].points().numpy())
        np.testing.assert_allclose(at_nodes, 0.0, atol=1e-12)


@pytest.mark.parametrize("kept", ["every level", "of before"])
def test_spread_of_levels_on_one_grid_is_that_of_the_posterior(kept: str) -> None:
    """Beyond the finer boxes, whose cells are of several voxels: by the cells of the voxels it was
    0.64 to 1.10 times as large."""
    made, asked = field(unresolved=12.0), MapRequest((Quantity.STD, Quantity.SAMPLES), 6)
    levels: list[AbstractCubes] = []
    for number, grid in enumerate(NESTED.grids):
        cubes = DustMap.from_field(made, grid, asked).cubes
        assert isinstance(cubes, MemoryCubes)
        if kept == "of before":  # each with the variance in its own cells
            own = (cubes.layout.between[number],)
            cubes = MemoryCubes(replace(cubes.layout, between=own), cubes.arrays)
        levels.append(cubes)
    whole = DustMap(_Levels(levels[0], tuple(levels[1:]))).on_one_grid()
    assert whole.grid.spacing == (5.0,) * 3
    at = beyond(NESTED.grids[1], 300)
    found = whole.query(coordinates(at), "std")
    wanted = made.evaluate(PointValues(at), asked)["std"]
    np.testing.assert_allclose(found, wanted, rtol=0.05)
    assert np.median(found / wanted) == pytest.approx(1.0, abs=0.01)


def beyond(inner: RegularGrid, count: int) -> torch.Tensor:
    """Places of the outermost grid more than one of its voxels from a box."""
    at = torch.rand(8 * count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    lower, upper = (torch.tensor(c) for c in (NESTED.lower, NESTED.upper))
    at = lower + at * (upper - lower)
    near = [torch.tensor(c) for c in (inner.lower, inner.upper)]
    outside = ((at < near[0] - 5.0) | (at > near[1] + 5.0)).any(-1)
    return at[outside][:count]


@dataclass(frozen=True)
class _Levels(AbstractCubes):
    """Levels in memory."""

    coarsest: AbstractCubes
    others: tuple[AbstractCubes, ...]

    @property
    def layout(self) -> Layout:
        return self.coarsest.layout

    def read(self, cube: Cube, box: Box) -> "np.ndarray":
        return self.coarsest.read(cube, box)

    @property
    def finer(self) -> tuple[AbstractCubes, ...]:
        return self.others


def test_one_grid_is_read_as_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of a cube is that part of the whole; levels too fine for one grid are named."""
    density = written(tmp_path / "map.zarr")
    with caplog.at_level("WARNING"):
        whole = density.on_one_grid()
    assert "left out" not in caplog.text
    assert whole.grid.spacing == NESTED.grids[-1].spacing
    part = (slice(2, 7), slice(None), slice(1, 3))
    for cube in (Cube(Quantity.MEAN), Cube(Quantity.SAMPLES, 1)):
        every = whole.cubes.read(cube, (slice(None),) * 3)
        np.testing.assert_array_equal(whole.cubes.read(cube, part), every[part])
    monkeypatch.setattr(finest_grid, "__defaults__", (whole.grid.size - 1,))
    with caplog.at_level("WARNING"):
        coarse = density.on_one_grid()
    assert coarse.grid.spacing > whole.grid.spacing
    assert "the finest levels are left out" in caplog.text
