"""What users ask of a map: places in any frame and shape, rays, samples, coverage."""

import copy
import inspect
from dataclasses import replace
from pathlib import Path

import astropy.units as u
import numpy as np
import pytest
import torch
from astropy.coordinates import (
    Distance,
    Galactic,
    Galactocentric,
    SkyCoord,
    SphericalRepresentation,
)
from astropy.table import MaskedColumn
from astropy.utils.masked import Masked
from numpy.typing import NDArray

import dustmap
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.sky import Provenance
from dustmap.sky.maps import DustMap, MapRequest, Quantity, Slabs, write_map
from dustmap.sky.maps._cubes import MemoryCubes
from tests.sky.maps.fields import A_V, NODES, node_field, positions, posterior, rough_field

EVERYTHING = MapRequest(tuple(Quantity), samples=6)
MAP = DustMap.from_field(node_field(), NODES, EVERYTHING)


def coordinates(xyz: NDArray[np.float64]) -> SkyCoord:
    x, y, z = xyz.T * u.pc
    return SkyCoord(u=x, v=y, w=z, representation_type="cartesian", frame="galactic")


def linear(grid: RegularGrid) -> DustMap:
    """ρ = 3 + 0.1 x − 0.02 y + 0.3 z, negative in places; two samples, 1 and 2 times it."""
    mean = grid.points().numpy() @ [0.1, -0.02, 0.3] + 3.0
    plain = DustMap.from_nodes(grid, mean, None, A_V).mean
    samples = np.stack([plain, 2 * plain])
    return DustMap.from_arrays(grid, {Quantity.MEAN: plain, Quantity.SAMPLES: samples}, A_V)


def test_the_map_is_found_at_the_top() -> None:
    assert dustmap.DustMap is DustMap


def test_a_map_says_what_it_is() -> None:
    grid = RegularGrid((-40.0, -20.0, 0.0), (20.0, 20.0, 10.0), (5, 3, 2))
    assert repr(linear(grid)) == (
        "DustMap(A_V; X -40 to 40, Y -20 to 20, Z 0 to 10 pc; 5 x 3 x 2 voxels of 20 x 20 x 10 pc; "
        "mean, 2 samples)"
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("side", [-1, 1])
def test_a_voxel_beside_unknown_ones_is_known(axis: int, side: int) -> None:
    """And so is a ray through such voxels alone."""
    grid = RegularGrid((-40.0,) * 3, (10.0,) * 3, (9,) * 3)
    unknown = side * grid.points().numpy()[:, axis] >= 10.0
    samples = np.stack([np.where(unknown, np.nan, k * 1e-3) for k in (1.0, 2.0)])
    cubes = np.stack([DustMap.from_nodes(grid, s, None, A_V).mean for s in samples])
    density = DustMap.from_arrays(
        grid, {Quantity.MEAN: cubes.mean(0), Quantity.SAMPLES: cubes}, A_V, positive=True
    )
    ahead = np.roll([0.0, 30.0, 0.0], axis)
    assert ahead[axis] == 0.0
    place = coordinates(ahead[None])
    np.testing.assert_allclose(density.query(place), [1.5e-3], rtol=1e-5)
    assert np.isfinite(density.query(place, "std")).all()
    assert np.isfinite(density.query(place, "percentile", [16.0, 84.0])).all()
    np.testing.assert_allclose(density.query(place, integrated=True), [0.045], rtol=1e-5)
    beside = ahead + side * 1e-3 * np.eye(3)[axis]
    assert np.isnan(density.query(coordinates(beside[None]))).all()


@pytest.mark.parametrize("side", [-1, 1])
def test_rays_along_a_face_are_in_the_box(side: int) -> None:
    """Whatever rounding leaves of the other components of their directions."""
    lower = (0.0,) * 3 if side > 0 else (-100.0,) * 3
    grid = RegularGrid(lower, (10.0,) * 3, (11,) * 3)
    density = DustMap.from_nodes(grid, np.full(grid.size, 1e-3), None, A_V)
    for l, b in ((0.0, 0.0), (90.0, 0.0), (0.0, 90.0)):
        l, b = (l, b) if side > 0 else (l + 180.0, -b)
        place = SkyCoord(l * u.deg, b * u.deg, 50.0 * u.pc, frame="galactic")
        for frame in ("galactic", "icrs"):
            there = place.transform_to(frame)
            np.testing.assert_allclose(density.query(there, integrated=True), 0.05, rtol=1e-5)
        assert np.isfinite(density.profile(place)["extinction_mean"]).all()


def test_directions_that_are_no_numbers_are_reliable_nowhere() -> None:
    l, b = [30.0, np.nan] * u.deg, [5.0, 5.0] * u.deg
    both = MAP.reliable_distances(SkyCoord(l, b, frame="galactic"))
    alone = MAP.reliable_distances(SkyCoord(l[:1], b[:1], frame="galactic"))
    np.testing.assert_array_equal(np.asarray(both)[0], np.asarray(alone)[0])
    assert np.isnan(np.asarray(both)[1]).all()


def test_linear_densities_are_exact() -> None:
    xyz = positions(200)
    wanted = xyz @ [0.1, -0.02, 0.3] + 3.0
    found = linear(NODES).query(coordinates(xyz))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert wanted.min() < 0


def test_linear_densities_integrate_exactly() -> None:
    xyz = positions(200)
    distance = np.linalg.norm(xyz, axis=-1)
    wanted = distance * (0.5 * xyz @ [0.1, -0.02, 0.3] + 3.0)
    found = linear(NODES).query(coordinates(xyz), integrated=True)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    spread = linear(NODES).query(coordinates(xyz), mode="std", integrated=True)
    np.testing.assert_allclose(spread, abs(wanted) * np.sqrt(0.5), rtol=5e-6)


def test_a_constant_density_integrates_to_the_distance() -> None:
    ones = DustMap.from_nodes(NODES, np.full(NODES.size, 0.25), None, A_V)
    xyz = np.concatenate([positions(100), np.diag([30.0, -50.0, 9.0]), np.zeros((1, 3))])
    found = ones.query(coordinates(xyz), integrated=True)
    np.testing.assert_allclose(found, 0.25 * np.linalg.norm(xyz, axis=-1), rtol=1e-12)


def test_densities_and_integrals_are_those_of_the_posterior() -> None:
    xyz = positions(300, seed=4)
    law, places = posterior(), torch.from_numpy(xyz)
    rays = law.predict(LineIntegrals.from_observer(places))
    points = law.predict(PointValues(places))
    where = coordinates(xyz)
    for found, wanted in (
        (MAP.query(where), points.mean),
        (MAP.query(where, mode="samples"), law.sample(PointValues(places), 6, torch.Generator()).T),
        (MAP.query(where, integrated=True), rays.mean),
        (MAP(where, mode="std", integrated=True), rays.std),
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-5)
    levels = torch.tensor([0.16, 0.5, 0.9], dtype=torch.float64)
    wanted = law.percentiles(LineIntegrals.from_observer(places), levels)
    found = MAP.query(where, mode="percentile", pct=[16, 50, 90], integrated=True)
    np.testing.assert_allclose(found, wanted.T, rtol=2e-5)


def test_std_and_percentiles_at_voxels_are_those_of_the_posterior() -> None:
    nodes = NODES.points()
    where, law = coordinates(nodes.numpy()), posterior()
    np.testing.assert_allclose(
        MAP.query(where, mode="std"), law.predict(PointValues(nodes)).std, rtol=2e-5
    )
    np.testing.assert_allclose(
        MAP.query(where, mode="median"), law.log_moments(PointValues(nodes))[0].exp(), rtol=2e-5
    )
    low = law.percentiles(PointValues(nodes), torch.tensor([0.16, 0.3], dtype=torch.float64))
    found = MAP.query(where, mode="percentile", pct=16)
    np.testing.assert_allclose(found, low[0], rtol=2e-5)
    # 30 is not stored: it comes from the samples
    found = MAP.query(where, mode="percentile", pct=[16, 30])
    np.testing.assert_allclose(found, low.T, rtol=2e-5)


def test_std_and_percentiles_between_voxels_are_those_of_the_posterior() -> None:
    """Neighbours vary against each other: the interpolated std is up to 2.8 times as large."""
    places, law = torch.from_numpy(positions(300, seed=4)), posterior()
    where = coordinates(places.numpy())
    wanted = law.predict(PointValues(places)).std
    np.testing.assert_allclose(MAP.query(where, mode="std"), wanted, rtol=1e-4)
    levels = torch.tensor([0.16, 0.5, 0.84], dtype=torch.float64)
    found = MAP.query(where, mode="percentile", pct=[16, 50, 84])
    np.testing.assert_allclose(found, law.percentiles(PointValues(places), levels).T, rtol=1e-4)


def test_few_samples_in_a_map_bend_its_cubes_between_voxels_only() -> None:
    few = DustMap.from_field(node_field(40), NODES, MapRequest(tuple(Quantity), samples=12))
    nodes, law = NODES.points(), posterior(40)
    exact = law.predict(PointValues(nodes)).std
    np.testing.assert_allclose(few.query(coordinates(nodes.numpy()), mode="std"), exact, rtol=2e-5)
    places = torch.from_numpy(positions(300, seed=5))
    ratio = (
        few.query(coordinates(places.numpy()), mode="std")
        / law.predict(PointValues(places)).std.numpy()
    )
    assert abs(np.median(ratio) - 1.0) < 0.1
    bare = DustMap.from_field(node_field(40), NODES, MapRequest((Quantity.MEAN, Quantity.STD)))
    above = bare.query(coordinates(places.numpy()), mode="std")
    assert (above >= law.predict(PointValues(places)).std.numpy() * (1 - 1e-5)).all()


@pytest.mark.parametrize(("parts", "error"), [(1, 0.006), (2, 0.05), (3, 0.05)])
@pytest.mark.parametrize("name", ["memory", "map.zarr", "map.fits"])
def test_dust_between_the_nodes_is_in_the_spread_between_voxels(
    name: str, parts: int, error: float, tmp_path: Path
) -> None:
    """Without it a map's standard deviations are 0.61 to 0.89 of the field's here (5 to 95 %).

    It depends on the place among the nodes: by that among voxels of half their spacing deviations
    were 0.76 to 1.01 of the field's.
    """
    spacing = tuple(step / parts for step in NODES.spacing)
    voxels = RegularGrid(NODES.lower, spacing, tuple(parts * (n - 1) + 1 for n in NODES.shape))
    field, asked = rough_field(40), MapRequest(tuple(Quantity), samples=40)
    density = DustMap.from_field(field, voxels, asked)
    if name != "memory":
        write_map(tmp_path / name, density, Provenance("a run"))
        density = DustMap.open(tmp_path / name)
    places = PointValues(torch.from_numpy(positions(300, seed=4)))
    where, levels = coordinates(places.x.numpy()), [0.16, 0.3, 0.84]
    wanted, found = field.evaluate(places, asked)["std"], density.query(where, mode="std")
    np.testing.assert_allclose(found, wanted, rtol=error)
    assert np.median(found / wanted) == pytest.approx(1.0, abs=0.01)
    values = density.query(where, mode="percentile", pct=[16, 30, 84])
    np.testing.assert_allclose(values.T, field.percentiles(places, levels), rtol=error)
    stored = density.cube(Quantity.STD).transpose().ravel()
    at_voxels = density.query(coordinates(voxels.points().numpy()), mode="std")
    np.testing.assert_allclose(at_voxels, stored, rtol=2e-5)


@pytest.mark.parametrize(
    "held", ["mean,std,samples", "p16,p84,samples", "median,p84,std,samples", "samples"]
)
def test_maps_of_some_quantities_know_what_their_voxels_and_samples_know(held: str) -> None:
    field, samples = rough_field(40), 40
    if held == "samples":  # all that is known of the variance
        field = replace(field, posterior=replace(field.posterior, log_variance=None))
    request = MapRequest(tuple(Quantity(name) for name in held.split(",")), samples)
    density = DustMap.from_field(field, NODES, request)
    places = PointValues(torch.from_numpy(positions(200, seed=6)))
    where = coordinates(places.x.numpy())
    wanted = field.evaluate(places, MapRequest((Quantity.STD,)))["std"]
    np.testing.assert_allclose(density.query(where, mode="std"), wanted, rtol=0.05)
    found = density.query(where, mode="percentile", pct=[5, 84])
    np.testing.assert_allclose(found.T, field.percentiles(places, [0.05, 0.84]), rtol=0.05)


@pytest.mark.parametrize("held", ["std", "median,std", "p16,median,p84", "mean,std"])
def test_maps_without_samples_interpolate(held: str) -> None:
    """How neighbours vary against each other is not among their cubes."""
    request = MapRequest(tuple(Quantity(name) for name in held.split(",")))
    rough, smooth = (DustMap.from_field(f(40), NODES, request) for f in (rough_field, node_field))
    assert rough.layout.between
    where = coordinates(positions(50, seed=6))
    for density in (rough, smooth):
        bare = replace(density.layout, between=())
        plain = DustMap(MemoryCubes(bare, density.cubes.arrays))  # type: ignore[attr-defined]
        options = {"mode": "std"} if "std" in held else {"mode": "percentile", "pct": 16}
        np.testing.assert_array_equal(
            density.query(where, **options), plain.query(where, **options)
        )


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)])
def test_results_have_the_shape_of_the_coordinates(shape: tuple[int, ...]) -> None:
    l, b = np.full(shape, 90.0) * u.deg, np.full(shape, 1.0) * u.deg
    where = SkyCoord(l=l, b=b, distance=np.full(shape, 30.0) * u.pc, frame="galactic")
    for integrated in (False, True):
        for mode, more in (("mean", ()), ("std", ()), ("random_sample", ()), ("samples", (6,))):
            found = MAP.query(where, mode=mode, integrated=integrated)
            assert np.shape(found) == (*shape, *more)
        found = MAP.query(where, mode="percentile", pct=[16, 84], integrated=integrated)
        assert np.shape(found) == (*shape, 2)
        assert np.shape(MAP.query(where, "percentile", 16, integrated=integrated)) == shape
    assert MAP.coverage(where).shape == shape
    assert MAP.reliable_distances(where).shape == (*shape, 2)


def test_any_frame_gives_the_same() -> None:
    where = coordinates(positions(20))
    wanted = MAP.query(where)
    for frame in ("icrs", "fk5", "barycentricmeanecliptic"):
        np.testing.assert_allclose(MAP.query(where.transform_to(frame)), wanted, rtol=1e-4)
    spherical = where.spherical
    l, b, d = spherical.lon, spherical.lat, spherical.distance
    np.testing.assert_allclose(MAP.query_gal(l, b, d), wanted, rtol=1e-4)
    bare = MAP.query_gal(l.deg, b.deg, d.to_value(u.kpc))
    np.testing.assert_allclose(bare, wanted, rtol=1e-4)
    ra, dec = where.icrs.ra, where.icrs.dec
    np.testing.assert_allclose(MAP.query_equ(ra.deg, dec.deg, d), wanted, rtol=1e-4)
    fk5 = where.transform_to("fk5")
    found = MAP.query_equ(fk5.ra, fk5.dec, d, frame="fk5", mode="mean")
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_signatures_and_units_are_those_of_dustmaps() -> None:
    base = pytest.importorskip("dustmaps.map_base")

    class Theirs(base.DustMap):  # type: ignore[misc, name-defined]
        def query(self, coords: SkyCoord, **options: object) -> object:
            return MAP(coords, **options)

    for name in ("query_gal", "query_equ"):
        mine, other = (inspect.signature(getattr(of, name)) for of in (DustMap, base.DustMap))
        assert list(mine.parameters)[: len(other.parameters) - 1] == list(other.parameters)[:-1]
    bare = (np.array([30.0, 200.0]), np.array([5.0, -3.0]), np.array([0.02, 0.03]))
    for options in ({}, {"mode": "samples"}, {"mode": "percentile", "pct": [16, 84]}):
        for ask in ("query_gal", "query_equ"):
            wanted = getattr(Theirs(), ask)(*bare, **options)
            np.testing.assert_array_equal(getattr(MAP, ask)(*bare, **options), wanted)


def test_outside_the_map(caplog: pytest.LogCaptureFixture) -> None:
    where = coordinates(np.array([[30.0, 0.0, 0.0], [60.0, 0.0, 0.0], [0.0, 90.0, 0.0]]))
    ones = DustMap.from_nodes(NODES, np.ones(NODES.size), None, A_V)
    np.testing.assert_array_equal(ones.contains(where), [True, False, False])
    with caplog.at_level("INFO", logger="dustmap"):
        found = ones.query(where)
    np.testing.assert_array_equal(np.isnan(found), [False, True, True])
    assert "2 of 3 places lie outside the map" in caplog.text
    np.testing.assert_array_equal(ones.query(where, outside="truncate"), [1, 0, 0])
    found = ones.query(where, integrated=True)
    np.testing.assert_array_equal(np.isnan(found), [False, True, True])
    found = ones.query(where, integrated=True, outside="truncate")
    np.testing.assert_allclose(found, [30, 40, 60], rtol=1e-6)
    for integrated in (False, True):
        with pytest.raises(
            ValueError,
            match=r"2 of 3 .* outside the map .* first is number 1 .counted from 0.; leave them",
        ):
            ones.query(where, integrated=integrated, outside="error")


@pytest.mark.parametrize("frame", ["galactic", "icrs"])
def test_infinite_distances_are_beyond_the_map(frame: str) -> None:
    ones = DustMap.from_nodes(NODES, np.ones(NODES.size), None, A_V)
    towards = SkyCoord(l=[0, 90] * u.deg, b=[0, 30] * u.deg, frame="galactic").transform_to(frame)
    distances = np.inf * np.ones(2) * u.pc
    endless = SkyCoord(towards.spherical.lon, towards.spherical.lat, distances, frame=frame)
    whole = SkyCoord(towards.spherical.lon, towards.spherical.lat, 1e6 * u.pc, frame=frame)
    np.testing.assert_allclose(
        ones.query(endless, integrated=True, outside="truncate"),
        ones.query(whole, integrated=True, outside="truncate"),
    )
    assert np.isnan(ones.query(endless, integrated=True)).all()
    np.testing.assert_array_equal(ones.query(endless, outside="truncate"), [0.0, 0.0])
    centre = Galactocentric(
        lon=[10] * u.deg,
        lat=[0] * u.deg,
        distance=[np.inf] * u.kpc,
        representation_type="spherical",
    )
    assert np.isnan(ones.query(SkyCoord(centre), integrated=True)).all()


def test_a_distance_without_its_unit_is_named() -> None:
    directions = SkyCoord(l=30 * u.deg, b=5 * u.deg, frame="galactic")
    with pytest.raises(UserError, match="got directions alone"):
        MAP.query(directions)
    with pytest.raises(UserError, match="got a distance without a unit; give SkyCoord"):
        MAP.query(SkyCoord(l=30 * u.deg, b=5 * u.deg, distance=80, frame="galactic"))


def test_rays_to_a_box_that_the_sun_is_not_in() -> None:
    box = RegularGrid((20.0, -30.0, -30.0), (10.0, 10.0, 15.0), (5, 7, 5))
    ones = DustMap.from_nodes(box, np.ones(box.size), None, A_V)
    where = coordinates(np.array([[40.0, 0.0, 0.0], [80.0, 0.0, 0.0], [-40.0, 0.0, 0.0]]))
    assert np.isnan(ones.query(where, integrated=True)).all()
    found = ones.query(where, integrated=True, outside="truncate")
    np.testing.assert_allclose(found, [20, 40, 0], rtol=1e-6)
    np.testing.assert_allclose(ones.distance_bounds.to_value(u.pc), [20, np.sqrt(60**2 + 1800)])


def test_places_that_are_nan_are_unknown_under_every_policy() -> None:
    l = np.array([0.0, np.nan])
    where = SkyCoord(l=l * u.deg, b=[0, 0] * u.deg, distance=[30, 30] * u.pc, frame="galactic")
    for outside in ("nan", "truncate"):
        for integrated in (False, True):
            found = MAP.query(where, integrated=integrated, outside=outside)
            np.testing.assert_array_equal(np.isnan(found), [False, True])


@pytest.mark.parametrize("frame", ["galactic", "icrs"])
def test_places_that_are_masked_are_unknown_under_every_policy(frame: str) -> None:
    """A mask hides a number that would be answered, such as the 1e20 or 0 under it."""
    inside = coordinates(positions(3)).transform_to(frame)
    sphere, mask = inside.spherical, np.array([False, True, False])
    lon, lat, pc = sphere.lon, sphere.lat, sphere.distance.to_value(u.pc)
    coords = SkyCoord(Masked(lon, mask=mask), lat, distance=pc * u.pc, frame=frame)
    ask = MAP.query_gal if frame == "galactic" else MAP.query_equ
    for outside in ("nan", "truncate"):
        answers = (
            MAP.query(coords, outside=outside),
            ask(np.ma.array(lon.deg, mask=mask), lat, pc * u.pc, outside=outside),
            ask(lon, lat, np.ma.array(pc / 1e3, mask=mask), outside=outside),
            ask(lon, lat, MaskedColumn(pc, mask=mask, unit="pc"), outside=outside),
        )
        for answer in answers:
            assert np.isnan(answer).tolist() == mask.tolist()
            np.testing.assert_allclose(answer, answers[0])


def test_a_random_sample_is_one_of_the_samples_everywhere() -> None:
    where = coordinates(positions(30))
    samples = MAP.query(where, mode="samples")
    drawn = MAP.query(where, mode="random_sample")
    assert (samples == drawn[:, None]).all(0).sum() == 1
    one, two = (DustMap(MAP.cubes, seed=5).query(where, mode="random_sample") for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_what_a_map_does_not_hold_is_said() -> None:
    plain = DustMap.from_nodes(NODES, np.ones(NODES.size), np.ones(NODES.size), A_V)
    where = coordinates(positions(3))
    np.testing.assert_array_equal(plain.query(where, mode="std"), 1.0)
    percentiles = plain.query(where, mode="percentile", pct=[50, 84])
    np.testing.assert_allclose(percentiles, [[1.0, 1.994458]] * 3, rtol=1e-5)
    for mode in ("samples", "random_sample"):
        with pytest.raises(ValueError, match=f"mode '{mode}' needs stored samples .* mean, std"):
            plain.query(where, mode=mode)
    with pytest.raises(ValueError, match="needs stored samples"):
        plain.query(where, mode="std", integrated=True)
    with pytest.raises(ValueError, match="no coverage, only mean, std"):
        plain.reliable_distances(where)
    assert np.isnan(plain.monte_carlo_error)
    assert pytest.approx(6**-0.5) == MAP.monte_carlo_error


def test_queries_that_cannot_be_answered_say_what_to_do() -> None:
    flat = SkyCoord(l=[1, 2] * u.deg, b=[0, 0] * u.deg, frame="galactic")
    with pytest.raises(ValueError, match=r"expected coordinates with a distance.*300 \* u\.pc"):
        MAP.query(flat)
    with pytest.raises(ValueError, match="expected coordinates with a distance"):
        MAP.query_gal(10.0, 0.0)
    with pytest.raises(TypeError, match=r"expected an astropy SkyCoord, got tuple.*query_gal"):
        MAP.query((1.0, 2.0, 3.0))
    where = coordinates(positions(2))
    with pytest.raises(ValueError, match="mode: expected one of mean, std, median, percentile"):
        MAP.query(where, mode="best")
    with pytest.raises(ValueError, match="outside: expected one of nan, error, truncate"):
        MAP.query(where, outside="zero")
    for wrong in (100, [], [[16, 84]], "a"):
        with pytest.raises(UserError, match="pct: expected percents between 0 and 100"):
            MAP.query(where, mode="percentile", pct=wrong)
    with pytest.raises(ValueError, match="pct: expected percents exactly if"):
        MAP.query(where, mode="percentile")
    with pytest.raises(ValueError, match="frame: expected one of icrs"):
        MAP.query_equ(1.0, 2.0, 0.1, frame="galactic")


def test_coverage_and_how_far_it_reaches() -> None:
    """Coverage falls linearly with |x|, 1 at the Sun and 0.2 at 40 pc: 0.25 at 37.5 pc."""
    covered = 1 - abs(NODES.points().numpy()[:, 0]) / 50
    cube = DustMap.from_nodes(NODES, covered, None, A_V).mean
    density = DustMap.from_arrays(NODES, {Quantity.MEAN: cube, Quantity.COVERAGE: cube}, A_V)
    where = SkyCoord(l=[0, 180, 90, 10] * u.deg, b=[0, 0, 0, 90] * u.deg, frame="galactic")
    found = density.reliable_distances(where)
    assert found.unit == u.pc
    wanted = np.array([[0, 37.5], [0, 37.5], [0, 60], [0, 10]])
    np.testing.assert_allclose(found.value, wanted, atol=1e-4)
    found = density.reliable_distances(where, least=0.999)
    np.testing.assert_allclose(found.value[2:], wanted[2:], atol=1e-6)
    assert np.isnan(density.reliable_distances(where, least=1.5)).all()
    near = coordinates(np.array([[10.0, 0, 0], [30.0, 0, 0], [50.0, 0, 0]]))
    np.testing.assert_allclose(density.coverage(near)[:2], [0.8, 0.4], rtol=1e-6)
    np.testing.assert_array_equal(density.data_dominated(near), [True, False, False])


def test_the_data_may_start_beyond_the_sun() -> None:
    covered = (abs(NODES.points().numpy()[:, 1]) > 30).astype(np.float64)
    cube = DustMap.from_nodes(NODES, covered, None, A_V).mean
    density = DustMap.from_arrays(NODES, {Quantity.MEAN: cube, Quantity.COVERAGE: cube}, A_V)
    where = SkyCoord(l=[90, 0] * u.deg, b=[0, 0] * u.deg, frame="galactic")
    found = density.reliable_distances(where, least=0.5).value
    np.testing.assert_allclose(found[0], [30, 60], atol=1e-6)
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("name", ["map.zarr", "map.fits"])
def test_few_places_read_blocks_and_many_the_whole(tmp_path: Path, name: str) -> None:
    grid = RegularGrid((-75.0, -65.0, -70.0), (1.0, 1.0, 1.0), (150, 131, 140))
    values = np.random.default_rng(0).normal(size=grid.size)
    at_hand = DustMap.from_nodes(grid, values, None, A_V)
    write_map(tmp_path / name, at_hand, Provenance(""))
    few = coordinates(positions(5, grid=grid))
    many = coordinates(positions(500, grid=grid))
    lazy = DustMap.open(tmp_path / name)
    np.testing.assert_array_equal(lazy.query(few[:2]), at_hand.query(few[:2]))
    assert not lazy._answers.reader._kept
    np.testing.assert_array_equal(lazy.query(many), at_hand.query(many))
    assert lazy._answers.reader._kept
    np.testing.assert_array_equal(lazy.query(few), at_hand.query(few))
    ray = coordinates(positions(1, grid=grid))
    found = DustMap.open(tmp_path / name).query(ray, integrated=True)
    np.testing.assert_allclose(found, at_hand.query(ray, integrated=True), rtol=1e-12)


def test_cubes_that_do_not_fit_are_read_again(tmp_path: Path) -> None:
    slabs = Slabs.of_field(node_field(), NODES, EVERYTHING)
    write_map(tmp_path / "map.zarr", slabs, Provenance(""))
    where = coordinates(positions(20))
    for memory in (1, 3 * 4 * NODES.size):
        lazy = DustMap.open(tmp_path, memory=memory)
        found = lazy.query(where, mode="samples", integrated=True)
        np.testing.assert_array_equal(found, MAP.query(where, mode="samples", integrated=True))
        assert len(lazy._answers.reader._kept) == max(1, memory // (4 * NODES.size))


def test_open_maps_may_be_copied(tmp_path: Path) -> None:
    write_map(tmp_path / "map.fits", MAP, Provenance(""))
    opened = copy.deepcopy(DustMap.open(tmp_path))
    np.testing.assert_array_equal(opened.mean, MAP.mean)


def test_what_a_map_says_of_itself() -> None:
    assert MAP.system == A_V
    assert MAP.unit == u.mag / u.pc
    np.testing.assert_array_equal(MAP.bounds.to_value(u.pc), [[-40, -60, -10], [40, 60, 10]])
    low, high = MAP.distance_bounds.to_value(u.pc)
    assert (low, high) == (0.0, pytest.approx(np.sqrt(40**2 + 60**2 + 10**2)))
    assert MAP.distances[0] == low * u.pc
    assert MAP.distances[-1].value == pytest.approx(high)
    assert np.diff(MAP.distances.value).max() <= 5.0
    assert set(MAP.quantities()) == {q.value for q in Quantity} - {"samples"}
    assert MAP.n_samples == 6


def test_a_percentile_does_not_depend_on_its_company() -> None:
    where = coordinates(positions(20))
    alone, company = (MAP.query(where, "percentile", pct=pct) for pct in ([16], [5, 16]))
    np.testing.assert_allclose(company[:, 1], alone[:, 0], rtol=1e-3)
    outside = coordinates(np.array([[5e3, 0.0, 0.0]]))
    for integrated in (False, True):
        found = MAP.query(outside, "percentile", pct=[5, 16], integrated=integrated)
        assert np.isnan(found).all()


def test_percentiles_without_cubes_are_those_of_the_posterior_and_ascend() -> None:
    """Between voxels, too: exp(μ + z τ)."""
    places, levels = torch.from_numpy(positions(300, seed=6)), [2.5, 16.0, 50.0, 84.0, 97.5]
    found = MAP.query(coordinates(places.numpy()), "percentile", levels)
    q = torch.tensor(levels, dtype=torch.float64) / 100
    wanted = posterior().percentiles(PointValues(places), q)
    np.testing.assert_allclose(found, wanted.T, rtol=1e-4)
    assert (np.diff(found) > 0).all()


def test_noise_of_single_voxels_does_not_end_the_reach_of_data() -> None:
    """Coverage of 0.4 to 75 pc and 0.1 beyond, with the errors of 32 samples, on voxels of 5 pc."""
    grid = RegularGrid((-150.0, -10.0, -10.0), (5.0, 5.0, 5.0), (61, 5, 5))
    x = np.abs(grid.points().numpy()[:, 0])
    rng, ends = np.random.default_rng(3), []
    for _ in range(20):
        noise = 0.15 * rng.normal(size=(61, 1, 1)) * np.ones((61, 5, 5))
        covered = (np.where(x < 75.0, 0.4, 0.1) + noise.ravel()).clip(0.0, 1.0)
        cube = DustMap.from_nodes(grid, covered, None, A_V).mean
        density = DustMap.from_arrays(grid, {Quantity.MEAN: cube, Quantity.COVERAGE: cube}, A_V)
        where = SkyCoord(l=[0, 180] * u.deg, b=[0, 0] * u.deg, frame="galactic")
        ends += density.reliable_distances(where).value[:, 1].tolist()
    assert np.median(np.abs(np.array(ends) - 75.0)) < 10.0


def test_a_distance_behind_the_sun_is_refused() -> None:
    distance = Distance([50.0, -50.0] * u.pc, allow_negative=True)
    sphere = SphericalRepresentation([30, 30] * u.deg, [5, 5] * u.deg, distance)
    where = SkyCoord(Galactic(sphere))
    with pytest.raises(UserError, match="1 of 2 distances are negative"):
        MAP.query(where)
