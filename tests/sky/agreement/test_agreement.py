"""Maps beside themselves, scaled ones, and files as published maps are laid out."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from astropy import units as u
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.agreement import (
    AbstractSource,
    MapSource,
    Pairs,
    Score,
    Segments,
    compare_maps,
    distance_edges,
    published_source,
    score_table,
)
from dustmap.sky.agreement._scores import INTEGRATED
from dustmap.sky.layouts import (
    BayestarOptions,
    EdenhoferOptions,
    LeikeOptions,
    RadialBins,
    write_bayestar,
    write_edenhofer2023,
    write_leike2020,
)
from dustmap.sky.maps import DustMap, MapRequest, Quantity, Slabs, write_map
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from tests.sky.layouts.analytic import CLOUDS, PROVENANCE, AnalyticField, Cloud, place
from tests.sky.maps.test_levels import NESTED, field

Floats = NDArray[np.float64]

GRID = RegularGrid((-160.0, -240.0, -160.0), (8.0,) * 3, (41, 61, 41))
FIELD = AnalyticField((*CLOUDS, Cloud(place(270.0, 0.0, 150.0), 30.0, 1e-2)), background=2e-3)
#: Of a field near the Sun.
LITTLE = ((-45.0, -48.0, -38.0), (45.0, 56.0, 38.0))
#: 48 rays, of which few end in the box.
EDGES = 20.0 * np.arange(13.0)
RAYS = Segments.of_pixels(4, EDGES)


def density_map(factor: float = 1.0, system: str = "A_V") -> DustMap:
    nodes = GRID.points().numpy()
    return DustMap.from_nodes(GRID, factor * FIELD.density(nodes), None, system)


@pytest.fixture(scope="module")
def ours() -> MapSource:
    return MapSource("ours", density_map())


def test_a_map_agrees_with_itself(ours: MapSource) -> None:
    for pairs in compare_maps(ours, MapSource("same", density_map()), RAYS):
        score = pairs.score()
        assert score.n == len(pairs) > 100
        assert score.rmse == score.bias == 0.0
        assert score.slope == pytest.approx(1.0, abs=1e-12)
        assert score.correlation == pytest.approx(1.0, abs=1e-12)


def test_a_map_that_is_scaled_has_that_slope(ours: MapSource) -> None:
    for pairs in compare_maps(MapSource("scaled", density_map(1.7)), ours, RAYS):
        score = pairs.score()
        assert score.slope == pytest.approx(1.7, rel=1e-6)
        assert score.correlation == pytest.approx(1.0, rel=1e-6)
        assert score.bias == pytest.approx(0.7 * pairs.theirs.mean(), rel=1e-5)


def test_systems_are_converted(ours: MapSource) -> None:
    factor = conversion(system_named("A_V"), system_named("E(ZGR23)"))
    theirs = MapSource("theirs", density_map(factor, "E(ZGR23)"))
    for pairs in compare_maps(ours, theirs, RAYS):
        assert pairs.system.name == "A_V"
        np.testing.assert_allclose(pairs.theirs, pairs.ours, rtol=1e-5)
    with pytest.raises(ValueError, match="custom system, which converts to nothing"):
        compare_maps(ours, MapSource("own", density_map(system="custom:mine")), RAYS)


def test_segments_add_up_to_the_integral_of_the_map(ours: MapSource) -> None:
    """The rule steps over the cells' faces; `DustMap.query` is exact."""
    whole, part = ours.extinctions(RAYS).sum(-1), RAYS.coordinates(EDGES[-1:])[:, 0]
    exact = ours.density.query(part, integrated=True)
    inside = np.isfinite(exact)
    assert 4 <= inside.sum() < len(exact)
    np.testing.assert_allclose(whole[inside], exact[inside], rtol=2e-3)
    assert np.isnan(whole[~inside]).all()


def test_segments_of_levels_are_as_fine_as_the_finest(tmp_path: Path) -> None:
    """Against `DustMap.query` within 1 %, where steps of half the coarsest voxel leave 2 %."""
    asked = MapRequest((Quantity.MEAN,))
    slabs = Slabs.of_field(field(), NESTED.outer, asked, NESTED.grids[1:])
    write_map(tmp_path / "map.zarr", slabs, PROVENANCE)
    density = DustMap.open(tmp_path / "map.zarr")
    edges = np.array([0.0, 20.0, 40.0])
    near = Segments.of_pixels(8, edges)
    coords = near.coordinates(edges)
    exact = np.diff(density.query(coords, integrated=True), axis=-1)
    found = MapSource("levels", density).extinctions(near)
    known = np.isfinite(found) & np.isfinite(exact)
    assert known.sum() > 100
    apart = np.abs(found - exact)[known] / exact[known]
    assert apart.max() < 0.01


@dataclass(frozen=True, eq=False)
class Entered(AbstractSource):
    """A map that knows ray n from segment n mod 5 on, as one of a box without the Sun."""

    whole: MapSource

    @property
    def system(self) -> ExtinctionSystem:
        return self.whole.system

    def extinctions(self, segments: Segments) -> Floats:
        values = self.whole.extinctions(segments)
        first = np.arange(len(values))[:, None] % 5
        return np.where(np.arange(values.shape[1]) < first, np.nan, values)


def test_integrals_of_a_ray_begin_where_both_maps_have_it(ours: MapSource) -> None:
    entered = Entered("entered", ours)
    integrated, _ = compare_maps(ours, entered, RAYS)
    values = entered.extinctions(RAYS)
    assert len(integrated) == np.isfinite(values).sum() > 100
    expected = np.nancumsum(values, axis=1)[np.isfinite(values)]
    np.testing.assert_allclose(integrated.ours, expected, rtol=1e-6)
    np.testing.assert_allclose(integrated.theirs, expected, rtol=1e-6)


def test_scores_by_hand() -> None:
    x, y = np.array([0.0, 1.0, 2.0, 5.0]), np.array([1.0, 0.0, 4.0, 7.0])
    score = Score.of(x, y)
    fit = np.polyfit(x, y, 1)
    assert score.rmse == pytest.approx(math.sqrt((1 + 1 + 4 + 4) / 4))
    assert score.bias == pytest.approx(1.0)
    assert score.slope == pytest.approx(fit[0])
    assert score.correlation == pytest.approx(np.corrcoef(x, y)[0, 1])
    none, one = Score.of(x[:0], y[:0]), Score.of(x[:1], y[:1])
    assert none.n == 0
    assert math.isnan(none.rmse)
    assert one.rmse == 1.0
    assert math.isnan(one.slope)


def test_every_pair_is_in_one_bin_of_distance_and_one_of_latitude(ours: MapSource) -> None:
    pairs = compare_maps(ours, ours, RAYS)
    table = score_table(pairs)
    for one in pairs:
        rows = table[table["quantity"] == one.kind]
        for what in ("all", "distance", "latitude"):
            assert rows["n"][rows["bin"] == what].sum() == len(one)
    assert set(table["unit"]) == {"mag", "mag / pc"}
    assert table.meta["EXTSYS"] == "A_V"


@pytest.mark.parametrize("count", [5, 6, 7, 13])
def test_bins_are_of_whole_segments(ours: MapSource, count: int) -> None:
    """Each has as many segments as another or one more, and none is empty."""
    cut = 10.0 * np.arange(count + 1.0)
    pairs = compare_maps(ours, ours, Segments.of_pixels(4, cut))
    edges = distance_edges(pairs)
    held = [int(((cut[1:] > low) & (cut[1:] <= high)).sum()) for low, high in pairwise(edges)]
    assert set(edges) <= set(cut)
    assert sum(held) == count
    assert max(held) - min(held) <= 1
    for one in pairs:
        found = [
            (low, high, part) for what, low, high, part in one.bins(edges) if what == "distance"
        ]
        assert len(found) == min(count, 6)
        ends = one.kind == INTEGRATED
        for low, high, part in found:
            inside = cut[(cut >= low) & (cut <= high)]
            where = inside[1:] if ends else 0.5 * (inside[1:] + inside[:-1])
            assert set(part.distance) == set(where)


def test_stars_and_maps_share_bins(ours: MapSource) -> None:
    pairs = compare_maps(ours, ours, Segments.of_pixels(4, 40.0 * np.arange(4.0)))
    values, away = np.ones(3), np.array([0.0, 70.0, 150.0])
    stars = Pairs("stars", INTEGRATED, system_named("A_V"), values, values, away, np.zeros(3))
    assert distance_edges([*pairs, stars]) == [0.0, 40.0, 80.0, 120.0, 150.0]
    assert distance_edges([stars]) == pytest.approx([0.0, 25.0, 50.0, 75.0, 100.0, 125.0, 150.0])


def test_what_one_of_them_does_not_know_is_left_out() -> None:
    theirs = np.array([[1.0, np.nan], [2.0, 3.0]])
    mine = np.array([[1.0, 1.0], [np.nan, 4.0]])
    places = np.full((2, 2), 10.0), np.zeros((2, 2))
    pairs = Pairs("a", "integrated", system_named("A_V"), theirs, mine, *places).known()
    assert pairs.theirs.tolist() == [1.0, 3.0]
    assert pairs.ours.tolist() == [1.0, 4.0]


def bayestar(path: Path) -> str:
    write_bayestar(path, FIELD, BayestarOptions(32, samples=4), PROVENANCE)
    return "bayestar"


def edenhofer2023(path: Path, system: str = "E(ZGR23)") -> str:
    options = EdenhoferOptions(RadialBins(40.0, 300.0, 100), 32, system=system_named(system))
    write_edenhofer2023(path, FIELD, options, PROVENANCE)
    with fits.open(path, mode="update") as units:  # as the published file, which has no such card
        for unit in units:
            if system != "A_V" and "EXTSYS" in unit.header:
                del unit.header["EXTSYS"]
    return "edenhofer2023"


def own_export(path: Path) -> str:
    """Ours in that layout: in its own system, which its header names."""
    return edenhofer2023(path, "A_V")


def leike_ensslin_2019(path: Path) -> str:
    """256³ voxels of 600/256 pc, of which dustmaps takes those that begin at whole parsecs.

    Written within 150 pc of the Sun along each axis.
    """
    centres = (np.arange(256) + 0.5) * 600.0 / 256.0 - 300.0
    near = slice(64, 192)
    x, y, z = np.meshgrid(*(centres[near],) * 3, indexing="ij")
    per_kpc = 1e3 * conversion(system_named("A_V"), system_named("e-folding_G"))
    mean = np.full((256, 256, 256), np.nan, np.float32)
    mean[near, near, near] = per_kpc * FIELD.density(np.stack([x, y, z], axis=-1))
    with h5py.File(path, "w") as file:
        file["mean"], file["std"] = mean, np.empty(0)
    return "leike_ensslin_2019"


def columns(l: Floats, b: Floats, distance: Floats, system: str) -> Floats:
    """A(<d) of the field in a system, (N, D)."""
    rays = Segments(l, b, distance)
    ends = rays.coordinates(distance).cartesian.xyz.to_value(u.pc)
    flat = ends.reshape(3, -1).T
    total = FIELD.integral(np.zeros_like(flat), flat).reshape(len(l), len(distance))
    return total * conversion(system_named("A_V"), system_named(system))


def iphas(path: Path) -> str:
    """Pixels nearer to each other than half a degree; here they are the rays themselves."""
    distance = np.linspace(10.0, 300.0, 59)
    kind = [("l", "f4"), ("b", "f4"), ("dist", "f4", (59,)), ("A0", "f4", (59, 2))]
    table = np.empty(len(RAYS.l), kind)
    table["l"], table["b"], table["dist"] = RAYS.l, RAYS.b, distance
    total = columns(RAYS.l, RAYS.b, distance, "A0_550")
    table["A0"] = total[..., None] * np.array([0.9, 1.1])
    with h5py.File(path, "w") as file:
        file["samples"] = table
    return "iphas"


def marshall(path: Path) -> str:
    """Quarters of a degree from l = −100° on and within 10 degrees of the plane; 20 degrees."""
    l, b = np.meshgrid(np.arange(81) / 4 - 100.0, np.arange(81) / 4 - 10.0, indexing="ij")
    distance = np.linspace(10.0, 300.0, 30)
    total = columns(l.ravel() + 0.125, b.ravel() + 0.125, distance, "A_Ks").reshape(81, 81, 30)
    away = np.broadcast_to(1e-3 * distance, total.shape)
    held = {"l": l, "b": b, "A": total, "sigma_A": 0 * total, "dist": away, "sigma_dist": 0 * away}
    with h5py.File(path, "w") as file:
        for name, values in held.items():
            file[name] = values.astype(np.float32)
    return "marshall"


@pytest.mark.parametrize(
    "published",
    [bayestar, edenhofer2023, own_export, leike_ensslin_2019, iphas, marshall],
    ids=lambda maker: maker.__name__,
)
def test_published_layouts_of_the_same_dust(
    published: "type", ours: MapSource, tmp_path: Path
) -> None:
    """Pixels and bins of each layout leave some per cent; a wrong unit would be a factor."""
    path = tmp_path / ("map.fits" if published in (edenhofer2023, own_export) else "map.h5")
    name = published(path)
    rays = RAYS
    if published is marshall:  # in the plane
        l, b = np.meshgrid(np.arange(-99.0, -80.0, 3.0), np.arange(-8.0, 9.0, 4.0))
        rays = Segments(l.ravel(), b.ravel(), EDGES)
    integrated, differential = compare_maps(ours, published_source(name, path), rays)
    for pairs, low in ((integrated, 0.96), (differential, 0.9)):
        score = pairs.score()
        assert score.n > 200
        assert low < score.slope < 2.0 - low, (name, pairs.kind, score)
        assert score.correlation > 0.97, (name, pairs.kind, score)
        assert abs(score.bias) < 0.04 * pairs.theirs.mean()


def test_a_small_corner_of_leikes_box(tmp_path: Path) -> None:
    """A million voxels of 740 × 740 × 540 suffice: a box about the Sun, with a cloud in it."""
    field = AnalyticField((Cloud(place(90.0, 0.0, 25.0), 9.0, 2e-2),), 2e-3, LITTLE)
    write_leike2020(tmp_path / "map.h5", field, LeikeOptions((420, 430, 310)), PROVENANCE)
    grid = RegularGrid((-42.0, -45.0, -36.0), (3.0,) * 3, (29, 34, 25))
    own = MapSource(
        "own", DustMap.from_nodes(grid, field.density(grid.points().numpy()), None, "A_V")
    )
    rays = Segments.of_pixels(8, 5.0 * np.arange(9.0))
    for pairs in compare_maps(own, published_source("leike2020", tmp_path / "map.h5"), rays):
        score = pairs.score()
        assert score.n > 5000
        assert score.slope == pytest.approx(1.0, abs=0.05)
        assert score.correlation > 0.98


def test_integrals_start_where_the_other_map_does(ours: MapSource, tmp_path: Path) -> None:
    """Edenhofer's map has nothing nearer than its first bin."""
    path = tmp_path / "map.fits"
    integrated, _ = compare_maps(ours, published_source(edenhofer2023(path), path), RAYS)
    first = integrated.distance.min()
    assert first == 60.0  # the segment from 40 pc
    near = integrated.ours[integrated.distance == first]
    assert near.max() < 1.6 * 20.0 * 2e-3  # one segment of thin dust, and not three


def test_other_queries_by_their_class(ours: MapSource, tmp_path: Path) -> None:
    path = tmp_path / "map.h5"
    marshall(path)
    source = published_source("dustmaps.marshall.MarshallQuery", path, "A_Ks")
    assert source.system.name == "A_Ks"
    with pytest.raises(ValueError, match="state the extinction system"):
        published_source("dustmaps.marshall.MarshallQuery", path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bayestart", "expected a run, a map, one of bayestar"),
        ("dustmaps.none.Query", "no Query here"),
        ("iphas", "fetch them with dustmaps.iphas.fetch"),
    ],
)
def test_what_cannot_be_opened_is_said(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        published_source(name, tmp_path / "none.h5", "A_V")


def test_maps_that_share_no_place_are_refused(ours: MapSource) -> None:
    far = RegularGrid((500.0, 0.0, 0.0), (10.0,) * 3, (3,) * 3)
    other = DustMap.from_arrays(far, {Quantity.MEAN: np.ones((3, 3, 3), np.float32)}, "A_V")
    with pytest.raises(ValueError, match="no segment of a ray up to 240 pc"):
        compare_maps(ours, MapSource("far", other), RAYS)
    with pytest.raises(ValueError, match="nside: expected a power of two, 1 to 8192, got 3"):
        Segments.of_pixels(3, EDGES)
