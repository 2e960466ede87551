"""Slices and projections as arrays: the map's own numbers, the right way round."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.table import Table

from dustmap.gp import RegularGrid
from dustmap.sky.figures import CloudMarks
from dustmap.sky.figures._lines_of_sight import profile_of_map
from dustmap.sky.figures._planes import Axis, projection_figure, projection_of, slice_of
from dustmap.sky.figures._sky_images import Pixels, sky_image
from dustmap.sky.maps import DustMap, Quantity
from tests.sky.figures.clouds import GRID, cloud, posterior

LEVELS = {Axis.X: 20.0, Axis.Y: 40.0, Axis.Z: 5.0}


@pytest.mark.parametrize("axis", list(Axis))
def test_a_slice_is_the_plane_of_the_cube(axis: Axis) -> None:
    density = posterior()
    plane = slice_of(density, axis, LEVELS[axis])
    index = int((LEVELS[axis] - GRID.lower[axis.value]) / GRID.spacing[axis.value])
    of_cube = 2 - axis.value
    np.testing.assert_array_equal(plane.mean, density.mean.take(index, of_cube))
    assert density.std is not None
    assert plane.std is not None
    np.testing.assert_array_equal(plane.std, density.std.take(index, of_cube))
    assert plane.at == (LEVELS[axis], LEVELS[axis])


@pytest.mark.parametrize("axis", list(Axis))
def test_a_map_without_a_standard_deviation_has_that_of_its_samples(axis: Axis) -> None:
    """As `query` answers: log-normal, for the deviations of few draws miss the tail."""
    samples_alone = posterior(left_out=(Quantity.STD, Quantity.P16, Quantity.P84))
    found = slice_of(samples_alone, axis, LEVELS[axis]).std
    assert found is not None
    cubes = [samples_alone.cube(Quantity.SAMPLES, k) for k in range(samples_alone.n_samples)]
    logs = np.log(np.stack(cubes).astype(np.float64))
    mean, width = np.exp(logs).mean(0), logs.std(0)
    index = int((LEVELS[axis] - GRID.lower[axis.value]) / GRID.spacing[axis.value])
    expected = (mean * np.sqrt(np.expm1(width**2))).take(index, 2 - axis.value)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    places = places_of(samples_alone)
    asked = samples_alone.query(places, mode="std").reshape(mean.shape)
    np.testing.assert_allclose(found, asked.take(index, 2 - axis.value), rtol=1e-5)
    neither = posterior(left_out=(Quantity.STD, Quantity.SAMPLES))
    assert slice_of(neither, axis, LEVELS[axis]).std is None


@pytest.mark.parametrize("axis", list(Axis))
def test_a_cloud_is_up_and_right_by_its_coordinates(axis: Axis) -> None:
    place = np.array([20.0, 40.0, 5.0])
    plane = slice_of(cloud(*place), axis, LEVELS[axis])
    row, column = np.unravel_index(plane.mean.argmax(), plane.mean.shape)
    left, right, bottom, top = plane.extent
    across = left + (column + 0.5) * (right - left) / plane.mean.shape[1]
    up = bottom + (row + 0.5) * (top - bottom) / plane.mean.shape[0]
    assert (across, up) == pytest.approx(tuple(np.delete(place, axis.value)))


def test_pixels_reach_half_a_voxel_beyond_their_centres() -> None:
    assert slice_of(posterior(), Axis.Z, 0.0).extent == (-45.0, 45.0, -70.0, 70.0)
    assert slice_of(posterior(), Axis.X, 0.0).extent == (-70.0, 70.0, -12.5, 12.5)


def test_the_nearest_plane_is_taken_and_none_beyond_the_map() -> None:
    assert slice_of(posterior(), Axis.Z, 12.4).at == (10.0, 10.0)
    with pytest.raises(ValueError, match=r"y = 71 pc: expected -70 to 70 pc"):
        slice_of(posterior(), Axis.Y, 71.0)


@pytest.mark.parametrize("axis", list(Axis))
def test_a_projection_is_the_integral_of_the_linear_interpolant(axis: Axis) -> None:
    density = posterior()
    plane = projection_of(density, axis)
    h = GRID.spacing[axis.value]
    expected = np.trapezoid(density.mean.astype(np.float64), dx=h, axis=2 - axis.value)
    np.testing.assert_allclose(plane.mean, expected, rtol=1e-12)
    drawn = np.stack([density.cube(q, k) for q in density.available[-1:] for k in range(4)])
    columns = np.asarray(np.trapezoid(drawn.astype(np.float64), dx=h, axis=3 - axis.value))
    assert plane.std is not None
    odd, even = 0.5 * (columns[0::2] - columns[1::2]), 0.5 * (columns[0::2] + columns[1::2])
    variance = np.square(odd).mean(0) + even.var(0, ddof=1)  # of pairs
    np.testing.assert_allclose(plane.std, np.sqrt(variance), rtol=1e-10)
    assert plane.integrated
    assert plane.at == (GRID.lower[axis.value], GRID.upper[axis.value])


def test_columns_that_no_tile_has_are_no_prior() -> None:
    density = posterior()
    arrays = {q: density.cube(q).copy() for q in (Quantity.MEAN, Quantity.COVERAGE)}
    for cube in arrays.values():
        cube[:, 1, 2] = np.nan
    plane = projection_of(DustMap.from_arrays(GRID, arrays, "A_V"), Axis.Z)
    assert plane.coverage is not None
    np.testing.assert_array_equal(np.isnan(plane.coverage), np.isnan(plane.mean))
    assert np.isnan(np.asarray(plane.coverage)[1, 2])


def test_coverage_of_a_column_is_weighted_by_its_dust() -> None:
    density = posterior()
    plane = projection_of(density, Axis.X)
    rho = density.mean.astype(np.float64)
    coverage = np.linspace(0.0, 1.0, GRID.shape[0])
    expected = np.trapezoid(rho * coverage, axis=2) / np.trapezoid(rho, axis=2)
    assert plane.coverage is not None
    np.testing.assert_allclose(plane.coverage, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", list(Axis))
def test_the_truth_of_the_same_voxels_is_the_map_again(axis: Axis) -> None:
    density = posterior()
    plane = slice_of(density, axis, 0.0, density)
    assert plane.truth is not None
    np.testing.assert_allclose(plane.truth, plane.mean, rtol=1e-6)
    column = projection_of(density, axis, density)
    assert column.truth is not None
    np.testing.assert_allclose(column.truth, column.mean, rtol=1e-6)


@pytest.mark.parametrize("axis", list(Axis))
def test_a_truth_of_finer_voxels_is_integrated_by_its_own(axis: Axis) -> None:
    density, rng = posterior(), np.random.default_rng(7)
    spacing = tuple(h / 3.7 for h in GRID.spacing)
    shape = tuple(int(4 * count) + 3 for count in GRID.shape)
    fine = RegularGrid(tuple(low - 1.0 for low in GRID.lower), spacing, shape)
    truth = DustMap.from_nodes(fine, rng.lognormal(-6.0, 1.0, fine.size), None, "A_V")
    levels = np.linspace(GRID.lower[axis.value], GRID.upper[axis.value], 4001)
    right, up = (density.axes()[other.value] for other in axis.others)
    places = np.empty((len(levels), len(up), len(right), 3))
    places[..., axis.value] = levels[:, None, None]
    places[..., axis.others[0].value] = right
    places[..., axis.others[1].value] = up[:, None]
    values = truth.mean_at(places.reshape(-1, 3)).reshape(places.shape[:-1])
    column = projection_of(density, axis, truth).truth
    assert column is not None
    np.testing.assert_allclose(column, np.trapezoid(values, levels, axis=0), rtol=1e-4)


@pytest.mark.parametrize("axis", list(Axis))
def test_a_truth_in_another_system_is_converted(axis: Axis) -> None:
    density = posterior()
    arrays = {Quantity.MEAN: density.mean / 3.1}
    reddening = DustMap.from_arrays(density.grid, arrays, "E(B-V)")
    for plane in (slice_of(density, axis, 0.0, reddening), projection_of(density, axis, reddening)):
        assert plane.truth is not None
        np.testing.assert_allclose(plane.truth, plane.mean, rtol=1e-5)
    image = sky_image(density, 25.0, Pixels.around(10.0, 0.0, 5.0, 4), reddening, True)
    line = profile_of_map(density, 10.0, 0.0, reddening)
    for truth, mean in (
        (image.truth, image.mean),
        (line.true_density, line.density.mean),
        (line.true_extinction, line.extinction.mean),
    ):
        assert truth is not None
        np.testing.assert_allclose(truth, mean, rtol=1e-5)


@pytest.mark.parametrize("axis", list(Axis))
def test_a_map_of_samples_alone_shows_their_mean(axis: Axis) -> None:
    whole, draws = posterior(), posterior(left_out=tuple(set(Quantity) - {Quantity.SAMPLES}))
    assert draws.available == (Quantity.SAMPLES,)
    slices = [slice_of(density, axis, LEVELS[axis]).mean for density in (draws, whole)]
    columns = [projection_of(density, axis).mean for density in (draws, whole)]
    for found, wanted in (slices, columns):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_clouds_of_a_table_are_in_its_units(tmp_path: Path) -> None:
    table = Table({"l": [0.5], "b": [0.1], "distance": [0.14], "radius": [0.01]})
    for name, unit in {"l": "rad", "b": "rad", "distance": "kpc", "radius": "kpc"}.items():
        table[name].unit = unit
    table.write(tmp_path / "clouds.ecsv")
    marks = CloudMarks.read(tmp_path / "clouds.ecsv")
    assert np.linalg.norm(marks.places[0]) == pytest.approx(140.0)
    assert marks.radii[0] == pytest.approx(10.0)
    assert np.degrees(np.arctan2(*marks.places[0, [1, 0]])) == pytest.approx(np.degrees(0.5))


def test_what_a_map_does_not_hold_is_not_made_up() -> None:
    plane = projection_of(cloud(0.0, 0.0, 0.0), Axis.Z)
    assert plane.std is None
    assert plane.coverage is None
    assert plane.truth is None


def test_names_of_clouds_cover_neither_each_other_nor_the_sun() -> None:
    rng = np.random.default_rng(1)
    places = np.concatenate([np.zeros((3, 3)), rng.uniform(-35.0, 35.0, (9, 3))])
    names = tuple(f"Cloud {k}" for k in range(len(places)))
    marks = CloudMarks(places, np.full(len(places), 8.0), names)
    figure = projection_figure(posterior(), Axis.Z, clouds=marks)
    figure.canvas.draw()
    words = [text for text in figure.axes[0].texts if text.get_text() in {*names, "Sun"}]
    boxes = [text.get_window_extent() for text in words]
    assert 4 <= len(boxes) <= 1 + len(names)
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def places_of(density: DustMap) -> SkyCoord:
    """The voxels' centres [z, y, x]."""
    x, y, z = density.axes()
    grid = np.stack(np.meshgrid(z, y, x, indexing="ij"), axis=-1)[..., ::-1].reshape(-1, 3)
    return SkyCoord(*(grid * u.pc).T, frame="galactic", representation_type="cartesian")
