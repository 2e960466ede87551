"""Maps as xarray: cubes, lines of sight and HEALPix shells say what queries say."""

import astropy.units as u
import healpy
import numpy as np
import pytest
from astropy.coordinates import SkyCoord

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky.maps import DustMap, MapRequest, Quantity
from tests.sky.maps.fields import A_V, NODES, node_field

GRID = RegularGrid((-100.0, -100.0, -60.0), (20.0, 20.0, 20.0), (11, 11, 7))
MAP = DustMap.from_field(node_field(), NODES, MapRequest(tuple(Quantity), samples=6))


def uniform(rho: float) -> DustMap:
    one = np.ones((7, 11, 11), np.float32)
    arrays = {Quantity.MEAN: rho * one, Quantity.STD: 0.1 * rho * one}
    return DustMap.from_arrays(GRID, arrays, "A_V")


def towards(l: float, b: float) -> SkyCoord:
    return SkyCoord(l=l * u.deg, b=b * u.deg, frame="galactic")


def test_cubes_are_those_of_the_map_and_have_the_names_of_its_zarr() -> None:
    found = MAP.to_xarray()
    assert found.density_mean.dims == ("z", "y", "x")
    assert found.sizes["sample"] == 6
    for quantity in MAP.available:
        name = "coverage" if quantity is Quantity.COVERAGE else f"density_{quantity.value}"
        held = found[name].values if quantity is not Quantity.SAMPLES else found[name].values[3]
        sample = 3 if quantity is Quantity.SAMPLES else 0
        np.testing.assert_array_equal(held, MAP.cube(quantity, sample))
    assert found.density_mean.attrs["units"] == "mag.pc-1"


def test_a_profile_is_what_queries_along_the_line_are() -> None:
    inside = SkyCoord(
        l=[20] * 3 * u.deg, b=[5] * 3 * u.deg, distance=[5, 10, 15] * u.pc, frame="galactic"
    )
    if not MAP.contains(inside).all():
        pytest.fail("the places must lie in the map")
    found = MAP.profile(towards(20, 5), [5, 10, 15] * u.pc)
    for what, integrated in (("density", False), ("extinction", True)):
        np.testing.assert_allclose(found[f"{what}_mean"], MAP.query(inside, integrated=integrated))
        std = MAP.query(inside, "std", integrated=integrated)
        np.testing.assert_allclose(found[f"{what}_std"], std)
        low, high = MAP.query(inside, "percentile", [16, 84], integrated).T
        np.testing.assert_allclose(found[f"{what}_p16"], low)
        np.testing.assert_allclose(found[f"{what}_p84"], high)


def test_a_profile_goes_to_the_face_of_the_map() -> None:
    found = uniform(0.002).profile(towards(0, 0))
    assert found.distance.values[0] == pytest.approx(0.0, abs=1e-6)
    assert found.distance.values[-1] == pytest.approx(100.0)
    assert np.diff(found.distance.values).max() <= 10.0 + 1e-9
    np.testing.assert_allclose(found.extinction_mean, 0.002 * found.distance, rtol=1e-5, atol=1e-9)
    assert "extinction_std" not in found  # it needs samples


def test_shells_are_in_healpix() -> None:
    found = uniform(0.002).to_healpix(4, [20, 50] * u.pc)
    assert found.extinction_mean.shape == (2, healpy.nside2npix(4))
    np.testing.assert_allclose(found.extinction_mean[1], 0.1, rtol=1e-5)
    density = uniform(0.002).to_healpix(4, 50 * u.pc, integrated=False)
    np.testing.assert_allclose(density.density_std, 0.0002, rtol=1e-5)


@pytest.mark.parametrize("nest", [False, True])
def test_pixels_are_where_healpy_says(nest: bool) -> None:
    x = np.broadcast_to(GRID.axes()[0].numpy(), (7, 11, 11)).astype(np.float32)
    gradient = DustMap.from_arrays(GRID, {Quantity.MEAN: x}, "A_V")
    found = gradient.to_healpix(2, 30 * u.pc, integrated=False, nest=nest).density_mean[0]
    wanted = 30 * np.array(healpy.pix2vec(2, np.arange(48), nest=nest))[0]
    np.testing.assert_allclose(found, wanted, atol=1e-3)


def test_bad_questions_are_refused() -> None:
    plain = uniform(0.002)
    with pytest.raises(UserError, match="a unit"):
        plain.profile(towards(0, 0), np.array([10.0]))
    with pytest.raises(UserError, match="one direction"):
        plain.profile(SkyCoord(l=[0, 1] * u.deg, b=[0, 1] * u.deg, frame="galactic"))
    with pytest.raises(UserError, match="power of two"):
        plain.to_healpix(3, 10 * u.pc)
    with pytest.raises(UserError, match="0 or more"):
        plain.to_healpix(2, -10 * u.pc)
    off = DustMap.from_arrays(
        RegularGrid((100.0,) * 3, (10.0,) * 3, (3,) * 3),
        {Quantity.MEAN: np.ones((3, 3, 3), np.float32)},
        A_V,
    )
    with pytest.raises(UserError, match="does not meet"):
        off.profile(towards(180, 0))
