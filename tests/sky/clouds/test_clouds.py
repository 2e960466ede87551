"""Clouds of known mass, place and extent, in densities and samples made by hand."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from astropy import units as u
from astropy.table import QTable
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky import galactic
from dustmap.sky.clouds import Clouds, Criteria, NamedPlaces, find_clouds, solar_masses
from dustmap.sky.clouds._clouds import default_threshold
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.maps._between import CellVariance
from dustmap.sky.systems import system_named
from dustmap.tables import write_table

Floats = NDArray[np.float32]

GRID = RegularGrid((-200.0, -160.0, -80.0), (5.0, 8.0, 4.0), (81, 41, 41))
FLOOR, PEAK, SIGMA = 1e-4, 0.02, 16.0
CENTRE = np.array([91.0, -43.0, 22.0])
AT = Criteria(0.004)


def ball(centre: NDArray[np.float64] = CENTRE, peak: float = PEAK) -> Floats:
    """A Gaussian ball (z, y, x) without a floor."""
    points = GRID.points().numpy().reshape(*GRID.shape, 3).transpose(2, 1, 0, 3)
    r2 = ((points - centre) ** 2).sum(-1)
    return np.asarray(peak * np.exp(-0.5 * r2 / SIGMA**2), np.float32)


def clouds_of(mean: Floats, samples: list[Floats] | None = None, system: str = "A_V") -> Clouds:
    arrays = {Quantity.MEAN: FLOOR + mean}
    if samples:
        arrays[Quantity.SAMPLES] = FLOOR + np.stack(samples)
    return find_clouds(DustMap.from_arrays(GRID, arrays, system), AT)


def ball_within(peak: float) -> tuple[float, float]:
    """Radius in pc at which a ball on the floor falls to the threshold, and ∫ρ dV within."""
    s = math.sqrt(2.0 * math.log(peak / (AT.threshold - FLOOR)))
    share = math.erf(s / math.sqrt(2.0)) - math.sqrt(2.0 / math.pi) * s * math.exp(-0.5 * s * s)
    volume = 4.0 / 3.0 * math.pi * (s * SIGMA) ** 3
    return s * SIGMA, peak * (2.0 * math.pi) ** 1.5 * SIGMA**3 * share + FLOOR * volume


def test_a_ball_has_its_place_extent_peak_and_mass() -> None:
    """The surface cuts voxels of 5 × 8 × 4 pc: 3 % in volume."""
    (row,) = clouds_of(ball()).table()
    radius, dust = ball_within(PEAK)
    for axis, value in zip("xyz", CENTRE, strict=True):
        assert row[axis].to_value(u.pc) == pytest.approx(value, abs=0.3)
    l, b, distance = galactic(CENTRE)
    assert row["l"].to_value(u.deg) == pytest.approx(float(l), abs=0.2)
    assert row["b"].to_value(u.deg) == pytest.approx(float(b), abs=0.2)
    assert row["distance"].to_value(u.pc) == pytest.approx(float(distance), abs=0.3)
    assert row["radius"].to_value(u.pc) == pytest.approx(radius, rel=0.01)
    nearest = PEAK * math.exp(-0.5 * (1.0 + 9.0 + 4.0) / SIGMA**2)  # the voxel at (90, -40, 20)
    peak = row["peak_density"].to_value(u.mag / u.pc)
    assert peak == pytest.approx(nearest + FLOOR, rel=1e-5)
    assert row["mass"].to_value(u.Msun) == pytest.approx(20.5 * dust, rel=0.03)
    assert not row["at_face"]
    assert np.isnan(row["probability"])
    assert np.isnan(row["distance_std"])


def test_gas_of_a_magnitude() -> None:
    """1.87·10²¹ atoms of hydrogen a cm², of 1.37 × 1.674·10⁻²⁴ g each."""
    grams = 1.87e21 * 1.37 * 1.6737e-24 * (3.0857e18) ** 2
    assert solar_masses(system_named("A_V")) == pytest.approx(grams / 1.98841e33, rel=1e-3)
    ratio = solar_masses(system_named("E(ZGR23)")) / solar_masses(system_named("A_V"))
    assert ratio == pytest.approx(2.8)
    assert math.isnan(solar_masses(system_named("custom:mine")))


def test_mass_does_not_depend_on_the_system() -> None:
    ours = clouds_of(ball()).table()["mass"][0]
    density = DustMap.from_arrays(GRID, {Quantity.MEAN: (FLOOR + ball()) / 2.8}, "E(ZGR23)")
    theirs = find_clouds(density, Criteria(AT.threshold / 2.8)).table()["mass"][0]
    assert theirs.to_value(u.Msun) == pytest.approx(ours.to_value(u.Msun), rel=1e-4)
    assert np.isnan(clouds_of(ball(), system="custom:mine").table()["mass"][0])


def test_a_constant_map_has_no_clouds() -> None:
    table = clouds_of(0.0 * ball(), [0.0 * ball()] * 3).table()
    assert len(table) == 0
    assert "distance_std" in table.colnames
    flat = DustMap.from_arrays(GRID, {Quantity.MEAN: 0.0 * ball() + 1.0}, "A_V")
    assert len(find_clouds(flat)) == 0  # three times the mean is nowhere


@pytest.mark.parametrize(
    ("criteria", "why"),
    [
        (
            Criteria(0.1),
            "densest voxel has 0.0196 mag/pc, contrast 1.5 times threshold 0.1 is 0.15",
        ),
        (Criteria(0.004, voxels=10_000), "no region of 0.004 mag/pc or more .* has 10000 voxels"),
    ],
)
def test_a_map_without_clouds_says_why(
    criteria: Criteria, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    density = DustMap.from_arrays(GRID, {Quantity.MEAN: FLOOR + ball()}, "A_V")
    assert len(find_clouds(density, criteria)) == 0
    assert re.search(why, caplog.text)


def test_balls_nearer_than_a_voxel_are_one_cloud_and_far_ones_two() -> None:
    near, far = CENTRE + np.array([3.0, 0.0, 0.0]), CENTRE - np.array([120.0, 0.0, 0.0])
    assert len(clouds_of(ball() + ball(near))) == 1
    table = clouds_of(ball() + 0.8 * ball(far)).table()
    assert len(table) == 2
    np.testing.assert_allclose(table["x"].to_value(u.pc), [CENTRE[0], far[0]], atol=0.5)


def test_the_probability_is_the_share_of_samples_that_have_it() -> None:
    there, none = ball(peak=0.04), 0.0 * ball()
    samples = [there] * 3 + [none] * 7
    clouds = clouds_of(0.3 * there, samples)
    assert clouds.probability.tolist() == [0.3]
    elsewhere = [ball(CENTRE - (180.0, 0.0, 0.0))] * 7  # no overlap
    assert clouds_of(0.3 * there, [there] * 3 + elsewhere).probability.tolist() == [0.3]


def test_errors_are_those_of_the_samples() -> None:
    """Moved along its line of sight, with peaks and so masses in proportion."""
    rng = np.random.default_rng(1)
    shifts, factors = 6.0 * rng.standard_normal(12), np.exp(0.2 * rng.standard_normal(12))
    ahead = CENTRE / np.linalg.norm(CENTRE)
    samples = [ball(CENTRE + s * ahead, f * PEAK) for s, f in zip(shifts, factors, strict=True)]
    mean = np.mean(samples, axis=0)
    (row,) = clouds_of(mean, samples).table()
    assert row["probability"] == 1.0
    cell = ahead * GRID.spacing / np.sqrt(6.0)  # where between nodes it is no sample knows
    expected = np.sqrt(np.var(shifts, ddof=1) + cell @ cell)
    assert row["distance_std"].to_value(u.pc) == pytest.approx(expected, rel=0.03)
    along_x = np.sqrt(np.var(shifts * ahead[0], ddof=1) + 5.0**2 / 6.0)
    assert row["x_std"].to_value(u.pc) == pytest.approx(along_x, rel=0.03)
    dust = [ball_within(f * PEAK)[1] for f in factors]
    expected = solar_masses(system_named("A_V")) * np.std(dust, ddof=1)
    assert row["mass_std"].to_value(u.Msun) == pytest.approx(expected, rel=0.05)
    peak = np.std(factors * PEAK, ddof=1)
    assert row["peak_density_std"].to_value(u.mag / u.pc) == pytest.approx(peak, rel=0.05)


def test_a_sample_in_pieces_is_still_one_cloud() -> None:
    """What the sample has within the basin counts, whatever maxima it has of its own."""
    rng = np.random.default_rng(2)
    rough = [ball() * np.exp(0.5 * rng.standard_normal(ball().shape)) for _ in range(4)]
    (row,) = clouds_of(ball(), [np.asarray(sample, np.float32) for sample in rough]).table()
    assert row["probability"] == 1.0
    assert row["distance_std"].to_value(u.pc) < 3.1  # of which 2.4 between nodes


def test_one_region_of_a_sample_is_divided_among_the_clouds_that_it_overlaps() -> None:
    far = CENTRE - (0.0, 0.0, 60.0)
    bridge = 0.6 * ball(CENTRE - (0.0, 0.0, 30.0))
    two = ball() + 0.8 * ball(far)
    table = clouds_of(two, [two + bridge, two, two + bridge, two]).table()
    assert table["probability"].tolist() == [1.0, 1.0]
    assert (table["distance_std"].to_value(u.pc) < 10.0).all()


def test_the_order_of_samples_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    samples = [ball(CENTRE + rng.normal(0, 5, 3), PEAK * rng.uniform(0.1, 2.0)) for _ in range(9)]
    mean = np.mean(samples, axis=0)
    tables = [
        clouds_of(mean, [samples[k] for k in order]).table()
        for order in (range(9), rng.permutation(9))
    ]
    for name in tables[0].colnames:
        assert np.asarray(tables[0][name]).tobytes() == np.asarray(tables[1][name]).tobytes(), name


def test_clouds_at_a_face_say_so() -> None:
    edge = np.array([GRID.upper[0], 0.0, 0.0])
    clouds = clouds_of(ball() + 0.8 * ball(edge))
    assert clouds.at_face.tolist() == [False, True]


def named(*rows: tuple[str, float, float, float]) -> NamedPlaces:
    names, l, b, distance = zip(*rows, strict=True)
    return NamedPlaces(names, np.array(l), np.array(b), np.array(distance))


def test_names_are_those_of_lines_through_the_cloud() -> None:
    l, b, d = (float(value) for value in galactic(CENTRE))
    density = DustMap.from_arrays(GRID, {Quantity.MEAN: FLOOR + ball()}, "A_V")
    places = named(
        ("Off", l + 60.0, b, math.nan),
        ("Rim", l + 8.0, b, math.nan),
        ("Heart", l, b, 1.1 * d),
        ("Behind", l, b, 2.0 * d),
    )
    clouds = find_clouds(density, AT, places)
    assert clouds.names == ("Heart; Rim",)
    np.testing.assert_allclose(clouds.name_distance, [1.1 * d])
    assert find_clouds(density, AT).names == ("",)


def test_a_line_names_the_cloud_with_most_extinction() -> None:
    """The nearer one is fainter; the distances are not asked."""
    near, far = np.array([60.0, 0.0, 0.0]), np.array([150.0, 0.0, 0.0])
    arrays = {Quantity.MEAN: FLOOR + ball(near, 0.01) + ball(far, 0.02)}
    density = DustMap.from_arrays(GRID, arrays, "A_V")
    clouds = find_clouds(density, AT, named(("A", 0.0, 0.0, math.nan)))
    assert clouds.names == ("A", "")
    assert clouds.mean.distance[0] == pytest.approx(150.0, abs=2.0)
    assert find_clouds(density, AT, named(("A", 0.0, 0.0, 65.0))).names == ("", "A")


def test_the_shipped_table_and_those_of_users(tmp_path: Path) -> None:
    known = NamedPlaces.read()
    assert len(known) == 163
    assert {"Taurus", "Ophiuchus", "Aquila Rift"} <= set(known.names)
    taurus = known.distance[[name == "Taurus" for name in known.names]]
    assert ((taurus > 120.0) & (taurus < 170.0)).all()
    (tmp_path / "mine.csv").write_text("name,l,b\nA,10,20\n")
    mine = NamedPlaces.read(tmp_path / "mine.csv")
    assert mine.names == ("A",)
    assert np.isnan(mine.distance).all()
    (tmp_path / "wrong.csv").write_text("l,b\n10,20\n")
    with pytest.raises(ValueError, match="expected the columns name, l, b"):
        NamedPlaces.read(tmp_path / "wrong.csv")


def test_unknown_voxels_are_refused() -> None:
    mean = ball()
    mean[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="1 of 136161 voxels have no density"):
        clouds_of(mean)
    with pytest.raises(ValueError, match="1 of 136161 voxels have no density"):
        default_threshold(DustMap.from_arrays(GRID, {Quantity.MEAN: mean}, "A_V"))


@pytest.mark.parametrize("name", ["clouds.ecsv", "clouds.fits"])
def test_the_table_is_kept_with_units(tmp_path: Path, name: str) -> None:
    clouds = clouds_of(ball(), [ball(), 0.8 * ball()])
    write_table(tmp_path / name, clouds.table())
    back = QTable.read(tmp_path / name)
    assert back["distance"].unit == u.pc
    assert back["mass"].unit == u.Msun
    assert back.meta["EXTSYS"] == "A_V"
    np.testing.assert_array_equal(back["distance"], clouds.table()["distance"])


def test_names_of_clouds_are_those_of_the_middle_of_their_lines() -> None:
    known = named(
        ("Taurus", 170.0, -15.0, 130.0),
        ("Taurus", 172.0, -15.5, 140.0),
        ("Taurus", 175.0, -16.0, 160.0),
        ("Corona Australis", 0.0, -18.0, 150.0),
    )
    assert known.place("taurus") == (172.0, -15.5, 140.0)
    assert known.place(" corona_Australis") == (0.0, -18.0, 150.0)
    with pytest.raises(UserError, match=r"'Tauri'.*the nearest names are Taurus"):
        known.place("Tauri")
    with pytest.raises(UserError, match="no name is near to it"):
        known.place("")


def test_errors_of_places_have_the_nodes_of_the_run() -> None:
    """Voxels of 5 × 8 × 4 pc between nodes 20 pc apart, and 10 pc apart near the Sun."""
    far = RegularGrid((-200.0, -160.0, -80.0), (20.0,) * 3, (21, 17, 9))
    near = RegularGrid((-60.0, -60.0, -40.0), (10.0,) * 3, (13, 13, 9))
    samples = [ball()] * 4
    arrays = {Quantity.MEAN: FLOOR + ball(), Quantity.SAMPLES: FLOOR + np.stack(samples)}
    for nodes, expected in (((far,), 20.0), ((far, near), 20.0), ((near,), None), ((), None)):
        between = tuple(CellVariance(grid, (0.0,) * 64) for grid in nodes)
        density = DustMap.from_arrays(GRID, arrays, "A_V", True, between)
        (row,) = find_clouds(density, AT).table()
        for axis, voxels in zip("xyz", GRID.spacing, strict=True):
            apart = voxels if expected is None else expected
            assert row[f"{axis}_std"].to_value(u.pc) == pytest.approx(apart / math.sqrt(6.0))


def test_a_cloud_around_the_sun_has_errors() -> None:
    (row,) = clouds_of(ball(np.zeros(3)), [ball(np.zeros(3))] * 2).table()
    assert np.isfinite(row["distance_std"].to_value(u.pc))
